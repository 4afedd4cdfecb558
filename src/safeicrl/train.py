"""The host loop: one jitted chunk of iterations after another; log, evaluate, keep the best, save, resume.

A run is a folder with config.json, metrics.jsonl and checkpoint.safetensors (the whole train state). For each seed
it also has the best policy so far (best-seed0.safetensors + .json) and the evaluation that chose it
(best-seed0-evaluation.npz + .json, results like any other). A process killed at any moment loses at most the work
since its last checkpoint. The resumed run then does what the killed one would have done, on a CPU bit for bit.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from safeicrl.agents.api import with_options
from safeicrl.algos.api import METRICS, Algorithm
from safeicrl.algos.registry import algo_name
from safeicrl.algos.scared import Scared
from safeicrl.config import from_plain
from safeicrl.envs.api import Env, PyTree
from safeicrl.envs.faults import NO_FAULT, NONE, refuse_fault
from safeicrl.envs.mujoco import physics
from safeicrl.envs.registry import env_to_plain
from safeicrl.errors import UserError, check_integer, check_number, check_seed
from safeicrl.evaluation.evaluate import check_size, evaluate
from safeicrl.evaluation.results import Results
from safeicrl.evaluation.statistics import Summary, rank, summaries, summarise
from safeicrl.files import CHECKPOINT, owned, read_json, write_json
from safeicrl.log import JsonLines, Sink, TensorBoard, Terminal, WandB
from safeicrl.machine import devices as placing
from safeicrl.machine import hosts
from safeicrl.machine.callbacks import own_errors
from safeicrl.machine.signals import StopRequest
from safeicrl.overlap.lanes import check_env
from safeicrl.overlap.overlapped import Overlapped
from safeicrl.policies import checkpoint
from safeicrl.policies.cards import read_card, save_policy
from safeicrl.policies.catalogue import check_card, find_policy, load_agent
from safeicrl.provenance import surroundings

FAILURES = 3  # non-finite iterations in a row after which a run gives up

Step = Callable[[PyTree], tuple[PyTree, dict[str, np.ndarray]]]  # state → state, metrics [chunk, seed, ...]


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """The periodic evaluation of the frozen policy on unseen tasks, which also chooses the best one."""

    every: int = 50  # iterations between evaluations; 0: only one, at the end
    tasks: int = 100  # unseen tasks, one trial each
    episodes: int | None = None  # episodes in a trial; the environment's K by default
    seed: int = 1000  # not the default seed of `evaluate`, so that final results are of other tasks
    temperature: float | None = None  # of actions, here and on the best policy's card; the agent's own by default
    wipe: bool = False  # forget at every episode: for an agent that was trained on single episodes
    rows: int | None = None  # trials at a time; as `evaluate` chooses by default
    segments: int = 8  # steps in which the KV cache grows
    tolerance: float = 0.03  # share of episodes over budget up to which the return decides what is best

    def __post_init__(self) -> None:
        check_integer("evaluation every", self.every, 0)
        check_integer("evaluation tasks", self.tasks, 1)
        if self.rows is not None:
            check_integer("evaluation rows", self.rows, 1)
        check_integer("evaluation segments", self.segments, 1)
        check_seed(self.seed, "evaluation seed")
        check_number("evaluation tolerance", self.tolerance, 0.0)
        if self.episodes is not None:
            check_integer("evaluation episodes", self.episodes, 1)
        if self.temperature is not None:
            check_number("evaluation temperature", self.temperature, 0.0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long to train, with how many seeds, and what to write on the way."""

    iterations: int | None = None  # updates after which to stop; None: as many as the algorithm plans for
    # wall time after which to stop, compilation included, if that comes first; never before the first chunk is done
    minutes: float | None = None
    seed: int = 0  # of networks, tasks and actions
    seeds: int = 1  # how many seeds (seed, seed + 1, ...) train side by side in one vmapped program
    # what this run begins with: the folder of a run, all its networks; or a policy (name, path), with new critics
    start: str | None = None
    chunk: int = 1  # iterations in one call of the jitted program
    checkpoint_minutes: float = 2.0  # minutes between checkpoints; 0: one after every chunk
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    tensorboard: bool = False  # write TensorBoard files, too, into the run's folder
    wandb: str | None = None  # project of Weights & Biases to log to

    def __post_init__(self) -> None:
        if self.iterations is not None:
            check_integer("iterations", self.iterations, 1)
        if self.minutes is not None:
            check_number("minutes", self.minutes, 0.0, strict=True)
        check_integer("seeds", self.seeds, 1, 2**12)
        check_seed(self.seed)
        check_seed(self.seed + self.seeds - 1, "the last of the seeds")
        check_integer("chunk", self.chunk, 1)
        check_number("checkpoint_minutes", self.checkpoint_minutes, 0.0)
        for name, value in (("iterations", self.iterations), ("evaluation every", self.evaluation.every)):
            if value is not None and value % self.chunk:
                raise UserError(f"{name} ({value}) must be a multiple of chunk ({self.chunk})")


