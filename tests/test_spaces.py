"""Spaces: shapes and encodings that shipped policies depend on, written out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from safeicrl.envs.api import EnvSpec
from safeicrl.envs.spaces import Box, Discrete, Grid
from safeicrl.errors import UserError

ARM, CELL, FORCE = Discrete(3), Grid((2, 4)), Box(2, -1.0, 3.0)


@pytest.mark.parametrize(
    ("space", "value", "encoded"),
    [
        (ARM, [0, 2, -1], [[1, 0, 0], [0, 0, 1], [0, 0, 0]]),
        (CELL, [[1, 0], [0, 3]], [[0, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 1]]),
        (FORCE, [[-1.0, 3.0], [0.5, 1.0]], [[-1, 3], [0.5, 1]]),
    ],
)
def test_what_a_network_sees(space, value, encoded):
    value = jnp.asarray(value, space.dtype)
    found = space.encode(value)
    assert found.dtype == jnp.float32
    assert found.shape[-1] == space.encoded_size
    np.testing.assert_array_equal(found, encoded)
    blank = space.zeros((5,))
    assert (blank.shape, blank.dtype) == ((5, *space.shape), value.dtype)
    assert value.shape[1:] == space.shape


def test_actions_of_every_range_look_alike():
    np.testing.assert_array_equal(FORCE.encode_scaled(jnp.array([-1.0, 3.0])), [-1, 1])
    np.testing.assert_array_equal(FORCE.encode_scaled(jnp.array([1.0, 2.0])), [0, 0.5])
    np.testing.assert_array_equal(ARM.encode_scaled(jnp.array(1)), [0, 1, 0])


@pytest.mark.parametrize("space", [Box(1), Box(1, 0.0), Box(1, 2.0, 2.0)])
def test_actions_need_bounds(space):
    with pytest.raises(UserError, match="actions must have finite bounds, low < high, got Box"):
        space.encode_scaled(jnp.zeros(1))


def test_no_action_yet():
    assert ARM.no_action() == -1
    np.testing.assert_array_equal(FORCE.no_action(), [0, 0])


def test_uniform_actions():
    key = jax.random.key(0)
    np.testing.assert_array_equal(np.unique(ARM.sample(key, (200,))), [0, 1, 2])
    forces = np.asarray(FORCE.sample(key, (500,)))
    assert forces.shape == (500, 2)
    assert -1 <= forces.min() < -0.9
    assert 2.9 < forces.max() <= 3


def test_cells_are_numbered_row_by_row():
    cells = CELL.cells()
    assert cells.tolist()[:5] == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0]]
    np.testing.assert_array_equal(CELL.flat(jnp.asarray(cells)), np.arange(8))
    deep = Grid((2, 3, 4))
    np.testing.assert_array_equal(deep.flat(jnp.asarray(deep.cells())), np.arange(24))


def test_what_fits_in_a_byte():
    spaces = (Discrete(256), Discrete(257), Grid((256, 2)), Grid((2, 257)), Box(1, 0.0, 1.0))
    assert [space.fits_byte for space in spaces] == [True, False, True, False, False]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Discrete(0), "number of actions must be an integer ≥ 1, got 0"),
        (lambda: Grid(()), "number of coordinates must be an integer ≥ 1, got 0"),
        (lambda: Grid((3, 0)), "size of a grid must be an integer ≥ 1, got 0"),
        (lambda: Box(0), "size of a box must be an integer ≥ 1, got 0"),
        (lambda: Box(1, 2.0, 1.0), "low must not be above its high, got 2.0 and 1.0"),
        (lambda: Box(1, np.nan, 1.0), "low must not be above its high, got nan and 1.0"),
    ],
)
def test_a_space_of_nothing_is_refused(make, words):
    with pytest.raises(UserError, match=words):
        make()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("max_steps", 0, "max_steps must be an integer ≥ 1, got 0"),
        ("max_steps", -2, "max_steps must be an integer ≥ 1, got -2"),
        ("episodes", 1.5, "episodes must be an integer ≥ 1, got 1.5"),
        ("task_features", -1, "task_features must be an integer ≥ 0, got -1"),
        ("train_budget", (3.0, 1.0), "train_budget of cost must rise, got 3 to 1"),
        ("train_budget", 3.0, "train_budget of cost must be two numbers, got 3.0"),
        ("test_budget", (-1.0, 1.0), "test_budget of cost must be a finite number ≥ 0"),
        ("cost_unit", -1.0, "cost_unit must be a finite number ≥ 0"),
        ("max_cost", -1.0, "max_cost must be a finite number > 0"),
        ("max_cost", np.nan, "max_cost must be a finite number > 0"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(field, value, words):
    good = {
        "observation": CELL, "action": ARM, "max_steps": 2, "episodes": 2, "train_budget": (0.0, 1.0),
        "test_budget": (0.0, 1.0), "cost_unit": 1.0, "task_features": 0,
    }  # fmt: skip
    EnvSpec(**good)
    with pytest.raises(UserError, match=words):
        EnvSpec(**good | {field: value})
