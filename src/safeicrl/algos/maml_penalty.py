"""MAML with penalty: a meta-policy that one gradient step on reward − w · cost makes a good policy for a task.

    θ_τ = φ + α ∇_φ E[g(ρ) Ã],   Ã = (A − w A_c) / std            the inner step, on episodes of π_φ
    max_φ Σ_τ E_{π_θτ}[A − w A_c]                                  by a trust-region step on episodes of π_θτ

The budget enters nowhere: the weight w is the same for every task, so the method cannot react to a budget. The
paper finds exactly that. With `penalty excess`, our extension, only cost beyond the task's budget is charged.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from safeicrl.envs.api import Env, refuse_several
from safeicrl.errors import UserError, check_number
from safeicrl.nets.feedforward import Actor
from safeicrl.nets.heads import Distribution
from safeicrl.optimisers.episodes import Played
from safeicrl.optimisers.meta import Adapter, Batch, Iteration, MetaConfig, MetaLearner, bounded
from safeicrl.optimisers.trust_region import trust_region_step
from safeicrl.penalty import hinge


@dataclass(frozen=True)
class MamlPenaltyConfig(MetaConfig):
    """All of MAML's settings."""

    weight: float = 1.0  # w: of cost against reward
    penalty: Literal["cost", "excess"] = "cost"  # all cost, whatever the budget; or, not MAML's, that beyond it
    rate: float = 0.1  # α: of the inner gradient step
    order: Literal[1, 2] = 1  # 2: the meta-gradient looks through the inner step

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("weight", self.weight, 0.0)
        check_number("rate", self.rate, 0.0, strict=True)
        if self.penalty not in ("cost", "excess"):
            raise UserError(f"penalty must be cost or excess, got {self.penalty!r}")
        if self.order not in (1, 2):
            raise UserError(f"order must be 1 or 2, got {self.order!r}")


class MamlAdapter(Adapter):
    """Adaptation by one gradient step."""

    config: MamlPenaltyConfig

    def cost(self, played: Played, budget: jax.Array) -> jax.Array:
        """Every cost, or of each step the part beyond the budget, (C_≤t − δ)₊ − (C_<t − δ)₊."""
        if self.config.penalty == "cost":
            return played.cost
        beyond = hinge(jnp.cumsum(played.cost, -1) - budget)
        return jnp.diff(beyond, axis=-1, prepend=0.0)

    def signal(self, batch: Batch) -> jax.Array:
        """Ã of one task, weighted like the batch's advantages."""
        mix = jnp.array([1.0, -self.config.weight])
        spread = jnp.sqrt(jnp.maximum(mix @ batch.covariance @ mix, 1e-12))
        # Where nothing happened, there is nothing to learn: noise must not be blown up.
        return jnp.where(spread > 1e-4, (batch.reward - self.config.weight * batch.cost) / spread, 0.0)

    def adapt(self, actor: Actor, batch: Batch, budget: jax.Array) -> tuple[Actor, dict[str, jax.Array]]:
        """θ_τ; differentiable in `actor`."""
        signal = self.signal(batch)
        gained = lambda a: (bounded(batch.ratio(a(batch.points.inputs))) * signal).sum()  # noqa: E731
        gradient = jax.grad(gained)(actor)
        adapted = jax.tree.map(lambda x, by: x + self.config.rate * by, actor, gradient)
        kl = batch.divergence(adapted(batch.points.inputs))
        return adapted, {"lambda": jnp.float32(self.config.weight), "inner_kl": kl}


class MamlPenalty(MetaLearner):
    """The algorithm, as the trainer sees it."""

    kind: ClassVar[str] = "maml-penalty"
    adapter: MamlAdapter

    def __init__(self, env: Env, config: MamlPenaltyConfig):
        refuse_several(env.spec, "maml-penalty")
        super().__init__(env, config, MamlAdapter(env.spec, config))

    def card(self) -> dict[str, Any]:
        """What rebuilds the policy around its arrays."""
        return {"kind": self.kind, "settings": dataclasses.asdict(self.config)}

    def improve(self, actor: Actor, found: Iteration) -> tuple[Actor, dict[str, jax.Array]]:
        """A trust-region step of φ, measured on the adapted policies."""
        signals = jax.vmap(self.adapter.signal)(found.after)
        shifts = jax.tree.map(lambda new, old: new - old, found.actors, actor)  # θ_τ − φ, [task, ...]

        def adapted(actor: Actor, shift: Actor, before: Batch, budget: jax.Array) -> Actor:
            if self.config.order == 1:
                return jax.tree.map(jnp.add, actor, shift)
            return self.adapter.adapt(actor, before, budget)[0]

        def policies(actor: Actor) -> Distribution:
            """π_θτ at the points of its own episodes, [task, point]."""

            def one(shift: Actor, before: Batch, after: Batch, budget: jax.Array) -> Distribution:
                return adapted(actor, shift, before, budget)(after.points.inputs)

            return jax.vmap(one)(shifts, found.before, found.after, found.budgets)

        def gain(after: Batch, policy: Distribution, signal: jax.Array) -> jax.Array:
            return (after.ratio(policy) * signal).sum()

        return trust_region_step(
            actor,
            policies,
            lambda all_of_them: jax.vmap(gain)(found.after, all_of_them, signals).mean(),
            lambda all_of_them: jax.vmap(Batch.backward_divergence)(found.after, all_of_them).mean(),
            self.config.trust,
        )
