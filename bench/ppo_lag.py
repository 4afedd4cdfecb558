"""PPO-Lagrangian on fixed rooms, beside the planner, which sees the whole room.

python bench/ppo_lag.py                                        100 rooms, three limits → results/ppo-lag/rooms.json
"""

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import provenance
from rich.console import Console
from rich.table import Table

from safeicrl.agents.reference import optimum
from safeicrl.algos.ppo_lag import default_config
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.files import write_json
from safeicrl.optimisers.lagrangian import Learner, PPOLagConfig

ENV = SafeDarkRoom()


def learn(config: PPOLagConfig, keys: jax.Array, rooms: Any, limits: jax.Array, test_steps: int) -> tuple:
    """Train learners side by side, then play on with what they learned: episodes, mean return and cost of each."""
    learner = Learner(ENV, config)
    frozen = Learner(ENV, dataclasses.replace(config, steps=test_steps, minibatches=1))

    def iteration(states: Any, _: None) -> tuple:
        states, _, _ = jax.vmap(learner.iterate)(states, rooms, limits)
        return states, None

    states = jax.vmap(learner.init)(keys, rooms)
    states, _ = jax.lax.scan(iteration, states, length=config.iterations)
    again = jax.vmap(lambda key, room: frozen.init(key, room).worlds)(keys, rooms)
    states = dataclasses.replace(states, worlds=again)  # fresh episodes
    test_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, 1)
    _, played = jax.vmap(frozen.play)(states, rooms, test_keys)
    ends = played.done.sum((1, 2))
    mean = lambda x: jnp.where(played.done, x, 0.0).sum((1, 2)) / ends  # noqa: E731
    return ends, mean(played.returns), mean(played.costs)


def summary(limit: float, rooms: Any, returns: np.ndarray, costs: np.ndarray) -> dict[str, Any]:
    """What was reached at one limit, and what the planner reaches."""
    best = optimum(ENV, rooms, jnp.full(len(returns), limit))
    goal = np.asarray(best.goal)
    return {
        "limit": limit,
        "planner_return": float(goal.mean()),
        "return": float(returns.mean()),
        "cost": float(costs.mean()),
        "rooms_over_limit": int((costs > limit).sum()),
        "rooms_possible": int(goal.sum()),  # the goal is in reach within the limit
        "return_possible": float(returns[goal].mean()),
        "cost_possible": float(costs[goal].mean()),
        "worst_return_possible": float(returns[goal].min()),
        "worst_cost_possible": float(costs[goal].max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", type=int, default=100)
    parser.add_argument("--limits", type=float, nargs="+", default=[0.0, 2.5, 5.0])
    parser.add_argument("--split", default="test")
    parser.add_argument("--iterations", type=int, default=default_config(ENV).iterations)
    parser.add_argument("--group", type=int, default=50, help="learners side by side")
    parser.add_argument(
        "--test-steps", type=int, default=600, help="steps of each of the learner's parallel episodes"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/ppo-lag/rooms.json"))
    args = parser.parse_args()
    about, console = provenance(), Console()
    config = dataclasses.replace(default_config(ENV), iterations=args.iterations)
    task_key, learner_key = jax.random.split(jax.random.key(args.seed))
    rooms = jax.vmap(lambda key: ENV.sample_task(key, args.split))(jax.random.split(task_key, args.rooms))
    program = jax.jit(learn, static_argnums=(0, 4))

    begin, lines = time.perf_counter(), []
    for limit in args.limits:
        parts = []
        for first in range(0, args.rooms, args.group):
            index = np.arange(first, min(first + args.group, args.rooms))
            keys = jax.vmap(jax.random.fold_in, (None, 0))(learner_key, index)
            these = jax.tree.map(lambda x, i=index: x[i], rooms)
            parts.append(program(config, keys, these, jnp.full(len(index), limit), args.test_steps))
            console.print(f"limit {limit:g}: {index[-1] + 1} rooms, {time.perf_counter() - begin:.0f} s")
        episodes, returns, costs = (np.concatenate([np.asarray(p[i]) for p in parts]) for i in range(3))
        lines.append(summary(limit, rooms, returns, costs) | {"test_episodes": int(episodes.sum())})
    table = Table(
        title=f"{args.rooms} {args.split} rooms, {config.iterations * config.envs * config.steps:,} steps each"
    )
    columns = ("limit", "planner_return", "return", "cost", "rooms_possible", "return_possible", "cost_possible")
    for name in columns:
        table.add_column(name.replace("_", " "), justify="right")
    for line in lines:
        table.add_row(*(f"{line[name]:.3g}" for name in columns))
    console.print(table)
    settings = {"rooms": args.rooms, "split": args.split, "seed": args.seed, "learner": dataclasses.asdict(config)}
    seconds = time.perf_counter() - begin
    write_json(args.out, {**about, **settings, "seconds": seconds, "actions": "sampled", "limits": lines})


if __name__ == "__main__":
    main()
