"""What does a chunk of iterations: one jitted program, or several that overlap; a bad iteration is undone."""

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from safeicrl.algos.api import METRICS, Algorithm
from safeicrl.algos.scared import Scared
from safeicrl.envs.api import PyTree
from safeicrl.envs.faults import NO_FAULT, NONE
from safeicrl.errors import UserError
from safeicrl.log import Terminal
from safeicrl.machine import devices as placing
from safeicrl.machine import hosts
from safeicrl.overlap.lanes import check_env
from safeicrl.overlap.overlapped import Overlapped
from safeicrl.policies import checkpoint
from safeicrl.training.settings import TrainConfig

Step = Callable[[PyTree], tuple[PyTree, dict[str, np.ndarray]]]  # state → state, metrics [chunk, seed, ...]


def program(
    algorithm: Algorithm, config: TrainConfig, template: PyTree, terminal: Terminal, mesh: Mesh | None
) -> Step:
    """What does a chunk: one jitted program, or several that overlap."""
    terminal.say(f"compiling for {_described(mesh)} ...")
    begin = time.perf_counter()
    if overlaps(algorithm):
        step = _compile_overlapped(algorithm, template)
    else:
        step = _compile(algorithm, config, template, mesh)
    terminal.say(f"compiled in {time.perf_counter() - begin:.1f} s")
    return step


def overlaps(algorithm: Algorithm) -> bool:
    """Whether playing and learning run side by side."""
    return getattr(algorithm.config, "overlap", 0) > 0


def check_overlap(algorithm: Algorithm, config: TrainConfig, devices: int) -> None:
    """Refuse what cannot overlap: worlds on the accelerator, several seeds, iterations at a time, or devices."""
    check_env(algorithm.env)
    for name, count in (("seeds", config.seeds), ("chunk", config.chunk), ("devices", devices)):
        if count > 1:
            raise UserError(f"with overlap, {name} must be 1, got {count}")


def _compile_overlapped(algorithm: Algorithm, template: PyTree) -> Step:
    """Playing and learning side by side."""
    assert isinstance(algorithm, Scared)
    return Overlapped(algorithm, template, partial(judge, algorithm))


def _compile(algorithm: Algorithm, config: TrainConfig, template: PyTree, mesh: Mesh | None) -> Step:
    """The jitted program; it reuses the memory of the state it is given."""
    is_shape = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)  # noqa: E731
    shapes, static = eqx.partition(template, is_shape)
    data, rest = eqx.partition(algorithm, eqx.is_array)  # a data set is an argument, not a constant of the program

    def chunk(arrays: PyTree, data: PyTree) -> tuple[PyTree, dict[str, jax.Array]]:
        update = lambda state: _guarded(eqx.combine(data, rest), state)  # noqa: E731
        if config.seeds > 1:
            over: dict[str, Any] = {} if mesh is None else {"spmd_axis_name": placing.SEEDS}
            update = eqx.filter_vmap(update, **over)

        def body(arrays: PyTree, _: None) -> tuple[PyTree, dict[str, jax.Array]]:
            state, metrics = update(eqx.combine(arrays, static))
            return eqx.filter(state, eqx.is_array), metrics

        return jax.lax.scan(body, arrays, length=config.chunk)

    options: dict[str, Any] = {"donate_argnums": 0}
    if mesh is not None:
        data, (held, whole) = placing.spread(data, mesh), (placing.sharding(mesh, n) for n in (config.seeds, 1))
        options |= {"in_shardings": (held, whole), "out_shardings": (held, whole)}
    with placing.using(mesh):
        compiled = jax.jit(chunk, **options).lower(shapes, data).compile()

    def step(state: PyTree) -> tuple[PyTree, dict[str, np.ndarray]]:
        arrays, metrics = compiled(eqx.filter(state, eqx.is_array), data)
        host = {name: np.asarray(value) for name, value in jax.device_get(metrics).items()}
        if config.seeds == 1:
            host = {name: value[:, None] for name, value in host.items()}
        return eqx.combine(arrays, static), host

    return step


def close(step: Step | None) -> None:
    """Stop what a step still does in the background."""
    if isinstance(step, Overlapped):
        step.close()


def _described(mesh: Mesh | None) -> str:
    """The devices in words."""
    kind, there = jax.devices()[0].device_kind, len(jax.devices())
    if mesh is None:
        return kind if there == 1 else f"one of {there} devices ({kind})"
    of = "" if mesh.size == there else f" of {there}"
    hosted = f" in {hosts.count()} processes" if hosts.count() > 1 else ""
    return f"{mesh.size}{of} devices ({kind}){hosted}"


def _guarded(algorithm: Algorithm, state: PyTree) -> tuple[PyTree, dict[str, jax.Array]]:
    """One update, undone if it must not count."""
    who, made = f"{type(algorithm).__name__}.update", algorithm.update(state)
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], dict):
        raise UserError(f"{who} must return the new state and a dictionary of metrics, got a {type(made).__name__}")
    before, after = (
        {name: f"{x.dtype}{list(x.shape)}" for name, x in checkpoint.named_arrays(each).items()}
        for each in (state, made[0])
    )
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            changed = f"{name!r} was {before.get(name)}, is {after.get(name)}"
            raise UserError(f"{who} must keep the form of the state: {changed}")
    return judge(algorithm, state, *made)


def judge(
    algorithm: Algorithm, state: PyTree, new: PyTree, metrics: dict[str, jax.Array]
) -> tuple[PyTree, dict[str, jax.Array]]:
    """The new state; the old one if a number is not finite or the environment broke its contract (envs/faults.py).

    Only the random key moves on, and the fields that the algorithm names in `moves_on`.

    This is inside the jitted program, so the old state needs no copy on the host and each seed is judged by itself.
    """
    required = getattr(algorithm, "metrics", METRICS)
    needed = (*required, "fault") if required is METRICS else required
    missing = [name for name in needed if name not in metrics]
    if missing:
        raise UserError(f"{type(algorithm).__name__}.update must report the metric {missing[0]!r}")
    checked = [x for name, x in metrics.items() if name in required or "loss" in name or "grad" in name]
    floats = [x for x in jax.tree.leaves((new, checked)) if eqx.is_inexact_array(x)]
    finite = jnp.stack([jnp.isfinite(x).all() for x in floats]).all()
    fault = jnp.asarray(metrics.get("fault", NO_FAULT))
    finite &= fault[0] == NONE  # nothing is learned from a negative cost either
    # A branch is a copy; a select would be one more kernel to compile for every array of the state.
    arrays, static = eqx.partition(new, eqx.is_array)
    kept = jax.lax.cond(finite, lambda: arrays, lambda: eqx.filter(state, eqx.is_array))
    kept = eqx.tree_at(lambda s: s.key, eqx.combine(kept, static), new.key)
    for name in getattr(algorithm, "moves_on", ()):
        kept = dataclasses.replace(kept, **{name: getattr(new, name)})
    return kept, {**metrics, "rolled_back": ~finite, "fault": fault}
