"""Environments made from another one: a single task of it, or the same one with its hidden task revealed."""

from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp

from safeicrl.envs.api import Env, EnvSpec, Key, PyTree, Split, Step, check_split
from safeicrl.envs.registry import make_env, parse_parameters
from safeicrl.envs.spaces import Box
from safeicrl.errors import UserError, check_number, check_seed


@dataclass(frozen=True)
class Wrapped:
    """Another environment, given by name, so that a policy's card can store this one and rebuild it."""

    name: str = "safe-dark-room"  # of the environment
    args: tuple[str, ...] = ()  # its parameters, e.g. size=5 obstacles=6

    def __post_init__(self) -> None:
        if isinstance(self.inner, Wrapped):  # `inner` also refuses an unknown name or parameter
            raise UserError(f"{self.what} must be made from another environment, not from {self.name}")
        if hasattr(self.inner, "restart"):
            raise UserError(f"{self.what} must be made from an environment in JAX; {self.name} is one of Gymnasium")

    @property
    def what(self) -> str:
        """Its name in messages."""
        raise NotImplementedError

    @cached_property
    def inner(self) -> Env:
        """The other environment."""
        return make_env(self.name, **parse_parameters(self.args, self.what))

    @property
    def spec(self) -> EnvSpec:
        """The environment's own."""
        return self.inner.spec

    @property
    def approximation(self) -> str | None:
        """The environment's own, if it has one."""
        return getattr(self.inner, "approximation", None)

    def sample_task(self, key: Key, split: Split) -> PyTree:
        """The environment's own."""
        return self.inner.sample_task(key, split)

    def reset(self, key: Key, task: PyTree) -> tuple[PyTree, jax.Array]:
        """The environment's own."""
        return self.inner.reset(key, task)

    def step(self, key: Key, state: PyTree, action: jax.Array, task: PyTree) -> tuple[PyTree, Step]:
        """The environment's own."""
        return self.inner.step(key, state, action, task)

    def task_features(self, task: PyTree) -> jax.Array:
        """The environment's own."""
        return self.inner.task_features(task)


@dataclass(frozen=True)
class FixedTask(Wrapped):
    """A single task of another environment, with a single cost limit: an ordinary CMDP."""

    task_seed: int = 0  # which task
    split: Split = "train"  # of which distribution
    limit: float = 5.0  # on an episode's cost

    def __post_init__(self) -> None:
        check_seed(self.task_seed, "task_seed")
        check_number("limit", self.limit, 0.0)
        check_split(self.split)
        super().__post_init__()

    @property
    def what(self) -> str:
        """Its name in messages."""
        return "a fixed task"

    @property
    def spec(self) -> EnvSpec:
        """The environment's own, with the one limit as its budget."""
        return replace(self.inner.spec, train_budget=(self.limit, self.limit), test_budget=(self.limit, self.limit))

    def sample_task(self, key: Key, split: Split) -> PyTree:
        """The one task, for any key and split."""
        return self.inner.sample_task(jax.random.key(self.task_seed), self.split)


@dataclass(frozen=True)
class Revealed(Wrapped):
    """Another environment whose observations end with the hidden task, for the privileged baseline.

    Tasks, budgets, rewards and costs are those of the other environment, so both are evaluated on the same tasks.
    """

    name: str = "safe-dark-point"  # of the environment; its observations must be real vectors
    args: tuple[str, ...] = ()  # its parameters, e.g. hazards=4 max_steps=50

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.inner.spec.observation, Box):
            raise UserError(
                f"{self.what} needs observations that are real vectors, but {self.name} has cells of a grid; "
                "there the planner is the upper baseline (--agent planner)"
            )

    @property
    def what(self) -> str:
        """Its name in messages."""
        return "a revealed task"

    @property
    def spec(self) -> EnvSpec:
        """The environment's own, with longer observations."""
        own = self.inner.spec
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
