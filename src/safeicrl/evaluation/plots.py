"""The paper's figures, shares over budget, training curves. Reads results only; never imports jax."""

import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from safeicrl.budgets import bin_of
from safeicrl.errors import UserError, printable
from safeicrl.evaluation.results import Results, in_words
from safeicrl.evaluation.statistics import (
    MEASURES,
    bootstrap,
    interval,
    performance_profile,
    standard_error,
    worst_excess,
)
from safeicrl.files import RECIPE, atomic_write, read_json

Groups = dict[str, list[Results]]  # label → its seeds
Points = tuple[list[float], list[float]]  # x, y

# Okabe–Ito: colour-blind readers can tell them apart. Reference agents, the paper's methods and the trained
# baselines look the same in every figure.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
METHOD_COLOURS = {
    "SCARED": PALETTE[0], "Safe AD": PALETTE[1], "SafeMeta": PALETTE[3], "MAML with penalty": PALETTE[4],
    "privileged": "#000000", "memoryless": "#8C6D31",
}  # fmt: skip
REFERENCE_COLOURS = {"random": "#999999", "explorer": "#555555", "planner": "#000000"}
STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "text.parse_math": False,  # a label with a dollar is no formula
    "axes.titlesize": 10,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "grid.color": "#e6e6e6",
    "lines.linewidth": 1.6,
}
DPI = 160  # pixels per inch of a file
CORNER = 6  # size of the letters below a figure


@mpl.rc_context(STYLE)
def by_episode(groups: Groups) -> Figure:
    """The paper's question (i): episode return and cost against the episode's index."""
    figure, axes = _figure(1, 2, (8.4, 3.2))
    titles = ("episode return", f"episode {_cost_of(groups)}")
    for axis, name, title in zip(axes, ("returns", "costs"), titles, strict=True):
        lines = []
        for label, colour, style, seeds in _styled(groups):
            curves = [(getattr(result, name), result.task) for result in seeds]  # [seed][trial, episode]
            x = np.arange(1, seeds[0].returns.shape[1] + 1)
            mean, error = _band([(c.mean(axis=0), standard_error(c, task)) for c, task in curves])
            lines.append((label, colour, _draw(axis, x, mean, error, colour, style)))
        axis.set(title=title, xlabel="episode", xlim=(1, None))
        _set_base(axis)
        _label_lines(axis, lines)
    _say_how(figure, groups)
    return figure


@mpl.rc_context(STYLE)
def by_budget(groups: Groups, bins: int | None = None) -> Figure:
    """The paper's question (ii): total return and the largest episode cost against the budget."""
    figure, axes = _figure(1, 2, (8.4, 3.2))
    measures = (
        ("total return", lambda result: result.returns.sum(axis=1)),
        (f"largest episode {_cost_of(groups)}", lambda result: result.costs.max(axis=1)),
    )
    for axis, (title, measure) in zip(axes, measures, strict=True):
        lines = []
        for label, colour, style, seeds in _styled(groups):
            parts = bins or _bins(seeds[0])
            x = _centres(seeds[0], parts)
            mean, error = _band([_binned(result, measure(result), parts) for result in seeds])
            lines.append((label, colour, _draw(axis, x, mean, error, colour, style)))
        axis.set(title=title, xlabel=_budget_label(groups))
        if axis is axes[1]:
            low, high = next(iter(groups.values()))[0].budget_range
            axis.plot([low, high], [low, high], color="#bb0000", linewidth=1, linestyle=":")
            axis.annotate(
                "the budget", (high, high), color="#bb0000", fontsize=8, xytext=(-4, 2), textcoords="offset points",
                ha="right", va="bottom", bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
            )  # fmt: skip
        _set_base(axis)
        _label_lines(axis, lines)
    _say_how(figure, groups)
    return figure


