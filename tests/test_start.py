"""Runs that begin with a released policy, and runs that have reached their limit before they begin."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import random_weights
from rich.console import Console
from standin import ROOM, TableAlgorithm, TableConfig

from safeicrl.agents.in_context import InContextAgent
from safeicrl.agents.mlp import MlpAgent
from safeicrl.algos.scared import Scared, ScaredConfig
from safeicrl.envs.registry import env_to_plain
from safeicrl.errors import UserError
from safeicrl.nets.heads import PolicyNet
from safeicrl.nets.transformer import NetConfig
from safeicrl.optimisers.ddpg import DDPGConfig
from safeicrl.optimisers.ppo import PPOConfig
from safeicrl.policies.cards import save_policy
from safeicrl.train import EvalConfig, TrainConfig, train
from safeicrl.training import state as states
from safeicrl.training.start import _beginning
from safeicrl.training.status import Status, limit_reached

NET = NetConfig(width=8, layers=1, heads=2, context=20)
VARIANT = dataclasses.replace(ROOM, max_steps=7, train_budget=(0.0, 5.0))  # a variant of the policy's own room


def learner(optimiser: str = "ppo", average: float = 0.0, **net) -> Scared:
    config = ScaredConfig(
        rows=4, segments=1, net=dataclasses.replace(NET, **net), optimiser=optimiser,
        ppo=PPOConfig(minibatch=4, average=average), ddpg=DDPGConfig(capacity=8, batch=4),
    )  # fmt: skip
    return Scared(VARIANT, config)


def released(path, **net) -> PolicyNet:
    config = dataclasses.replace(NET, **net)
    weights = random_weights(PolicyNet, config, ROOM.spec)
    card = {"kind": "net", "net": dataclasses.asdict(config), "env": env_to_plain(ROOM)}
    save_policy(path, InContextAgent(net=weights), {**card, **({"risk": 0.1} if config.guard else {})})
    return weights


def zeros(algorithm, seeds=1):
    """A first state with nothing in it, without a program to compile."""
    shapes = eqx.filter_eval_shape(states.first_state, algorithm, 0, seeds)
    is_shape = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)  # noqa: E731

    def fill(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), seeds) if x.shape else jax.random.key(0)
        return jnp.zeros(x.shape, x.dtype)

    return jax.tree.map(lambda x: fill(x) if is_shape(x) else x, shapes)


def first_state(algorithm, start, seeds=1, seed=0):
    return _beginning(algorithm, str(start))(zeros(algorithm, seeds), range(seed, seed + seeds)).optimiser


def same(one, other) -> bool:
    pairs = zip(*(jax.tree.leaves(eqx.filter(x, eqx.is_array)) for x in (one, other)), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def test_a_run_begins_with_a_released_policy_and_new_critics(tmp_path):
    weights = released(tmp_path / "policy.safetensors")
    state = first_state(learner(), tmp_path / "policy")
    assert same(state.net.policy, weights)
    assert state.net.policy.trunk.spec == VARIANT.spec
    blank = zeros(learner()).optimiser
    assert same((state.net.reward_critic, state.net.cost_critic), (blank.net.reward_critic, blank.net.cost_critic))


def test_its_average_begins_with_it_in_memory_of_its_own(tmp_path):
    weights = released(tmp_path / "policy.safetensors")
    state = first_state(learner(average=0.9), tmp_path / "policy")
    assert same(state.average, weights)
    arrays = jax.tree.leaves(eqx.filter(state, eqx.is_array))
    places = [array.unsafe_buffer_pointer() for array in arrays if array.size > 1]
    assert len(set(places)) == len(places) > 10  # an iteration donates them all, which works once for each


def test_all_seeds_begin_with_it(tmp_path):
    weights = released(tmp_path / "policy.safetensors")
    policy = eqx.filter(first_state(learner(), tmp_path / "policy", seeds=2).net.policy, eqx.is_array)
    for each in (jax.tree.map(lambda x: x[0], policy), jax.tree.map(lambda x: x[1], policy)):
        assert same(each, weights)


def test_each_seed_begins_with_its_own_policy_if_all_have_one_else_with_the_first(tmp_path):
    own = {seed: released(tmp_path / f"best-seed{seed}.safetensors") for seed in (1, 2)}
    own[2] = jax.tree.map(lambda x: x + 1 if eqx.is_inexact_array(x) else x, own[2])
    card = {"kind": "net", "net": dataclasses.asdict(NET), "env": env_to_plain(ROOM)}
    save_policy(tmp_path / "best-seed2.safetensors", InContextAgent(net=own[2]), card)
    for seed, expected in ((1, [own[1], own[2]]), (2, [own[2]]), (0, [own[1], own[1]]), (2, [own[1], own[1]])):
        seeds = len(expected)
        policy = eqx.filter(first_state(learner(), tmp_path, seeds, seed).net.policy, eqx.is_array)
        for index, weights in enumerate(expected):
            assert same(policy if seeds == 1 else jax.tree.map(lambda x, i=index: x[i], policy), weights)


def test_off_policy_too(tmp_path):
    weights = released(tmp_path / "policy.safetensors")
    state = first_state(learner("ddpg"), tmp_path / "policy")
    assert same(state.net.policy, weights)
    assert same(state.slow.actor, weights.actor)


def test_a_guard_is_taken_over_only_if_both_have_one(tmp_path):
    bare, own = released(tmp_path / "bare.safetensors"), released(tmp_path / "own.safetensors", guard=1)
    assert same(first_state(learner(guard=1), tmp_path / "own").net.policy.guard, own.guard)
    started = first_state(learner(guard=1), tmp_path / "bare").net.policy
    assert same(started.actor, bare.actor)
    assert same(started.guard, zeros(learner(guard=1)).optimiser.net.policy.guard)
    assert first_state(learner(), tmp_path / "own").net.policy.guard is None


def test_what_does_not_fit_is_refused(tmp_path):
    released(tmp_path / "wide.safetensors", width=16, layers=2)
    words = (
        r"wide has width 16, this run has 8; has layers 2, this run has 1: "
        r"use --algo\.net\.width 16 --algo\.net\.layers 2 to start from it"
    )
    with pytest.raises(UserError, match=words):
        first_state(learner(), tmp_path / "wide")
    released(tmp_path / "deep.safetensors", guard=2, guard_ledger=3)
    words = (
        r"has guard 2, this run has 1; has guard_ledger 3, .*: use --algo\.net\.guard 2 --algo\.net\.guard-ledger"
    )
    with pytest.raises(UserError, match=words):
        first_state(learner(guard=1), tmp_path / "deep")
    released(tmp_path / "shares.safetensors", guard=2, guard_ledger=3, shared_ledger=True)
    with pytest.raises(UserError, match=r"has shared_ledger True, .*: use --algo\.net\.shared-ledger to start"):
        first_state(learner(guard=2, guard_ledger=3), tmp_path / "shares")
    words = r"use --algo\.net\.guard 2 --algo\.net\.guard-ledger 3 --algo\.net\.shared-ledger to start"
    with pytest.raises(UserError, match=words):
        first_state(learner(), tmp_path / "shares")
    released(tmp_path / "bare.safetensors")
    with pytest.raises(UserError, match=r"has shared_ledger False, .*: use --algo\.net\.no-shared-ledger to start"):
        first_state(learner(guard=2, guard_ledger=3, shared_ledger=True), tmp_path / "bare")
    card = {"kind": "mlp", "hidden": [4], "env": env_to_plain(ROOM)}
    save_policy(tmp_path / "mlp.safetensors", MlpAgent.build(ROOM.spec, (4,)), card)
    with pytest.raises(UserError, match="mlp has no network with width, layers and heads, as this run has"):
        first_state(learner(), tmp_path / "mlp")
    released(tmp_path / "policy.safetensors")
    smaller = Scared(dataclasses.replace(VARIANT, size=4), learner().config)
    with pytest.raises(UserError, match=r"does not fit: an array of its network is \(34, 16\), here \(38, 16\)"):
        first_state(smaller, tmp_path / "policy")
    with pytest.raises(UserError, match="no policy and no run folder at"):
        first_state(learner(), tmp_path / "none")
    table = TableAlgorithm(ROOM, TableConfig())
    with pytest.raises(UserError, match="TableAlgorithm cannot start with a policy"):
        train(table, TrainConfig(iterations=1, start=str(tmp_path / "policy")), out=tmp_path / "run")
    (tmp_path / "checkpoint.safetensors").touch()
    bare = type("Bare", (TableAlgorithm,), {"start_from": property()})(ROOM, TableConfig())
    with pytest.raises(UserError, match="Bare has no 'start_from': it cannot start with a run"):
        train(bare, TrainConfig(iterations=1, start=str(tmp_path)), out=tmp_path / "run")
    with pytest.raises(UserError, match="no policy and no run folder at"):
        train(table, TrainConfig(iterations=1, start=str(tmp_path / "none")), out=tmp_path / "new" / "run")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "new").exists()  # what was made for it has gone


def test_however_short_the_time_a_run_learns_something_and_a_resumed_one_says_that_it_is_over(tmp_path, capsys):
    algorithm, evaluation = TableAlgorithm(ROOM, TableConfig()), EvalConfig(tasks=4, segments=1)
    config = TrainConfig(minutes=1e-6, evaluation=evaluation)
    trained = train(algorithm, config, out=tmp_path / "run")
    assert trained.status.iteration == 1
    assert trained.status.best[0]["iteration"] == 1
    capsys.readouterr()
    again = train(algorithm, config, out=tmp_path / "run", resume=True, console=Console(width=500))
    said = capsys.readouterr().out
    assert "has used its 1e-06 minutes" in said
    assert "a larger --minutes goes on" in said
    assert "compil" not in said
    assert again.status.iteration == 1
    more = dataclasses.replace(config, minutes=None, iterations=1)
    train(algorithm, more, out=tmp_path / "run", resume=True, console=Console(width=500))
    said = capsys.readouterr().out
    assert "has done its 1 iteration; a larger --iterations goes on" in said
    assert "done after 1 iteration, " in said
    assert limit_reached(more, Status(iteration=12)).startswith("has done 12 iterations, more than 1;")
