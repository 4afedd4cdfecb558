"""SafeDarkRoom alone under random actions: steps/s in one jitted scan, and through the Gymnasium face.

python bench/env.py            a table, and results/bench_env.json
"""

from dataclasses import dataclass
from pathlib import Path

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from common import cores, fastest, processor, provenance
from rich.console import Console
from rich.table import Table

from safeicrl.envs.api import Env
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.files import write_json


@dataclass(frozen=True)
class Args:
    rooms: tuple[int, ...] = (256, 1024, 4096, 16384)  # rooms stepped side by side
    steps: int = 2000  # steps of each room in one timed scan
    repeats: int = 3  # the fastest counts: other programs only ever slow one down
    gym_steps: int = 5000
    seed: int = 0
    out: Path = Path("results/bench_env.json")


def scan_rate(env: Env, rooms: int, args: Args) -> float:
    """Environment steps/s of one jitted scan with autoreset; actions drawn inside, compilation not counted."""
    task_key, key = jax.random.split(jax.random.key(args.seed))
    tasks = jax.vmap(lambda k: env.sample_task(k, "test"))(jax.random.split(task_key, rooms))
    start = jax.vmap(env.reset)(jax.random.split(key, rooms), tasks)[0]

    def step(carry: tuple, key: jax.Array) -> tuple:
        state, reward, cost = carry
        # 16 random bits an action; the bias of 5 in 65536 is nothing here, and threefry is what takes the time
        bits = jax.random.bits(key, (rooms,), jnp.uint16).astype(jnp.uint32)
        action = ((bits * env.spec.action.n) >> 16).astype(jnp.int32)
        # the room's rules are deterministic, so one key serves all
        state, out = jax.vmap(env.step, (None, 0, 0, 0))(key, state, action, tasks)
        over = out.terminated | out.truncated
        state = jax.tree.map(lambda new, old: jnp.where(over, new, old), start, state)
        return (state, reward + out.reward, cost + out.cost), None

    @jax.jit
    def run(key: jax.Array) -> tuple:
        zeros = jnp.zeros(rooms)
        carry, _ = jax.lax.scan(step, (start, zeros, zeros), jax.random.split(key, args.steps))
        return carry[1].mean(), carry[2].mean()

    jax.block_until_ready(run(key))
    return rooms * args.steps / fastest(lambda: run(key), args.repeats)


def gym_rate(args: Args) -> float:
    """Steps/s of one room through `gymnasium.make`, in a Python loop with resets."""
    env = gymnasium.make("safeicrl/SafeDarkRoom-v0", split="test")
    env.reset(seed=args.seed)
    actions = np.random.default_rng(args.seed).integers(0, 5, args.gym_steps)

    def loop() -> None:
        env.reset()
        for action in actions:
            *_, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()

    loop()
    return args.gym_steps / fastest(loop, args.repeats)


def main(args: Args) -> None:
    env = SafeDarkRoom()
    about = provenance(gymnasium=gymnasium.__version__)
    gym = gym_rate(args)
    rates = {rooms: scan_rate(env, rooms, args) for rooms in args.rooms}
    table = Table(title=f"SafeDarkRoom, random actions, {cores()} cores, {processor()}")
    for name in ("", "rooms", "env steps/s", "× Gymnasium face"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_row("Gymnasium face, Python loop", "1", f"{gym:,.0f}", "1")
    for rooms, rate in rates.items():
        table.add_row("one jitted scan", f"{rooms:,}", f"{rate:,.0f}", f"{rate / gym:,.0f}")
    Console().print(table)
    write_json(
        args.out,
        {
            **about,
            "seed": args.seed,
            "steps": args.steps,
            "repeats": args.repeats,
            "gymnasium_steps_per_s": gym,
            "scan_steps_per_s": {str(rooms): rate for rooms, rate in rates.items()},
            "best_ratio": max(rates.values()) / gym,
        },
    )


if __name__ == "__main__":
    main(tyro.cli(Args))
