"""Causal attention inside trials: whole rows for learning, one step with a KV cache for acting.

A row may hold several trials one after another (trial.py); a token sees earlier tokens of its own trial only.
"""

import jax
import jax.numpy as jnp

from safeicrl.machine.devices import divided, over_rows

SMALL = 16  # dimensions of the largest head for our own kernels, small_heads.LEAST
CHUNK = 64  # tokens in a query block on the CPU: block-causal halves the work of a full square ...
WIDE_CHUNK = 512  # ... on an accelerator that hardly matters, and every block takes time to compile
SEPARATION = 40.0  # logits added within a trial; e^−40 of the weight leaks between trials
MAX_TRIALS = 8  # trials a row can hold (the separating code is one-hot)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, trial: jax.Array, window: int) -> jax.Array:
    """Causal attention of whole rows. q, k, v: [row, time, head, dim]; trial: [row, time] int. → like v.

    A token sees the newest `window` tokens of its trial, itself among them, as acting with a cache does.

    In bfloat16 on NVIDIA GPUs: our kernels for heads of up to 16 dimensions, fused cuDNN attention for larger ones
    and on several devices, among which XLA cannot divide our kernels. Plain block-causal attention everywhere else.
    """
    # Not `lax.platform_dependent`: that traces all branches, and cuDNN's refuses to be traced without a GPU.
    if q.dtype != jnp.bfloat16 or jax.default_backend() != "gpu":
        return _attend_blocks(q, k, v, trial, window)
    if q.shape[-1] > SMALL or divided():
        return _attend_fused(q, k, v, trial, window)
    from safeicrl.nets import small_heads  # here: importing Pallas takes time, and only GPUs need it

    return small_heads.attend(q, k, v, trial, window)


def _attend_fused(q: jax.Array, k: jax.Array, v: jax.Array, trial: jax.Array, window: int) -> jax.Array:
    """cuDNN has no cheap mask for trials: code the trial as one-hot in extra dimensions of q and k instead.

    Head dimensions this small are padded inside the kernel anyway, so the extra eight cost nothing.
    """
    dim, scale = q.shape[-1], q.shape[-1] ** -0.5
    extra = MAX_TRIALS + -dim % 8  # cuDNN takes multiples of eight only
    code = jax.nn.one_hot(trial, extra, dtype=q.dtype)[:, :, None, :]
    code = jnp.broadcast_to(code, (*q.shape[:-1], extra))
    q = jnp.concatenate([q, code * (SEPARATION / scale)], -1)
    k = jnp.concatenate([k, code], -1)
    v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, extra)))
    q, k, v = over_rows((q, k, v))  # on several devices the kernel wants all three divided alike
    local = (window - 1, 0) if window < q.shape[1] else None
    out = jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=True, local_window_size=local, implementation="cudnn"
    )
    return out[..., :dim]


def _attend_blocks(q: jax.Array, k: jax.Array, v: jax.Array, trial: jax.Array, window: int) -> jax.Array:
    steps = q.shape[1]
    # At most a dozen blocks: more would only grow the program.
    chunk = max(CHUNK if jax.default_backend() == "cpu" else WIDE_CHUNK, -(-steps // 12))
    blocks = []
    for begin in range(0, steps, chunk):
        end = min(begin + chunk, steps)
        # Keys that no token of this block can see are not even read.
        first = max(begin + 1 - window, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q[:, begin:end], k[:, first:end]) * q.shape[-1] ** -0.5
        age = jnp.arange(begin, end)[:, None] - jnp.arange(first, end)[None, :]
        causal = (age >= 0) & (age < window)
        same = trial[:, begin:end, None] == trial[:, None, first:end]
        scores = jnp.where((causal & same)[:, None], scores.astype(jnp.float32), -jnp.inf)
        weights = jax.nn.softmax(scores, -1).astype(v.dtype)
        blocks.append(jnp.einsum("bhqk,bkhd->bqhd", weights, v[:, first:end]))
    return jnp.concatenate(blocks, 1)


def attend_step(q: jax.Array, keys: jax.Array, values: jax.Array, age: jax.Array, clock: jax.Array) -> jax.Array:
    """One query per row against its cache, a ring whose newest entry is slot `clock mod slots`. → [row, head, dim]

    q: [row, head, dim]; keys: [row · head, dim, slot]; values: [row · head, slot, dim]; age: [row] int, how many of
    the newest slots the row may see; clock: [] or [row] int.
    """
    slots, (_, heads, dim) = keys.shape[-1], q.shape
    seen = in_sight(slots, age, clock)
    scores = _weigh("nd,ndk->nk", q.reshape(-1, dim), keys) * dim**-0.5  # [row · head, slot]
    scores = jnp.where(jnp.repeat(seen, heads, axis=0), scores, -jnp.inf)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True)).astype(values.dtype)
    return _weigh("nk,nkd->nd", weights, values).astype(q.dtype).reshape(q.shape)


def in_sight(slots: int, age: jax.Array, clock: jax.Array) -> jax.Array:
    """[row, slot] bool: which slots of a ring a row may see, the newest `age` up to slot `clock mod slots`."""
    return (clock[..., None] - jnp.arange(slots)) % slots < age[:, None]


def _weigh(product: str, vector: jax.Array, matrix: jax.Array) -> jax.Array:
    """A vector-matrix product per head, in float32, in the form that reads the cache fastest (docs/speed.md).

    On a GPU: multiply and sum over an axis that is not the innermost, which XLA fuses into one pass at memory
    speed. On a CPU: a matrix product.
    """
    if jax.default_backend() == "gpu":
        return (vector[..., None] * matrix).astype(jnp.float32).sum(-2)
    return jnp.einsum(product, vector, matrix, preferred_element_type=jnp.float32)
