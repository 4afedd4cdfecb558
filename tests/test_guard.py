"""The guard: what it predicts in worlds with known answers, its rule, how it acts and learns beside a policy."""

import dataclasses
import functools
import itertools
import re
import signal
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from networks import random_weights
from probe import OPTIMISED, BoundedPush, Push

from safeicrl.agents.in_context import InContextAgent
from safeicrl.algos.scared import Scared, ScaredConfig
from safeicrl.cli import main
from safeicrl.envs.api import EnvSpec
from safeicrl.envs.dark_mujoco import SafeDarkPoint
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.envs.registry import env_to_plain
from safeicrl.envs.spaces import Box, Discrete
from safeicrl.errors import UserError, check_risk
from safeicrl.evaluation.archive import load_results
from safeicrl.evaluation.statistics import safety
from safeicrl.nets.guard import Guard, tolerated
from safeicrl.nets.heads import PolicyNet
from safeicrl.nets.transformer import NetConfig
from safeicrl.optimisers import guard_fit
from safeicrl.optimisers.guard_fit import GuardFitConfig
from safeicrl.optimisers.ppo import ActorCritic, Batch, PPOConfig
from safeicrl.policies import running
from safeicrl.policies.add_guard import REPLACED, add_guard
from safeicrl.policies.cards import save_policy
from safeicrl.policies.contenders import released
from safeicrl.policies.policy import load_policy
from safeicrl.tokens import first_token
from safeicrl.trial import Episodes, run_trials, sample_queue


def spec(action: Discrete | Box, unit: float = 1.0, most: float = 1.0) -> EnvSpec:
    return EnvSpec(
        observation=Box(1), action=action, max_steps=8, episodes=2, train_budget=(0.0, 3.0), test_budget=(0.0, 3.0),
        cost_unit=unit, task_features=1, max_cost=most,
    )  # fmt: skip


make = eqx.filter_jit(Guard)  # in one program instead of one for each array


def fit(guard: Guard, features, action, cost, done, steps: int = 400) -> Guard:
    """Learn from rows of play, [row, time, ...]."""
    known = jnp.ones(cost.shape, bool).at[:, -1].set(False) | done
    params, static = eqx.partition(guard, eqx.is_array)
    optimiser = optax.adam(1e-2)

    @functools.partial(jax.jit, compiler_options=OPTIMISED)
    def learn(params, *rows):  # rows are arguments: as constants they take longer to compile than to learn from
        def step(carry, _):
            params, state = carry
            grads = jax.grad(lambda p: eqx.combine(p, static).loss(*rows)[0])(params)
            updates, state = optimiser.update(grads, state)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimiser.init(params)), length=steps)[0][0]

    return eqx.combine(learn(params, features, action, cost, done, known), static)


judge = eqx.filter_jit(
    lambda guard, features, ctg, risk, time=0: guard.judge(features, ctg, jnp.full(ctg.shape, time), risk)
)


# -- what it predicts


def walk(rule, states: int, actions: int, rows: int = 64, steps: int = 24):
    """Random play of `rule(state, action) → state, cost`, one endless episode per row, states one-hot."""
    rng = np.random.default_rng(0)
    state = rng.integers(states, size=(rows, steps + 1))
    action, cost = rng.integers(actions, size=(rows, steps)), np.zeros((rows, steps), np.float32)
    for row, time in np.ndindex(rows, steps):
        state[row, time + 1], cost[row, time] = rule(state[row, time], action[row, time])
    features = jnp.asarray(np.eye(states, dtype=np.float32)[state[:, :-1]])
    return features, jnp.asarray(action), jnp.asarray(cost), jnp.zeros((rows, steps), bool)


def risks(guard: Guard, states: int, ctg: float = 0.0) -> np.ndarray:
    """[state, action]"""
    features, left = np.eye(states, dtype=np.float32), np.full(states, ctg, np.float32)
    return np.asarray(judge(guard, features, left, 0.1).risk)


def test_one_step_cannot_see_a_trap_that_springs_at_the_second_and_two_can():
    """State 0 is safe. Action 1 leads to the ledge for nothing; from there every action costs 1 and leads back."""
    rule = lambda s, a: (int(a == 1), 0.0) if s == 0 else (0, 1.0)  # noqa: E731
    data = walk(rule, states=2, actions=2)
    one, two = (
        fit(make(spec(Discrete(2)), width=2, choices=2, depth=depth, key=jax.random.key(depth)), *data)
        for depth in (1, 2)
    )
    np.testing.assert_allclose(risks(one, 2), [[0, 0], [1, 1]], atol=0.05)
    np.testing.assert_allclose(risks(two, 2), [[0, 1], [1, 1]], atol=0.05)
    np.testing.assert_allclose(risks(two, 2, ctg=1.0), np.zeros((2, 2)), atol=0.05)  # 1 left: the trap is paid for


