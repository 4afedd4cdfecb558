"""Safe in-context reinforcement learning in JAX: frozen agents that learn new tasks under a cost budget."""

import importlib
from typing import Any

from safeicrl import gym_ids
from safeicrl.version import VERSION as __version__

# The public names and where they live. Imported when first used: plots and reports run without JAX.
_PUBLIC = {
    "UserError": "errors",
    "load_policy": "policies.policy",
    "load_results": "evaluation.results",
    "make_env": "envs.registry",
    "run_trials": "trial",
    "save_results": "evaluation.results",
    "summarise": "evaluation.results",
}

__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'safeicrl' has no attribute {name!r}")
    return getattr(importlib.import_module(f"safeicrl.{_PUBLIC[name]}"), name)


gym_ids.register()
