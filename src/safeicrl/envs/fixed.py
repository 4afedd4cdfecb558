"""One task of an environment as an environment of its own: what an ordinary safe learner learns."""

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from safeicrl.envs.api import Env, EnvSpec, Key, PyTree, Split, Step, check_split
from safeicrl.errors import UserError, check_integer, check_number


@dataclass(frozen=True)
class FixedTask:
    """A single task of another environment, with a single cost limit: an ordinary CMDP."""

    name: str = "safe-dark-room"  # of the environment
    args: tuple[str, ...] = ()  # its parameters, e.g. size=5 obstacles=6
    task_seed: int = 0  # which task
    split: Split = "train"  # of which distribution
    limit: float = 5.0  # on an episode's cost

    def __post_init__(self) -> None:
        check_integer("task_seed", self.task_seed, 0)
        check_number("limit", self.limit, 0.0)
        check_split(self.split)
        if self.name == "fixed-task":
            raise UserError("a fixed task must be one of another environment, not of fixed-task")
        _ = self.inner  # an unknown name or parameter is told now

    @cached_property
    def inner(self) -> Env:
        """The environment whose task this is."""
        from safeicrl.envs.registry import make_env  # here, because the registry knows this class

        return make_env(self.name, **dict(_parameter(text) for text in self.args))

    @property
    def spec(self) -> EnvSpec:
        """The environment's own, but for the budgets: the one limit."""
        return replace(self.inner.spec, train_budget=(self.limit, self.limit), test_budget=(self.limit, self.limit))

    def sample_task(self, key: Key, split: Split) -> PyTree:
        """The one task, whatever is asked."""
        return self.inner.sample_task(jax.random.key(self.task_seed), self.split)

    def reset(self, key: Key, task: PyTree) -> tuple[PyTree, jax.Array]:
        """The environment's own."""
        return self.inner.reset(key, task)

    def step(self, key: Key, state: PyTree, action: jax.Array, task: PyTree) -> tuple[PyTree, Step]:
        """The environment's own."""
        return self.inner.step(key, state, action, task)

    def task_features(self, task: PyTree) -> jax.Array:
        """The environment's own."""
        return self.inner.task_features(task)


def _parameter(text: str) -> tuple[str, Any]:
    """`size=5` as a name and a value, which must hash."""
    name, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"args of a fixed task are name=value pairs, got {text!r}")
    try:
        parsed = json.loads(value)
    except ValueError:
        return name, value
    return name, tuple(parsed) if isinstance(parsed, list) else parsed
