"""A guard for a policy that has none, or another one: fitted to the frozen policy, from what it plays.

The policy's features stay as they are; only the cost model on them is learned. It plays training tasks, in the
first half of the rounds without a guard. In the second half its guard is on, but for a quarter of the rows: the
guard then meets the situations it will judge, and still sees what it forbids.

A trained policy's actions hardly vary, so what it plays says little about the other actions that a guard must
judge: what would happen if it braked, or turned back. Therefore the quarter of the rows without a guard holds some
other action now and then, for as many steps as the guard looks ahead: any of a finite set, or the middle of a
range, which is the guard's fallback. And a greedy policy of real-valued actions is sampled in the first half.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from safeicrl.agents.in_context import InContextAgent, bold_rows
from safeicrl.agents.reserved import told_in_rows
from safeicrl.envs.api import Env, Key, PyTree, replace
from safeicrl.envs.faults import refuse_fault
from safeicrl.envs.registry import env_to_plain
from safeicrl.envs.spaces import Discrete
from safeicrl.errors import MOST_ROWS, WIDEST, UserError, check_integer, check_number, check_risk, check_seed
from safeicrl.nets.guard import Guard
from safeicrl.nets.heads import PolicyNet, TanhNormal, beside, transplanted
from safeicrl.tokens import Token
from safeicrl.trial import first_fault, run_trials, sample_queue

QUEUE = 4  # trials a row can hold
OFF = (0.25, 0.999)  # share of the rows that play without the guard, and the risk that comes to the same
HOLD = 0.05  # chance per step that a row begins to hold an action
SPAN = 64  # steps of a row that a guard with a ledger learns from at a time
SEGMENT = 300  # steps of play, at least, before the cache of the context grows


@dataclass(frozen=True, kw_only=True)
class GuardFitConfig:
    """How a guard is fitted."""

    depth: int = 2  # steps that it looks ahead
    clock: bool = True  # whether it looks no further than the last step before the time limit
    ledger: int = 0  # points that it looks up in a ledger of its own (nets/ledger.py); 0: no ledger
    risk: float = 0.01  # chance of breaking the budget that it tolerates
    rounds: int = 30  # of playing, then learning
    rows: int = 32  # of trials in a round
    updates: int = 60  # gradient steps in a round, each on a quarter of its rows
    learning_rate: float = 5e-3  # Adam's; it falls to a tenth
    seed: int = 0  # of the tasks, the actions and the guard

    def __post_init__(self) -> None:
        for name in ("depth", "rounds", "updates"):
            check_integer(name, getattr(self, name), 1, WIDEST)
        check_integer("ledger", self.ledger, 0, WIDEST)
        check_integer("rows", self.rows, 1, MOST_ROWS)
        check_seed(self.seed)
        check_risk(self.risk)
        check_number("learning_rate", self.learning_rate, 0.0, strict=True)


class Play(NamedTuple):
    """What a guard learns from; all [row, time, ...]."""

    token: Token
    trial: jax.Array  # place in the row's queue
    features: jax.Array
    taken: jax.Array  # index of a finite action, or the real-valued one
    cost: jax.Array
    done: jax.Array
    known: jax.Array


@dataclass(frozen=True, kw_only=True)
class GuardRound:
    """One round, on what was played before the guard learned from it."""

    round: int  # from 1
    steps: int  # played, in all rounds so far
    loss: float  # cross-entropy of "this step costs"
    predicted: float  # mean chance that the step costs, at the actions that were taken
    observed: float  # share of the steps that did


def fit_guard(
    env: Env,
    agent: InContextAgent,
    config: GuardFitConfig,
    report: Callable[[GuardRound], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> InContextAgent:
    """The agent with a guard of its own, at the risk of `config`; an old guard is replaced.

    It ends before its last round if `stop` says so after a round. The guard is then less sure than it could be, and
    before the second half it has never been on.
    """
    if not isinstance(agent, InContextAgent):
        raise UserError(f"a guard is for policies of kind 'net', not for a {type(agent).__name__}")
    if agent.net.trunk.config.shared_ledger:
        raise UserError(
            "the policy reads the ledger of its guard (net.shared_ledger): that guard cannot be replaced"
        )
    key = jax.random.key(config.seed)
    agent = with_new_guard(agent, config, key)
    rate, steps = config.learning_rate, config.rounds * config.updates
    optimiser = optax.adam(optax.linear_schedule(rate, rate / 10, steps))
    state = optimiser.init(eqx.filter(agent.net.guard, eqx.is_array))
    played = 0
    for index in range(config.rounds):
        play_key, learn_key = jax.random.split(jax.random.fold_in(key, index + 1))
        on = 2 * index >= config.rounds
        acting = dataclasses.replace(
            agent, risk=jnp.float32(config.risk if on else OFF[1]), bold=OFF,
            temperature=agent.temperature or float(_real(agent) and not on),  # greedy ones are sampled at 1
        )  # fmt: skip
        data, before = _play(env, acting, config.rows, play_key)
        refuse_fault(np.asarray(before["fault"]), env_to_plain(env)["name"], [f"round {index + 1}"], env.spec)
        assert agent.net.guard is not None
        context = agent.net.trunk.config.context
        guard, state = _learn(
            agent.net.guard, state, optimiser, data, learn_key, updates=config.updates, context=context
        )
        agent = eqx.tree_at(lambda a: a.net.guard, agent, guard)
        played += int(data.known.sum())
        if report is not None:
            loss, predicted, observed = (float(before[f"guard_{x}"]) for x in ("loss", "predicted", "observed"))
            report(GuardRound(round=index + 1, steps=played, loss=loss, predicted=predicted, observed=observed))
        if stop():
            break
    return agent


def with_new_guard(agent: InContextAgent, config: GuardFitConfig, key: Key) -> InContextAgent:
    """The agent with a guard that has learned nothing."""
    old = agent.net.trunk
    net = dataclasses.replace(old.config, guard=config.depth, guard_clock=config.clock, guard_ledger=config.ledger)
    bare = eqx.tree_at(lambda n: n.guard, agent.net, None, is_leaf=lambda x: x is None)
    fresh = eqx.filter_jit(PolicyNet)(net, old.spec, key)
    return dataclasses.replace(agent, net=transplanted(fresh, bare), risk=config.risk)


def _real(agent: InContextAgent) -> bool:
    return agent.net.guard is not None and not agent.net.guard.choices


class _Holding(eqx.Module):
    """An agent, some of whose rows now and then take another action than their own, for a few steps in a row."""

    agent: InContextAgent
    steps: int = eqx.field(static=True)

    def init(self, tasks: PyTree, rows: int) -> tuple[PyTree, jax.Array, jax.Array]:
        """The agent's memory, the action that each row holds, and for how many more steps."""
        held = self._other(jax.random.key(0), rows)
        return self.agent.init(tasks, rows), held, jnp.zeros(rows, jnp.int32)

    def extend(self, memory: tuple, steps: int) -> tuple:
        """Room for the agent's memory."""
        return self.agent.extend(memory[0], steps), *memory[1:]

    def act(self, memory: tuple, token: Token, key: Key) -> tuple[tuple, jax.Array, PyTree]:
        """The agent's actions, or those that are held."""
        own, held, left = memory
        own, action, extras = self.agent.act(own, token, key)
        begin_key, other_key = jax.random.split(jax.random.fold_in(key, 1))
        rows = len(left)
        begins = (left == 0) & jax.random.bernoulli(begin_key, HOLD, (rows,)) & bold_rows(rows, OFF[0])
        held = _in_rows(begins, self._other(other_key, rows), held)
        left = jnp.where(begins, self.steps, left)
        return (own, held, jnp.maximum(left - 1, 0)), _in_rows(left > 0, held, action), extras

    def _other(self, key: Key, rows: int) -> jax.Array:
        """Any action of a finite set; the middle of a range."""
        trunk = self.agent.net.trunk
        space, levels = trunk.spec.action, trunk.config.levels
        if isinstance(space, Discrete):
            return jax.random.randint(key, (rows,), 0, space.n)
        centre, half = space.centre_and_half()
        if not levels:
            return jnp.full((rows, space.size), centre)
        return centre + half * (2 / (levels - 1) * jax.random.randint(key, (rows, space.size), 0, levels) - 1)


