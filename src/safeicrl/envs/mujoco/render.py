"""Pictures of the MuJoCo worlds, drawn offscreen; OpenGL is loaded when the first frame is asked for."""

import atexit
import ctypes.util
import functools
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from safeicrl.envs.mujoco import models
from safeicrl.errors import UserError

SIZE = 480  # pixels, width and height
OFFSCREEN = ("egl", "osmesa")


@dataclass(frozen=True)
class Disc:
    """A flat round mark on the floor."""

    centre: tuple[float, float]
    radius: float
    colour: tuple[int, int, int]  # red, green, blue, 0 … 255


@dataclass(frozen=True)
class View:
    """Where the camera stands."""

    distance: float  # metres
    elevation: float  # degrees; −90 looks straight down
    azimuth: float = 90.0
    follow: bool = False  # look at the robot instead of the origin


def frame(robot: str, qpos: np.ndarray, view: View, discs: Sequence[Disc] = ()) -> np.ndarray:
    """The robot at `qpos`, [SIZE, SIZE, 3] uint8."""
    # A GL context belongs to the thread that made it.
    return _painter(robot, threading.get_ident()).paint(qpos, view, discs)


@functools.lru_cache(maxsize=4)
def _painter(robot: str, thread: int) -> "_Painter":
    return _Painter(robot)


class _Painter:
    """One robot's scene and the GL context it is drawn in."""

    def __init__(self, robot: str) -> None:
        self.model = models.load(robot)
        self.context = _make_context()
        import mujoco

        self.context.make_current()
        self.data = mujoco.MjData(self.model)
        self.scene = mujoco.MjvScene(self.model, maxgeom=200)
        self.drawing = mujoco.MjrContext(self.model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self.drawing)

    def paint(self, qpos: np.ndarray, view: View, discs: Sequence[Disc]) -> np.ndarray:
        import mujoco

        self.context.make_current()
        self.data.qpos[:] = qpos
        mujoco.mj_kinematics(self.model, self.data)
        mujoco.mj_camlight(self.model, self.data)
        camera = mujoco.MjvCamera()
        camera.distance, camera.elevation, camera.azimuth = view.distance, view.elevation, view.azimuth
        if view.follow:
            camera.lookat[:] = self.data.xpos[1]
        option, perturb, every = mujoco.MjvOption(), mujoco.MjvPerturb(), mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(self.model, self.data, option, perturb, camera, every.value, self.scene)
        for disc in discs:
            self._add(disc)
        image = np.empty((SIZE, SIZE, 3), np.uint8)
        rectangle = mujoco.MjrRect(0, 0, SIZE, SIZE)
        mujoco.mjr_render(rectangle, self.scene, self.drawing)
        mujoco.mjr_readPixels(image, None, rectangle, self.drawing)
        return np.flipud(image).copy()  # OpenGL counts rows from below

    def _add(self, disc: Disc) -> None:
        import mujoco

        mujoco.mjv_initGeom(
            self.scene.geoms[self.scene.ngeom],
            type=mujoco.mjtGeom.mjGEOM_CYLINDER,
            size=np.array([disc.radius, 0.004, 0.0]),
            pos=np.array([*disc.centre, 0.004]),
            mat=np.eye(3).ravel(),
            rgba=np.array([*disc.colour, 255], np.float32) / 255,
        )
        self.scene.ngeom += 1


def _make_context() -> Any:
    """A GL context without a screen: the one MUJOCO_GL names, else OSMesa if it is installed, else EGL."""
    found = "osmesa" if ctypes.util.find_library("OSMesa") else "egl"
    name = os.environ.get("MUJOCO_GL", "").lower()
    name = name if name in OFFSCREEN else found
    try:
        # PyOpenGL decides once in a process; it must be told before it is imported.
        os.environ.setdefault("PYOPENGL_PLATFORM", name)
        if name == "egl":
            from mujoco.egl import GLContext
        else:
            from mujoco.osmesa import GLContext
        context = GLContext(SIZE, SIZE)
        # Contexts must go before the library they call shuts down, which registered its own end when imported.
        atexit.register(_painter.cache_clear)
        return context
    except Exception as error:  # whatever a missing or half-installed driver raises
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"rendering needs EGL or OSMesa (Debian, Ubuntu: apt-get install libosmesa6); {name} said: {reason}"
        ) from None
