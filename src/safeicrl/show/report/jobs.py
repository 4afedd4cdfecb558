"""The small scales: every method trained and evaluated anew, at a size for two CPU cores.

A job is a list of safeicrl commands, each a process of its own. What they write lies below one folder as the stored
results do, so the same panels are drawn from it. A finished command is noted; run again, it is skipped, and an
interrupted training is resumed.
"""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from safeicrl.errors import UserError
from safeicrl.files import make_folder, read_json, write_json

AT_ONCE = 2  # jobs side by side
DONE = "done.json"  # what is finished: command → seconds


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a small scale is."""

    iterations: int  # of SCARED
    updates: int  # of Safe AD: iterations of ten gradient steps
    meta: int  # meta-iterations
    rows: int  # of trials in an iteration
    tasks: int  # in an evaluation
    rooms: int  # that PPO-Lagrangian learns
    steps: int  # of a learning history
    batch: int  # windows in an update of Safe AD
    stride: int  # of its subsampling
    meta_tasks: int  # in a meta-iteration
    robot_iterations: int
    robot_tasks: int
    scared: tuple[str, ...]  # further options of SCARED in the room ...
    safe_ad: tuple[str, ...]  # ... of Safe AD ...
    learner: tuple[str, ...]  # ... and of PPO-Lagrangian
    compiler: str  # XLA_FLAGS of the commands, unless the user has set them


SIZES = {
    "smoke": Size(
        iterations=4, updates=3, meta=4, rows=16, tasks=16, rooms=12, steps=600, batch=16, stride=5,
        meta_tasks=4, robot_iterations=1, robot_tasks=2,
        # programs take longer to compile than to run: small networks, no cache that grows, nothing optimised
        scared=("--algo.segments", "1", "--algo.net.layers", "1"),
        safe_ad=("--algo.net.layers", "1", "--algo.net.width", "16", "--algo.net.embedding", "16"),
        learner=(), compiler="--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false",
    ),
    # The 5×5 room's methods as their presets train them. The robots stay as small as in a smoke run, but for their
    # iterations: short trials and a tiny network show a pipeline, not a method.
    "laptop": Size(
        iterations=190, updates=200, meta=400, rows=128, tasks=200, rooms=100, steps=10_000, batch=64, stride=100,
        meta_tasks=12, robot_iterations=10, robot_tasks=8, scared=(), safe_ad=(), compiler="",
        learner=("--learner.learning-rate", "3e-3", "--learner.epochs", "4"),
    ),
}  # fmt: skip

Step = tuple[str, ...]  # the words of a safeicrl command


@dataclass(frozen=True, kw_only=True)
class Job:
    """Commands that follow one another, and the panels that need what they write."""

    name: str
    panels: tuple[str, ...]
    steps: tuple[Step, ...]


ROOM = ("size=5", "obstacles=6", "max_steps=12", "episodes=15", "train_budget=[1,6]", "test_budget=[1,6]")
ROBOT_NET = (
    "--algo.net.width", "16", "--algo.net.layers", "1", "--algo.net.heads", "2", "--algo.net.context", "300",
)  # fmt: skip
WORLDS = ("episodes", "budgets")


def jobs(scale: str, folder: Path) -> tuple[Job, ...]:
    """Every job of a scale; what they write lies below `folder`."""
    size = SIZES[scale]
    return (
        *_room_jobs(size, folder),
        *_safe_ad_jobs(size, folder),
        *_meta_jobs(size, folder),
        *_robots(size, folder),
    )


def _evaluate(run: Path, out: Path, label: str, tasks: int, *options: str) -> Step:
    """The tasks are played in one batch, as in training's own evaluation, which has compiled that program."""
    return (
        "evaluate",
        str(run),
        "--tasks",
        str(tasks),
        "--rows",
        str(tasks),
        "--label",
        label,
        "--out",
        str(out),
        *options,
    )


