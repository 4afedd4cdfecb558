"""Running a grid of trainings: as Ray tasks on a laptop or a cluster, or one after another in this process.

Ray decides where and when a run trains, and starts it again if its process dies. A run is the command line that a
user would type, with its output in RUN/log.txt. It resumes what it finds in its folder, so nothing here is kept but
the index: a sweep that was killed goes on when its command is repeated.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import logging
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from safeicrl import plugins
from safeicrl.errors import UserError, check_integer, check_number
from safeicrl.evaluation.sweeps import SweptRun
from safeicrl.files import CHECKPOINT, RECIPE, disown, make_folder, owned
from safeicrl.machine.signals import StopRequest
from safeicrl.recipes.board import Board
from safeicrl.recipes.grid import Plan, open_index, save_index

LOG = "log.txt"  # what a run prints, in its folder
INSTALL = "pip install 'safeicrl[ray]'"
POLL = 0.5  # seconds between looks at Ray's tasks
OBJECT_STORE = 100 * 2**20  # bytes; a task returns a few words
SHARE = 0.9  # of its part of a GPU's memory that a run takes, where several runs share one

Command = Callable[[list[str]], int]  # runs a command line of safeicrl; returns its exit code


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Where runs train, and what each may use."""

    ray: bool = True  # False: one after another in this process
    address: str | None = None  # of a Ray cluster, or "auto"; None: this machine
    cpus: float = 1.0  # that Ray counts for each run
    gpus: float | None = None  # likewise; None: 1 where there are GPUs, else 0
    retries: int = 3  # of a run whose process dies

    def __post_init__(self) -> None:
        if self.address is not None and not self.ray:
            raise UserError("--no-ray trains in this process: leave out --ray-address")
        check_number("cpus", self.cpus, 0.0)
        check_integer("retries", self.retries, 0)
        if self.gpus is not None and check_number("gpus", self.gpus, 0.0) > 1 and self.gpus % 1:
            raise UserError(f"gpus must be a whole number, or a part of one GPU, got {self.gpus}")


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run, as it is sent to the process that trains it."""

    folder: Path  # absolute
    label: str
    words: tuple[str, ...]  # options of `safeicrl train`
    evaluate: int | None  # unseen tasks of the evaluation after training
    cwd: str  # what relative paths among the options start from
    imports: tuple[str, ...]  # modules of --import
    gpus: float = 0.0


class Interrupted(Exception):
    """A signal stopped a run, which has saved its work; Ray starts it again, perhaps elsewhere."""


def run_sweep(
    plan: Plan,
    *,
    out: Path,
    resources: Resources,
    command: Command,
    console: Console | None = None,
) -> int:
    """Train the runs of `plan` that are not finished; returns 0, 1 if one failed, or 128 + a signal's number."""
    folder = out.absolute()
    ray = _find_ray(resources, len(plan.runs))
    if ray is not None:
        import jax

        jax.config.update("jax_platforms", "cpu")  # in this process only: the memory of GPUs is for the runs
    with owned(folder), StopRequest() as stop:
        index = open_index(folder, plan)
        save_index(folder, index)
        finished = {run.name for run in index["runs"] if run.status == "finished" and _begun(run.folder)}
        ahead = [run for run in plan.runs if run.name not in finished]
        states = _waiting(index["runs"], {run.name for run in ahead})
        # a console of its own for standard output: a run in this process prints to its log
        board = Board(states, {run.name: run.iterations for run in plan.runs}, console or Console(file=sys.stdout))
        if finished:
            board.say(f"{len(finished)} of {len(index['runs'])} runs are finished already")
        tasks = {
            run.name: Task(
                folder=folder / run.name, label=run.label, words=run.words, evaluate=plan.evaluate, cwd=os.getcwd(),
                imports=tuple(plugins.imported),
            )
            for run in ahead
        }  # fmt: skip

        def note(name: str, **found: Any) -> None:
            """A run has ended: show it, and keep it in the index."""
            run = dataclasses.replace(board.runs[name], **{"error": "", **found})
            board.note(run)
            save_index(folder, {**index, "runs": list(board.runs.values())})

        with board:
            if ray is None:
                status = _one_by_one(tasks, command, note, stop)
            else:
                status = _with_ray(ray, tasks, command, resources, note, stop, board)
        board.console.print(board.table())
    return status or _conclude(board, out)


