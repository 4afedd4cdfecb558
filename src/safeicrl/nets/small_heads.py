"""Causal attention for heads too small for a tensor core: Pallas kernels, on NVIDIA GPUs.

The paper's heads have 8 dimensions. cuDNN pads them to 64, so seven eighths of its work is for nothing. Here they
are padded to 16, the least that a tensor core takes. Trials in a row follow one another, so everything a token may
not see (other trials, tokens older than the window) lies before one position, the token's `first`. Whole blocks
before it are skipped, and blocks in which every query sees every key have no mask.

The usual three kernels of flash attention: the output with the logarithm of each token's normaliser, then the
gradients, by blocks of queries (dq) and by blocks of keys (dk, dv). Scores are in base 2, the GPU's exponential.

The kernels' time goes into the work per score, not into matrix products, so these do what they can of it. The
padding has room: a column of ones beside the values sums the weights; a number beside the queries and a one beside
the keys add that number to every score of the query. Heads of more than 13 dimensions have no such room.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

LEAST = 16  # smallest inner dimension of a tensor core's matrix product: heads are padded to it
PARTS = 3  # bfloat16 numbers that together are as exact as one of float32
HIDDEN = -1e30  # the score of what must not be seen; finite, so that no difference is NaN
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Blocks:
    """How the work is cut; the defaults are the fastest of bench/update.py on an H200."""

    forward: int = 64  # queries and keys in one step of the output's kernel
    backward: int = 64  # the same of the gradients' kernels; divides `forward`
    warps: int = 4
    stages: int = 3  # blocks on their way from memory at a time

    def __post_init__(self) -> None:
        if self.forward % self.backward:
            raise ValueError(f"backward must divide forward, got {self.backward} and {self.forward}")


DEFAULT = Blocks()


def sight(trial: jax.Array, window: int) -> tuple[jax.Array, jax.Array]:
    """The first position that each token sees, and the last that sees it. [row, time] → two of the same, int32"""
    at = jnp.arange(trial.shape[-1], dtype=jnp.int32)
    change, border = trial[:, 1:] != trial[:, :-1], jnp.ones_like(trial[:, :1], bool)
    begin = jax.lax.cummax(jnp.where(jnp.concatenate([border, change], -1), at, 0), axis=1)
    end = jax.lax.cummin(jnp.where(jnp.concatenate([change, border], -1), at, len(at)), axis=1, reverse=True)
    return jnp.maximum(begin, at - (window - 1)), jnp.minimum(end, at + (window - 1))


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, trial: jax.Array, window: int, blocks: Blocks = DEFAULT
) -> jax.Array:
    """As `attention.attend`; q, k, v: [row, time, head, dim] with dim at most 16."""
    steps, dim = q.shape[1], q.shape[-1]
    more = -steps % blocks.forward
    # The padding follows in the last trial: no token sees it, and it has no gradient.
    seen = sight(jnp.pad(trial, ((0, 0), (0, more)), mode="edge"), window)
    scaled = q * (dim**-0.5 * LOG2E)
    q, k, v = (jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))) for x in (scaled, k, v))
    return _attend(q, k, v, seen, blocks)[:, :steps]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: tuple[jax.Array, jax.Array], blocks: Blocks
) -> jax.Array:
    return _attend_forward(q, k, v, seen, blocks)[0]


def _attend_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: tuple[jax.Array, jax.Array], blocks: Blocks
) -> tuple[jax.Array, Any]:
    rows, steps, heads, dim = q.shape
    block, whole = _specs(steps, blocks.forward)
    wide_k, wide_v = _with_ones(k), _with_ones(v)
    out, normaliser = _call(
        functools.partial(_output_kernel, dim),
        (rows, heads, steps // blocks.forward),
        blocks,
        in_specs=[block["vectors"], whole["vectors"], whole["vectors"], block["positions"]],
        out_specs=[block["vectors"], block["numbers"]],
        out_shape=[_like(wide_v), jax.ShapeDtypeStruct((rows, heads, steps), jnp.float32)],
    )(_widen(q), wide_k, wide_v, seen[0])
    out = out[..., :dim]
    return out, (q, wide_k, wide_v, seen, out, normaliser)


def _attend_backward(blocks: Blocks, saved: Any, d_out: jax.Array) -> tuple[jax.Array | None, ...]:
    q, wide_k, wide_v, (first, last), out, normaliser = saved
    rows, steps, heads, dim = q.shape
    block, whole = _specs(steps, blocks.backward)
    call = functools.partial(_call, grid=(rows, heads, steps // blocks.backward), blocks=blocks)
    common = jnp.einsum("bthd,bthd->bht", d_out, out, preferred_element_type=jnp.float32)
    wide_q, wide_d_out = _widen(q), _widen(d_out)
    numbers: tuple[jax.Array, ...] = (normaliser, common)
    if _has_room(dim):
        wide_q, wide_d_out, numbers = _with_parts(q, -normaliser), _with_parts(d_out, -common), ()
    mine, theirs = ([x["vectors"], *(x["numbers"] for _ in numbers)] for x in (block, whole))
    (d_q,) = call(
        _query_kernel,
        in_specs=[block["vectors"], whole["vectors"], whole["vectors"], block["positions"], *mine],
        out_specs=[block["vectors"]],
        out_shape=[_like(wide_q)],
    )(wide_q, wide_k, wide_v, first, wide_d_out, *numbers)
    d_k, d_v = call(
        _key_kernel,
        in_specs=[whole["vectors"], block["vectors"], block["vectors"], block["positions"], *theirs],
        out_specs=[block["vectors"], block["vectors"]],
        out_shape=[_like(wide_k), _like(wide_v)],
    )(wide_q, wide_k, wide_v, last, wide_d_out, *numbers)
    return d_q[..., :dim], d_k[..., :dim], d_v[..., :dim], None


_attend.defvjp(_attend_forward, _attend_backward)


# -- what the padding holds


def _has_room(dim: int) -> bool:
    """Whether the padding of a head holds a number."""
    return dim + PARTS <= LEAST


def _widen(x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, LEAST - x.shape[-1])))


def _with_ones(x: jax.Array) -> jax.Array:
    """Keys or values with as many ones as a number has parts, where there is room."""
    if not _has_room(x.shape[-1]):
        return _widen(x)
    return _widen(jnp.concatenate([x, jnp.ones_like(x, shape=(*x.shape[:-1], PARTS))], -1))


def _with_parts(x: jax.Array, number: jax.Array) -> jax.Array:
    """Vectors [row, time, head, dim] with a number each, [row, head, time], cut into parts of their type."""
    kind, rest, parts = jnp.finfo(x.dtype), jnp.swapaxes(number, 1, 2), []
    for _ in range(PARTS):
        # Not a cast there and back: XLA takes that for needless.
        parts.append(jax.lax.reduce_precision(rest, kind.nexp, kind.nmant))
        rest = rest - parts[-1]
    return _widen(jnp.concatenate([x, jnp.stack(parts, -1).astype(x.dtype)], -1))


# -- kernels


def _output_kernel(
    dim: int, q_ref: Any, k_ref: Any, v_ref: Any, first_ref: Any, out_ref: Any, normaliser_ref: Any
) -> None:
    """The output of one block of queries, and the logarithm to base 2 of its normalisers."""
    q, first, at = q_ref[...], first_ref[...], _positions(q_ref)

    def add(index: jax.Array, carry: tuple[jax.Array, ...], masked: bool) -> tuple[jax.Array, ...]:
        out, largest, total = carry
        keys = pl.ds(index * len(q), len(q))
        scores = plgpu.dot(q, k_ref[keys, :].T)
        if masked:
            scores = _mask(scores, first, at, index)
        new = jnp.maximum(largest, scores.max(1))
        weights, shrink = _exp2(scores - new[:, None]), _exp2(largest - new)
        out = out * shrink[:, None] + plgpu.dot(weights.astype(q.dtype), v_ref[keys, :])
        return out, new, total if _has_room(dim) else total * shrink + weights.sum(1)

    begin = (jnp.zeros(q.shape, jnp.float32), jnp.full(len(q), HIDDEN), jnp.zeros(len(q), jnp.float32))
    out, largest, total = _through_keys(add, begin, first)
    if _has_room(dim):  # the values' first one has added up the weights
        total = jnp.where(jnp.arange(LEAST)[None, :] == dim, out, 0.0).sum(1)
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    normaliser_ref[...] = largest + jnp.log2(total)


def _query_kernel(q_ref: Any, k_ref: Any, v_ref: Any, first_ref: Any, d_out_ref: Any, *others: Any) -> None:
    """The gradient of one block of queries; `others`: the normalisers and common parts unless padding has them."""
    *numbers, d_q_ref = others
    q, first, at, d_out = q_ref[...], first_ref[...], _positions(q_ref), d_out_ref[...]
    less = [x[...][:, None] for x in numbers]

    def add(index: jax.Array, d_q: jax.Array, masked: bool) -> jax.Array:
        keys = pl.ds(index * len(q), len(q))
        k = k_ref[keys, :]
        scores, d_weights = _minus([plgpu.dot(q, k.T), plgpu.dot(d_out, v_ref[keys, :].T)], less)
        if masked:
            scores = _mask(scores, first, at, index)
        return d_q + plgpu.dot((_exp2(scores) * d_weights).astype(q.dtype), k)

    d_q = _through_keys(add, jnp.zeros(q.shape, jnp.float32), first)
    # q came scaled by log₂e, so that its scores are in base 2
    d_q_ref[...] = (d_q / LOG2E).astype(d_q_ref.dtype)


def _key_kernel(q_ref: Any, k_ref: Any, v_ref: Any, last_ref: Any, d_out_ref: Any, *others: Any) -> None:
    """The gradients of one block of keys and values; `others` begins as that of `_query_kernel`."""
    *numbers, d_k_ref, d_v_ref = others
    k, v, last, at = k_ref[...], v_ref[...], last_ref[...], _positions(k_ref)

    def add(index: jax.Array, carry: tuple[jax.Array, ...], masked: bool) -> tuple[jax.Array, ...]:
        d_k, d_v = carry
        queries = pl.ds(index * len(k), len(k))
        q, d_out = q_ref[queries, :], d_out_ref[queries, :]
        less = [x[queries][None, :] for x in numbers]
        scores, d_weights = _minus([plgpu.dot(k, q.T), plgpu.dot(v, d_out.T)], less)  # [key, query]
        if masked:
            scores = _mask(scores, at, last, index)
        weights = _exp2(scores)
        d_v = d_v + plgpu.dot(weights.astype(k.dtype), d_out)
        return d_k + plgpu.dot((weights * d_weights).astype(k.dtype), q), d_v

    zeros, mine = jnp.zeros(k.shape, jnp.float32), pl.program_id(2)
    # Queries from the next block on see all of these keys, up to the last one that sees the oldest key.
    edge = jnp.maximum((last.min() + 1) // len(k), mine + 1)
    end = last.max() // len(k) + 1
    d_k, d_v = _through(add, (zeros, zeros), whole=(mine + 1, edge), edge=(edge, end))
    d_k_ref[...], d_v_ref[...] = (d_k / LOG2E).astype(d_k_ref.dtype), d_v.astype(d_v_ref.dtype)


def _through_keys(add: Callable, carry: Any, first: jax.Array) -> Any:
    """`_through` the blocks of keys that this program's queries see."""
    size, mine = len(first), pl.program_id(2)
    # All queries see the keys from the largest `first` on.
    edge = jnp.minimum((first.max() + size - 1) // size, mine)
    return _through(add, carry, whole=(edge, mine), edge=(first.min() // size, edge))


def _through(add: Callable, carry: Any, whole: tuple[Any, Any], edge: tuple[Any, Any]) -> Any:
    """Add up blocks: this program's own and those from `edge[0]` to `edge[1]` with a mask, the `whole` without.

    A program's own block comes first: every token sees itself, so no token is ever without a score.
    """
    mine = pl.program_id(2)

    def masked(turn: jax.Array, carry: Any) -> Any:
        return add(jnp.where(turn == 0, mine, edge[0] + turn - 1), carry, masked=True)

    carry = jax.lax.fori_loop(0, 1 + edge[1] - edge[0], masked, carry)
    return jax.lax.fori_loop(*whole, functools.partial(add, masked=False), carry)


def _mask(scores: jax.Array, begin: jax.Array, end: jax.Array, index: jax.Array) -> jax.Array:
    """Hide the scores of each line outside of the positions `begin` to `end`; `index` is the other side's block."""
    other = index * scores.shape[1] + jnp.arange(scores.shape[1])[None, :]
    return jnp.where((other >= begin[:, None]) & (other <= end[:, None]), scores, HIDDEN)


def _minus(products: list[jax.Array], less: list[jax.Array]) -> list[jax.Array]:
    """Subtract the normaliser and the common part, unless the padding has already done so."""
    return [a - b for a, b in zip(products, less, strict=True)] if less else products


def _exp2(x: jax.Array) -> jax.Array:
    """2^x in one instruction, tiny results rounded to 0; `jnp.exp2` spends more instructions on these."""
    if _interpreted():
        return jnp.exp2(x)
    (found,) = plgpu.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[_like(x)],
    )
    return found


def _positions(block_ref: Any) -> jax.Array:
    """Where in the row the tokens of this program's block are."""
    return pl.program_id(2) * block_ref.shape[0] + jnp.arange(block_ref.shape[0])


def _specs(steps: int, block: int) -> tuple[dict[str, pl.BlockSpec], dict[str, pl.BlockSpec]]:
    """What a program sees of arrays [row, time, head, 16], [row, head, time] and [row, time]: a block, and all."""
    mine = {
        "vectors": pl.BlockSpec((None, block, None, LEAST), lambda row, head, i: (row, i, head, 0)),
        "numbers": pl.BlockSpec((None, None, block), lambda row, head, i: (row, head, i)),
        "positions": pl.BlockSpec((None, block), lambda row, head, i: (row, i)),
    }
    whole = {
        "vectors": pl.BlockSpec((None, steps, None, LEAST), lambda row, head, i: (row, 0, head, 0)),
        "numbers": pl.BlockSpec((None, None, steps), lambda row, head, i: (row, head, 0)),
    }
    return mine, whole


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _interpreted() -> bool:
    return jax.default_backend() == "cpu"  # for the tests


def _call(kernel: Callable, grid: tuple[int, ...], blocks: Blocks, **specs: Any) -> Callable:
    return pl.pallas_call(
        kernel,
        grid=grid,
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=_interpreted(),
        **specs,
    )
