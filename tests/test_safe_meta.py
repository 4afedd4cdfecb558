"""SafeMeta: its adaptation against general solvers and exact CMDPs, its meta-gradient, its switch, its use."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from meta_room import OPTIONS, ROOM, SIZES, spread_over
from probe import Throw

from safeicrl import load_policy, load_results
from safeicrl.algos import safe_meta
from safeicrl.algos.api import METRICS
from safeicrl.algos.safe_meta import Problem, SafeAdapter, SafeMeta, SafeMetaConfig, SafeStepConfig
from safeicrl.cli import main
from safeicrl.envs.api import replace
from safeicrl.errors import UserError
from safeicrl.evaluation.evaluate import evaluate
from safeicrl.log import read_metrics
from safeicrl.nets.feedforward import Actor
from safeicrl.nets.heads import TanhNormal
from safeicrl.optimisers.episodes import Points, play
from safeicrl.optimisers.meta import Batch, Iteration, MetaAgent
from safeicrl.policies import checkpoint

CONFIG = SafeMetaConfig(**SIZES, inner=SafeStepConfig(steps=5))
CLOSED = dataclasses.replace(CONFIG, inner=SafeStepConfig(form="closed-form"))


def problem(seed: int, slack: float, cost_weight: float = 0.1, states: int = 3, actions: int = 3) -> Problem:
    rng = np.random.default_rng(seed)
    prior = np.log(rng.dirichlet(np.ones(actions), states))
    reward, noise = rng.normal(size=(2, states, actions))
    cost = 0.8 * reward + 0.6 * noise  # what pays costs, too: otherwise no budget would bind
    # advantages of the prior: their mean over its actions is 0
    reward, cost = (x - (np.exp(prior) * x).sum(1, keepdims=True) for x in (reward, cost))
    numbers = {"log_prior": prior, "weight": rng.dirichlet(np.ones(states)), "reward": reward, "cost": cost}
    return Problem(
        **{name: jnp.asarray(x, jnp.float32) for name, x in numbers.items()},
        slack=jnp.float32(slack), reward_weight=0.7, cost_weight=cost_weight,
    )  # fmt: skip


@jax.jit
def solved(given: Problem) -> tuple:
    dual = given.solve(50.0)
    return dual, jax.nn.softmax(given.policy(dual).logits), given.dual_slope(dual)


# -- the adaptation problem


def test_the_slope_of_the_dual_is_that_of_finite_differences():
    @jax.jit
    def both(given: Problem, duals: jax.Array) -> tuple:
        return jax.vmap(given.dual_value)(duals), jax.vmap(given.dual_slope)(duals)

    duals = jnp.linspace(0.2, 3.0, 57)  # 0.05 apart
    values, slopes = both(problem(0, slack=-0.1), duals)
    numeric = (values[2:] - values[:-2]) / 0.1
    np.testing.assert_allclose(slopes[1:-1], numeric, atol=2e-3)
    assert (jnp.diff(slopes) > 0).all()  # convex
    assert float(slopes[0]) < -0.01 < 0.01 < float(slopes[-1])  # the check has something to see


@pytest.mark.parametrize(("seed", "slack"), [(2, -0.05), (3, 0.02), (5, -0.1), (4, 5.0)])
def test_the_closed_form_is_what_a_general_solver_finds(seed, slack):
    """SLSQP on all probabilities at once: maximise E[A] − λ KL with the constraint as it is written."""
    given = problem(seed, slack)
    prior, weight = np.exp(np.asarray(given.log_prior, float)), np.asarray(given.weight, float)
    reward, cost = np.asarray(given.reward, float), np.asarray(given.cost, float)
    mean = lambda pi, x: (weight[:, None] * pi * x).sum()  # noqa: E731
    kl = lambda pi: mean(pi, np.log(np.maximum(pi, 1e-12) / prior))  # noqa: E731
    shaped = lambda f: lambda x: f(x.reshape(prior.shape))  # noqa: E731
    left = shaped(lambda pi: slack - mean(pi, cost) - 0.1 * kl(pi))
    found = scipy.optimize.minimize(
        shaped(lambda pi: 0.7 * kl(pi) - mean(pi, reward)), prior.ravel(), method="SLSQP",
        bounds=[(1e-9, 1.0)] * prior.size, options={"maxiter": 500, "ftol": 1e-12},
        constraints=[{"type": "ineq", "fun": left}, {"type": "eq", "fun": shaped(lambda pi: pi.sum(1) - 1)}],
    )  # fmt: skip
    assert found.success, found.message
    dual, policy, slope = solved(given)
    np.testing.assert_allclose(policy, found.x.reshape(prior.shape), atol=2e-3)
    if slack > 1:  # the budget does not bind
        assert float(dual) == 0
    else:
        assert float(dual) > 0
        assert abs(float(slope)) < 1e-4  # all of the budget is used


def test_a_budget_that_nobody_can_keep_takes_the_largest_dual():
    assert float(solved(problem(1, slack=-20.0))[0]) == 50.0


@pytest.mark.parametrize("seed", range(4))
def test_with_exact_critics_the_adapted_cost_respects_the_limit(seed):
    """A random CMDP, everything computed exactly: states 4, actions 3, γ 0.8."""
    rng, gamma = np.random.default_rng(seed), 0.8
    moves, start = rng.dirichlet(np.ones(4), (4, 3)), rng.dirichlet(np.ones(4))
    rewards, costs = rng.uniform(size=(2, 4, 3))
    prior = rng.dirichlet(3 * np.ones(3), 4)

    def exact(policy: np.ndarray, signal: np.ndarray) -> tuple:
        """J, the advantages, and the share of time in each state."""
        chain = np.einsum("sa,sat->st", policy, moves)
        value = np.linalg.solve(np.eye(4) - gamma * chain, (policy * signal).sum(1))
        visits = (1 - gamma) * np.linalg.solve(np.eye(4) - gamma * chain.T, start)
        return start @ value, signal + gamma * moves @ value - value[:, None], visits

    _, advantage, visits = exact(prior, rewards)
    before, cost_advantage, _ = exact(prior, costs)
    for limit in (before - 0.3, before - 0.1, before + 0.05):
        given = Problem(
            log_prior=jnp.asarray(np.log(prior), jnp.float32), weight=jnp.asarray(visits, jnp.float32),
            reward=jnp.asarray(advantage, jnp.float32), cost=jnp.asarray(cost_advantage, jnp.float32),
            slack=jnp.float32((1 - gamma) * (limit - before)), reward_weight=0.1, cost_weight=0.2,
        )  # fmt: skip
        dual, policy, _ = solved(given)
        after, reward_after = (
            exact(np.asarray(policy, float), costs)[0],
            exact(np.asarray(policy, float), rewards)[0],
        )
        assert float(dual) < 50
        assert after <= limit + 1e-4
        if limit > before:
            assert reward_after > exact(prior, rewards)[0] + 0.01


# -- adaptation from episodes

CELLS = np.concatenate(
    [np.eye(3, dtype=np.float32)[x] for x in ROOM.spec.observation.cells().T], -1
)  # [cell, input]


def build(adapter: SafeAdapter, seed: int = 0) -> MetaAgent:
    """In one program instead of one for each array."""
    return eqx.filter_jit(MetaAgent.build)(adapter, jax.random.key(seed))


GOOD, BAD = 4, 3  # right pays, left costs


def bandit(config: SafeMetaConfig) -> tuple[SafeAdapter, Actor, Batch]:
    """One-step episodes in the middle cell, each action equally often: right pays 1, left costs 1."""
    adapter = SafeAdapter(ROOM.spec, config)
    actor = adapter.begin(build(adapter).actor)
    inputs = CELLS
    points = Points(inputs=inputs, weight=jax.nn.one_hot(4, 9), action=None, place=jnp.full((5, 1), 4))
    prior = actor(inputs)
    at = lambda action: jnp.zeros((9, 5)).at[4].set(0.2 * (jax.nn.one_hot(action, 5) - 0.2))  # noqa: E731
    batch = Batch(
        points=points, prior=prior, log_prior=points.log_prob(prior), reward=at(GOOD), cost=at(BAD),
        tried=jnp.zeros((9, 5)).at[4].set(0.2), covariance=jnp.eye(2), mean_cost=jnp.float32(0.2),
        mean_length=jnp.float32(1.0), critic_loss=jnp.zeros(2),
    )  # fmt: skip
    return adapter, actor, batch


@pytest.mark.parametrize("config", [CONFIG, CLOSED], ids=["fit", "closed-form"])
def test_adaptation_seeks_reward_and_sheds_cost_only_where_the_budget_asks_for_it(config):
    config = dataclasses.replace(config, inner=dataclasses.replace(config.inner, steps=60, rate=0.01))
    adapter, actor, batch = bandit(config)

    @jax.jit
    def adapted(budget):
        new, told = adapter.adapt(actor, batch, budget)
        return jax.nn.softmax(new(batch.points.inputs).logits)[4], told["lambda"]

    loose, dual = adapted(jnp.float32(1.0))
    assert float(dual) == 0
    assert float(loose[GOOD]) > 0.3 > 0.21 > float(loose[BAD])
    tight, dual = adapted(jnp.float32(0.1))
    assert float(dual) > 0
    assert float(tight[BAD]) < 0.8 * float(loose[BAD])
    if config.inner.form == "closed-form":  # π_u ∝ exp(A), and A is 0.8 for the goal, −0.2 elsewhere
        np.testing.assert_allclose(loose[GOOD] / loose[0], np.e, rtol=0.03)


def test_a_gaussian_is_fitted_towards_what_pays():
    """The prior is N(0, σ²) and A = −(x − ½)²: the solution of (1) at λ = 1 is a Gaussian, too, known exactly."""
    config = dataclasses.replace(CONFIG, inner=SafeStepConfig(steps=150, rate=0.01))
    adapter = SafeAdapter(Throw().spec, config)
    actor = replace(build(adapter).actor, log_std=jnp.array([-1.5]))
    number = 4000
    x = np.exp(-1.5) * np.random.default_rng(0).normal(size=(number, 1)).astype(np.float32)
    prior = TanhNormal(mean=jnp.zeros((number, 1)), log_std=jnp.full((number, 1), -1.5))
    gain = -((x[:, 0] - 0.5) ** 2)
    points = Points(
        inputs=jnp.zeros((number, 1)), weight=jnp.full(number, 1 / number), action=jnp.tanh(x),
        place=jnp.arange(number)[None],
    )  # fmt: skip
    batch = Batch(
        points=points, prior=prior, log_prior=points.log_prob(prior), cost=jnp.zeros(number),
        tried=points.weight, covariance=jnp.eye(2), mean_cost=jnp.float32(0),
        mean_length=jnp.float32(1), critic_loss=jnp.zeros(2), reward=jnp.asarray((gain - gain.mean()) / number),
    )  # fmt: skip
    new, _ = jax.jit(adapter.adapt)(actor, batch, jnp.float32(1.0))
    # exp(−x²/2σ² − (x − ½)²), σ = e^−1.5: precision 1/σ² + 2, mean 1 / precision
    precision = np.exp(3) + 2
    policy = new(jnp.zeros((1, 1)))
    assert float(policy.mean[0, 0]) == pytest.approx(1 / precision, abs=0.012)
    assert float(policy.log_std[0, 0]) == pytest.approx(-0.5 * np.log(precision), abs=0.03)
    assert float(policy.log_std[0, 0]) < -1.52  # it moved


# -- the meta-gradient and the switch


def captured(monkeypatch, config, found: Iteration, actor: Actor):
    """What `improve` hands to the trust-region step."""
    kept = {}

    def keep(actor, policy, surrogate, divergence, config):
        kept.update(surrogate=lambda actor: surrogate(policy(actor)))
        return actor, {}

    monkeypatch.setattr(safe_meta, "trust_region_step", keep)
    _, told = SafeMeta(ROOM, config).improve(actor, found)
    return kept["surrogate"], float(told["feasible"])


def iteration(agent: MetaAgent, budget: float, seed: int = 0) -> Iteration:
    """Two tasks with made-up numbers in every cell and action."""
    rng = np.random.default_rng(seed)
    actors = jax.jit(lambda actor: spread_over(2, agent.adapter.begin(actor)))(agent.actor)
    prior = jax.jit(jax.vmap(lambda a: a(CELLS)))(actors)

    def batch(mean_cost: float) -> Batch:
        weight = jnp.asarray(rng.dirichlet(np.ones(9), 2), jnp.float32)
        points = Points(
            inputs=jnp.stack([CELLS, CELLS]), weight=weight, action=None, place=jnp.zeros((2, 1, 1), jnp.int32)
        )
        signal = jnp.asarray(rng.normal(size=(2, 2, 9, 5)), jnp.float32)
        return Batch(
            points=points, prior=prior, log_prior=jax.nn.log_softmax(prior.logits), reward=signal[0],
            cost=signal[1], tried=jnp.ones((2, 9, 5)), covariance=spread_over(2, jnp.eye(2)),
            mean_cost=jnp.full(2, mean_cost), mean_length=jnp.full(2, 5.0), critic_loss=jnp.zeros((2, 2)),
        )  # fmt: skip

    return Iteration(actors=actors, before=batch(2.0), after=batch(1.0), budgets=jnp.full(2, budget))


def test_the_step_follows_the_reward_while_feasible_and_lowers_the_cost_otherwise(monkeypatch):
    agent = build(SafeAdapter(ROOM.spec, CONFIG))
    log_prob = lambda a: jax.nn.log_softmax(a(CELLS).logits)  # noqa: E731
    slope = jax.jit(jax.grad(lambda a, s: (s.mean(0) * log_prob(a)).sum()))
    for budget, feasible in ((2.5, 1.0), (1.5, 0.0)):
        found = iteration(agent, budget)
        surrogate, switch = captured(monkeypatch, CONFIG, found, agent.actor)
        assert switch == feasible
        signal = found.after.reward if feasible else -found.before.cost
        # at the start, the slope of the surrogate is the mean over tasks of E[∇ log π_φ A]
        expected, mine = slope(agent.actor, signal), jax.jit(jax.grad(surrogate))(agent.actor)
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_the_meta_gradient_without_hessians_is_the_gradient_of_the_adapted_return(monkeypatch):
    """One step from each cell, known rewards, a fixed tilt: then J(π_u) is a plain function of φ."""
    agent = build(SafeAdapter(ROOM.spec, CLOSED), seed=3)
    found = iteration(agent, budget=9.0)
    inputs, rng = found.after.points.inputs[0], np.random.default_rng(5)
    tilt, rewards = (jnp.asarray(rng.normal(size=(9, 5)), jnp.float32) for _ in range(2))
    weight = jnp.full(9, 1 / 9)

    def adapted_return(actor: Actor) -> jax.Array:
        return (weight[:, None] * jax.nn.softmax(actor(inputs).logits + tilt) * rewards).sum()

    policy = jax.nn.softmax(agent.actor(inputs).logits + tilt)
    advantage = rewards - (policy * rewards).sum(1, keepdims=True)
    signal = jnp.broadcast_to(weight[:, None] * policy * advantage, (2, 9, 5))
    found = replace(found, after=replace(found.after, reward=signal))
    surrogate, _ = captured(monkeypatch, CLOSED, found, agent.actor)
    mine, exact = (jax.jit(jax.grad(f))(agent.actor) for f in (surrogate, adapted_return))
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(exact)) > 1e-3


# -- the trainer and the user


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run by the command line."""
    out = tmp_path_factory.mktemp("safe-meta") / "run"
    asked = ["train", "--algo", "safe-meta", "--out", str(out), *OPTIONS, "--algo.inner.steps", "5"]
    assert main(asked) == 0
    return out