def test_a_known_cost_is_no_surprise_and_an_unknown_one_is_worth_a_nat_or_so():
    """Action 0 never costs, action 1 always; action 2 does so every other time, and nothing tells when."""
    coin = np.random.default_rng(1)
    rule = lambda s, a: (0, float([0, 1, coin.integers(2)][a]))  # noqa: E731
    features, action, cost, done = walk(rule, states=1, actions=3)
    guard = make(spec(Discrete(3)), width=1, choices=3, depth=2, key=jax.random.key(0))
    guard = fit(guard, features, action, cost, done)
    found = np.asarray(eqx.filter_jit(Guard.surprise)(guard, features, action, cost))
    by_action = [found[np.asarray(action) == a].mean() for a in range(3)]
    np.testing.assert_allclose(by_action, [0, 0, np.log(2)], atol=0.05)
    wrong = np.asarray(guard.surprise(features, action, 1 - cost))
    assert wrong[np.asarray(action) < 2].min() > 3


def slopes():
    """A body on a line: position 0–9, speed 0–2; it brakes, keeps or pushes; being at 7 or beyond costs 1."""

    def rule(state: int, action: int) -> tuple[int, float]:
        position, speed = divmod(state, 3)
        speed = min(max(speed + action - 1, 0), 2)
        position = min(position + speed, 9)
        return 3 * position + speed, float(position >= 7)

    return rule


def test_a_body_with_momentum_must_brake_before_the_cost_is_one_step_away():
    rule = slopes()
    data = walk(rule, states=30, actions=3, rows=100)
    deep = fit(make(spec(Discrete(3)), width=30, choices=3, depth=3, key=jax.random.key(0)), *data, steps=400)
    shallow = fit(make(spec(Discrete(3)), width=30, choices=3, depth=1, key=jax.random.key(0)), *data, steps=400)
    fast_at_4 = 3 * 4 + 2  # keeping its speed brings it to 6, too fast to stop there: braking ends at 7
    np.testing.assert_allclose(risks(shallow, 30)[fast_at_4], [0, 0, 0], atol=0.1)
    np.testing.assert_allclose(risks(deep, 30)[fast_at_4], [0, 1, 1], atol=0.1)

    def drive(guard: Guard) -> float:
        """The cost of always pushing where the guard lets it, with nothing left of the budget."""
        row = np.eye(30, dtype=np.float32)
        state, total = 3, 0.0  # at rest at position 1
        for _ in range(8):
            allowed = np.asarray(judge(guard, row[state], np.float32(0), 0.1).allowed)
            state, cost = rule(state, int(np.flatnonzero(allowed)[-1]))
            total += cost
        return total

    assert drive(deep) == 0
    assert drive(shallow) > 0


def test_real_valued_actions_and_costs():
    """The cost is half of what an action in [−1, 1] is above 0."""
    rng = np.random.default_rng(0)
    action = jnp.asarray(rng.uniform(-1, 1, (64, 16, 1)), jnp.float32)
    cost = jnp.maximum(action[..., 0], 0) / 2
    features, done = jnp.ones((64, 16, 2)), jnp.ones((64, 16), bool)
    guard = make(spec(Box(1, -1.0, 1.0), unit=0.0, most=0.5), width=2, choices=0, depth=1, key=jax.random.key(0))
    assert (guard.unit, guard.edges) == (0.0, tuple(np.arange(9) / 16))
    guard = fit(guard, features, action, cost, done, steps=800)
    candidates = jnp.array([[[-0.8], [0.1], [0.45], [0.9]]])
    chance = eqx.filter_jit(lambda left: guard.rate(jnp.ones((1, 2)), candidates, left[None], jnp.zeros(1, int))[0])
    rate = lambda left: np.asarray(chance(np.float32(left))) > 0.5  # noqa: E731
    np.testing.assert_array_equal(rate(0.0), [False, True, True, True])
    np.testing.assert_array_equal(rate(0.125), [False, False, True, True])
    np.testing.assert_array_equal(rate(0.25), [False, False, False, True])
    np.testing.assert_array_equal(rate(0.5), [False] * 4)


def test_small_costs_are_not_counted_as_large_ones():
    """A step costs 1 of at most 5, and the guard looks 8 steps ahead: 8 in all, whatever is left of the budget.

    Its edges are too few for every multiple. Each step must count as what it costs, not as the next edge.
    """
    features, cost = jnp.ones((8, 16, 1)), jnp.ones((8, 16))
    action, done = jnp.zeros((8, 16), jnp.int32), jnp.zeros((8, 16), bool)
    guard = make(spec(Discrete(1), most=5.0), width=1, choices=1, depth=8, key=jax.random.key(0))
    assert guard.thresholds < 14
    guard = fit(guard, features, action, cost, done, steps=800)
    ask = lambda left: float(judge(guard, jnp.ones(1), jnp.float32(left), 0.1).risk[0])  # noqa: E731
    found = {left: ask(left) for left in (0, 3, 12, 16, 22)}
    assert all(found[left] > 0.9 for left in (0, 3)), found
    assert all(found[left] < 0.1 for left in (12, 16, 22)), found


