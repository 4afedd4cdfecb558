"""SCARED: Safe Contextual Adaptive Reinforcement via Exact-penalty Dual.

One iteration is the paper's Eq. 6, sampled: play trials of fresh tasks, each with its own budget; improve
L_Σ(π, λ) with a policy optimiser; move λ by the worst violation of the policy that played (penalty.py).
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp

from safeicrl.agents.api import Agent, TaughtAgent
from safeicrl.agents.in_context import InContextAgent, bold_rows
from safeicrl.agents.reference import ExplorerAgent
from safeicrl.budgets import budget_edges, is_over
from safeicrl.envs.api import Env, Key, PyTree, record, refuse_several, replace
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.errors import MOST_STEPS, UserError, check_integer, check_number, check_risk
from safeicrl.nets.attention import MAX_TRIALS
from safeicrl.nets.heads import PolicyNet
from safeicrl.nets.transformer import NetConfig
from safeicrl.optimisers.ddpg import DDPG, DDPGConfig
from safeicrl.optimisers.ppo import PPO, PPOConfig
from safeicrl.penalty import PenaltyConfig, over_by_bin, update_multiplier
from safeicrl.trial import Episodes, Trials, episode_sums, first_fault, run_trials, sample_queue

OVERTIME = 3  # times as many episodes as a usual trial


@dataclass(frozen=True)
class ScaredConfig:
    """All of SCARED's settings."""

    iterations: int = 600  # updates in the run; schedules move over all of them
    rows: int = 512  # rows of trials per iteration
    queue: int = 4  # trials a row can hold; those that do not fit are cut
    episodes: int | None = None  # K; None: the environment's
    steps: int | None = None  # tokens in a row; None: a whole trial's worth
    segments: int = 6  # stages in which the KV cache grows while acting
    # groups of rows that play on the host's cores side by side, while the learner learns from the rows before: the
    # policy that plays is then one iteration old; 0: play and learn in turn
    overlap: int = 0
    budget_power: float = 1.5  # budgets are low + (high − low) u^power: above 1, small ones are practised more
    risk: float = 0.03  # chance of breaking the budget that the guard tolerates (net.guard)
    first_risk: float | None = None  # at the start of the run, see `tolerated_risk`; None: `risk` from the start
    bold: float = 0.0  # share of the rows whose guard keeps `first_risk`, and from which λ does not learn
    overtime: float = 0.0  # share of the trials that last OVERTIME times as many episodes, see `play`
    # weight at the start of the run of a cross-entropy to the actions of a hand-written explorer, which only
    # SafeDarkRoom has; a comparison, not the method (optimisers/ppo.py)
    teacher: float = 0.0
    # reward for each nat by which what a step costs surprises the guard, at the start of the run; it falls to 0
    curiosity: float = 0.0
    spent: float = 0.0  # share of the episodes that begin overspent, in each cost; see `draw`
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
        if check_integer("overlap", self.overlap, 0) and self.rows % self.overlap:
            raise UserError(f"rows must be a multiple of overlap, got {self.rows} and {self.overlap}")
        if self.overlap and self.optimiser != "ppo":
            raise UserError(f"overlap is for ppo, got the optimiser {self.optimiser!r}; use 0")
        check_number("budget_power", self.budget_power, 0.0, strict=True)
        for name in ("spent", "overtime", "bold"):
            if check_number(name, getattr(self, name), 0.0) > 1:
                raise UserError(f"{name} must be at most 1, got {getattr(self, name)}")
        if check_number("teacher", self.teacher, 0.0) and self.optimiser != "ppo":
            raise UserError(f"teacher is for ppo, got the optimiser {self.optimiser!r}; use 0")
        check_number("curiosity", self.curiosity, 0.0)
        check_risk(self.risk)
        if self.first_risk is not None:
            check_risk(self.first_risk)
        elif self.bold:
            raise UserError(f"bold {self.bold} is the share of rows with first_risk: give one, or leave bold at 0")
        for name in ("risk", "first_risk", "bold", "curiosity"):
            value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            if value != default and not self.net.guard:
                raise UserError(f"{name} {value} is for a guard: leave it out, or give net.guard, its depth")
        if self.optimiser not in ("ppo", "ddpg"):
            raise UserError(f"optimiser must be ppo or ddpg, got {self.optimiser!r}")
        if self.net.levels and self.optimiser == "ddpg":
            raise UserError("net.levels is for ppo; ddpg, which follows the slope of Q in its actions, takes 0")
        if self.net.guard and self.optimiser == "ddpg":
            raise UserError(
                "net.guard is for ppo: replayed rows of ddpg were chosen under guards that no longer exist; use 0"
            )
        if self.penalty.source == "replay" and self.optimiser != "ddpg":
            raise UserError(f"penalty.source replay needs the optimiser that has one, ddpg, got {self.optimiser!r}")
        if self.queue > MAX_TRIALS:
            raise UserError(f"queue must be at most {MAX_TRIALS}, got {self.queue}")


