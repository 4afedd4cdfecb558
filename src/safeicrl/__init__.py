"""Safe in-context reinforcement learning in JAX: frozen agents that learn new tasks under a cost budget."""

import importlib
from typing import Any

from safeicrl.envs.registry import register_with_gymnasium
from safeicrl.version import VERSION as __version__

# The public names and where they live. Imported when first used: plots and reports run without JAX.
_PUBLIC = {
    "UserError": "errors",
    "load_policy": "policies.policy",
    "load_results": "evaluation.archive",
    "make_env": "envs.registry",
    "run_trials": "trial",
    "save_results": "evaluation.archive",
    "summarise": "evaluation.statistics",
}

__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'safeicrl' has no attribute {name!r}")
    return getattr(importlib.import_module(f"safeicrl.{_PUBLIC[name]}"), name)


register_with_gymnasium()
