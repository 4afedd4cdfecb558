"""Results of an evaluation: one agent in many trials. No jax."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from safeicrl.budgets import is_over, reserve_words
from safeicrl.errors import UserError, printable
from safeicrl.evaluation.frames import load_pandas

ARRAYS = ("returns", "costs", "lengths", "budgets")


@dataclass(frozen=True, kw_only=True)
class Results:
    """One agent in many trials, each of one task under one budget.

    With several costs, whose names are `meta["costs"]`, each has a budget of its own. `by_cost` takes them apart.
    """

    returns: np.ndarray  # [trial, episode] undiscounted
    costs: np.ndarray  # [trial, episode]; with several costs [trial, episode, cost]
    lengths: np.ndarray  # [trial, episode] steps
    budgets: np.ndarray  # [trial] δ; with several costs [trial, cost]
    meta: dict[str, Any]  # label, env, agent, action selection, seed, version, device, wall time, command

    def __post_init__(self) -> None:
        """Refuse numbers that no episode can have: a cost of nan would count as within every budget."""
        shape = (len(self.cost_names),) if self.several else ()
        if self.costs.shape != (*self.returns.shape, *shape) or self.budgets.shape != (len(self.returns), *shape):
            raise UserError(
                f"results with the costs {', '.join(self.cost_names)} do not fit together: returns have shape "
                f"{self.returns.shape}, costs {self.costs.shape}, budgets {self.budgets.shape}"
            )
        lowest = {"returns": -np.inf, "costs": 0.0, "lengths": 1.0, "budgets": 0.0}
        for name, low in lowest.items():
            values = getattr(self, name)
            right = np.isfinite(values) & (values >= low)
            if not right.all():
                at = np.unravel_index(np.argmin(right), right.shape)
                axes = ("trial", "cost") if name == "budgets" else ("trial", "episode", "cost")
                place = ", ".join(f"{axis} {i}" for axis, i in zip(axes, at, strict=False))
                words = "finite" if np.isinf(low) else f"finite and ≥ {low:g}"
                raise UserError(f"{name} of results must be {words}, got {values[at]:g} in {place} of {self.label}")

    @property
    def label(self) -> str:
        """The agent's name in tables and figures."""
        return printable(str(self.meta.get("label", "agent")))

    @property
    def budgets_per_task(self) -> int:
        """The number of trials per task, from a small budget to a large one."""
        return int(self.meta.get("budgets_per_task", 1))

    @property
    def task(self) -> np.ndarray:
        """[trial] its task. First come all tasks with their smallest budgets, then all with the next ones, ..."""
        trials = len(self.budgets)
        return np.arange(trials) % (trials // self.budgets_per_task)

    @property
    def cost_names(self) -> tuple[str, ...]:
        """The names of the costs; the only one of an environment is called "cost"."""
        return tuple(self.meta.get("costs") or ("cost",))

    @property
    def several(self) -> bool:
        """Whether there are several costs."""
        return len(self.cost_names) > 1

    @property
    def over(self) -> np.ndarray:
        """[trial, episode] bool: the episode cost more than its budget, in any of its costs."""
        return is_over(self.costs, self.budgets[:, None], self.several)

    @property
    def excess(self) -> np.ndarray:
        """[trial, episode] cost − budget; with several costs, of the one for which it is largest."""
        excess = self.costs - self.budgets[:, None]
        return excess.max(-1) if self.several else excess

    @property
    def total_costs(self) -> np.ndarray:
        """[trial, episode] the cost; with several costs, their sum."""
        return self.costs.sum(-1) if self.several else self.costs

    def by_cost(self) -> dict[str, "Results"]:
        """Name → the same trials with that cost and its budget alone: results for any table or figure."""
        if not self.several:
            return {self.cost_names[0]: self}
        found = {}
        for index, (name, own) in enumerate(zip(self.cost_names, self.budget_range, strict=True)):
            meta = self.meta | {"costs": [name], "budget_range": list(own)}
            costs, budgets = self.costs[..., index], self.budgets[:, index]
            found[name] = replace(self, costs=costs, budgets=budgets, meta=meta)
        return found

    def to_dataframe(self) -> Any:
        """One row per episode, for pandas: trial, task, episode (from 1), budget, return, cost, length, over.

        With several costs, each has a column for its budget and its cost, such as `budget_heat`, `cost_heat`.
        """
        trials, episodes = self.returns.shape
        parts = {f"_{name}" if self.several else "": own for name, own in self.by_cost().items()}
        columns = {
            "trial": np.repeat(np.arange(trials), episodes),
            "task": np.repeat(self.task, episodes),
            "episode": np.tile(np.arange(1, episodes + 1), trials),
            **{f"budget{of}": np.repeat(own.budgets, episodes) for of, own in parts.items()},
            "return": self.returns.ravel(),
            **{f"cost{of}": own.costs.ravel() for of, own in parts.items()},
            "length": self.lengths.ravel(),
            "over": self.over.ravel(),
        }
        frame = load_pandas().DataFrame(columns)
        frame.insert(0, "label", self.label)
        return frame

    @property
    def budget_range(self) -> tuple[Any, ...]:
        """The range the budgets were drawn from: low, high; with several costs, one such pair for each."""
        given = self.meta.get("budget_range")
        if self.several:
            ranges = given or zip(self.budgets.min(0), self.budgets.max(0), strict=True)
            return tuple((float(low), float(high)) for low, high in ranges)
        low, high = given or (self.budgets.min(), self.budgets.max())
        return float(low), float(high)


def in_words(how: Mapping[str, Any]) -> list[str]:
    """How an agent acts, part by part: what `agents.api.with_options` says of it, as results and cards hold it."""
    parts = [f"actions {how['actions']}"] if how.get("actions") else []
    parts += [f"guard {how['guard']}"] if how.get("guard") else []
    parts += [reserve_words(how["reserve"])] if how.get("reserve") else []
    parts += [f"brake {how['brake']:g}"] if how.get("brake") else []
    return parts + ([f"settled after episode {how['settle_after']}"] if how.get("settle_after") else [])
