"""Advantages against plain backward loops, at every kind of boundary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from safeicrl import returns
from safeicrl.returns import shift

# compiled as a whole: step by step the scans would be a hundred small programs
gae, linear_recurrence = jax.jit(returns.gae), jax.jit(returns.linear_recurrence)


def test_linear_recurrence_is_the_backward_loop():
    rng = np.random.default_rng(0)
    decay, values = rng.uniform(-1.2, 1.2, (2, 3, 37)), rng.normal(size=(2, 3, 37))
    expected, later = np.zeros_like(values), np.zeros((2, 3))
    for t in reversed(range(37)):
        expected[..., t] = later = values[..., t] + decay[..., t] * later
    found = linear_recurrence(jnp.asarray(decay, jnp.float32), jnp.asarray(values, jnp.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_zero_decay_cuts_the_recurrence():
    decay, values = jnp.array([1.0, 0.0, 1.0, 1.0]), jnp.array([1.0, 2.0, 3.0, 4.0])
    np.testing.assert_array_equal(linear_recurrence(decay, values), [3, 2, 7, 4])


def test_shift_looks_one_step_ahead_and_sees_nothing_beyond_the_end():
    np.testing.assert_array_equal(shift(jnp.array([[1, 2, 3], [4, 5, 6]])), [[2, 3, 0], [5, 6, 0]])


def loop_gae(reward, value, discount, trace):
    """A_t = Σ_l (Π γ λ) (r + γ V' − V), written as a loop; a row cut in mid-trial starts it one step earlier."""
    advantage = np.zeros(len(reward))
    later = 0.0
    last = len(reward) - 1
    for t in reversed(range(len(reward))):
        if t == last and discount[t] > 0:  # the value after the row's end is unknown
            continue
        ahead = value[t + 1] if t < last else 0.0
        error = reward[t] + discount[t] * ahead - value[t]
        advantage[t] = later = error + discount[t] * trace * later
    return advantage


@pytest.mark.parametrize("trace", [0.0, 0.9, 1.0])
def test_gae_against_a_loop(trace):
    """Rows with boundaries at random places; some are cut in mid-trial, some end exactly at the row's end."""
    rng = np.random.default_rng(1)
    reward, value = rng.normal(size=(2, 16, 40)).astype(np.float32)
    discount = np.where(rng.uniform(size=(16, 40)) < 0.1, 0.0, 0.97).astype(np.float32)
    discount[:8, -1], discount[8:, -1] = 0.97, 0.0
    expected = [loop_gae(*row, trace) for row in zip(reward, value, discount, strict=True)]
    found = gae(jnp.asarray(reward), jnp.asarray(value), jnp.asarray(discount), trace)
    np.testing.assert_allclose(found, np.array(expected), rtol=1e-4, atol=1e-4)


def test_with_a_full_trace_an_advantage_is_return_minus_value():
    """By hand, γ = ½: the first trial ends at step 1; the second is cut and bootstraps from the last value."""
    reward, value = jnp.array([1.0, 2.0, 4.0, 8.0, 16.0]), jnp.array([10.0, 20.0, 30.0, 40.0, 50.0])
    discount = jnp.array([0.5, 0.0, 0.5, 0.5, 0.5])
    returns = [1 + 0.5 * 2, 2, 4 + 0.5 * 8 + 0.25 * 50, 8 + 0.5 * 50, 50]
    np.testing.assert_allclose(gae(reward, value, discount, 1.0), np.array(returns) - np.asarray(value))


def test_nothing_flows_back_over_a_boundary():
    discount = jnp.array([0.9, 0.9, 0.0, 0.9, 0.9])
    calm, wild = jnp.zeros(5), jnp.array([0.0, 0.0, 0.0, 1e6, -1e6])
    before = gae(calm, calm, discount, 0.95)
    after = gae(wild, wild, discount, 0.95)
    np.testing.assert_array_equal(before[:3], after[:3])
    assert abs(after[3]) > 1


def test_the_reward_counts_until_the_trial_ends():
    found = returns.reward_discount(0.5, jnp.array([0, 0, 0, 1, 0]))
    np.testing.assert_allclose(found, [0.5, 0.5, 0.5, 0.0, 0.5], rtol=1e-6)
