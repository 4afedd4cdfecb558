"""What the two meta-learners share (algos/maml_penalty.py, algos/safe_meta.py): they adapt by changing parameters.

One meta-iteration: draw tasks, each with its budget; play the meta-policy on each; fit each task's critics; adapt
the policy to each task by the method's own rule (`Adapter.adapt`); play the adapted policies; fit critics again;
move the meta-policy by a trust-region step (`MetaLearner.improve`). Everything is vmapped over tasks.

In the test, `MetaAgent.play_trials` repeats the first half on a new task: an episode that counts, then an update.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from safeicrl.budgets import is_over
from safeicrl.envs.api import Env, EnvSpec, Key, PyTree, record, replace
from safeicrl.envs.faults import NO_FAULT, NONE, first_of
from safeicrl.envs.spaces import Box
from safeicrl.errors import UserError, check_integer, check_number
from safeicrl.machine.devices import over_rows
from safeicrl.nets.feedforward import (
    Actor,
    FeedForward,
    Normaliser,
    action_outputs,
    check_hidden,
    encode,
    evaluate_all,
    first_normaliser,
)
from safeicrl.nets.heads import Distribution
from safeicrl.optimisers.critics import CriticConfig, lbfgs
from safeicrl.optimisers.episodes import Played, Points, View, first_fault, play
from safeicrl.optimisers.trust_region import TrustRegionConfig
from safeicrl.returns import gae, shift
from safeicrl.tokens import Token, usable_budget
from safeicrl.trial import Episodes, sample_queue


@dataclass(frozen=True)
class MetaConfig:
    """The settings that both methods have; the defaults are the paper's table for SafeDarkRoom."""

    iterations: int = 15_000  # meta-iterations of the run
    tasks: int = 20  # in a meta-iteration
    task_set: int | None = None  # number of training tasks; None: new ones in every iteration
    batch_episodes: int = 17  # in a batch of one task; an iteration plays four batches of each
    fresh_episodes: int = 17  # in the test, played for each update; 0: it learns from the episode that counts
    updates: int | None = None  # in the test, the most updates of a trial; None: one after every episode
    hidden: tuple[int, ...] = (64, 512, 64)  # sizes of the hidden layers of policy and critics
    log_std: float = -0.5  # of real-valued actions, at the start
    discount: float = 0.99  # γ of reward and cost
    trace: float = 0.95  # λ of GAE, reward and cost
    critic: CriticConfig = field(default_factory=CriticConfig)
    trust: TrustRegionConfig = field(default_factory=TrustRegionConfig)

    def __post_init__(self) -> None:
        for name in ("iterations", "tasks", "batch_episodes"):
            check_integer(name, getattr(self, name), 1)
        check_integer("fresh_episodes", self.fresh_episodes, 0)
        if self.updates is not None:
            check_integer("updates", self.updates, 0)
        check_hidden(self.hidden)
        check_number("log_std", self.log_std, -10.0)
        for name in ("discount", "trace"):
            if check_number(name, getattr(self, name), 0.0) > 1:
                raise UserError(f"{name} must be at most 1, got {getattr(self, name)}")
        if self.task_set is not None and check_integer("task_set", self.task_set, 1) < self.tasks:
            raise UserError(f"task_set {self.task_set} is smaller than a meta-iteration's {self.tasks} tasks")


@record
class Batch:
    """What a policy update needs of one task's episodes.

    Advantages are centred, and weighted by a step's share: their sum over points is a mean over steps.
    """

    points: Points
    prior: Distribution  # [point] the policy that played
    log_prior: jax.Array  # its log-probabilities, like `Points.log_prob`
    reward: jax.Array  # advantages, like `Points.log_prob`
    cost: jax.Array
    tried: jax.Array  # share of the steps, like `Points.log_prob`
    covariance: jax.Array  # [2, 2] of the two advantages, over steps
    mean_cost: jax.Array  # [] undiscounted cost of an episode
    mean_length: jax.Array  # [] steps of an episode
    critic_loss: jax.Array  # [2] squared errors of the two critics after the fit

    def ratio(self, policy: Distribution) -> jax.Array:
        """ρ = π / π_prior, like `Points.log_prob`."""
        return jnp.exp(self.points.log_prob(policy) - self.log_prior)

    def divergence(self, policy: Distribution) -> jax.Array:
        """Mean over steps of KL(π ‖ π_prior)."""
        return (self.points.weight * policy.divergence(self.prior)).sum()

    def backward_divergence(self, policy: Distribution) -> jax.Array:
        """Mean over steps of KL(π_prior ‖ π)."""
        return (self.points.weight * self.prior.divergence(policy)).sum()


