r"""The core of the paper: the cost constraints of all episodes become one penalty with one multiplier λ.

    Eq. 4, the problem    max_π E[Σ_k G(τ_k)]  s.t.  g_k(π) = E[G_c(τ_k)] − δ ≤ 0 for every episode k
                          g_k: `constraint`
    Eq. 5, its dual       min_λ max_π E[Σ_k G(τ_k)] − Σ_k λ_k g_k(π)
                          one multiplier per episode, the ablation: `PenaltyConfig.dual` "naive"; there the actor
                          pays λ_k for all cost of episode k, and λ_k follows g_k: `worst_by_episode`
    the surrogate         L_Σ(π, λ) = E[Σ_k G(τ_k)] − λ Σ_k [g_k(π)]₊
                          `surrogate`; step by step: `excess_cost`, or the paper's own `over_budget`
    Eq. 6, the iteration  π ← argmax_π L_Σ(π, λ)       the optimisers: optimisers/ppo.py, optimisers/ddpg.py
                          λ ← [λ + η max_k g_k(π)]₊    `update_multiplier`

Where the paper leaves a choice, or its text and its pseudocode differ, the reading taken is beside the function.
One reading concerns all of them: δ is the trial's own budget, drawn anew for each trial, and the constraints must
hold at every budget. One λ still suffices, once it exceeds the largest multiplier of any episode at any budget.

The paper has one cost. Here an environment may have several, each with a budget of its own: the constraints are
g_{k,i} = E[G_{c_i}(τ_k)] − δ_i for every episode k and every cost i. Reading: they are more constraints of the same
kind, and the penalty has all of them, λ Σ_k Σ_i [g_{k,i}]₊. An exact penalty is an L1 norm of the violations; one λ
suffices once it exceeds the largest multiplier of any constraint. So λ follows the largest violation over costs,
too. It is a price in reward per unit of any of the costs: choose units in which they are of similar size.

Sampled episodes are the record `Episodes` of trial.py, [trial, episode]; those that never ended are ignored.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.budgets import beside, bin_of, is_over
from safeicrl.errors import UserError, check_number
from safeicrl.returns import linear_recurrence
from safeicrl.trial import Episodes, Trials

Signal = Literal["hinge", "max_of_means", "mean_of_max"]
SIGNALS: tuple[Signal, ...] = ("hinge", "max_of_means", "mean_of_max")
Edges = jax.Array | np.ndarray  # [bin + 1], with several costs [cost, bin + 1]; see budgets.budget_edges


@dataclass(frozen=True)
class PenaltyConfig:
    """How the constraint is enforced."""

    form: Literal["excess", "paper"] = "excess"  # what the actor pays for, with dual exact: see `charge`
    dual: Literal["exact", "naive"] = "exact"  # one multiplier (the paper), or one per episode (its ablation)
    signal: Signal = "hinge"  # what moves the one multiplier, see `update_multiplier`; with dual exact
    source: Literal["rollout", "replay"] = "rollout"  # whose costs move it: just played, or also in replay
    step: float = 0.02  # η
    final_step: float | None = None  # η at the end of the run, towards which it moves linearly; None: constant
    tolerance: float = 0.01  # of `hinge`: the mean excess cost per episode that λ leaves alone
    initial: float = 0.0  # λ at the start
    cap: float = 50.0  # the largest λ, see `update_multiplier`
    bound: float = 0.5  # the largest signal of one step, up or down
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

    @property
    def charge(self) -> Literal["excess", "paper", "all"]:
        """What the actor pays λ for: `form`, or all cost in Eq. 5, where −λ_k (G_c − δ) is linear in the cost."""
        return "all" if self.dual == "naive" else self.form


def hinge(x: jax.Array) -> jax.Array:
    """[x]₊ = max(x, 0)."""
    return jnp.maximum(x, 0.0)


# -- Eq. 4: the constraints, and the surrogate with all of them in one penalty ---------------------------------


def constraint(episodes: Episodes) -> jax.Array:
    """g_k = E[G_c(τ_k)] − δ for every episode k, [episode], or [episode, cost]; for trials of one budget."""
    return _mean(episodes.excess, beside(episodes.played, episodes.costs), axis=0)


def surrogate(episodes: Episodes, multiplier: jax.Array) -> jax.Array:
    """L_Σ(π, λ) from sampled trials of one budget."""
    expected = _mean(episodes.returns, episodes.played, axis=0).sum()
    return expected - multiplier * hinge(constraint(episodes)).sum()


# -- Eq. 6, first line: π ← argmax L_Σ. What the actor pays λ for, step by step; arrays are [row, time] ----------


def excess_cost(trials: Trials) -> jax.Array:
    """c̃_t = (C_≤t − δ)₊ − (C_<t − δ)₊: the part of this step's cost that lies beyond the budget (form "excess").

    Over an episode it sums to (G_c − δ)₊, and it is Markov in what the agent sees, because CTG = δ − C_<t is an
    input. So a critic can learn it, where [g_k]₊ belongs to no single step.

    Reading: this optimises E[(G_c − δ)₊], which is not the [E[G_c] − δ]₊ of L_Σ. By Jensen's inequality it is never
    smaller: cheap episodes do not make up for expensive ones, and it is 0 only if all episodes keep their budget.

    With several costs it is the sum of theirs, so that one critic of a single number is enough.
    """
    before = -trials.token.ctg  # C_<t − δ
    beyond = hinge(before + trials.cost) - hinge(before)
    return beyond.sum(-1) if trials.several else beyond


def over_budget(trials: Trials) -> jax.Array:
    """v_e = 1{C_e > δ} of Algorithm 1, at every step of its episode; the penalty is λ v_e Q^c (form "paper").

    Reading: C_e is the realised cost of the whole episode, and no gradient flows through v_e. This penalises *all*
    cost of a violating episode, where the excess form penalises only what lies beyond the budget. For one cost:
    with several, each v_e would need a critic of its own.
    """
    # Carry the episode's total backwards from its last step (or from where the row was cut).
    last = trials.done.at[..., -1].set(True)
    total = linear_recurrence(jnp.where(last, 0.0, 1.0), jnp.where(last, trials.episode_cost, 0.0))
    return is_over(total, trials.budget).astype(jnp.float32)


def charged_cost(trials: Trials, config: PenaltyConfig, discount: float) -> tuple[jax.Array, jax.Array]:
    """What the cost critic learns, and its γ: the excess, discounted through the trial, or else all cost.

    All cost is that of one episode, undiscounted: its critic stops at the episode's end. Several costs are summed.
    """
    if config.charge == "excess":
        return excess_cost(trials), discount * (1.0 - trials.trial_done)
    return trials.cost.sum(-1) if trials.several else trials.cost, 1.0 - trials.done


def net_reward(trials: Trials, config: PenaltyConfig) -> jax.Array:
    """The reward minus `config.price` for each unit of cost that this step takes from the budget.

    Beyond the paper: L_Σ does not count cost within the budget. With a price, the agent spends only where it pays.
    """
    cost = trials.cost.sum(-1) if trials.several else trials.cost
    return trials.reward - config.price * (cost - excess_cost(trials))


# -- Eq. 6, second line: λ ← [λ + η max_k g_k]₊ ------------------------------------------------------------------


def update_multiplier(
    multiplier: jax.Array,
    episodes: Episodes,
    edges: Edges,
    config: PenaltyConfig,
    progress: jax.Array | float = 0.0,
) -> jax.Array:
    """λ ← [λ + η s]₊ with the signal s that `config` names; λ is [] (exact) or [episode] (naive).

    Readings: the theory's g_k are the current policy's, so λ follows the trials just played. Algorithm 1 samples
    from replay, where early exploration keeps pushing λ up; with `source` "replay", `episodes` has those as well.

    Eq. 6 only projects onto λ ≥ 0. `bound` and `cap` also keep wild early policies from driving λ so high that the
    reward no longer counts. A λ that stays at `cap` while violations are left is outside Theorem 1: that is no
    fixed point of Eq. 6, and the policy is neither feasible nor known to be optimal.

    η may change with `progress`, the share of the run that is over. With a large λ from the start, an agent stands
    still before it has learned to explore within a small budget, and then never learns it.
    """
    if config.dual == "naive":
        # Eq. 5: g_k of each episode drives its own λ_k. An episode that nobody played gives no signal.
        signal = jnp.where(episodes.played.any(0), worst_by_episode(episodes, edges), 0.0)
    elif config.signal == "hinge":
        # No finished episode, no signal: not even the tolerance moves λ.
        signal = jnp.where(episodes.played.any(), hinge_by_bin(episodes, edges).max() - config.tolerance, 0.0)
    elif config.signal == "max_of_means":
        signal = max_of_means(episodes, edges)
    else:
        signal = mean_of_max(episodes)
    signal = jnp.clip(signal, -config.bound, config.bound)
    last = config.step if config.final_step is None else config.final_step
    step = config.step + (last - config.step) * progress
    return jnp.clip(multiplier + step * signal, 0.0, config.cap)


def max_of_means(episodes: Episodes, edges: Edges) -> jax.Array:
    """Eq. 6's max_k g_k; 0 if nothing was played."""
    return jnp.where(episodes.played.any(), worst_by_episode(episodes, edges).max(), 0.0)


