"""Ways to make the learner's update faster: attention kernels, rows per update, compiler options.

python bench/update.py --out results/bench_update_ways_h200.json

All programs are compiled side by side, then timed one after the other. Each attention is also compared with the
plain one, output and gradients. A way that this machine or version cannot do is reported and left out.
"""

import argparse
import functools
import gzip
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from common import fastest, provenance
from rich.console import Console
from rich.table import Table
from trials import ENV, EPOCHS, prepare

from safeicrl.files import write_json
from safeicrl.nets import attention, small_heads, transformer
from safeicrl.nets.transformer import NetConfig

Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, int], jax.Array]
GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"


def small(forward: int, backward: int, warps: int = 4, stages: int = small_heads.DEFAULT.stages) -> Attend:
    """The kernels for small heads, cut in another way."""
    blocks = small_heads.Blocks(forward=forward, backward=backward, warps=warps, stages=stages)
    return functools.partial(small_heads.attend, blocks=blocks)


@dataclass(frozen=True)
class Way:
    """One way to compute an update."""

    name: str
    attend: Attend | None = None  # instead of the present one
    rows: int = 32
    heads: int = 8
    trials: int = 1  # in each row; more have fewer scores
    pad: bool = True  # rows to a multiple of 64 tokens
    options: tuple[tuple[str, Any], ...] = ()  # of the compiler


def ways(rows: int) -> list[Way]:
    """Those to compare; the first is the present one."""
    way, fused = functools.partial(Way, rows=rows), attention._attend_fused
    in_graphs = (("xla_gpu_graph_min_graph_size", 1), ("xla_gpu_enable_command_buffer", GRAPHS))
    return [
        way("present"),
        way("rows not padded", pad=False),
        way("cuDNN", fused),
        way("small heads 128/64", small(128, 64)),
        way("small heads 64/64, 2 stages", small(64, 64, stages=2)),
        way("small heads 64/64, 2 warps", small(64, 64, warps=2)),
        way("small heads 64/64, 8 warps", small(64, 64, warps=8)),
        way("small heads 128/128, 8 warps", small(128, 128, warps=8)),
        way("small heads 32/32, 1 warp", small(32, 32, warps=1)),
        way("no attention", no_attention),
        way("present, 4 trials per row", trials=4),
        way("cuDNN, 4 trials per row", fused, trials=4),
        way("present, 4 heads", heads=4),
        way("cuDNN, 4 heads", fused, heads=4),
        way(f"{4 * rows} rows", rows=4 * rows),
        way("all in graphs", options=in_graphs),
    ]


def no_attention(q: jax.Array, k: jax.Array, v: jax.Array, trial: jax.Array, window: int) -> jax.Array:
    """What the rest of an update costs."""
    return v


