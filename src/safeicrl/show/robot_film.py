"""An animation of a robot learning a task: two of a trial's episodes side by side. Never imports jax."""

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from safeicrl.files import atomic_write

FRAMES = 40  # at most; a longer episode is shown at every second, third, ... step
FRAME_MS = 120
HOLD = 12  # frames that the finished episodes stay


@dataclass(frozen=True, kw_only=True)
class Film:
    """One trial of a robot, with pictures of some of its episodes."""

    label: str
    world: str
    budget: float
    rewards: list[np.ndarray]  # [episode] of each of its steps
    costs: list[np.ndarray]  # [episode] of each of its steps
    steps: list[int]  # after how many steps of an episode a picture was taken, at its end if it was over before
    pictures: dict[int, list[np.ndarray]]  # episode → [pixels, pixels, 3] at each of these


def chosen_steps(longest: int) -> list[int]:
    """After which steps to take pictures of episodes of at most `longest` steps: the first and last among them."""
    return np.unique(np.linspace(0, longest, min(longest + 1, FRAMES)).astype(int)).tolist()


def play(film: Film, path: Path) -> Path:
    """Write the film as a GIF: the episodes side by side, below them every episode's return and cost."""
    figure = Figure(figsize=(3.2 * len(film.pictures), 4.6), dpi=80, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    grid = figure.add_gridspec(3, len(film.pictures), height_ratios=(4, 1, 1))
    panels = []
    for column, (episode, pictures) in enumerate(film.pictures.items()):
        axis = figure.add_subplot(grid[0, column])
        axis.set_axis_off()
        panels.append((axis.imshow(pictures[0]), axis.set_title("", fontsize=8), episode))
    totals = [np.array([steps.sum() for steps in signal]) for signal in (film.rewards, film.costs)]
    _by_episode(figure.add_subplot(grid[1, :]), totals[0], "return", None)
    _by_episode(figure.add_subplot(grid[2, :]), totals[1], "cost", film.budget)
    figure.suptitle(f"{film.label} in {film.world}, a task it has never seen, budget {film.budget:g}", fontsize=9)

    frames = []
    for index, step in enumerate(film.steps):
        for image, caption, episode in panels:
            image.set_data(film.pictures[episode][index])
            caption.set_text(caption_of(film, episode, step))
            over = film.costs[episode][:step].sum() > film.budget
            caption.set_color("#bb0000" if over else "#222222")
        canvas.draw()
        frames.append(Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3]))
    buffer = io.BytesIO()
    waits = [FRAME_MS] * (len(frames) - 1) + [FRAME_MS * HOLD]
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=waits, loop=0, optimize=True)
    atomic_write(path, [buffer.getbuffer()])
    return path


def caption_of(film: Film, episode: int, step: int) -> str:
    """What has happened in an episode after `step` steps."""
    reward, cost = film.rewards[episode][:step].sum(), film.costs[episode][:step].sum()
    return f"episode {episode + 1}, step {min(step, len(film.costs[episode]))}\nreturn {reward:.3g}, cost {cost:g}"


def _by_episode(axis: Axes, totals: np.ndarray, name: str, budget: float | None) -> None:
    axis.plot(np.arange(1, len(totals) + 1), totals, "o-", color="#0072B2", markersize=3, linewidth=1)
    if budget is not None:
        axis.axhline(budget, color="#bb0000", linewidth=1, linestyle=":")
        axis.set_xlabel("episode", fontsize=8)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_ylabel(name, fontsize=8)
    axis.tick_params(labelsize=7)
    axis.spines[["right", "top"]].set_visible(False)
