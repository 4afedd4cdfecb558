"""Causal attention for heads too small for a tensor core: Pallas kernels, on NVIDIA GPUs.

The paper's heads have 8 dimensions. cuDNN pads them to 64, so seven eighths of its work is for nothing. Here they
are padded to 16, the least that a tensor core takes. Trials in a row follow one another, so everything a token may
not see (other trials, tokens older than the window) lies before one position, the token's `first`. Whole blocks
before it are skipped.

The usual three kernels of flash attention: the output with the logarithm of each token's normaliser, then the
gradients, by blocks of queries (dq) and by blocks of keys (dk, dv). Scores are in base 2, the GPU's exponential.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

LEAST = 16  # dimensions of a matrix product on a tensor core
HIDDEN = -1e30  # the score of what must not be seen; finite, so that no difference is NaN
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Blocks:
    """How the work is cut; the defaults are the fastest of bench/update.py on an H200."""

    forward: int = 64  # queries and keys in one step of the output's kernel
    backward: int = 64  # the same of the gradients' kernels; divides `forward`
    warps: int = 4

    def __post_init__(self) -> None:
        if self.forward % self.backward:
            raise ValueError(f"backward must divide forward, got {self.backward} and {self.forward}")


DEFAULT = Blocks()


def first_visible(trial: jax.Array, window: int) -> jax.Array:
    """The first position that each token sees, its trial's begin or the window's. [row, time] → the same, int32"""
    at = jnp.arange(trial.shape[-1], dtype=jnp.int32)
    begins = jnp.concatenate([jnp.ones_like(trial[:, :1], bool), trial[:, 1:] != trial[:, :-1]], -1)
    begin = jax.lax.cummax(jnp.where(begins, at, 0), axis=1)
    return jnp.maximum(begin, at - (window - 1))


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, trial: jax.Array, window: int, blocks: Blocks = DEFAULT
) -> jax.Array:
    """As `attention.attend`; q, k, v: [row, time, head, dim] with dim at most 16."""
    steps, dim = q.shape[1], q.shape[-1]
    more = -steps % blocks.forward
    # Padding sees padding; nobody else does.
    first = jnp.pad(first_visible(trial, window), ((0, 0), (0, more)), constant_values=steps)
    scaled = q * (dim**-0.5 * LOG2E)
    q, k, v = (jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, LEAST - dim))) for x in (scaled, k, v))
    return _attend(q, k, v, first, blocks)[:, :steps, :, :dim]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, blocks: Blocks) -> jax.Array:
    return _attend_forward(q, k, v, first, blocks)[0]


def _attend_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, blocks: Blocks
) -> tuple[jax.Array, Any]:
    rows, steps, heads, dim = q.shape
    block, whole = _specs(steps, dim, blocks.forward)
    out, normaliser = _call(
        _output_kernel,
        (rows, heads, steps // blocks.forward),
        blocks,
        in_specs=[block["vectors"], whole["vectors"], whole["vectors"], block["positions"]],
        out_specs=[block["vectors"], block["numbers"]],
        out_shape=[_like(q), jax.ShapeDtypeStruct((rows, heads, steps), jnp.float32)],
    )(q, k, v, first)
    return out, (q, k, v, first, out, normaliser)


def _attend_backward(blocks: Blocks, saved: Any, d_out: jax.Array) -> tuple[jax.Array | None, ...]:
    q, k, v, first, out, normaliser = saved
    rows, steps, heads, dim = q.shape
    block, whole = _specs(steps, dim, blocks.backward)
    grid = (rows, heads, steps // blocks.backward)
    common = jnp.einsum("bthd,bthd->bht", d_out, out, preferred_element_type=jnp.float32)
    mine, theirs = ([x["vectors"], x["numbers"], x["numbers"]] for x in (block, whole))
    (d_q,) = _call(
        _query_kernel,
        grid,
        blocks,
        in_specs=[block["vectors"], whole["vectors"], whole["vectors"], block["positions"], *mine],
        out_specs=[block["vectors"]],
        out_shape=[_like(q)],
    )(q, k, v, first, d_out, normaliser, common)
    # The last token that sees each position: `first` never falls.
    at = jnp.arange(steps)
    last = jax.vmap(lambda first: jnp.searchsorted(first, at, side="right") - 1)(first).astype(jnp.int32)
    d_k, d_v = _call(
        _key_kernel,
        grid,
        blocks,
        in_specs=[whole["vectors"], block["vectors"], block["vectors"], block["positions"], *theirs],
        out_specs=[block["vectors"], block["vectors"]],
        out_shape=[_like(k), _like(v)],
    )(q, k, v, last, d_out, normaliser, common)
    return d_q, d_k, d_v, None


_attend.defvjp(_attend_forward, _attend_backward)


def _output_kernel(q_ref: Any, k_ref: Any, v_ref: Any, first_ref: Any, out_ref: Any, normaliser_ref: Any) -> None:
    """The output of one block of queries, and the logarithm to base 2 of its normalisers."""
    q, first, at = q_ref[...], first_ref[...], _positions(q_ref)

    def add(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        out, largest, total = carry
        keys = pl.ds(index * len(q), len(q))
        scores = _scores(q, k_ref[keys, :], first, at, index * len(q))
        # Of a block with nothing to see all weights are 1; the next block that has something shrinks them to 0.
        new = jnp.maximum(largest, scores.max(1))
        weights, shrink = jnp.exp2(scores - new[:, None]), jnp.exp2(largest - new)
        out = out * shrink[:, None] + plgpu.dot(weights.astype(q.dtype), v_ref[keys, :])
        return out, new, total * shrink + weights.sum(1)

    begin = (jnp.zeros(q.shape, jnp.float32), jnp.full(len(q), HIDDEN), jnp.zeros(len(q), jnp.float32))
    out, largest, total = jax.lax.fori_loop(first.min() // len(q), pl.program_id(2) + 1, add, begin)
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    normaliser_ref[...] = largest + jnp.log2(total)


def _query_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    first_ref: Any,
    d_out_ref: Any,
    normaliser_ref: Any,
    common_ref: Any,
    d_q_ref: Any,
) -> None:
    """The gradient of one block of queries."""
    q, first, at, d_out = q_ref[...], first_ref[...], _positions(q_ref), d_out_ref[...]
    normaliser, common = normaliser_ref[...], common_ref[...]

    def add(index: jax.Array, d_q: jax.Array) -> jax.Array:
        keys = pl.ds(index * len(q), len(q))
        k = k_ref[keys, :]
        weights = jnp.exp2(_scores(q, k, first, at, index * len(q)) - normaliser[:, None])
        d_scores = weights * (plgpu.dot(d_out, v_ref[keys, :].T) - common[:, None])
        return d_q + plgpu.dot(d_scores.astype(q.dtype), k)

    begin = jnp.zeros(q.shape, jnp.float32)
    d_q = jax.lax.fori_loop(first.min() // len(q), pl.program_id(2) + 1, add, begin)
    # q came scaled by log₂e, so that its scores are in base 2
    d_q_ref[...] = (d_q / LOG2E).astype(d_q_ref.dtype)


def _key_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    last_ref: Any,
    d_out_ref: Any,
    normaliser_ref: Any,
    common_ref: Any,
    d_k_ref: Any,
    d_v_ref: Any,
) -> None:
    """The gradients of one block of keys and values."""
    k, v, last, at = k_ref[...], v_ref[...], last_ref[...], _positions(k_ref)

    def add(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        d_k, d_v = carry
        queries = pl.ds(index * len(k), len(k))
        q, d_out = q_ref[queries, :], d_out_ref[queries, :]
        asker = index * len(k) + jnp.arange(len(k))
        seen = (asker[None, :] >= at[:, None]) & (asker[None, :] <= last[:, None])  # [key, query]
        scores = jnp.where(seen, plgpu.dot(k, q.T), HIDDEN)
        weights = jnp.exp2(scores - normaliser_ref[queries][None, :])
        d_v = d_v + plgpu.dot(weights.astype(k.dtype), d_out)
        d_scores = weights * (plgpu.dot(v, d_out.T) - common_ref[queries][None, :])
        return d_k + plgpu.dot(d_scores.astype(k.dtype), q), d_v

    zeros = jnp.zeros(k.shape, jnp.float32)
    d_k, d_v = jax.lax.fori_loop(pl.program_id(2), last.max() // len(k) + 1, add, (zeros, zeros))
    d_k_ref[...], d_v_ref[...] = (d_k / LOG2E).astype(d_k_ref.dtype), d_v.astype(d_v_ref.dtype)


def _scores(q: jax.Array, k: jax.Array, first: jax.Array, at: jax.Array, begin: jax.Array) -> jax.Array:
    """What the queries make of the keys from position `begin` on, [query, key]."""
    key = begin + jnp.arange(len(k))
    seen = (key[None, :] >= first[:, None]) & (key[None, :] <= at[:, None])
    return jnp.where(seen, plgpu.dot(q, k.T), HIDDEN)


def _positions(block_ref: Any) -> jax.Array:
    """Where in the row the tokens of this program's block are."""
    return pl.program_id(2) * block_ref.shape[0] + jnp.arange(block_ref.shape[0])


def _specs(steps: int, dim: int, block: int) -> tuple[dict[str, pl.BlockSpec], dict[str, pl.BlockSpec]]:
    """What a program sees of arrays [row, time, head, dim], [row, head, time] and [row, time]: a block, and all."""
    mine = {
        "vectors": pl.BlockSpec((None, block, None, dim), lambda row, head, i: (row, i, head, 0)),
        "numbers": pl.BlockSpec((None, None, block), lambda row, head, i: (row, head, i)),
        "positions": pl.BlockSpec((None, block), lambda row, head, i: (row, i)),
    }
    whole = {
        "vectors": pl.BlockSpec((None, steps, None, dim), lambda row, head, i: (row, 0, head, 0)),
        "numbers": pl.BlockSpec((None, None, steps), lambda row, head, i: (row, head, 0)),
    }
    return mine, whole


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _call(kernel: Callable, grid: tuple[int, ...], blocks: Blocks, **specs: Any) -> Callable:
    return pl.pallas_call(
        kernel,
        grid=grid,
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=2),
        interpret=jax.default_backend() == "cpu",  # for the tests
        **specs,
    )