@mpl.rc_context(STYLE)
def over_budget(groups: Groups, bins: int | None = None) -> Figure:
    """Share of episodes over their budget, against the episode's index and against the budget."""
    figure, axes = _figure(1, 2, (8.4, 3.2))
    by_index, by_delta = [], []
    for label, colour, style, seeds in _styled(groups):
        shares = [result.over.astype(float) for result in seeds]  # [seed][trial, episode]
        x = np.arange(1, shares[0].shape[1] + 1)
        errors = [standard_error(s, result.task) for result, s in zip(seeds, shares, strict=True)]
        mean, error = _band([(s.mean(axis=0), e) for s, e in zip(shares, errors, strict=True)])
        by_index.append((label, colour, _draw(axes[0], x, mean, error, colour, style)))
        parts = bins or _bins(seeds[0])
        binned = [_binned(result, s.mean(axis=1), parts) for result, s in zip(seeds, shares, strict=True)]
        mean, error = _band(binned)
        by_delta.append((label, colour, _draw(axes[1], _centres(seeds[0], parts), mean, error, colour, style)))
    axes[0].set(title="share over budget of each episode", xlabel="episode", xlim=(1, None))
    axes[1].set(title="share of all episodes over budget", xlabel=_budget_label(groups))
    for axis, lines in zip(axes, (by_index, by_delta), strict=True):
        axis.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(xmax=1))
        axis.set_ylim(bottom=0)
        _label_lines(axis, lines)
    _say_how(figure, groups)
    return figure


@mpl.rc_context(STYLE)
def profiles(groups: Groups) -> Figure:
    """Performance profiles: the share of trials above each total return, and above each excess over the budget."""
    figure, axes = _figure(1, 2, (8.4, 3.2))
    measures = (
        ("share of trials with a higher total return", "total return", MEASURES["total return"][0]),
        ("share of trials with a larger excess", f"worst episode's {_cost_of(groups)} − budget", worst_excess),
    )
    for axis, (title, name, measure) in zip(axes, measures, strict=True):
        every = np.concatenate([measure(result) for seeds in groups.values() for result in seeds])
        low = min(0.0, every.min()) if axis is axes[0] else 0.0  # below 0 the budget is kept
        levels = np.linspace(low, max(every.max(), low + 1), 101)
        for label, colour, style, seeds in _styled(groups):
            profile = lambda values, levels=levels: performance_profile(values, levels)  # noqa: E731
            share, below, above = bootstrap(seeds, measure, profile, samples=200)
            axis.fill_between(levels, below, above, color=colour, alpha=0.2, linewidth=0)
            axis.plot(levels, share, color=colour, linestyle=style, label=label)
        axis.set(title=title, xlabel=name, ylim=(0, 1.02), xlim=(levels[0], levels[-1]))
        axis.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(xmax=1))
        axis.legend(fontsize=7, frameon=False)
    _say_how(figure, groups)
    _write_title(figure, "lines: all seeds and tasks · bands: 95%, stratified bootstrap over seeds and tasks")
    return figure


@mpl.rc_context(STYLE)
def sweep(groups: Groups) -> Figure:
    """Several runs side by side: each number with its 95% interval, and a dot for each seed."""
    figure, axes = _figure(1, len(MEASURES), (8.4, 1.4 + 0.3 * len(groups)))
    styled = _styled(groups, any_cost=True)
    for axis, (title, (measure, percent)) in zip(axes, MEASURES.items(), strict=True):
        for row, (_, colour, _, seeds) in enumerate(styled):
            mean, half = interval(seeds, measure)
            axis.errorbar(mean, row, xerr=half, fmt="o", color=colour, capsize=3, markersize=4)
            if len(seeds) > 1:
                each = [measure(result).mean() for result in seeds]
                axis.plot(each, [row + 0.2] * len(each), ".", color=colour, markersize=4, alpha=0.5)
        axis.set(title=title, ylim=(len(styled) - 0.5, -0.5))
        axis.set_yticks(range(len(styled)), [label for label, *_ in styled] if axis is axes[0] else [])
        if percent:
            axis.xaxis.set_major_formatter(mpl.ticker.PercentFormatter(xmax=1))
    _write_title(figure, f"circles: mean · bars: 95% interval over {_band_of(groups)} · dots: seeds")
    _write_corner(figure, "; ".join(f"{label}: {_sizes(seeds)}" for label, seeds in groups.items()))
    return figure


