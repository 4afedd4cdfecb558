"""What a guard costs in time: one act, and one update of training, with it and without it, in turns.

python bench/guard_time.py       prints the ratios, and writes results/bench_guard_time.json

Only the ratios mean much: both sides run on the same machine in the same minutes. Of the acts the median counts, of
the updates the fastest.
"""

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from act import experience
from common import provenance
from rich.console import Console

from safeicrl import load_policy
from safeicrl.config import changed
from safeicrl.files import write_json
from safeicrl.recipes.presets import preset


def act_ms(name: str, batch: int, rounds: int, acts: int = 60) -> dict[str, float]:
    """Milliseconds of one act, the median, with the guard and without it; the two take turns at every step."""
    both = {guard: load_policy(name) for guard in (True, False)}
    found: dict[bool, list[float]] = {True: [], False: []}
    steps = experience(batch, acts + 10, both[True].env.size)
    for turn in range(rounds):
        for guard, policy in both.items():
            policy.start(budget=3.0, batch=batch, guard=guard)
        for index, step in enumerate(steps):
            for guard in (turn % 2 == 0, turn % 2 == 1):
                begin = time.perf_counter()
                both[guard].act(*(step if index else step[:1]))
                if index >= 10:
                    found[guard].append(1000 * (time.perf_counter() - begin))
    own, bare = (float(np.median(found[guard])) for guard in (True, False))
    return {"batch": batch, "with": own, "without": bare, "ratio": own / bare}


def update_s(name: str, points: int, rows: int, steps: int, rounds: int) -> dict[str, float]:
    """Seconds of one update of a preset's algorithm at smaller rows, with the guard and without it."""
    experiment = preset(name).stages[0].experiment
    runs: dict[bool, Any] = {}
    for guard in (True, False):
        config = experiment.algo
        changes = {"rows": rows, "steps": steps, "ppo.minibatch": rows // 2}
        if guard:
            changes |= {"net.guard_ledger": points}
        else:
            changes |= {"net.guard": 0, "net.guard_clock": False, "risk": 0.03, "first_risk": None, "bold": 0.0}
        small = changed(config, changes)
        algorithm = dataclasses.replace(experiment, algo=small).build()
        state = eqx.filter_jit(algorithm.init)(jax.random.key(0))
        update = eqx.filter_jit(algorithm.update)
        jax.block_until_ready(update(state))
        runs[guard] = (update, state)
    lowest = {True: np.inf, False: np.inf}
    for _ in range(rounds):
        for guard, (update, state) in runs.items():
            begin = time.perf_counter()
            jax.block_until_ready(update(state))
            lowest[guard] = min(lowest[guard], time.perf_counter() - begin)
    return {
        "rows": rows, "steps": steps, "with": lowest[True], "without": lowest[False],
        "ratio": lowest[True] / lowest[False],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="safe-dark-room-guard")
    parser.add_argument("--preset", default="darkroom-guard")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--ledger", type=int, default=0, help="points that the guard looks up, in the update")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("results/bench_guard_time.json"))
    args = parser.parse_args()
    about = provenance()
    acts = [act_ms(args.policy, batch, args.rounds) for batch in args.batches]
    update = update_s(args.preset, args.ledger, args.rows, args.steps, args.rounds)
    for line in acts:
        Console().print(
            f"one act, batch {line['batch']}: {line['with']:.2f} / {line['without']:.2f} ms = {line['ratio']:.3f}"
        )
    Console().print(f"one update: {update['with']:.2f} / {update['without']:.2f} s = {update['ratio']:.3f}")
    write_json(args.out, {**about, "act_ms": acts, "update_s": update})


if __name__ == "__main__":
    main()
