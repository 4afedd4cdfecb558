"""Films of one trial: some of its episodes side by side, and every episode's totals below. Never imports jax."""

import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox
from PIL import Image

from safeicrl.budgets import is_over
from safeicrl.envs.draw import Cell, room_image
from safeicrl.files import atomic_write

HOLD = 12  # the last frame stays as long as this many others
PANELS = 6  # episodes of a room's film, at most
FRAMES = 40  # of a robot's film, at most: longer episodes skip steps
BROKEN = "#bb0000"  # a broken budget, and the line of the budget


# -- a room -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RoomFilm:
    """One trial in one room; a frame per step."""

    label: str
    size: int
    goal: Cell
    obstacles: Sequence[Cell]
    budget: float
    paths: list[list[Cell]]  # [episode] the cells of each episode, from the start cell on
    step_costs: list[list[float]]  # [episode] the cost of each of its steps
    reached: list[bool]  # [episode] whether it ended at the goal
    frame_ms = 160
    inches = (1.75, 3.5)
    heights = (2.4, 1.0)

    @property
    def title(self) -> str:
        """Who, and under which budget."""
        return f"{self.label} in a room it has never seen, budget {self.budget:g} per episode, parameters frozen"

    @property
    def shown(self) -> list[int]:
        """From the first episode to the last: dense where most is learned."""
        return chosen_episodes(len(self.paths))

    @property
    def frames(self) -> int:
        """As many as the longest shown episode has cells."""
        return max(len(self.paths[episode]) for episode in self.shown)

    def last_frame(self, episode: int) -> int:
        """From this frame on, the episode's picture and caption stay as they are."""
        return len(self.paths[episode]) - 1

    def picture(self, episode: int, frame: int) -> np.ndarray:
        """The room and the way through it so far."""
        return room_image(self.size, self.goal, self.obstacles, self.paths[episode][: frame + 1], pixels=16)

    def caption(self, episode: int, frame: int) -> str:
        """The cost so far, and at its end whether the goal was reached."""
        ended = frame >= len(self.paths[episode]) - 1
        end = (", goal" if self.reached[episode] else ", no goal") if ended else ""
        return f"episode {episode + 1}\ncost {self.cost(episode, frame):g} of {self.budget:g}{end}"

    def over(self, episode: int, frame: int) -> bool:
        """Whether the steps so far cost more than the budget."""
        return bool(is_over(self.cost(episode, frame), self.budget))

    def cost(self, episode: int, steps: int | None = None) -> float:
        """Summed cost of an episode's first `steps` steps, or of all."""
        return sum(self.step_costs[episode][:steps])

    def draw_charts(self, axes: list[Axes]) -> None:
        """Every episode's cost against the budget: a filled dot if the goal was reached, else an open one."""
        (axis,) = axes
        costs = np.array([self.cost(episode) for episode in range(len(self.step_costs))])
        index, reached = np.arange(1, len(costs) + 1), np.array(self.reached)
        axis.vlines(index, 0, costs, color="#cccccc", linewidth=1)
        axis.plot(index[reached], costs[reached], "o", color="#009E73", markersize=4, label="goal")
        axis.plot(
            index[~reached], costs[~reached], "o", mfc="white", color="#999999", markersize=4, label="no goal"
        )
        axis.axhline(self.budget, color=BROKEN, linewidth=1, linestyle=":", label="budget")
        axis.set_xticks([episode + 1 for episode in self.shown])
        axis.set_ylim(bottom=-0.3)
        _dress(axis, "cost", last=True)
        # beside the axes: inside, dots and the line of the budget would run through it
        axis.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def chosen_episodes(episodes: int) -> list[int]:
    """The episodes of a room's trial to show, first and last included; denser early, where most is learned."""
    spread = np.geomspace(1, episodes, PANELS).round().astype(int)
    return sorted({int(number) - 1 for number in spread})