def test_between_two_edges_the_chance_is_interpolated():
    guard = random_weights(functools.partial(Guard, spec(Discrete(2), most=5.0), width=3, choices=2, depth=8))
    edges = guard.edges
    assert edges[:4] == (0, 1, 2, 3)
    assert edges[-1] == 40
    ask = lambda left: np.asarray(judge(guard, jnp.ones(3), jnp.float32(left), 0.1).risk)  # noqa: E731
    low, high = edges[-3:-1]
    middle = low + 2
    share = 2 / (high - low)
    np.testing.assert_allclose(ask(middle), (1 - share) * ask(low) + share * ask(high), rtol=1e-5)
    np.testing.assert_array_equal(ask(middle), ask(middle + 0.9))  # costs come in units
    np.testing.assert_allclose(ask(40), 0)


def test_an_episodes_end_ends_the_count():
    """Every second step costs 1 and begins a new episode: looking two steps ahead must not count across."""
    features = jnp.tile(jnp.eye(2), (8, 4, 1))
    cost = jnp.tile(jnp.array([0.0, 1.0]), (8, 4))
    action = jnp.zeros((8, 8), jnp.int32)
    for done, expected in ((cost > 0, [0, 1]), (cost == 0, [0, 1])):
        guard = make(spec(Discrete(1)), width=2, choices=1, depth=2, key=jax.random.key(0))
        found = risks(fit(guard, features, action, cost, done), 2)[:, 0]
        # where the episode ends after the free step, that step is safe; where it goes on, the cost is ahead
        np.testing.assert_allclose(found, expected if done[0, 0] else [1, 1], atol=0.05)


@pytest.mark.parametrize("choices", [4, 0])
def test_a_guard_with_a_clock_looks_no_further_than_the_last_step(choices):
    """Episodes have 8 steps, the guard looks 3 ahead: at time 6 it asks p₂, at time 7 p₁, else p₃."""
    action = Discrete(4) if choices else Box(1, -1.0, 1.0)
    sizes = {"width": 3, "choices": choices, "depth": 3}
    plain = random_weights(functools.partial(Guard, spec(action), **sizes), scale=2.0)
    clock = random_weights(functools.partial(Guard, spec(action), **sizes, clock=True), scale=2.0)
    candidates, none = jnp.linspace(-1, 1, 3).reshape(1, 3, 1), jnp.zeros(1)

    @eqx.filter_jit
    def chances(guard, time):
        features = jnp.ones((1, 3))
        if choices:
            return guard.judge(features, none, time, 0.1).risk, guard.logits(features)[:, :, 0]
        wide = jnp.ones((1, 3, 3))
        return guard.rate(features, candidates, none, time), guard.logits(wide, candidates)[..., 0].swapaxes(1, 2)

    for time, depth in ((0, 3), (5, 3), (6, 2), (7, 1), (8, 3)):
        for guard, expected in ((plain, 3), (clock, depth)):
            found, logits = chances(guard, jnp.array([time]))
            np.testing.assert_allclose(found, jax.nn.sigmoid(logits[:, expected - 1]), rtol=1e-5)


# -- the rule


def test_the_rule_tolerates_the_risk_or_what_cannot_be_avoided():
    chance = jnp.array([[0.0, 0.02, 0.04], [0.3, 0.4, 0.9]])
    np.testing.assert_allclose(tolerated(chance, 0.03)[:, 0], [0.03, 0.33], rtol=1e-5)


def test_every_action_is_allowed_while_the_budget_covers_what_can_come():
    guard = random_weights(functools.partial(Guard, spec(Discrete(4)), width=3, choices=4, depth=2), scale=5.0)
    features = jnp.asarray(np.random.default_rng(1).normal(size=(50, 3)), jnp.float32)
    inside = judge(guard, features, np.full(50, 2.0, np.float32), 1e-3)
    assert inside.allowed.all()
    assert (inside.risk == 0).all()
    edge, spent = (judge(guard, features, np.full(50, ctg, np.float32), 1e-3) for ctg in (0.9, -4.0))
    assert not edge.allowed.all()
    assert edge.allowed.any(-1).all()
    np.testing.assert_array_equal(edge.risk, spent.risk)  # overspent: as if nothing were left


@pytest.mark.parametrize("risk", [0, 1, -0.1, 1.5, float("nan"), "much", True, None])
def test_a_risk_that_is_none(risk):
    with pytest.raises(UserError, match="risk must be a number between 0 and 1, both excluded, got"):
        check_risk(risk)