def test_the_log_says_what_every_algorithm_does_and_what_the_update_changed(run):
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "return" in line]
    assert len(lines) == 2  # of two iterations each
    for line in lines:
        names = {*METRICS, "return_before", "cost_before", "inner_kl", "feasible"}
        assert all(np.isfinite(line[name]) for name in names)
        assert 1 <= line["budget"] <= 3
        assert line["step_kl"] <= SIZES["trust"].max_kl
    assert 0 < lines[-1]["env_steps"] <= 4 * 3 * 4 * 4 * 5  # iterations, tasks, batches, episodes, steps


def test_interrupted_and_resumed_is_uninterrupted(run, tmp_path):
    cut = tmp_path / "cut"
    asked = ["train", "--algo", "safe-meta", "--out", str(cut), *OPTIONS, "--algo.inner.steps", "5"]
    assert main([*asked, "--iterations", "2"]) == 0
    assert main(["train", "--resume", str(cut), "--iterations", "4"]) == 0
    whole, resumed = (
        checkpoint.read(folder / "checkpoint.safetensors", kind="checkpoint")[0] for folder in (run, cut)
    )
    assert whole.keys() == resumed.keys()
    for name, array in whole.items():
        np.testing.assert_array_equal(array, resumed[name])


def test_a_run_is_evaluated_with_its_updates_counted(run, tmp_path, capsys):
    out = tmp_path / "found"
    assert main(["evaluate", str(run), "--tasks", "4", "--out", str(out)]) == 0
    assert "2 updates per trial, 4 fresh episodes for each: 8 episodes" in capsys.readouterr().out
    found = load_results(out)
    took = found.meta["adaptation"]
    assert found.returns.shape == (4, 3)
    assert (took["updates"], took["fresh_episodes"]) == (2, 8)
    assert 8 <= took["fresh_steps"] <= 8 * 5
    assert found.meta["context"] == "none, parameters adapt"


