"""How long a meta-iteration takes: the paper's settings, or any preset of a meta-learner.

python bench/meta.py                                            both methods in the room, 1 and 3 seeds
python bench/meta.py --presets darkroom-safe-meta --seeds 1 --out results/bench_meta_h200.json
"""

import argparse
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from common import fastest, provenance
from rich.console import Console

from safeicrl.envs.mujoco import physics
from safeicrl.files import write_json
from safeicrl.recipes.presets import preset


def measure(name: str, seeds: int, chunk: int, repeats: int) -> dict[str, Any]:
    """Seconds of one meta-iteration of `seeds` seeds side by side, in calls of `chunk` iterations."""
    algorithm = preset(name).stages[0].experiment.build()
    init, update = algorithm.init, algorithm.update
    key: Any = jax.random.key(0)
    if seeds > 1:
        init, update, key = eqx.filter_vmap(init), eqx.filter_vmap(update), jax.random.split(key, seeds)
    state = eqx.filter_jit(init)(key)

    @jax.jit
    def go(state: Any) -> tuple[Any, jax.Array]:
        state, metrics = jax.lax.scan(lambda s, _: update(s), state, length=chunk)
        return state, jnp.sum(metrics["env_steps"])

    begin = time.perf_counter()
    compiled = go.lower(state).compile()
    compile_s = time.perf_counter() - begin
    _, steps = jax.block_until_ready(compiled(state))
    before = physics.seconds()
    seconds = fastest(lambda: compiled(state), repeats)
    return {
        "preset": name,
        "seeds": seeds,
        "chunk": chunk,
        "ms_per_iteration": 1e3 * seconds / chunk,
        "env_steps_per_iteration": float(steps) / chunk / seeds,
        "env_steps_per_s": float(steps) / seconds,
        "physics_share": (physics.seconds() - before) / repeats / seconds,
        "compile_s": compile_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["darkroom-safe-meta", "darkroom-maml"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--chunk", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    about, found = provenance(), []
    for name in args.presets:
        for seeds in args.seeds:
            run = measure(name, seeds, args.chunk, args.repeats)
            found.append(run)
            Console().print(
                f"{name}, {seeds} seed(s): {run['ms_per_iteration']:.1f} ms per meta-iteration, "
                f"{run['env_steps_per_s']:,.0f} env steps/s, compiled in {run['compile_s']:.0f} s"
            )
            if args.out is not None:  # after each: an interrupt costs one only
                write_json(args.out, {**about, "runs": found})


if __name__ == "__main__":
    main()
