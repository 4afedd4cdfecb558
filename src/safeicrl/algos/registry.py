"""Name → algorithm, imported when asked for."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from safeicrl.config import load_object
from safeicrl.errors import UserError, unknown_name
from safeicrl.plugins import HINT, load_entry_points


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Where an algorithm and its settings live, both as "module:class"; built as `algorithm(env, config)`."""

    algorithm: str
    config: str
    summary: str = ""  # one line for `safeicrl list`


ALGOS: dict[str, Entry] = {
    "scared": Entry(
        algorithm="safeicrl.algos.scared:Scared",
        config="safeicrl.algos.scared:ScaredConfig",
        summary="The paper's method: one exact-penalty multiplier for all episodes and budgets.",
    ),
    "safe-ad": Entry(
        algorithm="safeicrl.algos.safe_ad:SafeAD",
        config="safeicrl.algos.safe_ad:SafeADConfig",
        summary="Imitates learning histories with a decision transformer.",
    ),
    "ppo-lag": Entry(
        algorithm="safeicrl.algos.ppo_lag:PPOLag",
        config="safeicrl.optimisers.lagrangian:PPOLagConfig",
        summary="An ordinary safe learner for one task under one cost limit.",
    ),
    "maml-penalty": Entry(
        algorithm="safeicrl.algos.maml_penalty:MamlPenalty",
        config="safeicrl.algos.maml_penalty:MamlPenaltyConfig",
        summary="Adapts by gradient steps on reward minus weighted cost.",
    ),
    "safe-meta": Entry(
        algorithm="safeicrl.algos.safe_meta:SafeMeta",
        config="safeicrl.algos.safe_meta:SafeMetaConfig",
        summary="Adapts by solving a constrained problem for each task.",
    ),
}


def register(name: str, entry: Entry) -> None:
    """Make an algorithm known as `name`."""
    if name in ALGOS:
        raise UserError(f"algorithm {name!r} is registered already")
    ALGOS[name] = entry


def find_algo(name: str) -> tuple[Any, type]:
    """The algorithm called `name` and its config class."""
    if name not in ALGOS:
        load_entry_points()
    if name not in ALGOS:
        raise UserError(f"{unknown_name('algorithm', name, ALGOS)} {HINT}")
    entry = ALGOS[name]
    try:
        algorithm, config = load_object(entry.algorithm), load_object(entry.config)
    except UserError as error:
        raise UserError(f"the entry of algorithm {name!r} is wrong: {error}") from None
    if not (isinstance(config, type) and dataclasses.is_dataclass(config)):
        raise UserError(f"the config of algorithm {name!r} must be a dataclass, got {entry.config}")
    return algorithm, config


def algo_name(config: Any) -> str:
    """The name a config's class is registered under; the class's own name when it is not."""
    where = f"{type(config).__module__}:{type(config).__qualname__}"
    return next((name for name, entry in ALGOS.items() if entry.config == where), type(config).__name__)
