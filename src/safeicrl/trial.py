"""Trials: K episodes on one task, one budget, a context that grows through all of them.

`run_trials` is one jitted scan over thousands of rows, for training and evaluation. Each row plays a *queue* of
trials, one after another, until its steps run out. In evaluation a queue holds one trial. In training it holds
several: a row whose agent reaches its goals early goes on with the next task instead of idling. Two kinds of
boundary are kept apart everywhere: an episode ends (`terminated | truncated`), and a trial ends (its K-th episode
has ended).
"""

import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.agents.api import Agent
from safeicrl.budgets import Ranges, beside, is_over, ranges_of
from safeicrl.envs.api import Env, EnvSpec, Key, PyTree, Split, Step, record, replace
from safeicrl.envs.faults import find_fault
from safeicrl.errors import UserError
from safeicrl.machine.devices import over_rows
from safeicrl.tokens import Token, first_token, next_token, usable_budget


@record
class Trials:
    """What happened; every array is [row, time, ...]. Several costs: `cost` and `budget` are [row, time, cost]."""

    token: Token  # what the agent saw
    budget: jax.Array  # the episode's usable budget δ: CTG at its first step; negative where it began overspent
    action: jax.Array
    reward: jax.Array
    cost: jax.Array
    final_observation: jax.Array  # what the step led to, before any reset
    terminated: jax.Array
    truncated: jax.Array
    trial_done: jax.Array  # bool: the step ended the trial's last episode
    trial: jax.Array  # int32, place in the row's queue
    valid: jax.Array  # bool: false once the row's queue is empty
    extras: PyTree  # whatever the agent recorded

    @property
    def done(self) -> jax.Array:
        """An episode ended with this step."""
        return self.terminated | self.truncated

    @property
    def several(self) -> bool:
        """Whether there are several costs."""
        return self.cost.ndim > self.reward.ndim

    @property
    def episode_cost(self) -> jax.Array:
        """Cost of the episode so far, this step included."""
        return _running_sum(self.cost, beside(self.token.start, self.cost), self.token.start.ndim - 1)

    @property
    def learnable(self) -> jax.Array:
        """Steps to learn from: all valid ones, except a cut row's last step, whose future is unknown."""
        last = jnp.arange(self.valid.shape[-1]) == self.valid.shape[-1] - 1
        return self.valid & (self.trial_done | ~last)


def first_fault(trials: Trials, spec: EnvSpec | None = None) -> jax.Array:
    """The first number of the environment that breaks its contract, as `envs.faults.find_fault` gives it.

    Without the environment's `spec`, what it promises there is not looked at.
    """
    token = trials.token
    return find_fault(
        cost=trials.cost, reward=trials.reward, observation=trials.final_observation, first=token.observation,
        start=token.start, valid=trials.valid, episode=token.episode, time=token.time,
        spec=spec, age=jnp.where(trials.done, 0, token.time + 1),
    )  # fmt: skip


def _running_sum(values: jax.Array, start: jax.Array, axis: int) -> jax.Array:
    """Sum along time, the given axis, since the last `start`."""

    def combine(left: tuple, right: tuple) -> tuple:
        (a, a_start), (b, b_start) = left, right
        return jnp.where(b_start, b, a + b), a_start | b_start

    return jax.lax.associative_scan(combine, (values, start), axis=axis)[0]


@record
class Row:
    """Where a row stands: the scan's carry."""

    state: PyTree
    token: Token
    budget: jax.Array  # [] of the present episode; [cost] with several costs
    trial: jax.Array  # [] int32, place in the queue
    over: jax.Array  # [] bool: the queue is empty


@eqx.filter_jit
def sample_queue(env: Env, split: Split, budgets: Ranges, shape: tuple[int, ...], key: Key) -> tuple:
    """Tasks of `split` and budgets uniform in a range, both of leading `shape`.

    With several costs, the budget of each is drawn by itself, from the one range or from its own.
    """
    task_key, budget_key = jax.random.split(key)
    keys = jax.random.split(task_key, shape)
    sample = lambda k: env.sample_task(k, split)  # noqa: E731
    for _ in shape:
        sample = jax.vmap(sample)
    low: Any
    high: Any
    if env.spec.several:
        low, high = np.asarray(ranges_of(budgets, env.spec.costs, "budgets"), np.float32).T
    else:
        low, high = budgets
    return sample(keys), jax.random.uniform(budget_key, (*shape, *env.spec.cost_shape), minval=low, maxval=high)


