"""Trials with the transformer in the loop, and the learner's update.

python bench/trials.py                       trials on this machine's CPU → results/bench_trials.json
python bench/trials.py --rows 128 256 512 1024 2048 4096 8192 --out results/bench_trials_h200.json
python bench/trials.py --rows --update --repeats 5 --out results/bench_update_h200.json    only the update
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from common import fastest, provenance
from rich.console import Console
from rich.table import Table

from safeicrl.agents.in_context import InContextAgent
from safeicrl.agents.reference import RandomAgent
from safeicrl.algos.scared import Scared, ScaredConfig
from safeicrl.envs.api import replace
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.files import write_json
from safeicrl.nets.heads import PolicyNet
from safeicrl.nets.transformer import NetConfig
from safeicrl.optimisers.ppo import PPOConfig
from safeicrl.trial import episode_sums, run_trials, sample_queue

ENV = SafeDarkRoom()
EPOCHS = 8  # gradient steps in one timed update
UPDATES = ((8, 32), (4, 32), (2, 32), (2, 64))  # heads and rows


def play(rows: int, args: argparse.Namespace) -> dict[str, float]:
    """Whole trials of the paper's network on `rows` unseen rooms."""
    tasks, budgets = sample_queue(ENV, "test", ENV.spec.test_budget, (rows, 1), jax.random.key(args.seed))
    agent = InContextAgent(PolicyNet(NetConfig(), ENV.spec, jax.random.key(args.seed)))

    @eqx.filter_jit
    def run(agent: InContextAgent, key: jax.Array) -> Any:
        trials = run_trials(
            ENV, agent, tasks, budgets, key, episodes=ENV.episodes, steps=args.steps, segments=args.segments
        )
        return episode_sums(trials, ENV.episodes)

    begin = time.perf_counter()
    jax.block_until_ready(run(agent, jax.random.key(1)))
    first = time.perf_counter() - begin
    seconds = fastest(lambda: run(agent, jax.random.key(2)), args.repeats)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    return {
        "rows": rows,
        "compile_s": first - seconds,
        "seconds": seconds,
        "steps_per_s": rows * args.steps / seconds,
        "peak_gib": peak / 2**30,
    }


def prepare(heads: int, rows: int, args: argparse.Namespace) -> tuple[Callable[[Any], Any], Any]:
    """EPOCHS gradient steps of PPO on `rows` whole rows of trials, as a function of the state, and a state."""
    ppo = PPOConfig(epochs=EPOCHS, minibatch=rows)
    algo = Scared(ENV, ScaredConfig(rows=rows, steps=args.steps, net=NetConfig(heads=heads), ppo=ppo))
    state = algo.init(jax.random.key(args.seed))
    tasks, budgets = jax.jit(algo.draw)(jax.random.key(1))
    trials = algo.play(RandomAgent(action=ENV.spec.action), tasks, budgets, jax.random.key(2))
    uniform = jnp.full(trials.reward.shape, -jnp.log(ENV.spec.action.n))
    trials = replace(trials, extras={"log_prob": uniform})

    def run(state: Any) -> Any:
        return algo.optimiser.update(state, trials, tasks, jnp.zeros(ENV.episodes), jnp.int32(0), jax.random.key(3))

    return run, state.optimiser


def update(heads: int, rows: int, args: argparse.Namespace) -> dict[str, float]:
    """One PPO gradient step on `rows` whole rows of trials."""
    function, state = prepare(heads, rows, args)
    run = eqx.filter_jit(function)
    jax.block_until_ready(run(state))
    seconds = fastest(lambda: run(state), args.repeats) / EPOCHS
    return {
        "heads": heads,
        "rows": rows,
        "milliseconds": 1e3 * seconds,
        "milliseconds_per_32_rows": 1e3 * seconds * 32 / rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[16, 64, 256], help="trials side by side, if any")
    parser.add_argument("--steps", type=int, default=ENV.spec.trial_steps)
    parser.add_argument("--segments", type=int, default=6, help="stages in which the KV cache grows")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--update", action="store_true", help="time the learner's update too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    about, console = provenance(), Console()
    dtype = str(NetConfig().compute_dtype)

    played = []
    for rows in sorted(args.rows):  # rising, so that the peak memory is the newest size's
        played.append(play(rows, args))
        console.print(f"{rows} rows: {played[-1]['steps_per_s']:,.0f} env steps/s")
    table = Table(title=f"Trials of {args.steps} steps, paper's network in {dtype}, {about['machine']['device']}")
    for name in ("trials", "env steps/s", "seconds", "compile s", "peak GiB"):
        table.add_column(name, justify="right")
    for p in played:
        cells = (f"{p['steps_per_s']:,.0f}", f"{p['seconds']:.2f}", f"{p['compile_s']:.1f}", f"{p['peak_gib']:.2f}")
        table.add_row(f"{p['rows']:,}", *cells)
    if played:
        console.print(table)

    updates = [update(heads, rows, args) for heads, rows in UPDATES] if args.update else []
    for u in updates:
        console.print(
            f"update, {u['heads']} heads, {u['rows']} rows: {u['milliseconds']:.2f} ms "
            f"({u['milliseconds_per_32_rows']:.2f} ms per 32 rows)"
        )
    settings = {"steps": args.steps, "segments": args.segments, "dtype": dtype, "seed": args.seed}
    default = Path("results/bench_trials.json" if played else "results/bench_update.json")
    write_json(args.out or default, {**about, **settings, "trials": played, "updates": updates})


if __name__ == "__main__":
    main()