@dataclass(kw_only=True)
class Status:
    """Where a run stands; saved with every checkpoint."""

    iteration: int = 0
    env_steps: int = 0  # of each seed
    seconds: float = 0.0  # wall time, including that before the run was resumed
    pace: float = 0.0  # seconds of the last chunk
    failures: list[int] = field(default_factory=list)  # [seed] non-finite iterations in a row
    best: list[dict[str, Any] | None] = field(default_factory=list)  # [seed] iteration, summary
    evaluated: int = -1  # iteration of the last evaluation


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
        return algorithm.agent(_select(self.state, index, len(self.status.failures)))


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
    _check_parts(algorithm)
    folder, config = Path(out), _with_limit(algorithm, config)
    if _overlaps(algorithm):
        _check_overlap(algorithm, config, (devices or 1) * hosts.count())
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
    template = eqx.filter_eval_shape(_init, algorithm, config.seed, config.seeds)
    _check_state(algorithm, config, template)
    with contextlib.ExitStack() as stack:
        if first:
            stack.enter_context(owned(folder))
        terminal = stack.enter_context(Terminal(console if first else Console(quiet=True)))
        stop = stack.enter_context(stop or StopRequest())
        state, status = _begin_together(algorithm, config, folder, template, resume)
        state = placing.spread(state, mesh, config.seeds)
        started = time.perf_counter() - status.seconds
        if over := resume and hosts.any_says(_finished(config, status, started)):
            terminal.say(f"{folder} {_limit_reached(config, status)}")
        step = None if over else _program(algorithm, config, template, terminal, mesh)
        sinks = _sinks(algorithm, config, folder, status) if first else []
        run = _Run(
            algorithm=algorithm, config=config, folder=folder, status=status, started=started, sinks=sinks,
            terminal=terminal, stop=stop, mesh=mesh,
        )  # fmt: skip
        try:
            state, results, stopped = run.go(step, state)
        finally:
            _close(step)
            for sink in sinks:
                sink.close()
        reason = "stopped on request" if stopped else "done"
        terminal.say(f"{reason} after {_times(status.iteration)}, {status.seconds / 60:.1f} min: {folder}")
    policies = [path for seed in _seeds(config) if (path := _policy_path(folder, seed)).exists()]
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

    def go(self, step: Step | None, state: PyTree) -> tuple[PyTree, list[Results], bool]:
        """Chunk after chunk to the end; returns the last state and evaluation, and whether a signal was the end.

        `step` is None where the run has ended already.
        """
        config, status, saved = self.config, self.status, time.perf_counter()
        results: list[Results] = []
        while True:
            # Several processes must end and save together, whichever gets the signal and whatever its clock says.
            stopped = hosts.any_says(self.stop.requested)
            if stopped or hosts.any_says(_finished(config, status, self.started)):
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
        _close(step)
        status.seconds = time.perf_counter() - self.started
        self.save(state)  # before the evaluation, which may fail
        if status.evaluated != status.iteration and not stopped:
            results = self.evaluate(state)
            self.save(state)
        return placing.local(state, self.mesh), results, stopped

    def chunk(self, step: Step, state: PyTree) -> tuple[PyTree, np.ndarray]:
        """One call of the jitted program, logged; the new state, and the environment's faults, [chunk, seed, 5]."""
        begin, physics_begin = time.perf_counter(), physics.seconds()
        state, values = step(state)
        self.status.pace = time.perf_counter() - begin
        self.status.seconds = time.perf_counter() - self.started
        faults = values.pop("fault")
        values = _account(values, self.status, self.config, physics.seconds() - physics_begin)
        _log(values, self.status, self.config, self.sinks, self.terminal, placing.count(self.mesh))
        return state, faults

    def evaluate(self, state: PyTree) -> list[Results]:
        """Evaluate every seed, and keep its best policy."""
        found = _evaluate(
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


def _with_limit(algorithm: Algorithm, config: TrainConfig) -> TrainConfig:
    """The config with a limit: by default the number of iterations that the algorithm's schedules span."""
    if config.iterations is not None:
        return config
    planned = getattr(algorithm.config, "iterations", None)
    if planned is None and config.minutes is None:
        raise UserError("training needs a limit: iterations, minutes or both")
    return dataclasses.replace(config, iterations=planned)


def _check_parts(algorithm: Algorithm) -> None:
    """Refuse an algorithm without one of its parts."""
    parts = ("env", "config", "init", "update", "agent", "card")
    missing = [name for name in parts if not hasattr(algorithm, name)]
    if missing:
        raise UserError(f"{type(algorithm).__name__} has no {missing[0]!r}: an algorithm has {', '.join(parts)}")


def _check_state(algorithm: Algorithm, config: TrainConfig, template: PyTree) -> None:
    """Refuse a state that cannot be trained, or whose policy could not be loaded."""
    who = type(algorithm).__name__
    if not hasattr(template, "key"):
        raise UserError(f"{who}.init must return a state with a field 'key', got a {type(template).__name__}")
    one = template if config.seeds == 1 else eqx.filter_eval_shape(_init, algorithm, config.seed, 1)
    agent = eqx.filter_eval_shape(algorithm.agent, one)
    check_card(f"{who}.card", algorithm.card(), algorithm.env, agent)


# -- state --------------------------------------------------------------------------------------------------


def _seeds(config: TrainConfig) -> range:
    return range(config.seed, config.seed + config.seeds)


def _init(algorithm: Algorithm, seed: int, seeds: int) -> PyTree:
    """The first train state; several are stacked on axis 0, each the same as when it trains alone."""
    if seeds == 1:
        state = algorithm.init(jax.random.key(seed))
    else:
        each = np.arange(seed, seed + seeds, dtype=np.uint32)  # int32 would wrap
        state = eqx.filter_vmap(algorithm.init)(jax.vmap(jax.random.key)(each))

    def strong(leaf: Any) -> Any:
        """Without JAX's weak types, which a checkpoint does not keep: they would change the compiled program."""
        floating = eqx.is_array(leaf) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jnp.asarray(leaf, leaf.dtype) if floating else leaf

    return jax.tree.map(strong, state)


def _select(state: PyTree, index: int, seeds: int) -> PyTree:
    return state if seeds == 1 else jax.tree.map(lambda x: x[index] if eqx.is_array(x) else x, state)


def _begin(
    algorithm: Algorithm, config: TrainConfig, folder: Path, template: PyTree, resume: bool
) -> tuple[PyTree, Status]:
    path = folder / CHECKPOINT
    if resume:
        state, meta = checkpoint.load(path, template, kind="checkpoint")
        return state, from_plain(Status, meta.get("status"), f"the status in {path}")
    if path.exists():
        raise UserError(f"{folder} holds a run already: resume it or choose another folder")
    begin = None if config.start is None else _beginning(algorithm, config.start)
    state = eqx.filter_jit(_init)(algorithm, config.seed, config.seeds)
    if begin is not None:
        state = begin(state, config.seeds)
    described = describe(algorithm.env, algorithm.config, config)
    write_json(folder / "config.json", {**described, **surroundings()})
    return state, Status(failures=[0] * config.seeds, best=[None] * config.seeds)


def _begin_together(
    algorithm: Algorithm, config: TrainConfig, folder: Path, template: PyTree, resume: bool
) -> tuple[PyTree, Status]:
    """`_begin`; of several processes, the first one tells the others."""
    if hosts.count() == 1:
        return _begin(algorithm, config, folder, template, resume)
    state = template

    def begin() -> dict[str, Any]:
        nonlocal state
        state, status = _begin(algorithm, config, folder, template, resume)
        return dataclasses.asdict(status)

    status = from_plain(Status, hosts.by_first(begin), "the status of the first process")
    arrays, static = eqx.partition(state, lambda leaf: hasattr(leaf, "shape"))
    return eqx.combine(hosts.arrays_of_first(arrays), static), status


def check_start(algorithm: Algorithm, start: str) -> None:
    """Refuse a run or a policy that `algorithm` cannot begin with."""
    _beginning(algorithm, start)


def _beginning(algorithm: Algorithm, start: str) -> Callable[[PyTree, int], PyTree]:
    """What puts the networks of `start`, a run or a policy, into a first state; refused here if they do not fit."""
    checkpointed = Path(start) / CHECKPOINT
    if checkpointed.exists():
        if not hasattr(algorithm, "start_from"):
            raise UserError(f"{type(algorithm).__name__} has no 'start_from': it cannot start with a run")
        _check_start(algorithm, Path(start))
        return lambda state, _: _start(algorithm, state, checkpointed)
    path = find_policy(start)
    card = read_card(path)
    _, agent = load_agent(path, card)
    start_with = getattr(algorithm, "start_with", None)
    if start_with is None:
        raise UserError(f"{type(algorithm).__name__} cannot start with a policy; --start takes a run's folder")
    _check_sizes(algorithm, card.get("net", {}), start)

    def begin(state: PyTree, seeds: int) -> PyTree:
        one = lambda own: start_with(own, agent)  # noqa: E731
        return _apart(one(state) if seeds == 1 else eqx.filter_vmap(one)(state))

    return begin


def _apart(state: PyTree) -> PyTree:
    """The same state with no array twice, as a policy and its average would be: an iteration donates them all."""
    return jax.tree.map(lambda leaf: leaf.copy() if eqx.is_array(leaf) else leaf, state)


def _start(algorithm: Algorithm, state: PyTree, path: Path) -> PyTree:
    """The first state of a run that begins with the networks of another run's checkpoint.

    Only the networks must fit. What else the checkpoint holds (a replay, a multiplier per episode) may have other
    shapes, since the other run may have played shorter trials.
    """
    other, _ = checkpoint.load(path, state, kind="checkpoint", any_shape=True)
    started = algorithm.start_from(state, other)
    ours, theirs = checkpoint.named_arrays(state), checkpoint.named_arrays(started)
    for name, array in theirs.items():
        if array.shape != ours[name].shape:
            raise UserError(f"{path}: array {name!r} has shape {array.shape}, expected {ours[name].shape}")
    return _apart(started)


def _check_start(algorithm: Algorithm, folder: Path) -> None:
    """Refuse a run whose networks have another size."""
    try:
        theirs = read_json(folder / "config.json", "training run")["algo"]["config"].get("net", {})
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / 'config.json'} is not a training run: {error!r}") from None
    _check_sizes(algorithm, theirs, folder)


