"""Where goals and obstacles lie: near the centre in training, near the edge in tests; and how far apart these are.

The paper, §"Measuring OOD generalization": P_train(i,j) ∝ exp(−α d((i,j), c)) and P_test(i,j) ∝ exp(+α d).
Reading: d is the Euclidean distance, as the main text says; the proof of Proposition 1 writes its square,
which changes the numbers but neither limit.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.envs.api import Key, Split


def centre(size: int) -> tuple[int, int]:
    """The start cell: the middle of the grid (the lower-right of the four middles when `size` is even)."""
    return size // 2, size // 2


def log_weights(size: int, alpha: float, split: Split) -> np.ndarray:
    """Unnormalised log-probability of each cell, [size, size]."""
    rows, columns = np.indices((size, size))
    row, column = centre(size)
    distance = np.hypot(rows - row, columns - column)
    return (-alpha if split == "train" else alpha) * distance


def sample_cells(key: Key, log_weight: jax.Array, count: int) -> jax.Array:
    """Draw `count` distinct flat cells one after another, each with p ∝ exp(log_weight) among those left.

    Gumbel top-k: adding Gumbel noise and taking the `count` largest is the same as drawing in sequence.
    """
    noise = jax.random.gumbel(key, log_weight.shape)
    return jax.lax.top_k(log_weight + noise, count)[1]


def exclude(log_weight: jax.Array, cells: jax.Array) -> jax.Array:
    """The same weights with probability zero on the flat `cells`."""
    return log_weight.at[cells].set(-jnp.inf)


class Divergence(NamedTuple):
    """How far the test distribution of cells lies from the training one."""

    total_variation: float
    kl_train_test: float
    kl_test_train: float


def divergence(size: int, alpha: float) -> Divergence:
    """Total variation distance and both KL divergences between P_train and P_test (Proposition 1)."""
    log_p, log_q = (_log_normalise(log_weights(size, alpha, split)) for split in ("train", "test"))
    p, q = np.exp(log_p), np.exp(log_q)
    return Divergence(
        total_variation=float(0.5 * np.abs(p - q).sum()),
        kl_train_test=float((p * (log_p - log_q)).sum()),
        kl_test_train=float((q * (log_q - log_p)).sum()),
    )


def _log_normalise(log_weight: np.ndarray) -> np.ndarray:
    shifted = log_weight - log_weight.max()
    return shifted - np.log(np.exp(shifted).sum())
