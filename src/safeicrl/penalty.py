r"""The paper's heart: how the cost constraints of all episodes become one penalty with one multiplier.

The problem (Eq. 4):      max_π E[Σ_k G(τ_k)]   s.t.  g_k(π) = E[G_c(τ_k)] − δ ≤ 0  for every episode k.
The surrogate:            L_Σ(π, λ) = E[Σ_k G(τ_k)] − λ Σ_k [g_k(π)]₊          → `surrogate`
The iteration (Eq. 6):    π ← argmax_π L_Σ(π, λ),   λ ← [λ + η max_k g_k(π)]₊  → `update_multiplier`

Readings taken here, and why:

* δ is the trial's own budget, sampled per trial. Eq. 6 must then hold for every budget. Averaged over mixed
  budgets, slack at large ones cancels violations at small ones and λ stays 0. The exact-penalty argument extends
  as it is: one multiplier serves all episodes and all budgets once it exceeds the largest of their multipliers.
  So `max_of_means` takes the max over episodes *and* budget bins.
* Algorithm 1 adds up, per trajectory, max_k C_k − δ: a mean of maxima, never below Eq. 6's maximum of means.
  Both are here: `mean_of_max`, `max_of_means`. (As printed, Algorithm 1 sets C_max to −∞ inside the episode
  loop, which would make it the last episode's cost; it is initialised once per trajectory.)
* Both compare costs with δ in expectation. `hinge` measures what users ask for: the mean of (C − δ)₊, episode by
  episode, against a small tolerance, at the worst budget bin.
* The theory's g_k are the current policy's, so λ follows the trials just played (`source` "rollout"). Algorithm 1
  samples from replay, where early exploration keeps pushing λ up: "replay".
* Eq. 6 projects onto λ ≥ 0. A cap and a bound on one step's signal keep early, wild policies from driving λ
  where the reward no longer counts.

Arrays are [trial, episode], in the record `Episodes` of trial.py; `played` marks the episodes that were finished.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.budgets import bin_of, is_over
from safeicrl.errors import UserError, check_number
from safeicrl.returns import linear_recurrence
from safeicrl.trial import Episodes, Trials

Signal = Literal["hinge", "max_of_means", "mean_of_max"]
SIGNALS: tuple[Signal, ...] = ("hinge", "max_of_means", "mean_of_max")
Edges = jax.Array | np.ndarray  # [bin + 1], see budgets.budget_edges


@dataclass(frozen=True)
class PenaltyConfig:
    """How the constraint is enforced."""

    form: Literal["excess", "paper"] = "excess"  # what the actor is penalised for, see below
    dual: Literal["exact", "naive"] = "exact"  # one multiplier (the paper), or one per episode (its ablation)
    signal: Signal = "hinge"  # what drives the one multiplier
    source: Literal["rollout", "replay"] = "rollout"  # whose costs: trials just played, or all in replay (ddpg)
    step: float = 0.02  # η
    final_step: float | None = None  # η at the end of the run, towards which it moves linearly; None: constant
    tolerance: float = 0.01  # of `hinge`: mean cost over budget an episode may have
    initial: float = 0.0  # λ at the start
    cap: float = 50.0  # λ at most
    bound: float = 0.5  # of one step's signal, both ways
    price: float = 0.0  # of cost within the budget, in units of reward, see `net_reward`; the paper's is 0

    def __post_init__(self) -> None:
        choices = {
            "form": ("excess", "paper"), "dual": ("exact", "naive"), "signal": SIGNALS,
            "source": ("rollout", "replay"),
        }  # fmt: skip
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise UserError(f"penalty.{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        for name in ("step", "tolerance", "initial", "price"):
            check_number(f"penalty.{name}", getattr(self, name), 0.0)
        if self.final_step is not None:
            check_number("penalty.final_step", self.final_step, 0.0)
        check_number("penalty.bound", self.bound, 0.0, strict=True)
        check_number("penalty.cap", self.cap, 0.0)
        if not self.cap >= self.initial:
            raise UserError(f"penalty.cap must be ≥ penalty.initial, got {self.cap} < {self.initial}")


def hinge(x: jax.Array) -> jax.Array:
    """[x]₊"""
    return jnp.maximum(x, 0.0)


def constraint(episodes: Episodes) -> jax.Array:
    """g_k = E[G_c(τ_k)] − δ for every episode k, [episode]; for trials of one budget."""
    return _mean(episodes.excess, episodes.played, axis=0)


def surrogate(episodes: Episodes, multiplier: jax.Array) -> jax.Array:
    """L_Σ(π, λ) from sampled trials of one budget."""
    expected = _mean(episodes.returns, episodes.played, axis=0).sum()
    return expected - multiplier * hinge(constraint(episodes)).sum()


def max_of_means(episodes: Episodes, edges: Edges) -> jax.Array:
    """max over episodes k and budget bins of the mean of C_k − δ: Eq. 6, for every budget; 0 if none was played."""
    inside = in_bins(episodes.budgets, edges) & episodes.played[..., None]  # [trial, episode, bin]
    means = _mean(episodes.excess[..., None], inside, axis=0)
    return jnp.where(episodes.played.any(), jnp.where(inside.any(0), means, -jnp.inf).max(), 0.0)


def mean_of_max(episodes: Episodes) -> jax.Array:
    """Mean over trials of max_k C_k − δ: Algorithm 1, line "dλ ← dλ + (C_e^max − δ)"."""
    worst = jnp.where(episodes.played, episodes.excess, -jnp.inf).max(-1)
    some = episodes.played.any(-1)
    return _mean(jnp.where(some, worst, 0.0), some, axis=0)


def hinge_by_bin(episodes: Episodes, edges: Edges) -> jax.Array:
    """Mean of (C − δ)₊ over the episodes of each budget bin, [bin]; 0 in an empty bin."""
    inside = in_bins(episodes.budgets, edges) & episodes.played[..., None]
    return _mean(hinge(episodes.excess)[..., None], inside, axis=(0, 1))


def over_by_bin(episodes: Episodes, edges: Edges) -> jax.Array:
    """Share of episodes over their budget in each budget bin, [bin]; 0 in an empty bin."""
    inside = in_bins(episodes.budgets, edges) & episodes.played[..., None]
    over = is_over(episodes.costs, episodes.budgets)
    return _mean(over[..., None].astype(jnp.float32), inside, axis=(0, 1))


def update_multiplier(
    multiplier: jax.Array,
    episodes: Episodes,
    edges: Edges,
    config: PenaltyConfig,
    progress: jax.Array | float = 0.0,
) -> jax.Array:
    """λ ← [λ + η s]₊ (Eq. 6), s being the configured signal; λ is [] (exact) or [episode] (naive).

    `progress` is the share of the run that is over; η may grow with it. An agent that has not yet learned to
    explore within a small budget stands still when λ is large, and one that stands still never learns to.
    """
    if config.dual == "naive":
        # The ablation: g_k of each episode drives its own λ_k. Episodes nobody played give no signal.
        signal = jnp.where(episodes.played.any(0), constraint(episodes), 0.0)
    elif config.signal == "hinge":
        signal = hinge_by_bin(episodes, edges).max() - config.tolerance
    elif config.signal == "max_of_means":
        signal = max_of_means(episodes, edges)
    else:
        signal = mean_of_max(episodes)
    signal = jnp.clip(signal, -config.bound, config.bound)
    last = config.step if config.final_step is None else config.final_step
    step = config.step + (last - config.step) * progress
    return jnp.clip(multiplier + step * signal, 0.0, config.cap)


def in_bins(budget: jax.Array, edges: Edges) -> jax.Array:
    """Membership of each budget in each bin, [..., bin]."""
    return bin_of(budget, edges)[..., None] == jnp.arange(len(edges) - 1)


# What the actor is penalised for, step by step. All arrays [row, time].


def excess_cost(trials: Trials) -> jax.Array:
    """c̃_t = (C_≤t − δ)₊ − (C_<t − δ)₊: the part of this step's cost that lies beyond the budget.

    Its sum over an episode is exactly (G_c − δ)₊, the hinge inside L_Σ, and it is Markov in what the agent sees,
    because CTG = δ − C_<t is an input. A critic of c̃ therefore optimises L_Σ directly.
    """
    before = -trials.token.ctg  # C_<t − δ
    return hinge(before + trials.cost) - hinge(before)


def net_reward(trials: Trials, config: PenaltyConfig) -> jax.Array:
    """The reward less the price of what the step's cost takes from the budget.

    Beyond the paper: to L_Σ, cost within the budget is nothing. A price makes the agent buy only what pays.
    """
    return trials.reward - config.price * (trials.cost - excess_cost(trials))


def over_budget(trials: Trials) -> jax.Array:
    """v_e = 1{C_e > δ} of Algorithm 1, broadcast to every step of its episode; the paper's penalty is λ v_e Q^c.

    Reading: on the realised cost of the whole episode, with no gradient through it. It penalises *all* cost of a
    violating episode, where the excess form penalises only what lies beyond the budget.
    """
    # Carry the episode's total backwards from its last step (or from where the row was cut).
    last = trials.done.at[..., -1].set(True)
    total = linear_recurrence(jnp.where(last, 0.0, 1.0), jnp.where(last, trials.episode_cost, 0.0))
    return is_over(total, trials.budget).astype(jnp.float32)


def _mean(values: jax.Array, mask: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    return jnp.where(mask, values, 0.0).sum(axis) / jnp.maximum(mask.sum(axis), 1)
