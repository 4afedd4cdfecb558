"""Off-policy actor-critic on replayed rows of trials: Algorithm 1, on an AMAGO-style agent.

Actor and critics read the features of one transformer; only the heads have slow target copies. Both losses train
the transformer, the actor's only through the actor's own input: the Q-values that it climbs see detached features.
With discrete actions, the critics give a value for every action, and expectations over the policy are exact. With
continuous actions, the critics take an action as input; the policy's is sampled and differentiated through.

Where the paper leaves a choice, `DDPGConfig` has a switch; `paper_config()` is closest to the paper's text.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from safeicrl.agents.in_context import InContextAgent
from safeicrl.envs.api import Env, EnvSpec, Key, PyTree, record, replace
from safeicrl.envs.spaces import Box, Discrete
from safeicrl.errors import UserError, check_integer, check_number
from safeicrl.machine.devices import everywhere, over_rows
from safeicrl.nets.heads import Categorical, Distribution, PolicyNet, transplanted
from safeicrl.nets.layers import MLP, Linear, in_new_units
from safeicrl.nets.transformer import NetConfig
from safeicrl.optimisers import replay as buffer
from safeicrl.optimisers.replay import Replay
from safeicrl.penalty import PenaltyConfig, charged_cost, net_reward, over_budget
from safeicrl.returns import linear_recurrence, reward_discount, shift
from safeicrl.trial import Trials

HIDDEN = 256  # of a critic


@dataclass(frozen=True)
class DDPGConfig:
    """Hyperparameters; each comment names the alternative."""

    learning_rate: float = 3e-4  # Adam's
    updates: int = 64  # gradient steps per iteration
    batch: int = 32  # rows per gradient step
    capacity: int = 2048  # rows that replay holds
    discount: float = 0.995  # γ of the reward: it bootstraps into the next episode, stops at the trial's end
    cost_discount: float = 0.99  # γ of the excess cost; the paper's form stops at the episode's end with γ = 1
    trace: float = 0.9  # Retrace; 0 is the paper's one-step target
    ensemble: int = 2  # critics of each kind; targets average them
    target_rate: float = 0.01  # of the slow heads
    trust: float = 1.0  # weight of KL(slow policy ‖ policy); 0 in the paper
    entropy: float = 0.01  # weight of the policy's entropy; 0 in the paper
    exploration: tuple[float, float] = (1.0, 0.02)  # ε, start → end over the first half of the run
    max_grad: float = 1.0  # norm to which gradients are clipped
    privileged_critic: bool = True  # critics also see the hidden task; not in the paper

    def __post_init__(self) -> None:
        for name in ("updates", "batch", "capacity", "ensemble"):
            check_integer(f"ddpg.{name}", getattr(self, name), 1)
        for name in ("learning_rate", "max_grad"):
            check_number(f"ddpg.{name}", getattr(self, name), 0.0, strict=True)
        for name in ("trust", "entropy"):
            check_number(f"ddpg.{name}", getattr(self, name), 0.0)
        for value in self.exploration:
            if not 0 < check_number("ddpg.exploration", value, 0.0) <= 1:
                raise UserError(f"ddpg.exploration must lie in (0, 1], got {value}")
        for name in ("discount", "cost_discount", "trace", "target_rate"):
            if check_number(f"ddpg.{name}", getattr(self, name), 0.0) > 1:
                raise UserError(f"ddpg.{name} must be at most 1, got {getattr(self, name)}")


def paper_config() -> DDPGConfig:
    """As close to Algorithm 1 as it goes: one-step targets, single plain critics, no trust region, no entropy.

    What remains ours: Q in units of its spread, targets in units of their scale, exploration by ε, packed rows.
    """
    return DDPGConfig(trace=0.0, ensemble=1, trust=0.0, entropy=0.0, privileged_critic=False)


class Critics(eqx.Module):
    """An ensemble of Q-functions of one signal.

    In privileged critics the hidden task scales and shifts the hidden layer: whether the next cell is an obstacle
    depends on the product of where the agent is (features) and what lies where (task). On average over the tasks
    that a history leaves possible, they teach the policy what critics of the history would.
    """

    members: MLP  # stacked
    task: Linear | None  # stacked
    action: Discrete | Box = eqx.field(static=True)  # an action of a box is an input

    def __init__(self, width: int, spec: EnvSpec, ensemble: int, privileged: bool, key: Key):
        space = spec.action
        inputs, outputs = (width, space.n) if isinstance(space, Discrete) else (width + space.size, 1)
        head, task = jax.random.split(key)
        make = lambda k: MLP(inputs, HIDDEN, outputs, k, scale=0.01)  # noqa: E731
        self.members = eqx.filter_vmap(make)(jax.random.split(head, ensemble))
        see = lambda k: Linear(spec.task_features, 2 * HIDDEN, k, bias=False)  # noqa: E731
        self.task = eqx.filter_vmap(see)(jax.random.split(task, ensemble)) if privileged else None
        self.action = space

    def taken(self, features: jax.Array, seen: "Seen", action: jax.Array) -> jax.Array:
        """Q of the action taken, [member, row, time]."""
        if isinstance(self.action, Box):
            # float32 whatever the features are: the actor climbs Q's slope in the action, which rounding would blur
            inputs = jnp.concatenate([features, self.action.encode_scaled(action)], -1)
            return self._read(inputs, seen)[..., 0]
        return (self._read(features, seen) * self.action.encode(action)).sum(-1)

    def expected(self, features: jax.Array, seen: "Seen", policy: Distribution, key: Key) -> jax.Array:
        """E_{a∼π} Q(·, a), [member, row, time]; exact for discrete actions, one differentiable sample otherwise."""
        if isinstance(self.action, Box):
            return self.taken(features, seen, policy.sample(key))
        assert isinstance(policy, Categorical)
        return (self._read(features, seen) * jax.nn.softmax(policy.logits)).sum(-1)

    def spread(self, features: jax.Array, seen: "Seen") -> jax.Array:
        """Standard deviation of the mean Q over all actions, [row, time]; 1 if actions are continuous."""
        if isinstance(self.action, Box):
            return jnp.ones(features.shape[:-1])
        return self._read(features, seen).mean(0).std(-1)

    def _read(self, inputs: jax.Array, seen: "Seen") -> jax.Array:
        """[member, row, time, output]"""

        def read(member: MLP, task: Linear | None) -> jax.Array:
            if task is None:
                return member.read_out(inputs)
            hidden = task(seen.task.astype(inputs.dtype))  # [row, queue, 2 · hidden]: once per trial, not per step
            one_hot = jax.nn.one_hot(seen.trial, seen.task.shape[1], dtype=inputs.dtype)
            gain, shift = jnp.split(jnp.einsum("rtq,rqh->rth", one_hot, hidden), 2, -1)
            return member.read_out(inputs, shift, 1.0 + gain)

        return eqx.filter_vmap(read)(self.members, self.task)


class Seen(NamedTuple):
    """What privileged critics see beside the history."""

    task: jax.Array  # [row, queue, feature]
    trial: jax.Array  # [row, time] which of the row's tasks


class Nets(eqx.Module):
    """The policy and its critics."""

    policy: PolicyNet
    reward: Critics
    cost: Critics

    def __init__(self, net: NetConfig, spec: EnvSpec, config: DDPGConfig, key: Key):
        policy, reward, cost = jax.random.split(key, 3)
        self.policy = PolicyNet(net, spec, policy)
        critics = lambda k: Critics(net.width, spec, config.ensemble, config.privileged_critic, k)  # noqa: E731
        self.reward, self.cost = critics(reward), critics(cost)


@record
class Row:
    """What replay keeps of each row."""

    trials: Trials
    task: jax.Array  # [row, queue, feature], the hidden tasks


class Heads(eqx.Module):
    """The parts of `Nets` with slow copies."""

    actor: MLP
    reward: Critics
    cost: Critics


@record
class DDPGState:
    """What the optimiser carries."""

    net: Nets
    slow: Heads
    optimiser: PyTree
    replay: Replay
    scale: jax.Array  # [2] running root mean square of the reward and cost targets
    progress: jax.Array  # [] share of the run that is over


class DDPG:
    """The optimiser; pure functions of its state."""

    def __init__(
        self,
        env: Env,
        net: NetConfig,
        penalty: PenaltyConfig,
        config: DDPGConfig,
        *,
        iterations: int,
        trials: Trials,
        tasks: PyTree,
    ):
        """`trials` and `tasks`, or their shapes, are examples of what an iteration brings."""
        rows = trials.reward.shape[0]
        if rows > config.capacity:
            raise UserError(
                f"ddpg.capacity must be at least the rows of an iteration, got {config.capacity} < {rows}"
            )
        self.env, self.net, self.penalty, self.config = env, net, penalty, config
        self.iterations = iterations
        self.example = jax.eval_shape(self.row, trials, tasks)
        schedule = optax.linear_schedule(0.0, config.learning_rate, 200)
        self.optimiser = optax.flatten(  # as in ppo.py
            optax.chain(optax.clip_by_global_norm(config.max_grad), optax.adam(schedule, b1=0.9, b2=0.99))
        )

    def init(self, key: Key) -> DDPGState:
        """Fresh networks, an empty replay."""
        net = Nets(self.net, self.env.spec, self.config, key)
        return DDPGState(
            net=net,
            slow=Heads(actor=net.policy.actor, reward=net.reward, cost=net.cost),
            optimiser=self.optimiser.init(eqx.filter(net, eqx.is_array)),
            replay=buffer.init(self.example, self.config.capacity),
            scale=jnp.ones(2),
            progress=jnp.float32(0.0),
        )

    def start_from(self, state: DDPGState, other: DDPGState) -> DDPGState:
        """A new run's state with another run's networks, slow and fast, and the scales they predict in."""
        return replace(state, net=other.net, slow=other.slow, scale=other.scale)

    def start_with(self, state: DDPGState, policy: PolicyNet) -> DDPGState:
        """A new run's state with a released policy, fast and slow; its critics are new."""
        own = transplanted(state.net.policy, policy)
        net = eqx.tree_at(lambda net: net.policy, state.net, own)
        return replace(state, net=net, slow=eqx.tree_at(lambda slow: slow.actor, state.slow, own.actor))

    def agent(self, state: DDPGState) -> InContextAgent:
        """The policy, sampled, without added exploration."""
        return InContextAgent(state.net.policy)

    def explorer(self, state: DDPGState) -> InContextAgent:
        """The policy that plays in training."""
        begin, end = self.config.exploration
        return InContextAgent(
            state.net.policy, epsilon=begin + (end - begin) * jnp.minimum(2 * state.progress, 1.0)
        )

    def update(
        self, state: DDPGState, trials: Trials, tasks: PyTree, multiplier: jax.Array, iteration: jax.Array, key: Key
    ) -> tuple[DDPGState, dict[str, jax.Array]]:
        """Store the new trials, then take gradient steps on replayed ones; `multiplier` is [episode]."""
        stored = buffer.add(state.replay, everywhere(self.row(trials, tasks)))
        params, static = eqx.partition(state.net, eqx.is_array)
        slow_params, slow_static = eqx.partition(state.slow, eqx.is_array)

        def gradient_step(carry: tuple, key: Key) -> tuple:
            params, slow, optimiser, scale = carry
            sample_key, loss_key = jax.random.split(key)
            batch = over_rows(buffer.sample(stored, sample_key, self.config.batch))
            heads = eqx.combine(slow, slow_static)
            loss = lambda p: self.loss(eqx.combine(p, static), heads, batch, multiplier, scale, loss_key)  # noqa: E731
            grads, (new_scale, metrics) = jax.grad(loss, has_aux=True)(params)
            updates, optimiser = self.optimiser.update(grads, optimiser, params)
            params = _in_new_units(optax.apply_updates(params, updates), scale / new_scale)
            slow, scale = _in_new_units(slow, scale / new_scale), new_scale
            fast = Heads(actor=params.policy.actor, reward=params.reward, cost=params.cost)
            slow = optax.incremental_update(eqx.filter(fast, eqx.is_array), slow, self.config.target_rate)
            return (params, slow, optimiser, scale), metrics | {"grad_norm": optax.tree.norm(grads)}

        carry = (params, slow_params, state.optimiser, state.scale)
        keys = jax.random.split(key, self.config.updates)
        (params, slow, optimiser, scale), metrics = jax.lax.scan(gradient_step, carry, keys)  # type: ignore[var-annotated]
        state = DDPGState(
            net=eqx.combine(params, static),
            slow=eqx.combine(slow, slow_static),
            optimiser=optimiser,
            replay=stored,
            scale=scale,
            progress=(iteration + 1) / self.iterations,
        )
        means = jax.tree.map(lambda x: x.mean(0), metrics)
        return state, means | {"reward_scale": scale[0], "cost_scale": scale[1]}

    def row(self, trials: Trials, tasks: PyTree) -> Row:
        """Rows for replay."""
        return Row(trials=trials, task=jax.vmap(jax.vmap(self.env.task_features))(tasks))

    def loss(
        self, net: Nets, slow: Heads, batch: Row, multiplier: jax.Array, scale: jax.Array, key: Key
    ) -> tuple[jax.Array, tuple]:
        """L_v + L_c + L_p of Algorithm 1 over the valid steps of the rows."""
        target_key, actor_key = jax.random.split(key)
        trials, seen = batch.trials, Seen(batch.task, batch.trials.trial)
        features = net.policy.trunk.forward(trials.token, trials.trial)
        policy = net.policy.distribution(features)
        frozen = jax.lax.stop_gradient(features)
        prior = net.policy.distribution(frozen, slow.actor)
        mask = trials.learnable.astype(jnp.float32)

        targets = self.targets(slow, prior, frozen, batch, scale, target_key)  # [2, row, time]
        taken = [critics.taken(features, seen, trials.action) for critics in (net.reward, net.cost)]
        errors = [_mean((q - t) ** 2, mask) for q, t in zip(taken, targets, strict=True)]

        # L_p = −Q(s, â) + λ v_e Q^c(s, â), v_e in the paper's form only; the critics and their input are constants.
        steady = jax.lax.stop_gradient((net.reward, net.cost))
        q, q_cost = (critics.expected(frozen, seen, policy, actor_key).mean(0) for critics in steady)
        weight = multiplier[trials.token.episode] * scale[1] / scale[0]
        if self.penalty.charge == "paper":
            weight = weight * over_budget(trials)
        # Long horizons bury an action's advantage in the value: measure Q in units of its spread over all actions.
        # (Over the policy's own actions the unit would shrink to nothing as the policy turns greedy.)
        unit = _mean(steady[0].spread(frozen, seen) + weight * steady[1].spread(frozen, seen), mask) + 1e-3
        actor = _mean(-(q - weight * q_cost) / unit, mask)
        drift = _mean(jax.lax.stop_gradient(prior).divergence(policy), mask)
        randomness = _mean(policy.entropy(), mask)

        rms = jnp.sqrt(jnp.stack([_mean((t * s) ** 2, mask) for t, s in zip(targets, scale, strict=True)]))
        metrics = {
            "actor_loss": actor, "reward_critic_loss": errors[0], "cost_critic_loss": errors[1],
            "entropy": randomness, "kl": drift, "q": _mean(taken[0].mean(0), mask) * scale[0],
            "q_cost": _mean(taken[1].mean(0), mask) * scale[1],
        }  # fmt: skip
        loss = actor + self.config.trust * drift - self.config.entropy * randomness
        return loss + (errors[0] + errors[1]), (0.995 * scale + 0.005 * jnp.maximum(rms, 1e-2), metrics)

    def targets(
        self, slow: Heads, prior: Distribution, features: jax.Array, batch: Row, scale: jax.Array, key: Key
    ) -> jax.Array:
        """Retrace targets of reward and cost from the slow heads, [2, row, time], in units of `scale`."""
        trials, seen = batch.trials, Seen(batch.task, batch.trials.trial)
        cost, cost_discount = charged_cost(trials, self.penalty, self.config.cost_discount)
        signal = jnp.stack([net_reward(trials, self.penalty), cost]) / scale[:, None, None]
        discount = jnp.stack([reward_discount(self.config.discount, trials.trial_done), cost_discount])
        critics = (slow.reward, slow.cost)
        taken = jnp.stack([c.taken(features, seen, trials.action).mean(0) for c in critics])
        value = jnp.stack([c.expected(features, seen, prior, key).mean(0) for c in critics])
        ratio = jnp.exp(jnp.minimum(prior.log_prob(trials.action) - trials.extras["log_prob"], 0.0))
        error = signal + discount * shift(value) - taken
        cut = discount[..., -1] > 0  # a row cut in mid-trial has no next value
        error = error.at[..., -1].set(jnp.where(cut, 0.0, error[..., -1]))
        correction = linear_recurrence(discount * self.config.trace * shift(ratio), error)
        return jax.lax.stop_gradient(taken + correction)


Holder = TypeVar("Holder", Nets, Heads)


def _in_new_units(critics: Holder, factor: jax.Array) -> Holder:
    """The same reward and cost critics, predicting `factor` [2] times the numbers."""
    last = lambda c: (c.reward.members.second, c.cost.members.second)  # noqa: E731
    return eqx.tree_at(last, critics, tuple(in_new_units(x, f) for x, f in zip(last(critics), factor, strict=True)))


def _mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean over the masked steps; leading axes beyond [row, time] are averaged too."""
    return (values * mask).sum() / jnp.maximum(mask.sum(), 1) / (values.size / mask.size)