def _in_rows(rows: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """`x` in the given rows, [row] bool, else `y`; both [row, ...]."""
    return jnp.where(rows.reshape((-1,) + (1,) * (x.ndim - 1)), x, y)


@eqx.filter_jit
def _play(env: Env, agent: InContextAgent, rows: int, key: Key) -> tuple[Play, dict[str, jax.Array]]:
    """A round's rows, and what the guard makes of them so far; with the environment's "fault"."""
    spec, (task_key, play_key) = env.spec, jax.random.split(key)
    tasks, budgets = sample_queue(env, "train", spec.train_budget, (rows, QUEUE), task_key)
    trials = run_trials(
        env, _Holding(agent=agent, steps=agent.net.trunk.config.guard),
        tasks, budgets, play_key, episodes=spec.episodes, steps=spec.trial_steps,
        segments=max(spec.trial_steps // SEGMENT, 1),
    )  # fmt: skip
    known = replace(trials.token, ctg=told_in_rows(trials.token, agent.reserve))
    features = agent.net.trunk.forward(known, trials.trial)
    policy = agent.net.distribution(features)
    real = isinstance(policy, TanhNormal)
    taken = spec.action.encode_scaled(trials.action) if real else policy.index(trials.action)  # type: ignore[union-attr]
    data = Play(
        token=trials.token, trial=trials.trial, features=features.astype(jnp.float32), taken=taken,
        cost=trials.cost, done=trials.done, known=trials.learnable,
    )  # fmt: skip
    assert agent.net.guard is not None
    watched = agent.net.watched(data.features, data.token, data.trial)
    before = agent.net.guard.loss(watched, data.taken, data.cost, data.done, data.known)[1]
    return data, before | {"fault": first_fault(trials, spec)}


def _loss(guard: Guard, data: Play, context: int, key: Key) -> jax.Array:
    """The guard's loss on these rows; with a ledger on a random span of them, for a look-up takes its time."""
    if guard.ledger is None:
        return guard.loss(data.features, data.taken, data.cost, data.done, data.known)[0]
    steps = data.cost.shape[1]
    span = min(SPAN, steps)
    # as often at the ends of a row as elsewhere
    begin = jnp.clip(jax.random.randint(key, (), 1 - span, steps), 0, steps - span)
    found = guard.ledger.look_up_span(data.token, data.trial, context, begin, span)
    features, taken, cost, done, known = (
        jax.lax.dynamic_slice_in_dim(x, begin, span, 1)
        for x in (data.features, data.taken, data.cost, data.done, data.known)
    )
    known &= done | (jnp.arange(span) < span - 1)  # what follows the last step is not here
    return guard.loss(beside(features, found), taken, cost, done, known)[0]


@eqx.filter_jit
def _learn(
    guard: Guard, state: PyTree, optimiser: optax.GradientTransformation, data: Play, key: Key, *, updates: int,
    context: int,
) -> tuple[Guard, PyTree]:  # fmt: skip
    """A round's gradient steps."""
    params, static = eqx.partition(guard, eqx.is_array)
    rows = len(data.cost)

    def step(carry: tuple, key: Key) -> tuple:
        params, state = carry
        some = jax.random.permutation(key, rows)[: max(rows // 4, 1)]
        part = jax.tree.map(lambda x: x[some], data)
        grads = jax.grad(lambda p: _loss(eqx.combine(p, static), part, context, jax.random.fold_in(key, 1)))(params)
        updates, state = optimiser.update(grads, state)
        return (optax.apply_updates(params, updates), state), None

    (params, state), _ = jax.lax.scan(step, (params, state), jax.random.split(key, updates))
    return eqx.combine(params, static), state
