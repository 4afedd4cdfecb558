"""Tables and figures from files on disk: results, training logs. Never imports jax."""

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from rich import box
from rich.markup import escape
from rich.table import Table

from safeicrl.errors import Incomplete, UserError
from safeicrl.evaluation.archive import load_results
from safeicrl.evaluation.results import Results
from safeicrl.evaluation.statistics import (
    MEASURES,
    NUMBERS,
    Safety,
    Summary,
    bootstrap,
    interval,
    relative,
    safety,
    standard_error,
    summarise,
)
from safeicrl.evaluation.sweeps import is_sweep, read_sweep, training_evaluations
from safeicrl.files import make_folder
from safeicrl.log import read_metrics, read_run


def summary_table(results: Sequence[Results], title: str | None = None) -> Table:
    """One column per agent: total return, the last episodes, shares over budget, total return by budget.

    With a single agent and several budgets per task, also the rise in return from bin to bin on the same tasks.
    """
    summaries = [summarise(result) for result in results]
    first = summaries[0]
    table = _table(title or _protocol(first))
    table.add_column("", no_wrap=True)
    for result in results:
        table.add_column(as_text(result.label), justify="right", overflow="fold")
    row = lambda name, form: table.add_row(name, *(form(summary) for summary in summaries))  # noqa: E731
    row(f"total return of {first.episodes}", lambda s: f"{s.total_return:.2f} ± {s.total_return_error:.2f}")
    row(f"return, {first.last_name}", lambda s: f"{s.last_return:.3f}")
    row("over budget", lambda s: f"{s.over_budget:.2%}")
    row(f"over, {first.last_name}", lambda s: f"{s.over_budget_last:.2%}")
    row("trials ever over", lambda s: f"{s.trials_over:.2%}")
    _add_costs(table, results)
    if all(summary.by_budget.keys() == first.by_budget.keys() for summary in summaries):
        for name in first.by_budget:
            row(f"total, δ {name}", lambda s, name=name: _number(s.by_budget[name]))
    if len(results) == 1 and first.rise_by_budget:
        for before, name in itertools.pairwise(first.by_budget):
            if name in first.rise_by_budget:
                more, error = first.rise_by_budget[name]
                digits = 1 if error >= 1 else 2
                table.add_row(f"rise from δ {before}", f"{more:+.{digits}f} ± {error:.{digits}f}")
    return table


def _add_costs(table: Table, results: Sequence[Results]) -> None:
    """Rows for each cost by its name, where there are several and all results have the same ones."""
    names = results[0].cost_names
    if not results[0].several or any(result.cost_names != names for result in results):
        return
    for name in names:
        own = [summarise(result.by_cost()[name]) for result in results]
        table.add_row(f"cost, {name}", *(f"{summary.cost:.3g}" for summary in own))
        table.add_row(f"over budget, {name}", *(f"{summary.over_budget:.2%}" for summary in own))


def run_results(path: Path) -> list[Results]:
    """The results in a file; for a run's folder: the evaluations that chose the best policy of each seed.

    All of a folder have its name, so that they count as seeds of one agent. A sweep's folder has many agents.
    """
    if not path.is_dir():
        return [load_results(path)]
    if is_sweep(path):
        return _sweep_results(path)
    files = training_evaluations(path)
    if not files:
        raise UserError(f"{path} has no evaluation (best-seed*-evaluation.npz); its first one writes it")
    return _labelled(files, path.resolve().name)


def _sweep_results(path: Path) -> list[Results]:
    """The results of all runs of a sweep that have some; the others are warned of."""
    runs = read_sweep(path)["runs"]
    files = {run.name: run.results() for run in runs}
    missing = [name for name, found in files.items() if not found]
    if len(missing) == len(runs):
        raise UserError(f"no run of the sweep {path} has an evaluation yet")
    if missing:
        warnings.warn(f"left out, without an evaluation yet: {', '.join(missing)}", Incomplete, stacklevel=2)
    return [result for run in runs for result in _labelled(files[run.name], run.label)]


def _labelled(files: Sequence[Path], label: str) -> list[Results]:
    found = [load_results(file) for file in files]
    return [dataclasses.replace(x, meta={**x.meta, "label": label}) for x in found]


def sweep_table(groups: Mapping[str, Sequence[Results]]) -> Table:
    """One row per run: its seeds and its numbers, each with a 95% interval."""
    table = _table(
        "mean ± 95% interval, over seeds; over tasks where there is one seed\n"
        "IQM: interquartile mean of the total return [95% bootstrap interval]"
    )
    table.add_column("", no_wrap=True)
    for column in ("seeds", *MEASURES, "IQM"):
        table.add_column(column, justify="right")
    for label, seeds in groups.items():
        numbers = []
        for measure, percent in MEASURES.values():
            mean, half = interval(seeds, measure)
            numbers.append(f"{mean:.1%} ± {half:.1%}" if percent else f"{mean:.3g} ± {half:.2g}")
        middle, low, high = bootstrap(seeds, MEASURES["total return"][0])
        table.add_row(as_text(label), str(len(seeds)), *numbers, f"{middle:.3g} [{low:.3g}, {high:.3g}]")
    return table