def _scared(size: Size, out: Path, *options: str) -> Step:
    """SCARED in the 5×5 room."""
    sizes = {"--algo.iterations": size.iterations, "--algo.rows": size.rows, "--algo.ppo.minibatch": size.rows // 4}
    judged = {"--evaluation.every": 0, "--evaluation.tasks": size.tasks, "--evaluation.rows": size.tasks}
    words = [word for name, value in {**sizes, **judged}.items() for word in (name, str(value))]
    return ("train", "--preset", "darkroom-small", "--out", str(out), *words, *size.scared, *options)


def _room_jobs(size: Size, folder: Path) -> list[Job]:
    """SCARED in the room, its reference agents, its guard, its ablations, and Algorithm 1 as printed."""
    room, guard, paper = (folder / f"safe-dark-room{x}" for x in ("", "-guard", "-paper"))
    ablated, best = folder / "scared-ablations", room / "training" / "best-seed0"
    every = (*WORLDS, "scared-ablations", "training", "guard", "hyperparameters", "beyond")
    found = [
        Job(name="scared", panels=every, steps=(
            _scared(size, room / "training", "--seeds", "2"),
            _evaluate(room / "training", room / "three-seeds" / "policy", "SCARED", size.tasks),
            _evaluate(best, room / "policy", "penalty only", size.tasks),
            _evaluate(best, folder / "beyond" / room.name, "SCARED", size.tasks, "--episodes", "45"),
        )),
        Job(name="reference", panels=(*WORLDS, "guard"), steps=tuple(
            ("evaluate", "--agent", who, "--tasks", str(size.tasks), "--out", f"{room / who}", "--env-args", *ROOM)
            for who in ("explorer", "planner", "random")
        )),
        Job(name="guard", panels=("guard", "training"), steps=(
            _scared(size, guard / "training", "--algo.net.guard", "2"),
            _evaluate(guard / "training", guard / "policy", "guard", size.tasks),
            _evaluate(guard / "training", guard / "guard-off", "guard switched off", size.tasks, "--no-guard"),
        )),
        Job(name="published", panels=("scared-ablations", "hyperparameters"), steps=(
            _scared(
                size, paper / "training", "--algo.optimiser", "ddpg", "--algo.penalty.form", "paper",
                "--algo.penalty.signal", "mean_of_max", "--algo.ddpg.updates", "4", "--algo.ddpg.batch", "8",
                "--algo.ddpg.capacity", str(4 * size.rows), "--algo.ddpg.trace", "0", "--algo.ddpg.trust", "0",
                "--algo.ddpg.entropy", "0", "--algo.ddpg.ensemble", "1", "--algo.ddpg.no-privileged-critic",
            ),
            _evaluate(paper / "training", paper / "policy", "Algorithm 1 as printed", size.tasks),
        )),
    ]  # fmt: skip
    half = str(size.rows // 2), str(size.rows // 8)
    long = ("--algo.net.context", "360", "--algo.episodes", "30", "--algo.steps", "360")
    for name, options in (
        ("base", ("--seeds", "2", "--seed", "2")),  # the program of "scared", which has seeds 0 and 1
        ("naive", ("--algo.penalty.dual", "naive")),
        ("context-short", ("--algo.net.context", "18")),
        ("context-long", (*long, "--algo.rows", half[0], "--algo.ppo.minibatch", half[1])),
        ("width-half", ("--algo.net.width", "16")),
        ("width-double", ("--algo.net.width", "64")),
    ):
        run = ablated / "training" / name
        steps = [_scared(size, run, *options), _evaluate(run, ablated / name, name, size.tasks)]
        if name.startswith("context"):
            steps.append(_evaluate(run, ablated / f"long-{name}", name, size.tasks, "--episodes", "30"))
        found.append(Job(name=name, panels=("scared-ablations",), steps=tuple(steps)))
    return found


def _safe_ad_jobs(size: Size, folder: Path) -> list[Job]:
    """Safe AD on PPO-Lagrangian's histories, two of its ablations, and Safe AD-EPS."""
    own = folder / "safe-ad"

    def collect(name: str, *options: str) -> Step:
        histories = str(folder / "histories" / name)
        tasks = ("--tasks", str(size.rooms), "--steps", str(size.steps))
        return ("collect", "--env-args", *ROOM, *tasks, "--out", histories, *options)

    def train(out: Path, histories: str, *options: str) -> Step:
        words = ("--algo.histories", str(folder / "histories" / histories), "--algo.iterations", str(size.updates))
        windows = ("--algo.batch", str(size.batch), "--algo.stride", str(size.stride))
        sizes = ("--algo.updates", "10", "--algo.warmup", "10", *windows)
        judged = ("--evaluation.tasks", str(size.tasks), "--evaluation.rows", str(size.tasks))
        settings = (*words, *sizes, *judged, *size.safe_ad, *options)
        return ("train", "--preset", "darkroom-safe-ad-small", "--out", str(out), *settings)

    steps = [
        collect("ppo-lag", "--limits", "0", "2", "--group", "24", *size.learner),
        train(own / "training" / "dark-room", "ppo-lag"),
        _evaluate(own / "training" / "dark-room", own / "dark-room", "Safe AD", size.tasks),
        _evaluate(own / "training" / "dark-room", own / "ablations" / "base", "Safe AD, base", size.tasks),
    ]
    for name, option in (("context 96", ("--algo.net.context", "96")), ("share 0.5", ("--algo.share", "0.5"))):
        run = folder / "runs" / f"safe-ad-{name.replace(' ', '-')}"
        out = own / "ablations" / name.replace(" ", "-")
        steps += [train(run, "ppo-lag", *option), _evaluate(run, out, f"Safe AD, {name}", size.tasks)]
    eps = folder / "runs" / "safe-ad-eps"
    panels = (*WORLDS, "safe-ad-eps", "safe-ad-ablations", "training")
    return [
        Job(name="safe-ad", panels=panels, steps=tuple(steps)),
        Job(name="safe-ad-eps", panels=("safe-ad-eps",), steps=(
            collect("eps", "--by", "eps"),
            train(eps, "eps"),
            _evaluate(eps, own / "dark-room-eps", "Safe AD-EPS", size.tasks),
        )),
    ]  # fmt: skip


def _meta_jobs(size: Size, folder: Path) -> list[Job]:
    """SafeMeta and MAML with penalty in the 5×5 room."""
    found = []
    for name, label in (("safe-meta", "SafeMeta"), ("maml", "MAML with penalty")):
        run = folder / name / "training" / "dark-room"
        words = ("--algo.iterations", str(size.meta), "--algo.tasks", str(size.meta_tasks), "--chunk", "2")
        judged = ("--evaluation.tasks", str(size.tasks), "--evaluation.rows", str(size.tasks))
        train = ("train", "--preset", f"darkroom-{name}-small", "--out", str(run), *words, *judged)
        evaluate = _evaluate(run, folder / name / "dark-room", label, size.tasks)
        found.append(Job(name=name, panels=(*WORLDS, "training", "hyperparameters"), steps=(train, evaluate)))
    return found


def _robots(size: Size, folder: Path) -> list[Job]:
    """SCARED and a random agent with each robot, in short trials; Car in the plane, Ant by Euler steps."""
    found = []
    for world, args in (
        ("safe-dark-point", ()),
        ("safe-dark-car", ("engine=planar",)),
        ("safe-velocity-half-cheetah", ()),
        ("safe-velocity-ant", ("engine=euler",)),
    ):
        run, tasks = folder / world / "training", str(size.robot_tasks)
        engine = tuple(word for arg in args for word in ("--env.engine", arg.partition("=")[2]))
        sizes = ("--algo.iterations", str(size.robot_iterations), "--algo.rows", "8", "--algo.queue", "1")
        train = (
            "train", "--algo", "scared", "--env", world, "--out", str(run), "--env.episodes", "4", *engine,
            *ROBOT_NET, *sizes, "--algo.segments", "1", "--algo.ppo.minibatch", "4", "--algo.ppo.epochs", "1",
            "--evaluation.every", "0", "--evaluation.tasks", tasks, "--evaluation.rows", tasks,
        )  # fmt: skip
        random = (
            "evaluate", "--agent", "random", "--env", world, "--env-args", "episodes=4", *args, "--tasks", tasks,
            "--out", str(folder / world / "random"),
        )  # fmt: skip
        steps: list[Step] = [train, _evaluate(run, folder / world / "policy", "SCARED", size.robot_tasks), random]
        panels: tuple[str, ...] = (*WORLDS, "training")
        if world == "safe-velocity-half-cheetah":  # the room of this scale has no task lists
            panels = (*panels, "hyperparameters")
            steps += [
                _evaluate(run, folder / world / out, "SCARED", size.robot_tasks, "--list", *options)
                for out, *options in (
                    ("wide", "wide"),
                    ("validation/0.5", "validation", "--temperature", "0.5"),
                    ("validation/1", "validation", "--temperature", "1"),
                )
            ]
        found.append(Job(name=world, panels=panels, steps=tuple(steps)))
    return found


# -- running ------------------------------------------------------------------------------------------------


class Progress:
    """Which commands are finished, on disk; shared by the jobs that run side by side."""

    def __init__(self, folder: Path):
        self.path = folder / DONE
        self.seconds: dict[str, float] = (
            read_json(self.path, "list of finished commands") if self.path.exists() else {}
        )
        self.lock = threading.Lock()

    def finish(self, command: str, seconds: float) -> None:
        """Note a command as finished."""
        with self.lock:
            self.seconds[command] = round(seconds, 1)
            write_json(self.path, self.seconds)


def run_jobs(asked: Sequence[Job], folder: Path, say: Callable[[str], None], compiler: str = "") -> None:
    """Run jobs, two at a time, but for what is finished. The first failure ends the report."""
    make_folder(folder / "logs")
    progress, stop = Progress(folder), threading.Event()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = [pool.submit(_run_job, job, folder, progress, stop, say, compiler) for job in asked]
        try:
            for future in running:
                future.result()
        finally:
            stop.set()  # the others end with the command they are at


def _run_job(
    job: Job, folder: Path, progress: Progress, stop: threading.Event, say: Callable[[str], None], compiler: str
) -> None:
    for step in job.steps:
        command = " ".join(("safeicrl", *step))
        if command in progress.seconds or stop.is_set():
            continue
        begin = time.monotonic()
        _run_step(step, folder / "logs" / f"{job.name}.log", compiler)
        progress.finish(command, time.monotonic() - begin)
        say(f"{job.name}: {step[0]} done in {time.monotonic() - begin:.0f} s")


def _run_step(step: Step, log: Path, compiler: str) -> None:
    """One command; a training that was begun is resumed, or, where there is nothing to resume, begun anew."""
    out = Path(step[step.index("--out") + 1])
    begun = step[0] == "train" and out.exists()
    resumed = begun and _safeicrl(("train", "--resume", str(out)), log, compiler) == 0
    if begun and not resumed:
        shutil.rmtree(out)
    if not resumed and _safeicrl(step, log, compiler) != 0:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise UserError(f"safeicrl {step[0]} failed: {''.join(last)} (all of it: {log})")
    # An interrupted training ends without an error. Its policy is written by its only evaluation, at its end.
    if step[0] == "train" and not any(out.glob("best-seed*.safetensors")):
        raise UserError(f"the training in {out} was interrupted; the same command goes on with it")


def _safeicrl(step: Step, log: Path, compiler: str) -> int:
    environment = {**({"XLA_FLAGS": compiler} if compiler else {}), **os.environ}
    with open(log, "a", encoding="utf-8") as file:
        file.write(f"$ safeicrl {' '.join(step)}\n")
        file.flush()
        command = [sys.executable, "-m", "safeicrl", *step]
        return subprocess.run(command, stdout=file, stderr=file, env=environment).returncode
