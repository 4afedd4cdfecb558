"""MAML with penalty, and what it shares with SafeMeta: episodes, critics, the trust region, resuming."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from meta_room import ROOM, SIZES, play_by_hand, with_value
from probe import Throw

from safeicrl import load_policy
from safeicrl.agents.api import adapts, with_options
from safeicrl.algos.api import METRICS
from safeicrl.algos.maml_penalty import MamlAdapter, MamlPenalty, MamlPenaltyConfig
from safeicrl.envs.registry import env_to_plain
from safeicrl.envs.spaces import Box
from safeicrl.errors import UserError
from safeicrl.nets.feedforward import Normaliser
from safeicrl.nets.heads import Categorical
from safeicrl.optimisers import episodes
from safeicrl.optimisers.critics import CriticConfig, lbfgs
from safeicrl.optimisers.meta import MetaAgent
from safeicrl.optimisers.trust_region import (
    TrustRegionConfig,
    conjugate_gradient,
    fisher_products,
    trust_region_step,
)
from safeicrl.policies.cards import save_policy

CONFIG = MamlPenaltyConfig(**SIZES)
# Two episodes in the 3×3 room: the first reaches a goal in its second step, the second is cut by the time limit.
PLAYED = play_by_hand(
    [[(1, 1), (1, 2), None], [(1, 1), (1, 0), (1, 1)]],
    [[4, 2, 0], [3, 4, 4]],
    [[0, 1, 0], [0, 0, 0]],
    [[0, 0, 0], [1, 0, 2]],
)


# -- the trust region


def test_conjugate_gradients_solve_a_linear_system():
    rng = np.random.default_rng(0)
    root = rng.normal(size=(6, 6)).astype(np.float32)
    matrix, target = root @ root.T + np.eye(6, dtype=np.float32), rng.normal(size=6).astype(np.float32)
    found = jax.jit(lambda b: conjugate_gradient(lambda v: matrix @ v, b, 10))(target)
    np.testing.assert_allclose(found, np.linalg.solve(matrix, target), rtol=1e-3, atol=1e-4)


def test_a_step_is_the_natural_gradient_and_stays_in_its_region():
    """Divergence ½ xᵀ F x, surrogate g·x: the answer is √(2δ / gᵀF⁻¹g) F⁻¹g."""
    fisher, slope = jnp.diag(jnp.array([1.0, 4.0, 100.0])), jnp.array([1.0, 1.0, 1.0])
    config = TrustRegionConfig(max_kl=0.01, damping=0.0)

    @jax.jit
    def step(slope):
        policy = lambda p: 2 * p["x"]  # noqa: E731
        return trust_region_step(
            {"x": jnp.zeros(3)}, policy, lambda y: slope @ y / 2, lambda y: y @ fisher @ y / 8.004, config
        )

    moved, told = step(slope)
    natural = np.array([1.0, 0.25, 0.01])
    np.testing.assert_allclose(moved["x"], natural * np.sqrt(0.02 / natural.sum()), rtol=2e-3)
    assert float(told["step_size"]) == 1
    assert float(told["step_kl"]) <= 0.01
    still, told = step(jnp.zeros(3))  # nothing to gain
    np.testing.assert_array_equal(still["x"], 0)
    assert float(told["step_size"]) == 0


def test_products_with_the_fisher_matrix_are_those_with_the_hessian_of_the_divergence():
    root = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    policy = lambda x: Categorical(logits=jnp.tanh(root @ x) ** 2 @ root)  # noqa: E731

    @jax.jit
    def both(start, vector):
        divergence = policy(start).divergence
        _, _, product = fisher_products(policy, divergence, start)
        return product(vector), jax.hessian(lambda x: divergence(policy(x)))(start) @ vector

    mine, exact = both(root[0], root[1])
    np.testing.assert_allclose(mine, exact, rtol=1e-4, atol=1e-5)
    assert np.abs(exact).max() > 1e-3


def test_a_step_that_would_do_harm_is_halved():
    """A surrogate that falls again beyond 0.05, in a region that would allow 0.14."""
    config = TrustRegionConfig(max_kl=0.01, damping=0.0)
    peak = lambda x: jnp.sin(x[0] * jnp.pi / 0.1)  # noqa: E731
    far = lambda x: 0.5 * (x**2).sum()  # noqa: E731
    moved, told = jax.jit(lambda x: trust_region_step(x, lambda x: x, peak, far, config))(jnp.zeros(1))
    assert float(told["step_size"]) == 0.5
    assert float(moved[0]) == pytest.approx(0.0707, rel=1e-2)


# -- critics


def test_lbfgs_takes_the_steps_of_another_implementation():
    matrix = jnp.array([[1.0, 2, 0, 0], [2, 10, 0, 0], [0, 0, 100, 0], [0, 0, 0, 3]])
    rest = lambda x: 0.5 * x @ matrix @ x - x @ jnp.arange(1.0, 5.0) + 0.1 * (x**4).sum()  # noqa: E731
    decay = jnp.array([0.0, 0.5, 0.0, 2.0])
    loss = lambda x: rest(x) + (decay * x**2).sum()  # noqa: E731
    theirs, known = jnp.ones(4), optax.scale_by_lbfgs(memory_size=3)
    state = known.init(theirs)
    mine = jax.jit(lambda x: lbfgs(rest, x, steps=5, rate=0.3, memory=3, decay=decay))(theirs)

    @jax.jit
    def other(x, state):
        gradient = jax.grad(loss)(x)
        change, state = known.update(gradient, state, x)
        return change, gradient, state

    for number in range(5):
        change, gradient, state = other(theirs, state)
        if number == 0:
            change = gradient * min(1.0, 1.0 / float(jnp.abs(gradient).sum()))
        theirs = theirs - 0.3 * change
    np.testing.assert_allclose(mine, theirs, rtol=1e-4)


def test_lbfgs_never_ends_higher_than_it_began():
    """Steps of 3 on a function whose curvature changes its sign: most of them overshoot."""
    loss = lambda x: jnp.sin(3 * x).sum() + 0.1 * (x**2).sum()  # noqa: E731
    fit = jax.jit(jax.vmap(lambda x: lbfgs(loss, x, steps=8, rate=3.0, memory=3)))
    start = jax.random.normal(jax.random.key(0), (64, 2)) * 2
    before, after = jax.vmap(loss)(start), jax.vmap(loss)(fit(start))
    assert (after <= before + 1e-5).all()
    assert float((before - after).mean()) > 0.3


@functools.cache
def judge(config: MamlPenaltyConfig, cells: bool):
    """A policy and a compiled `Adapter.estimate` of it; `cells` tells programs with and without the table apart."""
    adapter = MamlAdapter(ROOM.spec, config)
    agent = MetaAgent.build(adapter, jax.random.key(0))
    go = lambda critics, budget, rate: adapter.estimate(  # noqa: E731
        agent.actor, critics, PLAYED, PLAYED, budget, None, rate
    )[1]
    return agent, jax.jit(go)


def estimated(config: MamlPenaltyConfig, budget: float = 1.0, rate: float = 0.0) -> tuple:
    """The policy and its batch, judged by critics that say ½ (reward) and 1 (cost) everywhere, before their fit."""
    agent, go = judge(config, episodes.TABLE > 0)
    return agent.actor, go(with_value(agent.critics, [0.5, 1.0]), jnp.float32(budget), jnp.float32(rate))


def test_advantages_end_with_the_episode_and_are_centred():
    """γ = λ = ½, so a step's error counts a quarter one step earlier. A time limit is an end like any other."""
    config = dataclasses.replace(CONFIG, discount=0.5, trace=0.5)
    _, batch = estimated(config)
    # reward errors: 0 + ½·½ − ½ | 1 − ½  and  −¼, −¼, −½; cost errors: −½ | −1  and  1 + ½ − 1, −½, 2 − 1
    reward = {(1, 1, 4): -0.25 + 0.25 * 0.5, (1, 2, 2): 0.5}
    reward |= {(1, 1, 3): -0.25 + 0.25 * (-0.25 - 0.125), (1, 0, 4): -0.25 - 0.125, "last": -0.5}
    cost = {(1, 1, 4): -0.5 - 0.25, (1, 2, 2): -1.0}
    cost |= {(1, 1, 3): 0.5 + 0.25 * (-0.5 + 0.25), (1, 0, 4): -0.5 + 0.25, "last": 1.0}
    for found, steps in ((batch.reward, reward), (batch.cost, cost)):
        mean, expected = np.mean(list(steps.values())), np.zeros((9, 5))
        for step, value in steps.items():
            row, column, action = (1, 1, 4) if step == "last" else step  # the same cell and action twice
            expected[3 * row + column, action] += (value - mean) / 5
        np.testing.assert_allclose(found, expected, atol=1e-4)
    np.testing.assert_allclose(batch.points.weight[np.array([3, 4, 5])], [0.2, 0.6, 0.2], atol=1e-6)
    assert float(batch.mean_cost) == 1.5
    assert float(batch.mean_length) == 2.5


