"""SafeMeta (Xu & Zhu 2025): meta-learning whose adaptation to a task is a constrained problem with a closed form.

Adaptation, from episodes of the meta-policy π_φ alone, with its advantages A of reward and A_c of cost:

    max_π  E[A] − λ KL(π ‖ π_φ)   subject to   J_c(π_φ) + H (E[A_c] + λ_c/H · KL(π ‖ π_φ)) ≤ budget + δ        (1)

States are those of π_φ, actions those of π, and H is the length of an episode. Its solution has one scalar dual u:

    π_u ∝ π_φ exp((A − u A_c) / η_u),   η_u = λ + u λ_c / H                                                    (2)

    u minimises  D(u) = E_{π_u}[A − u A_c] − η_u KL(π_u ‖ π_φ) + u b,   b = (budget + δ − J_c) / H,  over u ≥ 0
    with slope   D'(u) = b − E_{π_u}[A_c] − λ_c / H · KL(π_u ‖ π_φ)                                              (3)

Since log π_u is the meta-policy's own logit plus terms that are held fixed, the meta-gradient needs no Hessian:

    ∇_φ J(π_u) = E_{π_u}[∇ log π_φ(a|s) A^{π_u}(s, a)]                                                         (4)

While the meta-policy keeps the tasks' budgets on average, a trust-region step follows (4). Otherwise the step
lowers the meta-policy's own cost (as in CRPO).
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax

from safeicrl.envs.api import Env, record, refuse_several, replace
from safeicrl.errors import UserError, check_integer, check_number
from safeicrl.nets.feedforward import Actor
from safeicrl.nets.heads import Categorical, Distribution
from safeicrl.optimisers.episodes import Points
from safeicrl.optimisers.meta import Adapter, Batch, Iteration, MetaConfig, MetaLearner, bounded
from safeicrl.optimisers.trust_region import trust_region_step

PARTS, ROUNDS = 64, 7  # of the interval that holds the dual: as fine as float32


@dataclass(frozen=True)
class SafeStepConfig:
    """One adaptation. λ and λ_c are the paper's; the fit's numbers are those of public code."""

    # fit: a network by gradient steps on (1), for all policies; closed-form: (2), for cells of a small grid
    form: Literal["fit", "closed-form"] = "fit"
    reward_weight: float = 1.0  # λ: KL in units of reward
    cost_weight: float = 1.0  # λ_c: KL in units of cost
    slack: float = 0.0  # δ: added to the budget
    dual_cap: float = 8.0  # the largest u: there may be no π within the budget
    steps: int = 100  # of Adam, in a fit
    rate: float = 1e-3  # Adam's
    dual_rate: float = 1.0  # change of u per step of a fit and unit of its slope (3)
    max_kl: float = 3.0  # KL at which a fit stops

    def __post_init__(self) -> None:
        if self.form not in ("fit", "closed-form"):
            raise UserError(f"form must be fit or closed-form, got {self.form!r}")
        check_integer("steps", self.steps, 1)
        for name in ("reward_weight", "dual_cap", "rate", "dual_rate", "max_kl"):
            check_number(name, getattr(self, name), 0.0, strict=True)
        for name in ("cost_weight", "slack"):
            check_number(name, getattr(self, name), 0.0)


@dataclass(frozen=True)
class SafeMetaConfig(MetaConfig):
    """All of SafeMeta's settings."""

    inner: SafeStepConfig = field(default_factory=SafeStepConfig)


