"""Results of an evaluation: one agent in many trials. No jax."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from safeicrl.budgets import is_over
from safeicrl.evaluation.frames import load_pandas

ARRAYS = ("returns", "costs", "lengths", "budgets")


@dataclass(frozen=True, kw_only=True)
class Results:
    """One agent in many trials, each of one task under one budget."""

    returns: np.ndarray  # [trial, episode] undiscounted
    costs: np.ndarray  # [trial, episode]
    lengths: np.ndarray  # [trial, episode] steps
    budgets: np.ndarray  # [trial] δ
    meta: dict[str, Any]  # label, env, agent, action selection, seed, version, device, wall time, command

    @property
    def label(self) -> str:
        """The agent's name in tables and figures."""
        return str(self.meta.get("label", "agent"))

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
    def over(self) -> np.ndarray:
        """[trial, episode] bool: the episode cost more than its budget."""
        return is_over(self.costs, self.budgets[:, None])

    def to_dataframe(self) -> Any:
        """One row per episode, for pandas: trial, task, episode (from 1), budget, return, cost, length, over."""
        trials, episodes = self.returns.shape
        columns = {
            "trial": np.repeat(np.arange(trials), episodes),
            "task": np.repeat(self.task, episodes),
            "episode": np.tile(np.arange(1, episodes + 1), trials),
            "budget": np.repeat(self.budgets, episodes),
            "return": self.returns.ravel(),
            "cost": self.costs.ravel(),
            "length": self.lengths.ravel(),
            "over": self.over.ravel(),
        }
        frame = load_pandas().DataFrame(columns)
        frame.insert(0, "label", self.label)
        return frame

    @property
    def budget_range(self) -> tuple[float, float]:
        """The range the budgets were drawn from."""
        low, high = self.meta.get("budget_range") or (self.budgets.min(), self.budgets.max())
        return float(low), float(high)
