"""Environments of gymnax, to train and evaluate in: `from_gymnax(env, tasks=...)`. They are in JAX: no callback.

A task is a set of the environment's parameters. gymnax itself is never imported here: its environments are used as
they are (`pip install 'safeicrl[gymnax]'`; version 1, in which termination and truncation are apart).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.budgets import Ranges, check_ranges
from safeicrl.envs.api import EnvSpec, Key, PyTree, Split, Step, record
from safeicrl.envs.registry import WORLDS, World
from safeicrl.envs.spaces import Box, Discrete, Grid
from safeicrl.errors import UserError, check_integer, check_number

Cost = Callable[[PyTree, jax.Array, PyTree, PyTree], jax.Array]  # state, action, state after, parameters → cost


def from_gymnax(
    env: Any,
    tasks: Callable[[Key, Split], PyTree],
    *,
    name: str,
    budget: Ranges,
    episodes: int,
    cost: Cost | None = None,
    test_budget: Ranges | None = None,
    max_steps: int | None = None,
    cost_unit: float = 0.0,
    max_cost: float = math.inf,
    costs: tuple[str, ...] = ("cost",),
) -> "GymnaxEnv":
    """An environment of this library, known as `name`, whose tasks are parameters of a gymnax environment.

    `tasks(key, split)` draws the parameters, a pure function. The cost of a step is `info["cost"]`, or what
    `cost(state, action, next_state, parameters)` says; with several `costs`, an array of them in their order.
    `max_steps` is by default that of `env.default_params`. The other arguments are those of `from_gymnasium`.
    """
    if name in WORLDS and name not in _SETUPS:
        raise UserError(f"environment {name!r} is registered already")
    if not all(callable(getattr(env, method, None)) for method in ("reset_env", "step_env", "is_truncated")):
        raise UserError(f"{type(env).__name__} is not an environment of gymnax, version 1")
    usual = env.default_params
    observation, action = _observation(env.observation_space(usual)), _action(env.action_space(usual))
    parameters = jax.eval_shape(lambda: tasks(jax.random.key(0), "train"))
    size = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(parameters))
    spec = EnvSpec(
        observation=observation,
        action=action,
        max_steps=check_integer("max_steps", max_steps or int(usual.max_steps_in_episode), 1),
        episodes=check_integer("episodes", episodes, 1),
        train_budget=check_ranges(budget, costs, "budget"),
        test_budget=check_ranges(test_budget or budget, costs, "test_budget"),
        cost_unit=check_number("cost_unit", cost_unit, 0.0),
        task_features=size,
        max_cost=max_cost,
        costs=costs,
    )
    _SETUPS[name] = _Setup(env=env, tasks=tasks, cost=cost, spec=spec)
    summary = f"{type(env).__name__} of gymnax."
    WORLDS[name] = World(maker=lambda registered=name: GymnaxEnv(registered), summary=summary)
    return GymnaxEnv(name)


@dataclass(frozen=True, eq=False)
class _Setup:
    """What one call of `from_gymnax` was given."""

    env: Any
    tasks: Callable[[Key, Split], PyTree]
    cost: Cost | None
    spec: EnvSpec


_SETUPS: dict[str, _Setup] = {}  # by name


@record
class _State:
    inner: PyTree  # gymnax's own
    time: jax.Array  # [] int32, steps of this episode


@dataclass(frozen=True, eq=False)
class GymnaxEnv:
    """What `from_gymnax` returns."""

    registered: str  # the name that it is known by

    if TYPE_CHECKING:
        _setup: ClassVar[_Setup]  # set for each object; a field would be copied into cards

    def __post_init__(self) -> None:
        if self.registered not in _SETUPS:
            raise UserError(f"{self.registered!r} was not made by from_gymnax")
        object.__setattr__(self, "_setup", _SETUPS[self.registered])

    # Equal if they are of one call of `from_gymnax`: a second one under the same name is another environment.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, GymnaxEnv) and other._setup is self._setup

    def __hash__(self) -> int:
        return id(self._setup)

    @property
    def spec(self) -> EnvSpec:
        """Spaces, limits and budget ranges."""
        return self._setup.spec

    def sample_task(self, key: Key, split: Split) -> PyTree:
        """Parameters of the environment."""
        return jax.tree.map(jnp.asarray, self._setup.tasks(key, split))

    def reset(self, key: Key, task: PyTree) -> tuple[_State, jax.Array]:
        """Start an episode."""
        observation, inner = self._setup.env.reset_env(key, task)
        return _State(inner=inner, time=jnp.int32(0)), self._seen(observation)

    def step(self, key: Key, state: _State, action: jax.Array, task: PyTree) -> tuple[_State, Step]:
        """Advance one step."""
        setup, own = self._setup, self._own(action)
        observation, inner, reward, terminated, info = setup.env.step_env(key, state.inner, own, task)
        cost = setup.cost(state.inner, own, inner, task) if setup.cost else info.get("cost")
        if cost is None:
            raise UserError(
                "the environment must put the cost of every step in info['cost']; or give a function, cost"
            )
        time = state.time + 1
        late = setup.env.is_truncated(inner, task) | (time >= self.spec.max_steps)
        terminated = jnp.asarray(terminated, bool)
        return _State(inner=inner, time=time), Step(
            observation=self._seen(observation),
            reward=jnp.asarray(reward, jnp.float32),
            cost=jnp.asarray(cost, jnp.float32),
            terminated=terminated,
            truncated=jnp.asarray(late, bool) & ~terminated,
        )

    def task_features(self, task: PyTree) -> jax.Array:
        """All parameters in a row."""
        return jnp.concatenate([jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(task)])

    def _seen(self, observation: Any) -> jax.Array:
        space = self.spec.observation
        return jnp.ravel(jnp.asarray(observation)).astype(space.dtype)

    def _own(self, action: jax.Array) -> jax.Array:
        """The action in the environment's own bounds, from [−1, 1]."""
        if isinstance(self.spec.action, Discrete):
            return action
        space = self._setup.env.action_space(self._setup.env.default_params)
        low, high = jnp.asarray(space.low), jnp.asarray(space.high)
        return low + (high - low) * (jnp.clip(action, -1, 1).reshape(space.shape) + 1) / 2


def _observation(space: Any) -> Grid | Box:
    if hasattr(space, "n"):
        return Grid((int(space.n),))
    if not hasattr(space, "low"):
        raise UserError(f"observations must be Discrete or a Box, got {space}")
    return Box(int(np.prod(space.shape)), float(np.min(space.low)), float(np.max(space.high)))


def _action(space: Any) -> Discrete | Box:
    if hasattr(space, "n"):
        return Discrete(int(space.n))
    if not hasattr(space, "low") or not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise UserError(f"actions must be Discrete or a Box with finite bounds, got {space}")
    return Box(int(np.prod(space.shape)), -1.0, 1.0)