def worst_by_episode(episodes: Episodes, edges: Edges) -> jax.Array:
    """g_k where budgets are mixed: the largest mean of C_k − δ in any budget bin, [episode]; −∞ if nobody played k.

    Reading: the maximum is over budget bins, and over costs. In a mean over mixed budgets, slack at large budgets
    would cancel violations at small ones, and λ would stay 0.
    """
    inside = _inside(episodes, edges)  # [trial, episode, bin], or [trial, episode, cost, bin]
    means = _mean(episodes.excess[..., None], inside, axis=0)
    means = jnp.where(inside.any(0), means, -jnp.inf)
    return means.reshape(len(means), -1).max(-1)


def mean_of_max(episodes: Episodes) -> jax.Array:
    """The mean over trials of max_k C_k − δ: Algorithm 1, line "dλ ← dλ + (C_e^max − δ)".

    At one budget it is never below Eq. 6's maximum of means. Where budgets are mixed, slack at large ones hides
    violations at small ones. Reading: C^max is initialised once per trajectory. As printed, it is
    set to −∞ inside the episode loop, which would make it the last episode's cost.
    """
    worst = jnp.where(episodes.played, episodes.worst_excess, -jnp.inf).max(-1)
    some = episodes.played.any(-1)
    return _mean(jnp.where(some, worst, 0.0), some, axis=0)


