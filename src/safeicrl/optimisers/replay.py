"""A ring buffer of whole rows of trials, on the device."""

import jax
import jax.numpy as jnp

from safeicrl.envs.api import Key, PyTree, record


@record
class Replay:
    """Rows, newest overwriting oldest."""

    rows: PyTree  # every leaf [capacity, ...]
    added: jax.Array  # [] int32, rows ever added

    @property
    def capacity(self) -> int:
        """Rows it holds when full."""
        return jax.tree.leaves(self.rows)[0].shape[0]

    @property
    def size(self) -> jax.Array:
        """Rows it holds now."""
        return jnp.minimum(self.added, self.capacity)


def init(example: PyTree, capacity: int) -> Replay:
    """An empty buffer for rows shaped like those of `example` ([row, ...], arrays or their shapes)."""
    empty = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape[1:]), x.dtype), example)
    return Replay(rows=empty, added=jnp.int32(0))


def add(replay: Replay, rows: PyTree) -> Replay:
    """Add `rows` ([row, ...]); at most the capacity at once."""
    count = jax.tree.leaves(rows)[0].shape[0]
    slots = (replay.added + jnp.arange(count)) % replay.capacity
    stored = jax.tree.map(lambda old, new: old.at[slots].set(new), replay.rows, rows)
    return Replay(rows=stored, added=replay.added + count)


def sample(replay: Replay, key: Key, count: int) -> PyTree:
    """Draw `count` rows uniformly, with replacement, from those that were added."""
    index = jax.random.randint(key, (count,), 0, replay.size)
    return jax.tree.map(lambda x: x[index], replay.rows)
