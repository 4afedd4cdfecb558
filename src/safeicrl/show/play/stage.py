"""The trials that one agent plays for all visitors, side by side in batches: one compiled program serves everybody.

The rows of a batch do not move in step, as those of `run_trials` do: every visitor has a speed, pauses and resets.
So a turn moves some rows of a batch and holds the others. Each row has a KV cache with a clock of its own, and what
becomes of it depends on its seed, task and budgets alone, never on its neighbours.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.agents.api import Agent
from safeicrl.envs.api import Env, EnvSpec, Key, PyTree, record, replace
from safeicrl.nets.transformer import Cache
from safeicrl.show.play.scenes import Scene
from safeicrl.tokens import Token, first_token, next_token, usable_budget


@record
class Row:
    """One trial under way; [row, ...] in a batch."""

    task: PyTree
    state: PyTree
    token: Token
    action: jax.Array  # to be taken next, or [...]; nothing before the first decision
    decided: jax.Array  # [] bool: there is such an action
    key: Key


@record
class Turn:
    """What one turn did to a row, for the page; [row, ...] in a batch."""

    reward: jax.Array  # of the step; zero at a trial's first turn, which has no step
    cost: jax.Array
    terminated: jax.Array  # bool
    truncated: jax.Array  # bool
    reached: jax.Array  # [number] the scene's view of what the step led to
    here: jax.Array  # [number] of where the row is now: after an episode's end, at the start
    left: jax.Array  # of the budget
    action: jax.Array  # what the agent will do next
    allowed: jax.Array | None  # [action] bool, by the guard; None: no such guard
    risk: jax.Array | None  # of the next action, as the guard sees it
    stepped_in: jax.Array | None  # bool: the guard replaced the next action


@dataclass(eq=False)
class Seat:
    """A row of a batch that belongs to somebody."""

    batch: "_Batch"
    row: int


class _Batch:
    """Some trials and who plays them."""

    def __init__(self, rows: Row, memory: PyTree) -> None:
        self.rows, self.memory = rows, memory
        self.taken: set[int] = set()


class Stage:
    """All trials of one agent. Not for several threads at once."""

    def __init__(self, env: Env, agent: Agent, scene: Scene) -> None:
        self.env, self.scene, self._batches = env, scene, list[_Batch]()
        self._arrays, static = eqx.partition(agent, eqx.is_array)
        bind = functools.partial(functools.partial, env=env, scene=scene, static=static)
        self._first_rows = bind(_first_rows)
        self._enter = jax.jit(bind(_enter), donate_argnums=(1, 2))
        self._turn = jax.jit(bind(_turn), donate_argnums=(1, 2))

    def warm(self, task: PyTree) -> None:
        """Compile everything."""
        least, _ = self.env.spec.bounds("train")
        seat = self.enter(task, least, 0)
        self.turn({seat: least})
        self.leave(seat)

    @property
    def seats(self) -> int:
        """How many trials are under way."""
        return sum(len(batch.taken) for batch in self._batches)

    def enter(self, task: PyTree, budget: float, seed: int) -> Seat:
        """Begin a trial."""
        limit, rows = np.float32(self.usable(budget)), np.arange(self.scene.rows)
        batch = next((batch for batch in self._batches if len(batch.taken) < len(rows)), None)
        if batch is None:
            form = jax.eval_shape(self._first_rows, self._arrays, task, limit, np.uint32(seed))
            # every row begins this trial: those that nobody plays must be sound, too
            batch, chosen = _Batch(*jax.tree.map(_zeros, form)), rows >= 0
            self._batches.append(batch)
            row = 0
        else:
            row = min(set(rows.tolist()) - batch.taken)
            chosen = rows == row
        batch.rows, batch.memory = self._enter(
            self._arrays, batch.rows, batch.memory, chosen, task, limit, np.uint32(seed)
        )
        batch.taken.add(row)
        return Seat(batch, row)

    def leave(self, seat: Seat) -> None:
        """End a trial; an empty batch gives its memory back."""
        seat.batch.taken.discard(seat.row)
        if not seat.batch.taken and seat.batch in self._batches:
            self._batches.remove(seat.batch)

    def usable(self, budget: float) -> float:
        """The budget that the agent is told."""
        return _usable(budget, self.env.spec)

    def turn(self, budgets: dict[Seat, float]) -> dict[Seat, Turn]:
        """Move the given seats by one step and decide on the next. A budget holds from the next episode on."""
        done: dict[Seat, Turn] = {}
        for batch in {seat.batch: None for seat in budgets}:
            seats = [seat for seat in budgets if seat.batch is batch]
            go, limit = np.zeros(self.scene.rows, bool), np.zeros(self.scene.rows, np.float32)
            for seat in seats:
                go[seat.row], limit[seat.row] = True, self.usable(budgets[seat])
            batch.rows, batch.memory, turn = self._turn(self._arrays, batch.rows, batch.memory, go, limit)
            turn = jax.tree.map(np.asarray, turn)
            done |= {seat: jax.tree.map(lambda x, row=seat.row: x[row], turn) for seat in seats}
        return done


@functools.lru_cache(maxsize=1024)
def _usable(budget: float, spec: EnvSpec) -> float:
    """Cached: it is asked at every turn of every visitor."""
    return float(usable_budget(jnp.float32(budget), spec))


# -- the programs -------------------------------------------------------------------------------------------


def _begin(env: Env, task: PyTree, budget: jax.Array, seed: jax.Array) -> Row:
    """A trial before its first decision."""
    key, reset_key = jax.random.split(jax.random.key(seed))
    state, observation = env.reset(reset_key, task)
    return Row(
        task=task,
        state=state,
        token=first_token(env.spec, observation, budget),
        action=env.spec.action.zeros(()),
        decided=jnp.array(False),
        key=key,
    )


def _remember(agent: Agent, env: Env, task: PyTree) -> PyTree:
    """Memory for one row, room for a whole trial; the row's axis inside has length 1."""
    queue = jax.tree.map(lambda x: x[None, None], task)
    return agent.extend(agent.init(queue, 1), env.spec.trial_steps)


