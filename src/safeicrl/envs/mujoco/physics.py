"""One physics function, three engines: `step(job, state, ctrl)`, state in, state out.

- `c`: C MuJoCo through `mujoco.batch`, every world of a vmapped step in one host callback, on all cores. Always
  computes in double precision; what passes through JAX has JAX's precision.
- `planar`: Point's equations of motion in JAX, and an approximation of Car to pretrain in (planar.py).
- `euler`: as `c`, with two Euler steps for each RK4 step of Ant: an approximation to pretrain in, 1.8 times faster.

`auto` is the fastest engine that is exact: `planar` for Point, `c` for the rest. A world that turns non-finite is
held in its last good state and flagged; the others go on.
"""

import functools
import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.envs.api import Env, PyTree, Step, record, replace
from safeicrl.envs.mujoco import models
from safeicrl.envs.mujoco.planar import EXACT, PLANAR
from safeicrl.errors import UserError, check_integer, unknown_name
from safeicrl.machine.busy import BusyClock
from safeicrl.machine.devices import on_each

TOO_LARGE = 1e10  # a coordinate or velocity beyond this has diverged; MuJoCo's own limit


@record
class PhysicsState:
    """All a world needs to go on from where it is."""

    qpos: jax.Array  # [nq]
    qvel: jax.Array  # [nv]
    warmstart: jax.Array  # [nv] the solver's first guess of the accelerations
    # [2] the main body's xy when the engine last evaluated it. Under RK4 that is the integrator's last stage,
    # not `qpos`, and the original measures Ant's velocity between two of these.
    anchor: jax.Array


@record
class Motion:
    """What `step` returns: the world after each of the job's `repeats`."""

    states: PhysicsState  # [repeats, ...]; held at the last good one where `failed`
    failed: jax.Array  # [repeats] bool: diverged here or before


@record
class RobotState:
    """A world within an episode: the state of every MuJoCo environment."""

    physics: PhysicsState
    time: jax.Array  # [] int32, steps taken in this episode
    failed: jax.Array  # [] bool: the physics diverged, which ended the episode

    @classmethod
    def start(cls, qpos: jax.Array, qvel: jax.Array) -> "RobotState":
        """The first state of an episode."""
        qpos, qvel = jnp.asarray(qpos, float), jnp.asarray(qvel, float)
        physics = PhysicsState(qpos=qpos, qvel=qvel, warmstart=jnp.zeros_like(qvel), anchor=qpos[:2])
        return cls(physics=physics, time=jnp.int32(0), failed=jnp.bool_(False))


@dataclass(frozen=True)
class Job:
    """What to advance, by how much and with what: `repeats` times `substeps` physics steps."""

    robot: str
    substeps: int
    repeats: int = 1
    engine: str = "auto"

    def __post_init__(self) -> None:
        check_integer("substeps", self.substeps, 1)
        check_integer("repeats", self.repeats, 1)
        check_engine(self.robot, self.engine)


def step(job: Job, state: PhysicsState, ctrl: jax.Array) -> Motion:
    """Advance one world under constant `ctrl` [nu]; vmap it as you like, the engine sees one flat batch."""
    one_world = jax.tree.map(lambda x: x[None], (state, ctrl))
    return jax.tree.map(lambda x: x[0], _batched(job)(*one_world))


def check_engine(robot: str, engine: str) -> None:
    """Raise unless `engine` exists and can move `robot`."""
    if engine not in ("auto", *ENGINES):
        raise unknown_name("engine", engine, ("auto", *ENGINES))
    if engine == "planar" and robot not in PLANAR:
        raise UserError(f"engine 'planar' knows only the robots {', '.join(PLANAR)}, got {robot!r}")
    model = models.load(robot)
    if engine == "euler" and not models.uses_rk4(model):
        raise UserError(f"engine 'euler' replaces RK4, which MuJoCo does not use for the robot {robot!r}")


def resolve_engine(job: Job) -> str:
    """The engine that moves this job's worlds."""
    if job.engine != "auto":
        return job.engine
    return "planar" if job.robot in EXACT else "c"


def approximation(job: Job) -> str | None:
    """How the physics differ from the robot's real ones, for reports; None where they do not."""
    if job.engine == "euler" or (job.engine == "planar" and job.robot not in EXACT):
        return f"engine={job.engine} (an approximation of {job.robot.title().replace('_', '')})"
    return None


@functools.cache
def _batched(job: Job) -> Callable[[PhysicsState, jax.Array], Motion]:
    """`step` over [worlds, ...]. Nested vmaps are flattened into that one axis."""

    @jax.custom_batching.custom_vmap
    def advance(state: PhysicsState, ctrl: jax.Array) -> Motion:
        return ENGINES[resolve_engine(job)](job, state, ctrl)

    @advance.def_vmap
    def rule(size: int, is_batched: Any, *arguments: Any) -> tuple[Motion, Any]:
        def flatten(x: jax.Array, has_axis: bool) -> jax.Array:
            x = x if has_axis else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        motion = advance(*jax.tree.map(flatten, arguments, tuple(is_batched)))
        motion = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), motion)
        return motion, jax.tree.map(lambda _: True, motion)

    return advance


