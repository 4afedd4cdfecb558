"""The one error users see: a single line that names the value and the rule it breaks."""

import difflib
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

# Bounds on what a card, a config or a command line may ask for, far above any use. A number beyond them is a
# mistake: it is refused before memory is taken for it.
MOST_STEPS = 2**31 - 1  # that are in memory together: rows · episodes · steps
MOST_EPISODES = 2**28  # of an evaluation
MOST_ROWS = 2**20  # side by side
WIDEST, DEEPEST = 2**14, 2**7  # layer, number of layers
LARGEST = 1e10  # size of a reward, cost or observation: the cube of a larger one may overflow inside a network


class UserError(ValueError):
    """A mistake of the user. The command line prints its message without a traceback."""


class UnknownParameter(UserError, TypeError):
    """A parameter that an environment does not have; also the `TypeError` that Python raises for one."""


class Approximation(UserWarning):
    """Approximate physics were used."""


class BeyondTraining(UserWarning):
    """A policy is used beyond its training: it still acts, but nobody knows how well."""


class Incomplete(UserWarning):
    """Some runs of a sweep have no results yet and were left out."""


class Unlike(UserWarning):
    """Results are shown side by side that are not of the same tasks."""


class Damaged(UserWarning):
    """A part of a file could not be read and was left out."""


def printable(text: str) -> str:
    """`text` with control characters escaped, so that a name from a file cannot move a terminal's cursor."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def unknown_name(kind: str, name: object, known: Iterable[str]) -> UserError:
    """The error for an unknown name: it lists the known ones and suggests the nearest."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return UserError(f"unknown {kind} {name!r}; known: {', '.join(names)}.{hint}")


def check_budget(budget: object) -> np.ndarray:
    """Return `budget` (a number or an array of numbers) as float32, or say what is wrong with it."""
    try:
        values = np.asarray(budget, dtype=np.float32)
    except (TypeError, ValueError):
        raise UserError(f"budget must be a number ≥ 0, got {budget!r}") from None
    # A string like "3" would convert to float silently, and nobody means a bool.
    if np.asarray(budget).dtype.kind not in "iuf" or not values.size:
        raise UserError(f"budget must be a number ≥ 0, got {budget!r}")
    bad = values[~(np.isfinite(values) & (values >= 0))]
    if bad.size:
        raise UserError(f"budget must be a finite number ≥ 0, got {bad.flat[0]!s}")
    return values


def check_integer(name: str, value: object, minimum: int, maximum: int = 2**31 - 1) -> int:
    """Return `value` if it is an integer from `minimum` to `maximum`, or say what is wrong with it."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < minimum:
        raise UserError(f"{name} must be an integer ≥ {minimum}, got {value!r:.60}")
    if value > maximum:
        raise UserError(f"{name} must be at most {maximum}, got {value!r:.60}")
    return int(value)


def is_sound(name: str, values: Any) -> Any:
    """Whether each of an environment's numbers is usable; `name` is cost, reward or observation.

    One rule for numpy arrays and JAX arrays, in training, evaluation, histories and `act`. False for nan.
    """
    return (values >= (0.0 if name == "cost" else -LARGEST)) & (values <= LARGEST)


def rule_of(name: str) -> str:
    """`is_sound` in words."""
    return f"{name}s must be finite, {'≥ 0' if name == 'cost' else f'≥ {-LARGEST:g}'} and ≤ {LARGEST:g}"


def check_sound(name: str, values: np.ndarray) -> np.ndarray:
    """Return `values` if all are sound, or an error that names the first that is not and its place."""
    sound = is_sound(name, values)
    if not sound.all():
        at = np.unravel_index(np.argmin(sound), sound.shape)
        place = f" at {list(map(int, at))}" if at else ""
        raise UserError(f"{rule_of(name)}, got {values[at]:g}{place}")
    return values


def check_flag(name: str, value: object) -> bool:
    """Return `value` if it is a boolean, Python's or NumPy's, or say that it is not: 'no' would count as true."""
    if not isinstance(value, bool | np.bool_):
        raise UserError(f"{name} must be true or false, got {value!r:.60}")
    return bool(value)


def check_seed(value: object, name: str = "seed") -> int:
    """Return `value` if it can seed a random key, or say what is wrong with it."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < 2**32:
        # JAX would drop the higher bits: two seeds would be one
        raise UserError(f"{name} must be an integer ≥ 0 and below 2³², got {value!r}")
    return int(value)


def check_risk(risk: object) -> float:
    """Return `risk` if it lies strictly between 0 and 1, or say why not."""
    number = isinstance(risk, int | float | np.number) and not isinstance(risk, bool)
    if not number or not 0 < float(risk) < 1:  # type: ignore[arg-type]
        raise UserError(f"risk must be a number between 0 and 1, both excluded, got {risk!r}")
    return float(risk)  # type: ignore[arg-type]


def check_range(name: str, value: tuple[float, float]) -> tuple[float, float]:
    """Return `value` if it is a range of budgets: two finite numbers ≥ 0, the second not below the first."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise UserError(f"{name} must be two numbers, got {value!r}")
    low, high = (check_number(name, bound, 0.0) for bound in value)
    if low > high:
        raise UserError(f"{name} must rise, got {low:g} to {high:g}")
    return low, high


def check_number(name: str, value: object, minimum: float, *, strict: bool = False) -> float:
    """Return `value` if it is a finite number ≥ `minimum` (> if `strict`), or say what is wrong with it."""
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < minimum or (strict and value == minimum):  # type: ignore[operator, arg-type]
        raise UserError(f"{name} must be a finite number {'>' if strict else '≥'} {minimum}, got {value!r}")
    return float(value)  # type: ignore[arg-type]
