"""A reserve: the network is told that less is left of the budget than there is. The budget itself does not change.

Kept once an episode has cost something, for robots that cannot stop at once. The first cost says that the robot is
in something that goes on costing, and what the network makes of the rest of its budget comes too late. Told of
less, it stops sooner. Until the first cost it is told the truth, so a small budget does not keep it from searching.

Kept of small budgets, from an episode's first step on, for robots that meet their first cost only by going too far.
Told of less, they go less far. Of larger budgets they may keep another reserve, once an episode has cost something.
"""

import jax
import jax.numpy as jnp

from safeicrl.agents.settled import Settled
from safeicrl.budgets import Reserve, beside, reserve_parts
from safeicrl.envs.api import record
from safeicrl.nets.transformer import Cache
from safeicrl.tokens import Token


@record
class Reserved:
    """A memory that also knows the budget of the episode under way."""

    memory: Cache | Settled
    budget: jax.Array  # [row], with several costs [row, cost]


def told(held: Reserved, token: Token, reserve: Reserve) -> tuple[jax.Array, jax.Array]:
    """The episode's budget, and how much the network is told of what is left; both as `token.ctg`."""
    budget = jnp.where(beside(token.start, token.ctg), token.ctg, held.budget)
    return budget, token.ctg - kept(token.ctg, budget, reserve)


def told_in_rows(token: Token, reserve: Reserve) -> jax.Array:
    """What the network is told of at every step of whole rows, [row, time], as `token.ctg`."""
    began = jax.lax.cummax(jnp.where(token.start, jnp.arange(token.start.shape[1]), 0), axis=1)
    budget = jnp.take_along_axis(token.ctg, beside(began, token.ctg), 1)
    return token.ctg - kept(token.ctg, budget, reserve)


def kept(left: jax.Array, budget: jax.Array, reserve: Reserve) -> jax.Array:
    """The reserve, where `left` is left of an episode's `budget`."""
    amount, below, others = reserve_parts(reserve)
    return jnp.where(budget < below, amount, jnp.where(left < budget, others, 0.0))
