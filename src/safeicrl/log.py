"""Where training numbers go: metrics.jsonl always, TensorBoard and Weights & Biases on request, the terminal."""

import importlib
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from safeicrl.errors import Damaged, UserError
from safeicrl.files import RECIPE, atomic_write, parse_json, plain, read_json, stage_folder

REPORT_SECONDS = 10.0  # between progress lines where there is no terminal to draw a bar on
COUNTS = ("iteration", "env_steps", "seconds")  # what grows through a run


class Sink(Protocol):
    """Takes one flat record of numbers at a time."""

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Record `values` at env step `step`."""
        ...

    def sync(self) -> None:
        """Have everything on the disk: a checkpoint that counts on it follows."""
        ...

    def close(self) -> None:
        """Write what is left and let go of the file."""
        ...


class JsonLines:
    """One JSON object per line, handed to the system before the next iteration starts."""

    def __init__(self, path: Path, *, keep_until: int = 0, evaluated: int = 0) -> None:
        """Continue the log at `path` after iteration `keep_until`, whose evaluation counts if it is `evaluated`.

        A resumed run repeats what came after its checkpoint. Those lines are dropped, so that the log reads as if
        the run had not been interrupted.
        """
        kept = [line for line in read_metrics(path) if _counts(line, keep_until, evaluated)]
        atomic_write(path, [(json.dumps(line) + "\n").encode() for line in kept])
        self.path = path
        self.file = open(path, "ab", buffering=0)  # noqa: SIM115 (lives as long as the run)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Append one line."""
        rest = (json.dumps(plain(values)) + "\n").encode()
        try:
            while rest:
                rest = rest[self.file.write(rest) :]
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {os.strerror(error.errno or 0)}") from None

    def sync(self) -> None:
        """Flush to the disk."""
        try:
            os.fsync(self.file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {os.strerror(error.errno or 0)}") from None

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def _counts(line: dict[str, Any], keep_until: int, evaluated: int) -> bool:
    """Whether a line is from before the checkpoint at iteration `keep_until`."""
    if line["iteration"] == keep_until and any(name.startswith("eval/") for name in line):
        return evaluated == keep_until
    return line["iteration"] <= keep_until


class TensorBoard:
    """Scalars for TensorBoard, through tensorboardX."""

    def __init__(self, folder: Path) -> None:
        module = _optional("tensorboardX", "tensorboard")
        self.writer = module.SummaryWriter(str(folder))

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Add each number under its name."""
        for name, value in _scalars(values).items():
            self.writer.add_scalar(name, value, step)

    def sync(self) -> None:
        """Flush to the disk."""
        self.writer.flush()

    def close(self) -> None:
        """Flush to the disk."""
        self.writer.close()


class WandB:
    """A Weights & Biases run."""

    def __init__(self, project: str, folder: Path, config: dict[str, Any]) -> None:
        module = _optional("wandb", "wandb")
        self.run = module.init(project=project, name=folder.name, dir=str(folder), config=config)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Log one step."""
        self.run.log(_scalars(values), step=step)

    def sync(self) -> None:
        """Nothing: the service keeps its own files."""

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl. Damaged ones are left out with a warning, a last one cut by a kill without."""
    try:
        *whole, rest = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    read = [_parse(text) for text in whole]
    damaged = [number for number, line in enumerate(read, 1) if line is None]
    lines = [line for line in [*read, _parse(rest)] if line is not None]
    if damaged and not lines:
        raise UserError(f"{path} is no metrics file")
    if damaged:
        which = f"line {damaged[0]}" if len(damaged) == 1 else f"{len(damaged)} lines, the first is {damaged[0]}"
        warnings.warn(f"{path} is damaged: left out {which}", Damaged, stacklevel=2)
    return lines


def _parse(text: bytes) -> dict[str, Any] | None:
    """One line of a metrics file; None if it is not one."""
    try:
        line = parse_json(text)
    except ValueError:
        return None
    number = lambda value: isinstance(value, int | float) and not isinstance(value, bool)  # noqa: E731
    if not isinstance(line, dict) or type(line.get("iteration")) is not int:
        return None
    return line if all(number(line.get(name, 0)) for name in COUNTS) else None


def read_run(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run's folder; those of several stages joined, with counts that go on from stage to stage."""
    if not (folder / RECIPE).exists():
        return read_metrics(folder / "metrics.jsonl")
    joined: list[dict[str, Any]] = []
    try:
        names = [stage["name"] for stage in read_json(folder / RECIPE, "training run")["stages"]]
        folders = [folder / stage_folder(number, name) for number, name in enumerate(names, 1)]
    except (KeyError, TypeError) as error:
        raise UserError(f"{folder / RECIPE} is not a training run: {error!r}") from None
    for stage in folders:
        before = joined[-1] if joined else {}
        for line in read_metrics(stage / "metrics.jsonl"):
            joined.append({**line, **{name: before.get(name, 0) + line.get(name, 0) for name in COUNTS}})
    return joined


def _optional(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"{module} is not installed: pip install 'safeicrl[{extra}]'") from None


def _scalars(values: dict[str, Any]) -> dict[str, float]:
    """The numbers among `values`, vectors component by component."""
    flat: dict[str, float] = {}
    for name, value in values.items():
        if value is None:
            continue
        array = np.asarray(value, dtype=float)
        named = [(name, array)] if array.ndim == 0 else [(f"{name}/{i}", x) for i, x in enumerate(array.ravel())]
        flat |= {key: float(x) for key, x in named if np.isfinite(x)}
    return flat


class Terminal:
    """A progress bar on a terminal, a line every few seconds elsewhere (a log file, a batch job)."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self.last = -np.inf
        self.bar = Progress(
            BarColumn(bar_width=24), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(),
            TextColumn("{task.description}"), console=self.console, disable=not self.console.is_terminal,
        )  # fmt: skip
        self.task = self.bar.add_task("", total=1.0)

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line that stays."""
        self.console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    def progress(self, done: float, text: str) -> None:
        """Show how far the run is; `text` is the line beside the bar."""
        self.bar.update(self.task, completed=done, description=text)
        if not self.console.is_terminal and time.monotonic() - self.last >= REPORT_SECONDS:
            self.last = time.monotonic()
            self.say(f"{done:4.0%} {text}")

    def __enter__(self) -> "Terminal":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
