"""What a guard and its ledger cost in time: one act, and one update of training, with them and without, in turns.

python bench/guard_time.py       prints the ratios, and writes results/bench_guard_time.json

Only the ratios mean much: all run on the same machine in the same minutes. Of the acts the median counts, of the
updates the fastest. The network with neither guard nor ledger has random weights: what it plays does not matter.
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
from safeicrl.nets.heads import PolicyNet
from safeicrl.policies.policy import Policy
from safeicrl.recipes.presets import preset

WITH, OFF, NEITHER = "guard and ledger", "guard off", "neither"
BARE = {"guard": 0, "guard_clock": False, "guard_ledger": 0, "shared_ledger": False}


def without(policy: Policy) -> Policy:
    """A policy of the same size that has neither guard nor ledger."""
    trunk = policy.agent.net.trunk
    net = PolicyNet(dataclasses.replace(trunk.config, **BARE), trunk.spec, jax.random.key(0))
    return Policy(env=policy.env, agent=dataclasses.replace(policy.agent, net=net, risk=None), card=policy.card)


def act_ms(name: str, batch: int, rounds: int, acts: int = 60) -> dict[str, Any]:
    """Milliseconds of one act, the median, of each kind; they take turns at every step."""
    policy = load_policy(name)
    kinds = {WITH: policy, OFF: load_policy(name, guard=False), NEITHER: without(policy)}
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    steps = experience(batch, acts + 10, policy.env.size)
    for turn in range(rounds):
        for each in kinds.values():
            each.start(budget=3.0, batch=batch)
        for index, step in enumerate(steps):
            for kind in list(kinds)[:: 1 if turn % 2 else -1]:
                begin = time.perf_counter()
                kinds[kind].act(*(step if index else step[:1]))
                if index >= 10:
                    found[kind].append(1000 * (time.perf_counter() - begin))
    return {"batch": batch, **ratios({kind: float(np.median(each)) for kind, each in found.items()})}


def update_s(name: str, rows: int, steps: int, rounds: int) -> dict[str, Any]:
    """Seconds of one update of a preset's algorithm at smaller rows, of each kind."""
    experiment = preset(name).stages[0].experiment
    bare = {f"net.{size}": value for size, value in BARE.items()}
    no_ledger = {"net.guard_ledger": 0, "net.shared_ledger": False}
    no_guard = {**bare, "risk": 0.03, "first_risk": None, "bold": 0.0, "curiosity": 0.0}
    runs: dict[str, Any] = {}
    for kind, changes in {WITH: {}, "guard alone": no_ledger, NEITHER: no_guard}.items():
        small = changed(experiment.algo, {"rows": rows, "steps": steps, "ppo.minibatch": rows // 2, **changes})
        algorithm = dataclasses.replace(experiment, algo=small).build()
        state = eqx.filter_jit(algorithm.init)(jax.random.key(0))
        update = eqx.filter_jit(algorithm.update)
        jax.block_until_ready(update(state))
        runs[kind] = (update, state)
    lowest = dict.fromkeys(runs, np.inf)
    for _ in range(rounds):
        for kind, (update, state) in runs.items():
            begin = time.perf_counter()
            jax.block_until_ready(update(state))
            lowest[kind] = min(lowest[kind], time.perf_counter() - begin)
    return {"rows": rows, "steps": steps, **ratios(lowest)}


def ratios(times: dict[str, float]) -> dict[str, Any]:
    """The times, and those of the others in terms of the network that has neither."""
    return {"times": times, "ratios": {kind: times[kind] / times[NEITHER] for kind in times if kind != NEITHER}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="safe-dark-room-guard")
    parser.add_argument("--preset", default="darkroom-guard")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("results/bench_guard_time.json"))
    args = parser.parse_args()
    about = provenance()
    acts = [act_ms(args.policy, batch, args.rounds) for batch in args.batches]
    update = update_s(args.preset, args.rows, args.steps, args.rounds)
    said = lambda line: ", ".join(f"{kind} {ratio:.3f}" for kind, ratio in line["ratios"].items())  # noqa: E731
    for line in acts:
        Console().print(f"one act, batch {line['batch']}, against {NEITHER}: {said(line)}")
    Console().print(f"one update, against {NEITHER}: {said(update)}")
    write_json(args.out, {**about, "act_ms": acts, "update_s": update})


if __name__ == "__main__":
    main()