def cut(attend: Attend, trials: int) -> Attend:
    """The same with every row cut into `trials` equal parts, which do not see each other."""

    def attend_parts(q: jax.Array, k: jax.Array, v: jax.Array, trial: jax.Array, window: int) -> jax.Array:
        steps = trial.shape[-1]
        return attend(q, k, v, trials * trial + jnp.arange(steps) * trials // steps, window)

    return attend_parts


@functools.cache
def prepared(heads: int, rows: int, steps: int, seed: int) -> Any:
    """What an update learns from."""
    return prepare(heads, rows, argparse.Namespace(steps=steps, seed=seed))


def lower(way: Way, args: argparse.Namespace) -> tuple[Any, Any]:
    """The traced program and its argument."""
    function, state = prepared(way.heads, way.rows, args.steps, args.seed)
    arrays, static = eqx.partition(state, eqx.is_array)
    run = lambda arrays: eqx.filter(function(eqx.combine(arrays, static)), eqx.is_array)  # noqa: E731
    padding = transformer.padding
    try:
        transformer.attend = cut(way.attend or attention.attend, way.trials)
        if not way.pad:
            transformer.padding = lambda steps: 0
        return jax.jit(run).lower(arrays), arrays
    finally:
        transformer.attend, transformer.padding = attention.attend, padding


def measure(way: Way, program: Any, arrays: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of one gradient step."""
    jax.block_until_ready(program(arrays))
    seconds = fastest(lambda: program(arrays), args.repeats) / EPOCHS
    _, metrics = program(arrays)
    return {
        "way": way.name,
        "rows": way.rows,
        "heads": way.heads,
        "trials_per_row": way.trials,
        "milliseconds": 1e3 * seconds,
        "milliseconds_per_32_rows": 1e3 * seconds * 32 / way.rows,
        "actor_loss": float(metrics["actor_loss"]),
        "grad_norm": float(metrics["grad_norm"]),
    }


def with_gradients(attend: Attend, heads: int, steps: int, dtype: Any) -> list[np.ndarray]:
    """Output and gradients for two rows, one of them with two trials."""
    shape, key = (2, steps, heads, NetConfig().width // heads), jax.random.key(0)
    q, k, v, seed = (jax.random.normal(x, shape) for x in jax.random.split(key, 4))
    trial = (jnp.arange(steps)[None] >= jnp.array([steps // 3, steps])[:, None]).astype(jnp.int32)

    @jax.jit
    def both(q: jax.Array, k: jax.Array, v: jax.Array, seed: jax.Array) -> tuple[jax.Array, ...]:
        out, back = jax.vjp(lambda *x: attend(*x, trial, steps), q, k, v)
        return out, *back(seed)

    return [np.asarray(x, np.float32) for x in both(*(x.astype(dtype) for x in (q, k, v, seed)))]


@functools.cache
def plain(heads: int, steps: int) -> list[np.ndarray]:
    with jax.default_matmul_precision("float32"):
        return with_gradients(attention._attend_blocks, heads, steps, jnp.float32)


def difference(way: Way, steps: int) -> dict[str, float]:
    """Largest difference to the plain attention in float32, of the output and of the gradients."""
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    found = with_gradients(way.attend or attention.attend, way.heads, steps, dtype)
    return {
        name: float(np.abs(a - b).max() / np.abs(b).max())
        for name, a, b in zip(("out", "dq", "dk", "dv"), found, plain(way.heads, steps), strict=True)
    }


def kernels(run: Callable[[], Any]) -> list[dict[str, Any]]:
    """What the accelerator did in one run, by kernel: milliseconds and number of calls per gradient step."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (path,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    meta = [e for e in events if e.get("ph") == "M"]
    gpus = {e["pid"] for e in meta if e["name"] == "process_name" and "GPU" in e["args"]["name"]}
    streams = {
        (e["pid"], e["tid"])
        for e in meta
        if e["name"] == "thread_name" and e["pid"] in gpus and "Stream" in e["args"]["name"]
    }
    spent: dict[str, list[float]] = defaultdict(list)
    for e in events:
        if e.get("ph") == "X" and (e["pid"], e["tid"]) in streams:
            spent[e["name"]].append(e["dur"] / 1e3)
    found = [
        {"kernel": name, "ms": sum(each) / EPOCHS, "calls": len(each) / EPOCHS} for name, each in spent.items()
    ]
    return sorted(found, key=lambda x: -x["ms"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=ENV.spec.trial_steps)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="names of ways")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    about, console = provenance(), Console(width=150)
    known = [way.name for way in ways(args.rows)]
    if unknown := set(args.only or ()) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    chosen = [way for way in ways(args.rows) if not args.only or way.name in args.only]
    lines: list[dict[str, Any]] = []
    report: dict[str, Any] = {**about, "steps": args.steps, "updates": lines}

    def attempt(name: str, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except Exception as error:  # the others go on
            lines.append({"way": name, "error": f"{type(error).__name__}: {error}"[:300]})
            console.print(f"{name}: {lines[-1]['error']}", markup=False)
            return None

    traced, compiling, comparing = {}, {}, {}
    with ThreadPoolExecutor() as pool:  # compiles while the next way is traced
        for way in chosen:
            if not (found := attempt(way.name, lambda way=way: lower(way, args))):
                continue
            traced[way] = found
            compiling[way] = pool.submit(found[0].compile, compiler_options=dict(way.options))
            other = way.rows != args.rows or way.trials > 1 or way.options or not way.pad
            if not other and way.attend != no_attention:
                comparing[way] = pool.submit(difference, way, min(args.steps, 512))
    report["differences"] = {way.name: attempt(way.name, job.result) for way, job in comparing.items()}
    programs = {way: found for way, job in compiling.items() if (found := attempt(way.name, job.result))}
    for way, program in programs.items():
        line = attempt(way.name, lambda way=way, program=program: measure(way, program, traced[way][1], args))
        if line:
            lines.append(line)
            console.print(f"{way.name}: {line['milliseconds_per_32_rows']:.2f} ms per 32 rows", highlight=False)
        if args.out:
            write_json(args.out, report)
    if jax.default_backend() == "gpu":
        for way in [way for way in programs if way.name in ("present", "cuDNN")]:
            run = functools.partial(programs[way], traced[way][1])
            report.setdefault("kernels", {})[way.name] = attempt(way.name, lambda run=run: kernels(run))
    console.print(report["differences"])
    for name, found in report.get("kernels", {}).items():
        table = Table("kernel", "ms", "calls", title=f"{name}: {sum(k['ms'] for k in found or []):.2f} ms")
        for k in (found or [])[:20]:
            table.add_row(k["kernel"][:90], f"{k['ms']:.3f}", f"{k['calls']:.1f}")
        console.print(table)
    if args.out:
        write_json(args.out, report)


if __name__ == "__main__":
    main()