def hinge_by_bin(episodes: Episodes, edges: Edges) -> jax.Array:
    """The mean of (C − δ)₊ over the episodes of each budget bin, [bin] or [cost, bin]; 0 in an empty bin.

    Not in the paper, whose two signals compare costs with δ in expectation. This one measures what users ask for:
    every single episode within its budget. The worst bin counts, of any cost, against a small tolerance.
    """
    inside = _inside(episodes, edges)
    return _mean(hinge(episodes.excess)[..., None], inside, axis=(0, 1))


def over_by_bin(episodes: Episodes, edges: Edges) -> jax.Array:
    """The share of episodes over their budget in each budget bin, [bin], for the log; 0 in an empty bin.

    With several costs [cost, bin]: over that cost's budget, by bins of that budget.
    """
    inside = _inside(episodes, edges)
    over = is_over(episodes.costs, episodes.budgets)
    return _mean(over[..., None].astype(jnp.float32), inside, axis=(0, 1))


def in_bins(budget: jax.Array, edges: Edges) -> jax.Array:
    """Whether each budget is in each bin, [..., bin] bool."""
    return bin_of(budget, edges)[..., None] == jnp.arange(edges.shape[-1] - 1)


def _inside(episodes: Episodes, edges: Edges) -> jax.Array:
    """Episodes played with a budget of each bin, [trial, episode, bin] or [trial, episode, cost, bin]."""
    return in_bins(episodes.budgets, edges) & beside(episodes.played, episodes.costs)[..., None]


def _mean(values: jax.Array, mask: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    return jnp.where(mask, values, 0.0).sum(axis) / jnp.maximum(mask.sum(axis), 1)
