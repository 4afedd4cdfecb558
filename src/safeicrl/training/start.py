"""How a run begins: anew, with the networks of another run or of a policy, or at its own checkpoint."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from safeicrl.algos.api import Algorithm
from safeicrl.config import from_plain
from safeicrl.envs.api import PyTree
from safeicrl.errors import UserError
from safeicrl.files import CHECKPOINT, read_json, write_json
from safeicrl.machine import hosts
from safeicrl.policies import checkpoint
from safeicrl.policies.cards import read_card
from safeicrl.policies.catalogue import SEED, find_policy, load_agent, run_policies
from safeicrl.provenance import surroundings
from safeicrl.training.settings import TrainConfig, describe, seeds_of
from safeicrl.training.state import first_state
from safeicrl.training.status import Status

# what runs of versions without levels or ledgers say nothing about
UNSAID = {"levels": 0, "guard_ledger": 0, "shared_ledger": False}


def _begin(
    algorithm: Algorithm, config: TrainConfig, folder: Path, template: PyTree, resume: bool
) -> tuple[PyTree, Status]:
    path = folder / CHECKPOINT
    if resume:
        state, meta = checkpoint.load(path, template, kind="checkpoint")
        return state, from_plain(Status, meta.get("status"), f"the status in {path}")
    if path.exists():
        raise UserError(f"{folder} holds a run already: resume it or choose another folder")
    begin = None if config.start is None else _beginning(algorithm, config.start)
    state = eqx.filter_jit(first_state)(algorithm, config.seed, config.seeds)
    if begin is not None:
        state = begin(state, seeds_of(config))
    described = describe(algorithm.env, algorithm.config, config)
    write_json(folder / "config.json", {**described, **surroundings()})
    return state, Status(failures=[0] * config.seeds, best=[None] * config.seeds)


def begin_together(
    algorithm: Algorithm, config: TrainConfig, folder: Path, template: PyTree, resume: bool
) -> tuple[PyTree, Status]:
    """The state and status of a new or resumed run; of several processes, the first one tells the others."""
    if hosts.count() == 1:
        return _begin(algorithm, config, folder, template, resume)
    state = template

    def begin() -> dict[str, Any]:
        nonlocal state
        state, status = _begin(algorithm, config, folder, template, resume)
        return dataclasses.asdict(status)

    status = from_plain(Status, hosts.by_first(begin), "the status of the first process")
    arrays, static = eqx.partition(state, lambda leaf: hasattr(leaf, "shape"))
    return eqx.combine(hosts.arrays_of_first(arrays), static), status


def check_start(algorithm: Algorithm, start: str) -> None:
    """Refuse a run or a policy that `algorithm` cannot begin with."""
    _beginning(algorithm, start)


def _beginning(algorithm: Algorithm, start: str) -> Callable[[PyTree, range], PyTree]:
    """What puts the networks of `start`, a run or a policy, into a first state; refused here if they do not fit."""
    checkpointed = Path(start) / CHECKPOINT
    if checkpointed.exists():
        if not hasattr(algorithm, "start_from"):
            raise UserError(f"{type(algorithm).__name__} has no 'start_from': it cannot start with a run")
        _check_start(algorithm, Path(start))
        return lambda state, _: _start(algorithm, state, checkpointed)
    paths = _policies(start)
    start_with = getattr(algorithm, "start_with", None)
    if start_with is None:
        raise UserError(f"{type(algorithm).__name__} cannot start with a policy; --start takes a run's folder")
    agents = {}
    for seed, path in paths.items():
        card = read_card(path)
        _check_sizes(algorithm, card.get("net", {}), start)
        agents[seed] = load_agent(path, card)[1]

    def begin(state: PyTree, seeds: range) -> PyTree:
        own = all(seed in agents for seed in seeds)
        each = [agents[seed] if own else next(iter(agents.values())) for seed in seeds]
        if len(seeds) == 1:
            return _apart(start_with(state, each[0]))
        arrays = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(eqx.filter(x, eqx.is_array) for x in each))
        static = eqx.filter(each[0], eqx.is_array, inverse=True)
        return _apart(eqx.filter_vmap(lambda own, x: start_with(own, eqx.combine(x, static)))(state, arrays))

    return begin


def _policies(start: str) -> dict[int, Path]:
    """The policies that a run may begin with, by seed: all those in the folder of a run, else one.

    If it has one for each seed of the new run, each seed begins with its own; else all begin with the first one.
    """
    policy = find_policy(start)
    of_seeds = SEED.fullmatch(policy.stem) and Path(start).is_dir()
    return run_policies(Path(start)) if of_seeds else {-1: policy}  # of no seed of this run


def _apart(state: PyTree) -> PyTree:
    """The same state with no array twice, as a policy and its average would be: an iteration donates them all."""
    return jax.tree.map(lambda leaf: leaf.copy() if eqx.is_array(leaf) else leaf, state)


def _start(algorithm: Algorithm, state: PyTree, path: Path) -> PyTree:
    """The first state of a run that begins with the networks of another run's checkpoint.

    Only the networks must fit. What else the checkpoint holds (a replay, a multiplier per episode) may have other
    shapes, since the other run may have played shorter trials.
    """
    other, _ = checkpoint.load(path, state, kind="checkpoint", any_shape=True)
    started = algorithm.start_from(state, other)
    ours, theirs = checkpoint.named_arrays(state), checkpoint.named_arrays(started)
    for name, array in theirs.items():
        if array.shape != ours[name].shape:
            raise UserError(f"{path}: array {name!r} has shape {array.shape}, expected {ours[name].shape}")
    return _apart(started)


def _check_start(algorithm: Algorithm, folder: Path) -> None:
    """Refuse a run whose networks have another size."""
    try:
        theirs = read_json(folder / "config.json", "training run")["algo"]["config"].get("net", {})
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / 'config.json'} is not a training run: {error!r}") from None
    _check_sizes(algorithm, theirs, folder)


def _check_sizes(algorithm: Algorithm, theirs: dict[str, Any], start: str | Path) -> None:
    """Refuse networks of another size. Those with other heads or levels may fit, but compute something else."""
    ours = dataclasses.asdict(algorithm.config).get("net", {})
    if ours and not theirs:
        raise UserError(f"{start} has no network with width, layers and heads, as this run has")
    differ = {}  # size: theirs, ours
    sizes = ["width", "layers", "heads", "levels"]
    if ours.get("guard") and theirs.get("guard"):  # else the guard is not taken over ...
        sizes += ["guard", "guard_ledger", "shared_ledger"]
    elif ours.get("shared_ledger") or theirs.get("shared_ledger"):  # ... but the policy's head is
        sizes += ["guard", "guard_ledger", "shared_ledger"] if theirs.get("shared_ledger") else ["shared_ledger"]
    for size in sizes:
        here, there = (net.get(size, UNSAID.get(size)) for net in (ours, theirs))
        if there != here:
            differ[size] = (there, here)
    if differ:
        found = "; ".join(f"has {size} {there}, this run has {here}" for size, (there, here) in differ.items())
        options = " ".join(_option(size, there) for size, (there, _) in differ.items())
        raise UserError(f"{start} {found}: use {options} to start from it")


def _option(size: str, value: Any) -> str:
    """The option that sets a size of the network."""
    flag = size.replace("_", "-")
    if isinstance(value, bool):
        return f"--algo.net.{'' if value else 'no-'}{flag}"
    return f"--algo.net.{flag} {value}"
