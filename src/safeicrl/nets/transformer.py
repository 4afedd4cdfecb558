"""The trajectory encoder: a causal transformer over the tokens of a trial.

`forward` reads whole rows, for learning. `step` reads one token per row with a KV cache, for acting. Both give the
same features (tests/test_transformer.py). The position (time in the episode, index of the episode) is part of the
token, not of the cache slot, so slots can be reused in a ring and rows can be at different timesteps.
"""

from dataclasses import dataclass
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp

from safeicrl.envs.api import EnvSpec, Key, record, replace
from safeicrl.errors import DEEPEST, MOST_ROWS, WIDEST, UserError, check_integer
from safeicrl.nets.attention import attend, attend_step
from safeicrl.nets.layers import MLP, LayerNorm, Linear
from safeicrl.tokens import Token

CTG_SCALES = 6  # ramps of the remaining budget, each half as wide as the one before
TILE = 64  # tokens; on a GPU whole rows are padded to a multiple of it
TIME_WAVES = 3  # sine/cosine pairs of the time in the episode


@dataclass(frozen=True)
class NetConfig:
    """Sizes of the network; the defaults are the paper's."""

    width: int = 64  # of a token's vector
    layers: int = 4  # blocks of attention and MLP
    heads: int = 8  # of attention; width must be a multiple
    context: int = 1500  # newest tokens that a token sees, in learning and in acting; older ones are forgotten
    levels: int = 0  # of each number of a real-valued action, see heads.Levels; 0: a tanh-normal instead
    guard: int = 0  # steps that the guard looks ahead (guard.py); 0: no guard
    guard_clock: bool = False  # whether the guard looks no further than the last step before the time limit
    guard_ledger: int = 0  # points that the guard looks up in its ledger (ledger.py); 0: no ledger
    shared_ledger: bool = False  # whether the policy reads the guard's ledger, too
    saturate: int | None = None  # episode from which on the index of the episode no longer grows; None: never
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on a GPU, float32 elsewhere

    def __post_init__(self) -> None:
        for name, most in (("width", WIDEST), ("layers", DEEPEST), ("heads", WIDEST), ("context", MOST_ROWS)):
            check_integer(name, getattr(self, name), 1, most)
        if check_integer("levels", self.levels, 0, WIDEST) == 1:
            raise UserError("levels must be 0, for a tanh-normal, or at least 2, got 1")
        check_integer("guard", self.guard, 0, WIDEST)
        if check_integer("guard_ledger", self.guard_ledger, 0, WIDEST) and not self.guard:
            raise UserError(
                f"guard_ledger {self.guard_ledger} is for a guard: leave it out, or give guard, its depth"
            )
        if self.shared_ledger and not self.guard_ledger:
            raise UserError("shared_ledger is for a guard's ledger: leave it out, or give guard_ledger, its points")
        if self.saturate is not None:
            check_integer("saturate", self.saturate, 1)
        if self.width % self.heads:
            raise UserError(f"width must be a multiple of heads, got width {self.width} and heads {self.heads}")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise UserError(f"dtype must be auto, float32 or bfloat16, got {self.dtype!r}")

    @property
    def compute_dtype(self) -> jnp.dtype:
        """The type activations have on this machine."""
        bfloat16 = self.dtype == "bfloat16" or (self.dtype == "auto" and jax.default_backend() == "gpu")
        return jnp.dtype(jnp.bfloat16 if bfloat16 else jnp.float32)


@record
class Cache:
    """Keys and values of past tokens, a ring of slots that all rows fill in step, or each row by its own clock.

    Rows and heads share an axis: with two of them XLA would copy the whole cache at every step on a CPU.
    """

    keys: tuple[jax.Array, ...]  # per layer [row · head, dim, slot]
    values: tuple[jax.Array, ...]  # per layer [row · head, slot, dim]
    clock: jax.Array  # [] or [row] int32, tokens read so far; the next goes to slot clock mod slots
    age: jax.Array  # [row] int32, tokens of the row's present trial in the cache
    entries: jax.Array | None = None  # [row, column, slot] of the guard's ledger, if it has one (`Ledger.slot`)
    cells: jax.Array | None = None  # [row, 2, cell], what was paid and how often, in the cells of a small grid


