"""Safe AD's network: a constrained decision transformer over a window of a learning history.

At every step of the window it predicts the action, from all steps before, the present observation, and the return
and cost that are asked for. A step is four tokens, as in the paper's backbone: return-to-go, cost-to-go, state, and
the action with the reward and cost that followed; the prediction is read off the state's token. Or a step is one
token that includes the step before: a quarter of the work (docs/safe_ad.md).
"""

from dataclasses import dataclass
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp

from safeicrl.envs.api import EnvSpec, Key, record
from safeicrl.envs.spaces import Box, Discrete, Grid
from safeicrl.errors import DEEPEST, WIDEST, UserError, check_integer, check_number
from safeicrl.nets.heads import LOG_STD, Categorical, TanhNormal
from safeicrl.nets.layers import MLP, LayerNorm, Linear

RAMPS = 6  # of a number to go, each half as wide as the one before: they tell small budgets apart as well as large


@dataclass(frozen=True)
class DecisionConfig:
    """Sizes of the network; the defaults are the paper's for SafeDarkRoom."""

    embedding: int = 64  # of each thing in a step
    width: int = 512  # of a token's vector
    layers: int = 8  # blocks of attention and MLP
    heads: int = 8  # of attention; width must be a multiple
    context: int = 100  # steps in a window
    tokens: Literal["four", "one"] = "one"  # tokens per step
    # real-valued actions: their mean, as in the paper, or a distribution to sample from, as the learner's own
    actions: Literal["mean", "sampled"] = "mean"
    attention_dropout: float = 0.5  # share of attention weights dropped in training
    residual_dropout: float = 0.1  # share of each layer's output dropped in training
    embedding_dropout: float = 0.3  # share of each token dropped in training
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on a GPU, float32 elsewhere

    def __post_init__(self) -> None:
        for name in ("embedding", "width", "heads", "context"):
            check_integer(name, getattr(self, name), 1, WIDEST)
        check_integer("layers", self.layers, 1, DEEPEST)
        if self.width % self.heads:
            raise UserError(f"width must be a multiple of heads, got width {self.width} and heads {self.heads}")
        for name in ("attention_dropout", "residual_dropout", "embedding_dropout"):
            if check_number(name, getattr(self, name), 0.0) >= 1:
                raise UserError(f"{name} must be below 1, got {getattr(self, name)}")
        for name, known in (
            ("tokens", ("four", "one")),
            ("actions", ("mean", "sampled")),
            ("dtype", ("auto", "float32", "bfloat16")),
        ):
            if getattr(self, name) not in known:
                raise UserError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")

    @property
    def compute_dtype(self) -> jnp.dtype:
        """The type activations have on this machine."""
        bfloat16 = self.dtype == "bfloat16" or (self.dtype == "auto" and jax.default_backend() == "gpu")
        return jnp.dtype(jnp.bfloat16 if bfloat16 else jnp.float32)


@record
class Steps:
    """A stretch of one history, [row, time]. Once an episode has ended, `rtg` and `ctg` are what it really got."""

    observation: jax.Array  # [row, time, obs]
    action: jax.Array  # [row, time] int, −1 where not chosen yet; or [row, time, action]
    reward: jax.Array  # [row, time] that followed the action
    cost: jax.Array  # [row, time]
    rtg: jax.Array  # [row, time] return-to-go: the episode's return from here on, with this step's reward
    ctg: jax.Array  # [row, time] cost-to-go
    time: jax.Array  # [row, time] int, steps since the episode began


@record
class Scales:
    """How to scale numbers before they enter the network, as measured on the data. Never trained."""

    mean: jax.Array  # [obs] of real-valued observations
    deviation: jax.Array  # [obs]
    step: jax.Array  # [2] the greatest size of a step's reward and cost
    returns: jax.Array  # [2] least and greatest return of an episode
    costs: jax.Array  # [2] least and greatest cost of an episode


def unit_scales(spec: EnvSpec) -> Scales:
    """Scales that change nothing; loaded ones replace their arrays."""
    size = spec.observation.size
    span = jnp.array([0.0, 1.0])
    return Scales(mean=jnp.zeros(size), deviation=jnp.ones(size), step=jnp.ones(2), returns=span, costs=span)


