"""A sweep's folder as panels of the report: what its runs reached, and how they learned. Never imports jax."""

import glob
from collections.abc import Callable
from functools import partial
from pathlib import Path

from safeicrl.evaluation import plots
from safeicrl.evaluation.archive import load_results
from safeicrl.evaluation.sweeps import SweptRun, read_sweep
from safeicrl.log import read_run
from safeicrl.show.report import draw
from safeicrl.show.report.content import Drawing, Found, Grid, Need, Panel, Part, Shown


def sweep_panels(folder: Path) -> tuple[Panel, ...]:
    """The panels of the sweep in `folder`; runs that differ in their seed only are drawn as one band."""
    runs = read_sweep(folder)["runs"]
    worlds = _worlds(folder, runs)

    def parts(name: str, show: Callable[[Found], list[Shown]]) -> tuple[Part, ...]:
        named = enumerate(worlds.items(), 1)
        return tuple(
            Part(name=f"{name}-{number}", title=world, needs=tuple(needs), show=show)
            for number, (world, needs) in named
        )

    logs = tuple(
        Need(label=run.name, files=tuple(f"{glob.escape(run.name)}/{x}" for x in LOGS), command=run.command)
        for run in runs
    )
    curves = Part(name="training-1", title="Training curves", needs=logs, show=_curves)
    table = Part(name="runs-1", title="State", show=lambda _: [_table(runs)])
    panel = partial(_panel, folder)
    return (
        panel("episodes", "By episode", "Frozen policies on unseen tasks.", parts("episodes", draw.episodes)),
        panel("budgets", "By budget", "The same evaluations.", parts("budgets", partial(draw.budgets, over=True))),
        panel("training", "Training", "All runs; the stages of a run follow one another.", (curves,)),
        panel("runs", "The runs", "Whether each has finished, and how to train it alone.", (table,)),
    )  # fmt: skip


LOGS = ("metrics.jsonl", "*-*/metrics.jsonl")  # of a run of one stage, of several


def _panel(folder: Path, name: str, title: str, text: str, parts: tuple[Part, ...]) -> Panel:
    command = f"safeicrl reproduce {name} --results {folder}"
    return Panel(name=name, title=title, text=text, parts=parts, command=command)


def _worlds(folder: Path, runs: list[SweptRun]) -> dict[str, list[Need]]:
    """Environment → what is drawn of it; runs without results are under a title of their own."""
    labels: dict[str, list[SweptRun]] = {}
    for run in runs:
        labels.setdefault(run.label, []).append(run)
    worlds: dict[str, list[Need]] = {}
    for label, seeds in labels.items():
        files = [file for run in seeds for file in run.results()]
        patterns = [glob.escape(str(file.relative_to(folder))) for file in files]
        need = Need(
            label=label,
            files=tuple(patterns or (f"{glob.escape(run.name)}/*evaluation*.npz" for run in seeds)),
            command="\n".join(run.command for run in seeds),
        )
        env = load_results(files[0]).meta.get("env") if files else None
        world = str(env["name"]) if isinstance(env, dict) and "name" in env else "Environment not recorded"
        worlds.setdefault(world if files else "Not evaluated yet", []).append(need)
    return worlds


def _curves(found: Found) -> list[Shown]:
    runs = [(name, read_run(found.root / name), files[0].command) for name, files in found.files.items()]
    text = f"Return, cost, share over budget and λ while training: {', '.join(found.files)}."
    return [Drawing(figure=plots.training(runs), text=text)]


def _table(runs: list[SweptRun]) -> Grid:
    rows = [
        [run.name, run.status, f"{run.seconds / 60:.1f}", run.host or "–", run.error or "–", run.command]
        for run in runs
    ]
    return Grid(header=("run", "state", "minutes of the last attempt", "machine", "error", "command"), rows=rows)
