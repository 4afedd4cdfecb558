"""Linear, norm and MLP with float32 parameters and the computation in the input's type.

Equinox's own layers take one vector at a time, under vmap. These take any leading shape, and cast their weights as
needed: a bfloat16 forward pass keeps no second copy of the parameters.
"""

import equinox as eqx
import jax
import jax.numpy as jnp

from safeicrl.envs.api import Key


class Linear(eqx.Module):
    """y = x W + b, any leading shape."""

    weight: jax.Array  # [in, out]
    bias: jax.Array | None  # [out]

    def __init__(self, n_in: int, n_out: int, key: Key, *, scale: float = 1.0, bias: bool = True):
        self.weight = jax.random.normal(key, (n_in, n_out)) * scale / jnp.sqrt(n_in)
        self.bias = jnp.zeros(n_out) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply to the last axis."""
        y = x @ self.weight.astype(x.dtype)
        return y if self.bias is None else y + self.bias.astype(x.dtype)


class LayerNorm(eqx.Module):
    """Normalise the last axis, in float32 whatever the input."""

    scale: jax.Array  # [width]
    offset: jax.Array  # [width]

    def __init__(self, width: int):
        self.scale, self.offset = jnp.ones(width), jnp.zeros(width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply to the last axis."""
        wide = x.astype(jnp.float32)
        wide = wide - wide.mean(-1, keepdims=True)
        wide = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
        return (wide * self.scale + self.offset).astype(x.dtype)


class MLP(eqx.Module):
    """Linear → GELU → Linear."""

    first: Linear
    second: Linear

    def __init__(self, n_in: int, hidden: int, n_out: int, key: Key, *, scale: float = 1.0):
        one, two = jax.random.split(key)
        self.first, self.second = Linear(n_in, hidden, one), Linear(hidden, n_out, two, scale=scale)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply to the last axis."""
        return self.second(jax.nn.gelu(self.first(x)))

    def read_out(self, x: jax.Array, shift: jax.Array | float = 0.0, gain: jax.Array | float = 1.0) -> jax.Array:
        """The same with a float32 output layer, for logits and values; hidden layer times `gain` plus `shift`."""
        return self.second(jax.nn.gelu(gain * self.first(x) + shift).astype(jnp.float32))


def in_new_units(layer: Linear, factor: jax.Array) -> Linear:
    """An output layer whose outputs are `factor` times what they were.

    Critics predict in units of a running scale. When the scale changes, their values must not. Otherwise a growing
    scale would raise the values, these the bootstrapped targets, and those the scale again. (PopArt, van Hasselt
    et al. 2016)
    """
    bias = None if layer.bias is None else layer.bias * factor
    return eqx.tree_at(
        lambda x: (x.weight, x.bias), layer, (layer.weight * factor, bias), is_leaf=lambda x: x is None
    )
