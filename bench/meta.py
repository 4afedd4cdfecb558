"""How long a meta-iteration takes: the paper's settings, or any preset of a meta-learner.

python bench/meta.py                                            both methods in the room, 1 and 3 seeds
python bench/meta.py --presets darkroom-safe-meta --seeds 1 --out results/bench_meta_h200.json
python bench/meta.py --presets darkroom-safe-meta --seeds 1 --parts             where the time goes
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from common import fastest, provenance
from rich.console import Console

from safeicrl.envs.mujoco import physics
from safeicrl.files import write_json
from safeicrl.optimisers.episodes import play
from safeicrl.optimisers.meta import Iteration, MetaLearner
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
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def parts(name: str, repeats: int) -> dict[str, float]:
    """Milliseconds of the parts of one meta-iteration of one seed, each a program of its own.

    An iteration plays and fits critics twice, and adapts and improves once.
    """
    learner = preset(name).stages[0].experiment.build()
    assert isinstance(learner, MetaLearner)
    adapter, number = learner.adapter, learner.config.batch_episodes
    state = learner.init(jax.random.key(0))
    tasks, budgets = jax.jit(learner.draw)(jax.random.key(1))
    spread = lambda x: jnp.broadcast_to(x, (len(budgets), *x.shape))  # noqa: E731
    actors, critics = jax.tree.map(spread, (adapter.begin(state.actor), state.critics))
    found: dict[str, float] = {}

    def timed(part: str, function: Callable, *args: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            compiled = jax.jit(function).lower(*args).compile()
        result = jax.block_until_ready(compiled(*args))
        found[part] = 1e3 * fastest(lambda: compiled(*args), repeats)
        return result

    act = lambda actors: adapter.view.actor(actors, state.normaliser)  # noqa: E731
    played = timed("play", lambda a, k: play(learner.env, act(a), tasks, k, 2 * number), actors, jax.random.key(2))
    first, second = (jax.tree.map(lambda x, i=i: x[:, i : i + number], played) for i in (0, number))
    estimate = jax.vmap(adapter.estimate, (0, 0, 0, 0, 0, None, None))
    rate = learner.config.critic.rates[0]
    judge = lambda *args: estimate(*args, budgets, state.normaliser, rate)  # noqa: E731
    _, batch = timed("critics", judge, actors, critics, first, second)
    adapted, _ = timed("adapt", jax.vmap(adapter.adapt), actors, batch, budgets)
    iteration = Iteration(actors=adapted, before=batch, after=batch, budgets=budgets)
    timed("improve", learner.improve, state.actor, iteration)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["darkroom-safe-meta", "darkroom-maml"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--chunk", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", action="store_true")
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
            if args.parts and seeds == 1:
                run["parts_ms"] = parts(name, args.repeats)
                Console().print("  ".join(f"{part} {ms:.2f} ms" for part, ms in run["parts_ms"].items()))
            if args.out is not None:  # after each: an interrupt costs one only
                write_json(args.out, {**about, "runs": found})


if __name__ == "__main__":
    main()