@eqx.filter_jit
def run_trials(
    env: Env,
    agent: Agent,
    tasks: PyTree,
    budgets: jax.Array,
    key: Key,
    *,
    episodes: int,
    steps: int,
    segments: int = 1,
    lengths: jax.Array | None = None,
) -> Trials:
    """Play each row's queue of trials, `episodes` episodes each, for `steps` steps.

    `tasks` are [row, queue]. `budgets` are [row, queue] or, one for each episode, [row, queue, episode]; an episode
    with a negative budget begins overspent. With several costs, a cost axis follows. With `lengths`, [row, queue]
    int, each trial has its own number of episodes, at most `episodes`.

    `segments` cuts the scan so that the agent's memory can grow between them (a KV cache is read only as far as it
    is filled); the valid steps are the same for any number. Segments after the last row's last step are skipped:
    there is nothing to play, and late steps are the most expensive.

    On several devices (devices.py) the rows are divided among them, and all that is computed of them is, too.
    """
    tasks, budgets = over_rows((tasks, jnp.asarray(budgets, jnp.float32)))
    budgets = usable_budget(budgets, env.spec)
    rows, queue = budgets.shape[:2]
    whole = (rows, queue, episodes, *env.spec.cost_shape)
    budgets = jnp.broadcast_to(budgets if budgets.ndim == len(whole) else budgets[:, :, None], whole)
    lengths = jnp.full((rows, queue), episodes) if lengths is None else lengths
    reset_key, scan_key = jax.random.split(key)
    carry = jax.vmap(enter, (None, 0, 0, 0))(env, tasks, budgets, jax.random.split(reset_key, rows))
    memory = agent.init(tasks, rows)

    def step(carry: tuple, key: Key) -> tuple:
        row, memory = carry
        act_key, env_key = jax.random.split(key)
        memory, action, extras = agent.act(memory, row.token, act_key)
        advance = lambda r, a, t, b, n, k: _advance(env, r, a, t, b, n, k)  # noqa: E731
        row, played = jax.vmap(advance)(row, action, tasks, budgets, lengths, jax.random.split(env_key, rows))
        return (row, memory), replace(played, extras=extras)

    def segment(carry: tuple, keys: Key) -> tuple[tuple, Trials]:
        return jax.lax.scan(step, carry, keys)

    def skip(carry: tuple, keys: Key) -> tuple[tuple, Trials]:
        nothing = jax.eval_shape(segment, carry, keys)[1]
        return carry, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), nothing)  # `valid` nowhere

    parts: list[Trials] = []
    keys = jax.random.split(scan_key, steps)
    bounds = np.unique(np.linspace(0, steps, segments + 1).astype(int))  # more segments than steps: no empty ones
    for begin, end in itertools.pairwise(bounds):
        now = (carry, agent.extend(memory, int(end)))
        # Rows with a queue of trials are meant to be full (training): there a branch would not pay.
        if begin and queue == 1:
            (carry, memory), played = jax.lax.cond(carry.over.all(), skip, segment, now, keys[begin:end])
        else:
            (carry, memory), played = segment(now, keys[begin:end])
        parts.append(played)
    trials = jax.tree.map(lambda *x: jnp.concatenate(x), *parts) if len(parts) > 1 else parts[0]
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), trials)


def enter(env: Env, tasks: PyTree, budgets: jax.Array, key: Key) -> Row:
    """A row at the first step of its first trial."""
    state, observation = env.reset(key, jax.tree.map(lambda x: x[0], tasks))
    _check_shape("first observations", observation, env.spec.observation.shape)
    token = first_token(env.spec, observation, budgets[0, 0])
    return Row(state=state, token=token, budget=budgets[0, 0], trial=jnp.int32(0), over=jnp.array(False))


def _check_shape(what: str, value: jax.Array, expected: tuple[int, ...]) -> None:
    """Raise if an environment returns an array of another shape than it should."""
    if (found := jnp.shape(value)) != expected:
        raise UserError(f"{what} must have shape {expected}, as the environment's spec says, got {found}")


def _advance(
    env: Env,
    row: Row,
    action: jax.Array,
    tasks: PyTree,
    budgets: jax.Array,
    lengths: jax.Array,
    key: Key,
) -> tuple[Row, Trials]:
    """One step of one row."""
    step_key, reset_key = jax.random.split(key)
    task = jax.tree.map(lambda x: x[row.trial], tasks)
    state, step = env.step(step_key, row.state, action, task)
    return move_on(env, row, action, state, step, tasks, budgets, lengths, reset_key)


