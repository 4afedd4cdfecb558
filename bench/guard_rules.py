"""What a guard of the dark room allows, beside what the room's rules allow; and what broke the budgets that broke.

python bench/guard_rules.py safe-dark-room-guard --risk 0.001   → results/lab/guard/rules.json

While the goal is not found, every unknown cell next to the agent is a question. The rules allow to enter it if an
obstacle there could be paid for, and then the way back to a known free cell too; at the episode's last step no way
back is needed. The table says how often the guard allows what the rules allow, by where the agent stands and what
is left of the budget. A guard that knows the room gives less risk to what the rules allow than to what they forbid;
the medians of both say whether it does.

A broken budget has a cause: the last action was misjudged (within the risk); or the one before was, and now every
action is risky; or the budget was spent in a row of costs that the guard, at its depth, could not see coming.
"""

import argparse
import dataclasses
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from common import provenance
from rich.console import Console
from rich.table import Table

from safeicrl.agents.in_context import InContextAgent
from safeicrl.envs.dark_room import MOVES, SafeDarkRoom
from safeicrl.files import write_json
from safeicrl.policies.cards import read_card
from safeicrl.policies.catalogue import find_policy, load_agent
from safeicrl.trial import Trials, run_trials, sample_queue

UNKNOWN, FREE, OBSTACLE = -1, 0, 1
FAR = 99  # no way back


@eqx.filter_jit
def play(env: SafeDarkRoom, agent: InContextAgent, budgets: jax.Array, key: jax.Array) -> tuple[Trials, jax.Array]:
    """One trial for each budget, and the guard's risk of every action, [trial, time, action]."""
    task_key, play_key = jax.random.split(key)
    tasks, _ = sample_queue(env, "test", env.test_budget, (len(budgets), 1), task_key)
    trials = run_trials(
        env, agent, tasks, budgets[:, None], play_key, episodes=env.episodes, steps=env.spec.trial_steps, segments=4
    )
    features = agent.net.trunk.forward(trials.token, trials.trial)
    watched, guard = agent.net.watched(features, trials.token, trials.trial), agent.net.guard
    assert guard is not None
    assert agent.risk is not None
    return trials, guard.judge(watched, trials.token.ctg, trials.token.time, agent.risk).risk


def neighbours(size: int) -> np.ndarray:
    """[cell, action] where each action leads."""
    cells = np.stack(np.divmod(np.arange(size**2), size), -1)
    moved = np.clip(cells[:, None] + MOVES, 0, size - 1)
    return moved[..., 0] * size + moved[..., 1]


def way_back(known: np.ndarray, beside: np.ndarray) -> np.ndarray:
    """[cell] what the cheapest way to a known free cell costs at worst."""
    free = known == FREE
    need = np.where(free, 0, FAR)
    for _ in range(4):
        need = np.where(free, 0, np.minimum(need, (need[beside[:, 1:]] + ~free[beside[:, 1:]]).min(1)))
    return need


def questions(
    env: SafeDarkRoom, trials: Any, risks: np.ndarray, trial: int, beside: np.ndarray
) -> tuple[dict[tuple, Counter], dict[tuple, list[float]]]:
    """(stands on, left, when) → how many unknown cells the rules allow, how many of them the guard allows.

    And (stands on, left, allowed by the rules) → the guard's risks of unknown cells, before the last step.
    """
    token, found, judged = trials.token, defaultdict(Counter), defaultdict(list)
    known = np.full(env.size**2, UNKNOWN)
    known[env.start] = FREE
    for time in np.flatnonzero(trials.valid[trial]):
        row, column = token.observation[trial, time]
        here, left = row * env.size + column, int(token.ctg[trial, time])
        last = token.time[trial, time] == env.max_steps - 1
        need = way_back(known, beside)
        for action in range(1, len(MOVES)):
            cell = beside[here, action]
            if known[cell] != UNKNOWN or left < 1:
                continue
            stands = "an obstacle" if known[here] == OBSTACLE else "a free cell"
            allowed = last or left - 1 >= need[cell]
            if allowed:
                count = found[stands, left, "last step" if last else "earlier"]
                count.update(rules=1, guard=int(trials.extras["allowed"][trial, time, action]))
            if not last:
                judged[stands, left, bool(allowed)].append(float(risks[trial, time, action]))
        if trials.reward[trial, time] > 0:  # from here on it need not explore
            return found, judged
        cell = beside[here, trials.action[trial, time]]
        known[cell] = OBSTACLE if trials.cost[trial, time] > 0 else FREE
    return found, judged