def _waiting(runs: list[SweptRun], ahead: set[str]) -> list[SweptRun]:
    """The runs of the index; those that are ahead are waiting, whatever became of them before."""
    return [dataclasses.replace(run, status="waiting", error="") if run.name in ahead else run for run in runs]


def _begun(folder: Path) -> bool:
    """Whether there is something to resume."""
    return any((folder / name).exists() for name in (CHECKPOINT, RECIPE))


def _conclude(board: Board, out: Path) -> int:
    """Name what failed, and what to do next; returns the exit code."""
    failed = [run for run in board.runs.values() if run.status == "failed"]
    for run in failed:
        board.say(f"failed: {run.name}: {run.error} (see {out / run.name / LOG})")
    if failed:
        board.say("the same command tries again what failed")
    if len(failed) < len(board.runs):
        board.say(f"compare them:  safeicrl compare {out}")
    return 1 if failed else 0


# -- one run ------------------------------------------------------------------------------------------------


def perform_for_ray(task: Task, command: Command) -> dict[str, Any]:
    """`perform` in a process of Ray's, which says by SIGINT that a run must stop.

    Processes inherit what a shell does to its background jobs: it lets them ignore SIGINT.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return perform(task, command)


def perform(task: Task, command: Command) -> dict[str, Any]:
    """Train one run in this process, or continue it; returns what the index says about it.

    A run that a signal stopped raises `Interrupted`.
    """
    begin, error = time.monotonic(), ""
    if 0 < task.gpus < 1:  # JAX would take three quarters of the memory for the first run
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{SHARE * task.gpus:.3f}")
    try:
        os.chdir(task.cwd)
        make_folder(task.folder)
        # Ray starts a run elsewhere only when its process is lost, and the sweep's folder belongs to one sweep.
        disown(task.folder)
        code = _train(task, command)
        if code:
            error = _last_line(task.folder / LOG)
    except (OSError, UserError) as problem:  # of this machine: the folder cannot be reached or written
        code, error = 2, str(problem)
    if code >= 128:
        raise Interrupted(str(code))
    status = "failed" if code else "finished"
    seconds = round(time.monotonic() - begin, 1)
    return {"status": status, "error": error, "seconds": seconds, "host": platform.node()}


def _train(task: Task, command: Command) -> int:
    """Train, then evaluate, with all that is printed in the log; returns the first exit code that is not 0."""
    folder, out = str(task.folder), str(task.folder / "evaluation")
    go_on = ["train", *_devices(task.words), "--resume", folder]
    steps = [go_on if _begun(task.folder) else ["train", *task.words, "--out", folder]]
    if task.evaluate is not None:
        steps.append(["evaluate", folder, "--tasks", str(task.evaluate), "--label", task.label, "--out", out])
    code = 0
    with (
        # line by line: a killed process leaves what it said
        open(task.folder / LOG, "a", buffering=1, encoding="utf-8", errors="backslashreplace") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        for words in steps:
            code = code or _call(command, words, task.imports)
    return code


def _devices(words: tuple[str, ...]) -> tuple[str, ...]:
    """The option --devices among `words`: no part of the experiment, so a run's folder does not say it."""
    for index, word in enumerate(words):
        if word.split("=")[0] == "--devices":
            return words[index : index + (1 if "=" in word else 2)]
    return ()


def _call(command: Command, words: list[str], imports: tuple[str, ...]) -> int:
    """The exit code of a command line, whose words are what results will say they came from."""
    as_words = lambda names: [word for name in names for word in ("--import", name)]  # noqa: E731
    before, sys.argv = sys.argv, ["safeicrl", *words, *as_words(imports)]
    try:
        return command([*words, *as_words(name for name in imports if name not in plugins.imported)])
    except Exception:  # one bug in one run must not end the others; its log has the traceback
        traceback.print_exc()
        return 1
    finally:
        sys.argv = before


