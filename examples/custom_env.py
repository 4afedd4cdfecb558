"""A custom environment: levers that pay hidden amounts. The best one is hot and costs 1 per pull."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from safeicrl.algos.scared import Scared, ScaredConfig
from safeicrl.envs.api import EnvSpec, Step
from safeicrl.envs.registry import make_env, register
from safeicrl.envs.spaces import Discrete, Grid
from safeicrl.nets.transformer import NetConfig
from safeicrl.optimisers.ppo import PPOConfig
from safeicrl.penalty import PenaltyConfig
from safeicrl.train import TrainConfig, train


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

    def sample_task(self, key, split):  # the task: what each lever pays; all test levers pay well
        return jax.random.uniform(key, (self.levers,), minval=0.0 if split == "train" else 0.5)

    def reset(self, key, task):
        return jnp.int32(0), jnp.array([self.levers])  # no lever pulled yet

    def step(self, key, state, action, task):
        time = state + 1  # the state: steps taken
        hot = action == jnp.argmax(task)
        return time, Step(observation=action[None], reward=task[action], cost=hot.astype(jnp.float32),
                           terminated=jnp.array(False), truncated=time >= self.max_steps)  # fmt: skip

    def task_features(self, task):
        return task


register("hot-levers", HotLevers)


def learner(iterations: int) -> Scared:
    net = NetConfig(width=32, layers=2, heads=2, context=80)
    ppo = PPOConfig(learning_rate=(3e-3, 3e-4), minibatch=16, discount=0.95)
    own = {"rows": 64, "segments": 1, "net": net, "ppo": ppo, "penalty": PenaltyConfig(step=0.05)}
    return Scared(make_env("hot-levers"), ScaredConfig(iterations=iterations, **own))


if __name__ == "__main__":
    train(learner(150), TrainConfig(), out="runs/hot-levers")
