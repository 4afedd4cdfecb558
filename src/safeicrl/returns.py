"""Advantages along rows by associative scan: log₂(time) passes instead of a sequential loop."""

import jax
import jax.numpy as jnp


def linear_recurrence(decay: jax.Array, values: jax.Array) -> jax.Array:
    """Solve x_t = values_t + decay_t · x_{t+1} backwards along the last axis, x beyond the end being 0."""

    def combine(later: tuple, earlier: tuple) -> tuple:
        (a_later, b_later), (a, b) = later, earlier
        return a * a_later, b + a * b_later

    return jax.lax.associative_scan(combine, (decay, values), reverse=True, axis=decay.ndim - 1)[1]


def shift(values: jax.Array) -> jax.Array:
    """values_{t+1} along the last axis, 0 beyond the end."""
    return jnp.pad(values[..., 1:], [(0, 0)] * (values.ndim - 1) + [(0, 1)])


def gae(reward: jax.Array, value: jax.Array, discount: jax.Array, trace: float) -> jax.Array:
    """Generalised advantage estimates, [row, time].

    `discount` [row, time] is γ, or 0 where nothing after this step counts (the boundary is the caller's choice:
    the end of the trial, or of the episode). A row cut in mid-trial has no next value for its last step, so that
    step's advantage is 0 and its value only serves as the bootstrap of the step before.
    """
    error = reward + discount * shift(value) - value
    cut = discount[..., -1] > 0
    error = error.at[..., -1].set(jnp.where(cut, 0.0, error[..., -1]))
    return linear_recurrence(discount * trace, error)


def reward_discount(step: float, trial_done: jax.Array) -> jax.Array:
    """γ of every step, [row, time]: `step`, and 0 where the trial ends.

    It does not stop at the end of an episode: what is found now pays in later episodes.
    """
    return step * (1.0 - trial_done)