def test_no_updates_are_the_policy_as_it_was(run):
    policy = load_policy(run)
    policy.start(budget=2)
    assert policy.act([1, 1]) in range(5)  # outside of evaluations it acts as the meta-policy
    agent = replace(policy.agent, updates=0)
    sample = jax.jit(jax.vmap(lambda key: ROOM.sample_task(key, "test")))
    tasks = sample(jax.random.split(jax.random.key(0), 4))
    found, spent = jax.jit(lambda key: agent.play_trials(ROOM, tasks, jnp.full(4, 2.0), key, episodes=3))(
        jax.random.key(1)
    )
    assert int(spent.updates.sum()) == int(spent.steps.sum()) == 0
    act = agent.adapter.view.actor(spread_over(4, agent.actor), None)
    for number, key in enumerate(jax.random.split(jax.random.key(1), 3)):
        alone = jax.jit(lambda key: play(ROOM, act, tasks, jax.random.split(key)[0], 1))(key)
        np.testing.assert_array_equal(found.costs[:, number], alone.costs[:, 0])
        np.testing.assert_array_equal(found.lengths[:, number], alone.lengths[:, 0])


def test_updates_from_the_episode_that_counts_cost_nothing_more(run):
    own = replace(load_policy(run).agent, fresh_episodes=0)
    found = evaluate(ROOM, own, tasks=4)
    assert found.meta["adaptation"]["updates"] == 2
    assert found.meta["adaptation"]["fresh_steps"] == 0
    with pytest.raises(UserError, match=r"learns from its own episode must sample it, got 0\.0"):
        evaluate(ROOM, replace(own, temperature=0.0), tasks=4)