def test_looking_at_cells_is_looking_at_steps(monkeypatch):
    adapter = MamlAdapter(ROOM.spec, CONFIG)
    actor, cells = estimated(CONFIG, rate=0.1)
    adapted, _ = jax.jit(adapter.adapt)(actor, cells, jnp.float32(1.0))
    monkeypatch.setattr(episodes, "TABLE", 0)
    _, steps = estimated(CONFIG, rate=0.1)
    assert steps.points.action is not None
    assert cells.points.action is None
    others, _ = jax.jit(adapter.adapt)(actor, steps, jnp.float32(1.0))
    for a, b in zip(jax.tree.leaves(adapted), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_a_normaliser_leaves_out_what_came_after_the_end():
    seen = jnp.array([[1.0, 3.0, 99.0], [5.0, 99.0, 99.0]])[..., None]
    valid = jnp.array([[True, True, False], [True, False, False]])
    new = Normaliser.start(1).update_where(seen, valid)
    assert float(new.count) == 3
    assert float(new.mean[0]) == pytest.approx(3.0)
    assert float(new.variance[0]) == pytest.approx(np.var([1, 3, 5]))


# -- the inner step


def test_the_inner_step_is_one_of_policy_gradient_on_standardised_advantages():
    adapter = MamlAdapter(ROOM.spec, dataclasses.replace(CONFIG, weight=2.0, rate=0.05))
    actor, batch = estimated(CONFIG)
    adapted, _ = jax.jit(adapter.adapt)(actor, batch, jnp.float32(1.0))
    mixed = batch.reward - 2.0 * batch.cost
    spread = np.sqrt(np.array([1, -2]) @ np.asarray(batch.covariance) @ np.array([1, -2]))
    gradient = jax.grad(lambda a: (mixed * jax.nn.log_softmax(a(batch.points.inputs).logits)).sum() / spread)(actor)
    moved = jax.tree.map(lambda new, old: (new - old) / 0.05, adapted, actor)
    for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)


