"""Action distributions against their formulas in float64, numerical integrals and their own samples; the heads."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import random_weights
from probe import Push
from scipy.stats import norm

from safeicrl.agents.in_context import InContextAgent
from safeicrl.agents.reference import RandomAgent
from safeicrl.envs.api import replace
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.envs.spaces import Box
from safeicrl.errors import UserError
from safeicrl.nets.heads import HIDDEN, LOG_STD, Categorical, Critic, Distribution, Levels, PolicyNet, TanhNormal
from safeicrl.nets.transformer import NetConfig, featurise
from safeicrl.tokens import first_token
from safeicrl.trial import run_trials, sample_queue

P = np.array([0.5, 0.25, 0.2, 0.05])
# log-probabilities up to a constant
ODDS = Categorical(logits=jnp.asarray(np.log(P) + 3.0, jnp.float32))
SMALL = NetConfig(width=16, layers=1, heads=2, dtype="float32")
SAMPLES = 40_000


@jax.jit
def samples(distribution: Distribution) -> jax.Array:
    """[sample, ...]"""
    return jax.vmap(distribution.sample)(jax.random.split(jax.random.key(0), SAMPLES))


def frequencies(distribution: Categorical) -> np.ndarray:
    draw = samples(distribution)
    assert draw.dtype == jnp.int32
    return np.bincount(np.asarray(draw), minlength=len(P)) / SAMPLES


log_prob = jax.jit(lambda distribution, action: distribution.log_prob(action))


def probabilities(distribution: Categorical) -> np.ndarray:
    return np.exp(log_prob(distribution, np.arange(len(P))))


def test_categorical_log_probabilities_and_entropy():
    np.testing.assert_allclose(probabilities(ODDS), P, rtol=1e-5)
    np.testing.assert_allclose(ODDS.entropy(), -(P * np.log(P)).sum(), rtol=1e-5)
    assert int(ODDS.mode()) == 0
    assert ODDS.mode().dtype == jnp.int32


def test_categorical_samples_come_at_their_probabilities():
    assert np.abs(frequencies(ODDS) - P).max() < 5 * np.sqrt(0.25 / SAMPLES)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_categorical_tempered_is_a_power(temperature):
    expected = P ** (1 / temperature)
    np.testing.assert_allclose(probabilities(ODDS.tempered(temperature)), expected / expected.sum(), rtol=1e-5)


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_categorical_explored_mixes_in_a_uniform_action(epsilon):
    explored = ODDS.explored(jnp.float32(epsilon))
    np.testing.assert_allclose(probabilities(explored), (1 - epsilon) * P + epsilon / 4, rtol=1e-5)


def test_categorical_keeps_leading_axes():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4)), jnp.float32)
    many = Categorical(logits=logits)
    action = jnp.array([[0, 1, 2], [3, 0, 1]])
    log_p = np.asarray(logits) - np.log(np.exp(np.asarray(logits)).sum(-1, keepdims=True))
    expected = np.take_along_axis(log_p, np.asarray(action)[..., None], -1)[..., 0]
    np.testing.assert_allclose(log_prob(many, action), expected, rtol=1e-5)
    shapes = jax.eval_shape(lambda: (many.sample(jax.random.key(0)), many.mode(), many.entropy()))
    assert [x.shape for x in shapes] == [(2, 3)] * 3


MEAN, STD = np.array([0.7, -1.2]), np.array([0.4, 0.9])
SQUASHED = TanhNormal(mean=jnp.asarray(MEAN, jnp.float32), log_std=jnp.asarray(np.log(STD), jnp.float32))


def squashed_log_density(action: np.ndarray, mean=MEAN, std=STD) -> np.ndarray:
    """By the change of variables, in float64."""
    return (norm.logpdf(np.arctanh(action), mean, std) - np.log(1 - action**2)).sum(-1)


def test_tanh_normal_log_density():
    action = np.random.default_rng(0).uniform(-0.999, 0.999, (200, 2))
    found = log_prob(SQUASHED, action.astype(np.float32))
    np.testing.assert_allclose(found, squashed_log_density(action), rtol=2e-3, atol=2e-3)


def test_tanh_normal_density_integrates_to_one():
    edges = np.linspace(-1, 1, 1201)
    middle = (edges[1:] + edges[:-1]) / 2
    grid = np.stack(np.meshgrid(middle, middle), -1)
    density = np.exp(np.asarray(log_prob(SQUASHED, grid.astype(np.float32)), np.float64))
    assert density.sum() * (middle[1] - middle[0]) ** 2 == pytest.approx(1, abs=5e-3)


def test_tanh_normal_samples_follow_its_density():
    draw = np.asarray(samples(SQUASHED))
    for dimension in range(2):
        for point in (-0.9, -0.5, 0.0, 0.5, 0.9):
            expected = norm.cdf((np.arctanh(point) - MEAN[dimension]) / STD[dimension])
            assert abs((draw[:, dimension] < point).mean() - expected) < 5 * np.sqrt(0.25 / SAMPLES)
    # independent dimensions
    assert abs(np.corrcoef(np.arctanh(draw).T)[0, 1]) < 5 / np.sqrt(SAMPLES)
    # the mean log-density of its own samples is minus the entropy of what was sampled
    entropy = (np.log(STD) + 0.5 * np.log(2 * np.pi * np.e)).sum()  # of the Gaussian ...
    entropy += np.log(1 - draw.astype(np.float64) ** 2).sum(-1).mean()  # ... moved by the squashing
    assert -np.asarray(log_prob(SQUASHED, draw)).mean() == pytest.approx(entropy, abs=0.03)


def test_tanh_normal_mode_and_entropy():
    np.testing.assert_allclose(SQUASHED.mode(), np.tanh(MEAN), rtol=1e-5)
    # documented: of the Gaussian before tanh
    expected = (np.log(STD) + 0.5 * np.log(2 * np.pi * np.e)).sum()
    np.testing.assert_allclose(SQUASHED.entropy(), expected, rtol=1e-5)


def test_tanh_normal_tempered_and_explored():
    np.testing.assert_allclose(np.exp(SQUASHED.tempered(0.25).log_std), STD / 2, rtol=1e-5)
    np.testing.assert_array_equal(SQUASHED.tempered(0.25).mean, SQUASHED.mean)
    np.testing.assert_allclose(np.exp(SQUASHED.explored(jnp.float32(0.6)).log_std), [0.6, 0.9], rtol=1e-5)
    np.testing.assert_array_equal(SQUASHED.explored(jnp.float32(0.0)).log_std, SQUASHED.log_std)


@pytest.mark.parametrize("mean", [-20.0, 0.0, 20.0])
def test_saturated_actions_stay_inside_and_have_finite_densities(mean):
    wide = TanhNormal(mean=jnp.full((64, 1), mean), log_std=jnp.full((64, 1), LOG_STD[1]))
    action = wide.sample(jax.random.key(0))
    assert np.abs(action).max() < 1
    assert np.abs(wide.mode()).max() < 1
    slope = jax.jit(jax.value_and_grad(lambda d, a: d.log_prob(a).sum()))
    for given in (action, jnp.ones((64, 1)), -jnp.ones((64, 1))):
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(slope(wide, given)))


def test_a_sample_is_differentiable_in_mean_and_spread():
    """a = tanh(m + s ε): da/dm = 1 − a², da/d(log s) = (1 − a²) s ε."""
    key = jax.random.key(3)
    slope = jax.grad(lambda d: d.sample(key).sum())(SQUASHED)
    noise = np.asarray(jax.random.normal(key, (2,)), np.float64)
    squash = 1 - np.tanh(MEAN + STD * noise) ** 2
    np.testing.assert_allclose(slope.mean, squash, rtol=1e-4)
    np.testing.assert_allclose(slope.log_std, squash * STD * noise, rtol=1e-4)


def test_actions_of_another_range_are_the_same_distribution_moved():
    """a = 1 + 3 tanh(·) has the density of tanh(·) at (a − 1)/3, divided by 3 in each dimension."""
    moved = replace(SQUASHED, centre=1.0, half=3.0)
    key = jax.random.key(2)
    np.testing.assert_allclose(moved.sample(key), 1 + 3 * np.asarray(SQUASHED.sample(key)), rtol=1e-6)
    np.testing.assert_allclose(moved.mode(), 1 + 3 * np.tanh(MEAN), rtol=1e-5)
    unit = np.random.default_rng(0).uniform(-0.99, 0.99, (200, 2))
    found = log_prob(moved, (1 + 3 * unit).astype(np.float32))
    np.testing.assert_allclose(found, squashed_log_density(unit) - 2 * np.log(3), rtol=2e-3, atol=2e-3)
    for changed in (moved.tempered(0.5), moved.explored(jnp.float32(0.6))):
        assert (changed.centre, changed.half) == (1.0, 3.0)


@dataclasses.dataclass(frozen=True)
class WidePush(Push):
    """Push with other bounds of its action."""

    low: float = -2.0
    high: float = 6.0

    @property
    def spec(self):
        return replace(super().spec, action=Box(1, self.low, self.high))


def test_acting_and_learning_agree_on_another_range_of_actions():
    """What the environment is given fills its range; the learner finds the log-probability that acting wrote."""
    env = WidePush()
    net = eqx.filter_jit(PolicyNet)(SMALL, env.spec, jax.random.key(0))
    tasks, budgets = sample_queue(env, "train", (0.0, 2.0), (64, 1), jax.random.key(1))
    trials = run_trials(env, InContextAgent(net), tasks, budgets, jax.random.key(0), episodes=3, steps=12)
    assert trials.action.min() < -1.5
    assert trials.action.max() > 5.5
    np.testing.assert_array_equal(trials.token.action[:, 1:], trials.action[:, :-1])
    moved = np.diff(np.concatenate([trials.token.observation[:, :1], trials.final_observation], 1), axis=1)
    np.testing.assert_allclose(moved[:, 0], trials.action[:, 0], rtol=1e-5)  # the first step: no reset between
    learnt = eqx.filter_jit(lambda t: net.distribution(net.trunk.forward(t.token, t.trial)).log_prob(t.action))(
        trials
    )
    np.testing.assert_allclose(learnt, trials.extras["log_prob"], rtol=1e-3, atol=2e-3)


def test_the_network_reads_actions_in_units_of_their_range():
    narrow, wide = Push().spec, WidePush().spec
    token = jax.vmap(first_token, (None, 0, 0))(narrow, jnp.zeros((3, 1)), jnp.ones(3))
    later = replace(token, start=jnp.zeros(3, bool))
    unit = jnp.array([[-1.0], [0.25], [1.0]])
    np.testing.assert_allclose(
        featurise(replace(later, action=2 + 4 * unit), wide),
        featurise(replace(later, action=unit), narrow),
        rtol=1e-6,
    )
    # "no action yet" is no action at all, not the one of value 0
    np.testing.assert_array_equal(featurise(token, wide), featurise(token, narrow))


@pytest.mark.parametrize(("low", "high"), [(-np.inf, np.inf), (0.0, np.inf), (1.0, 1.0)])
def test_unbounded_actions_are_refused(low, high):
    spec = WidePush(low=low, high=high).spec
    with pytest.raises(UserError, match="actions must have finite bounds"):
        PolicyNet(SMALL, spec, jax.random.key(0))
    token = jax.vmap(first_token, (None, 0, 0))(spec, jnp.zeros((1, 1)), jnp.ones(1))
    with pytest.raises(UserError, match="actions must have finite bounds"):
        RandomAgent(spec.action).act(None, token, jax.random.key(0))


# two numbers between −2 and 4, each at one of four levels: −2, 0, 2, 4
STEPS = Levels(choice=Categorical(logits=jnp.asarray(np.log([P, P[::-1]]), jnp.float32)), low=-2.0, high=4.0)
VALUES = np.array([-2.0, 0.0, 2.0, 4.0])


def test_levels_are_independent_and_evenly_spaced():
    np.testing.assert_allclose(STEPS.mode(), [-2.0, 4.0])
    np.testing.assert_allclose(STEPS.entropy(), -2 * (P * np.log(P)).sum(), rtol=1e-5)
    pairs = np.stack(np.meshgrid(VALUES, VALUES, indexing="ij"), -1).astype(np.float32)
    every = Levels(choice=Categorical(logits=np.tile(STEPS.choice.logits, (4, 4, 1, 1))), low=-2.0, high=4.0)
    np.testing.assert_allclose(np.exp(log_prob(every, pairs)), np.outer(P, P[::-1]), rtol=1e-5)
    np.testing.assert_allclose(log_prob(every, pairs + 0.9), log_prob(every, pairs))  # the nearest level's
    np.testing.assert_allclose(log_prob(STEPS, np.float32([-9.0, 9.0])), np.log(P[0] ** 2), rtol=1e-5)
    draws = np.asarray(samples(STEPS))
    for value, p, q in zip(VALUES, P, P[::-1], strict=True):
        assert np.mean(draws[:, 0] == value) == pytest.approx(p, abs=5 * np.sqrt(0.25 / SAMPLES))
        assert np.mean(draws[:, 1] == value) == pytest.approx(q, abs=5 * np.sqrt(0.25 / SAMPLES))
    assert np.abs(np.corrcoef(draws.T)[0, 1]) < 5 / np.sqrt(SAMPLES)


def test_levels_learn_where_the_reward_is():
    """Policy gradients with the log-probabilities of what was sampled: both numbers end at the target's level."""

    @jax.jit
    def learn(logits):
        def step(logits, key):
            policy = lambda x: Levels(choice=Categorical(logits=jnp.tile(x, (64, 1, 1))), low=-2.0, high=4.0)  # noqa: E731
            action = policy(logits).sample(key)
            reward = -jnp.abs(action - jnp.array([2.2, -0.1])).sum(-1)
            loss = lambda x: -(policy(x).log_prob(action) * (reward - reward.mean())).mean()  # noqa: E731
            return logits - 0.3 * jax.grad(loss)(logits), None

        return jax.lax.scan(step, logits, jax.random.split(jax.random.key(0), 100))[0]

    learned = jax.nn.softmax(learn(jnp.zeros((2, 4))))
    assert (np.asarray(learned)[[0, 1], [2, 1]] > 0.8).all()