@record
class Problem:
    """Problem (1) of one task with finitely many actions."""

    log_prior: jax.Array  # [state, action] log π_φ
    weight: jax.Array  # [state] share of the steps
    reward: jax.Array  # [state, action] A
    cost: jax.Array  # [state, action] A_c
    slack: jax.Array  # [] b
    reward_weight: jax.Array | float  # [] λ
    cost_weight: jax.Array | float  # [] λ_c / H

    def scale(self, dual: jax.Array) -> jax.Array:
        """η_u."""
        return self.reward_weight + dual * self.cost_weight

    def tilt(self, dual: jax.Array) -> jax.Array:
        """(A − u A_c) / η_u: what (2) adds to the logits, [state, action]."""
        return (self.reward - dual * self.cost) / self.scale(dual)

    def policy(self, dual: jax.Array) -> Categorical:
        """π_u, Eq. 2."""
        return Categorical(logits=self.log_prior + self.tilt(dual))

    def dual_value(self, dual: jax.Array) -> jax.Array:
        """D(u), up to the constant J_c(π_φ)."""
        pi = jax.nn.softmax(self.policy(dual).logits)
        gained = (self.weight[:, None] * pi * (self.reward - dual * self.cost)).sum()
        return gained - self.scale(dual) * self._divergence(dual) + dual * self.slack

    def dual_slope(self, dual: jax.Array) -> jax.Array:
        """D'(u), Eq. 3: what is left of the budget at π_u, per step."""
        pi = jax.nn.softmax(self.policy(dual).logits)
        spent = (self.weight[:, None] * pi * self.cost).sum()
        return self.slack - spent - self.cost_weight * self._divergence(dual)

    def _divergence(self, dual: jax.Array) -> jax.Array:
        return (self.weight * self.policy(dual).divergence(Categorical(logits=self.log_prior))).sum()

    def solve(self, cap: float) -> jax.Array:
        """The dual in [0, cap]. D is convex, so its slope rises: each round keeps the part where it becomes 0."""

        def narrow(_: int, ends: tuple) -> tuple:
            low, high = ends
            inside = low + (high - low) * jnp.arange(1, PARTS) / PARTS
            enough = jax.vmap(self.dual_slope)(inside) >= 0
            first = jnp.where(enough.any(), jnp.argmax(enough), PARTS - 1)
            marks = jnp.concatenate([low[None], inside, high[None]])
            return marks[first], marks[first + 1]

        _, high = jax.lax.fori_loop(0, ROUNDS, narrow, (jnp.float32(0.0), jnp.float32(cap)))
        return jnp.where(self.dual_slope(jnp.float32(0.0)) >= 0, 0.0, high)