def bounded(ratio: jax.Array) -> jax.Array:
    """g(ρ) = 2σ(2ρ − 2): like ρ near 1, but at most 2, so that no single step pulls for ever."""
    return 2 * jax.nn.sigmoid(2 * ratio - 2)


@dataclass(frozen=True)
class Adapter:
    """How one task's policy is updated. Hashable: a constant of the compiled program."""

    spec: EnvSpec
    config: Any  # a MetaConfig

    @property
    def view(self) -> View:
        """How the networks see the world."""
        return View(self.spec)

    def begin(self, actor: Actor) -> Actor:
        """The meta-policy in the form that `adapt` takes and returns."""
        return actor

    def adapt(self, actor: Actor, batch: Batch, budget: jax.Array) -> tuple[Actor, dict[str, jax.Array]]:
        """One update of one task's policy, and scalars for the log, "lambda" among them."""
        raise NotImplementedError

    def cost(self, played: Played, budget: jax.Array) -> jax.Array:
        """The cost signal that the cost critic learns, [episode, time]."""
        return played.cost

    def estimate(
        self, actor: Actor, critics: FeedForward, first: Played, second: Played, budget: jax.Array,
        normaliser: Normaliser | None, rate: float,
    ) -> tuple[FeedForward, Batch]:  # fmt: skip
        """Fit one task's critics to its `first` episodes, and judge the steps of its `second` ones by them.

        `actor` is the policy that played both. A time limit ends an episode: budgets and returns end there, too.
        """
        signals = lambda played: jnp.stack([played.reward, self.cost(played, budget)])  # noqa: E731
        points = self.view.points(first, normaliser)
        targets = self._values(critics, points) + self._advantages(critics, points, first, signals(first))
        critics, errors = self._fit_critics(critics, points, first, targets, rate)

        points = self.view.points(second, normaliser)
        share = second.valid / jnp.maximum(second.valid.sum(), 1)
        advantages = self._advantages(critics, points, second, signals(second))
        advantages = advantages - (share * advantages).sum((-2, -1), keepdims=True)
        reward, cost = (self.view.signal(share * each, points, second) for each in advantages)
        prior = actor(points.inputs)
        return critics, Batch(
            points=points,
            prior=prior,
            log_prior=points.log_prob(prior),
            reward=reward,
            cost=cost,
            tried=self.view.signal(share, points, second),
            covariance=jnp.einsum("iet,jet,et->ij", advantages, advantages, share),
            mean_cost=second.costs.mean(),
            mean_length=second.lengths.mean(),
            critic_loss=errors,
        )

    def _values(self, critics: FeedForward, points: Points) -> jax.Array:
        """Of reward and cost, [2, episode, time]."""
        return points.at_steps(evaluate_all(critics, points.inputs)[..., 0])

    def _advantages(self, critics: FeedForward, points: Points, played: Played, signals: jax.Array) -> jax.Array:
        """Of reward and cost, [2, episode, time]."""
        discount = self.config.discount * shift(played.valid)  # 0 at the episode's last step
        each = lambda signal, value: gae(signal, value, discount, self.config.trace)  # noqa: E731
        return jax.vmap(each)(signals, self._values(critics, points))

    def _fit_critics(
        self, critics: FeedForward, points: Points, played: Played, targets: jax.Array, rate: float
    ) -> tuple[FeedForward, jax.Array]:
        """Both critics after L-BFGS on the mean squared error, and these errors, [2]."""
        share = played.valid / jnp.maximum(played.valid.sum(), 1)
        sums = jnp.stack([self.view.sums(share * target, points) for target in targets])  # [2, point]
        goals = sums / jnp.maximum(points.weight, 1e-12)  # the mean target at each point
        options = self.config.critic

        def error(critic: FeedForward, goal: jax.Array) -> jax.Array:
            return (points.weight * (critic(points.inputs)[..., 0] - goal) ** 2).sum()

        def fit(critic: FeedForward, goal: jax.Array) -> FeedForward:
            # of the weights, which are matrices, and not of the biases
            decay = jax.tree.map(lambda x: jnp.full_like(x, options.decay if x.ndim > 1 else 0.0), critic)
            error_of = lambda c: error(c, goal)  # noqa: E731
            return lbfgs(error_of, critic, steps=options.steps, rate=rate, memory=options.memory, decay=decay)

        fitted = jax.vmap(fit)(critics, goals)
        return fitted, jax.vmap(error)(fitted, goals)


