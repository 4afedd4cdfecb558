"""How the panels are drawn: figures of `evaluation.plots`, and tables of the numbers behind them."""

import itertools
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from safeicrl.evaluation import plots
from safeicrl.evaluation.plots import PALETTE, STYLE, Groups
from safeicrl.evaluation.results import Results
from safeicrl.evaluation.statistics import bootstrap, budget_bins, rank, safety, standard_error, summarise
from safeicrl.show.report.content import Drawing, File, Found, Grid, Shown
from safeicrl.show.report.steps import trained_on

ALPHA = 0.5  # the paper's
SIZE = 9  # of the paper's room
TASKS = 3  # drawn of each split
SAMPLES = 500  # of a bootstrap interval


# -- worlds -------------------------------------------------------------------------------------------------


def episodes(found: Found, *, table_only: tuple[str, ...] = ()) -> list[Shown]:
    """Return and cost by episode, and the numbers at the ends of the curves.

    `table_only` names agents so far from the others that the curves of these would look alike beside them.
    """
    groups = found.groups()
    drawn = {label: seeds for label, seeds in groups.items() if label not in table_only} or groups
    if not groups:
        return []
    text = f"Return and cost by episode: {', '.join(drawn)}."
    rows = [[*_ends(label, seeds), trained_on(found.root, found.files[label])] for label, seeds in groups.items()]
    first = summarise(next(iter(groups.values()))[0])
    header = (
        "", "tasks", "seeds", f"return of {first.episodes} episodes", "interquartile mean of it, 95% interval",
        f"return, first → {first.last_name}",
        f"cost, first → {first.last_name}", f"episodes over budget, all / {first.last_name}", "trials ever over",
        "environment steps of training, per seed",
    )  # fmt: skip
    figure = _taller(plots.by_episode(drawn), len(drawn))
    return [Drawing(figure=figure, text=text), Grid(header=header, rows=rows), *_fresh(groups)]


def _taller(figure: Figure, agents: int) -> Figure:
    """Room for the names of many agents beside a figure, and for their commands below it."""
    figure.set_figheight(figure.get_figheight() + 0.16 * max(agents - 4, 0))
    return figure


def _fresh(groups: Groups) -> list[Shown]:
    """What agents that update their parameters played besides the episodes that are shown."""
    said = []
    for label, seeds in groups.items():
        found = [result.meta["adaptation"] for result in seeds if result.meta.get("adaptation")]
        if any(about["fresh_episodes"] for about in found):
            names = ("fresh_episodes", "fresh_steps", "fresh_episodes_over_budget")
            played, steps, over = (np.mean([about[name] for about in found]) for name in names)
            said.append(f"{label} {played:,.0f} ({steps:,.0f} steps; {over:.1%} of the episodes over budget)")
    text = "To update their parameters, these played more episodes of each task, which do not count above: "
    return [f"{text}{'; '.join(said)}."] if said else []


def _ends(label: str, seeds: list[Results]) -> list[str]:
    """A row of the table below a figure by episode: means over seeds."""
    every = [summarise(result) for result in seeds]
    mean = lambda of: float(np.mean([of(x) for x in every]))  # noqa: E731
    last = every[0].last
    first = {name: np.mean([getattr(r, name)[:, 0].mean() for r in seeds]) for name in ("returns", "costs")}
    final = {name: np.mean([getattr(r, name)[:, -last:].mean() for r in seeds]) for name in ("returns", "costs")}
    error = (
        float(standard_error(np.array([x.total_return for x in every])))
        if len(every) > 1
        else every[0].total_return_error
    )
    middle, low, high = bootstrap(seeds, lambda r: r.returns.sum(axis=1), samples=SAMPLES)
    return [
        label,
        str(every[0].tasks),
        str(len(seeds)),
        f"{mean(lambda x: x.total_return):.4g} ± {error:.2g}",
        f"{middle:.4g} [{low:.4g}, {high:.4g}]",
        f"{first['returns']:.3g} → {final['returns']:.3g}",
        f"{first['costs']:.3g} → {final['costs']:.3g}",
        f"{mean(lambda x: x.over_budget):.1%} / {mean(lambda x: x.over_budget_last):.1%}",
        f"{np.mean([r.over.any(axis=1).mean() for r in seeds]):.0%}",
    ]


