"""The spawning distributions against the paper's formula, computed here cell by cell."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from safeicrl.envs import spawn
from safeicrl.envs.dark_room import SafeDarkRoom


def cell_probabilities(size: int, alpha: float, sign: int, excluded: tuple = ()) -> np.ndarray:
    """P(i,j) ∝ exp(sign · α · Euclidean distance to the centre), in plain loops: [size²]."""
    middle = size // 2
    weights = [
        0.0 if (i, j) in excluded else math.exp(sign * alpha * math.sqrt((i - middle) ** 2 + (j - middle) ** 2))
        for i in range(size)
        for j in range(size)
    ]
    return np.array(weights) / sum(weights)


def assert_frequencies(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Pearson's chi-square within five standard deviations of its mean; impossible cells never drawn."""
    assert counts[probabilities == 0].sum() == 0
    possible = probabilities > 0
    expected = counts.sum() * probabilities[possible]
    chi_square = (((counts[possible] - expected) ** 2) / expected).sum()
    freedom = possible.sum() - 1
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom), chi_square


@pytest.fixture(scope="module")
def rooms() -> dict:
    env = SafeDarkRoom()
    keys = jax.random.split(jax.random.key(0), 20_000)
    sample = lambda split: jax.jit(jax.vmap(lambda key: env.sample_task(key, split)))(keys)  # noqa: E731
    return {split: jax.tree.map(np.asarray, sample(split)) for split in ("train", "test")}


@pytest.mark.parametrize(("split", "sign"), [("train", -1), ("test", +1)])
def test_goals_follow_the_formula(rooms, split, sign):
    counts = np.bincount(rooms[split].goal, minlength=81)
    assert_frequencies(counts, cell_probabilities(9, 0.5, sign, excluded=((4, 4),)))


@pytest.mark.parametrize(("split", "sign"), [("train", -1), ("test", +1)])
def test_the_wrong_formula_is_noticed(rooms, split, sign):
    counts = np.bincount(rooms[split].goal, minlength=81)
    for alpha, wrong_sign in ((0.5, -sign), (0.4, sign)):
        with pytest.raises(AssertionError):
            assert_frequencies(counts, cell_probabilities(9, alpha, wrong_sign, excluded=((4, 4),)))


@pytest.mark.parametrize(("split", "sign"), [("train", -1), ("test", +1)])
def test_a_single_obstacle_follows_the_formula_around_the_goal(split, sign):
    """With the goal known, one obstacle ∝ the same weights on the cells left."""
    env = SafeDarkRoom(size=5, obstacles=1)
    keys = jax.random.split(jax.random.key(1), 40_000)
    tasks = jax.tree.map(np.asarray, jax.jit(jax.vmap(lambda key: env.sample_task(key, split)))(keys))
    goal = 1  # cell (0, 1)
    counts = tasks.obstacles[tasks.goal == goal].sum(axis=0)
    assert_frequencies(counts, cell_probabilities(5, 0.5, sign, excluded=((2, 2), (0, 1))))


def test_obstacles_are_drawn_one_after_another():
    """Two of three cells: P(first = i) = w_i, P(second = j | i) = w_j / (1 − w_i)."""
    weights = np.array([0.5, 0.3, 0.2])
    keys = jax.random.split(jax.random.key(2), 50_000)
    draw = jax.jit(jax.vmap(lambda key: spawn.sample_cells(key, jnp.log(jnp.asarray(weights)), 2)))
    pairs = np.asarray(draw(keys))
    counts = np.zeros((3, 3))
    np.add.at(counts, (pairs[:, 0], pairs[:, 1]), 1)
    expected = weights[:, None] * weights[None] / (1 - weights[:, None])
    np.fill_diagonal(expected, 0)
    assert_frequencies(counts.ravel(), expected.ravel())


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 2.0])
@pytest.mark.parametrize("size", [3, 8, 9])
def test_divergences_against_direct_sums(size, alpha):
    start = ((size // 2, size // 2),)  # never a goal
    p, q = (cell_probabilities(size, alpha, sign, excluded=start) for sign in (-1, +1))
    p, q = p[p > 0], q[q > 0]
    result = spawn.divergence(size, alpha)
    assert result.total_variation == pytest.approx(max((p - q).clip(0).sum(), 0), abs=1e-12)
    assert result.kl_train_test == pytest.approx(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
    assert result.kl_test_train == pytest.approx(sum(b * math.log(b / a) for a, b in zip(p, q, strict=True)))


def test_proposition_1_limits():
    """TV → 1 and both KL → ∞ as α → ∞; all three are 0 at α = 0 and rise in between."""
    alphas = [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 64.0]
    values = np.array([spawn.divergence(9, alpha) for alpha in alphas])
    np.testing.assert_allclose(values[0], 0, atol=1e-12)
    assert (np.diff(values[:-1], axis=0) > 0).all()
    assert values[-1, 0] == pytest.approx(1, abs=1e-12)
    # for large α the KL grows like α · (distance from the cells beside the start to the corners)
    corner = math.hypot(4, 4)
    np.testing.assert_allclose(values[-1, 1:] / 64, corner - 1, rtol=0.02)
