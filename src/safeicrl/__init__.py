"""Safe in-context reinforcement learning in JAX: frozen agents that learn new tasks under a cost budget."""

import importlib
from typing import TYPE_CHECKING, Any

from safeicrl.envs.registry import register_with_gymnasium
from safeicrl.version import VERSION as __version__

# The public names and where they live. Imported when first used: plots and reports run without JAX.
_PUBLIC = {
    "UserError": "errors",
    "from_gymnasium": "envs.from_gymnasium",
    "from_gymnax": "envs.from_gymnax",
    "load_metrics": "evaluation.frames",
    "load_policy": "policies.policy",
    "load_results": "evaluation.archive",
    "make_env": "envs.registry",
    "run_trials": "trial",
    "save_results": "evaluation.archive",
    "summarise": "evaluation.statistics",
}

# Type checkers and editors read names, not code that finds them.
__all__ = [
    "UserError",
    "__version__",
    "from_gymnasium",
    "from_gymnax",
    "load_metrics",
    "load_policy",
    "load_results",
    "make_env",
    "run_trials",
    "save_results",
    "summarise",
]

if TYPE_CHECKING:
    from safeicrl.envs.from_gymnasium import from_gymnasium
    from safeicrl.envs.from_gymnax import from_gymnax
    from safeicrl.envs.registry import make_env
    from safeicrl.errors import UserError
    from safeicrl.evaluation.archive import load_results, save_results
    from safeicrl.evaluation.frames import load_metrics
    from safeicrl.evaluation.statistics import summarise
    from safeicrl.policies.policy import load_policy
    from safeicrl.trial import run_trials
else:

    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(f"module 'safeicrl' has no attribute {name!r}")
        return getattr(importlib.import_module(f"safeicrl.{_PUBLIC[name]}"), name)


register_with_gymnasium()