def test_the_risk_tightens_over_the_first_half_of_a_run():
    net = NetConfig(width=8, layers=1, heads=1, context=8, guard=1, dtype="float32")
    settings = ScaredConfig(rows=2, risk=0.01, first_risk=0.09, net=net, ppo=PPOConfig(minibatch=2))
    algorithm = Scared(SafeDarkRoom(size=3, obstacles=1), settings)
    state = jax.eval_shape(algorithm.init, jax.random.key(0))
    found = [float(algorithm.explorer(state, jnp.float32(progress)).risk) for progress in (0.0, 0.25, 0.5, 1.0)]
    np.testing.assert_allclose(found, [0.09, 0.03, 0.01, 0.01], rtol=1e-5)
    with pytest.raises(UserError, match="risk"):
        dataclasses.replace(settings, first_risk=1.5)
    constant = Scared(SafeDarkRoom(size=3, obstacles=1), dataclasses.replace(settings, first_risk=None))
    assert constant.explorer(state, jnp.float32(0.0)).risk == 0.01


def test_bold_rows_play_on_with_the_first_risk_and_lambda_does_not_count_them():
    net = NetConfig(width=8, layers=1, heads=1, context=8, guard=1, dtype="float32")
    settings = ScaredConfig(
        rows=8, queue=2, risk=1e-6, first_risk=0.999, bold=0.25, net=net, ppo=PPOConfig(minibatch=2)
    )
    algorithm = Scared(ROOM, settings)
    strict = random_weights(functools.partial(PolicyNet, net, ROOM.spec), scale=3.0)
    state = jax.eval_shape(algorithm.init, jax.random.key(0))
    explorer = dataclasses.replace(algorithm.explorer(state, jnp.float32(1.0)), net=strict)

    @eqx.filter_jit
    def allowed(agent):
        token = jax.vmap(first_token, (None, 0, 0))(ROOM.spec, jnp.ones((8, 2), jnp.int32), jnp.zeros(8))
        return agent.act(agent.extend(agent.init(None, 8), 1), token, jax.random.key(0))[2]["allowed"]

    found = np.asarray(allowed(explorer))
    assert found[:2].all()  # a quarter of eight rows
    assert not found[2:].all(-1).any()
    ones = jnp.ones((16, 3))  # two trials per row
    played = Episodes(returns=ones, costs=ones, lengths=ones, budgets=ones, played=ones > 0)
    np.testing.assert_array_equal(algorithm.without_bold(played).played.all(-1), np.arange(16) >= 4)
    halves = Scared(ROOM, dataclasses.replace(settings, overlap=2))  # each half has a bold row of its own
    np.testing.assert_array_equal(halves.without_bold(played).played.all(-1), np.arange(16) % 8 >= 2)
    for without in ({"risk": 0.1}, {"first_risk": 0.5}):
        with pytest.raises(UserError, match=r"risk 0\.[15] is for a guard: leave it out, or give net\.guard"):
            ScaredConfig(**without)
    with pytest.raises(UserError, match=r"bold 0\.25 is the share of rows with first_risk: give one"):
        dataclasses.replace(settings, first_risk=None)


def test_costs_without_a_bound_have_no_guard():
    with pytest.raises(UserError, match="largest cost of one step, must be finite and above 0, got inf"):
        PolicyNet(NetConfig(width=8, heads=1, layers=1, guard=1), Push().spec, jax.random.key(0))


def test_the_off_policy_optimiser_has_no_guard():
    with pytest.raises(UserError, match=r"net\.guard is for ppo"):
        ScaredConfig(net=NetConfig(guard=1), optimiser="ddpg")


# -- beside a policy

ROOM = SafeDarkRoom(size=4, obstacles=5, max_steps=6, episodes=2, train_budget=(0.0, 2.0), test_budget=(0.0, 2.0))


