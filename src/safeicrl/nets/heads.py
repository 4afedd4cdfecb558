"""Action distributions, and the policy network: transformer + actor head."""

from dataclasses import field
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.envs.api import EnvSpec, Key, record, replace
from safeicrl.envs.spaces import Discrete
from safeicrl.errors import UserError
from safeicrl.nets.attention import in_sight
from safeicrl.nets.guard import Guard
from safeicrl.nets.layers import MLP, Linear
from safeicrl.nets.ledger import Ledger
from safeicrl.nets.transformer import Cache, NetConfig, Transformer
from safeicrl.tokens import Token

HIDDEN = 128  # of a critic
LOG_STD = (-4.0, 1.0)  # range of a tanh-normal's log standard deviation
FORBIDDEN = -1e9  # logit of an action that must not be taken
EDGE = 1.0 - 1e-6  # actions are kept this far inside (−1, 1), where atanh is finite


@record
class Categorical:
    """One of n actions."""

    logits: jax.Array  # [..., n], log-probabilities up to a constant

    def sample(self, key: Key) -> jax.Array:
        """Draw actions, [...] int32."""
        return jax.random.categorical(key, self.logits).astype(jnp.int32)

    def mode(self) -> jax.Array:
        """The most probable actions."""
        return jnp.argmax(self.logits, -1).astype(jnp.int32)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Log-probability of `action`, [...]."""
        # A masked sum instead of a gather: its gradient is dense and fuses.
        chosen = jax.nn.one_hot(action, self.logits.shape[-1])
        return (jax.nn.log_softmax(self.logits) * chosen).sum(-1)

    def entropy(self) -> jax.Array:
        """Entropy, [...]."""
        log_p = jax.nn.log_softmax(self.logits)
        return -(jnp.exp(log_p) * log_p).sum(-1)

    def divergence(self, other: "Distribution") -> jax.Array:
        """KL(self ‖ other), [...]."""
        assert isinstance(other, Categorical)
        log_p, log_q = jax.nn.log_softmax(self.logits), jax.nn.log_softmax(other.logits)
        return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)

    def tempered(self, temperature: float) -> "Categorical":
        """The distribution ∝ p^(1/temperature)."""
        return Categorical(logits=self.logits / temperature)

    def perturbed(self, key: Key) -> "Categorical":
        """With Gumbel noise: the mode is then a sample, also if it is restricted after that."""
        return Categorical(logits=self.logits + jax.random.gumbel(key, self.logits.shape, self.logits.dtype))

    def restricted(self, allowed: jax.Array) -> "Categorical":
        """The distribution given that the action is one of those `allowed`, [..., n] bool."""
        return Categorical(logits=jnp.where(allowed, self.logits, FORBIDDEN))

    def index(self, action: jax.Array) -> jax.Array:
        """Which of the n actions it is: itself."""
        return action

    def explored(self, epsilon: jax.Array) -> "Categorical":
        """A uniform action with probability ε."""
        uniform = jnp.log(epsilon / self.logits.shape[-1])
        return Categorical(logits=jnp.logaddexp(jnp.log1p(-epsilon) + jax.nn.log_softmax(self.logits), uniform))


@record
class TanhNormal:
    """tanh of a diagonal Gaussian, moved from (−1, 1) to the environment's own range of actions.

    Everybody else (the environment, tokens, critics, log-densities) sees actions in the environment's units.
    """

    mean: jax.Array  # [..., action]
    log_std: jax.Array  # [..., action]
    centre: float = field(default=0.0, metadata={"static": True})  # of the range ...
    half: float = field(default=1.0, metadata={"static": True})  # ... and half its width

    def sample(self, key: Key) -> jax.Array:
        """Draw actions, differentiable in the parameters."""
        noise = jax.random.normal(key, self.mean.shape)
        return self._move(jnp.tanh(self.mean + jnp.exp(self.log_std) * noise))

    def mode(self) -> jax.Array:
        """The squashed mean."""
        return self._move(jnp.tanh(self.mean))

    def _move(self, unit: jax.Array) -> jax.Array:
        return self.centre + self.half * (unit * EDGE)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Log-density of `action`, [...]."""
        raw = jnp.arctanh(jnp.clip((action - self.centre) / self.half, -EDGE, EDGE))
        z = (raw - self.mean) * jnp.exp(-self.log_std)
        normal = -0.5 * z**2 - self.log_std - 0.5 * jnp.log(2 * jnp.pi)
        # log(1 − tanh²(raw)), without cancellation
        squash = 2 * (jnp.log(2.0) - raw - jax.nn.softplus(-2 * raw))
        return (normal - squash - jnp.log(self.half)).sum(-1)

    def entropy(self) -> jax.Array:
        """Entropy of the Gaussian before tanh: a bound that keeps the spread open, not the exact value."""
        return (self.log_std + 0.5 * jnp.log(2 * jnp.pi * jnp.e)).sum(-1)

    def divergence(self, other: "Distribution") -> jax.Array:
        """KL(self ‖ other) of the Gaussians underneath, which tanh does not change, [...]."""
        assert isinstance(other, TanhNormal)
        ratio = jnp.exp(2 * (self.log_std - other.log_std))
        gap = ((self.mean - other.mean) * jnp.exp(-other.log_std)) ** 2
        return 0.5 * (ratio + gap - 1 - jnp.log(ratio)).sum(-1)

    def tempered(self, temperature: float) -> "TanhNormal":
        """The Gaussian with its standard deviation scaled by √temperature."""
        return replace(self, log_std=self.log_std + 0.5 * jnp.log(temperature))

    def explored(self, epsilon: jax.Array) -> "TanhNormal":
        """A standard deviation of at least ε."""
        return replace(self, log_std=jnp.maximum(self.log_std, jnp.log(epsilon)))


