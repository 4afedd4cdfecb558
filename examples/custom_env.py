"""A custom environment: hot levers. Each lever pays a hidden amount; the best one is hot and costs 1 a pull.

With a budget of δ the best episode pulls the hot lever δ times and the best cold one otherwise, once it knows them.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from safeicrl.envs.api import Discrete, EnvSpec, Grid, Step, record
from safeicrl.envs.registry import make_env, register
from safeicrl.reference import RandomAgent
from safeicrl.trial import episode_sums, run_trials, sample_queue


@record
class State:
    time: jax.Array  # [] int32


@dataclass(frozen=True)
class HotLevers:
    levers: int = 5
    max_steps: int = 10
    episodes: int = 8

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(
            observation=Grid((self.levers + 1,)), action=Discrete(self.levers), max_steps=self.max_steps,
            episodes=self.episodes, train_budget=(0.0, 6.0), test_budget=(0.0, 6.0), cost_unit=1.0,
            task_features=self.levers,
        )  # fmt: skip

    def sample_task(self, key, split):  # the task: what each lever pays, in test a tenth of it
        return jax.random.uniform(key, (self.levers,)) * (1.0 if split == "train" else 0.1)

    def reset(self, key, task):
        return State(time=jnp.int32(0)), jnp.array([self.levers])  # no lever pulled yet

    def step(self, key, state, action, task):
        state = State(time=state.time + 1)
        hot = action == jnp.argmax(task)
        ended = state.time >= self.max_steps
        return state, Step(observation=action[None], reward=task[action], cost=hot.astype(jnp.float32),
                           terminated=jnp.array(False), truncated=ended)  # fmt: skip

    def task_features(self, task):
        return task


register("hot-levers", HotLevers)

if __name__ == "__main__":
    env = make_env("hot-levers", levers=4)
    tasks, budgets = sample_queue(env, "train", env.spec.train_budget, (256, 1), jax.random.key(0))
    agent = RandomAgent(env.spec.action)
    sums = episode_sums(run_trials(env, agent, tasks, budgets, jax.random.key(1), episodes=8, steps=80), 8)
    print(f"random levers: return {sums.returns.mean():.2f}, over budget {(sums.costs > budgets).mean():.0%}")
