"""The guard's ledger: what it finds at known places, in rows and step by step, and what a guard learns from it."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import ROOM, ROWS, STEPS, random_rows, random_weights
from probe import BoundedPush, Push

from safeicrl.agents.in_context import InContextAgent
from safeicrl.envs.api import Env
from safeicrl.envs.spaces import Grid
from safeicrl.errors import UserError
from safeicrl.nets.attention import in_sight
from safeicrl.nets.heads import PolicyNet
from safeicrl.nets.ledger import CELL, Ledger
from safeicrl.nets.transformer import NetConfig
from safeicrl.optimisers import guard_fit
from safeicrl.optimisers.guard_fit import GuardFitConfig, fit_guard
from safeicrl.tokens import first_token, next_token

LARGE = dataclasses.replace(ROOM.spec, observation=Grid((4, 400)))
NET = NetConfig(width=8, heads=1, layers=1, context=STEPS, guard=2, guard_ledger=3, dtype="float32")


look_up = eqx.filter_jit(Ledger.look_up)


def network(env: Env = ROOM, **changes) -> PolicyNet:
    """Random weights, but for the ledger's: its points begin close to the agent."""
    net = random_weights(functools.partial(PolicyNet, dataclasses.replace(NET, **changes), env.spec))
    if net.ledger is None:
        return net
    return eqx.tree_at(lambda n: n.guard.ledger, net, Ledger(env.spec, NET.guard_ledger, jax.random.key(0)))


def surveyor() -> Ledger:
    """Looks at the cell it stands on and at the one to the right, and sees nothing of those beside them."""
    ledger = Ledger(ROOM.spec, 2, jax.random.key(0))
    still = jax.tree.map(jnp.zeros_like, ledger.steer)
    points = jnp.array([[0.0, 0.0], [0.0, CELL]])
    return eqx.tree_at(lambda x: (x.steer, x.points, x.widths), ledger, (still, points, jnp.full(2, 5.0)))


def test_it_finds_what_was_paid_where_the_agent_was():
    """A walk: right onto an obstacle, right onto a free cell, back onto the obstacle, and a new episode."""
    ledger, cells = surveyor(), jnp.array([[1, 0], [1, 1], [1, 2], [1, 1], [1, 0]])
    token = first_token(ROOM.spec, cells[0], jnp.float32(3))
    tokens = [token]
    for time, cost in enumerate((1.0, 0.0, 1.0, 0.0), 1):
        step = (cells[time], jnp.int32(4), jnp.float32(0), jnp.float32(cost), jnp.array(time == 4), jnp.float32(3))
        tokens.append(next_token(tokens[-1], *step))
    entries = jnp.stack([ledger.entry(token) for token in tokens], -1)
    seen = jnp.arange(5)
    found = [np.asarray(look_up(ledger, token, entries, seen <= time)) for time, token in enumerate(tokens)]
    count, paid = np.expm1(np.stack(found)[:, :2]), np.stack(found)[:, 2:]
    # The first cell of an episode is no entry: nobody has paid for it.
    np.testing.assert_allclose(count, [[0, 0], [1, 0], [1, 0], [2, 1], [0, 2]], atol=2e-3)
    np.testing.assert_allclose(paid[[1, 2, 3, 4], [0, 0, 0, 1]], [1, 0, 1, 1], atol=2e-3)
    assert paid[3, 1] < 2e-3  # the free cell
    np.testing.assert_allclose(look_up(ledger, tokens[4], entries, seen < 0), 0, atol=1e-6)


@pytest.mark.parametrize("context", [STEPS, 5])
@pytest.mark.parametrize(("env", "levels"), [(ROOM, 0), (BoundedPush(), 3)])
def test_rows_and_single_steps_find_the_same(env, levels, context):
    """Also where the oldest entries are overwritten, and, in the room, where trials end at different times."""
    net, trials = network(env, levels=levels, context=context), random_rows(env)

    @eqx.filter_jit
    def both(net, trials):
        rows = net.watched(net.trunk.forward(trials.token, trials.trial), trials.token, trials.trial)
        cache = net.trunk.extend_cache(net.init_cache(ROWS, 0), context)
        by_time = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), trials.token)

        def step(cache, token):
            cache, _, watched = net.step(cache, token, token.first)
            return cache, watched

        return rows, jnp.swapaxes(jax.lax.scan(step, cache, by_time)[1], 0, 1)

    rows, single = both(net, trials)
    here = np.asarray(trials.valid)
    np.testing.assert_allclose(single[here], rows[here], rtol=1e-3, atol=1e-4)
    assert rows.shape[-1] == 8 + net.ledger.size
    assert np.asarray(rows[here][:, -6:]).std(0).min() > 1e-3  # something was found


