"""Settings and names from files: dataclasses from plain JSON values, objects from "module:name".

A value that does not fit is an error of one line.
"""

import dataclasses
import importlib
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union

from safeicrl.errors import UserError, unknown_name

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """An option that older versions had."""

    version: str  # the first version without it
    neutral: Any  # the value with which a run is the same as without the option


# Every option that was ever dropped, by its name on the command line. A stored run that has such an option at its
# neutral value loads as if the option were not there; any other value is an error.
DROPPED = {
    "algo.ppo.episode_discount": Dropped(version="0.2", neutral=1.0),
    "algo.ddpg.episode_discount": Dropped(version="0.2", neutral=1.0),
    "algo.ddpg.pessimism": Dropped(version="0.2", neutral=False),
    "algo.ddpg.critic_weight": Dropped(version="0.2", neutral=1.0),
}


def dropped_option(option: str, value: object) -> UserError:
    """The error for an option in `DROPPED`."""
    return UserError(f"{option} {value} is not supported: version {DROPPED[option].version} dropped this option")


def from_plain(cls: type[T], values: Any, where: str = "") -> T:
    """Build the dataclass `cls` from a dictionary, nested dataclasses too; missing fields keep their defaults.

    `where` is the name of this group of settings on the command line, such as "algo".
    """
    name = where or cls.__name__
    if not isinstance(values, dict):
        raise UserError(f"{name} must be a group of settings, got {values!r}")
    hints = typing.get_type_hints(cls)
    known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    prefix = f"{where}." if where else ""
    settings = {}
    for key, value in values.items():
        option = f"{prefix}{key}"
        if key in known:
            settings[key] = _convert(hints[key], value, option)
        elif option not in DROPPED:
            raise unknown_name(f"setting of {name}", key, known)
        elif value != DROPPED[option].neutral:
            raise dropped_option(option, value)
    return cls(**settings)


def changed(config: T, changes: dict[str, Any]) -> T:
    """The dataclass `config` with other values, by their names on the command line: {"net.width": 32}."""
    values: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}  # by group of settings
    for name, value in changes.items():
        group, dot, rest = name.partition(".")
        if dot:
            inner.setdefault(group, {})[rest] = value
        else:
            values[name] = value
    values |= {group: changed(getattr(config, group), parts) for group, parts in inner.items()}
    return dataclasses.replace(config, **values)  # type: ignore[type-var]


def load_object(path: str) -> Any:
    """The object that "module:name" names."""
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # something that the module itself needs
        raise UserError(f"{path!r} must be module:name, and there is no module {error.name!r}") from None
    if not hasattr(found, name):
        raise UserError(f"{path!r} must be module:name, and the module has no {name!r}")
    return getattr(found, name)


def _convert(hint: Any, value: Any, where: str) -> Any:
    """`value` as the annotated type, or an error that names the setting."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_plain(hint, value, where)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _convert(next(part for part in arguments if part is not type(None)), value, where)
    if origin is tuple:
        inner = arguments[0] if arguments else Any
        if not isinstance(value, list | tuple):
            raise UserError(f"{where} must be a list, got {value!r}")
        return tuple(_convert(inner, item, where) for item in value)
    if origin is Literal:
        if value not in arguments:
            raise unknown_name(where, value, [str(choice) for choice in arguments])
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (int, float, str, bool) and type(value) is not hint:
        raise UserError(f"{where} must be of type {hint.__name__}, got {value!r}")
    return value