def causes(trials: Any, risks: np.ndarray, agent: InContextAgent) -> Counter:
    """Why the budgets broke that broke."""
    ctg, cost, found = trials.token.ctg, trials.cost, Counter()
    index = trials.action[..., None]
    taken, safest = np.take_along_axis(risks, index, -1)[..., 0], risks.min(-1)
    for trial, time in zip(*np.where(trials.valid & (ctg >= 0) & (ctg - cost < 0)), strict=True):
        before = max(time - 1, 0)
        if taken[trial, time] <= agent.risk:
            found["the last action was judged within the risk"] += 1
        elif safest[trial, before] <= agent.risk:
            found["the action before it was judged within the risk"] += 1
        else:
            found["deeper: every action was risky before it, too"] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", help="a policy for SafeDarkRoom with a guard")
    parser.add_argument("--budgets", type=float, nargs="+", default=[1.5, 2.5, 3.5, 4.5])
    parser.add_argument("--tasks", type=int, default=120, help="rooms in all, not the reported ones")
    parser.add_argument("--risk", type=float, help="the card's by default")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("results/lab/guard/rules.json"))
    args = parser.parse_args()
    about, path = provenance(), find_policy(args.policy)
    card = read_card(path)
    env, agent = load_agent(path, card)
    if not isinstance(env, SafeDarkRoom) or not isinstance(agent, InContextAgent) or agent.net.guard is None:
        parser.error(f"{args.policy} is not a policy for SafeDarkRoom with a guard")
    risk = args.risk or card["risk"]
    agent = dataclasses.replace(agent, temperature=card.get("temperature", 1.0), risk=risk)
    budgets = np.resize(np.float32(args.budgets), args.tasks)
    played, risks = jax.tree.map(np.asarray, play(env, agent, jnp.asarray(budgets), jax.random.key(args.seed)))
    total: dict[tuple, Counter] = defaultdict(Counter)
    judged: dict[tuple, list[float]] = defaultdict(list)
    for trial in range(args.tasks):
        asked, values = questions(env, played, risks, trial, neighbours(env.size))
        for where, count in asked.items():
            total[where].update(count)
        for where, some in values.items():
            judged[where] += some
    broken = causes(played, risks, agent)

    table = Table("stands on", "left", "when", "rules allow", "guard allows", title=f"{args.policy}, risk {risk:g}")
    for (stands, left, when), count in sorted(total.items()):
        table.add_row(stands, str(left), when, str(count["rules"]), f"{count['guard'] / count['rules']:.1%}")
    Console().print(table)
    medians = [
        {"stands_on": s, "left": n, "rules_allow": ok, "cells": len(some), "median_risk": float(np.median(some))}
        for (s, n, ok), some in sorted(judged.items())
    ]
    table = Table("stands on", "left", "the rules", "unknown cells", "median risk", title="before the last step")
    for line in medians:
        rules = "allow" if line["rules_allow"] else "forbid"
        numbers = (str(line["cells"]), f"{line['median_risk']:.4f}")
        table.add_row(str(line["stands_on"]), str(line["left"]), rules, *numbers)
    Console().print(table)
    Console().print(f"budgets broken: {broken.total()}; {dict(broken)}")
    rows = [{"stands_on": s, "left": n, "when": w, **count} for (s, n, w), count in sorted(total.items())]
    settings = {
        "policy": args.policy,
        "risk": risk,
        "tasks": args.tasks,
        "budgets": args.budgets,
        "seed": args.seed,
    }
    write_json(args.out, {**about, **settings, "unknown_cells": rows, "risks": medians, "broken": dict(broken)})


if __name__ == "__main__":
    main()
