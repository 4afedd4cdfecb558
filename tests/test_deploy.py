"""A policy in somebody's own program: budgets that change, a full context, restarts, the hard stop."""

import copy
import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import random_weights
from standin import ROOM, TableAgent
from test_policy import nosy

from safeicrl.agents.in_context import InContextAgent
from safeicrl.envs.registry import env_to_plain
from safeicrl.errors import UserError
from safeicrl.nets.heads import PolicyNet
from safeicrl.nets.transformer import NetConfig
from safeicrl.policies import checkpoint, contexts
from safeicrl.policies.policy import Policy
from safeicrl.trial import run_trials, sample_queue

CONTEXT = 6  # tokens: soon full


def guarded(seed: int = 0, temperature: float = 1.0) -> Policy:
    """A small network with a guard, all weights random."""
    net = random_weights(
        PolicyNet, NetConfig(width=8, layers=1, heads=2, context=CONTEXT, guard=1), ROOM.spec, scale=4
    )
    if seed:
        net = jax.tree.map(lambda x: x + 0.1 * seed if eqx.is_inexact_array(x) else x, net)
    agent = InContextAgent(net=net, risk=0.3, temperature=temperature, trained_episodes=4)
    return Policy(env=ROOM, agent=agent, card={"kind": "net", "env": env_to_plain(ROOM)})


def still() -> Policy:
    """Always moves right, with no memory."""
    return Policy(
        env=ROOM, agent=TableAgent(table=jnp.tile(jnp.eye(5)[4], (9, 1)), size=3, temperature=0.0), card={}
    )


def steps(policy: Policy, count: int, *, begun: bool, seed: int = 0) -> list[int]:
    """Random experience; every third step ends an episode."""
    rng = np.random.default_rng(seed)
    actions = [] if begun else [policy.act((1, 1))]
    for time in range(count):
        cell = rng.integers(0, 3, 2)
        actions.append(policy.act(cell, float(rng.integers(2)), float(rng.integers(2)), False, time % 3 == 2))
    return actions


# -- budgets and risk -----------------------------------------------------------------------------------------


def test_a_changed_budget_holds_from_the_next_episode_on():
    rows, episodes = 4, 4
    tasks, _ = sample_queue(ROOM, "test", (0, 1), (rows, 1), jax.random.key(1))
    budgets = jnp.array([[1.0, 3, 2, 1], [2, 2, 1, 3], [3, 1, 1, 2], [1, 2, 3, 1]])  # [row, episode]
    length = ROOM.spec.trial_steps
    key = jax.random.key(0)
    trials = run_trials(ROOM, nosy().agent, tasks, budgets[:, None], key, episodes=episodes, steps=length)
    trials = jax.tree.map(np.asarray, trials)
    policy = nosy()
    policy.start(budget=budgets[:, 0].tolist())
    last = {}
    for time in range(length):
        alive = trials.valid[:, time]
        action = policy.act(trials.token.observation[:, time], **last)
        np.testing.assert_array_equal(action[alive], trials.action[alive, time])
        coming = np.minimum(trials.token.episode[:, time] + 1, episodes - 1)
        policy.change(budget=np.asarray(budgets)[np.arange(rows), coming].tolist())
        last = {name: getattr(trials, name)[:, time] for name in ("reward", "cost", "terminated", "truncated")}


def test_before_the_first_action_it_holds_at_once():
    policy, twin = nosy(), nosy()
    policy.start(budget=1)
    policy.change(budget=3)
    twin.start(budget=3)
    assert steps(policy, 9, begun=False) == steps(twin, 9, begun=False)


def test_a_changed_risk_holds_from_the_next_action_on():
    policy = guarded()
    policy.start(budget=1, risk=0.999)
    steps(policy, 12, begun=False)
    assert policy.guard.interventions == 0
    policy.change(risk=1e-6)
    steps(policy, 12, begun=True)
    assert policy.guard.interventions > 0


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"budget": -1}, "budget must be a finite number ≥ 0"),
        ({"budget": [1, 2]}, "2 budgets were given for a batch of 1"),
        ({"budget": (1, 2)}, r"tuples are for several costs, got \(1, 2\)"),
        ({"risk": 0.1}, "has no guard"),
        ({}, "change needs a budget or a risk"),
        ({"budget": None}, "change needs a budget or a risk"),
    ],
)
def test_bad_changes_change_nothing(asked, words):
    policy, twin = nosy(), nosy()
    with pytest.raises(UserError, match="change was called before start"):
        policy.change(budget=1)
    for each in (policy, twin):
        each.start(budget=2)
    with pytest.raises(UserError, match=words):
        policy.change(**asked)
    assert steps(policy, 6, begun=False) == steps(twin, 6, begun=False)


