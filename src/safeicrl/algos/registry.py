"""Name → algorithm, imported when asked for."""

import importlib
from dataclasses import dataclass
from typing import Any

from safeicrl.errors import UserError, unknown_name


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Where an algorithm lives: `module.algorithm(env, config)` with a `module.config`."""

    module: str
    algorithm: str
    config: str

    def load(self) -> tuple[Any, type]:
        """The algorithm and its config class."""
        module = importlib.import_module(self.module)
        return getattr(module, self.algorithm), getattr(module, self.config)


ALGOS: dict[str, Entry] = {
    "scared": Entry(module="safeicrl.algos.scared", algorithm="Scared", config="ScaredConfig"),
    "safe-ad": Entry(module="safeicrl.algos.safe_ad", algorithm="SafeAD", config="SafeADConfig"),
    "ppo-lag": Entry(module="safeicrl.algos.ppo_lag", algorithm="PPOLag", config="PPOLagConfig"),
}


def register(name: str, entry: Entry) -> None:
    """Make an algorithm known as `name`."""
    if name in ALGOS:
        raise UserError(f"algorithm {name!r} is registered already")
    ALGOS[name] = entry


def find_algo(name: str) -> tuple[Any, type]:
    """The algorithm called `name` and its config class."""
    if name not in ALGOS:
        raise unknown_name("algorithm", name, ALGOS)
    return ALGOS[name].load()


def algo_name(config: Any) -> str:
    """The name a config's class is registered under; the class's own name when it is not."""
    where = (type(config).__module__, type(config).__qualname__)
    names = (name for name, entry in ALGOS.items() if (entry.module, entry.config) == where)
    return next(names, type(config).__name__)
