"""What an environment is: three pure functions over pytrees.

    task              = env.sample_task(key, split)          one CMDP: a layout, a speed limit, ...
    state, first_obs  = env.reset(key, task)
    state, step       = env.step(key, state, action, task)

The task is an argument of `reset` and `step`, and `reset` never resamples it: an agent can only learn in
context when the task stays the same across episodes. Environments handle one episode: `jax.vmap` makes batches
of them. They do not reset themselves either: when an episode ends, `step.observation` is its true final
observation, and the caller (trial.py, gym.py) calls `reset`.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, dataclass_transform

import jax

from safeicrl.envs.spaces import Box, Discrete, Grid
from safeicrl.errors import UserError, check_integer

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
    train_budget: tuple[float, float]  # range of δ while training
    test_budget: tuple[float, float]  # range of δ in the paper's evaluation
    cost_unit: float  # every step cost is a multiple of it; 0 when costs are real-valued
    task_features: int  # length of `Env.task_features(task)`
    max_cost: float = math.inf  # largest cost of one step; a guard needs one that is finite

    def __post_init__(self) -> None:
        check_integer("steps of an episode · episodes of a trial", self.max_steps * self.episodes, 1)

    @property
    def trial_steps(self) -> int:
        """Steps in a trial whose episodes all run to the time limit."""
        return self.max_steps * self.episodes


@record
class Step:
    """What one environment step returns; batched by vmap."""

    observation: jax.Array  # [obs]; when the episode ends: its final observation
    reward: jax.Array  # []
    cost: jax.Array  # []
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


def check_split(split: str) -> Split:
    """Return `split` if it is one of `train` and `test`."""
    if split not in SPLITS:
        raise UserError(f"split must be 'train' or 'test', got {split!r}")
    return split  # type: ignore[return-value]