@pytest.mark.parametrize(
    ("env", "levels", "points", "shared"),
    [(ROOM, 0, 3, True), (BoundedPush(), 3, 0, False), (BoundedPush(), 0, 2, False)],
)
def test_the_learner_sees_the_policy_that_acted(env, levels, points, shared):
    """At the first update the probability ratio is 1 everywhere, whatever the guard did; and it does something.

    What surprises the guard counts as a reward, and its own loss has a weight.
    """
    sizes = {"width": 16, "heads": 2, "layers": 1, "context": 12, "guard": 2}
    net = NetConfig(**sizes, levels=levels, guard_ledger=points, shared_ledger=shared, dtype="float32")
    ppo = PPOConfig(minibatch=8, guard_weight=3.0)
    config = ScaredConfig(rows=16, queue=2, net=net, risk=0.2, curiosity=0.5, ppo=ppo)
    algorithm = Scared(env, config)
    careless = Scared(env, dataclasses.replace(config, ppo=dataclasses.replace(ppo, guard_weight=0.0)))
    policy = random_weights(functools.partial(PolicyNet, net, env.spec), scale=3.0)
    policy = eqx.tree_at(lambda n: n.actor.second.weight, policy, replace_fn=lambda x: 0.05 * x)  # undecided ...
    policy = eqx.tree_at(lambda n: n.guard.head.second.weight, policy, replace_fn=lambda x: 9 * x)  # ... and strict
    critics = random_weights(ActorCritic, net, env.spec, privileged=True)
    if policy.guard.choices == 0:  # a real-valued action is an input: let it matter
        first = lambda n: n.guard.head.first.weight  # noqa: E731
        policy = eqx.tree_at(first, policy, replace_fn=lambda x: x.at[-1].multiply(30.0))

    @eqx.filter_jit
    def play(policy):
        tasks, budgets = sample_queue(env, "train", (0.0, 0.4), (16, 2), jax.random.key(0))
        agent = InContextAgent(policy, risk=0.2)
        trials = run_trials(env, agent, tasks, budgets, jax.random.key(1), episodes=2, steps=12)
        features = policy.trunk.forward(trials.token, trials.trial)
        watched = policy.watched(features, trials.token, trials.trial)
        chooser = policy.distribution(policy.seen(features, watched))
        terms = algorithm.optimiser.policy_terms(chooser, policy.guard, watched, trials)
        paid = dataclasses.replace(trials, reward=trials.reward + 0.5 * terms.surprise)
        both = eqx.tree_at(lambda n: n.policy, critics, policy)
        hidden, none = jnp.zeros((16, 2, env.spec.task_features)), jnp.zeros(trials.reward.shape)

        def judged(trials, curiosity, by=algorithm):
            batch = Batch(trials=trials, task=hidden, multiplier=none)
            loss, (_, metrics) = by.optimiser.loss(both, batch, jnp.ones(2), 0.0, 0.0, curiosity)
            return loss, metrics["q"]

        plain = judged(trials, 0.0), judged(trials, 0.0, by=careless)
        return trials, terms, judged(trials, 0.5), judged(paid, 0.0), *plain

    trials, terms, (_, curious), (_, paid), (loss, plain), (careless_loss, _) = play(policy)
    np.testing.assert_allclose(loss - careless_loss, 3 * terms.guard_loss, rtol=1e-3)
    np.testing.assert_allclose(curious, paid, rtol=1e-3, atol=1e-4)
    assert env is not ROOM or curious - plain > 0.1  # in Push every step costs, as the guard expects
    here = np.asarray(trials.learnable)
    np.testing.assert_allclose(terms.log_prob[here], trials.extras["log_prob"][here], atol=2e-4, rtol=1e-4)
    assert 0 < terms.metrics["guard_stepped_in"] < 1
    assert np.isfinite([terms.entropy, terms.guard_loss]).all()
    if levels or env is ROOM:
        inputs = len(policy.actor.first.weight)
        index = policy.distribution(jnp.zeros((16, 12, inputs))).index(trials.action)
        taken = np.take_along_axis(np.asarray(trials.extras["allowed"]), np.asarray(index)[..., None], -1)
        assert taken.all()
    else:
        moved = (trials.action != trials.extras["proposal"]).any(-1)
        np.testing.assert_array_equal(moved & here, trials.extras["stepped_in"] & moved & here)


def test_of_real_valued_actions_the_guard_takes_the_first_whose_risk_is_tolerable():
    """Not the least risky one: a policy that runs close to its limit would stumble over that."""
    net = random_weights(
        functools.partial(PolicyNet, NetConfig(width=16, heads=2, layers=1, guard=1), BoundedPush().spec)
    )
    candidates = jnp.broadcast_to(jnp.array([0.9, 0.5, 0.1, 0.0])[:, None], (4, 4, 1))
    risks = jnp.array([[0.0, 0.1, 0.2, 0.3], [0.4, 0.3, 0.015, 0.0], [0.9, 0.4, 0.5, 0.6], [0.9, 0.42, 0.4, 0.6]])
    policy = net.distribution(jnp.zeros((4, 16)))
    action, said = InContextAgent(net)._first_tolerable(policy, candidates, risks, 0.02)
    np.testing.assert_allclose(action[:, 0], [0.9, 0.1, 0.5, 0.5])  # last: 0.42 is within the slack of 0.4
    np.testing.assert_allclose(said["risk"], [0.0, 0.015, 0.4, 0.42])
    assert said["stepped_in"].tolist() == [False, True, True, True]
    np.testing.assert_allclose(said["proposal"], candidates[:, 0])


def test_curiosity_is_for_a_guard():
    with pytest.raises(UserError, match=r"curiosity 0\.5 is for a guard: leave it out, or give net\.guard"):
        ScaredConfig(curiosity=0.5)
    with pytest.raises(UserError, match=r"curiosity must be a finite number ≥ 0\.0, got -1"):
        ScaredConfig(curiosity=-1, net=NetConfig(guard=1))


