"""What a reserve, a brake and an early end of learning (reserved.py, brake.py, settled.py in agents) are worth.

A policy's return and broken budgets, for several of each.

python bench/reserve.py safe-dark-point --reserves 0 8 20                 → results/lab/reserve/safe-dark-point.json
python bench/reserve.py safe-velocity-ant --reserves 0 1,2 --greedy       1 of budgets below 2, from the start
python bench/reserve.py safe-velocity-ant --settle-after 12 14 20 --split train
python bench/reserve.py safe-velocity-ant --brakes 1 1.5 2 --split train
python bench/reserve.py safe-dark-car --temperatures 0.25 0.5 1 --env engine=planar

By default on 200 validation tasks (seed 1000), at the temperature on the policy's card.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

import numpy as np
from common import provenance
from rich.console import Console
from rich.table import Table

from safeicrl.budgets import reserve_words
from safeicrl.envs.registry import env_to_plain, parse_parameters
from safeicrl.evaluation.results import Results
from safeicrl.evaluation.statistics import standard_error
from safeicrl.files import write_json
from safeicrl.policies.contenders import released


def measured(results: Results, edges: list[float]) -> dict[str, Any]:
    """Return and broken budgets, of all trials and by the budgets between the `edges`."""
    totals, over = results.returns.sum(1), results.over

    def part(rows: np.ndarray) -> dict[str, float]:
        return {
            "trials": int(rows.sum()),
            "return": float(totals[rows].mean()),
            "last_five": float(results.returns[rows, -5:].mean()),
            "over": float(over[rows].mean()),
            "trials_over": float(over[rows].any(1).mean()),
        }

    inside = lambda low, high: (results.budgets >= low) & (results.budgets < high)  # noqa: E731
    bins = {f"{low:g}–{high:g}": inside(low, high) for low, high in itertools.pairwise(edges)}
    beyond = np.maximum(results.costs - results.budgets[:, None], 0)[over]
    return {
        **part(np.full(len(totals), True)),
        "return_error": float(standard_error(totals, results.task)),
        "beyond": {"median": float(np.median(beyond)), "95%": float(np.quantile(beyond, 0.95))}
        if len(beyond)
        else {},
        "by_budget": {name: part(rows) for name, rows in bins.items() if rows.any()},
    }


def numbers(text: str) -> tuple[float, ...]:
    """A reserve from the command line, AMOUNT or AMOUNT,BELOW or AMOUNT,BELOW,OTHERS."""
    return tuple(float(part) for part in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", help="a pretrained policy's name, a file, or a run's folder")
    parser.add_argument("--reserves", type=numbers, nargs="+", default=[None], help="the card's by default")
    parser.add_argument(
        "--brakes", type=float, nargs="+", default=[None], metavar="FACTOR", help="the card's by default"
    )
    actions = parser.add_mutually_exclusive_group()
    actions.add_argument("--greedy", action="store_true")
    actions.add_argument("--temperatures", type=float, nargs="+", default=[None], help="the card's by default")
    parser.add_argument("--env", nargs="+", default=[], metavar="NAME=VALUE", help="changes of the environment")
    parser.add_argument("--settle-after", type=int, nargs="+", default=[None], metavar="EPISODES")
    parser.add_argument("--budgets", type=float, nargs=2, help="range; the environment's test range by default")
    parser.add_argument("--edges", type=float, nargs="+", default=[0, 1, 2, 3, 4, 5, 10, 15, 20, 30, 40, 51])
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--split", choices=["test", "train"], default="test")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="results/lab/reserve/POLICY.json by default")
    args = parser.parse_args()
    about, found = provenance(), []
    table = Table("reserve", "brake", "settles after", "actions", "return", "last five", "over", "trials ever over")
    changes = parse_parameters(tuple(args.env), "--env")
    ways = itertools.product(args.reserves, args.brakes, args.settle_after, args.temperatures)
    for reserve, brake, after, temperature in ways:
        who = released(
            args.policy, reserve=reserve, brake=brake, greedy=args.greedy, settle_after=after,
            temperature=temperature, env_args=changes,
        )  # fmt: skip
        results = who.evaluate(
            budgets=args.budgets and tuple(args.budgets), tasks=args.tasks, split=args.split, seed=args.seed
        )
        line = measured(results, args.edges)
        kept, factor = who.meta.get("reserve", 0.0), who.meta.get("brake", 1.0)
        settled = who.meta.get("settle_after", who.policy.episodes)
        how = {"reserve": kept, "brake": factor, "settle_after": settled, "actions": who.meta["actions"]}
        found.append({**how, **line})
        table.add_row(
            reserve_words(kept), f"{factor:g}", str(settled), how["actions"], f"{line['return']:.2f}",
            f"{line['last_five']:.3f}", f"{line['over']:.2%}", f"{line['trials_over']:.1%}",
        )  # fmt: skip
    Console().print(table)
    settings = {"policy": args.policy, "tasks": args.tasks, "split": args.split, "seed": args.seed}
    out = args.out or Path(f"results/lab/reserve/{Path(args.policy).stem}.json")
    write_json(out, {**about, **settings, "env": env_to_plain(who.env), "found": found})


if __name__ == "__main__":
    main()
