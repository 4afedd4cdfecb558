"""How each world looks on the page: a room from above, an arena from above, a track from the side or from above.

A scene turns a world's state into a few numbers inside the compiled program (`look`), and those into what the page
draws (`picture`). Tasks go both ways as plain JSON.
"""

import functools
import math
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.envs.api import Env, PyTree
from safeicrl.envs.dark_mujoco import EXTENT, GOAL_RADIUS, HAZARD_RADIUS, SafeDarkMujoco
from safeicrl.envs.dark_room import ACTIONS, SafeDarkRoom
from safeicrl.envs.mujoco import models
from safeicrl.envs.mujoco.physics import resolve_engine
from safeicrl.envs.safe_velocity import SafeVelocity
from safeicrl.errors import UserError
from safeicrl.show.play.messages import Drawn, Refused
from safeicrl.show.shoot import unwrapped


class Scene:
    """A world that the page has no picture of: curves and the budget's bar only."""

    kind = "plain"
    rows = 8  # trials in a batch: a turn of eight costs little more than a turn of one

    def __init__(self, env: Any) -> None:
        self.env = env

    def describe(self) -> dict[str, Any]:
        """What the page must know before it draws."""
        return {"kind": self.kind}

    def plain_task(self, task: PyTree) -> dict[str, Any]:
        """The task for the page."""
        return {}

    def drawn_task(self, room: Drawn) -> PyTree:
        """The task that a visitor drew, or `Refused`."""
        raise Refused("in this world, tasks cannot be drawn: give a seed")

    def look(self, before: PyTree, after: PyTree) -> jax.Array:
        """What `picture` needs of two states, one step apart, [number]; pure, for one row."""
        return jnp.zeros(0)

    def picture(self, numbers: Any) -> dict[str, Any]:
        """What the page draws of `look`'s numbers."""
        return {}


class RoomScene(Scene):
    """A grid of cells."""

    kind = "room"
    env: SafeDarkRoom

    def describe(self) -> dict[str, Any]:
        """Size, start and the names of the actions."""
        start = list(divmod(self.env.start, self.env.size))
        return {"kind": self.kind, "size": self.env.size, "start": start, "actions": list(ACTIONS)}

    def plain_task(self, task: PyTree) -> dict[str, Any]:
        """Cells as (row, column)."""
        size = self.env.size
        cells = np.argwhere(np.asarray(task.obstacles).reshape(size, size))
        return {"goal": list(divmod(int(task.goal), size)), "obstacles": cells.tolist()}

    def drawn_task(self, room: Drawn) -> PyTree:
        """The room, unless the environment refuses it."""
        try:
            return self.env.make_task(room.goal, list(room.obstacles))
        except UserError as error:
            raise Refused(str(error)) from None

    def look(self, before: PyTree, after: PyTree) -> jax.Array:
        """Row and column."""
        return self.env.observe(after.cell).astype(jnp.float32)

    def picture(self, numbers: Any) -> dict[str, Any]:
        """The agent's cell."""
        return {"cell": [int(x) for x in numbers]}


class ArenaScene(Scene):
    """A robot among discs, from above."""

    kind = "arena"
    env: SafeDarkMujoco

    def __init__(self, env: SafeDarkMujoco) -> None:
        super().__init__(env)
        if resolve_engine(env.job) != "planar":
            self.rows = 2  # MuJoCo takes most of a turn, and moves idle rows too

    def describe(self) -> dict[str, Any]:
        """The radii and the arena's half side, metres."""
        sizes = {"extent": EXTENT, "goal_radius": GOAL_RADIUS, "hazard_radius": HAZARD_RADIUS}
        return {"kind": self.kind, "robot": self.env.robot, **sizes}

    def plain_task(self, task: PyTree) -> dict[str, Any]:
        """Places as (x, y), metres."""
        return {"goal": _rounded(task.goal), "hazards": [_rounded(place) for place in np.asarray(task.hazards)]}

    def look(self, before: PyTree, after: PyTree) -> jax.Array:
        """The joints."""
        return after.physics.qpos

    def picture(self, numbers: Any) -> dict[str, Any]:
        """Place and heading."""
        if len(numbers) == 3:  # Point: x, y, yaw
            heading = float(numbers[2])
        else:  # a free joint; Car's front is −y
            w, x, y, z = (float(part) for part in numbers[3:7])
            heading = math.atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z)) - math.pi / 2
        return {"place": _rounded(numbers[:2]), "heading": round(heading, 3)}


class TrackScene(Scene):
    """A running robot: its body and its speed against the limit."""

    kind = "track"
    rows = 2
    env: SafeVelocity

    def describe(self) -> dict[str, Any]:
        """Whether it is seen from the side."""
        return {"kind": self.kind, "robot": self.env.robot, "side": self.env.upright}

    def plain_task(self, task: PyTree) -> dict[str, Any]:
        """The limit, m/s."""
        return {"limit": round(float(task.multiplier) * self.env.base_limit, 3)}

    def look(self, before: PyTree, after: PyTree) -> jax.Array:
        """The joints, and the speed that is limited."""
        return jnp.append(after.physics.qpos, self.env.speed(before.physics, after.physics))

    def picture(self, numbers: Any) -> dict[str, Any]:
        """The body's parts as (x, y, x, y, radius), y upwards or to the left; where it is; its speed."""
        parts = _skeleton(self.env.robot).parts(numbers[:-1], (0, 2) if self.env.upright else (0, 1))
        place = [numbers[0], 0.0 if self.env.upright else numbers[1]]
        return {"body": parts, "place": _rounded(place), "speed": round(float(numbers[-1]), 3)}


class _Skeleton:
    """Where the parts of a robot are, by MuJoCo's kinematics."""

    def __init__(self, robot: str) -> None:
        import mujoco

        self._mujoco, self._model = mujoco, models.load(robot)
        self._data, self._lock = mujoco.MjData(self._model), threading.Lock()
        kinds = self._model.geom_type
        self._geoms = np.flatnonzero(np.isin(kinds, [mujoco.mjtGeom.mjGEOM_CAPSULE, mujoco.mjtGeom.mjGEOM_SPHERE]))
        half = np.where(kinds == mujoco.mjtGeom.mjGEOM_CAPSULE, self._model.geom_size[:, 1], 0.0)
        self._half, self._radius = half[self._geoms], self._model.geom_size[self._geoms, 0]

    def parts(self, qpos: np.ndarray, plane: tuple[int, int]) -> list[list[float]]:
        with self._lock:
            self._data.qpos[:] = qpos
            self._mujoco.mj_kinematics(self._model, self._data)
            centre = self._data.geom_xpos[self._geoms]
            axis = self._data.geom_xmat[self._geoms].reshape(-1, 3, 3)[:, :, 2] * self._half[:, None]
        ends = np.concatenate([(centre - axis)[:, plane], (centre + axis)[:, plane], self._radius[:, None]], 1)
        return [_rounded(part) for part in ends]


_skeleton = functools.cache(_Skeleton)


def _rounded(values: Any) -> list[float]:
    return [round(float(value), 3) for value in np.asarray(values)]


def scene_of(env: Env) -> Scene:
    """The scene of a world, or the one without a picture."""
    world = unwrapped(env)
    if isinstance(world, SafeDarkRoom):
        return RoomScene(world)
    if isinstance(world, SafeDarkMujoco):
        return ArenaScene(world)
    return TrackScene(world) if isinstance(world, SafeVelocity) else Scene(world)
