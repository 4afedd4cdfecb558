"""A tiny environment with real-valued spaces and a known answer, for tests of what must work on any `Env`."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from safeicrl.envs.api import EnvSpec, Step, record
from safeicrl.envs.spaces import Box, Discrete

# For what runs longer than it compiles: conftest.py turns the compiler's optimisations off for all else.
OPTIMISED = {"xla_backend_optimization_level": 1}


@record
class PushState:
    position: jax.Array  # [1]
    time: jax.Array  # []


@dataclass(frozen=True)
class Push:
    """Move a point on a line: reward is minus the distance to the hidden task, cost is the effort."""

    max_steps: int = 4
    episodes: int = 3

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(
            observation=Box(1, -10.0, 10.0), action=Box(1, -1.0, 1.0), max_steps=self.max_steps,
            episodes=self.episodes, train_budget=(0.0, 2.0), test_budget=(0.0, 2.0), cost_unit=0.0, task_features=1,
        )  # fmt: skip

    def sample_task(self, key, split):
        return jax.random.uniform(key, (), minval=-1, maxval=1)

    def reset(self, key, task):
        state = PushState(position=jnp.zeros(1), time=jnp.int32(0))
        return state, state.position

    def step(self, key, state, action, task):
        state = PushState(position=state.position + action, time=state.time + 1)
        return state, Step(
            observation=state.position,
            reward=-jnp.abs(state.position[0] - task),
            cost=jnp.abs(action[0]),
            terminated=jnp.array(False),
            truncated=state.time >= self.max_steps,
        )

    def task_features(self, task):
        return task[None]


@dataclass(frozen=True)
class BoundedPush(Push):
    """Push, whose cost, the effort, is at most 1."""

    @property
    def spec(self) -> EnvSpec:
        return replace(super().spec, max_cost=1.0)


@dataclass(frozen=True)
class Runner(Push):
    """Push with actions around 1, and costs of whole units."""

    @property
    def spec(self) -> EnvSpec:
        return replace(super().spec, action=Box(1, -1.0, 3.0), cost_unit=1.0)


def no_state(reward: jax.Array, cost: jax.Array, time: jax.Array, steps: int) -> tuple[jax.Array, Step]:
    """A step of a world with nothing to see but the clock."""
    return time, Step(
        observation=jnp.zeros(1),
        reward=jnp.asarray(reward, jnp.float32),
        cost=jnp.asarray(cost, jnp.float32),
        terminated=jnp.array(False),
        truncated=time >= steps,
    )


@dataclass(frozen=True)
class Casino:
    """Every step the safe arm pays ¼ and costs nothing; two others cost 1, and the hidden one of them pays 1.

    Once the good arm is known, the best policy with a budget of b pulls it exactly b times an episode, see `best`.
    """

    steps: int = 4
    episodes: int = 3

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(
            observation=Box(1, 0.0, 0.0), action=Discrete(3), max_steps=self.steps, episodes=self.episodes,
            train_budget=(0.0, 5.0), test_budget=(0.0, 5.0), cost_unit=1.0, task_features=2,
        )  # fmt: skip

    def sample_task(self, key, split):
        return jax.random.randint(key, (), 1, 3)

    def reset(self, key, task):
        return jnp.int32(0), jnp.zeros(1)

    def step(self, key, state, action, task):
        reward = jnp.where(action == 0, 0.25, action == task)
        return no_state(reward, action > 0, state + 1, self.steps)

    def task_features(self, task):
        return jax.nn.one_hot(task - 1, 2)

    def best(self, budget: float) -> float:
        """The greatest return of an episode within the budget, the arms being known."""
        return 0.25 * (self.steps - budget) + 1.0 * budget


@dataclass(frozen=True)
class Throw:
    """One throw an episode at a hidden target, left or right of the middle: reward 1 − distance.

    Throwing to the right costs the distance from the middle. The first throw tells the side; from the second on
    the best return is 1, or 1 − (½ − b) when the target is on the right and the budget b is below ½.
    """

    episodes: int = 4

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(
            observation=Box(1, 0.0, 0.0), action=Box(1, -1.0, 1.0), max_steps=1, episodes=self.episodes,
            train_budget=(0.0, 1.0), test_budget=(0.0, 1.0), cost_unit=0.0, task_features=1,
        )  # fmt: skip

    def sample_task(self, key, split):
        return 0.5 * jax.random.rademacher(key, (), jnp.float32)

    def reset(self, key, task):
        return jnp.int32(0), jnp.zeros(1)

    def step(self, key, state, action, task):
        return no_state(1 - jnp.abs(action[0] - task), jnp.maximum(action[0], 0.0), state + 1, 1)

    def task_features(self, task):
        return task[None]
