"""The Gymnasium face of every environment, for third-party learners and for stepping by hand.

    env = gymnasium.make("safeicrl/SafeDarkRoom-v0", size=9, obstacles=25, split="test", render_mode="ansi")
    observation, info = env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step(1)     # info["cost"]

With several costs `info["cost"]` is the vector of them, in the order of `spec.costs`, as `policy.act` takes it, and
`info["costs"]` has each by its name.

The task stays the same across episodes: in-context learning needs that. A new task is drawn at the first reset, at
`reset(seed=...)` (a seed fixes both the task and the episode) and at `reset(options={"new_task": True})`. A plain
`reset()` never changes it. `reset(options={"task": ...})` sets a task laid out by hand, which stays until a new one
is drawn. `env.unwrapped.task` and `render()` show what an agent must not see.

`gymnasium.make_vec` makes one compiled program of many environments (gym_vector.py). JAX does not survive a fork:
`AsyncVectorEnv` needs `context="spawn"`.
"""

import copy
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from safeicrl.envs import draw
from safeicrl.envs.api import Env, PyTree, check_split
from safeicrl.envs.dark_mujoco import Arena, SafeDarkMujoco
from safeicrl.envs.dark_room import Room, RoomState, SafeDarkRoom
from safeicrl.envs.mujoco import scene
from safeicrl.envs.mujoco.physics import RobotState
from safeicrl.envs.registry import WORLDS, make_env, name_of, parameters_of
from safeicrl.envs.safe_velocity import SafeVelocity, SpeedLimit
from safeicrl.envs.spaces import Box, Discrete, Grid
from safeicrl.errors import UnknownParameter, UserError, check_integer, unknown_name


class Face:
    """What differs between environments. These defaults fit any; registry.py names the subclass of each."""

    render_modes: tuple[str, ...] = ()
    render_fps: int = 8
    options: tuple[str, ...] = ()  # names that `begin` understands in reset(options=...)
    dtype: type = np.float32  # of real-valued observations and actions; float64 runs the whole world in it

    def make_task(self, env: Any, layout: Mapping[str, Any]) -> PyTree:
        """The task a user described in `reset(options={"task": layout})`."""
        raise UserError(f"{type(env).__name__} has no tasks laid out by hand; use reset(seed=...)")

    def begin(self, env: Any, state: PyTree, observation: Any, options: Mapping[str, Any]) -> tuple:
        """State and observation an episode starts from, given the other reset options."""
        return state, observation

    def info(self, env: Any, state: PyTree) -> dict[str, Any]:
        """What `info` holds besides the cost."""
        return {}

    def render(self, env: Any, task: PyTree, state: PyTree, path: Sequence[np.ndarray], mode: str) -> Any:
        """A frame; `path` are the observations of this episode so far."""
        raise NotImplementedError


class DarkRoomFace(Face):
    """Tasks are a goal cell and obstacle cells; frames show them with the cells visited and the agent."""

    render_modes = ("rgb_array", "ansi")

    def make_task(self, env: SafeDarkRoom, layout: Mapping[str, Any]) -> Room:
        """From `{"goal": (row, column), "obstacles": [(row, column), ...]}` or a `Room`."""
        if isinstance(layout, Room):
            return layout
        _check_entries(layout, ("goal", "obstacles"))
        if "goal" not in layout:
            raise UserError("task must name its 'goal' cell, as in {'goal': (0, 8), 'obstacles': [(3, 4)]}")
        return env.make_task(layout["goal"], layout.get("obstacles", ()))

    def render(self, env: SafeDarkRoom, task: Room, state: RoomState, path: Sequence[np.ndarray], mode: str) -> Any:
        """The room from above."""
        goal = divmod(int(task.goal), env.size)
        obstacles = [divmod(int(cell), env.size) for cell in np.flatnonzero(task.obstacles)]
        cells = [(int(row), int(column)) for row, column in path]
        paint = draw.room_image if mode == "rgb_array" else draw.room_text
        return paint(env.size, goal, obstacles, cells)