def test_the_budget_enters_nowhere_but_in_the_extension():
    batches = [estimated(CONFIG, budget=budget)[1] for budget in (0.0, 3.0)]
    np.testing.assert_array_equal(batches[0].cost, batches[1].cost)
    excess = dataclasses.replace(CONFIG, penalty="excess")
    adapter, (_, tight) = MamlAdapter(ROOM.spec, excess), estimated(excess, budget=0.0)
    np.testing.assert_allclose(tight.cost, batches[0].cost, atol=1e-6)  # nothing is allowed: all cost counts
    assert np.abs(estimated(excess, budget=2.0)[1].cost - tight.cost).max() > 1e-3
    np.testing.assert_allclose(adapter.cost(PLAYED, jnp.float32(2.0)), [[0, 0, 0], [0, 0, 1]])
    np.testing.assert_allclose(adapter.cost(PLAYED, jnp.float32(0.5)), [[0, 0, 0], [0.5, 0, 2]])


def test_the_second_order_looks_through_the_inner_step():
    """d/dφ of a function of the adapted policy, against finite differences along a random direction."""
    adapter = MamlAdapter(ROOM.spec, dataclasses.replace(CONFIG, rate=0.5))
    actor, batch = estimated(CONFIG)
    flat, unflatten = jax.flatten_util.ravel_pytree(actor)
    target = jax.random.normal(jax.random.key(1), (9, 5))

    @jax.jit
    def judged(x, second):
        start = unflatten(x)
        adapted = adapter.adapt(start, batch, jnp.float32(1.0))[0]
        shift = jax.tree.map(lambda a, b: jax.lax.stop_gradient(a - b), adapted, start)
        other = jax.tree.map(jnp.add, start, shift)
        pick = jax.tree.map(lambda a, b: jnp.where(second, a, b), adapted, other)
        return (target * jax.nn.softmax(pick(batch.points.inputs).logits)).sum()

    along = jax.random.normal(jax.random.key(2), flat.shape)
    along = along / jnp.linalg.norm(along)
    numeric = (judged(flat + 0.02 * along, True) - judged(flat - 0.02 * along, True)) / 0.04
    slope = jax.jit(jax.grad(judged))
    exact, first = (float(slope(flat, second) @ along) for second in (True, False))
    assert exact == pytest.approx(float(numeric), rel=0.03)
    assert abs(first - float(numeric)) > 2 * abs(exact - float(numeric))


