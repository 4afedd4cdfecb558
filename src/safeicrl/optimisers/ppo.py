"""PPO on whole rows of trials, maximising L_Σ(π, λ).

One iteration: play fresh trials, then a few epochs of clipped updates. Returns are never stored: each minibatch
recomputes its advantages from the current critics, since its rows are whole.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from safeicrl.agents.in_context import InContextAgent
from safeicrl.envs.api import Env, EnvSpec, Key, PyTree, record, replace
from safeicrl.errors import UserError, check_integer, check_number
from safeicrl.machine.devices import everywhere, over_rows
from safeicrl.nets.guard import Guard
from safeicrl.nets.heads import Critic, Distribution, PolicyNet, TanhNormal, transplanted
from safeicrl.nets.layers import in_new_units
from safeicrl.nets.transformer import NetConfig
from safeicrl.penalty import PenaltyConfig, charged_cost, net_reward, over_budget
from safeicrl.returns import gae, reward_discount
from safeicrl.trial import Trials

TAUGHT = 0.7  # share of the run over which a teacher's weight falls to a tenth


@dataclass(frozen=True)
class PPOConfig:
    """Hyperparameters of the update; `start → end` values move linearly over the run."""

    learning_rate: tuple[float, float] = (1e-3, 1e-4)  # Adam's, start → end
    warmup: int = 10  # iterations over which the learning rate rises from 0
    entropy: tuple[float, float] = (0.03, 0.003)  # weight of the policy's entropy, start → end
    epochs: int = 3  # passes over an iteration's rows
    minibatch: int = 64  # rows
    clip: float = 0.2  # of the probability ratio
    discount: float = 0.998  # γ of the reward, across episodes: exploring now pays in later ones
    cost_discount: float = 0.99  # γ of the excess cost; the paper's form is undiscounted within its episode
    trace: float = 0.97  # λ of GAE
    max_grad: float = 1.0  # norm to which gradients are clipped
    value_weight: float = 0.5  # of the critics' loss against the actor's
    guard_weight: float = 1.0  # of the guard's loss against the actor's; docs/lab.md shows what 8 is worth
    average: float = 0.0  # of the policies, which is released: how much of it one iteration keeps; 0: the last one
    privileged_critic: bool = True  # critics also see the hidden task; they are thrown away after training

    def __post_init__(self) -> None:
        check_integer("ppo.epochs", self.epochs, 1)
        check_integer("ppo.minibatch", self.minibatch, 1)
        check_integer("ppo.warmup", self.warmup, 0)
        for name in ("clip", "max_grad"):
            check_number(f"ppo.{name}", getattr(self, name), 0.0, strict=True)
        for value in (*self.learning_rate, *self.entropy, self.value_weight, self.guard_weight):
            check_number("ppo's learning_rate, entropy, value_weight and guard_weight", value, 0.0)
        for name in ("discount", "cost_discount", "trace"):
            value = check_number(f"ppo.{name}", getattr(self, name), 0.0)
            if value > 1:
                raise UserError(f"ppo.{name} must be at most 1, got {value}")
        if check_number("ppo.average", self.average, 0.0) >= 1:
            raise UserError(f"ppo.average must be below 1, got {self.average}")


class ActorCritic(eqx.Module):
    """The policy and two critics on the same features."""

    policy: PolicyNet
    reward_critic: Critic
    cost_critic: Critic

    def __init__(self, net: NetConfig, spec: EnvSpec, privileged: bool, key: Key):
        policy, reward, cost = jax.random.split(key, 3)
        self.policy = PolicyNet(net, spec, policy)
        self.reward_critic = Critic(net.width, spec, privileged, reward)
        self.cost_critic = Critic(net.width, spec, privileged, cost)


@record
class PPOState:
    """What PPO carries from iteration to iteration."""

    net: ActorCritic
    optimiser: PyTree
    scale: jax.Array  # [2] running root mean square of the reward and cost critics' targets
    average: PolicyNet | None = None  # running average of the policies (`PPOConfig.average`)


class Batch(NamedTuple):
    """Rows for one minibatch."""

    trials: Trials
    task: jax.Array  # [row, queue, feature], the hidden tasks
    multiplier: jax.Array  # [row, time], λ of each step's episode


class Work(NamedTuple):
    """An update's minibatches."""

    batch: Batch  # all rows
    order: jax.Array  # [minibatch, row] int, the rows of each
    entropy: jax.Array  # [] its weight
    teaching: jax.Array  # [] the weight of the teacher
    curiosity: jax.Array  # [] reward for each nat of the guard's surprise