def by_setting(found: Found, *, setting: str) -> list[Shown]:
    """`episodes` of runs that differ in one setting of their network, whose value is on their cards."""
    files: dict[str, list[File]] = {}
    for label, own in found.files.items():
        net = (own[0].value.meta.get("card") or {}).get("net") or {}
        files[f"{setting} {net[setting]}" if setting in net else label] = own
    return episodes(Found(root=found.root, files=files))


def budgets(found: Found, *, over: bool = False, table_only: tuple[str, ...] = ()) -> list[Shown]:
    """Total return and largest episode cost by budget; with `over`, the shares over budget too."""
    groups = found.groups()
    drawn = {label: seeds for label, seeds in groups.items() if label not in table_only} or groups
    if not groups:
        return []
    what = ", ".join(drawn)
    text = f"Total return and largest episode cost by budget: {what}."
    shown: list[Shown] = [Drawing(figure=_taller(plots.by_budget(drawn), len(drawn)), text=text)]
    if over:
        text = f"Share of episodes over budget: {what}."
        shown.append(Drawing(figure=plots.over_budget(drawn), text=text))
    totals = lambda r: r.returns.sum(axis=1)  # noqa: E731
    shown.append(_binned("total return, by budget", groups, totals, ".4g"))
    shown.append(
        _binned("largest episode cost of a trial, by budget", groups, lambda r: r.costs.max(axis=1), ".3g")
    )
    return shown


def _binned(title: str, groups: Groups, measure: Any, form: str) -> Grid:
    """Means by bin of budgets, over trials and seeds."""
    rows, header = [], [""]
    for label, seeds in groups.items():
        bins = [budget_bins(result) for result in seeds]
        header = ["", *bins[0]] if len(bins[0]) >= len(header) - 1 else header
        row = [label]
        for name in bins[0]:
            parts = [measure(result)[own[name]] for result, own in zip(seeds, bins, strict=True)]
            values = np.concatenate(parts)
            row.append(format(values.mean(), form) if len(values) else "–")
        rows.append(row)
    return Grid(title=title, header=header, rows=rows)


# -- Proposition 1 ------------------------------------------------------------------------------------------


@mpl.rc_context(STYLE)
def distance(found: Found) -> list[Shown]:
    """Total variation and both KL divergences against α, and their values."""
    from safeicrl.envs.spawn import divergence

    grid = np.linspace(0, 4, 161)
    values = np.array([divergence(SIZE, alpha) for alpha in grid])
    figure = Figure(figsize=(8.4, 3))
    left, right = figure.subplots(1, 2)
    left.plot(grid, values[:, 0], color=PALETTE[0])
    left.set(title="total variation distance", xlabel="α", ylim=(0, 1.03))
    for column, name, colour in ((1, "KL(train‖test)", PALETTE[1]), (2, "KL(test‖train)", PALETTE[2])):
        right.plot(grid, values[:, column], color=colour, label=name)
    right.set(title="KL divergence", xlabel="α", ylim=(0, None))
    right.legend(frameon=False)
    for axis in (left, right):
        axis.axvline(ALPHA, color="#999999", linestyle=":")
        axis.annotate(
            "the paper's α", (ALPHA, axis.get_ylim()[1]), xytext=(4, -10), textcoords="offset points", fontsize=8
        )
    header = ("α", "total variation", "KL(train‖test)", "KL(test‖train)")
    rows = [[f"{a:g}", *(f"{x:.4f}" for x in divergence(SIZE, a))] for a in (0.0, 0.25, ALPHA, 1.0, 2.0, 4.0)]
    text = "Total variation goes to 1 and both KL divergences grow without bound as α grows."
    note = "Over the 80 cells of the 9×9 room that goals are drawn from: all but the start."
    return [Drawing(figure=figure, text=text), Grid(header=header, rows=rows), note]


