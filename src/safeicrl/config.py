"""Settings and names from files: dataclasses from plain JSON values, objects from "module:name".

What does not fit is an error of one line.
"""

import dataclasses
import importlib
import types
import typing
from typing import Any, Literal, TypeVar, Union

from safeicrl.errors import UserError, unknown_name

T = TypeVar("T")


def from_plain(cls: type[T], values: Any, where: str = "") -> T:
    """Build the dataclass `cls` from a dictionary, nested ones too; fields left out keep their defaults."""
    name = where or cls.__name__
    if not isinstance(values, dict):
        raise UserError(f"{name} must be a group of settings, got {values!r}")
    hints = typing.get_type_hints(cls)
    known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise unknown_name(f"setting of {name}", key, known)
    prefix = f"{where}." if where else ""
    return cls(**{key: _convert(hints[key], value, f"{prefix}{key}") for key, value in values.items()})


def load_object(path: str) -> Any:
    """What "module:name" names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


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
