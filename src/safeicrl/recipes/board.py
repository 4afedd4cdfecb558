"""What a sweep shows while it runs: a table on a terminal, a line for every run that ends elsewhere.

The numbers come from the runs' own logs, so they are the same wherever a run trains. Never imports jax.
"""

import contextlib
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from safeicrl.evaluation.sweeps import SweptRun
from safeicrl.files import LOCK, parse_json

MOST_ROWS = 24  # of the table; in a larger sweep those that are waiting or finished are only counted
TAIL = 2**15  # bytes at the end of a log in which its newest lines are looked for
STAGE = re.compile(r"\d+-.*")  # the folder of a stage
STYLES = {"running": "cyan", "failed": "red", "finished": "green"}


class Board:
    """The state of every run of a sweep."""

    def __init__(self, runs: list[SweptRun], planned: dict[str, int | None], console: Console) -> None:
        """`planned` has the iterations of the runs by name; None where only time limits them."""
        self.runs = {run.name: run for run in runs}
        self.planned = planned
        self.console = console
        self.live = Live(
            get_renderable=self.table, console=self.console, refresh_per_second=1, redirect_stdout=False,
            redirect_stderr=False, transient=True,
        )  # fmt: skip

    def __enter__(self) -> "Board":
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def note(self, run: SweptRun) -> None:
        """Take in a run that has ended."""
        self.runs[run.name] = run
        done = sum(each.status == "finished" for each in self.runs.values())
        why = f": {run.error}" if run.error else ""
        self.say(f"{run.name} {run.status} after {_clock(run.seconds)}{why} ({done} of {len(self.runs)} finished)")

    def table(self) -> Table:
        """One row per run."""
        states = {name: _state(run) for name, run in self.runs.items()}
        counts = Counter(states.values())
        order = ("finished", "running", "failed", "stopped", "waiting")
        title = ", ".join(f"{counts[state]} {state}" for state in order if counts[state])
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("run", overflow="fold")
        table.add_column("")
        for column in ("iterations", "time", "return", "over budget", "evaluation"):
            table.add_column(column, justify="right")
        crowded = len(self.runs) > MOST_ROWS
        for name, run in self.runs.items():
            if not crowded or states[name] in ("running", "failed"):
                # no markup: `say` draws the table without it
                state = Text(states[name], style=STYLES.get(states[name], "dim"))
                table.add_row(Text(name), state, *_numbers(run.folder, self.planned.get(name)))
        return table


def _state(run: SweptRun) -> str:
    """A waiting run in whose folder a process works is running."""
    return "running" if run.status == "waiting" and (run.folder / LOCK).exists() else run.status


def _numbers(folder: Path, planned: int | None) -> list[str]:
    newest = latest(folder)
    if not newest:
        return ["–"] * 5
    return [
        f"{newest['iteration']}" + (f" of {planned}" if planned is not None else ""),
        _clock(newest.get("seconds") or 0.0),
        _form(newest.get("return"), "{:.3f}"),
        _form(newest.get("over_budget"), "{:.1%}"),
        _form(newest.get("eval/total_return"), "{:.2f}"),
    ]


def _form(value: Any, form: str) -> str:
    return form.format(value) if isinstance(value, int | float) else "–"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S" if seconds >= 3600 else "%M:%S", time.gmtime(seconds))


def latest(folder: Path) -> dict[str, Any]:
    """The newest number of each kind in the log of a run; its iterations and seconds are of all stages so far."""
    stages = [path for path in folder.glob("*-*/metrics.jsonl") if STAGE.fullmatch(path.parent.name)]
    logs = sorted(stages, key=lambda path: int(path.parent.name.split("-")[0])) or [folder / "metrics.jsonl"]
    newest: dict[str, Any] = {}
    before = {"iteration": 0, "seconds": 0.0}
    for log in logs:
        own: dict[str, Any] = {}
        for line in _tail(log):
            own |= line
        newest |= own | {name: value + own.get(name, 0) for name, value in before.items()}
        before = {name: newest[name] for name in before}
    return newest if newest.get("iteration") else {}


def _tail(log: Path) -> list[dict[str, Any]]:
    """The last lines of a log; those that are cut or damaged are left out."""
    found = []
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(0, 2)
        file.seek(max(file.tell() - TAIL, 0))
        for text in file.read().split(b"\n"):
            with contextlib.suppress(ValueError):
                line = parse_json(text)
                if isinstance(line, dict) and isinstance(line.get("iteration"), int):
                    found.append(line)
    return found