class Encoder(eqx.Module):
    """Steps → token vectors."""

    observation: Linear
    action: Linear
    outcome: Linear  # reward and cost
    rtg: Linear
    ctg: Linear
    time: Linear  # of the one-hot time in the episode: a learned table
    lift: list[Linear]  # embedding → width, one for each token of a step
    spec: EnvSpec = eqx.field(static=True)

    def __init__(self, config: DecisionConfig, spec: EnvSpec, key: Key):
        keys = iter(jax.random.split(key, 10))
        size, self.spec = config.embedding, spec
        self.observation = Linear(spec.observation.encoded_size, size, next(keys))
        self.action = Linear(spec.action.encoded_size, size, next(keys))
        self.outcome = Linear(2, size, next(keys))
        self.rtg, self.ctg = (Linear(RAMPS, size, next(keys)) for _ in range(2))
        self.time = Linear(spec.max_steps, size, next(keys), bias=False)
        widths = [size] * 4 if config.tokens == "four" else [7 * size]
        self.lift = [Linear(n, config.width, next(keys)) for n in widths]

    def __call__(self, steps: Steps, scales: Scales, dtype: jnp.dtype) -> jax.Array:
        """[row, token, width]; a step's four tokens lie one after another."""
        act = self.spec.action.encode(steps.action)
        outcome = jnp.stack([steps.reward, steps.cost], -1).astype(jnp.float32) / scales.step
        seen = self.observation(_scaled(steps.observation, self.spec.observation, scales).astype(dtype))
        done, came = self.action(act.astype(dtype)), self.outcome(outcome.astype(dtype))
        asked = [
            embed(_ramps(to_go, jnp.abs(ends).max()).astype(dtype))
            for embed, to_go, ends in ((self.rtg, steps.rtg, scales.returns), (self.ctg, steps.ctg, scales.costs))
        ]
        when = self.time(jax.nn.one_hot(steps.time, self.spec.max_steps, dtype=dtype))
        if len(self.lift) == 1:
            # The first step of a window has no step before it, like the first step of a trial.
            before = [jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0))) for x in (seen, done, came)]
            return self.lift[0](jnp.concatenate([*asked, seen, when, *before], -1))
        tokens = [lift(x + when) for lift, x in zip(self.lift, (*asked, seen, done + came), strict=True)]
        return jnp.stack(tokens, 2).reshape(seen.shape[0], 4 * seen.shape[1], -1)


def _scaled(observation: jax.Array, space: Grid | Box, scales: Scales) -> jax.Array:
    if isinstance(space, Box):
        return jnp.clip((observation - scales.mean) / scales.deviation, -10, 10)
    return space.encode(observation)


def _ramps(value: jax.Array, greatest: jax.Array) -> jax.Array:
    widths = jnp.maximum(greatest, 1e-6) * 0.5 ** jnp.arange(RAMPS)
    return jnp.clip(value[..., None].astype(jnp.float32) / widths, -1, 1)


class Layer(eqx.Module):
    """Pre-norm attention and MLP."""

    norm_attention: LayerNorm
    qkv: Linear
    out: Linear
    norm_mlp: LayerNorm
    mlp: MLP

    def __init__(self, config: DecisionConfig, key: Key):
        qkv, out, mlp = jax.random.split(key, 3)
        width, residual = config.width, (2 * config.layers) ** -0.5
        self.norm_attention, self.norm_mlp = LayerNorm(width), LayerNorm(width)
        self.qkv = Linear(width, 3 * width, qkv, bias=False)
        self.out = Linear(width, width, out, scale=residual)
        self.mlp = MLP(width, 4 * width, width, mlp, scale=residual)

    def __call__(self, x: jax.Array, config: DecisionConfig, key: Key | None) -> jax.Array:
        """[row, token, width] → the same; dropout where there is a `key`."""
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        qkv = self.qkv(self.norm_attention(x))
        q, k, v = (part.reshape(*x.shape[:2], config.heads, -1) for part in jnp.split(qkv, 3, -1))
        # Attention dropout with one mask per key and head, shared by all queries. Dropping all weights on a key is
        # the same as dropping its value, so the fused kernel can do the attention.
        v = drop(v, config.attention_dropout, keys[0], shape=(*v.shape[:-1], 1))
        x = x + drop(self.out(_attend(q, k, v).reshape(x.shape)), config.residual_dropout, keys[1])
        return x + drop(self.mlp(self.norm_mlp(x)), config.residual_dropout, keys[2])