class RobotFace(Face):
    """MuJoCo worlds, in double precision: reset can set any physical state, and `info` has it at every step."""

    render_modes = ("rgb_array",)
    options = ("qpos", "qvel")
    dtype = np.float64

    def begin(self, env: Any, state: RobotState, observation: Any, options: Mapping[str, Any]) -> tuple:
        """From the given `qpos` and `qvel`; one of them alone leaves the other as reset drew it."""
        if not options:
            return state, observation
        given = {"qpos": np.asarray(state.physics.qpos), "qvel": np.asarray(state.physics.qvel)}
        for name, value in options.items():
            given[name] = _real_vector(name, value, len(given[name]))
        return env.reset_to(given["qpos"], given["qvel"])

    def info(self, env: Any, state: RobotState) -> dict[str, Any]:
        """The physical state, and whether the physics diverged, which ends the episode; of one world or a batch."""
        qpos, qvel, failed = (np.array(x) for x in (state.physics.qpos, state.physics.qvel, state.failed))
        return {"qpos": qpos, "qvel": qvel, "diverged": failed if failed.ndim else bool(failed)}


class DarkMujocoFace(RobotFace):
    """Tasks are goal and hazard positions; frames show them from above with the robot."""

    render_fps = 10

    def make_task(self, env: SafeDarkMujoco, layout: Mapping[str, Any]) -> Arena:
        """From `{"goal": (x, y), "hazards": [(x, y), ...]}` or an `Arena`."""
        if isinstance(layout, Arena):
            return layout
        _check_entries(layout, ("goal", "hazards"))
        if "goal" not in layout or "hazards" not in layout:
            raise UserError(
                "task must name 'goal' and 'hazards', as in {'goal': (1, 0), 'hazards': [(0.5, 0.8), ...]}"
            )
        return env.make_task(layout["goal"], layout["hazards"])

    def render(
        self, env: SafeDarkMujoco, task: Arena, state: RobotState, path: Sequence[np.ndarray], mode: str
    ) -> Any:
        """The arena, seen from above and slightly aside."""
        return scene.picture(env, task, state.physics.qpos)


class VelocityFace(RobotFace):
    """Tasks are multipliers of the speed limit; frames follow the robot."""

    render_fps = 20

    def make_task(self, env: SafeVelocity, layout: Any) -> SpeedLimit:
        """From a number, `{"multiplier": number}` or a `SpeedLimit`."""
        if isinstance(layout, SpeedLimit):
            return layout
        if isinstance(layout, Mapping):
            _check_entries(layout, ("multiplier",))
            layout = layout.get("multiplier")
        return env.make_task(layout)

    def render(
        self, env: SafeVelocity, task: SpeedLimit, state: RobotState, path: Sequence[np.ndarray], mode: str
    ) -> Any:
        """The robot from its side."""
        return scene.picture(env, task, state.physics.qpos)


def _check_entries(layout: Any, known: tuple[str, ...]) -> None:
    if not isinstance(layout, Mapping):
        raise UserError(f"task must be a dict of {' and '.join(map(repr, known))}, got {layout!r}")
    for name in layout:
        if name not in known:
            raise unknown_name("entry of a task", name, known)


def _real_vector(name: str, value: Any, size: int) -> np.ndarray:
    try:
        vector = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        vector = np.empty(0)
    if vector.shape != (size,) or not np.isfinite(vector).all():
        raise UserError(f"{name} must be {size} finite numbers, got {value!r}")
    return vector


def face_of(env: Env) -> Face:
    """The face of a registered environment; for any other, the one with the defaults."""
    name = name_of(env)
    return globals()[WORLDS[name].face]() if name else Face()


