"""The cost of an episode beside Gymnasium's own episode statistics, for one environment or a vector of them.

    env = EpisodeCost(RecordEpisodeStatistics(env))              # from gymnasium.wrappers
    envs = VectorEpisodeCost(RecordEpisodeStatistics(envs))      # from gymnasium.wrappers.vector

At an episode's end `info["episode"]["c"]` is the sum of its `info["cost"]`, the last step's included; of several
costs, a vector. In the autoreset mode SAME_STEP that one is in `info["final_info"]` only, and a sum over
`info["cost"]` misses it.
"""

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from safeicrl.budgets import beside
from safeicrl.errors import UserError


class EpisodeCost(gymnasium.Wrapper):
    """Adds `info["episode"]["c"]`; put it outside of `RecordEpisodeStatistics`, if you use that."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.cost: Any = 0.0  # of this episode so far

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple:
        """Start an episode, at a cost of 0."""
        self.cost = 0.0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple:
        """One step of the environment."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.cost = self.cost + (cost if (cost := _costs(info)).ndim else float(cost))
        if terminated or truncated:
            info["episode"] = {**info.get("episode", {}), "c": self.cost}
        return observation, reward, terminated, truncated, info


class VectorEpisodeCost(gymnasium.vector.VectorWrapper):
    """The same for vector environments, in every autoreset mode."""

    def __init__(self, env: gymnasium.vector.VectorEnv) -> None:
        super().__init__(env)
        self.mode = AutoresetMode(self.env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self.costs = np.zeros(self.num_envs)  # [env] of the episode so far; [env, cost] with several costs
        self.ended = np.zeros(self.num_envs, bool)  # [env] the last step ended an episode

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple:
        """Start episodes, at a cost of 0."""
        mask = np.ones(self.num_envs, bool) if not options else options.get("reset_mask", True)
        self.costs = np.where(beside(np.broadcast_to(mask, self.num_envs), self.costs), 0.0, self.costs)
        self.ended = np.where(mask, False, self.ended)
        return self.env.reset(seed=seed, options=options)

    def step(self, actions: Any) -> tuple:
        """One step of every environment."""
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        ended = np.asarray(terminated) | np.asarray(truncated)
        # the step after an end only resets
        self.costs[self.ended] = 0.0
        last = ended & (self.mode is AutoresetMode.SAME_STEP)
        if (~last).any():
            self._add(_costs(infos), ~(last | self.ended))
        if last.any():
            self._add(_costs(infos.get("final_info", {})), last)
        if ended.any():
            total = np.where(beside(ended, self.costs), self.costs, 0.0)
            episode = {**infos.get("episode", {}), "c": total, "_c": ended.copy()}
            infos = {**infos, "episode": episode, "_episode": ended.copy()}
        if self.mode is AutoresetMode.SAME_STEP:
            self.costs[ended] = 0.0
        else:
            self.ended = ended
        return observations, rewards, terminated, truncated, infos

    def _add(self, costs: np.ndarray, where: np.ndarray) -> None:
        """Add the costs of a step in the environments `where` they count."""
        if costs.ndim > self.costs.ndim:  # only now it is known that there are several
            self.costs = np.repeat(self.costs[:, None], costs.shape[-1], axis=1)
        self.costs = self.costs + np.where(beside(where, costs), costs, 0.0)


def _costs(info: Mapping[str, Any]) -> np.ndarray:
    if "cost" not in info:
        raise UserError("the environment must put the cost of every step in info['cost']")
    return np.asarray(info["cost"], float)