@mpl.rc_context({**STYLE, "axes.grid": False})
def tasks(found: Found) -> list[Shown]:
    """Three rooms and three arenas of each split."""
    import jax

    from safeicrl.envs.dark_mujoco import EXTENT, SafeDarkPoint
    from safeicrl.envs.dark_room import SafeDarkRoom
    from safeicrl.envs.draw import room_image

    figure = Figure(figsize=(8.4, 3.2))
    axes = figure.subplots(2, 2 * TASKS)
    room, arena = SafeDarkRoom(), SafeDarkPoint()
    for index in range(2 * TASKS):
        split: Literal["train", "test"] = "train" if index < TASKS else "test"
        key = jax.random.key(index % TASKS)
        task = jax.device_get(room.sample_task(key, split))
        cells = [divmod(int(cell), room.size) for cell in np.flatnonzero(task.obstacles)]
        goal, start = divmod(int(task.goal), room.size), divmod(room.start, room.size)
        axes[0, index].imshow(room_image(room.size, goal, cells, [start]))
        _draw_arena(axes[1, index], jax.device_get(arena.sample_task(key, split)), EXTENT)
        for axis in axes[:, index]:
            axis.set(xticks=[], yticks=[], title=f"{split} {index % TASKS}")
    text = "Rooms, and below them Point's arenas: objects near the centre in training, near the edge in tests."
    note = (
        "Green: goal. Red: obstacles. Blue: the start. Keys 0 to 2 of each split, "
        "env.sample_task(jax.random.key(i), split). Car's arenas are Point's."
    )
    return [Drawing(figure=figure, text=text), note]


def _draw_arena(axis: Axes, task: Any, extent: float) -> None:
    from safeicrl.envs.dark_mujoco import GOAL_RADIUS, HAZARD_RADIUS

    axis.set_facecolor("#262b36")
    for centre in task.hazards:
        axis.add_patch(Circle(tuple(centre), HAZARD_RADIUS, color="#be483c"))
    axis.add_patch(Circle(tuple(task.goal), GOAL_RADIUS, color="#009e73"))
    axis.add_patch(Circle((0, 0), 0.1, color="#56b4e9"))
    axis.set(xlim=(-1.2 * extent, 1.2 * extent), ylim=(-1.2 * extent, 1.2 * extent), aspect="equal")


# -- summaries without episodes -----------------------------------------------------------------------------


@mpl.rc_context(STYLE)
def cards(found: Found) -> list[Shown]:
    """Agents of which only a card is left: total return and shares over budget by budget."""
    kept = {label: files[0].value["evaluation"] for label, files in found.files.items()}
    figure = Figure(figsize=(8.4, 3))
    axes = figure.subplots(1, 2)
    for colour, (label, about) in zip(PALETTE, kept.items(), strict=False):
        summary = about["summary"]
        for axis, name in zip(axes, ("by_budget", "over_by_budget"), strict=True):
            axis.plot(list(summary[name]), list(summary[name].values()), "o-", color=colour, label=label)
    axes[0].set(title="total return of 50 episodes", xlabel="budget δ", ylim=(0, None))
    axes[1].set(title="share of episodes over budget", xlabel="budget δ", ylim=(0, None))
    axes[1].yaxis.set_major_formatter(mpl.ticker.PercentFormatter(xmax=1))
    axes[0].legend(frameon=False)
    rows = [_summary_row(label, about["summary"], about.get("actions", "")) for label, about in kept.items()]
    note = "Only the cards of these runs were kept, so there is no curve by episode and no error by bin."
    text = f"Total return and share over budget, by budget: {', '.join(kept)}."
    return [Drawing(figure=figure, text=text), Grid(header=SUMMARY, rows=rows), note]


def summaries(found: Found) -> list[Shown]:
    """Agents of which only a summary is left, as a table."""
    rows = []
    for label, files in found.files.items():
        value = files[0].value
        rows.append(_summary_row(label, value["summary"], str(value["meta"].get("actions", ""))))
    return [Grid(header=SUMMARY, rows=rows)]


SUMMARY = ("", "tasks", "return of all episodes", "return, last episodes", "over budget, all / last", "actions")


def _summary_row(label: str, summary: dict[str, Any], actions: str) -> list[str]:
    return [
        label,
        str(summary["tasks"]),
        f"{summary['total_return']:.2f} ± {summary['total_return_error']:.2f}",
        f"{summary['last_return']:.3f} ({summary['last']})",
        f"{summary['over_budget']:.1%} / {summary['over_budget_last']:.1%}",
        actions,
    ]


