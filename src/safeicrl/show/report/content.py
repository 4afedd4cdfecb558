"""What a panel of the report is made of: what it needs, what was found, what it shows. Never imports jax."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from safeicrl.errors import UserError
from safeicrl.evaluation.archive import load_results
from safeicrl.evaluation.plots import Groups
from safeicrl.evaluation.results import Results
from safeicrl.files import read_json
from safeicrl.log import read_metrics


@dataclass(frozen=True, kw_only=True)
class Need:
    """Something a panel is drawn from: stored files, and the command that makes them."""

    label: str  # its name in figures and tables
    files: tuple[str, ...]  # patterns below the results folder; .npz: results, .json: a document, .jsonl: a log
    command: str  # makes the files at the paper's scale


@dataclass(frozen=True, kw_only=True)
class File:
    """A stored file, read."""

    path: Path  # below the results folder
    value: Any  # Results, a dict, or a list of metrics
    command: str  # that made it, as it was recorded; empty where nothing was
    seed: str  # of the evaluation's tasks and of training, in words


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure, and what it shows, for readers who cannot see it."""

    figure: Figure
    text: str


Shown = Drawing | Grid | str  # a string is a paragraph


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was found of a part's needs."""

    root: Path  # the results folder
    files: dict[str, list[File]] = field(default_factory=dict)  # label → its files
    missing: list[Need] = field(default_factory=list)

    def groups(self) -> Groups:
        """Label → its evaluations, for the figures; needs of another kind are left out."""
        found = {
            label: [f.value for f in files if isinstance(f.value, Results)] for label, files in self.files.items()
        }
        return {label: seeds for label, seeds in found.items() if seeds}

    def value(self, label: str) -> Any:
        """What the first file of a need holds; None if there is none."""
        return self.files[label][0].value if label in self.files else None


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of a panel: one world, one ablation."""

    name: str
    title: str
    needs: tuple[Need, ...] = ()
    show: Callable[[Found], list[Shown]]  # called if anything was found, or nothing is needed


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A figure or table of the report."""

    name: str  # on the command line
    title: str
    text: str  # what it shows and how to read it
    parts: tuple[Part, ...]
    command: str = ""  # that makes it alone; with its name only by default


def find(part: Part, root: Path) -> Found:
    """Read what a part needs from below `root`; a broken file is the user's to mend, a missing one is shown."""
    files: dict[str, list[File]] = {}
    missing = []
    for need in part.needs:
        paths = sorted({path for pattern in need.files for path in root.glob(pattern) if path.is_file()})
        if paths:
            files[need.label] = [_read(path, root) for path in paths]
        else:
            missing.append(need)
    return Found(root=root, files=files, missing=missing)


def _read(path: Path, root: Path) -> File:
    relative = path.relative_to(root)
    if path.suffix == ".npz":
        results = load_results(path)
        return File(
            path=relative, value=results, command=str(results.meta.get("command", "")), seed=_seeds(results.meta)
        )
    if path.suffix == ".jsonl":
        config = path.with_name("config.json")
        about = read_json(config, "configuration") if config.exists() else {}
        return File(
            path=relative, value=read_metrics(path), command=str(about.get("command", "")), seed=_run_seeds(about)
        )
    value = read_json(path, "result")
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a result: it must hold a JSON object")
    about = value.get("meta") or value.get("evaluation") or value
    command = value.get("command") or about.get("command") or ""
    return File(
        path=relative,
        value=value,
        command=str(command),
        seed=_seeds(about) if "seed" in about else _run_seeds(value),
    )


def _seeds(meta: dict[str, Any]) -> str:
    """The seed of the tasks, and that of training where the card says it."""
    training = (meta.get("card") or {}).get("training") or {}
    trained = f"; training seed {training['seed']}" if "seed" in training else ""
    return f"tasks of seed {meta['seed']}{trained}" if "seed" in meta else "not recorded"


def _run_seeds(config: dict[str, Any]) -> str:
    train = config.get("train") or config.get("settings") or config
    if "seed" not in train:
        return "not recorded"
    first, count = train["seed"], int(train.get("seeds") or 1)
    return f"training seed {first}" if count == 1 else f"training seeds {first} to {first + count - 1}"