@record
class Part:
    """Rows that are played together, as `run_trials` takes them."""

    tasks: PyTree  # [row, queue]
    budgets: jax.Array  # [row, queue, episode]
    lengths: jax.Array  # [row, queue] int, episodes of each trial
    key: Key


@record
class ScaredState:
    """Everything that changes in training."""

    optimiser: PyTree
    multiplier: jax.Array  # [] λ, or [episode] in the naive ablation
    iteration: jax.Array  # []
    key: Key
    player: PolicyNet | None = None  # what plays the next rows, if that is not the newest policy (`overlap`)


class Scared:
    """The algorithm, as the trainer sees it."""

    moves_on = ("player",)  # also when an iteration is undone: its successor is being played already

    def __init__(self, env: Env, config: ScaredConfig):
        self.env, self.config = env, config
        self.usual = config.episodes or env.spec.episodes  # episodes of a trial ...
        self.episodes = self.usual * (OVERTIME if config.overtime else 1)  # ... and of the longest one
        self.steps = config.steps or self.usual * env.spec.max_steps
        check_integer("rows · steps", config.rows * self.steps, 1, MOST_STEPS)
        self.edges = budget_edges(*env.spec.bounds("test"))  # the report's; the outer bins take budgets beyond them
        if config.teacher and not isinstance(env, SafeDarkRoom):
            raise UserError(f"teacher is for SafeDarkRoom, which has an explorer, not for {type(env).__name__}")
        if config.penalty.charge == "paper":
            refuse_several(env.spec, "penalty.form paper")
        self.optimiser = self._optimiser()

    def _optimiser(self) -> PPO | DDPG:
        config = self.config
        shared = (self.env, config.net, config.penalty)
        if config.optimiser == "ppo":
            risk = config.risk if config.net.guard else None
            return PPO(
                *shared,
                config.ppo,
                iterations=config.iterations,
                rows=config.rows,
                risk=risk,
                teacher=config.teacher,
                curiosity=config.curiosity,
            )
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
        optimiser = self.optimiser.init(net_key)
        return ScaredState(
            optimiser=optimiser,
            player=self.follower(optimiser),
            multiplier=jnp.full(shape, self.config.penalty.initial, jnp.float32),
            iteration=jnp.int32(0),
            key=key,
        )

    def start_from(self, state: ScaredState, other: ScaredState) -> ScaredState:
        """A new run's state with another run's networks."""
        return self._begin_with(state, self.optimiser.start_from(state.optimiser, other.optimiser))

    def start_with(self, state: ScaredState, agent: Agent) -> ScaredState:
        """A new run's state with a released policy; its critics, and everything else, are new."""
        if not isinstance(agent, InContextAgent):
            raise UserError(f"scared starts with policies of kind 'net', not with a {type(agent).__name__}")
        return self._begin_with(state, self.optimiser.start_with(state.optimiser, agent.net))

    def _begin_with(self, state: ScaredState, optimiser: PyTree) -> ScaredState:
        return replace(state, optimiser=optimiser, player=self.follower(optimiser))

    def agent(self, state: ScaredState) -> Agent:
        """The policy, sampled as in training."""
        return dataclasses.replace(self.optimiser.agent(state.optimiser), trained_episodes=self.episodes)

    def card(self) -> dict[str, Any]:
        """What rebuilds the policy around its arrays."""
        guarded = {"risk": self.config.risk} if self.config.net.guard else {}
        return {"kind": "net", "net": dataclasses.asdict(self.config.net), **guarded}

    @property
    def row_axes(self) -> dict[str, int]:
        """What is divided among devices."""
        config = self.config
        ppo = config.optimiser == "ppo"
        learned = {"algo.ppo.minibatch": config.ppo.minibatch} if ppo else {"algo.ddpg.batch": config.ddpg.batch}
        return {"algo.rows": config.rows, **learned}

    def follower(self, optimiser: PyTree) -> PolicyNet | None:
        """The policy that plays while the next update runs; None where it plays after it."""
        return optimiser.net.policy if self.config.overlap else None

    def update(self, state: ScaredState) -> tuple[ScaredState, dict[str, jax.Array]]:
        """One iteration of Eq. 6."""
        _, task_key, play_key, _ = self.keys(state.key)
        tasks, budgets = self.draw(task_key)
        trials = self.play(self.watched(self.explorer(state, self.progress(state))), tasks, budgets, play_key)
        return self.learn(state, tasks, trials)

    def learn(self, state: ScaredState, tasks: PyTree, trials: Trials) -> tuple[ScaredState, dict[str, jax.Array]]:
        """Move λ and improve the policy on what was played."""
        multiplier, metrics = self.move(state, trials)
        optimiser, own = self.optimiser.update(
            state.optimiser, trials, tasks, self.per_episode(multiplier), state.iteration, self.keys(state.key)[3]
        )
        return self.end(state, multiplier, optimiser), own | metrics

    def keys(self, key: Key) -> Key:
        """An iteration's keys: the next iteration's, for tasks, for playing, for learning."""
        return jax.random.split(key, 4)

    def move(self, state: ScaredState, trials: Trials) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The new λ, and what to report about the trials."""
        played = self.without_bold(episode_sums(trials, self.episodes, self.config.queue))
        fresh = without_overspent(played)
        multiplier = update_multiplier(
            state.multiplier, self.judged(state, fresh), self.edges, self.config.penalty, self.progress(state)
        )
        return multiplier, summary(played, self.env.spec.costs) | {
            "env_steps": trials.valid.sum(),
            "lambda": multiplier.max(),
            "over_budget_by_bin": over_by_bin(fresh, self.edges),
            "fault": first_fault(trials, self.env.spec),
        }

    def without_bold(self, episodes: Episodes) -> Episodes:
        """Without the episodes of bold rows, which are no measure of what the guard lets through."""
        if not self.config.bold:
            return episodes
        parts = max(self.config.overlap, 1)
        bold = jnp.tile(bold_rows(self.config.rows // parts, self.config.bold), parts)  # [row]
        strict = ~jnp.repeat(bold, self.config.queue)[:, None]
        return replace(episodes, played=episodes.played & strict)

    def per_episode(self, multiplier: jax.Array) -> jax.Array:
        """λ of each episode of a trial, [episode]."""
        return jnp.broadcast_to(multiplier, (self.episodes,))

    def end(self, state: ScaredState, multiplier: jax.Array, optimiser: PyTree) -> ScaredState:
        """The state after an iteration."""
        return ScaredState(
            optimiser=optimiser, multiplier=multiplier, iteration=state.iteration + 1, key=self.keys(state.key)[0],
            player=self.follower(state.optimiser),
        )  # fmt: skip

    def progress(self, state: ScaredState) -> jax.Array:
        """Share of the planned iterations that are done, []."""
        return jnp.clip(state.iteration / self.config.iterations, 0.0, 1.0)

    def explorer(self, state: ScaredState, progress: jax.Array) -> InContextAgent:
        """The policy that plays in training, with the risk that its guard tolerates by now."""
        explorer = self.optimiser.explorer(state.optimiser)
        if state.player is not None:
            explorer = dataclasses.replace(explorer, net=state.player)
        if self.config.first_risk is None or explorer.risk is None:
            return explorer
        risk = tolerated_risk(self.config.first_risk, self.config.risk, progress)
        bold = (self.config.bold, self.config.first_risk) if self.config.bold else None
        return dataclasses.replace(explorer, risk=risk, bold=bold)

    def watched(self, agent: InContextAgent) -> Agent:
        """The agent with its teacher, if it has one."""
        if not self.config.teacher:
            return agent
        assert isinstance(self.env, SafeDarkRoom)
        return TaughtAgent(agent=agent, teacher=ExplorerAgent(self.env))

    def judged(self, state: ScaredState, fresh: Episodes) -> Episodes:
        """The episodes that move λ: those just played, or these and all that replay still holds."""
        if self.config.penalty.source == "rollout":
            return fresh
        stored = state.optimiser.replay.rows.trials
        old = without_overspent(episode_sums(stored, self.episodes, self.config.queue))
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), old, fresh)

    def play(self, agent: Agent, tasks: PyTree, budgets: jax.Array, key: Key) -> Trials:
        """One iteration's rows of trials."""
        sizes = {"episodes": self.episodes, "steps": self.steps, "segments": self.config.segments}
        parts = [
            run_trials(self.env, agent, part.tasks, part.budgets, part.key, lengths=part.lengths, **sizes)
            for part in self.parts(tasks, budgets, key)
        ]
        return join(parts)

    def parts(self, tasks: PyTree, budgets: jax.Array, key: Key) -> list[Part]:
        """The groups in which an iteration's rows are played: one, or `overlap`.

        Some trials may go into overtime: a deployed policy does not stop at K, so training shows it what lies
        beyond.
        """
        long = jax.random.bernoulli(jax.random.fold_in(key, 1), self.config.overtime, budgets.shape[:2])
        lengths = jnp.where(long, self.episodes, self.usual)
        if not self.config.overlap:
            return [Part(tasks=tasks, budgets=budgets, lengths=lengths, key=key)]
        keys = jax.random.split(key, self.config.overlap)
        size = len(budgets) // self.config.overlap

        def part(index: int) -> Part:
            rows = lambda x: x[index * size : (index + 1) * size]  # noqa: E731
            return Part(
                tasks=jax.tree.map(rows, tasks), budgets=rows(budgets), lengths=rows(lengths), key=keys[index]
            )

        return [part(index) for index in range(self.config.overlap)]

    def draw(self, key: Key) -> tuple[PyTree, jax.Array]:
        """Training tasks [row, queue] and the budgets of their episodes, [row, queue, episode].

        With several costs each has a budget of its own, [row, queue, episode, cost].

        All episodes of a trial have its budget, except a share that begins overspent: their budget is negative, of
        a size that mid-episode overruns have. There every cost counts from the first step on, and the agent learns
        to wait from a standstill. In mid-episode it would have to brake first, which pays only once it stops.
        """
        shape = (self.config.rows, self.config.queue)
        tasks, u = sample_queue(self.env, "train", (0.0, 1.0), shape, key)
        low, high = self.env.spec.bounds("train")
        budgets = (low + (high - low) * u**self.config.budget_power)[:, :, None]
        spent_key, size_key = jax.random.split(jax.random.fold_in(key, 1))
        each = (*shape, self.episodes, *self.env.spec.cost_shape)
        spent = jax.random.bernoulli(spent_key, self.config.spent, each)
        return tasks, jnp.where(spent, -jax.random.uniform(size_key, each, maxval=high / 2), budgets)


