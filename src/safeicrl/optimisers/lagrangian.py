"""PPO-Lagrangian: an ordinary safe learner for one task with one limit on an episode's mean cost.

It has three separate networks (actor, reward critic, cost critic), the clipped objective on
(A_r − λ A_c) / (1 + λ), and a multiplier λ that follows the mean undiscounted cost of the episodes that ended.
`Learner` is one learner as pure functions of its state, task and limit. `jax.vmap` turns it into a whole set of
learning histories (histories/collect.py); algos/ppo_lag.py is the same learner as the trainer sees it.

On a small grid, the networks are evaluated once on all cells, and everything else looks the results up.
"""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from safeicrl.agents.mlp import MlpAgent
from safeicrl.budgets import is_over
from safeicrl.envs.api import Env, EnvSpec, Key, PyTree, record, replace
from safeicrl.envs.faults import find_fault
from safeicrl.envs.spaces import Grid
from safeicrl.errors import UserError, check_integer, check_number
from safeicrl.nets.feedforward import (
    FeedForward,
    Normaliser,
    action_outputs,
    check_hidden,
    distribution,
    encode,
    evaluate_all,
    first_normaliser,
)
from safeicrl.nets.heads import Distribution
from safeicrl.returns import linear_recurrence

TABLE = 1024  # the most cells of a grid that is evaluated whole
ACTOR, REWARD, COST = range(3)  # the networks, along their leading axis


@dataclass(frozen=True)
class PPOLagConfig:
    """All of PPO-Lagrangian's settings; the cost limit belongs to the task."""

    iterations: int = 200  # in the run
    envs: int = 16  # episodes side by side
    steps: int = 32  # steps of each per iteration
    epochs: int = 4  # passes over an iteration's steps
    minibatches: int = 4  # per pass
    learning_rate: float = 3e-4  # Adam's
    hidden: tuple[int, ...] = (64, 64)  # sizes of the networks' hidden layers
    clip: float = 0.2  # of the probability ratio
    discount: float = 0.99  # γ of the reward
    cost_discount: float = 0.99  # γ of the cost
    trace: float = 0.95  # λ of GAE, reward and cost
    entropy: float = 0.01  # weight of the policy's entropy
    max_grad: float = 1.0  # norm to which gradients are clipped
    multiplier: float = 0.0  # λ at the start
    multiplier_rate: float = 0.05  # rise of λ per iteration while the mean cost is 1 or more over the limit
    multiplier_gain: float = 0.5  # added to λ only while the mean cost is that much over: damps its swings
    multiplier_cap: float = 10.0  # the largest λ; without a cap it would grow for ever if the limit cannot be kept
    log_std: float = -0.5  # of continuous actions, at the start

    def __post_init__(self) -> None:
        for name in ("iterations", "envs", "steps", "epochs", "minibatches"):
            check_integer(name, getattr(self, name), 1)
        check_hidden(self.hidden)
        check_integer("envs · steps", self.envs * self.steps, 1)
        for name in ("learning_rate", "clip", "max_grad", "multiplier_cap"):
            check_number(name, getattr(self, name), 0.0, strict=True)
        for name in ("entropy", "multiplier", "multiplier_rate", "multiplier_gain"):
            check_number(name, getattr(self, name), 0.0)
        check_number("log_std", self.log_std, -10.0)
        for name in ("discount", "cost_discount", "trace"):
            if check_number(name, getattr(self, name), 0.0) > 1:
                raise UserError(f"{name} must be at most 1, got {getattr(self, name)}")
        if self.multiplier > self.multiplier_cap:
            raise UserError(f"multiplier {self.multiplier} is above multiplier_cap {self.multiplier_cap}")
        if self.envs * self.steps % self.minibatches:
            raise UserError(
                f"envs · steps ({self.envs * self.steps}) must be a multiple of minibatches ({self.minibatches})"
            )


@record
class Params:
    """What is learned by gradient."""

    nets: FeedForward  # [3, ...]: actor, reward critic, cost critic, stacked: one batched product per layer
    log_std: jax.Array | None  # [action]


@record
class Worlds:
    """The episodes under way, [env]."""

    state: PyTree
    observation: jax.Array  # [env, obs]
    returns: jax.Array  # [env] of the episode so far
    costs: jax.Array  # [env]


@record
class LearnerState:
    """Everything that changes while learning."""

    params: Params
    optimiser: PyTree
    normaliser: Normaliser | None
    scale: jax.Array  # [2] running root mean square of the reward and cost critics' targets
    multiplier: jax.Array  # [] λ without the part of `multiplier_gain`
    recent: jax.Array  # [3] mean return, cost and share over the limit of the last iteration with an episode's end
    worlds: Worlds
    key: Key