# ---------------------------------------------------------------------------- failures, threads and seconds


_failures = 0
_threads = 0
_moving = BusyClock()


def failures() -> int:
    """How many times a world diverged in this process and its episode was ended (engines `c` and `euler`)."""
    return _failures


def _report(failed: np.ndarray) -> None:
    """Count and warn of worlds that diverged in this step, [worlds] bool."""
    global _failures
    count = int(failed.sum())
    if count:
        with _lock:
            _failures += count
        warnings.warn(
            f"{count} of {failed.size} MuJoCo worlds diverged; their episodes ended and the others go on "
            f"({_failures} so far)",
            RuntimeWarning,
            stacklevel=2,
        )


def set_threads(count: int) -> None:
    """Use `count` threads for engines `c` and `euler`; 0, the default, means every core this process may run on."""
    global _threads
    _threads = check_integer("threads", count, 0)


def threads() -> int:
    """How many threads engines `c` and `euler` use."""
    return _threads or len(os.sched_getaffinity(0))


def seconds() -> float:
    """Wall time in which engines `c` and `euler` were moving worlds in this process."""
    return _moving.seconds


# ------------------------------------------------------------------------------------------- engine: C MuJoCo


_lock = threading.Lock()  # JAX may call back from several threads; a Batch serves one at a time


def pack(state: PhysicsState, ctrl: jax.Array) -> jax.Array:
    """States and controls of [worlds] as one array, [worlds, state and ctrl]."""
    return jnp.concatenate([state.qpos, state.qvel, state.warmstart, state.anchor, ctrl], axis=-1)


def unpack(robot: str, packed: jax.Array) -> Motion:
    """What the engine made of them, [worlds, repeats, state and failed]."""
    qpos, qvel, warmstart, anchor, failed = jnp.split(packed, _ends(robot), axis=-1)
    states = PhysicsState(qpos=qpos, qvel=qvel, warmstart=warmstart, anchor=anchor)
    return Motion(states=states, failed=failed[..., 0] > 0)


def state_size(robot: str) -> int:
    """Numbers in a packed state."""
    return _ends(robot)[-1]


def _ends(robot: str) -> list[int]:
    """Where the packed fields of a state end."""
    model = models.load(robot)
    return np.cumsum([model.nq, model.nv, model.nv, 2]).tolist()


