"""PPO-Lagrangian (optimisers/lagrangian.py) as the trainer sees it: one task, one limit on the mean cost."""

from typing import Any

import jax
import jax.numpy as jnp

from safeicrl.agents.mlp import MlpAgent
from safeicrl.envs.api import Env, Key, PyTree, refuse_several, replace
from safeicrl.envs.spaces import Grid
from safeicrl.errors import UserError
from safeicrl.optimisers.lagrangian import Learner, LearnerState, PPOLagConfig


def default_config(env: Env) -> PPOLagConfig:
    """Settings to learn one task well and fast; learning histories are slower on purpose (histories/collect.py)."""
    if isinstance(env.spec.observation, Grid):
        return PPOLagConfig(iterations=100, epochs=2, learning_rate=1e-3, entropy=0.005)
    return PPOLagConfig(iterations=300, steps=150, epochs=8, minibatches=8, entropy=0.0)


class PPOLag:
    """The learner on a `FixedTask`, or on any environment with one task and one budget."""

    def __init__(self, env: Env, config: PPOLagConfig):
        refuse_several(env.spec, "ppo-lag")
        low, high = env.spec.bounds("train")
        if low != high:
            raise UserError(
                f"ppo-lag learns one task under one cost limit, but {type(env).__name__} has budgets from {low} to "
                f"{high}: make it a FixedTask"
            )
        self.env, self.config, self.limit = env, config, float(low)
        self.learner = Learner(env, config)

    @property
    def task(self) -> PyTree:
        """The one task."""
        return self.env.sample_task(jax.random.key(0), "train")

    def init(self, key: Key) -> LearnerState:
        """A new state."""
        return self.learner.init(key, self.task)

    def update(self, state: LearnerState) -> tuple[LearnerState, dict[str, jax.Array]]:
        """One iteration."""
        state, _, metrics = self.learner.iterate(state, self.task, jnp.float32(self.limit))
        return state, metrics

    def start_from(self, state: LearnerState, other: LearnerState) -> LearnerState:
        """A new run's state with another run's networks, and the scales they work in."""
        return replace(state, params=other.params, normaliser=other.normaliser, scale=other.scale)

    def agent(self, state: LearnerState) -> MlpAgent:
        """The policy, sampled."""
        return self.learner.agent(state)

    def card(self) -> dict[str, Any]:
        """What rebuilds the policy around its arrays."""
        return {"kind": "mlp", "hidden": list(self.config.hidden)}