def safety_table(groups: Mapping[str, Sequence[Results]]) -> Table:
    """One column per agent, pooled over its seeds: how often, when and by how much budgets are broken."""
    found = {label: safety(seeds) for label, seeds in groups.items()}
    table = _table("budgets: how often, when and by how much they are broken")
    table.add_column("", no_wrap=True)
    for label in found:
        table.add_column(as_text(label), justify="right", overflow="fold")
    share = lambda value: f"{value:.2%}" if np.isfinite(value) else "–"  # noqa: E731
    number = lambda value: f"{value:.3g}" if np.isfinite(value) else "–"  # noqa: E731
    rows: dict[str, Callable[[Safety], str]] = {
        "episodes over budget": lambda s: share(s.over_budget),
        "first episode over": lambda s: share(s.by_episode[0]),
        "last episode over": lambda s: share(s.by_episode[-1]),
        "trials ever over": lambda s: share(s.trials_over),
        "first break, median episode": lambda s: number(s.first_break),
        "cost beyond it, mean": lambda s: number(s.excess_mean),
        "… 95th percentile": lambda s: number(s.excess_95),
        "… largest": lambda s: number(s.excess_worst),
        "over, past training's K": lambda s: share(s.over_beyond),
        "steps, guard stepped in": lambda s: share(s.stepped_in),
    }
    for name, form in rows.items():
        table.add_row(name, *(form(each) for each in found.values()))
    for index, (low, high) in enumerate(safety_deciles(found.values())):
        largest = (number(each.largest[index]) for each in found.values())
        table.add_row(f"largest cost, δ {low:g}–{high:g}", *largest)
    bins = [each.by_budget.keys() for each in found.values()]
    for name in bins[0] if all(names == bins[0] for names in bins) else ():
        table.add_row(f"over, δ {name}", *(share(each.by_budget[name]) for each in found.values()))
        table.add_row(f"trials, δ {name}", *(share(each.trials_by_budget[name]) for each in found.values()))
    return table


def safety_deciles(found: Iterable[Safety]) -> list[tuple[float, float]]:
    """The ten budget bins that all agents share; none where they differ."""
    first, *others = (each.deciles for each in found)
    return list(itertools.pairwise(first)) if all(other == first for other in others) else []


def limits_table(result: Results, last: int = 5) -> Table:
    """A track's results by speed limit, and the mean ± standard error over limits: a repeated limit counts once."""
    last = min(last, result.returns.shape[1])
    table = _table(f"by speed limit; last: the last {last} episodes; ±: over limits")
    limits = np.asarray(result.meta["limits"])[result.task]  # [trial]
    costs = result.total_costs
    last_return, cost = result.returns[:, -last:].mean(axis=1), costs[:, -last:].mean(axis=1)
    columns = {
        "return, first": (result.returns[:, 0], "{:.1f}"),
        "return, last": (last_return, "{:.1f}"),
        "cost, first": (costs[:, 0], "{:.2f}"),
        "cost, last": (cost, "{:.2f}"),
        "over budget": (result.over.mean(axis=1), "{:.1%}"),
    }
    table.add_column("limit", no_wrap=True)
    for name in ("trials", *columns):
        table.add_column(name, justify="right")
    names = np.unique(limits)
    for limit in names:
        mine = limits == limit
        numbers = (form.format(values[mine].mean()) for values, form in columns.values())
        table.add_row(f"{limit:g}", str(mine.sum()), *numbers)
    means = []
    for values, form in columns.values():
        each = np.array([values[limits == limit].mean() for limit in names])
        means.append(f"{form.format(each.mean())} ± {form.format(standard_error(each))}")
    table.add_section()
    table.add_row("mean", str(len(limits)), *means)
    return table


def relative_table(results: Sequence[Results], *, upper: Results, lower: Results, last: int = 5) -> Table:
    """One row per agent, with the two baselines: return of the last episodes, and its place between theirs."""
    name = f"last {NUMBERS[last]}" if 0 < last < len(NUMBERS) else f"last {last}"
    table = _table(f"{_protocol(summarise(upper))}; relative to {upper.label} (1) and {lower.label} (0)")
    table.add_column("", no_wrap=True)
    for column in (f"return, {name}", "relative", f"over budget, {name}"):
        table.add_column(column, justify="right")
    for result in (upper, *results, lower):
        found = relative(result, upper=upper, lower=lower, last=last)
        score = f"{found.score:.3f} ± {found.error:.3f}"
        table.add_row(as_text(result.label), f"{found.last_return:.3f}", score, f"{found.over_budget_last:.2%}")
    return table