def test_switched_off_the_guard_changes_nothing():
    net = random_weights(functools.partial(PolicyNet, NetConfig(width=16, heads=2, layers=1, guard=1), ROOM.spec))
    bare = eqx.tree_at(lambda n: n.guard, net, None, is_leaf=lambda x: x is None)

    @eqx.filter_jit
    def play(agent):
        tasks, budgets = sample_queue(ROOM, "train", ROOM.train_budget, (8, 1), jax.random.key(0))
        return run_trials(ROOM, agent, tasks, budgets, jax.random.key(1), episodes=2, steps=12)

    off, without = (play(InContextAgent(n)) for n in (net, bare))
    np.testing.assert_array_equal(off.action, without.action)


# -- in use


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A released policy of random weights whose guard is strict, with its file."""
    config = NetConfig(width=16, heads=2, layers=1, context=12, guard=1, dtype="float32")
    net = random_weights(functools.partial(PolicyNet, config, ROOM.spec), scale=3.0)
    net = eqx.tree_at(lambda n: n.actor.second.weight, net, replace_fn=lambda x: 0.05 * x)
    net = eqx.tree_at(lambda n: n.guard.head.second.weight, net, replace_fn=lambda x: 9 * x)
    path = tmp_path_factory.mktemp("policy") / "guarded.safetensors"
    card = {"kind": "net", "net": dataclasses.asdict(config), "env": env_to_plain(ROOM), "risk": 0.2}
    save_policy(path, InContextAgent(net), card)
    return path


def play(policy, steps: int = 8, **options) -> list:
    """Walk through the start cell's neighbours with nothing left of the budget; returns the reports."""
    policy.start(budget=0, **options)
    cells = [(1, 1), (1, 2), (2, 2), (2, 1), (1, 1), (0, 1), (0, 0), (1, 0)]
    policy.act(cells[0])
    reports = [policy.guard]
    for cell in cells[1:steps]:
        policy.act(cell, reward=0, cost=1)
        reports.append(policy.guard)
    return reports


def test_a_policy_says_what_its_guard_did(guarded):
    policy = load_policy(guarded)
    assert policy.card["guard"] == "risk 0.2"
    assert policy.guard is None
    reports = play(policy)
    assert [report.steps for report in reports] == list(range(1, 9))
    assert reports[-1].interventions == sum(report.stepped_in for report in reports) > 0
    assert all(0 <= report.risk <= 1 for report in reports)
    batched = load_policy(guarded)
    batched.start(budget=[0, 2])
    batched.act([(1, 1), (1, 1)])
    assert batched.guard.risk.shape == (2,)
    assert batched.guard.risk[1] == 0  # nothing can break a budget of 2 in one step
    strict, lenient = (sum(r.stepped_in for r in play(policy, risk=risk)) for risk in (0.001, 0.999))
    assert strict >= reports[-1].interventions >= lenient
    assert strict > lenient


@pytest.mark.parametrize(("env", "levels"), [(ROOM, 0), (SafeDarkPoint(), 3), (SafeDarkPoint(), 0)])
def test_what_leaves_a_compiled_step_is_what_the_agent_chose(env, levels):
    """The actions and what the guard said share one array, and come apart again."""
    config = NetConfig(width=16, heads=2, layers=1, context=12, levels=levels, guard=1, dtype="float32")
    agent = InContextAgent(random_weights(functools.partial(PolicyNet, config, env.spec), scale=3.0), risk=0.3)
    token = running.first_tokens(env, env.spec.observation.zeros((5,)), jnp.arange(5.0))
    key, memory = jax.random.key(4), running.remember(agent, 5, 12)
    _, action, extras = eqx.filter_jit(InContextAgent.act)(agent, memory, token, jax.random.split(key)[1])
    made = running.for_trial(agent)["ready"]
    _, _, chosen, said = running.take_step((made, token, key), memory)
    assert (chosen.dtype, chosen.shape) == (env.spec.action.dtype, (5, *env.spec.action.shape))
    np.testing.assert_allclose(chosen, action, atol=1e-5)
    np.testing.assert_allclose(said, np.stack([extras["risk"], extras["stepped_in"]], -1), atol=1e-5)
    assert len(np.unique(chosen)) > 1


def test_the_guard_is_off_by_one_switch(guarded):
    policy = load_policy(guarded)
    assert play(policy, guard=False) == [None] * 8
    assert play(policy, guard=np.False_) == [None] * 8
    for option in ("guard", "greedy", "settle"):
        with pytest.raises(UserError, match=f"^{option} must be true or false, got 'no'$"):
            load_policy(guarded, **{option: "no"})
    off = load_policy(guarded, guard=False)
    assert off.card["guard"] == "off"
    assert play(off) == [None] * 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"risk": 0}, "risk must be a number between 0 and 1, both excluded, got 0"),
        ({"risk": 1.0}, r"both excluded, got 1\.0"),
        ({"risk": 0.1, "guard": False}, r"a guard that is off has no risk: leave out risk 0\.1"),
    ],
)
def test_wrong_options_of_a_guard(guarded, options, message):
    with pytest.raises(UserError, match=message):
        load_policy(guarded).start(budget=1, **options)


