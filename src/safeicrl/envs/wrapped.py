"""What environments made of another one share: its name, its parameters, and every method passed on."""

from dataclasses import dataclass
from functools import cached_property

import jax

from safeicrl.envs.api import Env, EnvSpec, Key, PyTree, Split, Step
from safeicrl.errors import UserError


@dataclass(frozen=True)
class Wrapped:
    """Another environment by its name, so that a policy's card can name this one and build it again."""

    name: str = "safe-dark-room"  # of the environment
    args: tuple[str, ...] = ()  # its parameters, e.g. size=5 obstacles=6

    def __post_init__(self) -> None:
        if isinstance(self.inner, Wrapped):  # an unknown name or parameter is told here too
            raise UserError(f"{self.what} must be one of another environment, not of {self.name}")

    @property
    def what(self) -> str:
        """What it is called in a message."""
        raise NotImplementedError

    @cached_property
    def inner(self) -> Env:
        """The other environment."""
        from safeicrl.envs.registry import make_env, parse_parameters  # here: the registry knows this class

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
