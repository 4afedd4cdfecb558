"""The paper's evaluation of the shipped policy, 100 budgets × 50 episodes: wall time on this machine.

python bench/evaluation.py       prints it, and writes results/bench_evaluation.json
"""

import argparse
from pathlib import Path

from common import provenance
from rich.console import Console

from safeicrl.evaluation.evaluate import evaluate
from safeicrl.evaluation.statistics import summarise
from safeicrl.files import write_json
from safeicrl.policies.contenders import released


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="safe-dark-room", help="name, path or run folder")
    parser.add_argument("--tasks", type=int, default=100, help="rooms, each with a budget of its own")
    parser.add_argument("--rows", type=int, default=25, help="rooms at a time; a chunk ends with its longest trial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/bench_evaluation.json"))
    args = parser.parse_args()
    about, who = provenance(), released(args.policy)
    # the first run includes the compilation, the second has it from the first
    runs = [evaluate(who.env, who.agent, tasks=args.tasks, rows=args.rows, seed=args.seed) for _ in range(2)]
    cold, warm = (run.meta["seconds"] for run in runs)
    steps = int(runs[1].lengths.sum())
    found = {
        "tasks": args.tasks,
        "rows": args.rows,
        "seconds": cold,
        "seconds_compiled": warm,
        "steps_per_s": steps / warm,
        "total_return": summarise(runs[1]).total_return,
    }
    Console().print(f"{args.tasks} budgets: {cold:.1f} s with compilation, {warm:.1f} s without")
    write_json(args.out, {**about, "evaluation": found})


if __name__ == "__main__":
    main()
