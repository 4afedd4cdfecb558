"""Physics of the MuJoCo worlds: what the environment costs on top of raw MuJoCo, and which engine is faster.

python bench/physics.py    C engine against raw mujoco.batch on 1 and 2 threads → results/bench_physics.json
python bench/physics.py --approximations    engines to pretrain in, against c → results/bench_approximations.json

All rates are physics steps (mj_steps) per second over all worlds. One step of Point and Car is 50 physics steps,
one of HalfCheetah and Ant is 5.
"""

import argparse
import functools
import importlib.metadata
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import fastest, provenance
from rich.console import Console
from rich.table import Table

from safeicrl.envs.mujoco import models, physics
from safeicrl.envs.registry import WORLDS, make_env
from safeicrl.errors import UserError
from safeicrl.files import write_json

ENVS = {
    robot: name for name, world in WORLDS.items() if (robot := getattr(world.load(), "robot", None)) is not None
}
# Safety-Gymnasium 1.0.0 on one core, slowest and fastest run seen, in its env steps of 10 physics steps.
ORIGINAL = {"point": (390, 1340), "car": (275, 960)}
APPROXIMATIONS = {"car": "planar", "ant": "euler"}
ROUGH_RATE = {"point": 2e5, "half_cheetah": 8e4}  # one core, to size the runs ...
SLOW_RATE = 2e4  # ... of the other robots


@functools.cache
def start_worlds(robot: str, worlds: int) -> tuple[Any, Any]:
    """Tasks and first states, whatever the engine."""
    env = make_env(ENVS[robot], engine="c")
    keys = jax.random.split(jax.random.key(0), worlds)
    tasks = jax.jit(jax.vmap(lambda key: env.sample_task(key, "train")))(keys)
    return tasks, jax.jit(jax.vmap(env.reset))(keys, tasks)[0]


def scan_steps(env: Any, tasks: Any, state: Any, actions: jax.Array) -> Any:
    """Step all worlds through actions [time, world, nu]; returns every step's outcome, as a learner needs it."""

    def step(state: Any, action: jax.Array) -> Any:
        state, out = jax.vmap(env.step, (None, 0, 0, 0))(jax.random.key(0), state, action, tasks)
        return state, out

    return jax.lax.scan(step, state, actions)


def random_actions(robot: str, steps: int, worlds: int) -> np.ndarray:
    shape = (steps, worlds, models.load(robot).nu)
    return np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)


def raw_run(job: physics.Job, state: Any, actions: np.ndarray, threads: int) -> Callable[[], None]:
    """The same steps with nothing but mujoco.batch."""
    import mujoco.batch

    batch = mujoco.batch.Batch(models.load(job.robot), actions.shape[1], threads)

    def run() -> None:
        batch.bind("qpos")[:], batch.bind("qvel")[:] = state.physics.qpos, state.physics.qvel
        batch.bind("qacc_warmstart")[:] = 0.0
        for action in actions:
            batch.bind("ctrl")[:] = action
            for _ in range(job.repeats):
                batch.step(nstep=job.substeps)

    return run


def compare_with_raw(robot: str, worlds: int, threads: int, args: argparse.Namespace) -> dict[str, Any]:
    """The C engine through the environment's jitted scan, against mujoco.batch, in turns."""
    physics.set_threads(threads)
    env = make_env(ENVS[robot], engine="c")
    per_step = env.job.substeps * env.job.repeats * worlds
    steps = max(2, round(args.seconds * ROUGH_RATE.get(robot, SLOW_RATE) * threads / per_step))
    tasks, state = start_worlds(robot, worlds)
    actions = random_actions(robot, steps, worlds)
    through = jax.jit(lambda s, a: scan_steps(env, tasks, s, a))
    on_device = jnp.asarray(actions)
    raw = raw_run(env.job, state, actions, threads)

    def run() -> None:
        jax.block_until_ready(through(state, on_device))

    raw(), run()
    pairs = [(fastest(raw, 1), fastest(run, 1)) for _ in range(args.repeats)]
    raw_time, env_time = (min(times) for times in zip(*pairs, strict=True))
    row = {"robot": robot, "worlds": worlds, "threads": threads, "steps": steps}
    row |= {"raw": per_step * steps / raw_time, "env": per_step * steps / env_time, "ratio": raw_time / env_time}
    if robot in ORIGINAL:
        row["times_original"] = [row["env"] / 10 / rate for rate in reversed(ORIGINAL[robot])]
    return row