def world(env: str | Env, parameters: Mapping[str, Any]) -> Env:
    """The environment that a face was asked for: by its name and parameters, or as an object."""
    if not isinstance(env, str):
        if parameters:
            raise UserError(f"{next(iter(parameters))!r} is a parameter for an environment given by name")
        return env
    known = parameters_of(env)
    for name in parameters if known is not None else ():
        if name not in (known or ()):
            # a TypeError, too: Gymnasium's users pass what an environment may not have, and catch that
            others = {*(known or ()), "split", "render_mode"}
            raise UnknownParameter(str(unknown_name(f"parameter of {env}", name, others)))
    # a spec that was stored as JSON has lists, and environments must hash
    return make_env(env, **{name: tuple(x) if isinstance(x, list) else x for name, x in parameters.items()})


def gym_spec(env: Env) -> EnvSpec | None:
    """What `gymnasium.make` needs to make this environment again; None for one without a Gymnasium name."""
    name = name_of(env)
    if name is None or WORLDS[name].gym_id is None:
        return None
    usual = make_env(name)
    changed = {f.name: getattr(env, f.name) for f in dataclasses.fields(env)}  # type: ignore[arg-type]
    changed = {field: value for field, value in changed.items() if value != getattr(usual, field)}
    spec = copy.deepcopy(gymnasium.spec(str(WORLDS[name].gym_id)))
    spec.kwargs |= changed
    return spec


def precision(face: Face) -> AbstractContextManager:
    """Within it, JAX computes in the face's own type."""
    return jax.enable_x64(True) if face.dtype is np.float64 else nullcontext()


_forked = False  # whether this process is a fork of one that had used JAX


def _note_fork() -> None:
    global _forked
    from jax._src import xla_bridge  # JAX has no public way to ask

    _forked = _forked or xla_bridge.backends_are_initialized()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_note_fork)


def refuse_fork() -> None:
    """Raise where JAX would hang for ever."""
    if _forked:
        raise UserError(
            "this process was forked from one that had used JAX, which does not survive that: start it by spawn, "
            "as in gymnasium.make_vec(id, vectorization_mode='async', vector_kwargs={'context': 'spawn'})"
        )


class GymEnv(gymnasium.Env):
    """Any safeicrl environment, by name or as an object, behind Gymnasium's interface."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array", "ansi"], "render_fps": 8}  # noqa: RUF012

    def __init__(
        self, env: str | Env, *, split: str = "train", render_mode: str | None = None, **parameters: Any
    ) -> None:
        env = world(env, parameters)
        self.env, self.split = env, check_split(split)
        self.face = face_of(env)
        self.metadata = {"render_modes": list(self.face.render_modes), "render_fps": self.face.render_fps}
        if render_mode is not None and render_mode not in self.face.render_modes:
            raise unknown_name("render mode", render_mode, self.face.render_modes)
        self.render_mode = render_mode
        self.observation_space = gym_space(env.spec.observation, self.face.dtype)
        self.action_space = gym_space(env.spec.action, self.face.dtype)
        self.task: PyTree = None
        self._compiled = compiled(env)  # type: ignore[arg-type]  # a frozen dataclass hashes
        self._path: list[np.ndarray] = []  # observations of this episode
        self._over = True

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple:
        """Start an episode; the module's docstring says when it also starts a new task."""
        refuse_fork()
        if options is not None and not isinstance(options, Mapping):
            raise UserError(f"options of a reset must be a dict, got {options!r:.60}")
        super().reset(seed=None if seed is None else check_integer("seed", seed, 0, 2**63 - 1))
        options = dict(options or {})
        layout, new_task = options.pop("task", None), options.pop("new_task", False)
        for name in options:
            if name not in self.face.options:
                raise unknown_name("reset option", name, ("task", "new_task", *self.face.options))
        with precision(self.face):
            task_key, self._key = self._compiled.keys(self.np_random.integers(2**32, dtype=np.uint32))
            if layout is not None:
                self.task = jax.device_put(self.face.make_task(self.env, layout), cpu())
            elif self.task is None or seed is not None or new_task:
                self.task = self._compiled.sample(task_key, self.split)
            state, observation = self._compiled.reset(self._key, self.task)
            self._state, observation = self.face.begin(self.env, state, observation, options)
        self._over = False
        observation = self._to_gym(observation)
        self._path = [observation.copy()]
        nothing = [0.0] * len(self.env.spec.costs)
        return observation, {**costs_info(self.env, nothing), **self.face.info(self.env, self._state)}

    def step(self, action: Any) -> tuple:
        """One step: observation, reward, terminated, truncated, info with the step's cost."""
        if self._over:
            raise UserError("the episode is over; call reset() before step()")
        action = self.env.spec.action.check_action(action, self.face.dtype)
        now = np.uint32(len(self._path))
        with precision(self.face):
            self._state, seen, outcome = self._compiled.step(self._key, now, self._state, action, self.task)
        reward, *costs, terminated, truncated = np.asarray(outcome).tolist()
        self._over = bool(terminated or truncated)
        observation = self._to_gym(seen)
        self._path.append(observation.copy())
        info = {**costs_info(self.env, costs), **self.face.info(self.env, self._state)}
        return observation, reward, bool(terminated), bool(truncated), info

    def render(self) -> Any:
        """A frame in the render mode chosen at construction; None without one."""
        if self.render_mode is None:
            return None
        if not self._path:
            raise UserError("nothing to render yet; call reset() first")
        return self.face.render(self.env, self.task, self._state, self._path, self.render_mode)

    def _to_gym(self, observation: Any) -> np.ndarray:
        return np.array(observation, self.observation_space.dtype)  # a copy: callers may keep it


