"""One update on 1 to 8 devices: what virtual CPU devices show, and what eight GPUs or eight hosts would do.

python bench/scaling.py            both parts → results/bench_scaling.json (docs/devices.md)
python bench/scaling.py --model    the model alone, from the stored measurements of one GPU
"""

import argparse
import functools
import os
import re
from pathlib import Path
from typing import Any

# Not optimised: eight devices on a few cores say nothing about speed, and compiling would take minutes.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"

import equinox as eqx
import jax
import numpy as np
from common import fastest, provenance
from rich.console import Console
from rich.table import Table

from safeicrl.algos.scared import Scared, ScaredConfig
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.files import read_json, write_json
from safeicrl.machine import devices
from safeicrl.nets.transformer import NetConfig
from safeicrl.optimisers.ppo import PPOConfig
from safeicrl.recipes.presets import preset

RESULTS = Path("results")
COUNTS = (1, 2, 4, 8)
ROOM = SafeDarkRoom(size=5, obstacles=6, max_steps=12, episodes=2)
STRONG, WEAK = 64, 8  # rows in all; rows of each device
COLLECTIVE = re.compile(r"= .*? (all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(")

# Assumptions of the model: bytes/s that one device can send, and seconds until a collective is under way.
LINKS = {
    "8 GPUs in one host, NVLink": (8, 450e9, 10e-6),
    "8 hosts, 400 Gb/s InfiniBand": (8, 50e9, 25e-6),
    "8 hosts, 25 Gb/s Ethernet": (8, 3.1e9, 60e-6),
}


# -- virtual devices ----------------------------------------------------------------------------------------


