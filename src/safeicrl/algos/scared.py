"""SCARED: Safe Contextual Adaptive Reinforcement via Exact-penalty Dual.

One iteration is the paper's Eq. 6, sampled: play trials of fresh tasks, each with its own budget; improve
L_Σ(π, λ) with a policy optimiser; move λ by the worst violation of the policy that played (penalty.py).
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp

from safeicrl.agents.api import Agent
from safeicrl.agents.in_context import InContextAgent
from safeicrl.envs.api import Env, Key, PyTree, record, replace
from safeicrl.errors import UserError, check_integer, check_number
from safeicrl.nets.attention import MAX_TRIALS
from safeicrl.nets.heads import PolicyNet
from safeicrl.nets.transformer import NetConfig
from safeicrl.optimisers.ddpg import DDPG, DDPGConfig
from safeicrl.optimisers.ppo import PPO, PPOConfig
from safeicrl.penalty import EpisodeCosts, PenaltyConfig, collect_costs, over_by_bin, update_multiplier
from safeicrl.trial import Trials, run_trials, sample_queue

SPENT = 0.01  # by at least so much a budget is spent when its episode begins with it spent


@dataclass(frozen=True)
class ScaredConfig:
    """All of SCARED's settings."""

    iterations: int = 600  # updates of the run, over which schedules move
    rows: int = 512  # rows of trials an iteration
    queue: int = 4  # trials a row can hold; those that do not fit are cut
    episodes: int | None = None  # K; None: the environment's
    steps: int | None = None  # tokens in a row; None: a whole trial's worth
    segments: int = 6  # stages in which the KV cache grows while acting
    budget_power: float = 1.5  # budgets are low + (high − low) u^power: > 1 practises small ones more
    spent: float = 0.0  # share of the episodes whose budget is spent before they begin, see `draw`
    net: NetConfig = field(default_factory=NetConfig)
    penalty: PenaltyConfig = field(default_factory=PenaltyConfig)
    optimiser: Literal["ppo", "ddpg"] = "ppo"  # PPO, or the off-policy one of Algorithm 1
    ppo: PPOConfig = field(default_factory=PPOConfig)
    ddpg: DDPGConfig = field(default_factory=DDPGConfig)

    def __post_init__(self) -> None:
        for name in ("iterations", "rows", "queue", "segments"):
            check_integer(name, getattr(self, name), 1)
        for name in ("episodes", "steps"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        check_number("budget_power", self.budget_power, 0.0, strict=True)
        if check_number("spent", self.spent, 0.0) > 1:
            raise UserError(f"spent must be at most 1, got {self.spent}")
        if self.optimiser not in ("ppo", "ddpg"):
            raise UserError(f"optimiser must be ppo or ddpg, got {self.optimiser!r}")
        if self.net.levels and self.optimiser == "ddpg":
            raise UserError("net.levels is for ppo; ddpg, which follows the slope of Q in its actions, takes 0")
        if self.penalty.source == "replay" and self.optimiser != "ddpg":
            raise UserError(f"penalty.source replay needs the optimiser that has one, ddpg, got {self.optimiser!r}")
        if self.queue > MAX_TRIALS:
            raise UserError(f"queue must be at most {MAX_TRIALS}, got {self.queue}")


@record
class ScaredState:
    """Everything that changes in training."""

    optimiser: PyTree
    multiplier: jax.Array  # [] λ, or [episode] in the naive ablation
    iteration: jax.Array  # []
    key: Key


class Scared:
    """The algorithm, as the trainer sees it."""

    def __init__(self, env: Env, config: ScaredConfig):
        self.env, self.config = env, config
        self.episodes = config.episodes or env.spec.episodes
        self.steps = config.steps or self.episodes * env.spec.max_steps
        longest = min(self.steps, self.episodes * env.spec.max_steps)
        if config.net.context < longest:
            # Acting would forget what the learner, which reads whole rows, still sees.
            raise UserError(f"net.context must hold a whole trial of {longest} tokens, got {config.net.context}")
        self.edges = budget_edges(*env.spec.train_budget)
        self.optimiser = self._optimiser()

    def _optimiser(self) -> PPO | DDPG:
        config = self.config
        shared = (self.env, config.net, config.penalty)
        if config.optimiser == "ppo":
            return PPO(*shared, config.ppo, iterations=config.iterations, rows=config.rows)
        # The replay must know what a row looks like before any was played.
        key = jax.random.key(0)
        tasks, budgets = jax.eval_shape(self.draw, key)
        net = eqx.filter_eval_shape(PolicyNet, config.net, self.env.spec, key)
        trials = eqx.filter_eval_shape(self.play, InContextAgent(net), tasks, budgets, key)
        return DDPG(*shared, config.ddpg, iterations=config.iterations, trials=trials, tasks=tasks)

    def init(self, key: Key) -> ScaredState:
        """A new state."""
        net_key, key = jax.random.split(key)
        shape = () if self.config.penalty.dual == "exact" else (self.episodes,)
        return ScaredState(
            optimiser=self.optimiser.init(net_key),
            multiplier=jnp.full(shape, self.config.penalty.initial, jnp.float32),
            iteration=jnp.int32(0),
            key=key,
        )

    def start_from(self, state: ScaredState, other: ScaredState) -> ScaredState:
        """A new run's state with another run's networks."""
        return replace(state, optimiser=self.optimiser.start_from(state.optimiser, other.optimiser))

    def agent(self, state: ScaredState) -> Agent:
        """The policy, sampled as in training."""
        return dataclasses.replace(self.optimiser.agent(state.optimiser), trained_episodes=self.episodes)

    def card(self) -> dict[str, Any]:
        """What rebuilds the policy around its arrays."""
        return {"kind": "net", "net": dataclasses.asdict(self.config.net)}

    def update(self, state: ScaredState) -> tuple[ScaredState, dict[str, jax.Array]]:
        """One iteration of Eq. 6."""
        key, task_key, play_key, learn_key = jax.random.split(state.key, 4)
        tasks, budgets = self.draw(task_key)
        trials = self.play(self.optimiser.explorer(state.optimiser), tasks, budgets, play_key)
        costs = _fresh(collect_costs(trials, self.config.queue, self.episodes))
        progress = jnp.clip(state.iteration / self.config.iterations, 0.0, 1.0)
        multiplier = update_multiplier(
            state.multiplier, self.judged(state, costs), self.edges, self.config.penalty, progress
        )
        per_episode = jnp.broadcast_to(multiplier, (self.episodes,))
        optimiser, metrics = self.optimiser.update(
            state.optimiser, trials, tasks, per_episode, state.iteration, learn_key
        )
        metrics |= summary(trials) | {
            "lambda": multiplier.max(),
            "over_budget_by_bin": over_by_bin(costs, self.edges),
        }
        state = ScaredState(optimiser=optimiser, multiplier=multiplier, iteration=state.iteration + 1, key=key)
        return state, metrics

    def judged(self, state: ScaredState, fresh: EpisodeCosts) -> EpisodeCosts:
        """The costs that move λ: those just played, or with them all that replay still holds."""
        if self.config.penalty.source == "rollout":
            return fresh
        old = _fresh(collect_costs(state.optimiser.replay.rows.trials, self.config.queue, self.episodes))
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), old, fresh)

    def play(self, agent: Agent, tasks: PyTree, budgets: jax.Array, key: Key) -> Trials:
        """One iteration's rows of trials."""
        return run_trials(
            self.env, agent, tasks, budgets, key,
            episodes=self.episodes, steps=self.steps, segments=self.config.segments,
        )  # fmt: skip

    def draw(self, key: Key) -> tuple[PyTree, jax.Array]:
        """Training tasks [row, queue] and the budgets of their episodes, [row, queue, episode].

        All episodes of a trial have its budget, but for a share that begins with it spent: a negative CTG, of a
        size that mid-episode overruns have. Where every cost counts from the first step on, to wait is learned
        from rest; an agent under way must brake, and as long as it does not stop altogether, braking is no safer.
        """
        shape = (self.config.rows, self.config.queue)
        tasks, u = sample_queue(self.env, "train", (0.0, 1.0), shape, key)
        low, high = self.env.spec.train_budget
        budgets = (low + (high - low) * u**self.config.budget_power)[..., None]
        spent_key, size_key = jax.random.split(jax.random.fold_in(key, 1))
        each = (*shape, self.episodes)
        spent = jax.random.bernoulli(spent_key, self.config.spent, each)
        return tasks, jnp.where(spent, -jax.random.uniform(size_key, each, minval=SPENT, maxval=high / 2), budgets)