def test_levels_are_tempered_and_explored_number_by_number():
    mean = lambda d: np.asarray(jax.nn.softmax(d.choice.logits) @ VALUES)  # noqa: E731
    sharp = P**4 / (P**4).sum()
    np.testing.assert_allclose(mean(STEPS.tempered(0.25)), [sharp @ VALUES, sharp[::-1] @ VALUES], rtol=1e-4)
    np.testing.assert_allclose(mean(STEPS.explored(jnp.float32(1.0))), VALUES.mean(), atol=1e-5)


def test_divergence_is_zero_from_itself_and_by_hand_from_another():
    even = Categorical(logits=jnp.zeros(4))
    assert float(ODDS.divergence(ODDS)) == 0
    by_hand = (P * np.log(P * 4)).sum()
    np.testing.assert_allclose(ODDS.divergence(even), by_hand, rtol=1e-5)
    flat = Levels(choice=Categorical(logits=jnp.zeros((2, 4))), low=-2.0, high=4.0)
    np.testing.assert_allclose(STEPS.divergence(flat), 2 * by_hand, rtol=1e-5)
    moved = TanhNormal(mean=SQUASHED.mean + 0.5, log_std=SQUASHED.log_std)
    np.testing.assert_allclose(SQUASHED.divergence(moved), (0.5 * (0.5 / STD) ** 2).sum(), rtol=1e-5)