# -- in the test --------------------------------------------------------------------------------------------


@record
class Spent:
    """What adaptation took besides the episodes that count, [trial, update]; zeros where nothing was played."""

    updates: jax.Array  # int32, 1 where the parameters were updated
    episodes: jax.Array  # int32
    steps: jax.Array  # int32, environment steps
    cost: jax.Array  # summed over these episodes
    over: jax.Array  # int32, episodes over the budget
    fault: jax.Array  # [trial, update, 5] of these episodes or the one that counts, see envs/faults.py


class MetaAgent(eqx.Module):
    """A meta-policy. It acts as it is; `play_trials` adapts its parameters to each trial."""

    actor: Actor
    critics: FeedForward  # [2, ...] of reward and cost, where each task's critics start
    normaliser: Normaliser | None
    adapter: Adapter = eqx.field(static=True)
    temperature: float = eqx.field(static=True, default=1.0)  # of the episodes that count; 0: greedy
    fresh_episodes: int = eqx.field(static=True, default=0)
    updates: int | None = eqx.field(static=True, default=None)

    @classmethod
    def build(cls, adapter: Adapter, key: Key) -> "MetaAgent":
        """A new one, by the settings of its adapter."""
        config, spec = adapter.config, adapter.spec
        outputs, log_std = action_outputs(spec)
        size, (actor_key, critic_key) = spec.observation.encoded_size, jax.random.split(key)
        make = lambda k: FeedForward(size, config.hidden, 1, k)  # noqa: E731
        return cls(
            actor=Actor(
                net=FeedForward(size, config.hidden, outputs, actor_key),
                log_std=None if log_std is None else jnp.full_like(log_std, config.log_std),
            ),
            critics=eqx.filter_vmap(make)(jax.random.split(critic_key, 2)),
            normaliser=first_normaliser(spec),
            adapter=adapter,
            fresh_episodes=config.fresh_episodes,
            updates=config.updates,
        )

    def init(self, tasks: PyTree, rows: int) -> None:
        """No memory."""

    def extend(self, memory: None, steps: int) -> None:
        """No memory."""

    def act(self, memory: None, token: Token, key: Key) -> tuple[None, jax.Array, PyTree]:
        """An action of the meta-policy, without any adaptation."""
        spec = self.adapter.spec
        policy = self.actor(encode(token.observation, spec, self.normaliser))
        if self.temperature == 0:
            return None, policy.mode(), None
        policy = policy if self.temperature == 1 else policy.tempered(self.temperature)
        return None, policy.sample(key), None

    def play_trials(
        self, env: Env, tasks: PyTree, budgets: jax.Array, key: Key, *, episodes: int
    ) -> tuple[Episodes, Spent]:
        """A trial of `episodes` episodes on each task, [row], under each budget, [row], with updates in between.

        After each episode but the last, `fresh_episodes` more are played and the parameters updated by them. They
        are counted in `Spent`. If there are none, the update learns from the episode that counts.
        """
        if self.fresh_episodes == 0 and self.temperature != 1:
            raise UserError(f"a policy that learns from its own episode must sample it, got {self.temperature}")
        adapter, rows = self.adapter, len(budgets)
        last = min(episodes - 1, episodes if self.updates is None else self.updates)  # number of updates
        usable = usable_budget(jnp.asarray(budgets, jnp.float32), adapter.spec)
        spread = lambda x: jnp.broadcast_to(x, (rows, *x.shape))  # noqa: E731
        start = jax.tree.map(spread, (adapter.begin(self.actor), self.critics))

        def update(carry: tuple, played: Played, key: Key) -> tuple[tuple, Spent]:
            actor, critics = carry
            batch, spent = played, replace(_nothing(rows), updates=jnp.ones(rows, jnp.int32))
            if self.fresh_episodes:
                act = adapter.view.actor(actor, self.normaliser)
                batch = play(env, act, tasks, key, self.fresh_episodes)
                spent = _spent(batch, usable, adapter.spec)
            estimate = jax.vmap(adapter.estimate, (0, 0, 0, 0, 0, None, None))
            rate = adapter.config.critic.rates[0]
            critics, judged = estimate(actor, critics, batch, batch, usable, self.normaliser, rate)
            return (jax.vmap(adapter.adapt)(actor, judged, usable)[0], critics), spent

        def episode(carry: tuple, now: tuple) -> tuple[tuple, tuple]:
            number, key = now
            act = adapter.view.actor(carry[0], self.normaliser, self.temperature)
            play_key, update_key = jax.random.split(key)
            played = play(env, act, tasks, play_key, 1)
            spent = _nothing(rows)
            if last > 0:
                skip = lambda carry, played, key: (carry, spent)  # noqa: E731
                carry, spent = jax.lax.cond(number < last, update, skip, carry, played, update_key)
            fault = jnp.where(spent.fault[:, :1] == NONE, first_fault(played, adapter.spec), spent.fault)
            spent = replace(spent, fault=fault.at[:, 2].set(number))
            return carry, (played.returns[:, 0], played.costs[:, 0], played.lengths[:, 0], spent)

        with jax.default_matmul_precision("highest"):
            numbered = (jnp.arange(episodes), jax.random.split(key, episodes))
            _, (returns, costs, lengths, spent) = jax.lax.scan(episode, start, numbered)
        found = Episodes(
            returns=returns.T, costs=costs.T, lengths=lengths.T.astype(jnp.float32),
            budgets=jnp.broadcast_to(usable[:, None], (rows, episodes)), played=jnp.ones((rows, episodes), bool),
        )  # fmt: skip
        return found, jax.tree.map(lambda x: x.swapaxes(0, 1), spent)


