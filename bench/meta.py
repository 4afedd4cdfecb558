"""How long a meta-iteration takes, with an algorithm's own settings for an environment.

python bench/meta.py                                            both methods in the room, 1 and 3 seeds
python bench/meta.py --algos safe-meta --seeds 1 --out results/bench_meta_h200.json
python bench/meta.py --algos safe-meta --seeds 1 --parts             where the time goes
"""

import argparse
import dataclasses
import os
import re
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
from safeicrl.recipes.presets import experiment


def build(algo: str, env: str, form: str | None) -> MetaLearner:
    """The learner; `form` is that of SafeMeta's adaptation, the experiment's own by default."""
    found = experiment(algo, env)
    if form is not None:
        inner = dataclasses.replace(found.algo.inner, form=form)
        found = dataclasses.replace(found, algo=dataclasses.replace(found.algo, inner=inner))
    return found.build()


# what a compiled program lists but does not execute as a kernel
FREE = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all", "opt-barrier", "async-done"}


def kernels(text: str) -> int:
    """The number of kernels in one call of a compiled program, each loop's counted as often as it runs."""
    bodies: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for line in text.splitlines():
        if begun := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line.rstrip()):
            name = "ENTRY" if begun[1] else begun[2]
            bodies[name] = []
        elif found := re.match(r"\s+(?:ROOT )?%[\w.-]+ = (?:\(.*?\)|\S+) ([\w-]+)\(", line):
            bodies[name].append((found[1], line))

    def count(name: str) -> int:
        total = 0
        for operation, line in bodies.get(name, []):
            called = [word for word in re.findall(r"%([\w.-]+)", line.partition("), ")[2]) if word in bodies]
            if operation == "while":
                trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                body = re.search(r"body=%?([\w.-]+)", line)
                total += (int(trips[1]) if trips else 1) * count(body[1] if body else "")
            elif operation in ("call", "conditional"):
                total += max(map(count, called), default=0)
            elif operation not in FREE:
                total += 1
        return total

    return count("ENTRY")


def measure(algorithm: MetaLearner, seeds: int, chunk: int, repeats: int) -> dict[str, Any]:
    """Seconds of one meta-iteration of `seeds` seeds side by side, in calls of `chunk` iterations."""
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
        "seeds": seeds,
        "chunk": chunk,
        "ms_per_iteration": 1e3 * seconds / chunk,
        "env_steps_per_iteration": float(steps) / chunk / seeds,
        "env_steps_per_s": float(steps) / seconds,
        "physics_share": (physics.seconds() - before) / repeats / seconds,
        "compile_s": compile_s,
        "kernels_per_iteration": round(kernels(compiled.as_text() or "") / chunk),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def parts(learner: MetaLearner, repeats: int) -> dict[str, float]:
    """Milliseconds of the parts of one meta-iteration of one seed, each a program of its own.

    An iteration plays and fits critics twice, and adapts and improves once.
    """
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
    parser.add_argument("--algos", nargs="+", default=["safe-meta", "maml-penalty"])
    parser.add_argument("--env", default="safe-dark-room")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--chunk", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--form", choices=["fit", "closed-form"])
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    about, found = provenance(), []
    for name in args.algos:
        for seeds in args.seeds:
            learner = build(name, args.env, args.form)
            form = {"form": learner.config.inner.form} if hasattr(learner.config, "inner") else {}
            run = {"algo": name, "env": args.env, **form, **measure(learner, seeds, args.chunk, args.repeats)}
            found.append(run)
            Console().print(
                f"{name}, {seeds} seed(s): {run['ms_per_iteration']:.1f} ms per meta-iteration, "
                f"{run['kernels_per_iteration']:,} kernels, "
                f"{run['env_steps_per_s']:,.0f} env steps/s, compiled in {run['compile_s']:.0f} s"
            )
            if args.parts and seeds == 1:
                run["parts_ms"] = parts(learner, args.repeats)
                Console().print("  ".join(f"{part} {ms:.2f} ms" for part, ms in run["parts_ms"].items()))
            if args.out is not None:  # after each: an interrupt costs one only
                write_json(args.out, {**about, "runs": found})


if __name__ == "__main__":
    main()
