"""An environment that tells its hidden task: what an agent reaches that has nothing left to find out."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from safeicrl.envs.api import Box, EnvSpec, Key, PyTree, Step, replace
from safeicrl.envs.wrapped import Wrapped
from safeicrl.errors import UserError


@dataclass(frozen=True)
class Revealed(Wrapped):
    """Another environment whose observations end with the hidden task: for the privileged reference line.

    Tasks, budgets, rewards and costs are the other's own, so that both are evaluated on the same ones.
    """

    name: str = "safe-dark-point"  # of the environment; its observations must be real vectors
    args: tuple[str, ...] = ()  # its parameters, e.g. hazards=4 max_steps=50

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.inner.spec.observation, Box):
            raise UserError(
                f"{self.what} needs observations that are real vectors, {self.name} has a grid's cells; "
                "there the planner is the line above (--agent planner)"
            )

    @property
    def what(self) -> str:
        """What it is called in a message."""
        return "a revealed task"

    @property
    def spec(self) -> EnvSpec:
        """The environment's own, with longer observations."""
        own = self.inner.spec
        assert isinstance(own.observation, Box)
        return replace(own, observation=Box(own.observation.size + own.task_features))  # tasks have no bounds

    def reset(self, key: Key, task: PyTree) -> tuple[PyTree, jax.Array]:
        """The environment's own, and the task."""
        state, observation = self.inner.reset(key, task)
        return state, self._tell(observation, task)

    def step(self, key: Key, state: PyTree, action: jax.Array, task: PyTree) -> tuple[PyTree, Step]:
        """The environment's own, and the task."""
        state, step = self.inner.step(key, state, action, task)
        return state, replace(step, observation=self._tell(step.observation, task))

    def _tell(self, observation: jax.Array, task: PyTree) -> jax.Array:
        features = self.inner.task_features(task).astype(observation.dtype)
        return jnp.concatenate([observation, features])
