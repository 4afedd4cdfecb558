"""The ring buffer of rows: newest overwrite oldest, draws are uniform over what is there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from safeicrl.envs.api import record
from safeicrl.optimisers import replay


@record
class Row:
    number: jax.Array  # [row]
    steps: jax.Array  # [row, time]


def rows(*numbers: int) -> Row:
    """Rows known by a number; all leaves of a row carry it, so a mix-up of rows is seen."""
    number = jnp.array(numbers, jnp.int32)
    return Row(number=number, steps=10.0 * number[:, None] + jnp.arange(3))


def contents(buffer: replay.Replay) -> list[int]:
    return sorted(np.asarray(buffer.rows.number)[: int(buffer.size)].tolist())


def test_newest_rows_overwrite_the_oldest():
    buffer = replay.init(rows(0), capacity=5)
    assert (buffer.capacity, int(buffer.size)) == (5, 0)
    buffer = replay.add(buffer, rows(1, 2))
    assert contents(buffer) == [1, 2]
    buffer = replay.add(buffer, rows(3, 4))
    assert contents(buffer) == [1, 2, 3, 4]
    buffer = replay.add(buffer, rows(5, 6))  # over the end: one slot was free
    assert contents(buffer) == [2, 3, 4, 5, 6]
    buffer = replay.add(buffer, rows(7, 8, 9, 10, 11))  # as many as it holds
    assert contents(buffer) == [7, 8, 9, 10, 11]
    assert int(buffer.added) == 11
    np.testing.assert_array_equal(buffer.rows.steps, 10 * np.asarray(buffer.rows.number)[:, None] + np.arange(3))


def test_an_example_of_shapes_is_enough():
    shapes = jax.eval_shape(lambda: rows(1, 2, 3))
    buffer = replay.init(shapes, capacity=4)
    assert buffer.rows.number.dtype == jnp.int32
    assert buffer.rows.steps.shape == (4, 3)


@pytest.mark.parametrize("filled", [3, 8, 11])
def test_draws_are_uniform_over_the_rows_that_are_there(filled):
    buffer = replay.init(rows(0), capacity=8)
    for number in range(1, filled + 1):
        buffer = replay.add(buffer, rows(number))
    drawn = jax.jit(replay.sample, static_argnums=2)(buffer, jax.random.key(0), 8000)
    np.testing.assert_array_equal(drawn.steps, 10 * np.asarray(drawn.number)[:, None] + np.arange(3))
    found, count = np.unique(np.asarray(drawn.number), return_counts=True)
    there = range(max(1, filled - 7), filled + 1)
    assert found.tolist() == list(there)
    expected = 8000 / len(there)
    assert np.abs(count - expected).max() < 5 * np.sqrt(expected)


def test_keys_decide_the_draw():
    buffer = replay.add(replay.init(rows(0), capacity=64), rows(*range(64)))
    draws = [np.asarray(replay.sample(buffer, jax.random.key(seed), 16).number).tolist() for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_one_compiled_add_serves_all_fill_levels():
    traces = []

    @jax.jit
    def add(buffer, new):
        traces.append(1)
        return replay.add(buffer, new)

    buffer = replay.init(rows(0), capacity=3)
    for number in range(7):
        buffer = add(buffer, rows(number))
    assert contents(buffer) == [4, 5, 6]
    assert len(traces) == 1