def move_on(
    env: Env,
    row: Row,
    action: jax.Array,
    state: PyTree,
    step: Step,
    tasks: PyTree,
    budgets: jax.Array,
    lengths: jax.Array,
    reset_key: Key,
) -> tuple[Row, Trials]:
    """The row at its next step, of the next episode or trial if one is due, and what was played in this one."""
    queue, spec = len(budgets), env.spec
    _check_shape(f"costs ({', '.join(spec.costs)}) of a step", step.cost, spec.cost_shape)
    _check_shape("observations of a step", step.observation, spec.observation.shape)
    for name in ("reward", "terminated", "truncated"):
        _check_shape(f"{name} of a step", getattr(step, name), ())
    done = step.terminated | step.truncated
    trial_done = done & (row.token.episode + 1 >= lengths[row.trial])
    played = Trials(
        token=row.token, budget=row.budget, action=action, reward=step.reward, cost=step.cost,
        final_observation=step.observation, terminated=step.terminated, truncated=step.truncated,
        trial_done=trial_done, trial=row.trial, valid=~row.over, extras=None,
    )  # fmt: skip

    trial = jnp.minimum(row.trial + trial_done, queue - 1)
    over = row.over | (trial_done & (row.trial + 1 >= queue))
    budget = budgets[trial, jnp.where(trial_done, 0, row.token.episode + done)]
    pick = lambda yes, a, b: jax.tree.map(lambda x, y: jnp.where(yes, x, y), a, b)  # noqa: E731
    next_task = jax.tree.map(lambda x: x[trial], tasks)
    if restart := getattr(env, "restart", None):  # it lives on the host, where a reset cannot be undone
        state, observation = restart(reset_key, state, step.observation, next_task, done)
    else:
        fresh_state, fresh_observation = env.reset(reset_key, next_task)
        state = pick(done, fresh_state, state)
        observation = jnp.where(done, fresh_observation, step.observation)
    token = next_token(row.token, observation, action, step.reward, step.cost, done, budget)
    token = pick(trial_done, first_token(env.spec, observation, budget), token)
    return Row(state=state, token=token, budget=budget, trial=trial, over=over), played


@record
class Episodes:
    """Undiscounted sums per episode, [trial, episode]; to be ignored where `played` is false.

    With several costs, `costs` and `budgets` are [trial, episode, cost].
    """

    returns: jax.Array
    costs: jax.Array
    lengths: jax.Array
    budgets: jax.Array  # the usable budget δ; negative where the episode began overspent
    played: jax.Array  # bool: the episode was finished

    @property
    def several(self) -> bool:
        """Whether there are several costs."""
        return self.costs.ndim > self.returns.ndim

    @property
    def excess(self) -> jax.Array:
        """C_k − δ: one sample of the paper's g_k, for each cost if there are several."""
        return self.costs - self.budgets

    @property
    def worst_excess(self) -> jax.Array:
        """[trial, episode] C_k − δ of the cost for which it is largest."""
        return self.excess.max(-1) if self.several else self.excess

    @property
    def over(self) -> jax.Array:
        """[trial, episode] bool: the episode cost more than its budget, in any of its costs."""
        return is_over(self.costs, self.budgets, self.several)

    @property
    def overspent(self) -> jax.Array:
        """[trial, episode] bool: it began with a budget overspent. Exact: budgets are kept as they were told."""
        return (self.budgets < 0).any(-1) if self.several else self.budgets < 0


@eqx.filter_jit
def episode_sums(trials: Trials, episodes: int, queue: int = 1) -> Episodes:
    """Every episode of the first `queue` trials of each row, [row · queue, episode]."""
    count = queue * episodes
    here = trials.valid & (trials.trial < queue)
    index = jnp.where(here, trials.trial * episodes + trials.token.episode, count)

    def total(values: jax.Array) -> jax.Array:
        add = lambda v, i: jnp.zeros(count + 1).at[i].add(v)[:-1]  # noqa: E731
        sums = jax.vmap(add)(jnp.where(here, values, 0).astype(jnp.float32), index)
        return sums.reshape(-1, episodes)

    of_costs = jax.vmap(total, -1, -1) if trials.several else total
    return Episodes(
        returns=total(trials.reward),
        costs=of_costs(trials.cost),
        lengths=total(jnp.ones_like(trials.reward)),
        budgets=of_costs(jnp.where(beside(trials.token.start, trials.budget), trials.budget, 0)),
        played=total(trials.done) > 0,
    )
