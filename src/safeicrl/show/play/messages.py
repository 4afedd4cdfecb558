"""What a visitor may say. A message is one JSON object; anything else is refused with one sentence.

    {"type": "start", "n": 1, "world": "safe-dark-room", "seed": 7, "task": {"seed": 7},
     "panels": [{"agent": "safe-dark-room", "budget": 3}]}
    {"type": "play" | "pause" | "step" | "reset", "n": 2}
    {"type": "speed", "n": 3, "value": 10}
    {"type": "budget", "n": 4, "panel": 0, "value": 5}

A room that was drawn is {"goal": [row, column], "obstacles": [[row, column], ...]} instead of {"seed": ...}.
`n` numbers a visitor's messages. It grows, so a message that arrives twice or too late is refused.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

MAX_CHARACTERS = 4096  # of a message: enough for the largest room with an obstacle on every cell
MAX_PANELS = 2
MAX_SIDE = 20  # rows and columns of a drawn room, at most
SPEEDS = (0.5, 200.0)  # steps per second
MAX_NUMBER = 2**53 - 1  # the largest whole number that JavaScript counts exactly


class Refused(ValueError):
    """A message that changes nothing; its text is sent back."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A room that the visitor drew."""

    goal: tuple[int, int]  # (row, column)
    obstacles: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class PanelSetup:
    """One agent, to be watched under one budget."""

    agent: str
    budget: float


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What to play."""

    world: str
    task: Drawn | int  # an int seeds a task of the test split
    panels: tuple[PanelSetup, ...]
    seed: int  # of the agents' actions


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message of the right form. Whether it makes sense now is for the session to say."""

    type: str
    n: int
    setup: Setup | None = None  # of `start`
    value: float = 0.0  # of `speed` and `budget`
    panel: int = 0  # of `budget`


def parse(text: object) -> Message:
    """The message, or `Refused` with what is wrong with it."""
    if not isinstance(text, str):
        raise Refused("a message must be text")
    if len(text) > MAX_CHARACTERS:
        raise Refused(f"a message has at most {MAX_CHARACTERS} characters, this one {len(text)}")
    try:
        plain = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        raise Refused("a message must be one JSON object") from None
    kind = plain.get("type") if isinstance(plain, dict) else None
    if not isinstance(kind, str) or kind not in FORMS:
        raise Refused(f"type must be one of {', '.join(FORMS)}")
    fields = _fields(kind, plain, {"type": _text, "n": _whole(0, MAX_NUMBER), **FORMS[kind]})
    if kind == "start":
        n = fields.pop("n")
        del fields["type"]
        return Message(type=kind, n=n, setup=Setup(**fields))
    return Message(**fields)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)  # NaN and the infinities are not JSON


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("a name twice")
    return dict(pairs)


# -- the schema ---------------------------------------------------------------------------------------------

Check = Callable[[str, Any], Any]  # (name, value) → the value to use, or Refused


def _fields(what: str, plain: object, form: dict[str, Check]) -> dict[str, Any]:
    """Exactly the fields of `form`, each checked."""
    if not isinstance(plain, dict) or plain.keys() != form.keys():
        raise Refused(f"{what} has the fields {', '.join(form)}")
    return {name: check(name, plain[name]) for name, check in form.items()}


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 100:
        raise Refused(f"{name} must be a text of 1 to 100 characters")
    return value


def _whole(low: int, high: int) -> Check:
    def check(name: str, value: Any) -> int:
        if type(value) is not int or not low <= value <= high:  # a bool is an int too
            raise Refused(f"{name} must be a whole number from {low} to {high}")
        return value

    return check


def _real(low: float, high: float) -> Check:
    def check(name: str, value: Any) -> float:
        number = type(value) in (int, float) and -1e9 <= value <= 1e9 and math.isfinite(value)
        if not number or not low <= value <= high:
            raise Refused(f"{name} must be a number from {low:g} to {high:g}")
        return float(value)

    return check


def _list(low: int, high: int, check_item: Check) -> Check:
    def check(name: str, value: Any) -> tuple:
        if not isinstance(value, list) or not low <= len(value) <= high:
            raise Refused(f"{name} must be a list of {low} to {high} items")
        return tuple(check_item(name, item) for item in value)

    return check


def _task(name: str, value: Any) -> Drawn | int:
    if isinstance(value, dict) and "seed" in value:
        return _fields(name, value, {"seed": SEED})["seed"]
    return Drawn(**_fields(name, value, {"goal": CELL, "obstacles": _list(0, MAX_SIDE**2, CELL)}))


def _panel(name: str, value: Any) -> PanelSetup:
    return PanelSetup(**_fields(name, value, {"agent": _text, "budget": BUDGET}))


SEED = _whole(0, 2**32 - 1)
BUDGET = _real(0.0, 1e6)  # each world has a narrower range of its own
CELL = _list(2, 2, _whole(0, MAX_SIDE - 1))

FORMS: dict[str, dict[str, Check]] = {
    "start": {"world": _text, "task": _task, "panels": _list(1, MAX_PANELS, _panel), "seed": SEED},
    "play": {},
    "pause": {},
    "step": {},
    "reset": {},
    "speed": {"value": _real(*SPEEDS)},
    "budget": {"panel": _whole(0, MAX_PANELS - 1), "value": BUDGET},
}