def _check_sizes(algorithm: Algorithm, theirs: dict[str, Any], start: str | Path) -> None:
    """Refuse networks of another size. Those with other heads or levels may fit, but compute something else."""
    ours = dataclasses.asdict(algorithm.config).get("net", {})
    if ours and not theirs:
        raise UserError(f"{start} has no network with width, layers and heads, as this run has")
    differ = {}  # size: theirs, ours
    for size in ("width", "layers", "heads", "levels"):
        # runs of versions without levels say nothing about them
        here, there = (net.get(size, 0 if size == "levels" else None) for net in (ours, theirs))
        if there != here:
            differ[size] = (there, here)
    if differ:
        found = "; ".join(f"has {size} {there}, this run has {here}" for size, (there, here) in differ.items())
        options = " ".join(f"--algo.net.{size} {there}" for size, (there, _) in differ.items())
        raise UserError(f"{start} {found}: use {options} to start from it")


def describe(env: Env, algo: Any, train: TrainConfig) -> dict[str, Any]:
    """A run's settings as JSON values, with the names under which the environment and algorithm are registered."""
    return {
        "env": env_to_plain(env),
        "algo": {"name": algo_name(algo), "config": dataclasses.asdict(algo)},
        "train": dataclasses.asdict(train),
    }


# -- the jitted program -------------------------------------------------------------------------------------


