"""Name → environment. One dictionary; `register` adds to it."""

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any

from safeicrl.envs.api import Env
from safeicrl.envs.dark_mujoco import SafeDarkCar, SafeDarkPoint
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.envs.fixed import FixedTask
from safeicrl.envs.revealed import Revealed
from safeicrl.envs.safe_velocity import SafeVelocityAnt, SafeVelocityHalfCheetah
from safeicrl.errors import UserError, unknown_name

ENVS: dict[str, Callable[..., Env]] = {
    "safe-dark-room": SafeDarkRoom,
    # These import MuJoCo, an optional dependency, only when one is built.
    "safe-dark-point": SafeDarkPoint,
    "safe-dark-car": SafeDarkCar,
    "safe-velocity-half-cheetah": SafeVelocityHalfCheetah,
    "safe-velocity-ant": SafeVelocityAnt,
    "fixed-task": FixedTask,
    "revealed": Revealed,
}


def register(name: str, make: Callable[..., Env]) -> None:
    """Make `make(**parameters)` available as `make_env(name, **parameters)`."""
    if name in ENVS:
        raise UserError(f"environment {name!r} is registered already")
    ENVS[name] = make


def parameters_of(name: str) -> set[str] | None:
    """Names of the parameters an environment takes; None when its maker does not say."""
    if name not in ENVS:
        raise unknown_name("environment", name, ENVS)
    make = ENVS[name]
    return {field.name for field in dataclasses.fields(make)} if dataclasses.is_dataclass(make) else None


def make_env(name: str, /, **parameters: Any) -> Env:
    """Build a registered environment; a parameter may be called `name` too."""
    known = parameters_of(name)
    for parameter in parameters:
        if known is not None and parameter not in known:
            raise unknown_name(f"parameter of {name}", parameter, known)
    return ENVS[name](**parameters)


def parse_parameters(pairs: Iterable[str], what: str) -> dict[str, Any]:
    """`size=5 split=test` as parameters for `make_env`; lists become tuples, since environments must hash."""
    parameters = {}
    for text in pairs:
        name, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"{what} takes name=value pairs, got {text!r}")
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value
        parameters[name] = tuple(parsed) if isinstance(parsed, list) else parsed
    return parameters
