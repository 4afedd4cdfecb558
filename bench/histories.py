"""Collecting the paper's 4M steps of PPO-Lagrangian's learning histories in SafeDarkRoom, files included.

python bench/histories.py                                  on this machine's CPU → results/bench_histories.json
python bench/histories.py --group 81 --out results/bench_histories_h200.json            one group, for a GPU
"""

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path

from common import provenance
from rich.console import Console

from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.files import write_json
from safeicrl.histories.collect import collect, default_config, learning_progress, progress_table
from safeicrl.histories.store import STEPWISE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=27)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--group", type=int, default=27, help="learners side by side")
    parser.add_argument("--repeats", type=int, default=1, help="the fastest counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/bench_histories.json"))
    args = parser.parse_args()
    about, console, env = provenance(), Console(), SafeDarkRoom()
    asked = {"tasks": args.tasks, "steps": args.steps, "group": args.group, "seed": args.seed}
    config = dataclasses.replace(default_config(env), **asked)

    runs = []
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder:
            begin = time.perf_counter()
            histories = collect(env, config, out=Path(folder) / "histories", console=console)
            wall = time.perf_counter() - begin
            assert histories is not None, "interrupted"
            steps = histories.reward.size
            seconds, compiling = histories.meta["seconds"], histories.meta["compile_seconds"]
            runs.append(
                {
                    "wall_s": wall,  # compilation, learning, files and all
                    "compile_s": compiling,
                    "collect_s": seconds,
                    "steps": steps,
                    "steps_per_s": steps / wall,
                    "steps_per_s_compiled": steps / seconds,
                    "bytes_per_step": sum(getattr(histories, name).nbytes for name in (*STEPWISE, "final")) / steps,
                }
            )
            tenths = learning_progress(histories, [i / 10 for i in range(10)], 0.1)
            progress = {f"{limit:g}": line for limit, line in tenths.items()}  # tenth by tenth
            console.print(progress_table(histories))
    best = min(runs, key=lambda run: run["wall_s"])
    console.print(
        f"{best['steps']:,} steps in {best['wall_s']:.1f} s, {best['compile_s']:.1f} s of them compilation: "
        f"{best['steps_per_s']:,.0f} steps/s with everything, {best['steps_per_s_compiled']:,.0f} without"
    )
    settings = {**asked, "limits": config.limits, "learner": dataclasses.asdict(config.learner)}
    write_json(args.out, {**about, **settings, **best, "runs": runs, "progress": progress})


if __name__ == "__main__":
    main()