def test_in_half_precision_too():
    @eqx.filter_jit
    def all_three(net, trials):
        features = net.trunk.forward(trials.token, trials.trial)
        found = net.ledger.look_up_rows(trials.token, trials.trial, STEPS)
        return features, net.watched(features, trials.token, trials.trial), found

    features, watched, found = all_three(network(dtype="bfloat16"), random_rows())
    assert watched.dtype == features.dtype == jnp.bfloat16
    assert found.dtype == jnp.float32  # places are told apart in full precision
    np.testing.assert_allclose(watched[..., 8:].astype(jnp.float32), found, rtol=0.01, atol=1e-4)


@pytest.mark.parametrize(("env", "levels"), [(ROOM, 0), (BoundedPush(), 3)])
def test_rows_are_looked_up_in_blocks(env, levels, monkeypatch):
    """As many steps as there are, whatever a block holds."""
    ledger, trials = network(env, levels=levels).ledger, random_rows(env)
    found = []
    for block in (STEPS, 5):
        monkeypatch.setattr("safeicrl.nets.ledger.BLOCK", block)
        found.append(jax.jit(lambda t, i: ledger.look_up_rows(t, i, 9))(trials.token, trials.trial))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-4, atol=1e-5)


def test_cells_are_merged_only_where_they_are_few():
    """A grid of many cells, or of more than a row has steps, is looked up among the entries, and finds the same."""
    ledger, trials = network().ledger, random_rows()
    larger = eqx.tree_at(lambda x: x.points, Ledger(LARGE, 3, jax.random.key(0)), ledger.points)
    assert (ledger.cell_count, larger.cell_count) == (16, 0)
    found, merged = [], []
    for each, steps in ((ledger, STEPS), (larger, STEPS), (ledger, 15)):
        look = jax.jit(lambda token, trial, each=each: each.look_up_rows(token, trial, 9))
        rows = jax.tree.map(lambda x: x[:, :steps], (trials.token, trials.trial))  # noqa: B023
        found.append(look(*rows))
        merged.append("cumsum" in look.lower(*rows).as_text())
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[0][:, :15], found[2], rtol=1e-4, atol=1e-5)
    assert merged == [True, False, False]


@pytest.mark.parametrize("settles", [True, False])
def test_a_memory_knows_the_cells_as_its_slots_do(settles):
    """Also where it has been taken back, and where the ring of 10 slots has closed."""
    net = network(context=10)
    agent = InContextAgent(net, trained_episodes=2, settles=settles)

    @eqx.filter_jit
    def look(agent, memory, token, key):
        memory, action, _ = agent.act(memory, token, key)
        cache = memory.cache if settles else memory
        visible = in_sight(cache.entries.shape[-1], cache.age, cache.clock - 1)
        return memory, action, cache.cells, net.ledger._summed(cache.entries, visible)

    memory = agent.extend(agent.init(None, 3), ROOM.spec.trial_steps)
    token = jax.vmap(lambda cell: first_token(ROOM.spec, cell, jnp.float32(1)))(jnp.array([[0, 0], [1, 1], [2, 2]]))
    random, held = np.random.default_rng(0), []
    for step in range(40):
        memory, action, cells, summed = look(agent, memory, token, jax.random.key(step))
        np.testing.assert_array_equal(cells, summed)
        held.append(np.asarray(cells[:, 1].sum(-1)))
        seen = jnp.asarray(random.integers(0, 3, (3, 2)))
        ended = jnp.asarray(random.random(3) < 0.2)
        cost = jnp.asarray(random.integers(0, 2, 3), jnp.float32)
        token = jax.vmap(next_token)(token, seen, action, jnp.zeros(3), cost, ended, jnp.ones(3))
    held = np.stack(held)
    assert held.max() >= 7  # of 10 tokens
    assert (held[1:] < held[:-1] - 1).any() == settles  # taken back