@functools.cache
def measure(rows: int, count: int, repeats: int) -> tuple[dict[str, Any], list[np.ndarray]]:
    """One compiled update of a small network with `rows` rows, on `count` devices; also all that it computed."""
    net = NetConfig(width=32, layers=1, heads=2, context=24)
    config = ScaredConfig(rows=rows, queue=2, segments=1, net=net, ppo=PPOConfig(epochs=1, minibatch=rows // 2))
    algorithm = Scared(ROOM, config)
    arrays, static = eqx.partition(algorithm.init(jax.random.key(0)), eqx.is_array)

    def update(arrays: Any) -> Any:
        state, metrics = algorithm.update(eqx.combine(arrays, static))
        return eqx.filter(state, eqx.is_array), metrics

    mesh = devices.make_mesh(count, rows=algorithm.row_axes)
    place = {} if mesh is None else dict.fromkeys(("in_shardings", "out_shardings"), devices.sharding(mesh))
    with devices.using(mesh):
        program = jax.jit(update, **place).lower(arrays).compile()
    arrays = devices.spread(arrays, mesh)
    found = [np.asarray(x) for x in jax.tree.leaves(program(arrays)) if eqx.is_inexact_array(x)]
    seconds = fastest(lambda: program(arrays), repeats)
    return {
        "devices": count,
        "rows": rows,
        "seconds": seconds,
        "env_steps_per_s": rows * algorithm.steps / seconds,
        "flops_per_device": program.cost_analysis()["flops"],
        "collectives": len(COLLECTIVE.findall(program.as_text())),
    }, found


# -- the model ----------------------------------------------------------------------------------------------


def sizes() -> dict[str, Any]:
    """What one iteration of the room's preset moves, in bytes, from the shapes of its arrays."""
    experiment = preset("darkroom", None).stages[0].experiment
    config, algorithm = experiment.algo, experiment.build()
    key = jax.random.key(0)
    state = eqx.filter_eval_shape(algorithm.init, key)
    parameters = sum(x.size for x in jax.tree.leaves(state.optimiser.net) if hasattr(x, "size"))
    agent = eqx.filter_eval_shape(algorithm.agent, state)
    tasks, budgets = jax.eval_shape(algorithm.draw, key)
    trials = eqx.filter_eval_shape(algorithm.play, agent, tasks, budgets, key)
    played = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(trials))
    return {
        "rows": config.rows,
        "minibatch": config.ppo.minibatch,
        "gradient_steps": config.ppo.epochs * config.rows // config.ppo.minibatch,
        "gradient_bytes": 4 * parameters,
        "trial_bytes_per_row": played / config.rows,
    }


def single_gpu() -> tuple[Any, Any]:
    """Seconds to play so many rows, and of a gradient step on so many, on one H200, from the stored measurements.

    Below the smallest number that was measured, both follow a line to zero rows. What is left there is the time of
    a sequence of small kernels, which more devices do not shorten.
    """
    played = read_json(RESULTS / "bench_trials_h200.json", "benchmark")["trials"]
    rows, seconds = (np.array([entry[name] for entry in played]) for name in ("rows", "seconds"))
    floor = seconds[0] - rows[0] * (seconds[1] - seconds[0]) / (rows[1] - rows[0])
    steps = {
        (entry["heads"], entry["rows"]): entry["milliseconds"] / 1e3
        for entry in read_json(RESULTS / "bench_update_h200.json", "benchmark")["updates"]
    }
    start = 2 * steps[2, 32] - steps[2, 64]  # two points of the network with two heads; the same for four
    slope = (steps[4, 32] - start) / 32

    def play(count: float) -> float:
        return float(np.interp(count, [0, *rows], [floor, *seconds]))

    return play, lambda count: float(start + slope * count)


def predict(sized: dict[str, Any], count: int, rate: float, latency: float, weak: bool) -> dict[str, Any]:
    """Seconds of one iteration. Ring algorithms: a device sends (n − 1)/n of the bytes, twice for a sum."""
    play, learn = single_gpu()
    factor, share = count if weak else 1, (count - 1) / count
    rows, minibatch = sized["rows"] * factor, sized["minibatch"] * factor
    gathered = share * rows * sized["trial_bytes_per_row"]
    summed = 2 * share * sized["gradient_bytes"] * sized["gradient_steps"]
    calls = 0 if count == 1 else 3 * sized["gradient_steps"] + 1  # sums of masks, of losses and of gradients
    parts = {
        "playing": play(rows / count),
        "learning": sized["gradient_steps"] * learn(minibatch / count),
        "gathering": gathered / rate,
        "summing": summed / rate,
        "latency": calls * latency,
    }
    alone = play(sized["rows"]) + sized["gradient_steps"] * learn(sized["minibatch"])
    seconds = sum(parts.values())
    speedup = factor * alone / seconds
    return {
        "devices": count, "rows": rows, "bytes": gathered + summed, "parts": parts, "seconds": seconds,
        "speedup": speedup, "efficiency": speedup / count,
    }  # fmt: skip


def model() -> dict[str, Any]:
    """The room's preset on one GPU and on more, with the same rows in all and with the same rows for each."""
    sized = sizes()
    found = [{"where": "one H200", "weak": False, **predict(sized, 1, np.inf, 0.0, weak=False)}]
    for name, (count, rate, latency) in LINKS.items():
        for weak in (False, True):
            # where it stops: the first power of two of devices that do less than half of what they could
            most = sized["minibatch"] if not weak else 2**14
            tried = (2**power for power in range(1, 15) if 2**power <= most)
            stops = next((n for n in tried if predict(sized, n, rate, latency, weak)["efficiency"] < 0.5), None)
            there = predict(sized, count, rate, latency, weak)
            found.append({"where": name, "weak": weak, **there, "stops_at": stops})
    return {"links": {name: list(link) for name, link in LINKS.items()}, "sizes": sized, "predicted": found}


# -- tables -------------------------------------------------------------------------------------------------


def show(found: dict[str, Any]) -> None:
    for kind in ("strong", "weak"):
        if kind not in found:
            continue
        table = Table(
            "devices", "rows", "ms", "env steps/s", "flops of each device", "collectives", "difference", title=kind
        )
        for entry in found[kind]:
            table.add_row(
                str(entry["devices"]), str(entry["rows"]), f"{1e3 * entry['seconds']:.1f}",
                f"{entry['env_steps_per_s']:,.0f}",
                f"{entry['flops_per_device'] / found[kind][0]['flops_per_device']:.2f}", str(entry["collectives"]),
                f"{entry['difference']:.0e}" if "difference" in entry else "",
            )  # fmt: skip
        Console().print(table)
    parts = list(found["model"]["predicted"][0]["parts"])
    table = Table("", "rows", "MB sent", *parts, "ms", "speed-up", "half at", title="model, ms per iteration")
    for entry in found["model"]["predicted"]:
        table.add_row(
            f"{entry['where']}{', rows for each' if entry['weak'] else ''}", f"{entry['rows']:,}",
            f"{entry['bytes'] / 1e6:.0f}", *(f"{1e3 * entry['parts'][name]:.1f}" for name in parts),
            f"{1e3 * entry['seconds']:.0f}", f"{entry['speedup']:.2f}", str(entry.get("stops_at") or ""),
        )  # fmt: skip
    Console(width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="store_true", help="leave out the measurements")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_scaling.json")
    args = parser.parse_args()
    found: dict[str, Any] = provenance()
    if not args.model:
        _, alone = measure(STRONG, 1, args.repeats)
        for count in COUNTS:
            entry, computed = measure(STRONG, count, args.repeats)
            gap = max(float(np.nanmax(np.abs(a - b))) for a, b in zip(alone, computed, strict=True))
            found.setdefault("strong", []).append({**entry, "difference": gap})
        found["weak"] = [measure(WEAK * count, count, args.repeats)[0] for count in COUNTS]
    found["model"] = model()
    show(found)
    if not args.model:
        write_json(args.out, found)


if __name__ == "__main__":
    main()
