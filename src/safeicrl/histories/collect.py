"""Learning histories of PPO-Lagrangian: every task learned from scratch under every cost limit, all steps kept.

All learners of a group run in one vmapped program, a chunk of iterations per call. Their episodes are written as
they end, and count when the group is complete (store.py). An interrupted collection, started again with the same
settings, goes on after its last complete group.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from safeicrl.envs.api import Env, PyTree, Split, check_split, refuse_several
from safeicrl.envs.registry import env_to_plain
from safeicrl.envs.spaces import Grid
from safeicrl.errors import UserError, check_budget, check_integer, check_seed
from safeicrl.files import owned
from safeicrl.histories.store import STEPWISE, TRUNCATED, Histories, HistoryWriter, open_histories
from safeicrl.log import Terminal
from safeicrl.machine.signals import StopRequest
from safeicrl.optimisers.lagrangian import Learner, PPOLagConfig, Rollout
from safeicrl.provenance import surroundings

MOST_STEPS = 2**36  # of all histories together
CHUNK = 10  # iterations in one call of the jitted program, about


@dataclass(frozen=True, kw_only=True)
class CollectConfig:
    """What to collect: `tasks` × `limits` histories of `steps` steps."""

    tasks: int = 27  # to learn, each under every limit
    limits: tuple[float, ...] = (0.0, 2.5, 5.0)  # on the cost of an episode
    steps: int = 50_000  # of each history
    split: Split = "train"  # of the tasks
    seed: int = 0  # of tasks and learners
    group: int = 27  # learners side by side in one program, written together
    learner: PPOLagConfig = field(default_factory=PPOLagConfig)

    def __post_init__(self) -> None:
        for name in ("tasks", "steps", "group"):
            check_integer(name, getattr(self, name), 1)
        check_integer("tasks · limits · steps", self.histories * self.steps, 0, MOST_STEPS)
        check_seed(self.seed)
        check_split(self.split)
        if not self.limits:
            raise UserError("limits must name at least one cost limit")
        check_budget(self.limits)
        if self.learner.iterations != PPOLagConfig.iterations:
            raise UserError("the length of a history is set by steps: leave out learner.iterations")

    @property
    def histories(self) -> int:
        """How many there will be."""
        return self.tasks * len(self.limits)


def default_config(env: Env) -> CollectConfig:
    """The paper's 4M steps for the room, 2M steps at limit 0 elsewhere. Both learn throughout their histories."""
    if isinstance(env.spec.observation, Grid):
        learner = PPOLagConfig(epochs=1, learning_rate=3e-4, multiplier_gain=0.0)
        return CollectConfig(learner=learner)
    learner = PPOLagConfig(steps=64, epochs=4, minibatches=8, entropy=0.0)
    return CollectConfig(tasks=8, limits=(0.0,), steps=250_000, group=8, learner=learner)


def collect(
    env: Env,
    config: CollectConfig,
    *,
    out: str | Path,
    console: Console | None = None,
    stop: StopRequest | None = None,
) -> Histories | None:
    """Collect into the folder `out`, or go on with what is there; None when a signal to `stop` came first."""
    refuse_several(env.spec, "collecting histories")
    request = {
        "env": env_to_plain(env),
        "algo": {"name": "ppo-lag", "config": dataclasses.asdict(config.learner)},
        "collection": {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name != "learner"},
    }
    task, limit = np.divmod(np.arange(config.histories), len(config.limits))
    limits = np.asarray(config.limits, np.float32)[limit]
    with owned(Path(out)), Terminal(console) as terminal, stop or StopRequest() as stop:
        writer = HistoryWriter(out, env=env, request=request, steps=config.steps, limit=limits, task=task)
        if writer.complete:
            terminal.say(f"{out} holds {writer.complete} of {writer.total} histories already")
        if writer.complete < writer.total:
            program = Program(env, config, terminal)
        while writer.complete < writer.total:
            begin = time.perf_counter()
            rows = np.arange(writer.complete, min(writer.complete + config.group, writer.total))
            if not program.run(rows, task, limits, writer, stop):
                terminal.say(
                    f"stopped: {writer.complete} of {writer.total} histories are in {out}; start again to go on"
                )
                return None
            seconds = time.perf_counter() - begin
            about = {"seconds": seconds, "compile_seconds": program.compile_seconds, **surroundings()}
            writer.commit(len(rows), **about)
        histories = open_histories(out, env=env)
        terminal.say(_closing(histories))
    return histories