def join(parts: Sequence[Trials]) -> Trials:
    """All rows of the parts."""
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts) if len(parts) > 1 else parts[0]


def tolerated_risk(first: float, last: float, progress: jax.Array) -> jax.Array:
    """The guard's risk in training: from `first` to `last` by equal factors over the first half of the run, [].

    A guard that has learned nothing forbids at random, and a policy that must not move does not learn to explore.
    """
    return first * (last / first) ** jnp.clip(2.0 * progress, 0.0, 1.0)


def without_overspent(episodes: Episodes) -> Episodes:
    """Without the episodes that began overspent: λ and the log count the others."""
    return replace(episodes, played=episodes.played & ~episodes.overspent)


def summary(episodes: Episodes, names: Sequence[str] = ("cost",)) -> dict[str, jax.Array]:
    """What the log says about an iteration's finished episodes, and separately about those that began overspent.

    With several costs, "cost" and "budget" are sums over them; each cost's own numbers are beside them by name.
    """
    mean = lambda x, where: jnp.where(where, x, 0.0).sum() / jnp.maximum(where.sum(), 1)  # noqa: E731
    fresh = without_overspent(episodes).played
    cost, budget = episodes.costs, episodes.budgets
    own: dict[str, jax.Array] = {}
    if episodes.several:
        for what, values in {"costs": cost, "budgets": budget, "over_budgets": is_over(cost, budget)}.items():
            own |= {f"{what}/{name}": mean(values[..., index], fresh) for index, name in enumerate(names)}
        cost, budget = cost.sum(-1), budget.sum(-1)
    return {
        "return": mean(episodes.returns, fresh),
        "cost": mean(cost, fresh),
        "cost_spent": mean(cost, episodes.played & episodes.overspent),  # 0 where there were none
        "budget": mean(budget, fresh),
        "over_budget": mean(episodes.over, fresh),
        **own,
    }