def seeds_table(results: Mapping[str, Results]) -> Table:
    """One row per seed of one agent, and the mean over seeds with its standard error."""
    summaries = [summarise(result) for result in results.values()]
    first = summaries[0]
    table = _table(f"{next(iter(results.values())).label}: {_protocol(first)}")
    table.add_column("", no_wrap=True)
    columns = {
        f"total of {first.episodes}": (lambda s: s.total_return, "{:.2f}"),
        first.last_name: (lambda s: s.last_return, "{:.3f}"),
        "over budget": (lambda s: s.over_budget, "{:.2%}"),
        f"over, {first.last_name}": (lambda s: s.over_budget_last, "{:.2%}"),
    }
    for name in columns:
        table.add_column(name, justify="right")
    for name, summary in zip(results, summaries, strict=True):
        table.add_row(as_text(name), *(form.format(value(summary)) for value, form in columns.values()))
    means = []
    for value, form in columns.values():
        values = np.array([value(summary) for summary in summaries])
        means.append(f"{form.format(values.mean())} ± {form.format(standard_error(values))}")
    table.add_section()
    table.add_row("mean ± s.e.", *means)
    return table


def _table(title: str) -> Table:
    """A table narrow enough for four agents in 80 columns."""
    padding = (0, 1, 0, 0)  # top, right, bottom, left
    width = max(map(len, title.splitlines()))
    return Table(title=as_text(title), min_width=width, box=box.SIMPLE_HEAD, title_justify="left", padding=padding)


def as_text(name: str) -> str:
    """A name from a file or the command line for a table of rich: shown as it is, not read as markup."""
    return escape(name)


def _protocol(summary: Summary) -> str:
    trials = f" at {summary.budgets_per_task} budgets each" if summary.budgets_per_task > 1 else ""
    return f"{summary.tasks} unseen tasks{trials}, {summary.episodes} episodes each"


def _number(value: float) -> str:
    return f"{value:.1f}" if np.isfinite(value) else "–"  # no task had such a budget


def draw_all(files: Sequence[Path], out: Path, extension: str = "png") -> list[Path]:
    """Every figure that the files have numbers for; results with the same label are seeds, drawn as one band."""
    from safeicrl.evaluation import plots

    runs, results = [], []
    for file in _without_sweeps(files):
        if file.is_dir() or file.suffix == ".jsonl":
            folder = file if file.is_dir() else file.parent
            lines = read_run(folder) if file.is_dir() else read_metrics(file)
            if not lines:
                hint = f"; its results: {file}/*.npz" if file.is_dir() and any(file.glob("*.npz")) else ""
                raise UserError(f"no training log at {file}{hint}")
            runs.append((folder.name or str(file), lines, plots.command_of(folder)))
        else:
            results.append(load_results(file))
    make_folder(out)
    figures = {}
    if results:
        for suffix, groups in figure_groups(group(results)).items():
            figures[f"episodes{suffix}"] = plots.by_episode(groups)
            figures[f"budgets{suffix}"] = plots.by_budget(groups)
            figures[f"over-budget{suffix}"] = plots.over_budget(groups)
            figures[f"profiles{suffix}"] = plots.profiles(groups)
    if runs:
        figures["training"] = plots.training(runs)
    return [plots.save(figure, out / f"{name}.{extension}") for name, figure in figures.items()]


def _without_sweeps(files: Sequence[Path]) -> list[Path]:
    """The files, with the runs of a sweep that have begun instead of the sweep's folder."""
    found: list[Path] = []
    for file in files:
        inside = [run.folder for run in read_sweep(file)["runs"]] if is_sweep(file) else []
        found += [folder for folder in inside if read_run(folder)] or [file]
    return found


def figure_groups(groups: dict[str, list[Results]]) -> dict[str, dict[str, list[Results]]]:
    """What figures show: all results as they are; with several costs, those of each cost, under "-NAME"."""
    names = {seeds[0].cost_names for seeds in groups.values()}
    if len(names) > 1:
        words = " and ".join(", ".join(costs) for costs in names)
        raise UserError(f"results with different costs are not drawn together: {words}")
    costs = next(iter(names))
    if len(costs) == 1:
        return {"": groups}
    return {
        f"-{name}": {label: [seed.by_cost()[name] for seed in seeds] for label, seeds in groups.items()}
        for name in costs
    }


def group(results: Sequence[Results]) -> dict[str, list[Results]]:
    """Results by label; those with the same label are seeds of one agent."""
    groups: dict[str, list[Results]] = {}
    facts = (
        ("costs", lambda r: r.cost_names),
        ("episodes", lambda r: r.returns.shape[1]),
        ("budget range", lambda r: r.budget_range),
        ("budgets per task", lambda r: r.budgets_per_task),
    )
    for result in results:
        seeds = groups.setdefault(result.label, [])
        seeds.append(result)
        for name, of in facts:
            if of(result) != of(seeds[0]):
                raise UserError(
                    f"results with the same label are drawn as seeds of one agent, but those of {result.label!r} "
                    f"differ in their {name}: {of(seeds[0])} and {of(result)}; evaluate one with another --label"
                )
    return groups