def test_a_guard_that_is_off_stays_off(guarded):
    policy = load_policy(guarded)
    policy.start(budget=1, guard=False)
    with pytest.raises(UserError, match=r"the guard is off in this trial: leave out risk 0\.1"):
        policy.change(risk=0.1)
    with pytest.raises(UserError, match="guard=True, but the guard of this policy is off"):
        load_policy(guarded, guard=False).start(budget=1, guard=True)
    with pytest.raises(UserError, match="has a guard, with which it was trained: replace=True"):
        add_guard(guarded, guarded.with_name("other"), GuardFitConfig())


def test_a_policy_without_a_guard_has_no_risk():
    policy = load_policy("safe-dark-room")
    with pytest.raises(UserError, match=r"^guard=True, but this policy has no guard$"):
        policy.start(budget=1, guard=True)
    with pytest.raises(UserError, match=r"this policy has no guard: leave out risk 0\.1"):
        policy.start(budget=1, risk=0.1)
    with pytest.raises(UserError, match="has no guard: leave out switching it off"):
        load_policy("safe-dark-room", guard=False)


def test_evaluate_takes_a_risk_or_switches_the_guard_off(guarded, tmp_path, capsys):
    assert main(["evaluate", str(guarded), "--tasks", "4", "--risk", "0.01", "--out", str(tmp_path / "found")]) == 0
    assert "guard risk 0.01" in capsys.readouterr().out
    found = load_results(tmp_path / "found")
    assert found.meta["guard"] == "risk 0.01"
    assert 0 < found.meta["guard_stepped_in"] < 1
    assert safety([found]).stepped_in == found.meta["guard_stepped_in"]
    assert released(str(guarded), guard=False).meta["guard"] == "off"
    assert released(str(guarded)).meta["guard"] == "risk 0.2"
    assert main(["evaluate", str(guarded), "--risk", "2"]) == 2
    assert capsys.readouterr().err.endswith("risk must be a number between 0 and 1, both excluded, got 2.0\n")
    assert main(["evaluate", str(guarded), "--no-guard", "--risk", "0.1"]) == 2
    assert "a guard that is off has no risk" in capsys.readouterr().err
    assert main(["evaluate", "--agent", "random", "--no-guard"]) == 2
    assert "the random agent has no guard" in capsys.readouterr().err


# -- fitted to a frozen policy


def test_a_guard_is_fitted_to_a_policy_that_has_none(tmp_path, capsys, monkeypatch):
    """It learns how often steps cost, the policy stays what it was, and the card says what was done."""
    config = NetConfig(width=16, heads=2, layers=1, context=12, dtype="float32")
    net = random_weights(functools.partial(PolicyNet, config, ROOM.spec))
    card = {
        "kind": "net", "net": dataclasses.asdict(config), "env": env_to_plain(ROOM), "evaluation": {"of": "old"},
        "temperature": 0.9,
    }  # fmt: skip
    save_policy(tmp_path / "bare.safetensors", InContextAgent(net), card)
    bare, out = str(tmp_path / "bare"), str(tmp_path / "guarded")
    sizes = ["--depth", "2", "--risk", "0.1", "--rounds", "10", "--rows", "16", "--updates", "40"]
    assert main(["fit-guard", bare, "--out", out, *sizes, "--learning-rate", "0.01"]) == 0
    first, *_, last = re.findall(r"chance of ([\d.]+) \(observed ([\d.]+)\)", capsys.readouterr().out)
    assert abs(float(first[0]) - 0.5) < 0.1  # it knows nothing
    assert abs(float(last[0]) - float(last[1])) < 0.1  # another 16 rows than it has learned from
    policy = load_policy(out)
    assert (policy.card["guard"], policy.card["guard_fit"]["rounds"]) == ("risk 0.1", 10)
    assert "evaluation" not in policy.card
    # what it plays for the fit is what it plays in use, and its results are told apart
    assert policy.card["guard_fit"]["temperature"] == policy.card["temperature"] == 0.9
    assert policy.card["name"] == "bare with a fitted guard"
    ours, theirs = (jax.tree.leaves(eqx.filter((n.trunk, n.actor), eqx.is_array)) for n in (net, policy.agent.net))
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    # Ctrl-C in the third round: the round is played, and what was learned so far is written
    learn, calls = guard_fit._learn, []

    def interrupted(*given, **options):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return learn(*given, **options)

    monkeypatch.setattr(guard_fit, "_learn", interrupted)
    short = str(tmp_path / "short")
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins deaf to it
    try:
        assert main(["fit-guard", bare, "--out", short, *sizes]) == 130
    finally:
        signal.signal(signal.SIGINT, heard)
    assert "stopped on request after round 3 of 10\nwrote " in capsys.readouterr().out
    fit = load_policy(short).card["guard_fit"]
    assert (fit["rounds"], fit["rounds_done"], policy.card["guard_fit"]["rounds_done"], len(calls)) == (
        10,
        3,
        10,
        3,
    )
    assert main(["fit-guard", bare, "--out", out]) == 2
    assert "guarded.safetensors exists" in capsys.readouterr().err
    assert main(["fit-guard", bare, "--out", str(tmp_path / "other"), "--risk", "1"]) == 2
    assert "risk must be a number between 0 and 1" in capsys.readouterr().err


