"""A small network that sees only the observation, for ordinary learners (optimisers/lagrangian.py)."""

import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.envs.api import EnvSpec, Key, record
from safeicrl.envs.spaces import Box, Discrete
from safeicrl.errors import DEEPEST, WIDEST, UserError, check_integer
from safeicrl.nets.heads import LOG_STD, Categorical, Distribution, TanhNormal


def check_hidden(sizes: Any) -> tuple[int, ...]:
    """Return the sizes of hidden layers if they are a list of sizes, or say what is wrong with them."""
    if not isinstance(sizes, list | tuple) or len(sizes) > DEEPEST:
        raise UserError(f"hidden must be a list of at most {DEEPEST} sizes of layers, got {sizes!r:.60}")
    return tuple(check_integer("hidden", size, 1, WIDEST) for size in sizes)


class FeedForward(eqx.Module):
    """Linear → tanh → … → Linear."""

    weights: tuple[jax.Array, ...]  # [in, out] each
    biases: tuple[jax.Array, ...]  # [out] each

    def __init__(self, inputs: int, hidden: tuple[int, ...], outputs: int, key: Key):
        shapes = list(itertools.pairwise((inputs, *hidden, outputs)))
        counts = [a * b for a, b in shapes]
        # One draw for all layers: random numbers take most of the compile time of a learner's start.
        parts = jnp.split(jax.random.normal(key, (sum(counts),)), np.cumsum(counts)[:-1])
        # A small last layer: the first policy is nearly uniform, the first values nearly 0.
        scales = [1.0] * len(hidden) + [0.01]
        triples = zip(parts, shapes, scales, strict=True)
        self.weights = tuple(part.reshape(shape) * scale / np.sqrt(shape[0]) for part, shape, scale in triples)
        self.biases = tuple(jnp.zeros(b) for _, b in shapes)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply to the last axis."""
        *before, (weight, bias) = zip(self.weights, self.biases, strict=True)
        for w, b in before:
            x = jnp.tanh(x @ w + b)
        return x @ weight + bias


def evaluate_all(nets: FeedForward, x: jax.Array) -> jax.Array:
    """The outputs of several networks of one shape, [net, ...]."""
    return eqx.filter_vmap(lambda net: net(x))(nets)


@record
class Normaliser:
    """Running mean and variance of the observations."""

    count: jax.Array  # []
    mean: jax.Array  # [obs]
    variance: jax.Array  # [obs]

    @staticmethod
    def start(size: int) -> "Normaliser":
        """A normaliser that leaves the first observations as they are."""
        return Normaliser(count=jnp.float32(0), mean=jnp.zeros(size), variance=jnp.ones(size))

    def __call__(self, observation: jax.Array) -> jax.Array:
        """The observation with mean 0 and variance 1, clipped to ±10."""
        return jnp.clip((observation - self.mean) * jax.lax.rsqrt(self.variance + 1e-6), -10.0, 10.0)

    def update(self, observations: jax.Array) -> "Normaliser":
        """The normaliser after more `observations`, [..., obs], by the parallel formula for moments."""
        flat = observations.reshape(-1, observations.shape[-1])
        return self._joined(flat.mean(0), flat.var(0), len(flat))

    def update_where(self, observations: jax.Array, valid: jax.Array) -> "Normaliser":
        """The same, with only those `observations`, [..., obs], that are `valid`, [...] bool; at least one is."""
        flat, kept = observations.reshape(-1, observations.shape[-1]), valid.reshape(-1, 1)
        number = valid.sum()
        mean = (flat * kept).sum(0) / number
        return self._joined(mean, ((flat - mean) ** 2 * kept).sum(0) / number, number)

    def _joined(self, new_mean: jax.Array, new_variance: jax.Array, number: jax.Array | int) -> "Normaliser":
        count = self.count + number
        shift = new_mean - self.mean
        mean = self.mean + shift * number / count
        squares = self.variance * self.count + new_variance * number + shift**2 * self.count * number / count
        return Normaliser(count=count, mean=mean, variance=squares / count)


def encode(observation: jax.Array, spec: EnvSpec, normaliser: Normaliser | None) -> jax.Array:
    """What a network is given: each coordinate of a cell as one-hot, or the normalised vector."""
    encoded = spec.observation.encode(observation)
    return encoded if normaliser is None else normaliser(encoded)


def distribution(out: jax.Array, log_std: jax.Array | None) -> Distribution:
    """π from the actor's output."""
    if log_std is None:
        return Categorical(logits=out)
    return TanhNormal(mean=out, log_std=jnp.broadcast_to(jnp.clip(log_std, *LOG_STD), out.shape))


@record
class Actor:
    """A policy that sees only the observation: a network and, for real-valued actions, a constant spread."""

    net: FeedForward
    log_std: jax.Array | None  # [action]
    table: jax.Array | None = None  # [cell, action] added to the logits of all cells (algos/safe_meta.py)

    def __call__(self, inputs: jax.Array) -> Distribution:
        """π at `inputs`, [..., in]; with a table, these are all cells of the grid."""
        out = self.net(inputs)
        return distribution(out if self.table is None else out + self.table, self.log_std)


def action_outputs(spec: EnvSpec) -> tuple[int, jax.Array | None]:
    """Length of the actor's output, and for real-valued actions an array like log σ."""
    log_std = None if isinstance(spec.action, Discrete) else spec.action.zeros(())
    return spec.action.encoded_size, log_std


def first_normaliser(spec: EnvSpec) -> Normaliser | None:
    """A new one for real-valued observations; None for cells of a grid."""
    return Normaliser.start(spec.observation.size) if isinstance(spec.observation, Box) else None