def _program(
    algorithm: Algorithm, config: TrainConfig, template: PyTree, terminal: Terminal, mesh: Mesh | None
) -> Step:
    """What does a chunk: one jitted program, or several that overlap."""
    terminal.say(f"compiling for {_described(mesh)} ...")
    begin = time.perf_counter()
    if _overlaps(algorithm):
        step = _compile_overlapped(algorithm, template)
    else:
        step = _compile(algorithm, config, template, mesh)
    terminal.say(f"compiled in {time.perf_counter() - begin:.1f} s")
    return step


def _overlaps(algorithm: Algorithm) -> bool:
    """Whether playing and learning run side by side."""
    return getattr(algorithm.config, "overlap", 0) > 0


def _check_overlap(algorithm: Algorithm, config: TrainConfig, devices: int) -> None:
    """Refuse what cannot overlap: worlds on the accelerator, several seeds, iterations at a time, or devices."""
    check_env(algorithm.env)
    for name, count in (("seeds", config.seeds), ("chunk", config.chunk), ("devices", devices)):
        if count > 1:
            raise UserError(f"with overlap, {name} must be 1, got {count}")


def _compile_overlapped(algorithm: Algorithm, template: PyTree) -> Step:
    """Playing and learning side by side."""
    assert isinstance(algorithm, Scared)
    return Overlapped(algorithm, template, partial(judge, algorithm))