def test_a_guard_with_a_ledger_knows_obstacles_that_the_features_do_not_tell():
    """Of a policy with random weights; without a ledger the guard hardly learns more than how many there are."""
    bare = network(guard=0, guard_ledger=0, context=ROOM.spec.trial_steps)
    loss = {}
    for points in (0, 6):
        rounds = []
        config = GuardFitConfig(depth=1, ledger=points, rounds=4, rows=16, updates=50)
        fitted = fit_guard(ROOM, InContextAgent(bare), config, rounds.append)
        assert (fitted.net.ledger is None) == (points == 0)
        loss[points] = rounds[-1].loss
    assert loss[6] < 0.85 * loss[0]


def test_a_fit_does_not_learn_from_a_span_s_last_step_whose_future_it_does_not_see(monkeypatch):
    """Unless the episode ends there. Another action there changes nothing; at the span's first step it does."""
    monkeypatch.setattr(guard_fit, "SPAN", 4)
    net, trials = network(), random_rows()
    features = net.trunk.forward(trials.token, trials.trial)
    play = guard_fit.Play(
        token=trials.token, trial=trials.trial, features=features, taken=trials.action, cost=trials.cost,
        done=jnp.zeros_like(trials.done), known=jnp.ones_like(trials.valid),
    )  # fmt: skip
    key = jax.random.key(0)
    loss = jax.jit(lambda data: guard_fit._loss(net.guard, data, STEPS, key))
    changes = []
    for step in range(STEPS):
        other = play._replace(taken=play.taken.at[:, step].set((play.taken[:, step] + 1) % 5))
        changes.append(abs(float(loss(other) - loss(play))) > 1e-7)
    assert sum(changes) == 3
    begin = changes.index(True)
    assert all(changes[begin : begin + 3])
    ended = play._replace(done=play.done.at[:, begin + 3].set(True))
    other = ended._replace(taken=ended.taken.at[:, begin + 3].set((ended.taken[:, begin + 3] + 1) % 5))
    assert abs(float(loss(other) - loss(ended))) > 1e-7


def test_a_policy_that_reads_the_ledger_acts_by_it_and_keeps_its_guard():
    net, trials = network(shared_ledger=True), random_rows()
    features = net.trunk.forward(trials.token, trials.trial)
    act = eqx.filter_jit(InContextAgent.act)

    def chosen(net: PolicyNet) -> np.ndarray:
        """What the policy would do in whole rows, which is what it does step by step."""
        in_rows = net.distribution(net.watched(features, trials.token, trials.trial)).mode()
        agent, found = InContextAgent(net, temperature=0.0), []
        memory = agent.extend(agent.init(None, ROWS), STEPS)
        for step in range(STEPS):
            token = jax.tree.map(lambda x: x[:, step], trials.token)  # noqa: B023
            memory, action, _ = act(agent, memory, token, jax.random.key(0))
            found.append(np.asarray(action))
        assert (np.stack(found, 1) == in_rows).mean() > 0.99  # but for ties
        return np.asarray(in_rows)

    elsewhere = eqx.tree_at(lambda n: n.guard.ledger.points, net, replace_fn=lambda x: x + 1)
    assert (chosen(net) != chosen(elsewhere)).mean() > 0.02
    with pytest.raises(
        UserError, match=r"the policy reads the ledger of its guard .*: that guard cannot be replaced"
    ):
        fit_guard(ROOM, InContextAgent(net), GuardFitConfig())


def test_what_no_ledger_can_be_is_one_line():
    with pytest.raises(UserError, match="guard_ledger 3 is for a guard: leave it out, or give guard, its depth"):
        NetConfig(guard_ledger=3)
    with pytest.raises(
        UserError, match="shared_ledger is for a guard's ledger: leave it out, or give guard_ledger"
    ):
        NetConfig(guard=1, shared_ledger=True)
    with pytest.raises(UserError, match="guard_ledger must be"):
        NetConfig(guard=1, guard_ledger=-1)
    with pytest.raises(UserError, match="ledger must be"):
        GuardFitConfig(ledger=-1)


def test_places_of_real_valued_observations_are_of_moderate_size():
    ledger = Ledger(Push().spec, 2, jax.random.key(0))
    seen = np.asarray(ledger.scaled(jnp.array([-1e6, -1.0, 0.0, 1e6])))
    assert np.abs(seen).max() < 15
    assert (np.diff(seen) > 0).all()
