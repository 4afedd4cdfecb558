"""The brake: right after a costly step that leaves nothing of the budget, the robot acts as usual, but harder.

A runner that goes one step too fast is still too fast at the next one, if it does too little about it. To do
nothing is no help: a body without thrust keeps its speed. The policy knows how to slow down, so its own action is
enlarged, for the one step that follows.
"""

import jax
import jax.numpy as jnp

from safeicrl.budgets import is_spent
from safeicrl.envs.api import EnvSpec
from safeicrl.envs.spaces import Box
from safeicrl.tokens import Token


def braked(action: jax.Array, token: Token, factor: float, spec: EnvSpec) -> jax.Array:
    """The action [row, action], `factor` times as far from the middle of its range where the robot brakes.

    It brakes if the last step of the episode has cost something of which nothing is left.
    """
    assert isinstance(spec.action, Box)
    centre, _ = spec.action.centre_and_half()
    harder = jnp.clip(centre + factor * (action - centre), spec.action.low, spec.action.high)
    now = (token.cost > 0) & is_spent(token.ctg, spec.cost_unit)
    brakes = (now.any(-1) if spec.several else now) & ~token.start
    return jnp.where(brakes[:, None], harder, action)
