"""Playing and learning in turn and side by side: env steps per second of the whole loop, and who waits for whom.

python bench/overlap.py --out results/bench_overlap_h200.json
python bench/overlap.py --lines ant:512:0 ant:512:2        robot, rows, groups that overlap (0: in turn)

Compare with what the cores can step alone, which is measured first: `cores_share` is the loop's share of it.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import mujoco.batch
import numpy as np
from common import cores, provenance
from rich.console import Console
from rich.table import Table

from safeicrl.algos.scared import Scared
from safeicrl.envs.mujoco import models, physics
from safeicrl.envs.safe_velocity import SUBSTEPS
from safeicrl.files import write_json
from safeicrl.overlap.overlapped import Overlapped
from safeicrl.recipes.presets import preset
from safeicrl.training.steps import judge

PRESETS = {"half_cheetah": "half-cheetah", "ant": "ant"}
LINES = [
    *("half_cheetah:512:2", "ant:512:2", "half_cheetah:512:0", "half_cheetah:64:2", "half_cheetah:64:0"),
    "half_cheetah:512:4",
]


@functools.cache
def cores_alone(robot: str, worlds: int, seconds: float) -> float:
    """Env steps per second of `mujoco.batch` on all cores, under random controls, and nothing else."""
    model = models.load(robot)
    batch = mujoco.batch.Batch(model, worlds, cores())
    batch.bind("qpos")[:] = model.qpos0
    ctrl, random = batch.bind("ctrl"), np.random.default_rng(0)
    steps, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        ctrl[:] = random.uniform(-1, 1, ctrl.shape)
        batch.step(nstep=SUBSTEPS)
        steps += worlds
    return steps / (time.perf_counter() - begin)


def algorithm(robot: str, rows: int, overlap: int, args: argparse.Namespace) -> Scared:
    """The recipe's first stage at the asked size, with the real physics."""
    experiment = preset(PRESETS[robot]).stages[0].experiment
    steps = args.episodes * experiment.env.spec.max_steps
    config = experiment.algo
    ppo = dataclasses.replace(config.ppo, minibatch=min(args.minibatch, rows // 4))
    net = dataclasses.replace(config.net, context=steps)
    if args.tiny:
        net = dataclasses.replace(net, width=16, layers=1, heads=2)
    config = dataclasses.replace(
        config, rows=rows, episodes=args.episodes, net=net, ppo=ppo, overlap=overlap, segments=args.segments
    )
    env = dataclasses.replace(experiment.env, engine="auto")
    return Scared(env, config)


def program(algo: Scared) -> tuple[Callable[[Any], Any], Any]:
    """One iteration, compiled, and the first state."""
    state = eqx.filter_jit(algo.init)(jax.random.key(0))
    if algo.config.overlap:
        return Overlapped(algo, state, functools.partial(judge, algo)), state
    arrays, static = eqx.partition(state, eqx.is_array)

    def update(arrays: Any) -> Any:
        new, metrics = judge(algo, old := eqx.combine(arrays, static), *algo.update(old))
        return eqx.filter(new, eqx.is_array), metrics

    compiled = jax.jit(update).lower(arrays).compile()

    def step(state: Any) -> Any:
        arrays, metrics = jax.block_until_ready(compiled(eqx.filter(state, eqx.is_array)))
        return eqx.combine(arrays, static), metrics

    return step, state


def loop(step: Callable[[Any], Any], state: Any, seconds_at_least: float) -> dict[str, Any]:
    """Iterations of training until the time is up, after a first one that does not count."""
    state, _ = step(state)
    seconds, env_steps, moving, idle = [], 0, physics.seconds(), []
    begin = time.perf_counter()
    while len(seconds) < 2 or time.perf_counter() - begin < seconds_at_least:
        last = time.perf_counter()
        state, metrics = step(state)
        seconds.append(time.perf_counter() - last)
        env_steps += int(np.sum(metrics["env_steps"]))
        idle.append([float(np.sum(metrics.get(name, np.nan))) for name in ("learner_idle", "collector_idle")])
    total = time.perf_counter() - begin
    moving = physics.seconds() - moving
    if isinstance(step, Overlapped):
        step.close()
    learner, collector = np.mean(idle, axis=0).tolist()
    return {
        "iterations": len(seconds),
        "s_per_iteration": total / len(seconds),
        "steps_per_s": env_steps / total,
        "physics_share": moving / total,
        "learner_idle": learner,
        "collector_idle": collector,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", nargs="+", default=LINES, metavar="ROBOT:ROWS:OVERLAP")
    parser.add_argument("--episodes", type=int, default=4, help="of a trial")
    parser.add_argument("--segments", type=int, default=1, help="stages in which the KV cache grows")
    parser.add_argument("--minibatch", type=int, default=32, help="rows of a gradient step")
    parser.add_argument("--seconds", type=float, default=8.0, help="at least, for each line")
    parser.add_argument("--alone", type=int, default=4096, help="worlds with which the cores alone are measured")
    parser.add_argument("--tiny", action="store_true", help="a tiny network, to try the program")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    about, console = provenance(), Console(width=150)
    asked = [(robot, int(rows), int(overlap)) for robot, rows, overlap in (line.split(":") for line in args.lines)]
    begin, lines = time.perf_counter(), []
    with ThreadPoolExecutor() as pool:  # compiled side by side, run one after the other
        jobs = {which: pool.submit(lambda which=which: program(algorithm(*which, args))) for which in asked}
    console.print(f"compiled in {time.perf_counter() - begin:.1f} s")
    for (robot, rows, overlap), job in jobs.items():
        alone = cores_alone(robot, args.alone, min(args.seconds, 1.0))
        sizes = {"robot": robot, "rows": rows, "episodes": args.episodes, "overlap": overlap}
        try:
            line = loop(*job.result(), args.seconds)
        except Exception as error:  # the others go on
            console.print(f"{sizes}: {type(error).__name__}: {error}", markup=False)
            continue
        share = line["steps_per_s"] / alone
        lines.append({**sizes, **line, "cores_alone_per_s": alone, "cores_share": share})
        console.print(lines[-1])
        if args.out:
            write_json(args.out, {**about, "lines": lines})
    names = (
        "robot", "rows", "overlap", "steps_per_s", "cores_share", "physics_share", "learner_idle",
        "collector_idle",
    )  # fmt: skip
    table = Table(*names)
    for line in lines:
        table.add_row(*(f"{line[n]:,.2f}" if isinstance(line[n], float) else str(line[n]) for n in names))
    console.print(table)


if __name__ == "__main__":
    main()