@record
class Levels:
    """Real-valued actions, each number one of n evenly spaced levels, independently.

    For actuators that saturate. A tanh-normal that has learned to push aims far beyond the limit, where all its
    actions do the same, and it never tries to coast again. Here coasting is a level like any other.
    """

    choice: Categorical  # [..., action] of n levels
    low: float = field(metadata={"static": True})  # of the environment's range of actions
    high: float = field(metadata={"static": True})

    @property
    def _levels(self) -> jax.Array:
        number = self.choice.logits.shape[-1]
        return self.low + (self.high - self.low) / (number - 1) * jnp.arange(number)

    def sample(self, key: Key) -> jax.Array:
        """Draw actions, [..., action]."""
        return self._levels[self.choice.sample(key)]

    def mode(self) -> jax.Array:
        """The most probable actions."""
        return self._levels[self.choice.mode()]

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Log-probability of the levels nearest to `action`, [...]."""
        index = _nearest(action, self.low, self.high, self.choice.logits.shape[-1])
        return self.choice.log_prob(index).sum(-1)

    def entropy(self) -> jax.Array:
        """Entropy, [...]."""
        return self.choice.entropy().sum(-1)

    def divergence(self, other: "Distribution") -> jax.Array:
        """KL(self ‖ other), [...]."""
        assert isinstance(other, Levels)
        return self.choice.divergence(other.choice).sum(-1)

    def tempered(self, temperature: float) -> "Levels":
        """The distribution ∝ p^(1/temperature)."""
        return replace(self, choice=self.choice.tempered(temperature))

    def explored(self, epsilon: jax.Array) -> "Levels":
        """Each number at a uniform level with probability ε."""
        return replace(self, choice=self.choice.explored(epsilon))

    def restricted(self, allowed: jax.Array) -> "Combinations":
        """The distribution given that the combination of levels is one of those `allowed`, [..., combination]."""
        log_p = jax.nn.log_softmax(self.choice.logits)
        joint = log_p[..., 0, :]
        for number in range(1, log_p.shape[-2]):
            joint = (joint[..., :, None] + log_p[..., number, None, :]).reshape(*joint.shape[:-1], -1)
        own = Categorical(logits=joint).restricted(allowed)
        return Combinations(choice=own, low=self.low, high=self.high, shape=(log_p.shape[-2], log_p.shape[-1]))

    def index(self, action: jax.Array) -> jax.Array:
        """Which combination of levels is nearest to `action`, [...]."""
        number, levels = self.choice.logits.shape[-2:]
        return (_nearest(action, self.low, self.high, levels) * levels ** np.arange(number)[::-1]).sum(-1)


@record
class Combinations:
    """Real-valued actions whose numbers are drawn together: one of all combinations of their levels."""

    choice: Categorical  # [...] of levels^numbers
    low: float = field(metadata={"static": True})  # of the environment's range of actions
    high: float = field(metadata={"static": True})
    shape: tuple[int, int] = field(metadata={"static": True})  # numbers of an action, levels of each

    def sample(self, key: Key) -> jax.Array:
        """Draw actions, [..., action]."""
        return self._action(self.choice.sample(key))

    def mode(self) -> jax.Array:
        """The most probable actions."""
        return self._action(self.choice.mode())

    def perturbed(self, key: Key) -> "Combinations":
        """With Gumbel noise, as that of `Categorical`."""
        return replace(self, choice=self.choice.perturbed(key))

    def restricted(self, allowed: jax.Array) -> "Combinations":
        """The distribution given that the combination is one of those `allowed`, [..., combination]."""
        return replace(self, choice=self.choice.restricted(allowed))

    def _action(self, index: jax.Array) -> jax.Array:
        number, levels = self.shape
        digits = index[..., None] // levels ** np.arange(number)[::-1] % levels
        return self.low + (self.high - self.low) / (levels - 1) * digits

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Log-probability of the combination nearest to `action`, [...]."""
        number, levels = self.shape
        index = (_nearest(action, self.low, self.high, levels) * levels ** np.arange(number)[::-1]).sum(-1)
        return self.choice.log_prob(index)

    def entropy(self) -> jax.Array:
        """Entropy, [...]."""
        return self.choice.entropy()


