"""One task of an environment as an environment of its own: what an ordinary safe learner learns."""

from dataclasses import dataclass, replace

import jax

from safeicrl.envs.api import EnvSpec, Key, PyTree, Split, check_split
from safeicrl.envs.wrapped import Wrapped
from safeicrl.errors import check_integer, check_number


@dataclass(frozen=True)
class FixedTask(Wrapped):
    """A single task of another environment, with a single cost limit: an ordinary CMDP."""

    task_seed: int = 0  # which task
    split: Split = "train"  # of which distribution
    limit: float = 5.0  # on an episode's cost

    def __post_init__(self) -> None:
        check_integer("task_seed", self.task_seed, 0)
        check_number("limit", self.limit, 0.0)
        check_split(self.split)
        super().__post_init__()

    @property
    def what(self) -> str:
        """What it is called in a message."""
        return "a fixed task"

    @property
    def spec(self) -> EnvSpec:
        """The environment's own, but for the budgets: the one limit."""
        return replace(self.inner.spec, train_budget=(self.limit, self.limit), test_budget=(self.limit, self.limit))

    def sample_task(self, key: Key, split: Split) -> PyTree:
        """The one task, whatever is asked."""
        return self.inner.sample_task(jax.random.key(self.task_seed), self.split)
