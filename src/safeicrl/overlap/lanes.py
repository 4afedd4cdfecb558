"""Trials driven from the host: several groups of rows, the lanes, whose physics run on the host's cores.

`trial.run_trials` is one program. While MuJoCo moves its worlds the accelerator waits, and the other way round.
Here a lane is a thread that goes back and forth between a short program on the accelerator, `turn`, and the
physics. While one lane is in the network, the others are in the physics.

No program waits for the host. An accelerator runs its programs in order, so one that waits would hold up all the
others, the learner's too.

A lane plays exactly what `run_trials` plays from the same key (tests/test_overlap.py).
"""

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.agents.api import Agent
from safeicrl.envs.api import Env, Key, PyTree, record, replace
from safeicrl.envs.mujoco import physics
from safeicrl.errors import UserError
from safeicrl.machine.busy import BusyClock
from safeicrl.tokens import usable_budget
from safeicrl.trial import Row, Trials, enter, move_on


@record
class Plan:
    """What stays the same while a lane plays."""

    agent: list[jax.Array]  # its arrays, as a list: Equinox's modules take long to take apart
    tasks: PyTree  # [row, queue]
    budgets: jax.Array  # [row, queue, episode, ...]
    lengths: jax.Array  # [row, queue] int
    keys: Key  # [time]


@record
class Lane:
    """Where a lane stands: its actions are chosen, and the physics of this step are due."""

    row: Row  # [row]
    memory: PyTree  # the agent's
    action: jax.Array  # [row]
    extras: PyTree  # [row] what the agent recorded
    played: Trials  # [time, row] up to the step before; zeros after that
    time: jax.Array  # [] int32


class Stopped(Exception):
    """The lanes were told to stop."""


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, or the shape of one."""
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


class LanePrograms:
    """The programs that lanes of one size share, compiled at once."""

    def __init__(
        self, env: Env, agent: Agent, *, rows: int, queue: int, episodes: int, steps: int, segments: int
    ) -> None:
        self.env = cast(physics.Moved, env)
        arrays, self.static = eqx.partition(agent, is_array)
        self.rows, self.queue, self.episodes, self.steps = rows, queue, episodes, steps
        bounds = np.unique(np.linspace(0, steps, segments + 1).astype(int)).tolist()
        self.bounds: list[tuple[int, int]] = list(itertools.pairwise(bounds))
        leaves, self.structure = jax.tree.flatten(arrays)
        self._compile(leaves)

    def _compile(self, agent: list[Any]) -> None:
        """All programs, from the shapes of what passes through them."""
        tasks = jax.eval_shape(
            jax.vmap(jax.vmap(lambda key: self.env.sample_task(key, "train"))),
            jax.eval_shape(lambda: jax.random.split(jax.random.key(0), (self.rows, self.queue))),
        )
        budgets = jax.ShapeDtypeStruct(
            (self.rows, self.queue, self.episodes, *self.env.spec.cost_shape), jnp.float32
        )
        lengths = jax.ShapeDtypeStruct((self.rows, self.queue), jnp.int32)
        key = jax.eval_shape(lambda: jax.random.key(0))
        given = (agent, tasks, budgets, lengths, key)
        plan, lane, packed = jax.eval_shape(self._begin, *given)
        moved = jax.ShapeDtypeStruct(self._moved_shape, packed.dtype)
        programs = {"begin": jax.jit(self._begin).lower(*given)}
        for index, (_, end) in enumerate(self.bounds):
            if index:
                extend = jax.jit(lambda plan, lane, end=end: self._extend(plan, lane, end))
                programs[f"extend {index}"] = extend.lower(plan, lane)
                lane = jax.eval_shape(extend, plan, lane)
            # The lane's memory is reused: a step's cost is reading the cache, and a copy would read it all.
            programs[f"turn {index}"] = jax.jit(self._turn, donate_argnums=1).lower(plan, lane, moved)
        lane = replace(lane, memory=None)  # it has another size in each segment
        programs["end"] = jax.jit(self._end).lower(plan, lane, moved)
        self.trials: Trials = jax.eval_shape(self._end, plan, lane, moved)  # shapes of what a lane plays
        self.programs = compile_all(programs)

    def _begin(
        self, agent: list[jax.Array], tasks: PyTree, budgets: jax.Array, lengths: jax.Array, key: Key
    ) -> tuple[Plan, Lane, jax.Array]:
        """Enter the first trials and choose the first actions."""
        budgets = usable_budget(budgets, self.env.spec)
        reset_key, scan_key = jax.random.split(key)
        plan = Plan(
            agent=agent, tasks=tasks, budgets=budgets, lengths=lengths, keys=jax.random.split(scan_key, self.steps)
        )
        row = jax.vmap(enter, (None, 0, 0, 0))(self.env, tasks, budgets, jax.random.split(reset_key, self.rows))
        acting = self._agent(plan)
        memory = acting.extend(acting.init(tasks, self.rows), self.bounds[0][1])
        time = jnp.int32(0)
        memory, action, extras = acting.act(memory, row.token, self._keys(plan, time)[0])
        lane = Lane(row=row, memory=memory, action=action, extras=extras, played=None, time=time)  # type: ignore[arg-type]
        moved = jax.ShapeDtypeStruct(self._moved_shape, row.state.physics.qpos.dtype)
        shapes = jax.eval_shape(self._settle, plan, lane, moved)[1]
        played = jax.tree.map(lambda x: jnp.zeros((self.steps, *x.shape), x.dtype), shapes)
        return plan, replace(lane, played=played), self._pack(lane)

    @property
    def _moved_shape(self) -> tuple[int, int, int]:
        """Of what the physics give back."""
        job = self.env.job
        return (self.rows, job.repeats, physics.state_size(job.robot) + 1)

    def _agent(self, plan: Plan) -> Agent:
        return eqx.combine(jax.tree.unflatten(self.structure, plan.agent), self.static)

    def _keys(self, plan: Plan, time: jax.Array) -> Key:
        """A step's keys, to act and for the environment."""
        return jax.random.split(plan.keys[time])

    def _pack(self, lane: Lane) -> jax.Array:
        return physics.pack(lane.row.state.physics, jax.vmap(self.env.control)(lane.action))

    def _settle(self, plan: Plan, lane: Lane, moved: jax.Array) -> tuple[Row, Trials]:
        """What the physics led to: the next rows, and the step that was played."""
        motion = physics.unpack(self.env.job.robot, moved)
        _, env_key = self._keys(plan, lane.time)

        def one(
            row: Row, action: jax.Array, motion: Any, tasks: PyTree, budgets: Any, lengths: Any, key: Key
        ) -> Any:
            _, reset_key = jax.random.split(key)
            task = jax.tree.map(lambda x: x[row.trial], tasks)
            state, step = self.env.after(row.state, action, motion, task)
            return move_on(self.env, row, action, state, step, tasks, budgets, lengths, reset_key)

        each = jax.random.split(env_key, self.rows)
        row, played = jax.vmap(one)(lane.row, lane.action, motion, plan.tasks, plan.budgets, plan.lengths, each)
        return row, replace(played, extras=lane.extras)

    def _record(self, plan: Plan, lane: Lane, moved: jax.Array) -> Lane:
        row, played = self._settle(plan, lane, moved)
        put = lambda all_, now: jax.lax.dynamic_update_index_in_dim(all_, now, lane.time, 0)  # noqa: E731
        return replace(lane, row=row, played=jax.tree.map(put, lane.played, played), time=lane.time + 1)

    def _turn(self, plan: Plan, lane: Lane, moved: jax.Array) -> tuple[Lane, jax.Array]:
        """What the last step led to, and the next actions."""
        lane = self._record(plan, lane, moved)
        memory, action, extras = self._agent(plan).act(lane.memory, lane.row.token, self._keys(plan, lane.time)[0])
        lane = replace(lane, memory=memory, action=action, extras=extras)
        return lane, self._pack(lane)

    def _extend(self, plan: Plan, lane: Lane, steps: int) -> Lane:
        return replace(lane, memory=self._agent(plan).extend(lane.memory, steps))

    def _end(self, plan: Plan, lane: Lane, moved: jax.Array) -> Trials:
        played = self._record(plan, lane, moved).played
        return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), played)