# -- a full context, determinism ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::safeicrl.errors.BeyondTraining")
def test_only_the_newest_steps_count_once_the_context_is_full():
    """One layer: what it remembers of a step is that step alone. Two trials differ in one early step."""
    assert guarded().context == CONTEXT
    risks, ages = [], []
    for row in (0, 1):
        policy = guarded(temperature=0.0)
        policy.start(budget=1)
        policy.act((1, 1))
        policy.act((row, 2), 0.0, 1.0)  # the difference, which the next token has as its previous observation
        policy.act((1, 2), 0.0, 0.0)
        risks.append([])
        for _ in range(CONTEXT):
            policy.act((2, 2), 0.0, 0.0)
            risks[-1].append(policy.guard.risk)
            ages.append(int(policy._trial.memory.cache.age[0]))
    assert ages[:CONTEXT] == [4, 5, 6, 6, 6, 6]
    same = [a == b for a, b in zip(*risks, strict=True)]
    assert same == [False] * (CONTEXT - 1) + [True]


def test_the_same_seed_gives_the_same_trial():
    policy, runs = guarded(temperature=50.0), []
    for seed in (3, 3, 4):
        policy.start(budget=2, seed=seed)
        runs.append(steps(policy, 30, begun=False))
    assert runs[0] == runs[1] != runs[2]


# -- contexts on disk -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [0, 1, 17])
def test_a_saved_context_goes_on_as_if_nothing_had_happened(tmp_path, before):
    policy, path = guarded(), tmp_path / "trial.safetensors"
    policy.start(budget=2, risk=0.2, seed=7, fallback=0)
    if before:
        steps(policy, before - 1, begun=False)
    assert policy.save_context(path) == path
    other = guarded()  # as after a restart
    other.load_context(path)
    assert steps(policy, 12, begun=before > 0, seed=1) == steps(other, 12, begun=before > 0, seed=1)
    assert policy.guard == other.guard
    assert policy.stop == other.stop
    assert policy.stop.fallbacks > 0
    again = other.save_context(tmp_path / "again")
    assert policy.save_context(path).read_bytes() == again.read_bytes()


def test_a_batch_and_a_policy_without_memory_are_saved_too(tmp_path):
    policy, other = still(), still()
    policy.start(budget=[1, 2], seed=3)
    policy.act(np.ones((2, 2), int))
    other.load_context(policy.save_context(tmp_path / "batch"))
    last = (np.ones((2, 2), int), np.zeros(2), np.ones(2), [False, True])
    np.testing.assert_array_equal(policy.act(*last), other.act(*last))
    assert other._trial.token.ctg.tolist() == [0, 2]


def test_a_guard_that_was_off_stays_off(tmp_path):
    policy, other = guarded(), guarded()
    policy.start(budget=1, guard=False)
    steps(policy, 3, begun=False)
    other.load_context(policy.save_context(tmp_path / "off"))
    steps(other, 3, begun=True)
    assert other.guard is None


@pytest.fixture
def saved(tmp_path):
    policy = guarded()
    policy.start(budget=2, seed=7, fallback=1)
    steps(policy, 5, begun=False)
    return policy.save_context(tmp_path / "trial.safetensors")


def test_a_context_belongs_to_one_policy(saved, tmp_path):
    for other in (guarded(seed=1), Policy(env=ROOM, agent=guarded().agent, card={"kind": "net", "env": {}})):
        with pytest.raises(
            UserError, match="was saved by another policy, for another environment, or with another"
        ):
            other.load_context(saved)
    with pytest.raises(UserError, match="no context at"):
        guarded().load_context(tmp_path / "none")
    with pytest.raises(UserError, match="save_context was called before start"):
        copy.copy(guarded()).save_context(tmp_path / "none")


def rewritten(path, change) -> None:
    """What a stranger could write: changed contents under a digest that fits."""
    arrays, meta = checkpoint.read(path, kind="context")
    arrays, meta = {name: array.copy() for name, array in arrays.items()}, dict(meta)
    arrays, meta = change(arrays, meta) or (arrays, meta)
    meta.pop("safeicrl", None)
    checkpoint.save(path, arrays, kind="context", meta=meta)


def put(name, value):
    def change(arrays, meta):
        arrays[name] = np.full_like(arrays[name], value)

    return change