def featurise(token: Token, spec: EnvSpec, saturate: int | None = None) -> jax.Array:
    """A token as a float vector, [..., feature]. Any leading shape.

    The episode's index stops at `saturate`: an agent that runs on for ever then sees nothing it was not trained on.
    """
    episode = token.episode if saturate is None else jnp.minimum(token.episode, saturate)
    ramps = [max(high, 1.0) * 0.5 ** jnp.arange(CTG_SCALES) for _, high in spec.ranges("train")]  # of each cost
    left = spec.each_cost(token.ctg)
    waves = jnp.pi * 2.0 ** jnp.arange(TIME_WAVES) * (token.time[..., None] / spec.max_steps)
    # No action yet is all zeros, wherever the middle of an action's range is.
    action = jnp.where(token.first[..., None], 0.0, spec.action.encode_scaled(token.action))
    numbers = [
        token.reward,
        *spec.each_cost(token.cost),
        token.start,
        token.time / spec.max_steps,
        episode / spec.episodes,
    ]
    return jnp.concatenate(
        [
            spec.observation.encode(token.observation),
            spec.observation.encode(token.previous),
            action,
            *(jnp.clip(ctg[..., None] / scales, -1, 1) for ctg, scales in zip(left, ramps, strict=True)),
            jnp.sin(waves),
            jnp.cos(waves),
            jnp.stack([jnp.asarray(x, jnp.float32) for x in numbers], -1),
        ],
        -1,
    )


def feature_size(spec: EnvSpec) -> int:
    """Length of `featurise`'s vector."""
    costs = len(spec.costs) * (CTG_SCALES + 1)
    return 2 * spec.observation.encoded_size + spec.action.encoded_size + costs + 2 * TIME_WAVES + 4


def padding(steps: int) -> int:
    """How many tokens to add to whole rows of `steps`.

    On a GPU XLA cuts the long sums in the weights' gradients into equal parts. Tokens that cannot be cut so are
    first copied into a padded array, in every layer, which takes longer than a few tokens more (docs/speed.md).
    """
    return -steps % TILE if jax.default_backend() == "gpu" else 0