def _nothing(rows: int) -> Spent:
    zero = jnp.zeros(rows, jnp.int32)
    fault = jnp.broadcast_to(NO_FAULT, (rows, len(NO_FAULT)))
    return Spent(updates=zero, episodes=zero, steps=zero, cost=jnp.zeros(rows), over=zero, fault=fault)


def _spent(played: Played, budgets: jax.Array, spec: EnvSpec) -> Spent:
    """What the episodes of each row took, [row]."""
    return Spent(
        updates=jnp.ones(len(budgets), jnp.int32),
        episodes=jnp.full(len(budgets), played.costs.shape[1], jnp.int32),
        steps=played.lengths.sum(-1).astype(jnp.int32),
        cost=played.costs.sum(-1),
        over=is_over(played.costs, budgets[:, None]).sum(-1).astype(jnp.int32),
        fault=first_fault(played, spec),
    )


# -- in training --------------------------------------------------------------------------------------------


@record
class MetaState:
    """Everything that changes in training."""

    actor: Actor
    critics: FeedForward  # [2, ...] the mean of the tasks' critics: where the next iteration's start
    normaliser: Normaliser | None
    key: Key


@record
class Iteration:
    """What a meta-iteration found out, [task, ...]."""

    actors: Actor  # adapted
    before: Batch  # episodes of the meta-policy
    after: Batch  # episodes of the adapted policies
    budgets: jax.Array  # [task]