def _closing(histories: Histories) -> str:
    steps, seconds, compiling = histories.reward.size, histories.meta["seconds"], histories.meta["compile_seconds"]
    size = sum(getattr(histories, name).nbytes for name in (*STEPWISE, "final"))
    return (
        f"{len(histories.limit)} histories, {steps:,} steps in {seconds:.1f} s ({steps / seconds:,.0f} steps/s) "
        f"after {compiling:.1f} s of compilation, {size / 2**20:.0f} MiB: {histories.folder}"
    )


class Program:
    """The compiled learners of one group."""

    def __init__(self, env: Env, config: CollectConfig, terminal: Terminal) -> None:
        self.env, self.config, self.terminal = env, config, terminal
        self.learner = Learner(env, config.learner)
        self.size = min(config.group, config.histories)
        side, longest = config.learner.envs, env.spec.max_steps
        # Episodes cut by the last iteration are left out: play that many steps more.
        needed = math.ceil((config.steps + side * (longest - 1)) / (side * config.learner.steps))
        self.calls = math.ceil(needed / CHUNK)
        self.chunk = math.ceil(needed / self.calls)
        self.begin, self.advance, self.compile_seconds = self._compile()

    def _compile(self) -> tuple[Callable, Callable, float]:
        begin = time.perf_counter()
        self.terminal.say(f"compiling {self.size} learners for {jax.devices()[0].device_kind} ...")
        rows = jax.ShapeDtypeStruct((self.size,), jnp.int32)
        limits = jax.ShapeDtypeStruct((self.size,), jnp.float32)
        first = jax.jit(self._begin).lower(rows, rows).compile()
        tasks, states = jax.eval_shape(self._begin, rows, rows)
        advance = jax.jit(self._advance, donate_argnums=0).lower(states, tasks, limits).compile()
        seconds = time.perf_counter() - begin
        self.terminal.say(f"compiled in {seconds:.1f} s")
        return first, advance, seconds

    def _begin(self, rows: jax.Array, task: jax.Array) -> tuple[PyTree, PyTree]:
        """Tasks and learners. Each depends on its own number and the seed alone, whatever the group."""
        task_key, learner_key = jax.random.split(jax.random.key(self.config.seed))
        keys = jax.vmap(jax.random.fold_in, (None, 0))(task_key, task)
        tasks = jax.vmap(lambda key: self.env.sample_task(key, self.config.split))(keys)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(learner_key, rows)
        return tasks, jax.vmap(self.learner.init)(keys, tasks)

    def _advance(self, states: PyTree, tasks: PyTree, limits: jax.Array) -> tuple[PyTree, dict[str, jax.Array]]:
        """`chunk` iterations: new states, and what was played, [history, env, time, ...]."""

        def iteration(states: PyTree, _: None) -> tuple[PyTree, dict[str, jax.Array]]:
            new, played, _metrics = jax.vmap(self.learner.iterate)(states, tasks, limits)
            return new, self._compact(played)

        states, played = jax.lax.scan(iteration, states, length=self.chunk)
        # [iteration, history, time, env, ...] → [history, env, iteration · time, ...]
        merge = lambda x: jnp.moveaxis(x, (1, 3), (0, 1)).reshape(*x.shape[1:4:2], -1, *x.shape[4:])  # noqa: E731
        return states, jax.tree.map(merge, played)

    def _compact(self, played: Rollout) -> dict[str, jax.Array]:
        """What a history keeps, cells and discrete actions in one byte where they fit."""
        spec = self.env.spec
        small = lambda x, space: x.astype(jnp.uint8) if space.fits_byte else x  # noqa: E731
        seen, last = (small(x, spec.observation) for x in (played.observation, played.final_observation))
        action = small(played.action, spec.action)
        done = played.terminated.astype(jnp.uint8) + TRUNCATED * played.truncated.astype(jnp.uint8)
        return {
            "observation": seen, "action": action, "reward": played.reward, "cost": played.cost,
            "done": done, "final": last,
        }  # fmt: skip

    def run(
        self, rows: np.ndarray, task: np.ndarray, limits: np.ndarray, writer: HistoryWriter, stop: StopRequest
    ) -> bool:
        """Make the histories numbered `rows` and write them as they grow; False when stopped before the end."""
        filled = np.resize(rows, self.size)  # the last group may be smaller, the program has one size
        tasks, state = self.begin(jnp.asarray(filled, jnp.int32), jnp.asarray(task[filled], jnp.int32))
        streams = [Stream(self.config.steps) for _ in rows]
        for call in range(self.calls):
            state, played = self.advance(state, tasks, jnp.asarray(limits[filled]))
            played = jax.device_get(played)
            for row, stream in enumerate(streams):
                for name, at, values in stream.feed({n: x[row] for n, x in played.items()}):
                    writer.write(row, name, at, values)
            done = (rows[0] + len(rows) * (call + 1) / self.calls) / self.config.histories
            self.terminal.progress(done, self._line(played, rows))
            if stop.requested and call + 1 < self.calls:
                return False
        return True

    def _line(self, played: dict[str, np.ndarray], rows: np.ndarray) -> str:
        ends = max(int((played["done"] > 0).sum()), 1)
        return (
            f"histories {rows[0]}–{rows[-1]} of {self.config.histories}  "
            f"return {played['reward'].sum() / ends:.3g}  cost {played['cost'].sum() / ends:.3g}"
        )