def _compile(algorithm: Algorithm, config: TrainConfig, template: PyTree, mesh: Mesh | None) -> Step:
    """The jitted program; it reuses the memory of the state it is given."""
    is_shape = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)  # noqa: E731
    shapes, static = eqx.partition(template, is_shape)
    data, rest = eqx.partition(algorithm, eqx.is_array)  # a data set is an argument, not a constant of the program

    def chunk(arrays: PyTree, data: PyTree) -> tuple[PyTree, dict[str, jax.Array]]:
        update = lambda state: _guarded(eqx.combine(data, rest), state)  # noqa: E731
        if config.seeds > 1:
            over: dict[str, Any] = {} if mesh is None else {"spmd_axis_name": placing.SEEDS}
            update = eqx.filter_vmap(update, **over)

        def body(arrays: PyTree, _: None) -> tuple[PyTree, dict[str, jax.Array]]:
            state, metrics = update(eqx.combine(arrays, static))
            return eqx.filter(state, eqx.is_array), metrics

        return jax.lax.scan(body, arrays, length=config.chunk)

    options: dict[str, Any] = {"donate_argnums": 0}
    if mesh is not None:
        data, (held, whole) = placing.spread(data, mesh), (placing.sharding(mesh, n) for n in (config.seeds, 1))
        options |= {"in_shardings": (held, whole), "out_shardings": (held, whole)}
    with placing.using(mesh):
        compiled = jax.jit(chunk, **options).lower(shapes, data).compile()

    def step(state: PyTree) -> tuple[PyTree, dict[str, np.ndarray]]:
        arrays, metrics = compiled(eqx.filter(state, eqx.is_array), data)
        host = {name: np.asarray(value) for name, value in jax.device_get(metrics).items()}
        if config.seeds == 1:
            host = {name: value[:, None] for name, value in host.items()}
        return eqx.combine(arrays, static), host

    return step


def _close(step: Step | None) -> None:
    """Stop what a step still does in the background."""
    if isinstance(step, Overlapped):
        step.close()


def _described(mesh: Mesh | None) -> str:
    """The devices in words."""
    kind, there = jax.devices()[0].device_kind, len(jax.devices())
    if mesh is None:
        return kind if there == 1 else f"one of {there} devices ({kind})"
    of = "" if mesh.size == there else f" of {there}"
    hosted = f" in {hosts.count()} processes" if hosts.count() > 1 else ""
    return f"{mesh.size}{of} devices ({kind}){hosted}"


def _guarded(algorithm: Algorithm, state: PyTree) -> tuple[PyTree, dict[str, jax.Array]]:
    """One update, undone if it must not count."""
    who, made = f"{type(algorithm).__name__}.update", algorithm.update(state)
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], dict):
        raise UserError(f"{who} must return the new state and a dictionary of metrics, got a {type(made).__name__}")
    before, after = (
        {name: f"{x.dtype}{list(x.shape)}" for name, x in checkpoint.named_arrays(each).items()}
        for each in (state, made[0])
    )
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            changed = f"{name!r} was {before.get(name)}, is {after.get(name)}"
            raise UserError(f"{who} must keep the form of the state: {changed}")
    return judge(algorithm, state, *made)


