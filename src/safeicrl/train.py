"""The host loop: one jitted chunk of iterations after another; log, evaluate, keep the best, save, resume.

A run is a folder with config.json, metrics.jsonl and checkpoint.safetensors (the whole train state). For each seed
it also has the best policy so far (best-seed0.safetensors + .json) and the evaluation that chose it
(best-seed0-evaluation.npz + .json, results like any other). A process killed at any moment loses at most the work
since its last checkpoint. The resumed run then does what the killed one would have done, on a CPU bit for bit.

The parts of the loop, each with one subject, are in training/.
"""

import contextlib
import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from safeicrl.algos.api import Algorithm
from safeicrl.envs.api import Env, PyTree
from safeicrl.envs.faults import NONE, refuse_fault
from safeicrl.envs.mujoco import physics
from safeicrl.envs.registry import env_to_plain
from safeicrl.errors import UserError
from safeicrl.evaluation.evaluate import check_size
from safeicrl.evaluation.results import Results
from safeicrl.files import CHECKPOINT, owned
from safeicrl.log import Sink, Terminal
from safeicrl.machine import devices as placing
from safeicrl.machine import hosts
from safeicrl.machine.callbacks import own_errors
from safeicrl.machine.signals import StopRequest
from safeicrl.policies import checkpoint
from safeicrl.training import progress, start, steps
from safeicrl.training.best import evaluate_seeds, policy_path
from safeicrl.training.settings import EvalConfig as EvalConfig  # users import the settings from here
from safeicrl.training.settings import TrainConfig as TrainConfig
from safeicrl.training.settings import seeds_of, with_limit
from safeicrl.training.state import check_parts, check_state, first_state, select
from safeicrl.training.status import Status, finished, limit_reached, times

