"""One tiny room and sizes for the tests of both meta-learners, so that they share compiled programs."""

import equinox as eqx
import jax
import jax.numpy as jnp

from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.optimisers.critics import CriticConfig
from safeicrl.optimisers.episodes import Played
from safeicrl.optimisers.trust_region import TrustRegionConfig

ROOM = SafeDarkRoom(size=3, obstacles=2, max_steps=5, episodes=3, train_budget=(1.0, 3.0), test_budget=(1.0, 3.0))
SIZES = {
    "iterations": 4, "tasks": 3, "batch_episodes": 4, "fresh_episodes": 4, "hidden": (8,),
    "critic": CriticConfig(steps=3, memory=2), "trust": TrustRegionConfig(iterations=3, halvings=3),
}  # fmt: skip
# The same on the command line, short of what differs by method.
OPTIONS = [
    *("--env.size", "3", "--env.obstacles", "2", "--env.max-steps", "5", "--env.episodes", "3"),
    *("--env.train-budget", "1", "3", "--env.test-budget", "1", "3"),
    *("--algo.iterations", "4", "--algo.tasks", "3", "--algo.batch-episodes", "4", "--algo.fresh-episodes", "4"),
    *("--algo.hidden", "8", "--algo.critic.steps", "3", "--algo.critic.memory", "2"),
    *("--algo.trust.iterations", "3", "--algo.trust.halvings", "3"),
    *("--chunk", "2", "--evaluation.every", "0", "--evaluation.tasks", "4"),
]


def spread_over(number: int, tree):
    """The tree once for each of several tasks."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (number, *x.shape)), tree)


def play_by_hand(cells, actions, rewards, costs) -> Played:
    """One task's episodes, [episode, time], given cell by cell; a cell of None is after the end."""
    valid = jnp.array([[cell is not None for cell in row] for row in cells])
    seen = jnp.array([[cell or (0, 0) for cell in row] for row in cells], jnp.int32)
    return Played(
        observation=seen, action=jnp.array(actions), reward=jnp.array(rewards, float), cost=jnp.array(costs, float),
        valid=valid, done=~valid,
    )  # fmt: skip


def with_value(critics, values):
    """Critics that say `values` [2] everywhere."""
    zero = jax.tree.map(jnp.zeros_like, critics)
    return eqx.tree_at(lambda c: c.biases[-1], zero, jnp.asarray(values, float)[:, None])