class Block(eqx.Module):
    """Pre-norm attention and MLP."""

    norm_attention: LayerNorm
    qkv: Linear
    out: Linear
    norm_mlp: LayerNorm
    mlp: MLP
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, layers: int, key: Key):
        qkv, out, mlp = jax.random.split(key, 3)
        residual = (2 * layers) ** -0.5  # keeps the residual stream's size independent of depth
        self.norm_attention, self.norm_mlp = LayerNorm(width), LayerNorm(width)
        self.qkv = Linear(width, 3 * width, qkv, bias=False)
        self.out = Linear(width, width, out, scale=residual)
        self.mlp = MLP(width, 4 * width, width, mlp, scale=residual)
        self.heads = heads

    def project(self, x: jax.Array) -> jax.Array:
        """Queries, keys and values side by side, [..., 3 · width]."""
        return self.qkv(self.norm_attention(x))

    def split(self, qkv: jax.Array) -> list[jax.Array]:
        """Queries, keys and values, each [..., head, dim]."""
        return [part.reshape(*part.shape[:-1], self.heads, -1) for part in jnp.split(qkv, 3, -1)]

    def finish(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """Add the attention's output, then the MLP's."""
        x = x + self.out(attended.reshape(x.shape))
        return x + self.mlp(self.norm_mlp(x))


class Transformer(eqx.Module):
    """Token encoder, blocks, final norm."""

    encoder: MLP
    norm_in: LayerNorm
    blocks: list[Block]
    norm_out: LayerNorm
    config: NetConfig = eqx.field(static=True)
    spec: EnvSpec = eqx.field(static=True)

    def __init__(self, config: NetConfig, spec: EnvSpec, key: Key):
        encoder, *blocks = jax.random.split(key, config.layers + 1)
        self.encoder = MLP(feature_size(spec), 2 * config.width, config.width, encoder)
        self.norm_in, self.norm_out = LayerNorm(config.width), LayerNorm(config.width)
        self.blocks = [Block(config.width, config.heads, config.layers, k) for k in blocks]
        self.config, self.spec = config, spec

    def embed(self, token: Token) -> jax.Array:
        """Tokens → vectors, in the computing type."""
        features = featurise(token, self.spec, self.config.saturate)
        return self.norm_in(self.encoder(features.astype(self.config.compute_dtype)))

    def forward(self, tokens: Token, trial: jax.Array) -> jax.Array:
        """Features of every token of whole rows, [row, time, width]. `trial`: [row, time] int."""
        x = self.embed(tokens)
        steps = x.shape[1]
        more = padding(steps)
        x = jnp.pad(x, ((0, 0), (0, more), (0, 0)))
        trial = jnp.pad(trial, ((0, 0), (0, more)), mode="edge")  # at the end of the last trial: no token sees it
        for block in self.blocks:
            # The barrier is for the way back: without it a GPU puts the three gradients together twice.
            q, k, v = block.split(jax.lax.optimization_barrier(block.project(x)))
            x = block.finish(x, attend(q, k, v, trial, self.config.context))
        return self.norm_out(x[:, :steps])

    def init_cache(self, rows: int, slots: int, own_clocks: bool = False) -> Cache:
        """An empty cache; with `own_clocks` a row can be taken back to an earlier time, apart from the others."""
        heads, dim = self.config.heads, self.config.width // self.config.heads
        dtype = self.config.compute_dtype
        return Cache(
            keys=tuple(jnp.zeros((rows * heads, dim, slots), dtype) for _ in self.blocks),
            values=tuple(jnp.zeros((rows * heads, slots, dim), dtype) for _ in self.blocks),
            clock=jnp.zeros(rows if own_clocks else (), jnp.int32),
            age=jnp.zeros(rows, jnp.int32),
        )

    def extend_cache(self, cache: Cache, slots: int, spare: int = 0) -> Cache:
        """The same cache with room for `slots` tokens, at most the context, and `spare` more.

        Only before the ring closes.
        """
        more = min(slots, self.config.context) + spare - cache.keys[0].shape[-1]
        if more <= 0:
            return cache
        return replace(
            cache,
            keys=tuple(jnp.pad(k, ((0, 0), (0, 0), (0, more))) for k in cache.keys),
            values=tuple(jnp.pad(v, ((0, 0), (0, more), (0, 0))) for v in cache.values),
            entries=None if cache.entries is None else jnp.pad(cache.entries, ((0, 0), (0, 0), (0, more))),
        )

    def step(self, cache: Cache, token: Token, fresh: jax.Array) -> tuple[Cache, jax.Array]:
        """Read one token per row; `fresh` rows ([row] bool) first forget everything. → features [row, width]."""
        slots = cache.keys[0].shape[-1]
        slot = cache.clock % slots
        age = jnp.minimum(jnp.where(fresh, 0, cache.age) + 1, slots)
        x = self.embed(token)
        keys, values = [], []
        for block, k_past, v_past in zip(self.blocks, cache.keys, cache.values, strict=True):
            q, k, v = block.split(block.project(x))
            k, v = (x.reshape(-1, x.shape[-1]) for x in (k, v))  # [row · head, dim]
            if slot.ndim:  # [row]: scattered, which is slower
                entry, own = jnp.arange(len(k)), jnp.repeat(slot, block.heads)
                keys.append(k_past.at[entry, :, own].set(k, unique_indices=True))
                values.append(v_past.at[entry, own].set(v, unique_indices=True))
            else:
                keys.append(jax.lax.dynamic_update_slice(k_past, k[:, :, None], (0, 0, slot)))
                values.append(jax.lax.dynamic_update_slice(v_past, v[:, None], (0, slot, 0)))
            x = block.finish(x, attend_step(q, keys[-1], values[-1], age, cache.clock))
        cache = replace(cache, keys=tuple(keys), values=tuple(values), clock=cache.clock + 1, age=age)
        return cache, self.norm_out(x)