FAILURES = 3  # non-finite iterations in a row after which a run gives up


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What `train` returns."""

    folder: Path
    state: PyTree  # the final train state, stacked on axis 0 when there are several seeds
    status: Status
    results: list[Results]  # [seed] the last evaluation; empty when there was none since the run was resumed
    policies: list[Path]  # [seed] the best policy; empty when stopped before the first evaluation
    finished: bool  # it reached its limit; False when it was stopped on request

    def agent(self, algorithm: Algorithm, index: int = 0) -> Any:
        """The final policy of the seed at this index."""
        return algorithm.agent(select(self.state, index, len(self.status.failures)))


@own_errors()
def train(
    algorithm: Algorithm,
    config: TrainConfig,
    *,
    out: str | Path,
    resume: bool = False,
    console: Console | None = None,
    stop: StopRequest | None = None,
    devices: int | None = None,
) -> Trained:
    """Train in the folder `out`; `resume` continues the run that is there; a signal to `stop` ends it early.

    The rows, or the seeds, are divided among `devices` devices of this process, by default all that fit; after
    `jax.distributed.initialize`, among those of every process. A run may go on with other numbers of both.
    """
    check_parts(algorithm)
    folder, config = Path(out), with_limit(algorithm, config)
    if steps.overlaps(algorithm):
        steps.check_overlap(algorithm, config, (devices or 1) * hosts.count())
        devices = 1
    mesh = placing.make_mesh(
        devices, rows=getattr(algorithm, "row_axes", None), seeds=config.seeds, env=algorithm.env,
        processes=hosts.count(),
    )  # fmt: skip
    options = config.evaluation
    check_size(algorithm.env, tasks=options.tasks, episodes=options.episodes, rows=options.rows)
    first = hosts.is_first()
    if first and resume and not folder.is_dir():
        raise UserError(f"no checkpoint at {folder / CHECKPOINT}")
    template = eqx.filter_eval_shape(first_state, algorithm, config.seed, config.seeds)
    check_state(algorithm, config, template)
    with contextlib.ExitStack() as stack:
        if first:
            stack.enter_context(owned(folder))
        terminal = stack.enter_context(Terminal(console if first else Console(quiet=True)))
        stop = stack.enter_context(stop or StopRequest())
        state, status = start.begin_together(algorithm, config, folder, template, resume)
        state = placing.spread(state, mesh, config.seeds)
        started = time.perf_counter() - status.seconds
        if over := resume and hosts.any_says(finished(config, status, started)):
            terminal.say(f"{folder} {limit_reached(config, status)}")
        step = None if over else steps.program(algorithm, config, template, terminal, mesh)
        sinks = progress.open_sinks(algorithm, config, folder, status) if first else []
        run = _Run(
            algorithm=algorithm, config=config, folder=folder, status=status, started=started, sinks=sinks,
            terminal=terminal, stop=stop, mesh=mesh,
        )  # fmt: skip
        try:
            state, results, stopped = run.go(step, state)
        finally:
            steps.close(step)
            for sink in sinks:
                sink.close()
        reason = "stopped on request" if stopped else "done"
        terminal.say(f"{reason} after {times(status.iteration)}, {status.seconds / 60:.1f} min: {folder}")
    policies = [path for seed in seeds_of(config) if (path := policy_path(folder, seed)).exists()]
    return Trained(
        folder=folder, state=state, status=status, results=results, policies=policies, finished=not stopped,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A run under way."""

    algorithm: Algorithm
    config: TrainConfig
    folder: Path
    status: Status
    started: float  # on the clock of `time.perf_counter`, as if the run had never been interrupted
    sinks: list[Sink]
    terminal: Terminal
    stop: StopRequest
    mesh: Mesh | None  # of the devices that share the work

    def go(self, step: steps.Step | None, state: PyTree) -> tuple[PyTree, list[Results], bool]:
        """Chunk after chunk to the end; returns the last state and evaluation, and whether a signal was the end.

        `step` is None where the run has ended already.
        """
        config, status, saved = self.config, self.status, time.perf_counter()
        results: list[Results] = []
        while True:
            # Several processes must end and save together, whichever gets the signal and whatever its clock says.
            stopped = hosts.any_says(self.stop.requested)
            if stopped or hosts.any_says(finished(config, status, self.started)):
                break
            assert step is not None
            state, faults = self.chunk(step, state)
            if config.evaluation.every and status.iteration % config.evaluation.every == 0:
                results = self.evaluate(state)
            broken = max(status.failures) >= FAILURES or (faults[..., 0] != NONE).any()
            if hosts.any_says(bool(broken or time.perf_counter() - saved >= 60 * config.checkpoint_minutes)):
                self.save(state)
                saved = time.perf_counter()
            _refuse_faults(faults, status, config, self.algorithm.env)
            if broken:
                raise UserError(_give_up(status, self.folder))
        steps.close(step)
        status.seconds = time.perf_counter() - self.started
        self.save(state)  # before the evaluation, which may fail
        if status.evaluated != status.iteration and not stopped:
            results = self.evaluate(state)
            self.save(state)
        return placing.local(state, self.mesh), results, stopped

    def chunk(self, step: steps.Step, state: PyTree) -> tuple[PyTree, np.ndarray]:
        """One call of the jitted program, logged; the new state, and the environment's faults, [chunk, seed, 5]."""
        begin, physics_begin = time.perf_counter(), physics.seconds()
        state, values = step(state)
        self.status.pace = time.perf_counter() - begin
        self.status.seconds = time.perf_counter() - self.started
        faults = values.pop("fault")
        values = progress.account(values, self.status, self.config, physics.seconds() - physics_begin)
        progress.log_chunk(values, self.status, self.config, self.sinks, self.terminal, placing.count(self.mesh))
        return state, faults

    def evaluate(self, state: PyTree) -> list[Results]:
        """Evaluate every seed, and keep its best policy."""
        found = evaluate_seeds(
            self.algorithm, self.config, self.folder, placing.local(state, self.mesh), self.status, self.sinks,
            self.terminal, self.mesh,
        )  # fmt: skip
        self.status.evaluated = self.status.iteration
        return found

    def save(self, state: PyTree) -> None:
        """Write a checkpoint, after the log that it counts on. It does not depend on the number of devices."""
        state = placing.local(state, self.mesh)
        if not hosts.is_first():
            return
        for sink in self.sinks:
            sink.sync()
        meta = {"status": dataclasses.asdict(self.status), "train": dataclasses.asdict(self.config)}
        checkpoint.save(self.folder / CHECKPOINT, state, kind="checkpoint", meta=meta)


def _refuse_faults(faults: np.ndarray, status: Status, config: TrainConfig, env: Env) -> None:
    """Raise if the environment broke its contract in the chunk that ended; `faults` is [chunk, seed, 5]."""
    for late, each in enumerate(faults):
        for seed, fault in zip(seeds_of(config), each, strict=True):
            where = [f"iteration {status.iteration - config.chunk + late + 1}, seed {seed}"]
            refuse_fault(fault, env_to_plain(env)["name"], where, env.spec)


def _give_up(status: Status, folder: Path) -> str:
    return (
        f"{FAILURES} iterations in a row were not finite, up to iteration {status.iteration}; they were rolled "
        f"back and {folder / CHECKPOINT} is sound: try a smaller learning rate"
    )
