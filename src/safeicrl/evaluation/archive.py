"""Results on disk: npz for the numbers, JSON for where they came from and their summary. No jax."""

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np

from safeicrl.budgets import check_costs, ranges_of
from safeicrl.errors import UserError, check_integer
from safeicrl.evaluation.results import ARRAYS, Results
from safeicrl.evaluation.statistics import summaries
from safeicrl.files import atomic_write, read_json, read_npz, write_json


def save_results(results: Results, path: str | Path) -> tuple[Path, Path]:
    """Write `<path>.npz` and `<path>.json` (provenance and summary); returns both paths."""
    stem = _stem(path)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{name: getattr(results, name) for name in ARRAYS})
    arrays, card = Path(f"{stem}.npz"), Path(f"{stem}.json")
    about = {"meta": results.meta, **summaries(results)}
    atomic_write(arrays, [buffer.getbuffer()])
    # a kill in between leaves the new numbers beside the old provenance: the digest tells
    write_json(card, {**about, "sha256": hashlib.sha256(buffer.getbuffer()).hexdigest()})
    return arrays, card


def load_results(path: str | Path) -> Results:
    """Read what `save_results` wrote; `path` with or without its extension."""
    stem = _stem(path)
    arrays, card = Path(f"{stem}.npz"), Path(f"{stem}.json")
    missing = [file.name for file in (arrays, card) if not file.exists()]
    if len(missing) == 1 and Path(path).name not in missing:
        raise UserError(f"{path} is half a results file: {missing[0]} is missing beside it")
    if missing and Path(path).is_file():
        raise UserError(f"{path} is not a results file: that is a .npz with a .json of the same name beside it")
    if missing:
        raise UserError(f"no results file at {path}")
    saved = read_json(card, "results file")
    if not isinstance(saved, dict) or not isinstance(saved.get("meta"), dict):
        raise UserError(f"{card} is not a results file: it has no group 'meta'")
    try:
        if "sha256" in saved and saved["sha256"] != hashlib.sha256(arrays.read_bytes()).hexdigest():
            raise ValueError(f"it is damaged, or of another evaluation than {card.name} beside it")
        values = read_npz(arrays, ARRAYS)
        shape = values["returns"].shape
        if any(value.dtype.kind not in "fiu" for value in values.values()):
            raise ValueError("its arrays must be made of numbers")
        _check_meta(saved["meta"])
        costs = saved["meta"].get("costs") or ()
        each = (len(costs),) if len(costs) > 1 else ()
        if len(shape) != 2 or 0 in shape or values["budgets"].shape != (*shape[:1], *each):
            raise ValueError("its arrays do not fit together")
        if values["lengths"].shape != shape or values["costs"].shape != (*shape, *each):
            raise ValueError("its arrays do not fit together")
        results = Results(meta=saved["meta"], **values)
        if results.budgets_per_task < 1 or shape[0] % results.budgets_per_task:
            raise ValueError(f"{shape[0]} trials cannot be tasks with {results.budgets_per_task} budgets each")
        return results
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{arrays} is not a results file: {str(error).partition(chr(10))[0]}") from None


def _check_meta(meta: dict[str, Any]) -> None:
    """Raise unless what tables and figures read of a result's provenance is of the right type."""
    costs = tuple(meta.get("costs") or ("cost",))
    check_costs(costs)
    if meta.get("budget_range") is not None:
        ranges_of(meta["budget_range"], costs, "budget_range")
    check_integer("budgets_per_task", meta.get("budgets_per_task", 1), 1)
    env = meta.get("env", {})
    if not isinstance(env, dict) or not isinstance(env.get("parameters", {}), dict):
        raise ValueError(f"its environment must be an object, got {env!r:.60}")
    if env.get("name") == "revealed" and "name" not in env.get("parameters", {}):
        raise ValueError("its environment is revealed, but of which one is missing")


def results_equal(a: Results, b: Results) -> bool:
    """Whether the numbers are the same; time and place of the evaluation may differ."""
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ARRAYS)


def _stem(path: str | Path) -> str:
    text = str(path)
    return text[: -len(Path(text).suffix)] if Path(text).suffix in (".npz", ".json") else text