def judge(
    algorithm: Algorithm, state: PyTree, new: PyTree, metrics: dict[str, jax.Array]
) -> tuple[PyTree, dict[str, jax.Array]]:
    """The new state; the old one if a number is not finite or the environment broke its contract (envs/faults.py).

    Only the random key moves on, and the fields that the algorithm names in `moves_on`.

    This is inside the jitted program, so the old state needs no copy on the host and each seed is judged by itself.
    """
    required = getattr(algorithm, "metrics", METRICS)
    needed = (*required, "fault") if required is METRICS else required
    missing = [name for name in needed if name not in metrics]
    if missing:
        raise UserError(f"{type(algorithm).__name__}.update must report the metric {missing[0]!r}")
    checked = [x for name, x in metrics.items() if name in required or "loss" in name or "grad" in name]
    floats = [x for x in jax.tree.leaves((new, checked)) if eqx.is_inexact_array(x)]
    finite = jnp.stack([jnp.isfinite(x).all() for x in floats]).all()
    fault = jnp.asarray(metrics.get("fault", NO_FAULT))
    finite &= fault[0] == NONE  # nothing is learned from a negative cost either
    # A branch is a copy; a select would be one more kernel to compile for every array of the state.
    arrays, static = eqx.partition(new, eqx.is_array)
    kept = jax.lax.cond(finite, lambda: arrays, lambda: eqx.filter(state, eqx.is_array))
    kept = eqx.tree_at(lambda s: s.key, eqx.combine(kept, static), new.key)
    for name in getattr(algorithm, "moves_on", ()):
        kept = dataclasses.replace(kept, **{name: getattr(new, name)})
    return kept, {**metrics, "rolled_back": ~finite, "fault": fault}


# -- between chunks -----------------------------------------------------------------------------------------


def _finished(config: TrainConfig, status: Status, started: float) -> bool:
    """A limit is reached, or the next chunk would overrun the time."""
    if config.iterations is not None and status.iteration >= config.iterations:
        return True
    if config.minutes is None or status.iteration == 0:  # however long compiling took, something must be learned
        return False
    return time.perf_counter() - started + status.pace > 60 * config.minutes


def _limit_reached(config: TrainConfig, status: Status) -> str:
    """Why a resumed run has nothing left to do."""
    if config.iterations is not None and status.iteration >= config.iterations:
        done, more = _times(status.iteration), status.iteration > config.iterations
        said = f"has done {done}, more than {config.iterations}" if more else f"has done its {done}"
        return f"{said}; a larger --iterations goes on"
    return f"has used its {config.minutes:g} minutes, {status.seconds / 60:.1f} of them; a larger --minutes goes on"


def _times(iterations: int) -> str:
    return f"{iterations} iteration{'' if iterations == 1 else 's'}"


def _account(
    values: dict[str, np.ndarray], status: Status, config: TrainConfig, physics_seconds: float = 0.0
) -> dict[str, np.ndarray]:
    """Move `status` on by one chunk; returns the chunk's metrics as [seed, ...], without its failures.

    `physics_share` is the share of the time in which the host's cores moved worlds. Without overlap the accelerator
    waits in that time, and acts and learns in the rest.
    """
    failed = values["rolled_back"].astype(bool)  # [chunk, seed]
    for now in failed:
        status.failures = [count + 1 if bad else 0 for count, bad in zip(status.failures, now, strict=True)]
    steps = np.where(np.isfinite(values["env_steps"]), values["env_steps"], 0.0)
    status.iteration += config.chunk
    status.env_steps += int(steps.mean(axis=1).sum())

    def mean(value: np.ndarray) -> np.ndarray:
        kept = ~failed.reshape(failed.shape + (1,) * (value.ndim - 2))
        count = np.broadcast_to(kept, value.shape).sum(axis=0)
        total = np.where(kept, value, 0.0).sum(axis=0)
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)

    sums = ("rolled_back", "env_steps", "tokens")
    means = {name: mean(value) for name, value in values.items() if name not in sums}
    means["steps_per_second"] = steps.sum(axis=0) / status.pace
    if "tokens" in values:
        means["tokens_per_second"] = values["tokens"].sum(axis=0) / status.pace
    if physics_seconds:
        means["physics_share"] = np.full(config.seeds, physics_seconds / status.pace)
    return {**means, "rolled_back": failed.sum(axis=0)}


