"""One act of a frozen policy: milliseconds by batch size, beside onnxruntime; memory over many acts.

python bench/act.py              prints the tables, and writes results/bench_act.json

The cache has its full size from the first act on, so an act takes the same time in a trial's first step and after
its last. Both run on as many threads as this process has cores. Of ten blocks of acts the quietest one counts:
other programs only ever slow one down.
"""

import argparse
import gc
import runpy
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
from common import cores, provenance
from rich.console import Console
from rich.table import Table

from safeicrl import load_policy
from safeicrl.files import write_json
from safeicrl.policies.onnx import export_onnx

BLOCKS = 10
RUNNER = Path(__file__).parent.parent / "examples" / "onnx_runner.py"


def experience(rows: int, count: int, size: int) -> list[tuple]:
    """Steps of a room with nothing in it but cells, one episode of 30 steps after another."""
    rng = np.random.default_rng(0)
    seen = rng.integers(0, size, (count, rows, 2))
    done = np.arange(count) % 30 == 29
    return [(seen[i], np.zeros(rows), np.zeros(rows), np.full(rows, done[i])) for i in range(count)]


def latencies(act: Callable, steps: list[tuple], warm: int) -> np.ndarray:
    """Milliseconds of each act after the first `warm` ones, in the block of them with the lowest median."""
    found = []
    for index, step in enumerate(steps):
        begin = time.perf_counter()
        act(*(step if index else step[:1]))
        found.append(1000 * (time.perf_counter() - begin))
    blocks = np.array_split(np.array(found[warm:]), BLOCKS)
    return min(blocks, key=np.median)


def resident() -> float:
    """MiB of memory that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def memory(act: Callable, steps: list[tuple], acts: int) -> dict[str, float]:
    """Resident memory while one trial goes on for `acts` acts."""
    marks, found = {acts // 10, acts // 2, acts}, {}
    for index in range(1, acts + 1):
        act(*steps[index % len(steps)])
        if index in marks:
            gc.collect()
            found[f"after {index}"] = round(resident(), 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="safe-dark-room", help="name or path, of a policy for a room")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--acts", type=int, default=1000, help="at each batch size, in ten blocks")
    parser.add_argument("--long", type=int, default=100_000, help="acts of the trial that memory is measured in")
    parser.add_argument("--out", type=Path, default=Path("results/bench_act.json"))
    args = parser.parse_args()
    about, policy = provenance(onnxruntime=onnxruntime.__version__), load_policy(args.policy)
    size, warm = policy.env.size, 20
    with tempfile.TemporaryDirectory() as folder:
        path = export_onnx(policy, Path(folder) / "policy")
        runner = runpy.run_path(str(RUNNER))["OnnxPolicy"](str(path), threads=cores())
    table = Table(title=f"one act of {args.policy}, a context of {policy.context} steps, {cores()} core(s): ms")
    for name in ("batch", "p50", "p99", "onnxruntime p50", "p99"):
        table.add_column(name, justify="right")
    found = []
    for rows in args.batches:
        steps = experience(rows, warm + args.acts, size)
        policy.start(budget=3.0, batch=rows)
        runner.start(budget=[3.0] * rows)
        ours, theirs = latencies(policy.act, steps, warm), latencies(runner.act, steps, warm)
        numbers: dict[str, float] = {"batch": rows}
        for who, measured in (("jax", ours), ("onnx", theirs)):
            numbers |= {f"{who}_p{q}_ms": float(np.percentile(measured, q)) for q in (50, 99)}
        found.append(numbers)
        table.add_row(str(rows), *(f"{value:.2f}" for name, value in numbers.items() if name != "batch"))
    Console().print(table)
    policy.start(budget=3.0, batch=1)
    policy.act(experience(1, 1, size)[0][0])
    held = memory(policy.act, experience(1, 3000, size), args.long)
    Console().print(f"memory in one trial of {args.long:,} acts, MiB: {held}")
    write_json(
        args.out, {**about, "policy": args.policy, "context": policy.context, "latency": found, "memory_mib": held}
    )


if __name__ == "__main__":
    main()
