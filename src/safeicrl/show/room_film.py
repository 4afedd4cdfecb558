"""An animation of one room being learned: some of a trial's episodes side by side. Never imports jax."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from safeicrl.envs.draw import Cell, room_image
from safeicrl.files import atomic_write

HOLD = 12  # frames that the finished episodes stay
FRAME_MS = 160


@dataclass(frozen=True, kw_only=True)
class Replay:
    """One trial in one room, for drawing."""

    label: str
    size: int
    goal: Cell
    obstacles: Sequence[Cell]
    budget: float
    paths: list[list[Cell]]  # [episode] the cells of each episode, from the start cell on
    step_costs: list[list[float]]  # [episode] the cost of each of its steps
    reached: list[bool]  # [episode] whether it ended at the goal

    @property
    def costs(self) -> np.ndarray:
        """[episode] summed cost."""
        return np.array([sum(costs) for costs in self.step_costs])


def chosen_episodes(episodes: int, panels: int = 6) -> list[int]:
    """Which episodes to show, from the first to the last: dense where most is learned."""
    spread = np.geomspace(1, episodes, panels).round().astype(int)
    return sorted({int(k) - 1 for k in spread})


def animate(replay: Replay, path: Path) -> Path:
    """Write the animation as a GIF: episodes side by side, and below them every episode's cost."""
    shown = chosen_episodes(len(replay.paths))
    figure = Figure(figsize=(1.75 * len(shown), 3.3), dpi=80, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, len(shown), height_ratios=(2.4, 1))
    panels = []
    for column, episode in enumerate(shown):
        axis = figure.add_subplot(grid[0, column])
        axis.set_axis_off()
        panels.append((axis.imshow(_room(replay, episode, 0)), axis.set_title("", fontsize=8), episode))
    _draw_costs(replay, shown, figure.add_subplot(grid[1, :]))
    title = f"{replay.label} in a room it has never seen, budget {replay.budget:g} an episode, parameters frozen"
    figure.suptitle(title, fontsize=10)

    longest = max(len(replay.paths[episode]) for episode in shown)
    frames = []
    for step in range(longest):
        for image, caption, episode in panels:
            image.set_data(_room(replay, episode, step))
            caption.set_text(_caption(replay, episode, step))
            caption.set_color("#bb0000" if _cost(replay, episode, step) > replay.budget else "#222222")
        canvas.draw()
        frames.append(Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3]))
    buffer = io.BytesIO()
    waits = [FRAME_MS] * (longest - 1) + [FRAME_MS * HOLD]
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=waits, loop=0, optimize=True)
    atomic_write(path, [buffer.getbuffer()])
    return path


def _room(replay: Replay, episode: int, step: int) -> np.ndarray:
    path = replay.paths[episode][: step + 1]
    return room_image(replay.size, replay.goal, replay.obstacles, path, pixels=16)


def _cost(replay: Replay, episode: int, step: int) -> float:
    return sum(replay.step_costs[episode][:step])


def _caption(replay: Replay, episode: int, step: int) -> str:
    over = step >= len(replay.paths[episode]) - 1
    end = (", goal" if replay.reached[episode] else ", no goal") if over else ""
    return f"episode {episode + 1}\ncost {_cost(replay, episode, step):g} of {replay.budget:g}{end}"


def _draw_costs(replay: Replay, shown: list[int], axis: Axes) -> None:
    """Every episode's cost against the budget: a filled dot where the goal was reached, an open one elsewhere."""
    index = np.arange(1, len(replay.costs) + 1)
    reached = np.array(replay.reached)
    axis.vlines(index, 0, replay.costs, color="#cccccc", linewidth=1)
    axis.plot(index[reached], replay.costs[reached], "o", color="#009E73", markersize=4, label="goal reached")
    axis.plot(index[~reached], replay.costs[~reached], "o", mfc="white", color="#999999", markersize=4, label="not")
    axis.axhline(replay.budget, color="#bb0000", linewidth=1, linestyle=":", label="budget")
    axis.set_xticks([episode + 1 for episode in shown])
    axis.set_ylim(bottom=-0.3)
    axis.set_ylabel("cost", fontsize=8)
    axis.set_xlabel("episode", fontsize=8)
    axis.tick_params(labelsize=7)
    axis.spines[["right", "top"]].set_visible(False)
    axis.legend(fontsize=7, frameon=False, loc="upper right", ncols=3)