def _log(
    values: dict[str, np.ndarray],
    status: Status,
    config: TrainConfig,
    sinks: list[Sink],
    terminal: Terminal,
    devices: int = 1,
) -> None:
    """One line for the log: means over seeds, and each seed's own value where there are several."""
    line: dict[str, Any] = {
        "iteration": status.iteration, "env_steps": status.env_steps, "seconds": round(status.seconds, 3),
    }  # fmt: skip
    means = {name: _finite_mean(value) for name, value in values.items()}
    means |= {name: value.sum() for name, value in values.items() if name.endswith("_per_second")}
    line |= means
    if devices > 1:
        each = {
            f"{name}_per_device": value / devices for name, value in means.items() if name.endswith("_per_second")
        }
        line |= {"devices": devices, **each}
    if config.seeds > 1:
        line |= {f"{name}/seeds": value for name, value in values.items()}
    for sink in sinks:
        sink.write(status.env_steps, line)
    if values["rolled_back"].any():
        which = ", ".join(str(seed) for seed, bad in zip(_seeds(config), values["rolled_back"], strict=True) if bad)
        terminal.say(f"iteration {status.iteration}: not finite, rolled back (seed {which})", style="yellow")
    terminal.progress(*_progress(means, status, config, devices))


def _finite_mean(value: np.ndarray) -> np.ndarray:
    """Mean over seeds, [seed, ...] → [...], without those rolled back; nan where none is left."""
    finite = np.isfinite(value)
    total, count = np.where(finite, value, 0.0).sum(axis=0), finite.sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _progress(means: dict[str, np.ndarray], status: Status, config: TrainConfig, devices: int) -> tuple[float, str]:
    """Share of the run done, and the line beside the bar."""
    shares, lefts = [], []
    if config.iterations is not None:
        shares.append(status.iteration / config.iterations)
        lefts.append((config.iterations - status.iteration) / config.chunk * status.pace)
    if config.minutes is not None:
        shares.append(status.seconds / (60 * config.minutes))
        lefts.append(60 * config.minutes - status.seconds)
    done, left = min(max(shares), 1.0), max(min(lefts), 0.0)
    rate = float(means["steps_per_second"])
    each = f" ({_short(rate / devices)} on each of {devices} devices)" if devices > 1 else ""
    return done, (
        f"it {status.iteration}  {_short(status.env_steps)} steps  {_short(rate)}/s{each}  "
        f"ETA {int(left // 60)}:{int(left % 60):02d}  {_numbers(means)}"
    )


def _numbers(means: dict[str, np.ndarray]) -> str:
    """The metrics to watch, for an algorithm that plays or for one that learns from histories."""
    if "return" in means:
        physics_share = f"  physics {means['physics_share']:.0%}" if "physics_share" in means else ""
        names = [name.removeprefix("costs/") for name in means if name.startswith("costs/")]
        costs = [f"{name} {means[f'costs/{name}']:.2f}/{means[f'budgets/{name}']:.2f}" for name in names]
        costs = costs or [f"cost {means['cost']:.2f}/{means['budget']:.2f}"]
        return (
            f"return {means['return']:.3f}  {'  '.join(costs)}  "
            f"over {means['over_budget']:.1%}  λ {means['lambda']:.3g}{physics_share}"
        )
    accuracy = f"  accuracy {means['accuracy']:.1%}" if "accuracy" in means else ""
    tokens = f"  {_short(float(means['tokens_per_second']))} tokens/s" if "tokens_per_second" in means else ""
    return f"loss {means['loss']:.4g}{accuracy}{tokens}" if "loss" in means else ""