def _last_line(log: Path) -> str:
    """The end of a log: the line of a user's mistake, or of a traceback."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    return next((line.removeprefix("safeicrl: ") for line in reversed(lines) if line), "its log is empty")


# -- all runs -----------------------------------------------------------------------------------------------


def _one_by_one(tasks: dict[str, Task], command: Command, note: Callable[..., None], stop: StopRequest) -> int:
    for name, task in tasks.items():
        if stop.requested:
            break
        try:
            note(name, **perform(task, command))
        except Interrupted as stopped:  # the run heard the signal, which was for the sweep
            note(name, status="stopped")
            return int(str(stopped))
    return stop.exit_status


def _find_ray(resources: Resources, runs: int) -> Any:
    """The package ray; None if the runs are to follow one another."""
    if not resources.ray or (runs == 1 and resources.address is None):
        return None
    if importlib.util.find_spec("ray") is None:
        if resources.address is not None:
            raise UserError(f"--ray-address needs Ray: {INSTALL}")
        print(f"Ray is not installed ({INSTALL}): the runs follow one another in this process")
        return None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a local Ray would report its use to its makers
    return importlib.import_module("ray")


@contextlib.contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    """Within a Ray: that of `address`, or one of this machine; one that the caller has started stays."""
    if ray.is_initialized():
        yield
        return
    local = {} if address else {"include_dashboard": False, "object_store_memory": OBJECT_STORE}
    try:
        ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **local)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = f"at {address}" if address else "on this machine"
        raise UserError(f"cannot use Ray {where}: {str(error).partition(chr(10))[0]}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _with_ray(
    ray: Any,
    tasks: dict[str, Task],
    command: Command,
    resources: Resources,
    note: Callable[..., None],
    stop: StopRequest,
    board: Board,
) -> int:
    """All tasks at once, scheduled and retried by Ray; after a signal each saves its work and ends."""
    address = resources.address or os.environ.get("RAY_ADDRESS")  # which is set within a job of a cluster
    with _connected(ray, address):
        there = ray.cluster_resources()
        gpus = float(there.get("GPU", 0) >= 1) if resources.gpus is None else resources.gpus
        for kind, wanted in (("CPU", resources.cpus), ("GPU", gpus)):
            if address is None and wanted > there.get(kind, 0):  # a cluster may still grow
                raise UserError(f"a run asks for {wanted:g} {kind}s, this machine has {there.get(kind, 0):g}")
        remote = ray.remote(
            num_cpus=resources.cpus, num_gpus=gpus, max_retries=resources.retries, retry_exceptions=[Interrupted]
        )(perform_for_ray)
        running = {
            remote.options(name=name).remote(dataclasses.replace(task, gpus=gpus), command): name
            for name, task in tasks.items()
        }
        cancelled = False
        while running:
            if stop.requested and not cancelled:
                cancelled = True
                board.say("stopping: each run saves its work; again to leave at once")
                for reference in running:
                    ray.cancel(reference)
            for reference in ray.wait(list(running), timeout=POLL)[0]:
                note(running.pop(reference), **_outcome(ray, reference, resources.retries))
    return stop.exit_status


def _outcome(ray: Any, reference: Any, retries: int) -> dict[str, Any]:
    """What became of a task."""
    try:
        return ray.get(reference)
    except (ray.exceptions.TaskCancelledError, Interrupted):
        return {"status": "stopped"}
    except ray.exceptions.RayTaskError as error:  # before it began: safeicrl is not installed there, for example
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return {"status": "failed", "error": lines[-1] if lines else type(error).__name__}
    except ray.exceptions.RayError as error:
        why = f"its process died, and in {retries} retries again ({type(error).__name__})"
        return {"status": "failed", "error": why}
