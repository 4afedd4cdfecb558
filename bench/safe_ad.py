"""Safe AD's gradient steps and its acting, at the paper's size by default; random data.

python bench/safe_ad.py --out results/bench_safe_ad_h200.json
python bench/safe_ad.py --width 64 --layers 3 --heads 2 --batch 32 --updates 2 --rows 32       a CPU's size
"""

import argparse
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import numpy as np
from common import fastest, provenance
from rich.console import Console

from safeicrl.algos.safe_ad import SafeAD, SafeADConfig
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.files import write_json
from safeicrl.nets.decision_transformer import DecisionConfig
from safeicrl.trial import episode_sums, run_trials, sample_queue

ENV = SafeDarkRoom()


def histories(steps: int = 50_000) -> SimpleNamespace:
    """A learner that never learns: what is timed does not depend on it."""
    rng = np.random.default_rng(0)
    done = np.zeros((4, steps), np.uint8)
    done[:, ENV.max_steps - 1 :: ENV.max_steps] = 2
    return SimpleNamespace(
        observation=rng.integers(0, ENV.size, (4, steps, 2)).astype(np.uint8),
        action=rng.integers(0, 5, (4, steps)).astype(np.uint8),
        reward=rng.integers(0, 2, (4, steps)).astype(np.uint8),
        cost=rng.integers(0, 2, (4, steps)).astype(np.uint8),
        done=done,
    )


def learn(net: DecisionConfig, args: argparse.Namespace) -> tuple[dict[str, Any], SafeAD, Any]:
    """Gradient steps per second, many in one call."""
    config = SafeADConfig(updates=args.updates, batch=args.batch, net=net)
    algo = SafeAD(ENV, config, histories())
    state = eqx.filter_jit(algo.init)(jax.random.key(0))
    update = eqx.filter_jit(lambda algo, state: algo.update(state))
    begin = time.perf_counter()
    jax.block_until_ready(update(algo, state))
    first = time.perf_counter() - begin
    seconds = fastest(lambda: update(algo, state), args.repeats)
    steps = args.updates * args.batch * net.context
    parameters = sum(x.size for x in jax.tree.leaves(eqx.filter(state.net, eqx.is_array)))
    tokens = steps * algo.tokens / seconds
    return {
        "tokens_a_step": algo.tokens,
        "parameters": parameters,
        "batch": args.batch,
        "context": net.context,
        "compile_s": first - seconds,
        "milliseconds_an_update": 1e3 * seconds / args.updates,
        "updates_per_s": args.updates / seconds,
        "steps_per_s": steps / seconds,
        "tokens_per_s": tokens,
        "teraflops": 6 * parameters * tokens / 1e12,  # attention's own not counted
        "peak_gib": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30,
    }, algo, state  # fmt: skip


def act(algo: SafeAD, state: Any, args: argparse.Namespace) -> dict[str, float]:
    """Steps of a trial, the window read anew at each."""
    tasks, budgets = sample_queue(ENV, "test", ENV.spec.test_budget, (args.rows, 1), jax.random.key(0))

    @eqx.filter_jit
    def run(agent: Any, key: jax.Array) -> Any:
        trials = run_trials(ENV, agent, tasks, budgets, key, episodes=ENV.episodes, steps=args.steps)
        return episode_sums(trials, ENV.episodes)

    begin = time.perf_counter()
    jax.block_until_ready(run(algo.agent(state), jax.random.key(1)))
    first = time.perf_counter() - begin
    seconds = fastest(lambda: run(algo.agent(state), jax.random.key(2)), args.repeats)
    return {
        "rows": args.rows,
        "compile_s": first - seconds,
        "milliseconds_a_step": 1e3 * seconds / args.steps,
        "env_steps_per_s": args.rows * args.steps / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    paper = DecisionConfig()
    for name in ("width", "layers", "heads", "context"):
        parser.add_argument(f"--{name}", type=int, default=getattr(paper, name))
    parser.add_argument("--tokens", nargs="+", default=["one", "four"], choices=["one", "four"], help="per step")
    parser.add_argument("--batch", type=int, default=512, help="windows in a gradient step")
    parser.add_argument("--updates", type=int, default=10, help="gradient steps in one call")
    parser.add_argument("--rows", type=int, default=256, help="trials side by side")
    parser.add_argument("--steps", type=int, default=100, help="of a trial")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results/bench_safe_ad.json"))
    args = parser.parse_args()
    about, console, found = provenance(), Console(), []
    for tokens in args.tokens:
        net = DecisionConfig(
            width=args.width, layers=args.layers, heads=args.heads, context=args.context, tokens=tokens
        )
        learned, algo, state = learn(net, args)
        acted = act(algo, state, args)
        found.append({"learn": learned, "act": acted})
        console.print(
            f"{tokens} token(s) per step, {learned['parameters'] / 1e6:.1f}M parameters: "
            f"{learned['milliseconds_an_update']:.1f} ms an update, {learned['tokens_per_s']:,.0f} tokens/s, "
            f"{learned['steps_per_s']:,.0f} steps/s, {learned['teraflops']:.2f} TFLOP/s "
            f"(compiled in {learned['compile_s']:.0f} s); "
            f"acting {acted['env_steps_per_s']:,.0f} env steps/s with {args.rows} rows "
            f"(compiled in {acted['compile_s']:.0f} s)"
        )
    write_json(args.out, {**about, "dtype": str(paper.compute_dtype), "found": found})


if __name__ == "__main__":
    main()