class SafeAdapter(Adapter):
    """Adaptation by (1)."""

    config: SafeMetaConfig

    def begin(self, actor: Actor) -> Actor:
        """With a table for the closed form to write in."""
        if self.config.inner.form == "fit" or actor.table is not None:
            return actor
        cells = self.view.cells
        assert cells is not None
        return replace(actor, table=jnp.zeros((len(cells), self.spec.action.encoded_size)))

    def adapt(self, actor: Actor, batch: Batch, budget: jax.Array) -> tuple[Actor, dict[str, jax.Array]]:
        """The solution of (1) around `actor`, by the closed form or as a network."""
        inner = self.config.inner
        slack = (budget + inner.slack - batch.mean_cost) / batch.mean_length
        if inner.form == "closed-form":
            return self._solve(actor, batch, slack)
        return self._fit(actor, batch, slack)

    def _solve(self, actor: Actor, batch: Batch, slack: jax.Array) -> tuple[Actor, dict[str, jax.Array]]:
        """Eq. 2 in the cells and actions that were tried; the advantages of others count as 0."""
        inner, points = self.config.inner, batch.points
        assert isinstance(batch.prior, Categorical)
        mean = lambda signal: signal / jnp.maximum(batch.tried, 1e-12)  # noqa: E731
        problem = Problem(
            log_prior=batch.log_prior, weight=points.weight, reward=mean(batch.reward), cost=mean(batch.cost),
            slack=slack, reward_weight=inner.reward_weight, cost_weight=inner.cost_weight / batch.mean_length,
        )  # fmt: skip
        dual = problem.solve(inner.dual_cap)
        assert actor.table is not None
        adapted = replace(actor, table=actor.table + problem.tilt(dual))
        return adapted, {"lambda": dual, "inner_kl": batch.divergence(problem.policy(dual))}

    def _fit(self, actor: Actor, batch: Batch, slack: jax.Array) -> tuple[Actor, dict[str, jax.Array]]:
        """Gradient steps on (1) with g(ρ) in place of ρ, the dual following its slope (3)."""
        inner = self.config.inner
        optimiser, cost_weight = optax.adam(inner.rate), inner.cost_weight / batch.mean_length

        def loss(actor: Actor, dual: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            policy = actor(batch.points.inputs)
            ratio, kl = bounded(batch.ratio(policy)), batch.divergence(policy)
            cost = (ratio * batch.cost).sum()
            gained = (ratio * batch.reward).sum() - dual * cost
            return kl - gained / (inner.reward_weight + dual * cost_weight), (kl, cost)

        def step(_: int, carry: tuple) -> tuple:
            actor, memory, dual, stopped, _ = carry
            gradient, (kl, cost) = jax.grad(loss, has_aux=True)(actor, dual)
            stopped = stopped | (kl > inner.max_kl)
            change, memory = optimiser.update(gradient, memory)
            actor = jax.tree.map(lambda x, by: jnp.where(stopped, x, x + by), actor, change)
            left = slack - cost - cost_weight * kl
            moved = jnp.clip(dual - inner.dual_rate * left, 0.0, inner.dual_cap)
            return actor, memory, jnp.where(stopped, dual, moved), stopped, kl

        start = (actor, optimiser.init(actor), jnp.float32(0.0), jnp.array(False), jnp.float32(0.0))
        actor, _, dual, _, kl = jax.lax.fori_loop(0, inner.steps, step, start)
        return actor, {"lambda": dual, "inner_kl": kl}


@record
class Pooled:
    """The steps of all tasks together, as one policy sees them."""

    points: Points
    signal: jax.Array  # what is to grow, like `Points.log_prob`


class SafeMeta(MetaLearner):
    """The algorithm, as the trainer sees it."""

    kind: ClassVar[str] = "safe-meta"

    def __init__(self, env: Env, config: SafeMetaConfig):
        refuse_several(env.spec, "safe-meta")
        super().__init__(env, config, SafeAdapter(env.spec, config))
        if config.inner.form == "closed-form" and self.adapter.view.cells is None:
            raise UserError(f"inner.form closed-form is for small grids with discrete actions, not for {env}")

    def card(self) -> dict[str, Any]:
        """What rebuilds the policy around its arrays."""
        return {"kind": self.kind, "settings": dataclasses.asdict(self.config)}

    def improve(self, actor: Actor, found: Iteration) -> tuple[Actor, dict[str, jax.Array]]:
        """A trust-region step along the meta-gradient (4), or one that lowers the meta-policy's own cost."""
        before, after = found.before, found.after
        feasible = (before.mean_cost - found.budgets).mean() <= self.config.inner.slack
        # Both are batches of one shape, so a choice between them costs one step instead of two.
        choose = lambda a, b: jax.tree.map(lambda x, y: jnp.where(feasible, x, y), a, b)  # noqa: E731
        data = self.pool(choose(after.points, before.points), choose(after.reward, -before.cost))
        prior = actor(data.points.inputs)
        log_prior = data.points.log_prob(prior)

        def surrogate(policy: Distribution) -> jax.Array:
            return (jnp.exp(data.points.log_prob(policy) - log_prior) * data.signal).sum()

        def divergence(policy: Distribution) -> jax.Array:
            return (data.points.weight * prior.divergence(policy)).sum()

        policy = lambda actor: actor(data.points.inputs)  # noqa: E731
        actor, told = trust_region_step(actor, policy, surrogate, divergence, self.config.trust)
        return actor, told | {"feasible": feasible.astype(jnp.float32)}

    def pool(self, points: Points, signal: jax.Array) -> Pooled:
        """All tasks' points, [task, point], as one set; every task counts alike."""
        if self.adapter.view.cells is not None:  # the same cells in every task
            inputs, weight, signal = points.inputs[0], points.weight.mean(0), signal.mean(0)
            pooled = Points(inputs=inputs, weight=weight, action=None, place=points.place[0])
            return Pooled(points=pooled, signal=signal)
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), points)
        return Pooled(points=replace(flat, weight=flat.weight / len(signal)), signal=signal.ravel() / len(signal))