def _advance_c(job: Job, state: PhysicsState, ctrl: jax.Array, euler: bool = False) -> Motion:
    # One array in and one out: JAX spends about 0.15 ms on each that crosses to the host. They cross as bits,
    # because the callback's thread does not know of a `with jax.enable_x64()` here and would round doubles.
    packed = pack(state, ctrl)
    dtype, width = packed.dtype, packed.shape[1] - ctrl.shape[1]
    words = (dtype.itemsize // 4,) * (dtype.itemsize > 4)  # a double is two 32-bit words, on an axis of their own
    host = functools.partial(_advance_bits, job, euler, np.dtype(dtype))

    def call(bits: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct((len(bits), job.repeats, width + 1, *words), jnp.uint32)
        return jax.pure_callback(host, shape, bits)

    packed = on_each(call, jax.lax.bitcast_convert_type(packed, jnp.uint32))
    return unpack(job.robot, jax.lax.bitcast_convert_type(packed, dtype))


def _advance_bits(job: Job, euler: bool, dtype: np.dtype, bits: jax.Array) -> np.ndarray:
    """The callback: `_advance_host` between arrays of 32-bit words."""
    words = np.asarray(bits)
    out = _advance_host(job, euler, words.view(dtype).reshape(words.shape[:2]))
    return out.view(np.uint32).reshape(*out.shape, *words.shape[2:])


def _advance_host(job: Job, euler: bool, packed: np.ndarray) -> np.ndarray:
    """[worlds, state and ctrl] → [worlds, repeats, state and failed]."""
    with _lock, _moving:  # the waiting for the lock is not counted
        out = _worlds(job.robot, euler, len(packed), threads()).advance(job, packed)
    _report(out[:, -1, -1] > 0)
    return out


class _Worlds:
    """A `mujoco.batch` of one robot with its arrays at hand: binding them anew costs more than the rest."""

    def __init__(self, robot: str, euler: bool, count: int, thread_count: int) -> None:
        import mujoco.batch

        self.model = models.load_euler(robot) if euler else models.load(robot)
        self.refinement = models.EULER_STEPS if euler else 1
        self.batch = mujoco.batch.Batch(self.model, count, min(thread_count, count))
        self.error = mujoco.batch.SimulationError
        self.qpos, self.qvel, self.ctrl = (self.batch.bind(name) for name in ("qpos", "qvel", "ctrl"))
        self.warmstart = self.batch.bind("qacc_warmstart")
        self.anchor = (self.batch.bind("xpos")[:, 1] if models.uses_rk4(self.model) else self.qpos)[:, :2]
        self.ends = _ends(robot)

    def advance(self, job: Job, packed: np.ndarray) -> np.ndarray:
        """What `_advance_host` returns."""
        qpos, qvel, warmstart, width = self.ends
        start = packed[:, :width]
        self.qpos[:], self.qvel[:] = start[:, :qpos], start[:, qpos:qvel]
        self.warmstart[:], self.ctrl[:] = start[:, qvel:warmstart], packed[:, width:]
        out = np.empty((len(packed), job.repeats, width + 1), packed.dtype)
        bad = ~_sound(packed)
        for i in range(job.repeats):
            if bad.any():
                self._park(bad)
            bad = bad | self._run(job.substeps * self.refinement) | ~(_sound(self.qpos) & _sound(self.qvel))
            row = out[:, i]
            row[:, :qpos], row[:, qpos:qvel], row[:, qvel:warmstart] = self.qpos, self.qvel, self.warmstart
            row[:, warmstart:width], row[:, width] = self.anchor, bad
            if bad.any():
                row[bad, :width] = (out[:, i - 1, :width] if i else start)[bad]
        return out

    def _run(self, substeps: int) -> np.ndarray:
        """Step all worlds; which of them MuJoCo raised an error in, [worlds]."""
        broken = np.zeros(len(self.qpos), bool)
        try:
            self.batch.step(nstep=substeps)
        except self.error as error:
            broken[error.ids] = True
        return broken

    def _park(self, bad: np.ndarray) -> None:
        """Put failed worlds into the rest pose, so that MuJoCo does not compute with what broke them."""
        self.qpos[bad] = self.model.qpos0
        self.qvel[bad] = self.warmstart[bad] = self.ctrl[bad] = 0.0


_worlds = functools.lru_cache(maxsize=8)(_Worlds)


class Moved(Env, Protocol):
    """An environment whose step is `physics.step` with something before it and after it.

    That is, `after(state, action, physics.step(job, state.physics, control(action)), task)`. Whoever drives the
    physics from the host calls the parts.
    """

    @property
    def job(self) -> Job:
        """The physics of one step."""
        ...

    def control(self, action: jax.Array) -> jax.Array:
        """What the motors are told, [nu]."""
        ...

    def after(self, state: RobotState, action: jax.Array, motion: Motion, task: PyTree) -> tuple[RobotState, Step]:
        """What the motion of one step led to."""
        ...


class HostWorlds:
    """Worlds of engine `c` or `euler` that are driven from the host, without a callback.

    Each has a batch and threads of its own, so several may move at the same time, each called by one thread.
    """

    def __init__(self, job: Job, count: int) -> None:
        self.job = job
        self.worlds = _Worlds(job.robot, resolve_engine(job) == "euler", count, threads())

    def advance(self, packed: np.ndarray) -> np.ndarray:
        """[worlds, state and ctrl] of `pack` → [worlds, repeats, state and failed], for `unpack`."""
        with _moving:
            out = self.worlds.advance(self.job, packed)
        _report(out[:, -1, -1] > 0)
        return out


def _sound(values: np.ndarray) -> np.ndarray:
    """Which rows MuJoCo can compute with, [worlds]; NaN compares false."""
    return np.abs(values).max(axis=1) < TOO_LARGE


# --------------------------------------------------------------------------------------------- engine: planar


def _diverged(state: PhysicsState) -> jax.Array:
    """Which worlds left the numbers MuJoCo can compute with, [worlds]."""
    values = jnp.concatenate([state.qpos, state.qvel], axis=-1)
    return ~(jnp.abs(values) < TOO_LARGE).all(-1)  # NaN compares false


def _advance_planar(job: Job, state: PhysicsState, ctrl: jax.Array) -> Motion:
    """A robot of planar.py; worlds that diverge are held."""

    def hold(failed: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(failed[:, None], old, new)

    def body(carry: tuple[PhysicsState, jax.Array], _: None) -> Any:
        old, failed = carry
        qpos, qvel = PLANAR[job.robot](old.qpos, old.qvel, ctrl, job.substeps)
        new = replace(old, qpos=qpos, qvel=qvel, anchor=qpos[:, :2])
        failed = failed | _diverged(new)
        new = jax.tree.map(functools.partial(hold, failed), old, new)
        return (new, failed), (new, failed)

    failed = _diverged(state) | ~jnp.isfinite(ctrl).all(-1)
    _, (states, failed) = jax.lax.scan(body, (state, failed), length=job.repeats)
    states, failed = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), (states, failed))
    return Motion(states=states, failed=failed)


ENGINES: dict[str, Callable[[Job, PhysicsState, jax.Array], Motion]] = {
    "c": _advance_c,
    "euler": functools.partial(_advance_c, euler=True),
    "planar": _advance_planar,
}