def _sizes(seeds: Sequence[Results]) -> str:
    first = seeds[0]
    count = f", {len(seeds)} seeds" if len(seeds) > 1 else ""
    return f"{len(first.returns) // first.budgets_per_task} tasks of {first.returns.shape[1]} episodes{count}"


@mpl.rc_context(STYLE)
def training(
    runs: Sequence[tuple[str, list[dict[str, Any]], str]], more: Sequence[tuple[str, str | None, str]] = ()
) -> Figure:
    """Training curves against env steps: (name, lines of metrics.jsonl, command) per run.

    `more` adds panels: (number of the log, number of an evaluation or None, title) each, an even number of them.
    """
    rows = 2 + len(more) // 2
    figure, axes = _figure(rows, 2, (8.4, 2.8 * rows))
    playing = any("lambda" in line for _, log, _ in runs for line in log)  # Safe AD only reads histories
    panels = (
        ("return", "eval/last_return", "episode return"),
        ("cost", "eval/cost", "episode cost (dotted: mean budget)"),
        ("over_budget", "eval/over_budget", "share of episodes over budget"),
        ("lambda", None, "multiplier λ") if playing else ("loss", None, "loss"),
        *more,
    )
    for axis, (name, evaluated, title) in zip(axes.ravel(), panels, strict=True):
        lines = []
        for index, (label, log, _) in enumerate(runs):
            colour = PALETTE[index % len(PALETTE)]
            for seed in _seed_series(log, name):
                axis.plot(*seed, color=colour, alpha=0.3, linewidth=0.8)
            lines.append((label, colour, axis.plot(*_series(log, name), color=colour)[0].get_xydata()))
            if name == "cost":
                axis.plot(*_series(log, "budget"), color=colour, linestyle=":", linewidth=1)
            if evaluated:
                axis.plot(*_series(log, evaluated), "o", color=colour, markersize=4, markeredgecolor="white")
        axis.set(title=title, xlabel="env steps")
        axis.xaxis.set_major_formatter(mpl.ticker.EngFormatter(sep=""))
        if len(runs) > 1:
            _label_lines(axis, lines)
    _write_title(figure, "lines: training tasks · dots: frozen, on unseen tasks (return: a trial's last episodes)")
    _write_corner(figure, " · ".join(command for _, _, command in runs if command))
    return figure


@mpl.rc_context(STYLE)
def against_steps(panels: Sequence[tuple[str, dict[str, Points]]], marks: Sequence[float]) -> Figure:
    """Evaluations while training against env steps, on a logarithmic axis: (title, label → points) per panel.

    Dotted lines stand at `marks`. A label has one colour in all panels.
    """
    figure, axes = _figure(1, len(panels), (4.2 * len(panels), 3.2))
    labels = list(dict.fromkeys(label for _, runs in panels for label in runs))
    for axis, (title, runs) in zip(np.ravel(axes), panels, strict=True):
        lines = []
        for label, points in runs.items():
            colour = PALETTE[labels.index(label) % len(PALETTE)]
            drawn = axis.plot(*points, "o-", color=colour, markersize=4, markeredgecolor="white")[0]
            lines.append((label, colour, np.asarray(drawn.get_xydata())))
        for mark in marks:
            axis.axvline(mark, color="#999999", linestyle=":", linewidth=0.8)
        least = min((value for _, values in runs.values() for value in values), default=0.0)
        axis.set(title=title, xlabel="env steps", xscale="log")
        if least >= 0:
            axis.set_ylim(bottom=0)
        axis.xaxis.set_major_locator(mpl.ticker.FixedLocator(list(marks)))
        axis.xaxis.set_minor_locator(mpl.ticker.NullLocator())
        axis.xaxis.set_major_formatter(mpl.ticker.EngFormatter(sep=""))
        _label_lines(axis, lines)
    _write_title(figure, "frozen policies on unseen tasks, while they were trained")
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Write a figure in the format its name ends with."""
    buffer = io.BytesIO()
    if path.suffix == ".png":  # `savefig` would go through the figure twice
        figure.set_dpi(DPI)
        FigureCanvasAgg(figure).print_png(buffer)
    else:
        figure.savefig(buffer, format=path.suffix[1:], dpi=DPI)
    atomic_write(path, [buffer.getbuffer()])
    return path


def command_of(folder: Path) -> str:
    """The command that made a run, from its config.json or recipe.json; empty without one."""
    path = folder / (RECIPE if (folder / RECIPE).exists() else "config.json")
    try:
        return printable(str(read_json(path, "training run").get("command", "")))
    except (UserError, AttributeError):
        return ""


# -- pieces -------------------------------------------------------------------------------------------------


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, np.ndarray]:
    """A figure of its own canvas: no window system, no global state."""
    figure = Figure(figsize=size)
    return figure, np.asarray(figure.subplots(rows, columns))


def _styled(groups: Groups, any_cost: bool = False) -> list[tuple[str, str, str, list[Results]]]:
    """(label, colour, line style, seeds) of each agent. `any_cost`: the figure is right for several costs too."""
    if not groups:
        raise UserError("there is nothing to draw")
    several = [seeds[0].cost_names for seeds in groups.values() if seeds[0].several]
    if several and not any_cost:
        raise UserError(f"a figure shows one cost of {', '.join(several[0])}: take its results from by_cost()")
    named = {METHOD_COLOURS[label] for label in groups if label in METHOD_COLOURS}
    free = itertools.cycle([colour for colour in PALETTE if colour not in named])
    styled = []
    for label, seeds in groups.items():
        name = str(seeds[0].meta.get("agent", label))
        if name in REFERENCE_COLOURS:
            styled.append((label, REFERENCE_COLOURS[name], "--", seeds))
        else:
            styled.append((label, METHOD_COLOURS.get(label) or next(free), "-", seeds))
    return styled


def _cost_of(groups: Groups) -> str:
    """The name of the cost that a figure shows."""
    return next((seeds[0].cost_names[0] for seeds in groups.values()), "cost")


def _budget_label(groups: Groups) -> str:
    """Of an axis of budgets: with several costs, which one's."""
    name = _cost_of(groups)
    return "budget δ" if name == "cost" else f"budget δ of {name}"


