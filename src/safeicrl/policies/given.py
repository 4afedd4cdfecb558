"""What a caller gives to a policy, as arrays with a row for each world; a mistake is one line."""

from typing import Any

import numpy as np

from safeicrl.envs.api import EnvSpec
from safeicrl.envs.faults import broken_rule, keeps_promise
from safeicrl.errors import UserError, check_budget, check_sound


def as_budgets(budget: Any, spec: EnvSpec) -> np.ndarray:
    """One budget, or several, as float32. A tuple is a budget for each cost, a list may be a batch."""
    if isinstance(budget, tuple) and not spec.several:
        rule = "budget must be a number or, for a batch, a list; tuples are for several costs"
        raise UserError(f"{rule}, got {budget!r:.60}")
    return check_budget(budget)


def budget_per_row(budgets: np.ndarray, rows: int, spec: EnvSpec) -> np.ndarray:
    """One budget for each row, [row]; with several costs [row, cost]."""
    each = spec.cost_shape
    if spec.several and (budgets.ndim not in (1, 2) or budgets.shape[-1:] != each):
        words = f"{len(spec.costs)} numbers ({', '.join(spec.costs)}) or a list of such budgets"
        raise UserError(f"budget must be {words}, got shape {budgets.shape}")
    if budgets.ndim > 1 + len(each):
        raise UserError(f"budget must be a number or a list of numbers, got shape {budgets.shape}")
    if budgets.ndim == 1 + len(each) and len(budgets) != rows:
        raise UserError(f"{len(budgets)} budgets were given for a batch of {rows}")
    return np.broadcast_to(budgets, (rows, *each))


def as_floats(name: str, value: Any) -> np.ndarray:
    """Anything made of numbers as float32."""
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "iufb":
            raise ValueError
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused as such
            return array.astype(np.float32)
    except (TypeError, ValueError):
        raise UserError(f"{name} must be made of numbers, got {value!r}") from None


def number_per_row(name: str, value: Any, batched: bool, rows: int, spec: EnvSpec | None = None) -> np.ndarray:
    """A number per row, [row]; of costs, one that `spec` allows, and of several [row, cost]."""
    if value is None:
        raise UserError(f"act needs the last step's {name}: only the first call after start leaves it out")
    array = as_floats(name, value)
    each = () if spec is None else spec.cost_shape
    if array.shape != ((rows, *each) if batched else each):
        many = f"{len(spec.costs)} numbers ({', '.join(spec.costs)})" if spec is not None and each else "one number"
        expected = f"{many} for each of {rows} rows" if batched else many
        raise UserError(f"{name} must be {expected}, got shape {array.shape}")
    kept = keeps_promise(name, check_sound(name, array), spec)
    if not kept.all():
        value = float(array[~kept].flat[0])
        raise UserError(f"{broken_rule(name, value, spec)}, got {value:g}")
    return array.reshape(rows, *each)


def flag_per_row(name: str, value: Any, batched: bool, rows: int) -> np.ndarray:
    """A flag per row, [row] bool; a single one holds for all rows."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError):  # a ragged list
        array = np.array(None)
    # 0 and 1 are taken too: simulators in other languages have no other flags
    flags = array.dtype.kind == "b" or (array.dtype.kind in "iu" and ((array == 0) | (array == 1)).all())
    if not flags or array.shape not in ((), (rows,) if batched else ()):
        raise UserError(
            f"{name} must be true or false" + (f", or {rows} of them" if batched else "") + f", got {value!r}"
        )
    return np.broadcast_to(array.astype(bool), (rows,))
