"""How an agent's memory lasts: after the K episodes of training, or fewer, episodes no longer add to it.

In training the K-th episode is the last: the agent acts on a memory of K − 1 episodes and of the present one.
Played on, its memory would grow past anything that it was trained on, then the oldest tokens would be overwritten,
and policies that had found the goal unlearn it. So a settled agent plays the K-th episode again and again: when an
episode ends, its memory is taken back to where the K-th episode began.

An episode is kept if it has taught something: it broke its budget, which must not be forgotten, or it was better
than all before by more than these differ among themselves. So an agent that has not found the goal can still do so,
while luck in a noisy world changes nothing. There is room for a few such episodes beside those of training, before
the oldest tokens are overwritten.
"""

import jax
import jax.numpy as jnp

from safeicrl.budgets import is_over
from safeicrl.envs.api import record, replace
from safeicrl.nets.transformer import Cache
from safeicrl.tokens import Token

SPARE = 4  # episodes that a memory has room for beside those of training's trials
NEVER = 1e30  # larger than any return: there was no such episode


@record
class Settled:
    """A memory that lasts."""

    cache: Cache  # each row has its own clock
    clock: jax.Array  # [row] int32, the cache's when its present K-th episode began ...
    age: jax.Array  # [row] int32, ... and how many tokens it saw then
    best: jax.Array  # [row] largest return of an episode that was within its budget
    worst: jax.Array  # [row] smallest return of any episode
    earned: jax.Array  # [row] return of the present episode so far
    left: jax.Array  # [row], with several costs [row, cost]: what is left of its budget


def settled(cache: Cache, cost_shape: tuple[int, ...]) -> Settled:
    """An empty memory."""
    rows = len(cache.age)
    return Settled(
        cache=cache,
        clock=jnp.zeros(rows, jnp.int32),
        age=jnp.zeros(rows, jnp.int32),
        best=jnp.full(rows, -NEVER),
        worst=jnp.full(rows, NEVER),
        earned=jnp.zeros(rows),
        left=jnp.zeros((rows, *cost_shape)),
    )


def take_back(memory: Settled, token: Token, *, last: int, max_steps: int) -> Settled:
    """The memory before it reads `token`, which may begin an episode; `last`: index of the K-th episode."""
    cache, slots = memory.cache, memory.cache.keys[0].shape[-1]
    # What the token says of the last step belongs to the episode that has ended.
    earned = jnp.clip(memory.earned + token.reward, -NEVER, NEVER)
    left = memory.left - token.cost
    within = ~is_over(-left, 0.0, several=left.ndim > 1)
    spread = jnp.where(memory.best > -NEVER, memory.best - memory.worst, 0.0)
    better = earned > memory.best + spread
    ended = token.start & ~token.first
    back = ended & (token.episode > last) & within & ~better
    # The slots that an episode may fill must not be in sight when it begins.
    known = jnp.minimum(memory.age, max(slots - max_steps, 0))
    clock, age = jnp.where(back, memory.clock, cache.clock), jnp.where(back, known, cache.age)
    begins = token.start & (token.episode >= last) & ~back
    best = jnp.where(ended & within, jnp.maximum(memory.best, earned), memory.best)
    worst = jnp.where(ended, jnp.minimum(memory.worst, earned), memory.worst)
    return Settled(
        cache=replace(cache, clock=clock, age=age),
        clock=jnp.where(begins, clock, memory.clock),
        age=jnp.where(begins, age, memory.age),
        best=jnp.where(token.first, -NEVER, best),
        worst=jnp.where(token.first, NEVER, worst),
        earned=jnp.where(token.start, 0.0, earned),
        left=token.ctg,
    )
