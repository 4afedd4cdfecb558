"""How the MuJoCo worlds look: rendered by MuJoCo, or drawn from positions where nothing can be rendered."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from safeicrl.envs import draw
from safeicrl.envs.api import PyTree
from safeicrl.envs.dark_mujoco import EXTENT, GOAL_RADIUS, HAZARD_RADIUS, SafeDarkMujoco
from safeicrl.envs.mujoco import render

ABOVE = render.View(distance=4.6, elevation=-70.0)  # the arena, from above and slightly aside
OVER = render.View(distance=5.0, elevation=-60.0, follow=True)  # a running robot, from above as well
BESIDE = render.View(distance=4.0, elevation=-15.0, follow=True)  # one that moves in an upright plane
MARGIN = 0.3  # metres drawn around the arena
REACH = 2.5  # metres drawn on each side of a running robot


def picture(env: Any, task: PyTree, qpos: Any) -> np.ndarray:
    """The robot at `qpos` in its world, rendered, [pixels, pixels, 3] uint8; a `UserError` where none can be."""
    view = ABOVE if isinstance(env, SafeDarkMujoco) else BESIDE if env.upright else OVER
    return render.frame(env.robot, np.asarray(qpos), view, discs(env, task))


def discs(env: Any, task: PyTree) -> list[render.Disc]:
    """What lies on the floor: hazards and the goal of an arena, nothing on a track."""
    if not isinstance(env, SafeDarkMujoco):
        return []
    marks = [(place, HAZARD_RADIUS, draw.OBSTACLE) for place in np.asarray(task.hazards)]
    marks.append((np.asarray(task.goal), GOAL_RADIUS, draw.GOAL))
    return [render.Disc(tuple(place.tolist()), radius, colour) for place, radius, colour in marks]


def drawing(env: Any, task: PyTree, path: Sequence[np.ndarray], pixels: int = 240) -> np.ndarray:
    """The same from above with nothing but numpy; `path` is qpos of this episode so far, the robot's last."""
    arena = isinstance(env, SafeDarkMujoco)
    places = [place_of(env, qpos) for qpos in path]
    middle = np.zeros(2) if arena else places[-1]
    half = EXTENT + MARGIN if arena else REACH
    image = np.tile(np.array(draw.FLOOR, np.uint8), (pixels, pixels, 1))
    steps = (np.arange(pixels) + 0.5) / pixels * 2 - 1
    x, y = np.meshgrid(middle[0] + half * steps, middle[1] - half * steps)  # rows count from above
    line = half / pixels
    image[(np.abs(x - np.round(x)) < line) | (np.abs(y - np.round(y)) < line)] = draw.LINE  # every metre

    def paint(centre: Any, radius: float, colour: tuple[int, int, int]) -> None:
        image[np.hypot(x - centre[0], y - centre[1]) <= radius] = colour

    for disc in discs(env, task):
        paint(disc.centre, disc.radius, disc.colour)
    for place in places:
        paint(place, 0.02 * half, draw.TRAIL)
    paint(places[-1], 0.07 * half, draw.HALO)
    paint(places[-1], 0.055 * half, draw.AGENT)
    return image


def place_of(env: Any, qpos: np.ndarray) -> np.ndarray:
    """(x, y) of the robot; the second coordinate of one that moves in an upright plane is its height."""
    return np.array([qpos[0], 0.0 if env.upright else qpos[1]])