@record
class Rollout:
    """An iteration's steps, [time, env, ...]."""

    observation: jax.Array  # before the action
    action: jax.Array
    reward: jax.Array
    cost: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    final_observation: jax.Array  # what the step led to, before any reset
    log_prob: jax.Array
    returns: jax.Array  # of the episode so far, this step included
    costs: jax.Array

    @property
    def done(self) -> jax.Array:
        """An episode ended with this step."""
        return self.terminated | self.truncated


@record
class Batch:
    """Steps to learn from, [step, ...]."""

    index: jax.Array  # the cell, if the grid is evaluated whole; otherwise unused
    observation: jax.Array
    action: jax.Array
    log_prob: jax.Array
    advantage: jax.Array  # (A_r − λ A_c) / (1 + λ)
    targets: jax.Array  # [step, 2] of the critics, in units of the new scale


class Learner:
    """PPO-Lagrangian on one task under one limit, as pure functions of its state."""

    def __init__(self, env: Env, config: PPOLagConfig):
        self.env, self.spec, self.config = env, env.spec, config
        self.optimiser = optax.chain(
            optax.clip_by_global_norm(config.max_grad), optax.adam(config.learning_rate, eps=1e-5)
        )
        self.cells: np.ndarray | None = None  # [cell, coordinate], of a grid that is evaluated whole
        grid = self.spec.observation
        if isinstance(grid, Grid) and np.prod(grid.sizes) <= TABLE:
            self.cells = grid.cells()

    def init(self, key: Key, task: PyTree) -> LearnerState:
        """Fresh networks, and the first episodes' starts."""
        config, (net_key, reset_key, key) = self.config, jax.random.split(key, 3)
        outputs, log_std = action_outputs(self.spec)
        make = lambda k: FeedForward(self.spec.observation.encoded_size, config.hidden, outputs, k)  # noqa: E731
        params = Params(
            nets=eqx.filter_vmap(make)(jax.random.split(net_key, 3)),
            log_std=None if log_std is None else jnp.full_like(log_std, config.log_std),
        )
        state, observation = jax.vmap(self.env.reset, (0, None))(jax.random.split(reset_key, config.envs), task)
        zeros = jnp.zeros(config.envs)
        return LearnerState(
            params=params,
            optimiser=self.optimiser.init(params),
            normaliser=first_normaliser(self.spec),
            scale=jnp.ones(2),
            multiplier=jnp.float32(config.multiplier),
            recent=jnp.zeros(3),
            worlds=Worlds(state=state, observation=observation, returns=zeros, costs=zeros),
            key=key,
        )

    def agent(self, state: LearnerState) -> MlpAgent:
        """The policy, sampled."""
        actor = jax.tree.map(lambda x: x[ACTOR], state.params.nets)
        return MlpAgent(net=actor, log_std=state.params.log_std, normaliser=state.normaliser, spec=self.spec)

    def iterate(
        self, state: LearnerState, task: PyTree, limit: jax.Array
    ) -> tuple[LearnerState, Rollout, dict[str, jax.Array]]:
        """One iteration: play, move λ, improve the policy. Also returns what was played."""
        key, play_key, learn_key = jax.random.split(state.key, 3)
        # Full precision on all hardware: the networks are tiny, and ratios near 1 need it.
        with jax.default_matmul_precision("highest"):
            worlds, played = self.play(state, task, play_key)
            recent, ended = summarise_ends(played, limit, state.recent)
            multiplier, price = self.move(state.multiplier, recent[1], limit, ended)
            batch, scale = self.prepare(state, played, price)
            state = replace(state, params=rescale(state.params, state.scale / scale))
            params, optimiser, metrics = self.learn(state, batch, learn_key)
        normaliser = state.normaliser
        if normaliser is not None:  # after learning: one iteration acts and learns with the same normaliser
            normaliser = normaliser.update(played.observation)
        state = LearnerState(
            params=params, optimiser=optimiser, normaliser=normaliser, scale=scale, multiplier=multiplier,
            recent=recent, worlds=worlds, key=key,
        )  # fmt: skip
        metrics |= {
            "env_steps": jnp.float32(played.reward.size),
            "return": recent[0],
            "cost": recent[1],
            "over_budget": recent[2],
            "budget": jnp.asarray(limit, jnp.float32),
            "lambda": price,
            "episodes": ended,
            "fault": first_fault(played, self.spec),
        }
        return state, played, metrics

    def move(
        self, multiplier: jax.Array, cost: jax.Array, limit: jax.Array, ended: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The moved multiplier, and the λ to learn with; both in [0, cap].

        The multiplier is an integral of the violations, which alone swings about the limit. As in PID-Lagrangian
        methods (Stooke et al. 2020), λ has a proportional part as well. If no episode ended, the integral stays.
        """
        config, violation = self.config, jnp.where(ended > 0, jnp.clip(cost - limit, -1.0, 1.0), 0.0)
        multiplier = jnp.clip(multiplier + config.multiplier_rate * violation, 0.0, config.multiplier_cap)
        return multiplier, jnp.clip(multiplier + config.multiplier_gain * violation, 0.0, config.multiplier_cap)

    def play(self, state: LearnerState, task: PyTree, key: Key) -> tuple[Worlds, Rollout]:
        """Play `steps` steps in every environment; where an episode ends, the next one begins."""
        envs, params = self.config.envs, state.params
        actor = jax.tree.map(lambda x: x[ACTOR], params.nets)
        table = None if self.cells is None else actor(encode(jnp.asarray(self.cells), self.spec, None))

        def policy(observation: jax.Array) -> Distribution:
            if table is not None:
                return distribution(table[self.cell(observation)], params.log_std)
            return distribution(actor(encode(observation, self.spec, state.normaliser)), params.log_std)

        def step(worlds: Worlds, keys: Key) -> tuple[Worlds, Rollout]:
            act_key, step_key, reset_key = keys
            pi = policy(worlds.observation)
            action = pi.sample(act_key)
            step_keys = jax.random.split(step_key, envs)
            new, out = jax.vmap(self.env.step, (0, 0, 0, None))(step_keys, worlds.state, action, task)
            fresh, first = jax.vmap(self.env.reset, (0, None))(jax.random.split(reset_key, envs), task)
            returns, costs = worlds.returns + out.reward, worlds.costs + out.cost
            played = Rollout(
                observation=worlds.observation, action=action, reward=out.reward, cost=out.cost,
                terminated=out.terminated, truncated=out.truncated, final_observation=out.observation,
                log_prob=pi.log_prob(action), returns=returns, costs=costs,
            )  # fmt: skip
            after = Worlds(state=new, observation=out.observation, returns=returns, costs=costs)
            begin = Worlds(state=fresh, observation=first, returns=jnp.zeros(envs), costs=jnp.zeros(envs))
            return jax.tree.map(lambda a, b: _where(played.done, a, b), begin, after), played

        return jax.lax.scan(step, state.worlds, jax.random.split(key, (self.config.steps, 3)))

    def cell(self, observation: jax.Array) -> jax.Array:
        """The number of a cell, its place in `cells`."""
        assert isinstance(self.spec.observation, Grid)
        return self.spec.observation.flat(observation)

    def prepare(self, state: LearnerState, played: Rollout, price: jax.Array) -> tuple[Batch, jax.Array]:
        """Advantages at λ = `price` and targets of every step, and the critics' new scale."""
        config = self.config
        values = self.values(state, played.observation)  # [2, time, env]
        ahead = self.values(state, played.final_observation)
        discount = jnp.array([config.discount, config.cost_discount])[:, None, None]
        signal = jnp.stack([played.reward, played.cost])
        # A truncated episode would have gone on: its last step bootstraps from the true final observation.
        error = signal + discount * ~played.terminated * ahead - values
        decay = discount * config.trace * ~played.done
        by_env = [jnp.moveaxis(x, 1, -1) for x in (decay, error)]  # [2, env, time]
        advantages = jnp.moveaxis(linear_recurrence(*by_env), -1, 1)
        targets = values + advantages

        reward, cost = (x - x.mean() for x in advantages)
        # Standardised, but never blown up: once all episodes go well, the rest is noise.
        reward = reward / jnp.maximum(reward.std(), 0.1 * state.scale[0])
        advantage = (reward - price * cost) / (1 + price)
        rms = jnp.sqrt((targets**2).mean((1, 2)))
        scale = 0.95 * state.scale + 0.05 * jnp.maximum(rms, 1e-2)
        flat = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
        index = jnp.zeros_like(played.reward, jnp.int32) if self.cells is None else self.cell(played.observation)
        batch = Batch(
            index=flat(index), observation=flat(played.observation), action=flat(played.action),
            log_prob=flat(played.log_prob), advantage=flat(advantage),
            targets=flat(jnp.moveaxis(targets / scale[:, None, None], 0, -1)),
        )  # fmt: skip
        return batch, scale

    def values(self, state: LearnerState, observation: jax.Array) -> jax.Array:
        """The values of the two critics, [2, ...]."""
        critics = jax.tree.map(lambda x: x[REWARD:], state.params.nets)
        scale = state.scale[:, *[None] * (observation.ndim - 1)]
        if self.cells is None:
            return evaluate_all(critics, encode(observation, self.spec, state.normaliser))[..., 0] * scale
        table = evaluate_all(critics, encode(jnp.asarray(self.cells), self.spec, None))[..., 0]
        return table[:, self.cell(observation)] * scale

    def learn(self, state: LearnerState, batch: Batch, key: Key) -> tuple[Params, PyTree, dict[str, jax.Array]]:
        """Epochs of clipped updates on minibatches."""
        config = self.config

        def minibatch(carry: tuple, rows: jax.Array) -> tuple:
            params, optimiser = carry
            part = jax.tree.map(lambda x: x[rows], batch)
            loss = lambda p: self.loss(p, part, state.normaliser)  # noqa: E731
            grads, metrics = jax.grad(loss, has_aux=True)(params)
            updates, optimiser = self.optimiser.update(grads, optimiser, params)
            metrics["grad_norm"] = optax.tree.norm(grads)
            return (optax.apply_updates(params, updates), optimiser), metrics

        # Sorting noise gives a permutation per epoch, and compiles faster than JAX's own.
        order = jnp.argsort(jax.random.uniform(key, (config.epochs, len(batch.action))), axis=-1)
        carry = (state.params, state.optimiser)
        order = order.reshape(config.epochs * config.minibatches, -1)
        (params, optimiser), metrics = jax.lax.scan(minibatch, carry, order)  # type: ignore[var-annotated]
        return params, optimiser, jax.tree.map(lambda x: x.mean(0), metrics)

    def loss(self, params: Params, batch: Batch, normaliser: Normaliser | None) -> tuple:
        """Clipped surrogate + value errors − entropy, over the steps of the batch."""
        if self.cells is None:
            out = evaluate_all(params.nets, encode(batch.observation, self.spec, normaliser))  # [3, step, out]
        else:
            table = evaluate_all(params.nets, encode(jnp.asarray(self.cells), self.spec, None))  # [3, cell, out]
            # A product instead of a gather: a gather's gradient is a scatter, slow and, on a GPU, not reproducible.
            out = jax.nn.one_hot(batch.index, len(self.cells)) @ table
        policy = distribution(out[ACTOR], params.log_std)
        ratio = jnp.exp(policy.log_prob(batch.action) - batch.log_prob)
        clipped = jnp.clip(ratio, 1 - self.config.clip, 1 + self.config.clip)
        actor = -jnp.minimum(ratio * batch.advantage, clipped * batch.advantage).mean()
        critics = ((out[REWARD:, :, 0].T - batch.targets) ** 2).mean(0)
        entropy = policy.entropy().mean()
        metrics = {
            "actor_loss": actor,
            "reward_critic_loss": critics[0],
            "cost_critic_loss": critics[1],
            "entropy": entropy,
            "clipped": (jnp.abs(ratio - 1) > self.config.clip).mean(),
            "kl": (ratio - 1 - jnp.log(ratio)).mean(),
        }
        return actor + 0.5 * critics.sum() - self.config.entropy * entropy, metrics


def rescale(params: Params, factor: jax.Array) -> Params:
    """The same values in new units: a critic's output layer times `factor` [2], as in PopArt.

    Otherwise a growing scale would raise the values, these the targets, and those the scale again.
    """
    by = jnp.concatenate([jnp.ones(1), factor])  # the actor's stays
    last = lambda nets: (nets.weights[-1], nets.biases[-1])  # noqa: E731
    weight, bias = last(params.nets)
    nets = eqx.tree_at(last, params.nets, (weight * by[:, None, None], bias * by[:, None]))
    return replace(params, nets=nets)


def first_fault(played: Rollout, spec: EnvSpec) -> jax.Array:
    """The first number of the environment that breaks its contract, as `envs.faults.find_fault` gives it.

    A step is that of the iteration: a learner does not count the steps of its episodes. So one that never ends is
    found only in an iteration that is as long as an episode may be.
    """
    everywhere = jnp.ones_like(played.done)
    steps = jnp.broadcast_to(jnp.arange(played.done.shape[0])[:, None], played.done.shape)
    ends = jax.lax.cummax(jnp.where(played.done, steps + 1, 0))  # [time, env] steps before the episode under way
    return find_fault(
        cost=played.cost, reward=played.reward, observation=played.final_observation, first=played.observation,
        start=everywhere, valid=everywhere, episode=jnp.full_like(steps, -1), time=steps,
        spec=spec, age=steps + 1 - ends,
    )  # fmt: skip


def summarise_ends(played: Rollout, limit: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean return, mean cost and share over the limit of the episodes that ended, [3], and their number.

    If none ended, the means are those of `before`.
    """
    ended = played.done.sum()
    values = jnp.stack([played.returns, played.costs, is_over(played.costs, limit)])
    means = jnp.where(played.done, values, 0.0).sum((1, 2)) / jnp.maximum(ended, 1)
    return jnp.where(ended > 0, means, before), ended


def _where(choose: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.where(choose.reshape(choose.shape + (1,) * (a.ndim - choose.ndim)), a, b)