def published(found: Found) -> list[Shown]:
    """Algorithm 1 beside the default, and the summaries of earlier off-policy runs."""
    shown = episodes(found)
    rows = [
        _summary_row(label, files[0].value["summary"], str(files[0].value["meta"].get("actions", "")))
        for label, files in found.files.items()
        if isinstance(files[0].value, dict)
    ]
    if rows:
        shown.append(Grid(header=SUMMARY, rows=rows, title="evaluations of which only the summary was kept"))
    return [*shown, Grid(header=("Algorithm 1", "--preset darkroom-paper"), rows=DEPARTURES, title="departures")]


# What --preset darkroom-paper still does differently from the printed algorithm.
DEPARTURES = (
    ("one trajectory, then one update", "8 rows side by side, then 64 updates; a row holds several trials"),
    ("TD errors in raw units", "Q and its targets in units of their running scale"),
    ("actions sampled from the policy alone", "an ε of random actions, which falls over the first half"),
    ("λ from the episodes of the replayed batch", "λ from the trials just played (penalty.source rollout); "
     "replay is an option"),
    ("C_max is reset in every episode, so the last episode counts", "C_max is the largest of the trajectory"),
    ("λ unbounded", "λ at most at its cap"),
    ("8 heads, lr 3e-4, betas (0.9, 0.99), batch 32", "the same"),
    ("replay of 100,000", "2048 rows of 1500 steps: all 672 of the run"),
    ("embedding dropout 5", "none: a rate of 5 has no meaning"),
)  # fmt: skip


# -- Safe AD's ablations ------------------------------------------------------------------------------------


@mpl.rc_context(STYLE)
def safe_ad_ablations(found: Found) -> list[Shown]:
    """Totals of all variants with their standard errors; curves by episode of those that were stored."""
    document, curves = found.value("ablations"), found.groups().get("by episode", [])
    if document is not None:
        runs = {run["label"]: run["summary"] for run in document["runs"]}
    else:
        runs = {r.label: {**vars(summarise(r))} for r in curves}
    figure = Figure(figsize=(8.4, 1.2 + 0.3 * len(runs)))
    axes = figure.subplots(1, 2, sharey=True)
    for row, summary in enumerate(runs.values()):
        error = summary["total_return_error"]
        axes[0].errorbar(summary["total_return"], row, xerr=error, fmt="o", color=PALETTE[0], capsize=3)
        axes[1].plot(summary["over_budget"], row, "o", color=PALETTE[1])
    axes[0].set_yticks(range(len(runs)), list(runs))
    axes[0].set(title="total return ± standard error over tasks", ylim=(len(runs) - 0.5, -0.5))
    axes[1].set(
        title="share of episodes over budget", xlim=(0, 1.1 * max(x["over_budget"] for x in runs.values()) or 1)
    )
    axes[1].xaxis.set_major_formatter(mpl.ticker.PercentFormatter(xmax=1))
    rows = [_summary_row(label, summary, "sampled, temperature 1") for label, summary in runs.items()]
    shown: list[Shown] = [
        Drawing(figure=figure, text="Safe AD's variants: total return and share over budget."),
        Grid(header=SUMMARY, rows=rows),
    ]
    if curves:
        text = "Return and cost by episode of the variants whose episodes were stored."
        groups = {result.label: [result] for result in curves}
        shown.append(Drawing(figure=plots.by_episode(groups), text=text))
    return shown


# -- guard, beyond K ----------------------------------------------------------------------------------------


