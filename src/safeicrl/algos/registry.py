"""Name → algorithm. Values are "module:ConfigClass", imported when asked for; the class has `build(env)`."""

import importlib
from typing import Any

from safeicrl.errors import UserError, unknown_name

ALGOS: dict[str, str] = {
    "scared": "safeicrl.algos.scared:ScaredConfig",
}


def algo_config(name: str) -> type:
    """The config class of a registered algorithm."""
    if name not in ALGOS:
        raise unknown_name("algorithm", name, ALGOS)
    module, attribute = ALGOS[name].split(":")
    return getattr(importlib.import_module(module), attribute)


def register(name: str, config: str) -> None:
    """Make the config class at "module:ConfigClass" known as `name`."""
    if name in ALGOS:
        raise UserError(f"algorithm {name!r} is registered already")
    ALGOS[name] = config


def algo_name(config: Any) -> str | None:
    """The name a config's class is registered under, if any."""
    where = f"{type(config).__module__}:{type(config).__qualname__}"
    return next((name for name, value in ALGOS.items() if value == where), None)
