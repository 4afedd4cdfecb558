"""The ONNX graph and its NumPy runner act as the policy does, through whole trials and long after them."""

import dataclasses
import json
import runpy
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import random_weights
from probe import Push, Runner
from standin import ROOM, TableAgent

from safeicrl.agents.in_context import InContextAgent
from safeicrl.envs.registry import env_to_plain
from safeicrl.errors import UserError
from safeicrl.nets.heads import PolicyNet
from safeicrl.nets.transformer import NetConfig
from safeicrl.policies.onnx import export_onnx
from safeicrl.policies.policy import Policy

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
RUNNER = Path(__file__).parent.parent / "examples" / "onnx_runner.py"
OnnxPolicy = runpy.run_path(str(RUNNER))["OnnxPolicy"]
PUSH = Push(max_steps=4, episodes=3)
ROWS = 3


OPTIONS = ("risk", "reserve", "brake", "settle_after")


def policy(env, *, temperature=0.0, trained=4, settle=True, **settings) -> Policy:
    options = {name: value for name, value in settings.items() if name in OPTIONS}
    net = {name: value for name, value in settings.items() if name not in OPTIONS}
    config = NetConfig(width=8, layers=2, heads=2, context=9, dtype="float32", **net)
    weights = random_weights(PolicyNet, config, env.spec, scale=2.0)
    # biases around zero: else one action would always win
    centred = lambda path, x: x - 1 if path[-1].name in ("bias", "offset") else x  # noqa: E731
    arrays, static = eqx.partition(weights, eqx.is_array)
    weights = eqx.combine(jax.tree_util.tree_map_with_path(centred, arrays), static)
    agent = InContextAgent(net=weights, temperature=temperature, trained_episodes=trained, **options)
    return Policy(env=env, agent=agent, card={"kind": "net", "env": env_to_plain(env)}, settle=settle)