def costs_info(env: Env, costs: Sequence[float]) -> dict[str, Any]:
    """What `info` says about the costs of a step: one number; or all in a vector, and each by its name."""
    if not env.spec.several:
        return {"cost": np.float64(costs[0])}
    named = zip(env.spec.costs, costs, strict=True)
    return {"cost": np.array(costs, np.float64), "costs": {name: np.float64(cost) for name, cost in named}}


class _Compiled(NamedTuple):
    keys: Callable
    sample: Callable
    reset: Callable
    step: Callable


@lru_cache(maxsize=64)
def compiled(env: Env) -> _Compiled:
    """The jitted functions of one environment, shared by all its faces so that each is traced once.

    They always run on the CPU, because the key they start from is committed to it: one step is far too little work
    for an accelerator. Most of the time then goes into calls from Python. Therefore a step returns its numbers as
    one array, and its random key is made from the episode's key and the time.
    """

    def step(key: jax.Array, time: jax.Array, state: PyTree, action: jax.Array, task: PyTree) -> tuple:
        state, step = env.step(jax.random.fold_in(key, time), state, action, task)
        numbers = (step.reward, *env.spec.each_cost(step.cost), step.terminated, step.truncated)
        return state, step.observation, jnp.stack([jnp.asarray(x, jnp.result_type(float)) for x in numbers])

    split_seed = jax.jit(lambda seed: jax.random.split(jax.random.key(seed)))
    return _Compiled(
        keys=lambda seed: split_seed(jax.device_put(seed, cpu())),
        sample=jax.jit(env.sample_task, static_argnums=1),
        reset=jax.jit(lambda key, task: env.reset(jax.random.fold_in(key, 0), task)),
        step=jax.jit(step),
    )


def cpu() -> jax.Device:
    """The device that faces run on."""
    return jax.local_devices(backend="cpu")[0]


def gym_space(space: Grid | Box | Discrete, dtype: type) -> spaces.Space:
    """Gymnasium's space for one of ours."""
    if isinstance(space, Discrete):
        return spaces.Discrete(space.n)
    if isinstance(space, Grid):
        return spaces.MultiDiscrete(np.array(space.sizes))
    return spaces.Box(space.low, space.high, (space.size,), dtype)