def guard(found: Found) -> list[Shown]:
    """The paper's figures by budget, how often and by how much budgets are broken, and what the guard did."""
    groups = found.groups()
    rows, deciles = [], []
    header: list[str] = []
    for label, seeds in groups.items():
        safe, brief = safety(seeds), [summarise(result) for result in seeds]
        mean = lambda name, parts=brief: float(np.mean([getattr(part, name) for part in parts]))  # noqa: E731
        shares = (mean("over_budget"), mean("over_budget_last"), safe.trials_over, safe.stepped_in)
        over, last, ever, stepped = (f"{x:.2%}" if np.isfinite(x) else "–" for x in shares)
        beyond = " / ".join(f"{x:.3g}" if np.isfinite(x) else "–" for x in (safe.excess_mean, safe.excess_95))
        tasks = f"{sum(part.tasks for part in brief):,}"
        rows.append([label, tasks, f"{mean('total_return'):.4g}", f"{over} / {last}", ever, beyond, stepped])
        deciles.append([label, *(f"{x:.3g}" if np.isfinite(x) else "–" for x in safe.largest)])
        header = [f"{low:g}–{high:g}" for low, high in itertools.pairwise(safe.deciles)]
    columns = (
        "", "tasks", "total return", "episodes over budget, all / last", "trials ever over",
        "cost beyond the budget, mean / 95th percentile", "steps at which the guard stepped in",
    )  # fmt: skip
    largest = Grid(title="largest episode cost of a trial, mean by budget", header=["", *header], rows=deciles)
    return [*budgets(found, over=True), Grid(header=columns, rows=rows), largest] if groups else []


@mpl.rc_context(STYLE)
def calibration(found: Found) -> list[Shown]:
    """Predicted against observed chance of a cost, for tasks like those of training and for test tasks."""
    value = next(iter(found.files.values()))[0].value
    figure = Figure(figsize=(4.4, 3.6))
    axis = figure.subplots()
    axis.plot([0, 1], [0, 1], color="#999999", linestyle=":")
    for colour, split in zip(PALETTE, ("train", "test"), strict=False):
        axis.plot(value[split]["predicted"], value[split]["observed"], "o-", color=colour, label=f"{split} tasks")
    axis.set(title="chance that the next step costs", xlabel="predicted", ylabel="observed")
    axis.legend(frameon=False)
    rows = [
        [split, f"{value[split]['steps']:,}", f"{value[split]['expected_calibration_error']:.4f}"]
        for split in ("train", "test")
    ]
    text = "Predicted against observed chance that the next step costs, for training and test tasks."
    drawing = Drawing(figure=figure, text=text)
    return [drawing, Grid(header=("tasks", "steps", "expected calibration error"), rows=rows)]


@mpl.rc_context(STYLE)
def beyond(found: Found, *, table_only: tuple[str, ...] = ()) -> list[Shown]:
    """Return and share over budget by episode, past the K of training, and their means by blocks of K episodes."""
    # An evaluation has a card of the same name as a file of bench/beyond.py.
    evaluated = found.groups()
    played = {label: _played_on(evaluated.get(label, [found.value(label)])[0]) for label in found.files}
    drawn = {label: own for label, own in played.items() if label not in table_only} or played
    figure = Figure(figsize=(8.4, 2.8))
    axes = figure.subplots(1, 2)
    for axis, name, title in zip(axes, ("returns", "over"), ("episode return", "share over budget"), strict=True):
        _past_k(axis, drawn, name)
        axis.set(title=title, xlabel="episode (dotted: K, dashed: context full)", ylim=(0, None))
    axes[1].yaxis.set_major_formatter(mpl.ticker.PercentFormatter(xmax=1))
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, loc="outside right upper", fontsize=8)
    rows = [
        [label, str(own.tasks), str(own.known), *(_blocks(own, name, form) for name, form in BLOCKS)]
        for label, own in played.items()
    ]
    text = f"Return and share over budget past the episodes of training: {', '.join(drawn)}."
    header = ("", "tasks", "K", "return per episode, up to K → 2K → 3K → 5K → 10K", "cost", "over budget")
    note = f"Thin: each episode. Thick: the mean of K / {SMOOTHED} around it."
    return [Drawing(figure=figure, text=text), Grid(header=header, rows=rows), note, *_fresh(evaluated)]


EDGES = (0, 1, 2, 3, 5, 10)  # of the blocks in the table, in K episodes
RING = ", not settled"  # ends the label of an agent whose memory does not settle
SMOOTHED = 4  # a curve is the mean over K divided by this