def reset_against_step(robot: str, worlds: int, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of one reset and of one step of all worlds."""
    env = make_env(ENVS[robot], engine="c")
    tasks, state = start_worlds(robot, worlds)
    keys, action = jax.random.split(jax.random.key(1), worlds), jnp.asarray(random_actions(robot, 1, worlds))
    reset = jax.jit(jax.vmap(env.reset))
    step = jax.jit(lambda s, a: scan_steps(env, tasks, s, a))
    jax.block_until_ready((reset(keys, tasks), step(state, action)))
    seconds = {
        "reset": fastest(lambda: jax.block_until_ready(reset(keys, tasks)), args.repeats),
        "step": fastest(lambda: jax.block_until_ready(step(state, action)), args.repeats),
    }
    return {"robot": robot, "worlds": worlds, **seconds}


def compile_engine(robot: str, engine: str, worlds: int) -> Callable[[float], float]:
    """Compile steps of `worlds` worlds; calling the result runs some of them and returns physics steps/s."""
    env = make_env(ENVS[robot], engine=engine)
    steps = 20 if engine == "planar" else 1
    tasks, state = start_worlds(robot, worlds)
    actions = jnp.asarray(random_actions(robot, steps, worlds))
    compiled = jax.jit(lambda t, s, a: scan_steps(env, t, s, a)).lower(tasks, state, actions).compile()

    def measure(seconds: float) -> float:
        current, _ = jax.block_until_ready(compiled(tasks, state, actions))
        count, start = 0, time.perf_counter()
        while count == 0 or time.perf_counter() - start < seconds:
            current, _ = jax.block_until_ready(compiled(tasks, current, actions))
            count += steps
        rate = count * worlds * env.job.substeps * env.job.repeats / (time.perf_counter() - start)
        return float(rate)

    return measure


def approximations(args: argparse.Namespace) -> list[dict[str, Any]]:
    """How much faster the engines to pretrain in are than the real one, by turns."""
    rows = []
    for robot, engine in APPROXIMATIONS.items():
        if robot not in args.robots:
            continue
        for worlds in args.worlds:
            real, other = (compile_engine(robot, name, worlds) for name in ("c", engine))
            pairs = [(real(args.seconds), other(args.seconds)) for _ in range(args.repeats)]
            c, fast = (max(rates) for rates in zip(*pairs, strict=True))
            rows.append(
                {"robot": robot, "engine": engine, "worlds": worlds, "c": c, "rate": fast, "times": fast / c}
            )
    return rows


def print_comparison(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="C engine, physics steps/s", box=None)
    for column in ("robot", "worlds", "threads", "raw batch", "through env", "ratio", "× original"):
        table.add_column(column, justify="right")
    for row in rows:
        times = " – ".join(f"{x:.1f}" for x in row.get("times_original", []))
        cells = [row["robot"], str(row["worlds"]), str(row["threads"])]
        table.add_row(*cells, f"{row['raw']:,.0f}", f"{row['env']:,.0f}", f"{row['ratio']:.2f}", times)
    console.print(table)


def usable(robots: list[str], console: Console) -> list[str]:
    found = []
    for robot in robots:
        try:
            models.load(robot)
            found.append(robot)
        except UserError as error:
            console.print(f"{robot} left out: {error}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--approximations", action="store_true", help="compare the engines to pretrain in instead")
    parser.add_argument("--robots", nargs="+", default=list(ENVS), choices=list(ENVS))
    parser.add_argument("--worlds", nargs="+", type=int, default=[64, 512], help="batch sizes")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--seconds", type=float, default=1.0, help="length of one measurement, roughly")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    console = Console()
    args.robots = usable(args.robots, console)
    about = provenance(mujoco=importlib.metadata.version("mujoco"))
    if args.approximations:
        rows = approximations(args)
        for row in rows:
            console.print(f"{row['robot']}, {row['worlds']} worlds: {row['engine']} is {row['times']:,.2f} times c")
        write_json(args.out or Path("results/bench_approximations.json"), {**about, "approximations": rows})
        return
    cases = [
        (robot, worlds, threads) for robot in args.robots for worlds in args.worlds for threads in args.threads
    ]
    rows = [compare_with_raw(*case, args) for case in cases]
    print_comparison(rows, console)
    resets = [reset_against_step(robot, max(args.worlds), args) for robot in args.robots]
    for row in resets:
        milliseconds = f"reset {row['reset'] * 1e3:.2f} ms, step {row['step'] * 1e3:.2f} ms"
        console.print(f"{row['robot']}, {row['worlds']} worlds: {milliseconds}")
    write_json(args.out or Path("results/bench_physics.json"), {**about, "compare": rows, "resets": resets})


if __name__ == "__main__":
    main()
