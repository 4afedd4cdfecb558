"""Training logs as a table of numbers, for pandas. No jax."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from safeicrl.errors import UserError
from safeicrl.log import read_metrics, read_run


def load_metrics(path: str | Path) -> Any:
    """The log of a run's folder, or of a metrics.jsonl, as a DataFrame. Needs `pip install 'safeicrl[pandas]'`.

    One row per line of the log, one column per number: a list such as `over_budget_by_bin` becomes
    `over_budget_by_bin/0`, `over_budget_by_bin/1`, and so on. Evaluations are lines of their own (`eval/...`).
    """
    pandas = load_pandas()
    file = Path(path)
    lines = read_run(file) if file.is_dir() else read_metrics(file)
    if not lines:
        raise UserError(f"no training log at {file}")
    return pandas.DataFrame([_flat(line) for line in lines])


def load_pandas() -> Any:
    """The module, or an error that says how to install it."""
    try:
        return importlib.import_module("pandas")
    except ImportError:
        raise UserError("pandas is not installed: pip install 'safeicrl[pandas]'") from None


def _flat(line: dict[str, Any]) -> dict[str, Any]:
    """Without lists: one entry per number, with its index after its name."""
    flat: dict[str, Any] = {}
    for name, value in line.items():
        array = np.asarray(value, dtype=float) if isinstance(value, list) else None
        if array is None:
            flat[name] = value
        else:
            flat |= {f"{name}/{'/'.join(map(str, index))}": x for index, x in np.ndenumerate(array)}
    return flat
