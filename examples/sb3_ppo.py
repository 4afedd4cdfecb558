"""A learner that knows nothing of safeicrl, in one room: Stable-Baselines3's PPO (pip install stable-baselines3).

It needs the cost in its reward, since its interface has no other place for it; and it learns one room, with
thousands of episodes, where an in-context agent gets fifty. Evaluated in the same room with frozen parameters.
"""

import gymnasium
import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

import safeicrl  # noqa: F401  registers the environments


class CostInReward(gymnasium.Wrapper):
    """reward − weight · cost, the fixed-penalty stand-in for a budget."""

    def __init__(self, env: gymnasium.Env, weight: float = 0.1):
        super().__init__(env)
        self.weight = weight

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward - self.weight * info["cost"], terminated, truncated, info


def main(steps: int = 30_000) -> None:
    room = {"size": 5, "obstacles": 6, "max_steps": 12, "split": "test"}
    layout = {"goal": (0, 4), "obstacles": [(1, 2), (0, 3), (1, 3), (2, 3), (4, 4), (3, 0)]}
    envs = make_vec_env("safeicrl/SafeDarkRoom-v0", 8, seed=0, env_kwargs=room, wrapper_class=CostInReward)
    envs.set_options({"task": layout})  # a learner of one room; drop this for a room drawn from the seed
    learner = PPO("MlpPolicy", envs, n_steps=128, batch_size=256, ent_coef=0.02, seed=0, device="cpu").learn(steps)

    env = gymnasium.make("safeicrl/SafeDarkRoom-v0", render_mode="ansi", **room)
    returns, costs = [], []
    for _ in range(20):
        observation, _ = env.reset(options={"task": layout})
        over, episode_return, episode_cost = False, 0.0, 0.0
        while not over:
            action, _ = learner.predict(observation)
            observation, reward, terminated, truncated, info = env.step(action)
            episode_return, episode_cost = episode_return + reward, episode_cost + info["cost"]
            over = terminated or truncated
        returns.append(episode_return)
        costs.append(episode_cost)
    print(env.render())
    print(f"20 episodes: return {np.mean(returns):.2f}, cost {np.mean(costs):.2f}")


if __name__ == "__main__":
    main()