# -- the trainer and the user


def test_a_meta_iteration_with_continuous_actions():
    algorithm = MamlPenalty(Throw(), CONFIG)
    _, metrics = jax.jit(algorithm.update)(algorithm.init(jax.random.key(0)))
    assert all(np.isfinite(x).all() for x in metrics.values())
    assert float(metrics["lambda"]) == 1.0
    assert float(metrics["step_kl"]) <= CONFIG.trust.max_kl
    assert int(metrics["env_steps"]) == 3 * 4 * 4


def test_seeds_learn_side_by_side():
    """Traced and not compiled: what vmap and the second order need is that every operation has its rule."""
    algorithm = MamlPenalty(ROOM, dataclasses.replace(CONFIG, order=2))
    states = jax.eval_shape(jax.vmap(algorithm.init), jax.random.split(jax.random.key(0), 2))
    new, metrics = jax.eval_shape(jax.vmap(algorithm.update), states)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new) == jax.tree.map(lambda x: (x.shape, x.dtype), states)
    assert all(x.shape[0] == 2 for x in metrics.values())
    assert set(METRICS) <= set(metrics)


def test_a_policy_is_rebuilt_from_its_card(tmp_path):
    algorithm = MamlPenalty(ROOM, dataclasses.replace(CONFIG, order=2, updates=1))
    agent = algorithm.agent(algorithm.init(jax.random.key(0)))
    card = {**algorithm.card(), "env": env_to_plain(ROOM)}
    save_policy(tmp_path / "mine.safetensors", agent, card)
    loaded = load_policy(tmp_path / "mine").agent
    assert loaded.adapter == algorithm.adapter
    assert loaded.updates == 1
    for a, b in zip(jax.tree.leaves(agent), jax.tree.leaves(loaded), strict=True):
        np.testing.assert_array_equal(a, b)


def test_wiped_it_is_its_own_start():
    agent = MamlPenalty(ROOM, CONFIG).agent(MamlPenalty(ROOM, CONFIG).init(jax.random.key(0)))
    wiped, how = with_options(ROOM, agent, wipe=True)
    assert adapts(agent)
    assert not adapts(wiped)
    assert how["context"] == "wiped at every episode"


@dataclasses.dataclass(frozen=True)
class WideThrow(Throw):
    """Throws up to 2."""

    @property
    def spec(self):
        return dataclasses.replace(super().spec, action=Box(1, -2.0, 2.0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MamlPenaltyConfig(order=3), "order must be 1 or 2, got 3"),
        (lambda: MamlPenaltyConfig(penalty="budget"), "penalty must be cost or excess, got 'budget'"),
        (lambda: MamlPenaltyConfig(weight=-1.0), "weight must be a finite number ≥ 0"),
        (lambda: MamlPenaltyConfig(tasks=0), "tasks must be an integer ≥ 1, got 0"),
        (lambda: CriticConfig(rates=(0.1,)), r"rates must be two numbers, got \(0.1,\)"),
        (lambda: TrustRegionConfig(max_kl=0.0), "max_kl must be a finite number > 0"),
        (lambda: MamlPenalty(WideThrow(), CONFIG), r"maml-penalty needs real-valued actions in \[-1, 1\]"),
    ],
)
def test_settings_that_cannot_be(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_a_set_of_tasks_is_the_same_in_every_iteration():
    algorithm = MamlPenalty(ROOM, dataclasses.replace(CONFIG, task_set=3))
    draw = jax.jit(lambda key: algorithm.draw(key)[0].goal)
    first, second = (np.sort(draw(jax.random.key(seed))) for seed in (0, 1))
    np.testing.assert_array_equal(first, second)  # all three, in any order
    fresh = jax.jit(lambda key: MamlPenalty(ROOM, dataclasses.replace(CONFIG, tasks=8)).draw(key)[0].goal)
    assert not np.array_equal(fresh(jax.random.key(0)), fresh(jax.random.key(1)))