def _fresh(costs: EpisodeCosts) -> EpisodeCosts:
    """Without the episodes that began with their budget spent."""
    return replace(costs, played=costs.played & ~_spent(costs.budget))


def _spent(budget: jax.Array) -> jax.Array:
    """Whether an episode began with its budget spent; a budget of 0 has not, whatever rounding makes of it."""
    return budget < -SPENT / 2


def budget_edges(low: float, high: float) -> jax.Array:
    """Edges of the five budget bins of the multiplier and the log: narrow where budgets are tight."""
    return low + (high - low) * jnp.array([0.0, 0.07, 0.14, 0.28, 0.56, 1.0])


def summary(trials: Trials) -> dict[str, jax.Array]:
    """What the log says of an iteration's episodes that ended; those that began with their budget spent, apart."""
    ended, spent = trials.done & trials.valid, _spent(trials.budget)
    mean = lambda x, where: jnp.where(where, x, 0.0).sum() / jnp.maximum(where.sum(), 1)  # noqa: E731
    fresh = ended & ~spent
    return {
        "env_steps": trials.valid.sum(),
        "return": mean(trials.episode_return, fresh),
        "cost": mean(trials.episode_cost, fresh),
        "cost_spent": mean(trials.episode_cost, ended & spent),  # 0 where there were none
        "budget": mean(trials.budget, fresh),
        "over_budget": mean(trials.episode_cost > trials.budget, fresh),
    }