# -- a robot ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RobotFilm:
    """One trial of a robot, with pictures of some of its episodes; a frame per picture."""

    label: str
    world: str
    budget: float
    rewards: list[np.ndarray]  # [episode] of each of its steps
    costs: list[np.ndarray]  # [episode] of each of its steps
    steps: list[int]  # [frame] steps of an episode before the picture; a shorter episode shows its end
    pictures: dict[int, list[np.ndarray]]  # episode → [frame] of [pixels, pixels, 3]
    frame_ms = 120
    inches = (3.2, 4.6)
    heights = (4.0, 1.0, 1.0)

    @property
    def title(self) -> str:
        """Who, where, and under which budget."""
        return f"{self.label} in {self.world}, a task it has never seen, budget {self.budget:g} per episode"

    @property
    def shown(self) -> list[int]:
        """The episodes that there are pictures of."""
        return list(self.pictures)

    @property
    def frames(self) -> int:
        """One per picture of an episode."""
        return len(self.steps)

    def last_frame(self, episode: int) -> int:
        """From this frame on, the episode's picture and caption stay as they are."""
        return int(np.searchsorted(self.steps, len(self.costs[episode])))

    def picture(self, episode: int, frame: int) -> np.ndarray:
        """The picture taken there."""
        return self.pictures[episode][frame]

    def caption(self, episode: int, frame: int) -> str:
        """Return and cost so far."""
        step, length = self.steps[frame], len(self.costs[episode])
        reward, cost = self.rewards[episode][:step].sum(), self.costs[episode][:step].sum()
        return f"episode {episode + 1}, step {min(step, length)}\nreturn {reward:.3g}, cost {cost:g}"

    def over(self, episode: int, frame: int) -> bool:
        """Whether the steps so far cost more than the budget."""
        return bool(is_over(self.costs[episode][: self.steps[frame]].sum(), self.budget))

    def draw_charts(self, axes: list[Axes]) -> None:
        """Every episode's return, and its cost against the budget."""
        for axis, name, signal in zip(axes, ("return", "cost"), (self.rewards, self.costs), strict=True):
            totals = [steps.sum() for steps in signal]
            axis.plot(np.arange(1, len(totals) + 1), totals, "o-", color="#0072B2", markersize=3, linewidth=1)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            _dress(axis, name, last=axis is axes[-1])
        axes[-1].axhline(self.budget, color=BROKEN, linewidth=1, linestyle=":", label="budget")
        axes[-1].legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def chosen_steps(longest: int) -> list[int]:
    """After which steps of episodes of at most `longest` steps to take pictures: 0 and `longest` among them."""
    return np.unique(np.linspace(0, longest, min(longest + 1, FRAMES)).astype(int)).tolist()


def _dress(axis: Axes, name: str, *, last: bool) -> None:
    """A small chart over the episodes; the last one names them."""
    if last:
        axis.set_xlabel("episode", fontsize=8)
    axis.set_ylabel(name, fontsize=8)
    axis.tick_params(labelsize=7)
    axis.spines[["right", "top"]].set_visible(False)


# -- the file --------------------------------------------------------------------------------------------


Film = RoomFilm | RobotFilm


def save_film(film: Film, path: Path) -> Path:
    """Write a film as a GIF; returns its path."""
    frames = list(_frames(film))
    waits = [film.frame_ms] * (len(frames) - 1) + [film.frame_ms * HOLD]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=waits, loop=0)
    atomic_write(path, [buffer.getbuffer()])
    return path


def _frames(film: Film) -> Iterator[Image.Image]:
    """One figure, laid out once; a frame draws only the episodes that are still going, and what is new of them."""
    width, height = film.inches
    layout = ConstrainedLayoutEngine()
    figure = Figure(figsize=(width * len(film.shown), height), dpi=80, layout=layout)
    canvas = FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(film.heights), len(film.shown), height_ratios=film.heights)
    axes, captions = [], []
    for column, episode in enumerate(film.shown):
        axes.append(axis := figure.add_subplot(grid[0, column]))
        axis.set_axis_off()
        captions.append(axis.set_title(film.caption(episode, 0), fontsize=8))
    images = [axis.imshow(film.picture(episode, 0)) for axis, episode in zip(axes, film.shown, strict=True)]
    film.draw_charts([figure.add_subplot(grid[row, :]) for row in range(1, len(film.heights))])
    figure.suptitle(film.title, fontsize=9)
    layout.execute(figure)
    figure.set_layout_engine("none")
    tops = [caption.get_window_extent(canvas.get_renderer()).y1 for caption in captions]
    for axis in axes:
        axis.set_visible(False)
    canvas.draw()
    # a column reaches to the middle between its picture and the next one
    middles = [(left.bbox.x1 + right.bbox.x0) / 2 for left, right in itertools.pairwise(axes)]
    edges = itertools.pairwise([0.0, *middles, figure.bbox.x1])
    empty = [
        canvas.copy_from_bbox(Bbox.from_extents(left, axis.bbox.y0 - 1, right, top + 1))
        for axis, top, (left, right) in zip(axes, tops, edges, strict=True)
    ]
    for axis in axes:
        axis.set_visible(True)
    for frame in range(film.frames):
        for axis, image, caption, before, episode in zip(axes, images, captions, empty, film.shown, strict=True):
            if frame > film.last_frame(episode):
                continue
            image.set_data(film.picture(episode, frame))
            text, colour = film.caption(episode, frame), BROKEN if film.over(episode, frame) else "#222222"
            new = frame == 0 or (text, colour) != (caption.get_text(), caption.get_color())
            if new:  # drawing words takes the most time
                canvas.restore_region(before)
                caption.set(text=text, color=colour)
                axis.draw_artist(caption)
            axis.draw_artist(image)
        picture = Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])
        # few flat colours: the fast way to choose a palette is as good, and the file half as large
        yield picture.quantize(128, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