class Terms(NamedTuple):
    """What the policy and its guard make of a batch."""

    log_prob: jax.Array  # [row, time] of what was chosen
    entropy: jax.Array  # [] mean
    guard_loss: jax.Array | float
    surprise: jax.Array | float  # [row, time] nats, see Guard.surprise
    metrics: dict[str, jax.Array]


class PPO:
    """The optimiser; pure functions of its state."""

    def __init__(
        self,
        env: Env,
        net: NetConfig,
        penalty: PenaltyConfig,
        config: PPOConfig,
        iterations: int,
        rows: int,
        risk: float | None = None,
        teacher: float = 0.0,
        curiosity: float = 0.0,
    ):
        if rows % config.minibatch:
            raise UserError(f"rows must be a multiple of ppo.minibatch, got {rows} and {config.minibatch}")
        self.env, self.net, self.penalty, self.config = env, net, penalty, config
        self.iterations, self.rows, self.risk = iterations, rows, risk
        self.teacher, self.curiosity = teacher, curiosity
        steps = iterations * config.epochs * (rows // config.minibatch)
        per_iteration = steps // max(iterations, 1)
        begin, end = config.learning_rate
        warm = min(config.warmup, iterations) * per_iteration
        schedule = optax.join_schedules(
            [optax.linear_schedule(0.0, begin, warm), optax.linear_schedule(begin, end, max(steps - warm, 1))],
            [warm],
        )
        # Flat: on a GPU a step in seventy small arrays takes longer than its arithmetic (docs/speed.md).
        self.optimiser = optax.flatten(
            optax.chain(optax.clip_by_global_norm(config.max_grad), optax.adam(schedule, eps=1e-5))
        )

    def init(self, key: Key) -> PPOState:
        """Fresh networks."""
        net = ActorCritic(self.net, self.env.spec, self.config.privileged_critic, key)
        return PPOState(
            net=net,
            optimiser=self.optimiser.init(eqx.filter(net, eqx.is_array)),
            scale=jnp.ones(2),
            average=net.policy if self.config.average else None,
        )

    def start_from(self, state: PPOState, other: PPOState) -> PPOState:
        """A new run's state with another run's networks and the scales they predict in."""
        average = self._released(other) if self.config.average else None
        return replace(state, net=other.net, scale=other.scale, average=average)

    def start_with(self, state: PPOState, policy: PolicyNet) -> PPOState:
        """A new run's state with a released policy; its critics are new."""
        own = transplanted(state.net.policy, policy)
        average = own if self.config.average else None
        return replace(state, net=eqx.tree_at(lambda net: net.policy, state.net, own), average=average)

    def agent(self, state: PPOState) -> InContextAgent:
        """The policy, or the average of the last ones, sampled, with its guard if it has one."""
        return InContextAgent(self._released(state), risk=self.risk)

    def explorer(self, state: PPOState) -> InContextAgent:
        """The policy that plays in training: always the last one."""
        return InContextAgent(state.net.policy, risk=self.risk)

    def _released(self, state: PPOState) -> PolicyNet:
        return state.net.policy if state.average is None else state.average

    def update(
        self, state: PPOState, trials: Trials, tasks: PyTree, multiplier: jax.Array, iteration: jax.Array, key: Key
    ) -> tuple[PPOState, dict[str, jax.Array]]:
        """Improve L_Σ at the multipliers ([episode]) on freshly played trials."""
        work = self.begin(trials, tasks, multiplier, iteration, key)
        arrays, static = eqx.partition(state, eqx.is_array)

        def body(arrays: PyTree, rows: jax.Array) -> tuple[PyTree, dict[str, jax.Array]]:
            state, metrics = self.minibatch(eqx.combine(arrays, static), work, rows)
            return eqx.filter(state, eqx.is_array), metrics

        arrays, metrics = jax.lax.scan(body, arrays, work.order)
        return self.end(eqx.combine(arrays, static), jax.tree.map(lambda x: x.mean(0), metrics), iteration)

    def begin(self, trials: Trials, tasks: PyTree, multiplier: jax.Array, iteration: jax.Array, key: Key) -> Work:
        """What an update has to do."""
        progress = jnp.clip(iteration / self.iterations, 0.0, 1.0)
        entropy = self.config.entropy[0] + progress * (self.config.entropy[1] - self.config.entropy[0])
        features = jax.vmap(jax.vmap(self.env.task_features))(tasks)  # [row, queue, feature]
        batch = Batch(trials=trials, task=features, multiplier=multiplier[trials.token.episode])
        batch = everywhere(batch)  # one exchange; a minibatch would need one each, its rows are of all devices
        order = jax.vmap(lambda k: jax.random.permutation(k, self.rows))(jax.random.split(key, self.config.epochs))
        # a teacher leads at first, and hardly matters over the last third
        teaching = self.teacher * (1.0 - 0.9 * jnp.clip(progress / TAUGHT, 0.0, 1.0))
        order = order.reshape(-1, self.config.minibatch)
        curiosity = self.curiosity * (1.0 - progress)  # in the end, only the reward counts
        return Work(batch=batch, order=order, entropy=entropy, teaching=teaching, curiosity=curiosity)

    def minibatch(self, state: PPOState, work: Work, rows: jax.Array) -> tuple[PPOState, dict[str, jax.Array]]:
        """One gradient step on these rows of the batch."""
        params, static = eqx.partition(state.net, eqx.is_array)
        part = over_rows(jax.tree.map(lambda x: x[rows], work.batch))
        weights = (work.entropy, work.teaching, work.curiosity)
        loss = lambda p: self.loss(eqx.combine(p, static), part, state.scale, *weights)  # noqa: E731
        grads, (scale, metrics) = jax.grad(loss, has_aux=True)(params)
        updates, optimiser = self.optimiser.update(grads, state.optimiser, params)
        metrics["grad_norm"] = optax.tree.norm(grads)
        params = _in_new_units(optax.apply_updates(params, updates), state.scale / scale)
        return replace(state, net=eqx.combine(params, static), optimiser=optimiser, scale=scale), metrics

    def end(
        self, state: PPOState, metrics: dict[str, jax.Array], iteration: jax.Array
    ) -> tuple[PPOState, dict[str, jax.Array]]:
        """The state after the last minibatch, with what to report: `metrics` are means over the minibatches."""
        state = replace(state, average=self._average(state.average, state.net.policy, iteration))
        return state, metrics | {"reward_scale": state.scale[0], "cost_scale": state.scale[1]}

    def _average(self, average: PolicyNet | None, policy: PolicyNet, iteration: jax.Array) -> PolicyNet | None:
        """The running average with one policy more. Early on it forgets faster: policies still change a lot."""
        if average is None:
            return None
        keep = jnp.minimum(self.config.average, (1.0 + iteration) / (10.0 + iteration))
        mixed = lambda old, new: keep * old + (1.0 - keep) * new if eqx.is_inexact_array(old) else new  # noqa: E731
        return jax.tree.map(mixed, average, policy)

    def loss(
        self,
        net: ActorCritic,
        batch: Batch,
        scale: jax.Array,
        entropy: jax.Array,
        teaching: jax.Array | float = 0.0,
        curiosity: jax.Array | float = 0.0,
    ) -> tuple:
        """Clipped surrogate + value errors − entropy + guard and teacher, over the valid steps of the rows."""
        trials = batch.trials
        features = net.policy.trunk.forward(trials.token, trials.trial)
        watched = net.policy.watched(features, trials.token, trials.trial)
        policy = net.policy.distribution(net.policy.seen(features, watched))
        terms = self.policy_terms(policy, net.policy.guard, watched, trials)
        lesson, lesson_metrics = self.lesson(policy, trials)
        critics = (net.reward_critic, net.cost_critic)
        values = jnp.stack(
            [critic(features, batch.task, trials.trial) for critic in critics]
        )  # in units of `scale`
        # Critics predict in units of `scale`, so that their errors weigh the same whatever the rewards are.
        bonus = curiosity * terms.surprise
        advantages = self.advantages(jax.lax.stop_gradient(values) * scale[:, None, None], trials, bonus)
        mask = trials.learnable

        weight = batch.multiplier * over_budget(trials) if self.penalty.charge == "paper" else batch.multiplier
        advantage = _standardise(advantages[0] - weight * advantages[1], mask)
        ratio = jnp.exp(terms.log_prob - trials.extras["log_prob"])
        clipped = jnp.clip(ratio, 1 - self.config.clip, 1 + self.config.clip)
        actor = -_mean(jnp.minimum(ratio * advantage, clipped * advantage), mask)

        targets = jax.lax.stop_gradient(values) + advantages / scale[:, None, None]
        critic = jnp.stack([_mean((v - t) ** 2, mask) for v, t in zip(values, targets, strict=True)])
        # V + A is an estimate of Q of the action taken: the off-policy optimiser logs its Q by the same names.
        q, q_cost = (_mean(t * s, mask) for t, s in zip(targets, scale, strict=True))
        metrics = {
            **terms.metrics,
            **lesson_metrics,
            "actor_loss": actor,
            "reward_critic_loss": critic[0],
            "cost_critic_loss": critic[1],
            "entropy": terms.entropy,
            "clipped": _mean((jnp.abs(ratio - 1) > self.config.clip).astype(jnp.float32), mask),
            "kl": _mean(ratio - 1 - jnp.log(ratio), mask),
            "q": q,
            "q_cost": q_cost,
        }
        rms = jnp.sqrt(jnp.stack([_mean((t * s) ** 2, mask) for t, s in zip(targets, scale, strict=True)]))
        scale = 0.99 * scale + 0.01 * jnp.maximum(rms, 1e-2)
        loss = actor + self.config.value_weight * critic.sum() - entropy * terms.entropy
        return loss + self.config.guard_weight * terms.guard_loss + teaching * lesson, (scale, metrics)

    def lesson(self, policy: Distribution, trials: Trials) -> tuple[Any, dict[str, jax.Array]]:
        """Cross-entropy to what a teacher would have done, and how often the policy did just that."""
        if not self.teacher:
            return 0.0, {}
        advice, mask = trials.extras["advice"], trials.learnable
        agrees = _mean((trials.action == advice).astype(jnp.float32), mask)
        return -_mean(policy.log_prob(advice), mask), {"teacher_agrees": agrees}

    def policy_terms(self, policy: Distribution, guard: Guard | None, watched: jax.Array, trials: Trials) -> Terms:
        """What counts of the policy in the loss, and of its guard, which has `watched`, if it has one."""
        mask = trials.learnable
        if guard is None:
            return Terms(policy.log_prob(trials.action), _mean(policy.entropy(), mask), 0.0, 0.0, {})
        played: Any = policy
        if isinstance(policy, TanhNormal):  # the guard is part of the world: what counts is what was proposed
            chosen, taken = trials.extras["proposal"], self.env.spec.action.encode_scaled(trials.action)
        else:  # the policy was restricted to what the guard allowed
            chosen, taken, played = (
                trials.action,
                policy.index(trials.action),
                policy.restricted(trials.extras["allowed"]),
            )
        loss, metrics = guard.loss(watched, taken, trials.cost, trials.done, mask)
        metrics |= {"guard_stepped_in": _mean(trials.extras["stepped_in"].astype(jnp.float32), mask)}
        surprise: Any = 0.0
        if self.curiosity:
            surprise = guard.surprise(watched, taken, trials.cost)
            metrics |= {"surprise": _mean(surprise, mask)}
        return Terms(played.log_prob(chosen), _mean(played.entropy(), mask), loss, surprise, metrics)

    def advantages(self, values: jax.Array, trials: Trials, bonus: jax.Array | float = 0.0) -> jax.Array:
        """Advantages of reward, with a bonus, and of cost, [2, row, time]."""
        within_trial = reward_discount(self.config.discount, trials.trial_done)
        cost, cost_discount = charged_cost(trials, self.penalty, self.config.cost_discount)
        # Both in one scan: on a GPU its many small kernels cost more than their work.
        signal = jnp.stack([net_reward(trials, self.penalty) + bonus, cost])
        discount = jnp.stack([within_trial, cost_discount])
        return gae(signal, values, discount, self.config.trace)


def _in_new_units(net: ActorCritic, factor: jax.Array) -> ActorCritic:
    """The same critics, predicting `factor` [2] times the numbers."""
    last = lambda n: (n.reward_critic.head.second, n.cost_critic.head.second)  # noqa: E731
    return eqx.tree_at(last, net, tuple(in_new_units(x, f) for x, f in zip(last(net), factor, strict=True)))


def _mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(mask, values, 0.0).sum() / jnp.maximum(mask.sum(), 1)


def _standardise(values: jax.Array, mask: jax.Array) -> jax.Array:
    centred = values - _mean(values, mask)
    return centred / (jnp.sqrt(_mean(centred**2, mask)) + 1e-6)
