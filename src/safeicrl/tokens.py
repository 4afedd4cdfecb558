"""The token: all that an agent is told at one step."""

import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.budgets import Array, beside
from safeicrl.envs.api import EnvSpec, record


@record
class Token:
    """All that an agent is told at one step; [row] here, [row, time] in a `Trials` record.

    It holds the whole last transition (previous observation, action, reward, cost). The observation that ended an
    episode is replaced by the next episode's first one, so without `previous` nobody could tell where the goal was.
    `time` and `episode` are the token's position in the trial. With several costs, `cost` and `ctg` have one more
    axis, [row, cost].
    """

    observation: jax.Array  # [row, obs]
    previous: jax.Array  # [row, obs] the observation before; at a trial's first token, the same one
    action: jax.Array  # [row] int32, −1 at a trial's first token; or [row, act], zeros there
    reward: jax.Array  # [row] of the last step
    cost: jax.Array  # [row] of the last step
    ctg: jax.Array  # [row] δ − cost of this episode so far; negative once the budget is broken
    start: jax.Array  # [row] bool: first step of an episode
    time: jax.Array  # [row] int32, steps taken in this episode
    episode: jax.Array  # [row] int32, episodes finished in this trial

    @property
    def first(self) -> jax.Array:
        """[row] bool: first step of a trial, where an agent forgets everything."""
        return self.start & (self.episode == 0)


def usable_budget(budget: Array, spec: EnvSpec) -> Array:
    """The budget rounded down to a whole number of cost units: the same constraint, fewer values to learn.

    NumPy's arrays stay NumPy's: JAX would compile a program for each operation.
    """
    floor = np.floor if isinstance(budget, np.ndarray) else jnp.floor
    return floor(budget / spec.cost_unit + 1e-4) * spec.cost_unit if spec.cost_unit else budget


def first_token(spec: EnvSpec, observation: jax.Array, budget: jax.Array) -> Token:
    """The first token of a trial, one row."""
    zero = jnp.float32(0)
    no_cost = jnp.zeros(spec.cost_shape) if spec.several else zero
    return Token(
        observation=observation,
        previous=observation,
        action=spec.action.no_action(),
        reward=zero,
        cost=no_cost,
        ctg=budget,
        start=jnp.array(True),
        time=jnp.int32(0),
        episode=jnp.int32(0),
    )


def next_token(
    token: Token, observation: jax.Array, action: jax.Array, reward: jax.Array, cost: jax.Array,
    done: jax.Array, budget: jax.Array,
) -> Token:  # fmt: skip
    """The token after a step; `observation` is the new episode's first one when `done`. Any batch shape."""
    return Token(
        observation=observation,
        previous=token.observation,
        action=action,
        reward=reward,
        cost=cost,
        ctg=jnp.where(beside(done, cost), budget, token.ctg - cost),
        start=done,
        time=jnp.where(done, 0, token.time + 1),
        episode=token.episode + done,
    )