def test_a_policy_of_levels_starts_nearly_uniform():
    config = dataclasses.replace(SMALL, levels=5)
    net = eqx.filter_jit(PolicyNet)(config, Push().spec, jax.random.key(0))
    policy = eqx.filter_jit(net.distribution)(jax.random.normal(jax.random.key(1), (50, 16)))
    assert isinstance(policy, Levels)
    assert policy.choice.logits.shape == (50, 1, 5)
    assert (policy.low, policy.high) == (Push().spec.action.low, Push().spec.action.high)
    np.testing.assert_allclose(policy.entropy(), np.log(5), atol=0.01)


def test_a_continuous_policy_keeps_its_spread_within_bounds():
    net = random_weights(PolicyNet, SMALL, Push().spec)
    read, features = eqx.filter_jit(net.distribution), jax.random.normal(jax.random.key(1), (50, 16))
    policy = read(features)
    assert isinstance(policy, TanhNormal)
    assert policy.mean.shape == policy.log_std.shape == (50, 1)
    loud = jax.tree.map(lambda x: 1e4 * np.asarray(x), net.actor)
    spread = np.asarray(read(features, loud).log_std)
    assert spread.min() == LOG_STD[0]
    assert spread.max() == LOG_STD[1]


def test_a_privileged_critic_sees_the_task_of_each_steps_own_trial():
    """By hand: value = W₂ gelu(W₁ f + U task[trial] + b₁) + b₂."""
    spec = SafeDarkRoom(size=2, obstacles=1).spec
    critic = random_weights(Critic, 16, spec, privileged=True)
    rng = np.random.default_rng(0)
    features, tasks = rng.normal(size=(2, 5, 16)), rng.normal(size=(2, 3, spec.task_features))
    trial = np.array([[0, 0, 1, 2, 2], [0, 1, 1, 1, 2]])
    found = np.asarray(eqx.filter_jit(critic)(features.astype(np.float32), tasks.astype(np.float32), trial))
    for row in range(2):
        for t in range(5):
            hidden = features[row, t] @ np.asarray(critic.head.first.weight) + np.asarray(critic.head.first.bias)
            hidden = hidden + tasks[row, trial[row, t]] @ np.asarray(critic.task.weight)
            assert hidden.shape == (HIDDEN,)
            active = 0.5 * hidden * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))  # GELU
            value = active @ np.asarray(critic.head.second.weight) + np.asarray(critic.head.second.bias)
            np.testing.assert_allclose(found[row, t], value[0], rtol=1e-3, atol=1e-5)


def test_an_ordinary_critic_ignores_the_task():
    spec = SafeDarkRoom(size=2, obstacles=1).spec
    critic = random_weights(Critic, 16, spec, privileged=False)
    features, trial = jax.random.normal(jax.random.key(1), (2, 5, 16)), jnp.zeros((2, 5), jnp.int32)
    read = eqx.filter_jit(critic)
    one, other = (read(features, np.full((2, 3, spec.task_features), x, np.float32), trial) for x in (0.0, 5.0))
    np.testing.assert_array_equal(one, other)
