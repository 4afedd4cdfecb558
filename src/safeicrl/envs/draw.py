"""Draws a room with numpy alone, as an RGB image or as text: for the Gymnasium face and for films."""

from collections.abc import Sequence

import numpy as np

Cell = tuple[int, int]  # (row, column)

# Colour-blind safe (Okabe–Ito goal and agent) on a quiet dark slate; the trail fades with age.
FLOOR = (38, 43, 54)
LINE = (28, 32, 41)
OBSTACLE = (190, 72, 60)
GOAL = (0, 158, 115)
TRAIL = (230, 190, 80)
AGENT = (86, 180, 233)
HALO = (245, 245, 245)


def room_image(
    size: int, goal: Cell, obstacles: Sequence[Cell], path: Sequence[Cell], pixels: int = 32
) -> np.ndarray:
    """A room as [size·pixels, size·pixels, 3] uint8. `path`: the cells of this episode, the agent's last."""
    image = np.tile(np.array(FLOOR, np.uint8), (size * pixels, size * pixels, 1))
    centre = (np.arange(pixels) - (pixels - 1) / 2) / pixels  # −½ … ½ across one cell
    y, x = np.meshgrid(centre, centre, indexing="ij")
    square, disc = np.maximum(abs(y), abs(x)), np.hypot(y, x)

    def paint(cell: Cell, shape: np.ndarray, colour: tuple[int, int, int], opacity: float = 1.0) -> None:
        row, column = (int(i) * pixels for i in cell)
        patch = image[row : row + pixels, column : column + pixels]
        patch[shape] = np.round((1 - opacity) * patch[shape] + opacity * np.array(colour))

    image[np.tile(square > 0.5 - 1.0 / pixels, (size, size))] = LINE  # around every cell
    for cell in obstacles:
        paint(cell, square < 0.42, OBSTACLE)
    paint(goal, square < 0.42, GOAL)
    visited = list(dict.fromkeys((int(row), int(column)) for row, column in reversed(path)))  # newest first
    for age, cell in enumerate(visited):
        paint(cell, disc < 0.16, TRAIL, max(0.35, 0.95 - 0.05 * age))
    if len(path):
        paint(path[-1], disc < 0.36, HALO)
        paint(path[-1], disc < 0.31, AGENT)
    return image


def room_text(size: int, goal: Cell, obstacles: Sequence[Cell], path: Sequence[Cell]) -> str:
    """A room as text: A agent, G goal, # obstacle, x visited obstacle, o visited cell, . the rest."""
    grid = np.full((size, size), ".")
    for cell in obstacles:
        grid[tuple(cell)] = "#"
    grid[tuple(goal)] = "G"
    for cell in path:
        grid[tuple(cell)] = {"#": "x", "x": "x", "G": "G"}.get(str(grid[tuple(cell)]), "o")
    if len(path):
        grid[tuple(path[-1])] = "A"
    return "\n".join(" ".join(row) for row in grid) + "\n"