class MetaLearner:
    """A meta-learner as the trainer sees it. Subclasses say how they adapt and how they improve."""

    kind: ClassVar[str]  # of its policies' cards

    def __init__(self, env: Env, config: Any, adapter: Adapter):
        self.env, self.config, self.adapter = env, config, adapter
        action = env.spec.action
        if isinstance(action, Box) and (action.low, action.high) != (-1.0, 1.0):
            raise UserError(f"{self.kind} needs real-valued actions in [-1, 1], got {action}")

    def improve(self, actor: Actor, found: Iteration) -> tuple[Actor, dict[str, jax.Array]]:
        """The next meta-policy, and scalars for the log."""
        raise NotImplementedError

    def init(self, key: Key) -> MetaState:
        """A new state."""
        build_key, key = jax.random.split(key)
        new = MetaAgent.build(self.adapter, build_key)
        return MetaState(actor=new.actor, critics=new.critics, normaliser=new.normaliser, key=key)

    def start_from(self, state: MetaState, other: MetaState) -> MetaState:
        """A new run's state with another run's networks, and the scale of what they see."""
        return replace(state, actor=other.actor, critics=other.critics, normaliser=other.normaliser)

    @property
    def row_axes(self) -> dict[str, int]:
        """What is divided among devices."""
        return {"algo.tasks": self.config.tasks}

    def agent(self, state: MetaState) -> MetaAgent:
        """The meta-policy, which adapts when it is evaluated."""
        config = self.config
        return MetaAgent(
            actor=state.actor, critics=state.critics, normaliser=state.normaliser, adapter=self.adapter,
            fresh_episodes=config.fresh_episodes, updates=config.updates,
        )  # fmt: skip

    def draw(self, key: Key) -> tuple[PyTree, jax.Array]:
        """A meta-iteration's tasks and usable budgets, [task]."""
        config, spec = self.config, self.env.spec
        tasks, budgets = sample_queue(self.env, "train", spec.train_budget, (config.tasks,), key)
        if config.task_set is not None:
            chosen = jax.random.choice(jax.random.fold_in(key, 1), config.task_set, (config.tasks,), replace=False)
            keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), chosen)
            tasks = jax.vmap(lambda k: self.env.sample_task(k, "train"))(keys)
        return over_rows((tasks, usable_budget(budgets, spec)))

    def update(self, state: MetaState) -> tuple[MetaState, dict[str, jax.Array]]:
        """One meta-iteration."""
        config, adapter = self.config, self.adapter
        key, task_key, before_key, after_key = jax.random.split(state.key, 4)
        tasks, budgets = self.draw(task_key)
        # Full precision on all hardware: ratios near 1 and products with the Fisher matrix need it.
        with jax.default_matmul_precision("highest"):
            spread = lambda x: jnp.broadcast_to(x, (config.tasks, *x.shape))  # noqa: E731
            actors, critics = jax.tree.map(spread, (adapter.begin(state.actor), state.critics))
            estimate = jax.vmap(adapter.estimate, (0, 0, 0, 0, 0, None, None))

            def judge(actors: Actor, critics: FeedForward, key: Key, rate: float) -> tuple:
                # Two batches side by side: one for the critics, one that is judged by them.
                act = adapter.view.actor(actors, state.normaliser)
                played = play(self.env, act, tasks, key, 2 * config.batch_episodes)
                half = lambda x: (x[:, : config.batch_episodes], x[:, config.batch_episodes :])  # noqa: E731
                first, second = (jax.tree.map(lambda x, i=i: half(x)[i], played) for i in (0, 1))
                return played, *estimate(actors, critics, first, second, budgets, state.normaliser, rate)

            inner, outer = config.critic.rates
            played, critics, before = judge(actors, critics, before_key, inner)
            adapted, told = jax.vmap(adapter.adapt)(actors, before, budgets)
            later, _, after = judge(adapted, critics, after_key, outer)
            found = Iteration(actors=adapted, before=before, after=after, budgets=budgets)
            actor, moved = self.improve(state.actor, found)
        normaliser = state.normaliser
        if normaliser is not None:  # last: one iteration acts and learns with the same normaliser
            normaliser = normaliser.update_where(played.observation, played.valid)
        shared = jax.tree.map(lambda x: x.mean(0), critics)
        new = MetaState(actor=actor, critics=shared, normaliser=normaliser, key=key)
        report = _report(played, later, found, self.adapter.spec)
        return new, report | {name: x.mean() for name, x in told.items()} | moved


def _report(before: Played, after: Played, found: Iteration, spec: EnvSpec) -> dict[str, jax.Array]:
    """What the log says about the episodes of a meta-iteration: those of the adapted policies, and those before."""
    over = lambda played: is_over(played.costs, found.budgets[:, None]).mean()  # noqa: E731
    return {
        "env_steps": before.valid.sum() + after.valid.sum(),
        "return": after.returns.mean(),
        "cost": after.costs.mean(),
        "budget": found.budgets.mean(),
        "over_budget": over(after),
        "return_before": before.returns.mean(),
        "cost_before": before.costs.mean(),
        "over_budget_before": over(before),
        "reward_critic_loss": found.after.critic_loss[:, 0].mean(),
        "cost_critic_loss": found.after.critic_loss[:, 1].mean(),
        "fault": first_of(jnp.stack([first_fault(played, spec) for played in (before, after)])),
    }
