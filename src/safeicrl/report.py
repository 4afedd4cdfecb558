"""Tables and figures from files on disk: results, training logs. Never imports jax."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from safeicrl.errors import UserError
from safeicrl.log import read_metrics
from safeicrl.results import Results, load_results, summarise


def summary_table(results: Sequence[Results], title: str | None = None) -> Table:
    """One column an agent: total return, the last ten episodes, shares over budget, total return by budget."""
    summaries = [summarise(result) for result in results]
    first = summaries[0]
    title = title or f"{first.tasks} unseen tasks, {first.episodes} episodes each"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("", no_wrap=True)
    for result in results:
        table.add_column(result.label, justify="right", overflow="fold")
    row = lambda name, form: table.add_row(name, *(form(summary) for summary in summaries))  # noqa: E731
    row(f"total return of {first.episodes}", lambda s: f"{s.total_return:.2f} ± {s.total_return_error:.2f}")
    row("return, last ten", lambda s: f"{s.last_return:.3f}")
    row("over budget", lambda s: f"{s.over_budget:.2%}")
    row("over budget, last ten", lambda s: f"{s.over_budget_last:.2%}")
    if all(summary.by_budget.keys() == first.by_budget.keys() for summary in summaries):
        for name in first.by_budget:
            row(f"total return, δ {name}", lambda s, name=name: f"{s.by_budget[name]:.1f}")
    return table


def draw_all(files: Sequence[Path], out: Path, extension: str = "png") -> list[Path]:
    """Every figure that the files have the numbers for; results of one name are its seeds, drawn as a band."""
    from safeicrl import plots

    runs, results = [], []
    for file in files:
        if file.is_dir() or file.suffix == ".jsonl":
            path = file / "metrics.jsonl" if file.is_dir() else file
            lines = read_metrics(path)
            if not lines:
                raise UserError(f"no training log at {path}")
            runs.append((path.parent.name or str(path), lines, plots.command_of(path.parent)))
        else:
            results.append(load_results(file))
    figures = {}
    if results:
        groups = group(results)
        figures["episodes"] = plots.by_episode(groups)
        figures["budgets"] = plots.by_budget(groups)
        figures["over-budget"] = plots.over_budget(groups)
    if runs:
        figures["training"] = plots.training(runs)
    return [plots.save(figure, out / f"{name}.{extension}") for name, figure in figures.items()]


def group(results: Sequence[Results]) -> dict[str, list[Results]]:
    """Results by label; several of one label are seeds of one agent."""
    groups: dict[str, list[Results]] = {}
    for result in results:
        groups.setdefault(result.label, []).append(result)
    return groups