def test_a_budget_beyond_training_is_one_warning(run, capsys):
    assert main(["evaluate", str(run), "--tasks", "4", "--budgets", "1", "9"]) == 0
    assert "safeicrl: this policy was trained on budgets from 1 to 3, not 9" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SafeMetaConfig(tasks=20, task_set=10), "task_set 10 is smaller than a meta-iteration's 20 tasks"),
        (lambda: SafeMetaConfig(updates=-1), "updates must be an integer ≥ 0, got -1"),
        (lambda: SafeMetaConfig(fresh_episodes=-1), "fresh_episodes must be an integer ≥ 0, got -1"),
        (lambda: SafeMetaConfig(discount=1.5), "discount must be at most 1, got 1.5"),
        (lambda: SafeStepConfig(form="exact"), "form must be fit or closed-form, got 'exact'"),
        (lambda: SafeStepConfig(reward_weight=0.0), "reward_weight must be a finite number > 0"),
        (lambda: SafeMeta(Throw(), CLOSED), "closed-form is for small grids with discrete actions"),
    ],
)
def test_settings_that_cannot_be(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_an_agent_that_does_not_adapt_has_no_updates(capsys):
    assert main(["evaluate", "--agent", "random", "--tasks", "2", "--updates", "3"]) == 2
    assert "random does not update its parameters: leave out updates 3" in capsys.readouterr().err
