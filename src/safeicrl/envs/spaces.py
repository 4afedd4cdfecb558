"""The spaces of observations and actions. Each knows its shape, its type, and what a network sees of its values.

    Discrete   one of n actions                  shape ()             a network sees one-hot
    Grid       a cell of a grid, as observation  shape (coordinate,)  ... each coordinate one-hot
    Box        a real vector, either             shape (size,)        ... the numbers

Arrays of values have any leading shape, [..., *shape].
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.errors import UserError, check_integer


def as_array(value: object) -> np.ndarray:
    """What a user gave as an array; of no numbers, if it is none."""
    try:
        return np.asarray(value)
    except (TypeError, ValueError, OverflowError):
        return np.array(None)


@dataclass(frozen=True)
class Discrete:
    """One of `n` actions, 0 … n−1."""

    n: int

    shape: ClassVar[tuple[int, ...]] = ()
    dtype: ClassVar[Any] = jnp.int32

    def __post_init__(self) -> None:
        check_integer("number of actions", self.n, 1)

    @property
    def encoded_size(self) -> int:
        """Length of `encode`'s vector."""
        return self.n

    @property
    def fits_byte(self) -> bool:
        """Whether one byte holds any value."""
        return self.n <= 256

    def zeros(self, shape: tuple[int, ...]) -> jax.Array:
        """Zeros of this type, [*shape]."""
        return jnp.zeros(shape, self.dtype)

    def no_action(self) -> jax.Array:
        """What stands for the last action where there was none: −1."""
        return jnp.int32(-1)

    def encode(self, action: jax.Array) -> jax.Array:
        """One-hot, [..., n]; `no_action` is all zeros."""
        return jax.nn.one_hot(action, self.n)

    def encode_scaled(self, action: jax.Array) -> jax.Array:
        """The same: there is nothing to scale."""
        return self.encode(action)

    def sample(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Uniform actions, [*shape]."""
        return jax.random.randint(key, shape, 0, self.n)

    def check_action(self, action: object, real: type = np.float32) -> np.ndarray:
        """A user's action as an array, or an error that says what an action is; nothing in it is `real`."""
        value = as_array(action)
        if value.shape != () or value.dtype.kind not in "iu" or not 0 <= value < self.n:
            raise UserError(f"action must be an integer from 0 to {self.n - 1}, got {action!r}")
        return value.astype(np.int32)


@dataclass(frozen=True)
class Grid:
    """A vector of integers, component i in 0 … sizes[i]−1: a cell of a grid."""

    sizes: tuple[int, ...]

    dtype: ClassVar[Any] = jnp.int32

    def __post_init__(self) -> None:
        check_integer("number of coordinates", len(self.sizes), 1)
        for size in self.sizes:
            check_integer("size of a grid", size, 1)

    @property
    def size(self) -> int:
        """How many coordinates a cell has."""
        return len(self.sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one value."""
        return (self.size,)

    @property
    def encoded_size(self) -> int:
        """Length of `encode`'s vector."""
        return sum(self.sizes)

    @property
    def fits_byte(self) -> bool:
        """Whether one byte holds any coordinate."""
        return max(self.sizes) <= 256

    def zeros(self, shape: tuple[int, ...]) -> jax.Array:
        """Zeros of this type, [*shape, coordinate]."""
        return jnp.zeros((*shape, *self.shape), self.dtype)

    def encode(self, cell: jax.Array) -> jax.Array:
        """Each coordinate one-hot, one after another, [..., sum of sizes]."""
        return jnp.concatenate([jax.nn.one_hot(cell[..., i], n) for i, n in enumerate(self.sizes)], -1)

    @property
    def limits(self) -> str:
        """The range of each coordinate, in words."""
        return f"({', '.join(f'0–{size - 1}' for size in self.sizes)})"

    def cells(self) -> np.ndarray:
        """All cells, [cell, coordinate], in the order of `flat`."""
        return np.indices(self.sizes).reshape(self.size, -1).T

    def flat(self, cell: jax.Array) -> jax.Array:
        """The number of a cell, row by row; [..., coordinate] → [...]."""
        strides = np.cumprod((1, *self.sizes[:0:-1]))[::-1]
        return (cell * jnp.asarray(strides, jnp.int32)).sum(-1)

    def check_observation(self, values: np.ndarray) -> np.ndarray:
        """A user's cells, finite numbers [..., coordinate], as integers, or an error that says what a cell is."""
        if (values != np.floor(values)).any() or (values < 0).any() or (values >= self.sizes).any():
            raise UserError(f"observation must be a cell in {self.limits}, got {values.tolist()}")
        return values.astype(np.int32)


@dataclass(frozen=True)
class Box:
    """A real vector; `low` and `high` bound every component (infinite when unbounded; actions never are)."""

    size: int
    low: float = -np.inf
    high: float = np.inf

    dtype: ClassVar[Any] = jnp.float32
    fits_byte: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_integer("size of a box", self.size, 1)
        if not self.low <= self.high:
            raise UserError(f"a box's low must not be above its high, got {self.low} and {self.high}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one value."""
        return (self.size,)

    @property
    def encoded_size(self) -> int:
        """Length of `encode`'s vector."""
        return self.size

    def zeros(self, shape: tuple[int, ...]) -> jax.Array:
        """Zeros of this type, [*shape, size]."""
        return jnp.zeros((*shape, *self.shape), self.dtype)

    def no_action(self) -> jax.Array:
        """What stands for the last action where there was none: zeros, [size]."""
        return self.zeros(())

    def encode(self, value: jax.Array) -> jax.Array:
        """The numbers as they are."""
        return value.astype(self.dtype)

    def encode_scaled(self, action: jax.Array) -> jax.Array:
        """Actions moved from their bounds to [−1, 1]."""
        centre, half = self.centre_and_half()
        return (self.encode(action) - centre) / half

    def centre_and_half(self) -> tuple[float, float]:
        """Middle and half width of the bounds: centre + half · u lies within them for u in [−1, 1]."""
        if not (np.isfinite(self.low) and np.isfinite(self.high) and self.low < self.high):
            raise UserError(f"actions must have finite bounds, low < high, got {self}")
        return (self.low + self.high) / 2, (self.high - self.low) / 2

    def sample(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Uniform actions, [*shape, size]."""
        centre, half = self.centre_and_half()
        return centre + half * jax.random.uniform(key, (*shape, self.size), minval=-1.0)

    def check_action(self, action: object, real: type = np.float32) -> np.ndarray:
        """A user's action as an array of `real` numbers, or an error that says what an action is."""
        value = as_array(action)
        if value.shape != self.shape or value.dtype.kind not in "iuf":
            raise UserError(f"action must be {self.size} real numbers, got {action!r}")
        if not np.all((value >= self.low) & (value <= self.high)):  # false for NaN as well
            raise UserError(f"every component of an action must lie in [{self.low}, {self.high}], got {action!r}")
        return value.astype(real)

    def check_observation(self, values: np.ndarray) -> np.ndarray:
        """A user's finite numbers, [..., size]: all are accepted, since worlds overstep bounds by rounding."""
        return values
