"""The guard: a learned cost model on the policy's own features, and the rule that uses it at the budget's edge.

A penalty teaches a policy to break its budget rarely; it cannot stop a sampled action that is one step too many.
The guard can. For every action it predicts the chance that the next `depth` steps cost more than what is left of
the budget, and it forbids the actions whose chance exceeds the user's `risk`.

What is predicted does not depend on the policy, so a forbidden action is judged as fairly as an allowed one:

    p₁(k | h, a) = P(c > k)                                            the cost of this step alone
    p_d(k | h, a) = E[ 1 if c > k, else min_a' p_{d−1}(k − c | h', a') ]    d steps, each later one the safest

`p₁` is learned by cross-entropy from the action that was taken and the cost that followed. `p_d` looks one step
further than `p_{d−1}`: after the action comes the safest one that the model itself knows, or, where actions are
real numbers, the middle of their range (coast). Depth 1 cannot see a trap that springs at the second step, such
as a body that moves too fast to stop. An episode's end ends the count. With a clock (`net.guard_clock`) the guard
knows when that must be: where only t < d steps are left, it asks p_t. A step that would be a trap earlier is free
at the very end, and the policy can use it to find out what lies there.

The guard acts only where it decides something: while the rest of the budget covers all that `depth` steps can
cost, every action is allowed. If all actions are risky, the least risky ones are allowed.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.envs.api import EnvSpec, Key, refuse_several
from safeicrl.errors import UserError
from safeicrl.nets.layers import MLP
from safeicrl.nets.ledger import Ledger

SLACK = 1.1  # an action up to this factor riskier than the safest one counts as no riskier
PARTS = 8  # into which the largest cost of a step is cut where costs are real numbers
EDGES = 12  # at most about as many amounts of cost have a predicted chance
NEAR = 1e-4  # rounding of a sum of costs, in units


class Verdict(NamedTuple):
    """What the guard says of every action at one step."""

    risk: jax.Array  # [..., action] predicted chance that the budget breaks within `depth` steps
    allowed: jax.Array  # [..., action] bool


class Guard(eqx.Module):
    """The cost model and the rule.

    Finite actions are scored all at once from the features. Real-valued ones are an input beside the features.
    """

    head: MLP
    ledger: Ledger | None  # what it reads beside the policy's features
    choices: int = eqx.field(static=True)  # number of actions; 0: real-valued
    depth: int = eqx.field(static=True)  # steps ahead
    unit: float = eqx.field(static=True)  # of which every cost is a multiple; 0: real-valued
    edges: tuple[float, ...] = eqx.field(static=True)  # the k of p_d(k | h, a); the last one cannot be exceeded
    limit: int | None = eqx.field(static=True)  # steps of the longest episode, if the guard has a clock

    def __init__(
        self, spec: EnvSpec, *, width: int, choices: int, depth: int, key: Key, clock: bool = False, points: int = 0
    ):
        refuse_several(spec, "a guard (net.guard)")
        if not 0 < spec.max_cost < np.inf:
            raise UserError(
                "a guard needs costs with a bound: the environment's spec.max_cost, the largest cost of one step, "
                f"must be finite and above 0, got {spec.max_cost}"
            )
        self.choices, self.depth, self.limit = choices, depth, spec.max_steps if clock else None
        self.unit, part = spec.cost_unit, spec.cost_unit or spec.max_cost / PARTS
        self.edges = tuple(part * count for count in _spaced(round(depth * spec.max_cost / part)))
        self.ledger = Ledger(spec, points, jax.random.fold_in(key, 1)) if points else None
        width += self.ledger.size if self.ledger is not None else 0
        inputs = width if choices else width + spec.action.size  # type: ignore[union-attr]
        self.head = MLP(inputs, 2 * width, depth * self.thresholds * max(choices, 1), key, scale=0.1)

    @property
    def thresholds(self) -> int:
        """The edges that can be exceeded."""
        return len(self.edges) - 1

    def logits(self, features: jax.Array, action: jax.Array | None = None) -> jax.Array:
        """Of p_d(k | h, a), [..., depth, threshold, action]; without the last axis for one real-valued action."""
        if self.choices:
            out = self.head.read_out(features)
            return out.reshape(*features.shape[:-1], self.depth, self.thresholds, self.choices)
        assert action is not None
        joined = jnp.concatenate([features, action.astype(features.dtype)], -1)
        return self.head.read_out(joined).reshape(*joined.shape[:-1], self.depth, self.thresholds)

    def judge(self, features: jax.Array, ctg: jax.Array, time: jax.Array, risk: jax.Array | float) -> Verdict:
        """The verdict on every action of a finite set, [..., action]; for the `risk`, or one for each row [..., 1].

        `ctg` [...] is what is left of the budget, `time` [...] the steps that the episode has had.
        """
        logits = self._ahead(self.logits(features), time, -3)  # [..., threshold, action]
        chance = (jax.nn.sigmoid(logits) * self._weights(ctg)[..., None]).sum(-2)
        return Verdict(risk=chance, allowed=chance <= tolerated(chance, risk))

    def rate(self, features: jax.Array, actions: jax.Array, ctg: jax.Array, time: jax.Array) -> jax.Array:
        """The risk of real-valued candidate actions, [..., candidate] of [..., candidate, action]."""
        wide = jnp.broadcast_to(features[..., None, :], (*actions.shape[:-1], features.shape[-1]))
        logits = self._ahead(self.logits(wide, actions), time, -2)  # [..., candidate, threshold]
        return (jax.nn.sigmoid(logits) * self._weights(ctg)[..., None, :]).sum(-1)

    def _ahead(self, logits: jax.Array, time: jax.Array, axis: int) -> jax.Array:
        """Of the depths, on the given axis: the full one, or as many steps as the episode can still have.

        Past the time limit of training nobody knows when the end is: the full depth again.
        """
        if self.limit is None:
            return jax.lax.index_in_dim(logits, self.depth - 1, axis, keepdims=False)
        left = self.limit - time
        depth = jnp.where((left > 0) & (left < self.depth), left, self.depth)[..., None, None, None]
        return jnp.take_along_axis(logits, depth - 1, axis).squeeze(axis)

    def _weights(self, left: jax.Array) -> jax.Array:
        """What each edge counts in the chance that the cost exceeds what is `left`: [..., threshold] of [...].

        At an edge it is that edge alone, between two it is interpolated. The further, the more slowly chances fall,
        so the result is rather too large than too small. An overspent budget is like an empty one.
        """
        left = jnp.maximum(left, 0.0)
        if self.unit:
            left = jnp.floor(left / self.unit + NEAR) * self.unit
        gaps = np.diff(self.edges, prepend=-1.0).astype(np.float32)
        away = left[..., None] - np.asarray(self.edges[:-1], np.float32)
        return jnp.clip(1 - jnp.maximum(away / gaps[1:], -away / gaps[:-1]), 0.0, 1.0)

    def loss(
        self, features: jax.Array, action: jax.Array, cost: jax.Array, done: jax.Array, known: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Cross-entropy of every p_d at the actions that were taken; all arrays [row, time, ...].

        `action` is the index of a finite action, or the real-valued one; `done` marks the end of an episode, and
        `known` the steps whose successor, where there is one, is the next in the row.
        """
        logits = self.logits(features, None if self.choices else action)  # [row, time, depth, threshold(, action)]
        taken = self._taken(logits, action)
        targets = self._targets(features, logits, cost, done)
        losses = _cross_entropy(taken, targets)
        weight = known / jnp.maximum(known.sum(), 1)
        return (losses.sum((-1, -2)) * weight).sum() / self.depth, {
            "guard_loss": (losses[..., 0, 0] * weight).sum(),
            "guard_predicted": (jax.nn.sigmoid(taken[..., 0, 0]) * weight).sum(),
            "guard_observed": (targets[..., 0, 0] * weight).sum(),
        }

    def surprise(self, features: jax.Array, action: jax.Array, cost: jax.Array) -> jax.Array:
        """−log of the chance it gave to what came, that the step would cost or not, in nats; [row, time].

        Nearly 0 where the history already tells; so it is what a step has found out about the task's costs.
        """
        taken = self._taken(self.logits(features, None if self.choices else action), action)[..., 0, 0]
        return jax.lax.stop_gradient(_cross_entropy(taken, (cost > NEAR * self.edges[1]).astype(jnp.float32)))

    def _taken(self, logits: jax.Array, action: jax.Array) -> jax.Array:
        """Those of the action that was taken, [row, time, depth, threshold]."""
        return jnp.take_along_axis(logits, action[..., None, None, None], -1)[..., 0] if self.choices else logits

    def _targets(self, features: jax.Array, logits: jax.Array, cost: jax.Array, done: jax.Array) -> jax.Array:
        """1 where the step's own cost exceeds the threshold, else the model's p_{d−1} of what is then left."""
        edges, near = jnp.asarray(self.edges[:-1]), NEAR * self.edges[1]
        broken = (cost[..., None] > edges + near).astype(jnp.float32)  # [row, time, threshold]
        targets = [broken]
        if self.depth > 1:
            ahead = jax.lax.stop_gradient(self._best(features, logits))  # [row, time, depth, threshold]
            ahead = jnp.pad(ahead[:, 1:], ((0, 0), (0, 1), (0, 0), (0, 0)))  # of the next step
            weights = self._weights(edges - cost[..., None])  # [row, time, threshold, threshold]
            for d in range(self.depth - 1):
                later = (ahead[..., d, None, :] * weights).sum(-1)
                targets.append(jnp.where((broken > 0) | done[..., None], broken, later))
        return jnp.stack(targets, -2)  # [row, time, depth, threshold]

    def _best(self, features: jax.Array, logits: jax.Array) -> jax.Array:
        """p_d(k | h, a) of the safest action, or of the fallback where actions are real-valued."""
        if self.choices:
            return jax.nn.sigmoid(logits.min(-1))
        size = self.head.first.weight.shape[0] - features.shape[-1]
        return jax.nn.sigmoid(self.logits(features, jnp.zeros((*features.shape[:-1], size))))


def _spaced(most: int) -> list[int]:
    """From 0 to `most`: all numbers if these are few, else finer where less of the budget is left."""
    if most <= EDGES:
        return list(range(most + 1))
    return sorted({0, *(round(most ** (step / EDGES)) for step in range(EDGES + 1))})


def _cross_entropy(logits: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.maximum(logits, 0) - logits * target + jnp.log1p(jnp.exp(-jnp.abs(logits)))


def tolerated(chance: jax.Array, risk: jax.Array | float) -> jax.Array:
    """The largest allowed risk, [..., 1]: the user's, or what the safest action cannot avoid, with some slack."""
    return jnp.maximum(risk, SLACK * chance.min(-1, keepdims=True))
