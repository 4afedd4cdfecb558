"""A reserve: once an episode has cost something, its network is told that less is left of the budget.

A robot cannot stop at once. Its first cost says that it is in something that goes on costing, and what the network
makes of the rest of its budget comes too late. Told of less, it stops sooner. Until the first cost it is told the
truth, so a small budget does not keep it from searching. The budget itself does not change.
"""

import jax
import jax.numpy as jnp

from safeicrl.agents.settled import Settled
from safeicrl.budgets import beside
from safeicrl.envs.api import record
from safeicrl.nets.transformer import Cache
from safeicrl.tokens import Token


@record
class Reserved:
    """A memory that also knows the budget of the episode under way."""

    memory: Cache | Settled
    budget: jax.Array  # [row], with several costs [row, cost]


def told(held: Reserved, token: Token, reserve: float) -> tuple[jax.Array, jax.Array]:
    """The episode's budget, and how much the network is told of what is left; both as `token.ctg`."""
    budget = jnp.where(beside(token.start, token.ctg), token.ctg, held.budget)
    return budget, jnp.where(token.ctg < budget, token.ctg - reserve, token.ctg)


def told_in_rows(token: Token, reserve: float) -> jax.Array:
    """What the network is told of at every step of whole rows, [row, time], as `token.ctg`."""
    began = jax.lax.cummax(jnp.where(token.start, jnp.arange(token.start.shape[1]), 0), axis=1)
    budget = jnp.take_along_axis(token.ctg, beside(began, token.ctg), 1)
    return jnp.where(token.ctg < budget, token.ctg - reserve, token.ctg)