def experience(env, steps: int):
    """Random observations, rewards, costs and ends for all rows, the same for both."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        seen = rng.integers(0, 3, (ROWS, 2)) if env is ROOM else rng.normal(size=(ROWS, 1)).astype(np.float32)
        yield seen, rng.normal(size=ROWS).astype(np.float32), rng.integers(0, 2, ROWS), rng.random(ROWS) < 0.3


KINDS = {
    "discrete": (ROOM, {}),
    "guarded": (ROOM, {"guard": 2, "guard_clock": True, "risk": 0.4, "reserve": 0.7}),
    "guarded by a ledger": (ROOM, {"guard": 2, "guard_ledger": 3, "risk": 0.4}),
    "by one that the policy reads, too": (
        ROOM,
        {"guard": 2, "guard_ledger": 3, "shared_ledger": True, "risk": 0.4},
    ),
    "a ledger, the guard off": (ROOM, {"guard": 2, "guard_ledger": 3, "shared_ledger": True}),
    "one episode, saturated": (ROOM, {"trained": 1, "saturate": 1}),
    "a reserve, settled early": (ROOM, {"reserve": 0.7, "settle_after": 2}),
    "a reserve of small budgets": (PUSH, {"levels": 5, "reserve": (0.8, 1.7, 0.3)}),
    "levels": (PUSH, {"levels": 5}),
    "gaussian": (PUSH, {}),
    "a brake": (PUSH, {"brake": 1.7}),
    "a brake for costs of whole units": (Runner(max_steps=4, episodes=3), {"brake": 1.7}),
}


@pytest.mark.filterwarnings("ignore::safeicrl.errors.BeyondTraining")
@pytest.mark.parametrize("kind", KINDS)
def test_the_runner_acts_as_the_policy_through_whole_trials(tmp_path, kind):
    env, settings = KINDS[kind]
    ours = policy(env, **settings)
    theirs = OnnxPolicy(str(export_onnx(ours, tmp_path / "policy")))
    budgets = [1.0, 2.0, 1.5]
    ours.start(budget=budgets)
    theirs.start(budget=budgets)
    actions, stepped_in = [], 0
    for step, (seen, reward, cost, done) in enumerate(experience(env, 30)):  # the context of 9 is full early
        last = (reward, cost, done) if step else ()
        actions.append(ours.act(seen, *last))
        given = theirs.act(seen, *last)
        if env is ROOM or "levels" in settings:
            np.testing.assert_array_equal(given, actions[-1])
        else:
            np.testing.assert_allclose(given, actions[-1], atol=2e-5)
        if "risk" in settings:
            np.testing.assert_allclose(theirs.said["risk_taken"], ours.guard.risk, atol=1e-5)
            np.testing.assert_array_equal(theirs.said["stepped_in"], ours.guard.stepped_in)
            stepped_in += theirs.said["stepped_in"].sum()
    assert len(np.unique(np.round(actions, 3))) > 2
    assert stepped_in > 0 or "risk" not in settings
    memory = ours._trial.memory
    if "reserve" in settings:
        np.testing.assert_array_equal(theirs.cache["budget"], memory.budget)
        memory = memory.memory
    for name in ("best", "worst", "earned", "left"):
        np.testing.assert_allclose(theirs.cache[name], getattr(memory, name), rtol=1e-5)
    np.testing.assert_array_equal(theirs.cache["marked_clock"], memory.clock)
    memory = memory.cache
    kept = memory.keys[1].reshape(theirs.cache["keys_1"].shape)  # [row · head, ...] → [row, head, ...]
    np.testing.assert_allclose(theirs.cache["keys_1"], kept, atol=1e-4)
    if memory.entries is not None and "entries" in theirs.cache:  # with places, where ours has cells
        np.testing.assert_allclose(theirs.cache["entries"][:, -2:], memory.entries[:, -2:], atol=1e-5)
    assert ("entries" in theirs.cache) == (memory.entries is not None)
    np.testing.assert_array_equal(theirs.cache["age"], memory.age)
    np.testing.assert_array_equal(theirs.cache["clock"], memory.clock)
    assert (memory.clock < 30).any()  # something was taken back


@pytest.mark.filterwarnings("ignore::safeicrl.errors.BeyondTraining")
def test_a_memory_that_goes_on_goes_on_in_the_graph_too(tmp_path):
    ours = policy(ROOM, settle=False)
    theirs = OnnxPolicy(str(export_onnx(ours, tmp_path / "policy")))
    for each in (ours, theirs):
        each.start(budget=[1.0, 2.0, 1.5])
    for step, (seen, reward, cost, done) in enumerate(experience(ROOM, 30)):
        last = (reward, cost, done) if step else ()
        np.testing.assert_array_equal(theirs.act(seen, *last), ours.act(seen, *last))
    np.testing.assert_array_equal(theirs.cache["clock"], [30] * ROWS)  # nothing was taken back
    np.testing.assert_array_equal(theirs.cache["age"], ours._trial.memory.age)


def test_with_the_same_noise_sampled_actions_are_the_same_too(tmp_path):
    ours = policy(ROOM, temperature=2.0)
    theirs = OnnxPolicy(str(export_onnx(ours, tmp_path / "policy.onnx")))
    ours.start(budget=[1.0, 2.0, 3.0], seed=5)
    theirs.start(budget=[1.0, 2.0, 3.0])
    key = jax.random.key(5)
    for step, (seen, reward, cost, done) in enumerate(experience(ROOM, 20)):
        last = (reward, cost, done) if step else ()
        key, used = jax.random.split(key)
        noise = jax.random.gumbel(used, (ROWS, 5), jnp.float32)  # as `jax.random.categorical` draws it
        np.testing.assert_array_equal(theirs.act(seen, *last, noise=noise), ours.act(seen, *last))


def test_the_runner_draws_by_its_seed_and_takes_another_risk(tmp_path):
    path = str(export_onnx(policy(ROOM, temperature=5.0, guard=1, risk=0.999), tmp_path / "policy"))
    runs = []
    for seed in (1, 1, 2):
        runner = OnnxPolicy(path)
        runner.start(budget=[1.0] * ROWS, seed=seed)
        runs.append([runner.act(seen, *last).tolist() for seen, *last in experience(ROOM, 12)])
        assert not runner.said["stepped_in"].any()
    assert runs[0] == runs[1] != runs[2]
    assert "risk" in {given.name for given in runner.session.get_overridable_initializers()}


def test_the_runner_is_short_and_needs_no_jax(tmp_path):
    text = RUNNER.read_text()
    assert len(text.splitlines()) <= 60
    assert "jax" not in text.replace("without JAX", "")
    assert "safeicrl" not in {line.split()[1].split(".")[0] for line in text.splitlines() if "import " in line}
    meta = OnnxPolicy(str(export_onnx(policy(ROOM), tmp_path / "policy"))).meta
    assert meta["env"]["parameters"]["size"] == 3
    assert json.dumps(meta)


def test_what_has_no_graph_is_refused(tmp_path, monkeypatch):
    table = Policy(env=ROOM, agent=TableAgent(table=jnp.zeros((9, 5)), size=3), card={"kind": "table"})
    with pytest.raises(UserError, match="only policies of kind 'net' become ONNX graphs, not 'table'"):
        export_onnx(table, tmp_path / "x")
    bounded = dataclasses.replace(PUSH)
    monkeypatch.setattr(type(bounded), "spec", dataclasses.replace(PUSH.spec, max_cost=1.0))
    with pytest.raises(UserError, match="load the policy with guard=False"):
        export_onnx(policy(bounded, guard=1, risk=0.1), tmp_path / "x")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UserError, match=r"onnx is not installed: pip install 'safeicrl\[onnx\]'"):
        export_onnx(policy(ROOM), tmp_path / "x")