def _short(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def _refuse_faults(faults: np.ndarray, status: Status, config: TrainConfig, env: Env) -> None:
    """Raise if the environment broke its contract in the chunk that ended; `faults` is [chunk, seed, 5]."""
    for late, each in enumerate(faults):
        for seed, fault in zip(_seeds(config), each, strict=True):
            where = [f"iteration {status.iteration - config.chunk + late + 1}, seed {seed}"]
            refuse_fault(fault, env_to_plain(env)["name"], where, env.spec)


def _give_up(status: Status, folder: Path) -> str:
    return (
        f"{FAILURES} iterations in a row were not finite, up to iteration {status.iteration}; they were rolled "
        f"back and {folder / CHECKPOINT} is sound: try a smaller learning rate"
    )


def _sinks(algorithm: Algorithm, config: TrainConfig, folder: Path, status: Status) -> list[Sink]:
    log = JsonLines(folder / "metrics.jsonl", keep_until=status.iteration, evaluated=status.evaluated)
    sinks: list[Sink] = [log]
    if config.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard"))
    if config.wandb is not None:
        sinks.append(WandB(config.wandb, folder, describe(algorithm.env, algorithm.config, config)))
    return sinks


# -- evaluation ---------------------------------------------------------------------------------------------


def _evaluate(
    algorithm: Algorithm,
    config: TrainConfig,
    folder: Path,
    state: PyTree,
    status: Status,
    sinks: list[Sink],
    terminal: Terminal,
    mesh: Mesh | None,
) -> list[Results]:
    """Evaluate every seed's frozen policy on unseen tasks, log it, and keep each seed's best."""
    results, options = [], config.evaluation
    for index, seed in enumerate(_seeds(config)):
        own = algorithm.agent(_select(state, index, config.seeds))
        agent, how = with_options(algorithm.env, own, temperature=options.temperature, wipe=options.wipe)
        found = evaluate(
            algorithm.env, agent, tasks=options.tasks, episodes=options.episodes, seed=options.seed,
            rows=options.rows, segments=options.segments, devices=mesh or 1,
            label=f"{folder.resolve().name}, in training",  # all seeds alike: they are drawn as one agent
            meta={"agent": f"seed {seed}", "iteration": status.iteration, **how},
        )  # fmt: skip
        results.append(found)
        summary, best = summarise(found), status.best[index]
        if best is None or rank(summary, options.tolerance) > rank(Summary(**best["summary"]), options.tolerance):
            status.best[index] = {"iteration": status.iteration, "summary": dataclasses.asdict(summary)}
            card = _card(algorithm, config, status, found, seed)
            # The checkpoint is written later: a run killed in between does this again when it is resumed.
            if hosts.is_first():
                save_policy(_policy_path(folder, seed), own, card, found)
    _log_evaluation(results, status, sinks, terminal)
    return results


def _log_evaluation(results: list[Results], status: Status, sinks: list[Sink], terminal: Terminal) -> None:
    names = ("total_return", "last_return", "over_budget", "over_budget_last", "cost")
    found = [summarise(result) for result in results]
    each = {name: np.array([getattr(summary, name) for summary in found]) for name in names}
    for cost in results[0].cost_names if results[0].several else ():
        own = [summarise(result.by_cost()[cost]) for result in results]
        each[f"costs/{cost}"] = np.array([summary.cost for summary in own])
        each[f"over_budgets/{cost}"] = np.array([summary.over_budget for summary in own])
    line: dict[str, Any] = {
        "iteration": status.iteration, "env_steps": status.env_steps, "seconds": round(status.seconds, 3),
        **{f"eval/{name}": value.mean() for name, value in each.items()},
    }  # fmt: skip
    if len(found) > 1:
        line |= {f"eval/{name}/seeds": value for name, value in each.items()}
    for sink in sinks:
        sink.write(status.env_steps, line)
    totals = " ".join(f"{value:.2f}" for value in each["total_return"])
    terminal.say(
        f"evaluation at iteration {status.iteration}: total return {totals} of {found[0].episodes} episodes, "
        f"{found[0].last_name} {each['last_return'].mean():.3f}, over budget {each['over_budget'].mean():.2%} "
        f"({found[0].last_name} {each['over_budget_last'].mean():.2%})"
    )


def _policy_path(folder: Path, seed: int) -> Path:
    return folder / f"best-seed{seed}.safetensors"


def _card(algorithm: Algorithm, config: TrainConfig, status: Status, results: Results, seed: int) -> dict[str, Any]:
    """What a released policy says about itself."""
    described, where = describe(algorithm.env, algorithm.config, config), surroundings()
    temperature = config.evaluation.temperature
    return {
        **algorithm.card(),
        "env": described["env"],
        **({} if temperature is None else {"temperature": temperature}),  # it acts as when it was chosen
        "training": {
            **{name: described[name] for name in ("algo", "train")},
            **{name: where[name] for name in ("command", "device", "safeicrl", "jax", "date")},
            "seed": seed,
            "iteration": status.iteration,
            "env_steps": status.env_steps,
            "minutes": math.ceil(status.seconds / 6) / 10,
        },
        "evaluation": {**results.meta, **summaries(results)},
        "limits": [
            f"trained on budgets {algorithm.env.spec.train_budget} and these environment parameters only",
            "a budget is kept in most episodes, never with certainty: over_by_budget says how often it was broken, "
            "trials_over in how many trials it was broken at least once",
        ],
    }
