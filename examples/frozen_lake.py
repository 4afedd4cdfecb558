"""In-context learning in an environment that this project did not write: Gymnasium's FrozenLake, holes as costs.

    python examples/frozen_lake.py runs/frozen-lake          trains for less than ten minutes on two CPU cores
    safeicrl evaluate runs/frozen-lake --import examples/frozen_lake.py

Every lake has its own goal and its own holes, and the agent sees only the number of its cell. A fall into a hole
costs 1, and the agent climbs out again. The budget is how often it may fall in an episode.
"""

import sys

import gymnasium
import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from safeicrl import from_gymnasium
from safeicrl.algos.scared import Scared, ScaredConfig
from safeicrl.nets.transformer import NetConfig
from safeicrl.optimisers.ppo import PPOConfig
from safeicrl.train import EvalConfig, TrainConfig, train

SIZE, HOLES = 4, 3


class Holes(gymnasium.Wrapper):
    """FrozenLake, in which a hole is a cost and not the end."""

    def __init__(self, lake: tuple[str, ...]):
        self.holes = {cell for cell, letter in enumerate("".join(lake)) if letter == "H"}
        ice = [row.replace("H", "F") for row in lake]
        super().__init__(FrozenLakeEnv(desc=ice, is_slippery=False))

    def step(self, action):
        cell, reward, terminated, truncated, _ = self.env.step(action)
        return cell, reward, terminated, truncated, {"cost": float(cell in self.holes)}


def lake(rng: np.random.Generator) -> dict:
    """A random lake: the start in a corner, the goal at least three steps away, holes anywhere else."""
    cells = np.full(SIZE * SIZE, "F")
    far = [cell for cell in range(1, SIZE * SIZE) if sum(divmod(cell, SIZE)) >= 3]
    cells[0], cells[rng.choice(far)] = "S", "G"
    cells[rng.choice(np.flatnonzero(cells == "F"), HOLES, replace=False)] = "H"
    return {"lake": tuple("".join(row) for row in cells.reshape(SIZE, SIZE))}


def draw(count: int, seed: int) -> list[dict]:
    rng = np.random.default_rng(seed)
    return [lake(rng) for _ in range(count)]


def layout(task: dict) -> list[float]:
    """For the critics of training: where the goal and the holes are."""
    return [float(cell == letter) for letter in "GH" for cell in "".join(task["lake"])]


env = from_gymnasium(
    Holes, tasks=draw(4000, seed=0), test_tasks=draw(300, seed=1), name="frozen-lakes", features=layout,
    budget=(1.0, 4.0), episodes=8, max_steps=8, cost_unit=1.0, max_cost=1.0,
)  # fmt: skip


def learner(iterations: int) -> Scared:
    net = NetConfig(width=32, layers=2, heads=2, context=64, dtype="float32")
    ppo = PPOConfig(learning_rate=(3e-3, 3e-4), minibatch=16, discount=0.98, entropy=(0.02, 0.002))
    return Scared(env, ScaredConfig(iterations=iterations, rows=64, segments=1, net=net, ppo=ppo))


if __name__ == "__main__":
    evaluation = EvalConfig(every=100, tasks=200, segments=1)
    train(learner(300), TrainConfig(minutes=9.0, evaluation=evaluation), out=sys.argv[1])
