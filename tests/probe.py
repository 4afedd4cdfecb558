"""A tiny environment with real-valued spaces and a known answer, for tests of what must work on any `Env`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from safeicrl.envs.api import Box, EnvSpec, Step, record


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
