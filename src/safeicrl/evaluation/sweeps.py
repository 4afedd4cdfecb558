"""What a sweep's folder holds, for tables, figures and the report; recipes/grid.py writes it. Never imports jax."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from safeicrl.errors import UserError
from safeicrl.files import SWEEP, read_json

# waiting: not begun, or not known to have ended; stopped: on request, it can go on
Status = Literal["waiting", "stopped", "failed", "finished"]
# A run lies in its sweep's folder. An index that somebody else wrote must not lead elsewhere.
NAME = re.compile(r"[\w.-]{1,200}=[\w.,=+-]{0,200}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class SweptRun:
    """One run of a sweep, as the sweep's index describes it."""

    name: str  # of its folder: the settings that differ
    label: str  # the same without the seed: runs with the same label are seeds of one agent
    command: str  # that trains it alone
    folder: Path
    status: Status = "waiting"
    error: str = ""  # why it failed
    seconds: float = 0.0  # that its last attempt took
    host: str = ""  # where that was

    def results(self) -> list[Path]:
        """The evaluations of its seeds: those after training, else those that chose its best policies."""
        after = sorted([*self.folder.glob("evaluation.npz"), *self.folder.glob("evaluation-seed*.npz")])
        return after or training_evaluations(self.folder)


def training_evaluations(folder: Path) -> list[Path]:
    """The evaluations that chose the best policy of each seed of a run; none before the first."""
    files = sorted(folder.glob("*-evaluation.npz"))
    if len(files) > 1:  # after several stages, policy-evaluation is that of the best seed, which is there as well
        files = [file for file in files if file.name != "policy-evaluation.npz"]
    return files


def is_sweep(path: Path) -> bool:
    """Whether `path` is the folder of a sweep."""
    return (path / SWEEP).is_file()


def read_sweep(folder: Path) -> dict[str, Any]:
    """The index of a sweep: `runs` as `SweptRun`, `grid` with a list of values for each setting."""
    path = folder / SWEEP
    index = read_json(path, "sweep")
    try:
        grid = {key: [str(value) for value in values] for key, values in index["grid"].items()}
        return {**index, "grid": grid, "runs": [_run(folder, each) for each in index["runs"]]}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is not a sweep: {error!r}") from None


def _run(folder: Path, saved: dict[str, Any]) -> SweptRun:
    name, label, command, error, host = (str(saved[x]) for x in ("name", "label", "command", "error", "host"))
    if not NAME.fullmatch(name) or saved["status"] not in get_args(Status):
        raise TypeError(f"{name:.40} is not a run")
    return SweptRun(
        name=name, label=label, command=command, folder=folder / name, status=saved["status"], error=error,
        seconds=float(saved["seconds"]), host=host,
    )  # fmt: skip