class Stream:
    """One history: whole episodes in the order in which they ended, its first `steps` steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps
        self.written = self.truncated = 0  # steps, and truncated episodes among them
        self.open: dict[str, np.ndarray] = {}  # [step, ...] of the episodes under way, and the `side` of each

    def feed(self, played: dict[str, np.ndarray]) -> Iterator[tuple[str, int, np.ndarray]]:
        """Take the next steps of all environments, [env, time, ...]; gives what to write: name, place, values."""
        done = played["done"]
        side, time = done.shape
        ends = np.where(done > 0, np.arange(time), time)
        # when each step's episode ends; `time` if it does not end here
        ends = np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]
        fresh = {name: values.reshape(-1, *values.shape[2:]) for name, values in played.items()}
        fresh["side"] = np.repeat(np.arange(side), time)
        steps, ended = fresh, ends.ravel()
        if self.open:  # episodes under way end with the first end of their environment
            steps = {name: np.concatenate([self.open[name], values]) for name, values in fresh.items()}
            ended = np.concatenate([ends[self.open["side"], 0], ended])
        # stable: the steps of an episode stay in order
        order = np.argsort(ended * side + steps["side"], kind="stable")
        whole = order[ended[order] < time][: self.left]
        self.open = {name: values[order[ended[order] == time]] for name, values in steps.items()}
        yield from ((name, self.written, steps[name][whole]) for name in STEPWISE if len(whole))
        final = steps["final"][whole[steps["done"][whole] == TRUNCATED]]
        if len(final):
            yield "final", self.truncated, final
        self.written, self.left = self.written + len(whole), self.left - len(whole)
        self.truncated += len(final)


def progress_table(histories: Histories) -> Table:
    """Mean return and cost per episode at the start, middle and end of the histories, by limit."""
    table = Table(title=f"{histories.meta['env']['name']}: return and cost per episode while learning")
    for name in ("limit", "histories", "episodes", "start", "middle", "end"):
        table.add_column(name, justify="right")
    for limit, line in learning_progress(histories).items():
        cells = [f"{r:.2f} at {c:.2f}" for r, c in zip(line["return"], line["cost"], strict=True)]
        table.add_row(f"{limit:g}", str(line["histories"]), f"{line['episodes']:,}", *cells)
    return table


def learning_progress(
    histories: Histories, begins: Sequence[float] = (0.0, 0.475, 0.95), length: float = 0.05
) -> dict[float, dict[str, Any]]:
    """By limit: mean return and cost of the episodes that ended in some parts of the histories.

    `begins` and `length` are shares of a history; by default the parts are its first, middle and last twentieth. A
    mean is taken over each history first: early learners have many short episodes, and count no more than others.
    """
    found = {}
    steps = histories.reward.shape[1]
    first = np.asarray(begins) * steps
    for limit in np.unique(histories.limit):
        sums = [histories.episodes(int(i)) for i in np.flatnonzero(histories.limit == limit)]
        means = np.full((2, len(sums), len(first)), np.nan)
        for i, j in np.ndindex(means.shape[1:]):
            here = (sums[i].ends > first[j]) & (sums[i].ends <= first[j] + length * steps)
            if here.any():
                means[:, i, j] = sums[i].returns[here].mean(), sums[i].costs[here].mean()
        known = ~np.isnan(means)
        mean = np.where(known, means, 0).sum(1) / np.maximum(known.sum(1), 1)
        mean[known.sum(1) == 0] = np.nan
        found[float(limit)] = {
            "histories": len(sums),
            "episodes": sum(len(s.ends) for s in sums),
            "return": mean[0].tolist(),
            "cost": mean[1].tolist(),
        }
    return found