def check_env(env: Env) -> None:
    """Raise unless the environment's physics can be driven from the host."""
    parts = all(hasattr(env, name) for name in ("job", "control", "after"))
    if not parts or physics.resolve_engine(env.job) == "planar":  # type: ignore[attr-defined]
        raise UserError(
            f"overlap is for environments that MuJoCo moves on the host's cores, not {type(env).__name__}; use 0"
        )


def compile_all(lowered: dict[str, Any]) -> dict[str, Any]:
    """Lowered programs, compiled side by side."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(lowered, pool.map(lambda program: program.compile(), lowered.values()), strict=True))


class Lanes:
    """Threads that play parts of the rows side by side."""

    def __init__(self, programs: LanePrograms, count: int) -> None:
        self.programs = programs
        self.worlds = [physics.HostWorlds(programs.env.job, programs.rows) for _ in range(count)]
        self.pool = ThreadPoolExecutor(count, thread_name_prefix="lane")
        self.stopping = threading.Event()
        self.busy = BusyClock()  # runs while any lane plays

    def start(self, agent: list[jax.Array], parts: Sequence[Any]) -> "list[Future[Trials]]":
        """Begin to play one part per lane: tasks, budgets, lengths and a key, as `run_trials` takes them.

        `agent` is the list of the agent's arrays.
        """
        return [
            self.pool.submit(self._play, worlds, (agent, part.tasks, part.budgets, part.lengths, part.key))
            for worlds, part in zip(self.worlds, parts, strict=True)
        ]

    def _play(self, worlds: physics.HostWorlds, given: tuple) -> Trials:
        run = self.programs.programs
        with self.busy:
            plan, lane, packed = run["begin"](*given)
            for index, (begin, end) in enumerate(self.programs.bounds):
                if index:
                    # Once every trial is over, there is nothing left to play.
                    if self.programs.queue == 1 and bool(lane.row.over.all()):
                        break
                    lane = run[f"extend {index}"](plan, lane)
                turn = run[f"turn {index}"]
                for _ in range(max(begin, 1), end):
                    lane, packed = turn(plan, lane, self._move(worlds, packed))
            trials = run["end"](plan, replace(lane, memory=None), self._move(worlds, packed))
            return jax.block_until_ready(trials)

    def _move(self, worlds: physics.HostWorlds, packed: jax.Array) -> np.ndarray:
        if self.stopping.is_set():
            raise Stopped
        return worlds.advance(np.asarray(packed))

    def close(self) -> None:
        """Stop playing; what is under way is lost."""
        self.stopping.set()
        self.pool.shutdown(wait=True)