def _nearest(action: jax.Array, low: float, high: float, levels: int) -> jax.Array:
    """The level nearest to each number of `action`, int32."""
    unit = (action - low) / (high - low)
    return jnp.clip(jnp.round(unit * (levels - 1)), 0, levels - 1).astype(jnp.int32)


Distribution = Categorical | TanhNormal | Levels
Seen = TypeVar("Seen")  # arrays, or their names in a graph


class PolicyNet(eqx.Module):
    """What is released: the transformer, its actor head, and its guard where it has one."""

    trunk: Transformer
    actor: MLP
    guard: Guard | None

    def __init__(self, config: NetConfig, spec: EnvSpec, key: Key):
        trunk, actor = jax.random.split(key)
        if isinstance(spec.action, Discrete):
            outputs = spec.action.n
        else:
            outputs = (config.levels or 2) * spec.action.size
            spec.action.centre_and_half()  # refuses an unbounded range before anything is compiled
        self.trunk = Transformer(config, spec, trunk)
        self.guard = None
        if config.guard:
            discrete = isinstance(spec.action, Discrete)
            choices = spec.action.n if discrete else config.levels**spec.action.size if config.levels else 0  # type: ignore[union-attr]
            guard = jax.random.fold_in(key, 1)
            self.guard = Guard(
                spec, width=config.width, choices=choices, depth=config.guard, clock=config.guard_clock, key=guard,
                points=config.guard_ledger,
            )  # fmt: skip
        inputs = config.width + (self.ledger.size if self.ledger is not None and config.shared_ledger else 0)
        # A small last layer: the first policy is nearly uniform whatever the history.
        self.actor = MLP(inputs, config.width, outputs, actor, scale=0.01)

    @property
    def ledger(self) -> Ledger | None:
        """The guard's, if it has one."""
        return None if self.guard is None else self.guard.ledger

    def init_cache(self, rows: int, slots: int, own_clocks: bool = False) -> Cache:
        """The transformer's, with the guard's ledger."""
        cache, ledger = self.trunk.init_cache(rows, slots, own_clocks), self.ledger
        if ledger is None:
            return cache
        entries, cells = ledger.empty(rows, slots)
        return replace(cache, entries=entries, cells=cells)

    def step(self, cache: Cache, token: Token, fresh: jax.Array) -> tuple[Cache, jax.Array, jax.Array]:
        """The transformer's step: the cache, what the policy's head reads, and what the guard reads, [row, ...]."""
        after, features = self.trunk.step(cache, token, fresh)
        if self.ledger is None:
            return after, features, features
        after, found = self._consult(self.ledger, cache, after, token, fresh)
        watched = beside(features, found)
        return after, self.seen(features, watched), watched

    def _consult(
        self, ledger: Ledger, before: Cache, after: Cache, token: Token, fresh: jax.Array
    ) -> tuple[Cache, jax.Array]:
        """Write the step into the ledger, and look up what is near: the cache, and what was found, [row, size]."""
        assert before.entries is not None
        slots, clock = before.entries.shape[-1], before.clock
        entry = ledger.slot(token)
        at, rows = clock % slots, jnp.arange(len(entry))
        if clock.ndim:
            gone = before.entries[rows, :, at]
            entries = before.entries.at[rows, :, at].set(entry, unique_indices=True)
        else:
            gone = jax.lax.dynamic_index_in_dim(before.entries, at, 2, keepdims=False)
            entries = jax.lax.dynamic_update_slice(before.entries, entry[..., None], (0, 0, at))
        visible = in_sight(slots, after.age, clock)
        if before.cells is None:
            return replace(after, entries=entries), ledger.look_up(token, entries, visible)
        # What is overwritten was in sight only if the trial had filled all slots.
        gone = jnp.where((before.age == slots)[:, None] & ~fresh[:, None], gone, 0.0)
        cells = jnp.where(fresh[:, None, None], 0.0, before.cells)
        cells = ledger.follow(cells, token, gone, entries, visible, again=clock.ndim > 0)
        return replace(after, entries=entries, cells=cells), ledger.look_up_cells(token, cells)

    def watched(self, features: jax.Array, token: Token, trial: jax.Array) -> jax.Array:
        """What the guard reads of whole rows, [row, time, ...], from the transformer's features of them."""
        if self.ledger is None:
            return features
        return beside(features, self.ledger.look_up_rows(token, trial, self.trunk.config.context))

    def seen(self, features: Seen, watched: Seen) -> Seen:
        """What the policy's head reads: the features, or as much as its guard."""
        return watched if self.trunk.config.shared_ledger else features

    def distribution(self, seen: jax.Array, actor: MLP | None = None) -> Distribution:
        """π(· | history) from what its head reads, any leading shape; by another `actor` if given."""
        out, space = (actor or self.actor).read_out(seen), self.trunk.spec.action
        if isinstance(space, Discrete):
            return Categorical(logits=out)
        if levels := self.trunk.config.levels:
            logits = out.reshape(*out.shape[:-1], space.size, levels)
            return Levels(choice=Categorical(logits=logits), low=space.low, high=space.high)
        mean, spread = jnp.split(out, 2, -1)
        low, high = LOG_STD
        centre, half = space.centre_and_half()
        log_std = low + (high - low) * jax.nn.sigmoid(spread + 1.0)
        return TanhNormal(mean=mean, log_std=log_std, centre=centre, half=half)