def test_a_guard_of_training_is_replaced_only_if_that_is_asked_for(guarded, tmp_path):
    config = GuardFitConfig(depth=2, ledger=2, rounds=1, rows=4, updates=1, risk=0.3)
    path = add_guard(guarded, tmp_path / "new", config, replace=True)
    again = add_guard(path, tmp_path / "again", config)  # it was fitted: nothing is lost
    old, *new = (load_policy(each) for each in (guarded, path, again))
    for policy in new:
        assert policy.card["limits"] == [REPLACED]
        assert (policy.card["net"]["guard"], policy.card["net"]["guard_ledger"], policy.card["risk"]) == (2, 2, 0.3)
        assert policy.card["name"] == "guarded with a fitted guard"
        arrays = ((x.trunk, x.actor) for x in (old.agent.net, policy.agent.net))
        ours, theirs = (jax.tree.leaves(eqx.filter(each, eqx.is_array)) for each in arrays)
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_fit_sees_other_actions_than_a_greedy_policy_plays():
    """A quarter of the rows coasts now and then, as many steps as the guard looks ahead; the others never do."""
    env = BoundedPush(max_steps=20, episodes=2)
    config = NetConfig(width=8, heads=1, layers=1, context=40, dtype="float32")
    greedy = InContextAgent(random_weights(functools.partial(PolicyNet, config, env.spec)), temperature=0.0)
    play, played = guard_fit._play, []

    def once(env, agent, rows, key):
        data, before = played[0][1:] if played else play(env, agent, rows, key)
        played.append((agent.temperature, data, before))
        return data, before

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard_fit, "_play", once)
        patch.setattr(guard_fit, "_learn", lambda guard, state, *_, **__: (guard, state))
        config = GuardFitConfig(depth=2, rounds=2, rows=8, updates=1)
        guard_fit.fit_guard(env, greedy, config)
        patch.setattr(guard_fit, "_play", lambda *_: (None, {"fault": np.array([0, 0, 0, 1, 1.5])}))
        with pytest.raises(
            UserError, match=r"BoundedPush gave cost 1\.5 \(round 1, .* step 2\): costs must be at most 1"
        ):
            guard_fit.fit_guard(env, greedy, config)
    (first, data, _), (second, *_) = played
    assert (first, second) == (1.0, 0.0)  # sampled, then as it will be used
    coasts = np.asarray(data.taken[..., 0]) == 0
    assert not coasts[2:].any()
    rows = ["".join("x" if c else " " for c in row).rstrip("x") for row in coasts[:2]]  # but for a run that is cut
    lengths = [len(run) for row in rows for run in row.split()]
    assert lengths
    assert all(length % 2 == 0 for length in lengths)


@pytest.mark.parametrize(
    ("action", "levels", "known"), [(Discrete(4), 0, range(4)), (Box(2, -1.0, 3.0), 3, (-1, 1, 3))]
)
def test_a_fit_holds_any_action_of_a_finite_set(action, levels, known):
    """A quarter of the rows, for as many steps as the guard looks ahead; all others play their own action."""
    own = action.zeros((400,)) - 7  # no action at all: every other one is held

    class Still(eqx.Module):
        net: object = eqx.field(static=True)
        init = lambda self, tasks, rows: None  # noqa: E731
        extend = lambda self, memory, steps: memory  # noqa: E731
        act = lambda self, memory, token, key: (memory, own, None)  # noqa: E731

    trunk = SimpleNamespace(spec=SimpleNamespace(action=action), config=SimpleNamespace(levels=levels))
    player = guard_fit._Holding(agent=Still(SimpleNamespace(trunk=trunk)), steps=3)
    memory, taken = player.extend(player.init(None, 400), 1), []
    step = eqx.filter_jit(lambda memory, key: player.act(memory, None, key)[:2])
    for time in range(40):
        memory, chosen = step(memory, jax.random.key(time))
        taken.append(np.asarray(chosen).reshape(400, -1))
    taken = np.stack(taken, 1)  # [row, time, number]
    held = (taken != -7).all(-1)
    assert not held[100:].any()
    every = list(itertools.product(known, repeat=taken.shape[-1]))
    np.testing.assert_allclose(np.unique(taken[held], axis=0), every)
    begins = held & ~np.pad(held, ((0, 0), (1, 0)))[:, :-1]
    for row, time in np.argwhere(begins[:, :37]):
        assert held[row, time : time + 3].all()
        assert (taken[row, time : time + 3] == taken[row, time]).all()
    np.testing.assert_allclose(begins[:100].mean(), 0.05, atol=0.015)
