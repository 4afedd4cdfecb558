"""What an environment is: three pure functions over pytrees.

    task              = env.sample_task(key, split)          one CMDP: a layout, a speed limit, ...
    state, first_obs  = env.reset(key, task)
    state, step       = env.step(key, state, action, task)

The task is an argument of `reset` and `step`, and `reset` never resamples it: an agent can only learn in
context when the task stays the same across episodes. Environments handle one episode: `jax.vmap` makes batches
of them. They do not reset themselves either: when an episode ends, `step.observation` is its true final
observation, and the caller (trial.py, gym.py) calls `reset`.

An environment with several costs names them in `spec.costs`. Then costs and budgets have one more axis, the last
one, [cost], from the environment to the results. With one cost there is no such axis anywhere.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, dataclass_transform

import jax
import numpy as np

from safeicrl.budgets import Range, Ranges, check_costs, ranges_of
from safeicrl.envs.spaces import Box, Discrete, Grid
from safeicrl.errors import UserError, check_integer, check_number

Key = jax.Array
PyTree = Any
Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record(cls: type[T]) -> type[T]:
    """A frozen dataclass built by keyword that is also a JAX pytree."""
    return jax.tree_util.register_dataclass(dataclass(frozen=True, kw_only=True)(cls))


replace = dataclasses.replace


@dataclass(frozen=True)
class EnvSpec:
    """What an agent, a trainer and an evaluator must know about an environment before running it."""

    observation: Grid | Box
    action: Discrete | Box
    max_steps: int  # episode time limit; reaching it truncates
    episodes: int  # K, episodes in a trial
    train_budget: Ranges  # range of δ while training; with several costs, one for all or one for each
    test_budget: Ranges  # range of δ in the paper's evaluation; likewise
    cost_unit: float  # every step cost, of each kind, is a multiple of it; 0 when costs are real-valued
    task_features: int  # length of `Env.task_features(task)`
    max_cost: float = math.inf  # largest cost of one step; a guard needs one that is finite
    costs: tuple[str, ...] = ("cost",)  # names of the costs; each has a budget of its own

    def __post_init__(self) -> None:
        for name, least in (("max_steps", 1), ("episodes", 1), ("task_features", 0)):
            check_integer(name, getattr(self, name), least)
        check_integer("steps of an episode · episodes of a trial", self.max_steps * self.episodes, 1)
        check_number("cost_unit", self.cost_unit, 0.0)
        if self.max_cost != math.inf:
            check_number("max_cost", self.max_cost, 0.0, strict=True)
        check_costs(self.costs)
        for name in ("train_budget", "test_budget"):
            ranges_of(getattr(self, name), self.costs, name)

    @property
    def several(self) -> bool:
        """Whether there are several costs, and with them a cost axis."""
        return len(self.costs) > 1

    @property
    def cost_shape(self) -> tuple[int, ...]:
        """Shape of the cost of one step, and of a budget: () for one cost, else (costs,)."""
        return (len(self.costs),) if self.several else ()

    def each_cost(self, values: Any) -> list[Any]:
        """An array of costs or budgets taken apart: one array without the cost axis for each cost."""
        return [values[..., i] for i in range(len(self.costs))] if self.several else [values]

    def ranges(self, split: "Split") -> tuple[Range, ...]:
        """The range of budgets of each cost, in training or in the test."""
        given = self.train_budget if split == "train" else self.test_budget
        return ranges_of(given, self.costs, "budgets") if self.several else (given,)  # type: ignore[return-value]

    def bounds(self, split: "Split") -> tuple[Any, Any]:
        """Least and greatest budget: two numbers; with several costs, two arrays [cost]."""
        ranges = self.ranges(split)
        if not self.several:
            return ranges[0]
        low, high = np.asarray(ranges, np.float32).T
        return low, high

    @property
    def trial_steps(self) -> int:
        """Steps in a trial whose episodes all run to the time limit."""
        return self.max_steps * self.episodes


@record
class Step:
    """What one environment step returns; batched by vmap."""

    observation: jax.Array  # [obs]; when the episode ends: its final observation
    reward: jax.Array  # []
    cost: jax.Array  # []; with several costs [cost], in the order of `EnvSpec.costs`
    terminated: jax.Array  # [] bool: the task ended the episode
    truncated: jax.Array  # [] bool: the time limit ended it, and the task did not


class Env(Protocol):
    """An environment: a frozen, hashable bundle of parameters with four pure methods."""

    @property
    def spec(self) -> EnvSpec:
        """Spaces, limits and budget ranges."""
        ...

    def sample_task(self, key: Key, split: Split) -> PyTree:
        """Draw one task of the `train` or `test` distribution."""
        ...

    def reset(self, key: Key, task: PyTree) -> tuple[PyTree, jax.Array]:
        """Start an episode of `task`: its first state and observation."""
        ...

    def step(self, key: Key, state: PyTree, action: jax.Array, task: PyTree) -> tuple[PyTree, Step]:
        """Advance one step."""
        ...

    def task_features(self, task: PyTree) -> jax.Array:
        """The hidden task as a vector. Only privileged critics and reference agents may look at it."""
        ...


def refuse_several(spec: EnvSpec, what: str) -> None:
    """Raise if there are several costs, which `what` cannot handle."""
    if spec.several:
        raise UserError(f"{what} takes one cost, this environment has {len(spec.costs)}: {', '.join(spec.costs)}")


def check_split(split: str) -> Split:
    """Return `split` if it is one of `train` and `test`."""
    if split not in SPLITS:
        raise UserError(f"split must be 'train' or 'test', got {split!r}")
    return split  # type: ignore[return-value]