def beside(features: jax.Array, found: jax.Array) -> jax.Array:
    """The policy's features and what the guard has looked up, side by side."""
    return jnp.concatenate([features, found.astype(features.dtype)], -1)


def transplanted(ours: PolicyNet, theirs: PolicyNet) -> PolicyNet:
    """Our network with the weights of another; refused unless they fit.

    A guard is taken over if both have one; otherwise ours stays. Budgets, steps and episodes are scaled as in our
    own environment, whatever theirs was.
    """
    guard = theirs.guard if ours.guard is not None and theirs.guard is not None else ours.guard
    theirs = eqx.tree_at(lambda net: net.guard, theirs, guard, is_leaf=lambda x: x is None)
    arrays, static = eqx.partition(ours, eqx.is_array)
    leaves, structure = jax.tree.flatten(arrays)
    others = jax.tree.leaves(eqx.filter(theirs, eqx.is_array))
    shapes = [[leaf.shape for leaf in each] for each in (leaves, others)]
    if shapes[0] != shapes[1]:
        here, there = next(((a, b) for a, b in zip(*shapes, strict=False) if a != b), ("more", "fewer"))
        raise UserError(f"the policy to start with does not fit: an array of its network is {there}, here {here}")
    return eqx.combine(jax.tree.unflatten(structure, others), static)


class Critic(eqx.Module):
    """A value of the history, and of the hidden task where the critic is privileged.

    The task enters the hidden layer through a linear map of its own, computed once per trial instead of per step.
    """

    head: MLP
    task: Linear | None

    def __init__(self, width: int, spec: EnvSpec, privileged: bool, key: Key):
        head, task = jax.random.split(key)
        self.head = MLP(width, HIDDEN, 1, head, scale=0.01)
        self.task = Linear(spec.task_features, HIDDEN, task, bias=False) if privileged else None

    def __call__(self, features: jax.Array, tasks: jax.Array, trial: jax.Array) -> jax.Array:
        """Values [row, time] of features [row, time, width]; tasks: [row, queue, feature]; trial: [row, time]."""
        shift: jax.Array | float = 0.0
        if self.task is not None:
            hidden = self.task(tasks.astype(features.dtype))
            one_hot = jax.nn.one_hot(trial, tasks.shape[1], dtype=features.dtype)
            shift = jnp.einsum("rtq,rqh->rth", one_hot, hidden)
        return self.head.read_out(features, shift)[..., 0]