def _past_k(axis: Axes, drawn: "dict[str, PlayedOn]", name: str) -> None:
    """The curves of one number, and what changes for an agent: it is past K, its context is full."""
    whose = {label: label.removesuffix(RING) for label in drawn}  # both ways of an agent have one colour
    colours = _colours(list(dict.fromkeys(whose.values())))
    for label, own in drawn.items():
        colour, style = colours[whose[label]], "-" if whose[label] == label else ":"
        y = own.curves[name]
        x = np.arange(1, len(y) + 1)
        axis.plot(x, y, color=colour, linewidth=0.6, alpha=0.25)
        axis.plot(x, _running_mean(y, max(own.known // SMOOTHED, 1)), style, color=colour, label=label)
        if own.full is not None and own.full <= len(y):
            axis.axvline(own.full, color=colour, linestyle="--", linewidth=0.8)
    for known in {own.known for own in drawn.values()}:
        axis.axvline(known, color="#bb0000", linestyle=":", linewidth=0.8)


def _running_mean(y: np.ndarray, width: int) -> np.ndarray:
    """The mean of up to `width` values around each, fewer at the ends."""
    before = (width - 1) // 2
    return np.array([y[max(i - before, 0) : i + width - before].mean() for i in range(len(y))])


def _colours(labels: list[str]) -> dict[str, str]:
    """Those that methods and reference agents have in every figure; others take what is left."""
    known = {**plots.METHOD_COLOURS, **plots.REFERENCE_COLOURS}
    free = itertools.cycle([colour for colour in PALETTE if colour not in known.values()])
    return {label: known.get(label) or next(free) for label in labels}


BLOCKS = (("returns", ".3g"), ("costs", ".2f"), ("over", ".2%"))


class PlayedOn(NamedTuple):
    """An agent that went on playing."""

    tasks: int
    known: int  # K
    curves: dict[str, np.ndarray]  # returns, costs, over: means over tasks, [episode]
    full: float | None = None  # episode in which the context is full: the median of the trials where it ever is


def _played_on(value: Any) -> PlayedOn:
    """Of an evaluation, or of the file that bench/beyond.py writes."""
    if isinstance(value, Results):
        curves = {name: getattr(value, name).mean(axis=0) for name, _ in BLOCKS}
        known = int(value.meta["env"]["parameters"]["episodes"])
        return PlayedOn(tasks=len(value.returns), known=known, curves=curves, full=_full_from(value))
    curves = {name: np.asarray(value["episodes"][name], float) for name, _ in BLOCKS}
    full = value.get("context_full", {}).get("median")
    return PlayedOn(tasks=value["tasks"], known=value["trained_episodes"], curves=curves, full=full)


def _full_from(results: Results) -> float | None:
    """See `PlayedOn.full`; None where no context fills up, or the agent's card has none."""
    context = results.meta.get("card", {}).get("net", {}).get("context")
    if context is None:
        return None
    full = results.lengths.cumsum(axis=1) > context
    return float(np.median(full.argmax(axis=1)[full.any(axis=1)] + 1)) if full.any() else None


def _blocks(own: PlayedOn, name: str, form: str) -> str:
    y = own.curves[name]
    blocks = (y[begin * own.known : end * own.known] for begin, end in itertools.pairwise(EDGES))
    return " → ".join(format(block.mean(), form) for block in blocks if len(block))


def temperatures(found: Found) -> list[Shown]:
    """What each temperature brought on validation tasks, and which one the rule takes."""
    rows = []
    for label, files in found.files.items():
        tried = {file.path.stem.rpartition("-")[2]: summarise(file.value) for file in files}
        best = max(tried, key=lambda name: rank(tried[name], TOLERANCE))
        rows += [
            [
                label if index == 0 else "", name, str(one.tasks), f"{one.total_return:.4g}",
                f"{one.over_budget:.2%}", "chosen" if name == best else "",
            ]
            for index, (name, one) in enumerate(tried.items())
        ]  # fmt: skip
    note = (
        "The rule, the same for every method: the greatest return among the temperatures with at most "
        f"{TOLERANCE:.0%} of the episodes over budget; where there is none, the fewest over budget. Frozen list "
        "“validation”, budgets and actions of seed 1000. The reported tasks are others."
    )
    return [Grid(header=("", "temperature", "tasks", "return", "over budget", "by the rule"), rows=rows), note]


TOLERANCE = 0.03  # of the episodes, over budget, in the choice of a temperature
