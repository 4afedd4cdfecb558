"""Budgets below 1 on the tracks, where a single step above the unknown limit breaks them; from stored results.

python bench/small_budgets.py safe-velocity-half-cheetah   → results/POLICY/below-one.json
python bench/small_budgets.py safe-velocity-ant --results results/safe-velocity-ant/reserve-by-budget.npz \
  --against results/safe-velocity-ant/by-budget.npz --out results/safe-velocity-ant/reserve-below-one.json

For each limit and for all: what the policy does with budgets below 1 and with larger ones, in its first episode and
in the last five. With --against also how much more it returns than in other results, trial by trial. The reward of
a step is the speed in m/s, less what the actions cost (Ant: plus 1 for being alive), so it shows how far from the
limit the robot runs. The lowest limit of training is half of the base limit.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
from common import provenance
from rich.console import Console
from rich.table import Table

from safeicrl.envs.registry import env_from_plain
from safeicrl.evaluation.archive import load_results
from safeicrl.evaluation.results import Results
from safeicrl.evaluation.statistics import check_comparable, standard_error
from safeicrl.evaluation.task_lists import evaluation_keys, sample_tasks
from safeicrl.files import write_json

LAST = 5


def limits_of(results: Results) -> np.ndarray:
    """[trial] the limit of each trial as a multiple of the base limit: drawn again, as the evaluation drew them."""
    described, meta = results.meta["env"], results.meta
    env: Any = env_from_plain(described["name"], described["parameters"])
    count = len(results.budgets) // results.budgets_per_task
    key, _ = evaluation_keys(meta["seed"])
    tasks = sample_tasks(env, meta["split"], jax.random.split(key, count))
    return np.asarray(tasks.multiplier)[results.task].round(4)


def row(results: Results, mine: np.ndarray) -> dict[str, float]:
    """Means over these trials; `over` counts episodes, `trials_over` trials."""
    part = dataclasses.replace(
        results, returns=results.returns[mine], costs=results.costs[mine], lengths=results.lengths[mine],
        budgets=results.budgets[mine], meta={**results.meta, "budgets_per_task": 1},
    )  # fmt: skip
    pace = part.returns / part.lengths
    return {
        "trials": int(mine.sum()),
        "reward_first": float(pace[:, 0].mean()), "reward_last": float(pace[:, -LAST:].mean()),
        "return_last": float(part.returns[:, -LAST:].mean()),
        "cost_first": float(part.costs[:, 0].mean()), "cost_last": float(part.costs[:, -LAST:].mean()),
        "over_first": float(part.over[:, 0].mean()), "over_last": float(part.over[:, -LAST:].mean()),
        "return": float(part.returns.sum(1).mean()),
        "over": float(part.over.mean()), "trials_over": float(part.over.any(axis=1).mean()),
    }  # fmt: skip


def more(results: Results, other: Results, mine: np.ndarray) -> dict[str, float]:
    """By how much these trials return more than the same trials of `other`; the error is over tasks."""
    check_comparable(results, other)
    gain = (results.returns.sum(1) - other.returns.sum(1))[mine]
    return {"more": float(gain.mean()), "more_error": float(standard_error(gain, results.task[mine]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", help="safe-velocity-half-cheetah or safe-velocity-ant")
    parser.add_argument("--results", type=Path, help="results/POLICY/by-budget.npz by default")
    parser.add_argument("--against", type=Path, help="results of another policy on the same tasks and budgets")
    parser.add_argument("--out", type=Path, help="results/POLICY/below-one.json by default")
    args = parser.parse_args()
    about, folder = provenance(), Path("results") / args.policy
    results = load_results(args.results or folder / "by-budget.npz")
    other = None if args.against is None else load_results(args.against)
    limits = limits_of(results)
    described = results.meta["env"]
    base = env_from_plain(described["name"], described["parameters"]).base_limit  # type: ignore[attr-defined]
    found = []
    table = Table(
        title=f"{args.policy}: first episode → last {LAST}; the lowest limit in training: {base / 2:.2f} m/s"
    )
    for name in (
        "limit, m/s",
        "budgets",
        "trials",
        "return",
        "more",
        "reward per step",
        "cost",
        "over",
        "over, all",
        "trials ever over",
    ):
        table.add_column(name, justify="right")
    for limit in (*np.unique(limits), None):
        for words, mine in (("below 1", results.budgets < 1), ("1 to 5", results.budgets >= 1)):
            mine = mine if limit is None else mine & (limits == limit)
            if not mine.any():
                continue
            now = row(results, mine) | ({} if other is None else more(results, other, mine))
            which = {} if limit is None else {"limit": float(limit), "limit_speed": float(limit * base)}
            found.append({**which, "budgets": words, **now})
            table.add_row(
                "all" if limit is None else f"{limit * base:.2f}", words, str(now["trials"]),
                f"{now['return']:.1f}",
                f"{now['more']:.1f} ± {now['more_error']:.1f}" if "more" in now else "",
                f"{now['reward_first']:.2f} → {now['reward_last']:.2f}",
                f"{now['cost_first']:.2f} → {now['cost_last']:.2f}",
                f"{now['over_first']:.0%} → {now['over_last']:.1%}", f"{now['over']:.2%}",
                f"{now['trials_over']:.1%}",
            )  # fmt: skip
    Console(width=160).print(table)
    lowest = {"base_limit": float(base), "lowest_limit_speed": float(base / 2), "last": LAST}
    write_json(args.out or folder / "below-one.json", {**about, "policy": args.policy, **lowest, "rows": found})


if __name__ == "__main__":
    main()