def _set_base(axis: Axes) -> None:
    """Start the vertical axis at zero, unless the curves lie so far above it that they would look the same."""
    low, high = axis.get_ylim()
    if low < 0.6 * high:
        axis.set_ylim(bottom=min(0.0, low))


def _band(curves: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and half-width of the band: over tasks for one seed, over the seeds' means for several."""
    means = np.stack([mean for mean, _ in curves])
    return (means[0], curves[0][1]) if len(curves) == 1 else (means.mean(axis=0), standard_error(means))


def _draw(axis: Axes, x: np.ndarray, mean: np.ndarray, error: np.ndarray, colour: str, style: str) -> np.ndarray:
    """A line with its band; returns its points."""
    seen = np.isfinite(mean)
    axis.fill_between(x[seen], (mean - error)[seen], (mean + error)[seen], color=colour, alpha=0.2, linewidth=0)
    return np.asarray(axis.plot(x[seen], mean[seen], color=colour, linestyle=style)[0].get_xydata())


def _bins(result: Results) -> int:
    """Twelve bins; with several budgets per task one for each, so that every bin holds (nearly) the same tasks."""
    return result.budgets_per_task if result.budgets_per_task > 1 else 12


def _edges(result: Results, bins: int) -> np.ndarray:
    low, high = result.budget_range
    return np.linspace(low, high, bins + 1) if high > low else np.array([low - 0.5, low + 0.5])


def _centres(result: Results, bins: int) -> np.ndarray:
    edges = _edges(result, bins)
    return (edges[:-1] + edges[1:]) / 2


def _binned(result: Results, values: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard error of a value per trial, by budget; nan in an empty bin.

    With several budgets per task, the error is for comparing budgets within tasks: it is computed from the values
    minus their task's mean, and enlarged to make up for the variance that this removes (Morey 2008).
    """
    edges = _edges(result, bins)
    index = bin_of(result.budgets, edges)
    off, often = values, result.budgets_per_task
    if often > 1 and len(edges) > 2:
        own = np.bincount(result.task, values) / often  # [task]
        off = (values - own[result.task]) * np.sqrt(often / (often - 1))
    parts = [index == i for i in range(len(edges) - 1)]
    mean = np.array([values[part].mean() if part.any() else np.nan for part in parts])
    error = [standard_error(off[part], result.task[part]) if part.any() else np.nan for part in parts]
    return mean, np.array(error)


def _label_lines(axis: Axes, lines: list[tuple[str, str, np.ndarray]]) -> None:
    """Write each line's name at its right end, in its colour; names that would touch are pushed apart."""
    low, high = axis.get_ylim()
    at = -np.inf
    for y, label, colour in sorted(
        (points[-1][1], label, colour) for label, colour, points in lines if len(points)
    ):
        at = max(y, at + 0.075 * (high - low))
        where = axis.get_yaxis_transform()  # x along the axis, y in the data's units
        axis.text(1.02, at, label, transform=where, va="center", color=colour, fontsize=8)


def _series(log: list[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """(env steps, value) wherever a log has the number."""
    pairs = [(line.get("env_steps"), line.get(name)) for line in log]
    points = [(x, y) for x, y in pairs if _is_number(x) and _is_number(y)]
    return [float(x) for x, _ in points], [float(y) for _, y in points]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _seed_series(log: list[dict[str, Any]], name: str) -> list[tuple[list[float], list[float]]]:
    lists = [(line.get("env_steps"), line.get(f"{name}/seeds")) for line in log]
    lines = [(float(x), values) for x, values in lists if _is_number(x) and isinstance(values, list) and values]
    count, x = min((len(values) for _, values in lines), default=0), [at for at, _ in lines]
    return [(x, [y if _is_number(y := values[i]) else np.nan for _, values in lines]) for i in range(count)]


def _say_how(figure: Figure, groups: Groups) -> None:
    """Write how to read the figure above it, and how to repeat it, small, below it."""
    _write_title(figure, f"lines: mean · bands: ± standard error over {_band_of(groups)}")
    parts = []
    for label, seeds in groups.items():
        often = seeds[0].budgets_per_task
        what = [f"{len(seeds[0].returns) // often} tasks"]
        what += [f"{often} budgets each (bands by budget: within tasks)"] if often > 1 else []
        what += [f"{len(seeds)} seeds"] if len(seeds) > 1 else []
        what += in_words(seeds[0].meta)
        what += [engine] if (engine := seeds[0].meta.get("approximation")) else []
        parts.append(f"{label}: {', '.join(what)}")
    commands = dict.fromkeys(str(seeds[0].meta.get("command", "")) for seeds in groups.values())
    _write_corner(figure, "; ".join(parts) + "\n" + " · ".join(c for c in commands if c))


def _band_of(groups: Groups) -> str:
    """What the bands of `_band` are over, in words."""
    several = {len(seeds) > 1 for seeds in groups.values()}
    if several == {True, False}:
        return "seeds, or over tasks where there is one seed"
    return "seeds" if several == {True} else "tasks"


def _write_title(figure: Figure, text: str) -> None:
    figure.suptitle(text, fontsize=8, x=0.02, ha="left")


def _write_corner(figure: Figure, text: str) -> None:
    points = 72 * 0.94 * figure.get_figwidth()  # at a screen's resolution letters are a little wider than measured
    lines = [line for part in text.splitlines() for line in _broken(part, points, CORNER)]
    figure.supxlabel("\n".join(lines), fontsize=CORNER, color="#888888", x=0.01, ha="left")


def _broken(text: str, width: float, size: float) -> list[str]:
    """Text as lines of at most `width` points, all about as long: none of them a lone word."""
    font = FontProperties(size=size)
    measure = lambda words: text_to_path.get_text_width_height_descent(words, font, ismath=False)[0]  # noqa: E731
    space, words = measure("a b") - measure("ab"), [(word, measure(word)) for word in text.split()]

    def fill(limit: float) -> list[str]:
        lines, used = [""], -space
        for word, length in words:
            if lines[-1] and used + space + length > limit:
                lines, used = [*lines, ""], -space
            lines[-1], used = f"{lines[-1]} {word}".lstrip(), used + space + length
        return lines

    fewest = fill(width)
    return next(lines for share in np.linspace(0.3, 1, 71) if len(lines := fill(share * width)) == len(fewest))