def _first_rows(
    arrays: PyTree, task: PyTree, budget: jax.Array, seed: jax.Array, *, env: Env, scene: Scene, static: PyTree
) -> tuple[Row, PyTree]:
    """A new batch; only its shapes are ever asked for."""
    one = _begin(env, task, budget, seed), _remember(eqx.combine(arrays, static), env, task)
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (scene.rows, *x.shape)), one)


def _zeros(form: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(form.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), form.shape)
    return jnp.zeros(form.shape, form.dtype)


def _enter(
    arrays: PyTree, rows: Row, memory: PyTree, chosen: jax.Array, task: PyTree, budget: jax.Array,
    seed: jax.Array, *, env: Env, scene: Scene, static: PyTree,
) -> tuple[Row, PyTree]:  # fmt: skip
    """The batch with a trial begun in the `chosen` row, [row] bool."""
    fresh = _begin(env, task, budget, seed)
    rows = jax.tree.map(lambda new, old: _pick(chosen, new, old), fresh, rows)
    if not isinstance(memory, Cache):  # a network forgets when it reads a trial's first token
        new = _remember(eqx.combine(arrays, static), env, task)
        memory = jax.tree.map(lambda new, old: _pick(chosen, new, old), new, memory)
    return rows, memory


def _turn(
    arrays: PyTree, rows: Row, memory: PyTree, go: jax.Array, budget: jax.Array,
    *, env: Env, scene: Scene, static: PyTree,
) -> tuple[Row, PyTree, Turn]:  # fmt: skip
    """One turn of the rows that `go`, [row] bool."""
    agent = eqx.combine(arrays, static)

    def one(row: Row, memory: PyTree, budget: jax.Array) -> tuple[Row, PyTree, Turn]:
        key, act_key, step_key, reset_key = jax.random.split(row.key, 4)
        row, seen = _move(env, scene, row, budget, step_key, reset_key)
        memory, action, extras = agent.act(memory, jax.tree.map(lambda x: x[None], row.token), act_key)
        said = extras if isinstance(extras, dict) else {}
        guard: dict[str, Any] = {
            name: said[name][0] if name in said else None for name in ("allowed", "risk", "stepped_in")
        }
        turn = Turn(**seen, left=row.token.ctg, action=action[0], **guard)
        return replace(row, action=action[0], decided=jnp.array(True), key=key), memory, turn

    new_rows, new_memory, turn = jax.vmap(one)(rows, memory, budget)
    hold = functools.partial(jax.tree.map, functools.partial(_pick, go))
    return hold(new_rows, rows), _held(go, new_memory, memory), turn


def _move(
    env: Env, scene: Scene, row: Row, budget: jax.Array, step_key: Key, reset_key: Key
) -> tuple[Row, dict[str, jax.Array]]:
    """Take the action that was decided on, and begin the next episode where one ended."""
    state, step = env.step(step_key, row.state, row.action, row.task)
    ended = step.terminated | step.truncated
    fresh, first = env.reset(reset_key, row.task)
    after = jax.tree.map(functools.partial(jnp.where, ended), fresh, state)
    observation = jnp.where(ended, first, step.observation)
    token = next_token(row.token, observation, row.action, step.reward, step.cost, ended, budget)
    moved = replace(row, state=after, token=token)
    start = scene.look(row.state, row.state)
    seen = {
        "reward": step.reward, "cost": step.cost, "terminated": step.terminated, "truncated": step.truncated,
        "reached": scene.look(row.state, state),
        "here": jnp.where(ended, scene.look(after, after), scene.look(row.state, after)),
    }  # fmt: skip
    still = {name: jnp.zeros_like(value) for name, value in seen.items()} | {"reached": start, "here": start}
    return jax.tree.map(functools.partial(jnp.where, row.decided), (moved, seen), (row, still))


def _held(go: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """The new memory of the rows that `go`, the old one of the others.

    A cache keeps its clocks only. What a held row has written to its next slot is overwritten when it goes on, and
    copying whole caches would take longer than the turn itself.
    """
    if isinstance(new, Cache):
        return dataclasses.replace(new, clock=_pick(go, new.clock, old.clock), age=_pick(go, new.age, old.age))
    return jax.tree.map(functools.partial(_pick, go), new, old)


def _pick(rows: jax.Array, new: jax.Array, old: jax.Array) -> Any:
    """`new` in the given rows ([row] bool), `old` ([row, ...]) in the others."""
    return jnp.where(rows.reshape((-1,) + (1,) * (old.ndim - 1)), new, old)
