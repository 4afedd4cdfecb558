"""How fast whole training runs went: playing, learning and logging together, from their logs.

python bench/loop.py runs/darkroom results/safe-dark-room/training       one line per run; --out FILE.json saves
python bench/loop.py results/safe-dark-room/training results/*/training/[0-9]-* --out results/bench_loop_h200.json
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from safeicrl.files import read_json, write_json
from safeicrl.log import read_metrics

SAFE = (0.05, 0.03)  # shares of all and of the last episodes over budget, at most


def measure(folder: Path) -> dict[str, Any]:
    """Steps/s and seconds of the median iteration, over all seeds together. The median ignores evaluations."""
    config, rows = read_json(folder / "config.json", "training run"), read_metrics(folder / "metrics.jsonl")
    names = ("iteration", "env_steps", "seconds")
    log = np.array([[row[name] for name in names] for row in rows if "return" in row], float)  # [row, 3]
    iterations, steps, seconds = np.diff(log, axis=0).T
    seeds = config["train"]["seeds"]
    evaluations = [row for row in rows if "eval/over_budget" in row]
    safe = [row["eval/over_budget"] <= SAFE[0] and row["eval/over_budget_last"] <= SAFE[1] for row in evaluations]
    since = next((i for i in range(len(safe)) if all(safe[i:])), None)
    return {
        "run": folder.as_posix(),
        "device": config["device"],
        "seeds": seeds,
        "iterations": int(log[-1, 0]),
        "seconds_per_iteration": float(np.median(seconds / iterations)),
        "env_steps_per_s": float(seeds * np.median(steps / seconds)),
        "minutes": float(log[-1, 2] / 60),
        # of the evaluation from which on all are within SAFE
        "minutes_to_safety": None if since is None else evaluations[since]["seconds"] / 60,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of training runs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = [measure(folder) for folder in args.runs]
    for run in found:
        safety = run["minutes_to_safety"]
        Console().print(
            f"{run['run']}: {run['env_steps_per_s']:,.0f} env steps/s over {run['seeds']} seed(s), "
            f"{run['seconds_per_iteration']:.2f} s per iteration, {run['minutes']:.1f} min on {run['device']}"
            + (
                ""
                if safety is None
                else f", {safety:.1f} min to at most {SAFE[0]:.0%} and {SAFE[1]:.0%} over budget"
            )
        )
    if args.out is not None:
        write_json(args.out, {"runs": found})


if __name__ == "__main__":
    main()