def say(**entries):
    return lambda arrays, meta: meta.update(entries)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("budget", -1), "budget must be a finite number ≥ 0"),
        (put("memory.cache.keys.0", np.nan), "memory.cache.keys.0 must be finite"),
        (put("token.observation", 7), "observation must be a cell"),
        (put("token.time", -3), "time must be ≥ 0"),
        (put("action", 9), "action must be an integer from 0 to 4"),
        (put("fallback", -2), "action must be an integer from 0 to 4"),
        (put("memory.cache.clock", 2**31 - 1), "memory.cache.clock must be at most"),
        (say(rows=3, batched=True), "expected"),
        (say(rows=10**9), "at most 4096 rows"),
        (say(rows=True), "rows must be an integer"),
        (say(batched="yes"), "is damaged"),
        (say(risk=2), "risk must be a number between 0 and 1"),
        (say(has=["memory"]), "is damaged"),
        (say(has=["token"]), "is damaged"),
        (say(has={}), "is damaged"),
        (lambda arrays, meta: (arrays, {"policy": meta["policy"]}), "is damaged"),
        (lambda arrays, meta: ({**arrays, "more": np.zeros(3)}, meta), "has an array 'more'"),
    ],
)
def test_what_no_trial_holds_is_refused_and_changes_nothing(saved, change, words):
    policy, twin = guarded(), guarded()
    for each in (policy, twin):
        each.start(budget=1)
        each.act((1, 1))
    rewritten(saved, change)
    with pytest.raises(UserError, match=words) as error:
        policy.load_context(saved)
    assert "\n" not in str(error.value)
    assert steps(policy, 3, begun=True) == steps(twin, 3, begun=True)


def test_damaged_and_oversized_files_are_refused(saved, monkeypatch):
    data = saved.read_bytes()
    for wrong, words in (
        (data[:-9], "truncated"),
        (data[:-9] + b"\x00" * 9, "SHA-256"),
        (b"{}", "not a context"),
        (data.replace(b'"context"', b'"policy_"'), "is a policy_, not a context"),
    ):
        saved.write_bytes(wrong)
        with pytest.raises(UserError, match=words):
            guarded().load_context(saved)
    saved.write_bytes(data)
    monkeypatch.setattr(contexts, "SPARE_BYTES", 0)
    monkeypatch.setattr(contexts, "MAX_ROWS", 1)
    with pytest.raises(UserError, match=f"has {len(data)} bytes, more than any context of this policy"):
        guarded().load_context(saved)
    policy = still()
    policy.start(budget=[1, 1])
    with pytest.raises(UserError, match="at most 1 rows, this trial has 2"):
        policy.save_context(saved)


def test_a_context_is_plain_data(saved):
    size = int.from_bytes(saved.read_bytes()[:8], "little")
    header = json.loads(saved.read_bytes()[8 : 8 + size])
    assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} <= {
        "F32",
        "I32",
        "U32",
        "BOOL",
    }


# -- the hard stop --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::safeicrl.errors.BeyondTraining")
def test_the_fallback_takes_over_while_nothing_is_left():
    policy = still()
    policy.start(budget=2, fallback=0)
    assert policy.stop is None
    actions = [policy.act((1, 1))]
    for cost in (1.0, 0.0, 1.0, 0.0, 1.0):  # used up with the third step
        actions.append(policy.act((1, 1), 0.0, cost))
    assert actions == [4, 4, 4, 0, 0, 0]
    assert dataclasses.asdict(policy.stop) == {"stopped": True, "steps": 6, "fallbacks": 3, "episodes": 1}
    assert policy.act((1, 1), 0.0, 0.0, True) == 4  # a new episode has a new budget
    assert not policy.stop.stopped
    policy.change(budget=0)
    assert policy.act((1, 1), 0.0, 0.0, True) == 0
    assert policy.act((1, 1), 0.0, 0.0, False, True) == 0
    assert dataclasses.asdict(policy.stop) == {"stopped": True, "steps": 9, "fallbacks": 5, "episodes": 3}


def test_each_row_of_a_batch_stops_by_itself_and_the_agent_is_told_what_was_done():
    policy = still()
    policy.start(budget=[1, 3], fallback=2)
    policy.act(np.ones((2, 2), int))
    assert policy.act(np.ones((2, 2), int), np.zeros(2), np.ones(2)).tolist() == [2, 4]
    policy.act(np.ones((2, 2), int), np.zeros(2), np.zeros(2))
    assert policy._trial.token.action.tolist() == [2, 4]
    assert policy.stop.fallbacks.tolist() == [2, 0]


def test_with_a_fallback_no_episode_of_unit_costs_is_over_budget_if_it_is_safe():
    """Staying put in a dark room costs nothing on a free cell, and one per step on an obstacle."""
    policy = guarded()
    rng = np.random.default_rng(0)
    policy.start(budget=1, fallback=0)
    action, total, totals = policy.act((1, 1)), 0, []
    for time in range(60):
        cost, over = float(action != 0 and rng.random() < 0.5), time % 5 == 4
        total += cost
        if over:
            totals.append(total)
            total = 0
        action = policy.act((1, 1), 0.0, cost, False, over)
    assert max(totals) == 1
    assert policy.stop.fallbacks > 0


@pytest.mark.parametrize("fallback", [5, -1, 0.5, "stay", [0, 1]])
def test_a_fallback_that_is_no_action_is_refused(fallback):
    with pytest.raises(UserError, match=r"^fallback: action must be an integer from 0 to 4"):
        still().start(budget=1, fallback=fallback)
