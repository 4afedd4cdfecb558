"""How budgets are broken: how many steps lie between the one that used a budget up and the one that broke it.

python bench/breaks.py safe-velocity-ant --greedy --settle-after 14 --out results/lab/reserve/ant-breaks.json

For policies whose costs have units. By default 160 training tasks of seed 1000 with budgets of 1–2.
"""

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from common import provenance
from rich.console import Console

from safeicrl.agents.api import lasting
from safeicrl.budgets import is_over, is_spent
from safeicrl.evaluation.evaluate import budget_grid
from safeicrl.evaluation.task_lists import evaluation_keys, sample_tasks
from safeicrl.files import write_json
from safeicrl.policies.contenders import released
from safeicrl.trial import run_trials

ROWS = 40  # trials at a time


@eqx.filter_jit
def play(
    env: Any, agent: Any, tasks: Any, budgets: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[row, time]: the cost of each step, whether it ended an episode, and whether it counts."""
    episodes = env.spec.episodes
    steps = episodes * env.spec.max_steps
    trials = run_trials(env, agent, tasks, budgets, key, episodes=episodes, steps=steps, segments=8)
    return trials.cost, trials.done, trials.valid


def gaps(cost: np.ndarray, done: np.ndarray, budget: float, unit: float) -> list[int | None]:
    """Of each episode of a trial that used its budget up: the steps until it was broken, None if it was not.

    0: the step that used it up broke it, too.
    """
    found: list[int | None] = []
    for episode in np.split(cost, np.flatnonzero(done)[:-1] + 1):
        costly = np.flatnonzero(episode)
        used_up = np.flatnonzero(is_spent(budget - episode[costly].cumsum(), unit))
        if len(used_up):
            spent = episode[costly].cumsum()[used_up[0] :]
            broken = np.flatnonzero(is_over(spent, budget))
            found.append(int(costly[used_up[0] + broken[0]] - costly[used_up[0]]) if len(broken) else None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", help="a pretrained policy's name, a file, or a run's folder")
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--settle-after", type=int, metavar="EPISODES")
    parser.add_argument("--brake", type=float, metavar="FACTOR")
    parser.add_argument("--budgets", type=float, nargs=2, default=(1.0, 2.0))
    parser.add_argument("--tasks", type=int, default=160)
    parser.add_argument("--split", choices=["test", "train"], default="train")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    about = provenance()
    who = released(args.policy, greedy=args.greedy, settle_after=args.settle_after, brake=args.brake)
    env, agent = who.env, lasting(who.agent, "settle_after" in who.meta)
    task_key, run_key = evaluation_keys(args.seed)
    tasks = sample_tasks(env, args.split, jax.random.split(task_key, args.tasks))
    budgets, found = budget_grid(*args.budgets, args.tasks), []
    for chunk, first in enumerate(range(0, args.tasks, ROWS)):
        mine = jax.tree.map(lambda x: x[first : first + ROWS, None], tasks)  # noqa: B023
        some = budgets[first : first + ROWS]
        played = play(env, agent, mine, jnp.asarray(some)[:, None], jax.random.fold_in(run_key, chunk))
        for cost, done, valid, budget in zip(*map(np.asarray, played), some, strict=True):
            found += gaps(cost[valid], done[valid], budget, env.spec.cost_unit)
    broken = Counter(gap for gap in found if gap is not None)
    told = {
        "episodes": args.tasks * env.spec.episodes,
        "used up": len(found),
        "broken": broken.total(),
        "by steps until then": {str(gap): broken[gap] for gap in sorted(broken)},
    }
    Console().print(told)
    asked = {name: getattr(args, name) for name in ("policy", "tasks", "split", "seed", "budgets")}
    how = {name: who.meta[name] for name in ("actions", "brake", "settle_after") if name in who.meta}
    write_json(args.out, {**about, **asked, **how, **told})


if __name__ == "__main__":
    main()