def _attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention, [row, token, head, dim]: cuDNN's on a GPU in bfloat16, plain elsewhere."""
    fused = q.dtype == jnp.bfloat16 and jax.default_backend() == "gpu"
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn" if fused else "xla")


def drop(x: jax.Array, rate: float, key: Key | None, shape: tuple[int, ...] | None = None) -> jax.Array:
    """Dropout with a mask of `shape`, broadcast to x. Rates are whole 256ths: four draws per random word."""
    shape, cut = shape or x.shape, round(256 * rate)
    if key is None or cut == 0:
        return x
    count = 1
    for n in shape:
        count *= n
    words = jax.random.bits(key, (-(-count // 4),), jnp.uint32)
    draws = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)[:count].reshape(shape)
    return jnp.where(draws >= cut, x * (256 / (256 - cut)), 0).astype(x.dtype)


def dropout_key(key: Key) -> Key:
    """A key for the random generator that is fastest on accelerators: masks have millions of numbers."""
    data = jax.random.key_data(key)
    return jax.random.wrap_key_data(jnp.concatenate([data, data]), impl="rbg")


class DecisionNet(eqx.Module):
    """Encoder, layers, action head."""

    encoder: Encoder
    norm_in: LayerNorm
    layers: Layer  # stacked, [layer, ...]: a scan over them compiles one
    norm_out: LayerNorm
    head: Linear
    config: DecisionConfig = eqx.field(static=True)
    spec: EnvSpec = eqx.field(static=True)

    def __init__(self, config: DecisionConfig, spec: EnvSpec, key: Key):
        encoder, layers, head = jax.random.split(key, 3)
        self.encoder = Encoder(config, spec, encoder)
        self.norm_in, self.norm_out = LayerNorm(config.width), LayerNorm(config.width)
        self.layers = eqx.filter_vmap(lambda k: Layer(config, k))(jax.random.split(layers, config.layers))
        self.config, self.spec = config, spec
        outputs = spec.action.encoded_size
        if isinstance(spec.action, Box) and config.actions == "sampled":
            spec.action.centre_and_half()  # refuses an unbounded range before anything is compiled
            outputs *= 2
        self.head = Linear(config.width, outputs, head, scale=0.1)

    @property
    def samples(self) -> bool:
        """Whether its outputs are a distribution of the action, and not the mean of it."""
        return isinstance(self.spec.action, Discrete) or self.config.actions == "sampled"

    def policy(self, out: jax.Array) -> Categorical | TanhNormal:
        """The distribution of the action by the outputs, [..., out], of a network that `samples`."""
        space = self.spec.action
        if isinstance(space, Discrete):
            return Categorical(logits=out)
        mean, log_std = jnp.split(out, 2, -1)
        centre, half = space.centre_and_half()
        return TanhNormal(mean=mean, log_std=jnp.clip(log_std, *LOG_STD), centre=centre, half=half)

    def __call__(self, steps: Steps, scales: Scales, key: Key | None = None) -> jax.Array:
        """Outputs for the action at every step, [row, time, out]: logits, means, or means and log deviations.

        Dropout where there is a `key`.
        """
        config = self.config
        first, keys = None, None
        if key is not None:
            first, *rest = jax.random.split(dropout_key(key), config.layers + 1)
            keys = jnp.stack(rest)
        x = self.norm_in(self.encoder(steps, scales, config.compute_dtype))
        x = drop(x, config.embedding_dropout, first)
        arrays, static = eqx.partition(self.layers, eqx.is_array)

        def layer(x: jax.Array, at: tuple) -> tuple[jax.Array, None]:
            return eqx.combine(at[0], static)(x, config, at[1]), None

        x, _ = jax.lax.scan(layer, x, (arrays, keys))
        if config.tokens == "four":
            x = x[:, 2::4]  # the state's tokens
        return self.head(self.norm_out(x).astype(jnp.float32))
