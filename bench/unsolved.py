"""Rooms that a policy never solves, by what the cheapest way to the goal costs, beside the hand-written explorer.

python bench/unsolved.py safe-dark-room-guard    → results/lab/guard/unsolved.json

One trial per room, all with nearly the same budget. `sure` is the mean probability of the likeliest action in the
episodes past the 20th: an agent that knows what to do is sure, one that has run out of ideas wanders.
"""

import argparse
import heapq
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from common import provenance
from rich.console import Console
from rich.table import Table

from safeicrl.agents.api import Agent
from safeicrl.agents.in_context import InContextAgent
from safeicrl.envs.dark_room import Room, SafeDarkRoom
from safeicrl.evaluation.task_lists import seeded_tasks
from safeicrl.files import write_json
from safeicrl.nets.heads import Categorical
from safeicrl.policies.contenders import reference, released
from safeicrl.trial import Trials, episode_sums, run_trials

LATE = 20  # episodes


def cheapest(obstacles: np.ndarray, goal: int, size: int) -> int:
    """Obstacles on the cheapest way from the centre to the goal, however long it is."""
    seen, queue = set(), [(0, (size // 2, size // 2))]
    while True:
        paid, (row, column) = heapq.heappop(queue)
        if row * size + column == goal:
            return paid
        if (row, column) in seen:
            continue
        seen.add((row, column))
        for r, c in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
            if 0 <= r < size and 0 <= c < size:
                heapq.heappush(queue, (paid + int(obstacles[r * size + c]), (r, c)))


@eqx.filter_jit
def play(env: SafeDarkRoom, agent: Agent, rooms: Room, budget: float, key: jax.Array) -> tuple[Trials, jax.Array]:
    """One trial per room, and how sure the agent was at every step, [room, time]; 0 for one without a network."""
    queue = jax.tree.map(lambda leaf: leaf[:, None], rooms)
    budgets = jnp.full((len(rooms.goal), 1), budget)
    trials = run_trials(
        env, agent, queue, budgets, key, episodes=env.episodes, steps=env.spec.trial_steps, segments=4
    )
    if not isinstance(agent, InContextAgent):
        return trials, jnp.zeros(trials.cost.shape)
    features = agent.net.trunk.forward(trials.token, trials.trial)
    watched = agent.net.watched(features, trials.token, trials.trial)
    policy = agent.net.distribution(agent.net.seen(features, watched))
    assert isinstance(policy, Categorical)
    return trials, jax.nn.softmax(policy.logits.astype(jnp.float32)).max(-1)


def measure(name: str, *, rooms: int, seed: int, budget: float) -> list[dict[str, Any]]:
    """A record for each cost of the cheapest way."""
    own = released(name)
    env = own.env
    assert isinstance(env, SafeDarkRoom)
    tasks = seeded_tasks(env, "test", seed, rooms)
    obstacles, goals = np.asarray(tasks.obstacles), np.asarray(tasks.goal)
    cost = np.array([cheapest(obstacles[i], int(goals[i]), env.size) for i in range(rooms)])
    found: dict[str, np.ndarray] = {}
    sure = np.zeros(0)
    for label, agent in (("policy", own.agent), ("explorer", reference("explorer", env).agent)):
        trials, how_sure = play(env, agent, tasks, budget, jax.random.key(seed))
        found[label] = np.asarray(episode_sums(trials, env.episodes).returns.sum(1))
        if label == "policy":
            late = np.asarray((trials.token.episode >= LATE) & trials.learnable)
            sure = (np.asarray(how_sure) * late).sum(1) / np.maximum(late.sum(1), 1)
    return [
        {
            "cost": int(price), "rooms": int(here.sum()),
            **{label: {"goals": float(goals[here].mean()), "never": float((goals[here] == 0).mean())}
               for label, goals in found.items()},
            "sure": float(sure[here].mean()),
        }
        for price in np.unique(cost) for here in [cost == price]
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", help="a policy for the dark room: a name, a file or a run's folder")
    parser.add_argument("--rooms", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1000, help="of the rooms; reported results have 0")
    parser.add_argument("--budget", type=float, default=2.0)
    parser.add_argument("--out", type=Path, default=Path("results/lab/guard/unsolved.json"))
    args = parser.parse_args()
    records = measure(args.policy, rooms=args.rooms, seed=args.seed, budget=args.budget)
    table = Table("cheapest way costs", "rooms", "goals", "never found", "explorer's goals", "never found", "sure")
    for r in records:
        ours, theirs = r["policy"], r["explorer"]
        table.add_row(
            str(r["cost"]), str(r["rooms"]), f"{ours['goals']:.1f}", f"{ours['never']:.0%}",
            f"{theirs['goals']:.1f}", f"{theirs['never']:.0%}", f"{r['sure']:.2f}",
        )  # fmt: skip
    Console().print(table)
    write_json(args.out, {**provenance(), "policy": args.policy, "budget": args.budget, "by_cost": records})


if __name__ == "__main__":
    main()
