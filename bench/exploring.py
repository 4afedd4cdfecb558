"""How an agent explores within its budget: when it first finds the goal, and how often it dares to pay for it.

python bench/exploring.py "explorer: results/safe-dark-room/explorer.npz" "ships: FILE.npz FILE.npz"

Each argument is a name and its results files; several seeds are pooled. The table is by whole budgets. Exploring
episodes are those before the first one with a return. One without any cost entered nothing it could have paid for.
"""

import argparse
import itertools
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from safeicrl.evaluation.archive import load_results


def by_budget(files: list[Path], edges: list[float]) -> dict[str, list[float]]:
    """First episode with a return, share of exploring episodes without cost, share never solved; per budget bin."""
    parts = [load_results(file) for file in files]
    returns, costs = (np.concatenate([getattr(p, name) for p in parts]) for name in ("returns", "costs"))
    budgets = np.concatenate([p.budgets for p in parts])
    found = (returns > 0).any(1)
    first = np.where(found, (returns > 0).argmax(1), returns.shape[1])  # [trial]
    exploring = np.arange(returns.shape[1]) < first[:, None]  # [trial, episode]
    bins = [(budgets >= low) & (budgets < high) for low, high in itertools.pairwise(edges)]
    return {
        "first found in episode": [float(first[b].mean() + 1) for b in bins],
        "exploring episodes without cost": [float((costs[b] == 0)[exploring[b]].mean()) for b in bins],
        "never found": [float(1 - found[b].mean()) for b in bins],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agents", nargs="+", help="NAME: FILE.npz [FILE.npz ...]")
    parser.add_argument("--budgets", type=float, nargs="+", default=[1, 2, 3, 4, 5, 6], help="edges of the bins")
    args = parser.parse_args()
    table = Table("agent", "what", *(f"{a:g}–{b:g}" for a, b in itertools.pairwise(args.budgets)))
    for agent in args.agents:
        name, _, files = agent.partition(":")
        for what, values in by_budget([Path(f) for f in files.split()], args.budgets).items():
            style = "{:.1f}" if what.startswith("first") else "{:.0%}"
            table.add_row(name, what, *(style.format(v) for v in values))
    Console().print(table)


if __name__ == "__main__":
    main()
