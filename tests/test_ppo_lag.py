"""PPO-Lagrangian: pieces by hand, probes with known constrained optima, and the trainer's and user's way to it."""

import dataclasses
import functools
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probe import OPTIMISED, Push, Throw

from safeicrl import load_policy
from safeicrl.agents.api import with_options
from safeicrl.agents.mlp import MlpAgent
from safeicrl.algos.api import METRICS
from safeicrl.algos.ppo_lag import PPOLag
from safeicrl.cli import main
from safeicrl.envs.api import replace
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.envs.wrappers import FixedTask
from safeicrl.errors import UserError
from safeicrl.evaluation.evaluate import evaluate
from safeicrl.nets.feedforward import Normaliser
from safeicrl.optimisers import lagrangian
from safeicrl.optimisers.lagrangian import Learner, PPOLagConfig, Rollout
from safeicrl.recipes.recipe import load_experiment
from safeicrl.train import EvalConfig, TrainConfig, train

ROOM = SafeDarkRoom(size=5, obstacles=1, max_steps=10)
# Straight on is 2 steps and costs 1, round the obstacle is 4 steps and costs nothing.
DETOUR = ROOM.make_task(goal=(2, 4), obstacles=[(2, 3)])
TINY = PPOLagConfig(iterations=4, envs=4, steps=8, minibatches=2, epochs=2, hidden=(8,))
TRAINED = dataclasses.replace(TINY, learning_rate=1e-3, entropy=0.005)  # the command line's, and so its program
FIXED = FixedTask(args=("size=3", "obstacles=1", "max_steps=5", "episodes=3"), limit=1.0)


def run(env, config, tasks, limits, seed=0):
    """Learners side by side: final states and metrics [iteration, learner]."""
    learner = Learner(env, config)
    keys = jax.random.split(jax.random.key(seed), len(limits))

    @functools.partial(jax.jit, compiler_options=OPTIMISED if config.iterations > 20 else None)
    def go(keys, tasks, limits):
        def body(states, _):
            states, _, metrics = jax.vmap(learner.iterate)(states, tasks, limits)
            return states, metrics

        return jax.lax.scan(body, jax.vmap(learner.init)(keys, tasks), length=config.iterations)

    states, metrics = go(keys, tasks, jnp.asarray(limits, jnp.float32))
    return learner, states, jax.tree.map(np.asarray, metrics)


# -- probes


def test_continuous_actions_throw_as_far_as_the_limit_allows():
    """The target is at ½; throwing x > 0 costs x, so that the best within a limit of b < ½ is ½ + b."""
    env, limits = Throw(), [0.3, 1.0]
    config = PPOLagConfig(iterations=250, learning_rate=1e-3, multiplier_rate=0.1, entropy=0.0, hidden=(16,))
    _, _, metrics = run(env, config, jnp.full(2, 0.5), limits)
    np.testing.assert_allclose(metrics["cost"][-50:].mean(0), [0.3, 0.5], atol=0.05)
    # what is missing to the best is the spread of the throws, which is still shrinking
    np.testing.assert_allclose(metrics["return"][-50:].mean(0), [0.8, 1.0], atol=0.15)
    assert (metrics["lambda"][:, 1] == 0).all()  # a limit that never binds has no price
    assert (metrics["lambda"] >= 0).all()
    assert all(np.isfinite(x).all() for x in metrics.values())


def test_the_limit_decides_the_way_through_the_room():
    """A limit of ½ lets the policy take either way, as often as the other."""
    config = PPOLagConfig(iterations=120, learning_rate=3e-3, multiplier_rate=0.1, hidden=(32,))
    tasks = jax.tree.map(lambda x: jnp.stack([x] * 3), DETOUR)
    learner, states, metrics = run(ROOM, config, tasks, [0.0, 5.0, 0.5])
    returns, costs = (metrics[name][-20:].mean(0) for name in ("return", "cost"))
    np.testing.assert_allclose(returns, [1.0, 1.0, 1.0], atol=0.03)
    np.testing.assert_allclose(costs[:2], [0.0, 1.0], atol=0.06)
    assert metrics["cost"][-60:, 2].mean() == pytest.approx(0.5, abs=0.1)
    pick = jax.jit(lambda states, index: learner.agent(jax.tree.map(lambda x: x[index], states)))
    for index, cost in ((0, 0.0), (1, 1.0)):
        agent = pick(states, index)
        greedy, _ = with_options(ROOM, agent, greedy=True)
        found = evaluate(Laid(), greedy, tasks=1, episodes=2, segments=1)
        assert (found.returns == 1).all()
        assert (found.costs == cost).all()


@dataclasses.dataclass(frozen=True)
class Laid(SafeDarkRoom):
    """Every task is the detour."""

    size: int = 5
    obstacles: int = 1
    max_steps: int = 10

    def sample_task(self, key, split):
        return DETOUR


# -- by hand


def test_advantages_bootstrap_a_truncated_episode_and_not_a_terminated_one():
    """Two environments, three steps; the critics say 2 (reward) and 3 (cost) everywhere."""
    config = PPOLagConfig(envs=2, steps=3, minibatches=1, discount=0.5, cost_discount=0.5, trace=0.5)
    learner = Learner(ROOM, config)
    state = jax.jit(learner.init)(jax.random.key(0), DETOUR)
    nets = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state.params.nets)
    biases = np.float32([0.0, 2.0, 3.0])[:, None] * np.ones((3, 5), np.float32)
    nets = eqx.tree_at(lambda n: n.biases[-1], nets, biases)
    state = replace(state, params=replace(state.params, nets=nets))
    flags = lambda *rows: np.array(rows, bool)  # noqa: E731  [time, env]
    zeros, each = np.zeros((3, 2), np.float32), np.eye(3, dtype=np.float32)[..., None]
    played = Rollout(
        observation=np.zeros((3, 2, 2), np.int32), action=np.zeros((3, 2), np.int32),
        reward=zeros + each[1], cost=zeros + each[2] * [1, 0],
        terminated=flags([0, 0], [1, 0], [0, 0]), truncated=flags([0, 0], [0, 1], [0, 0]),
        final_observation=np.ones((3, 2, 2), np.int32), log_prob=zeros, returns=zeros, costs=zeros,
    )  # fmt: skip
    batch, scale = jax.tree.map(np.asarray, jax.jit(learner.prepare)(state, played, np.float32(0.5)))
    # reward: errors −1, (1 − 2 terminated | 1 + 1 − 2 truncated), −1; step 0 adds ¼ of step 1's
    reward = np.array([[-1.25, -1.0], [-1.0, 0.0], [-1.0, -1.0]])
    cost = np.array([[-1.5 - 0.75, -1.5 - 0.375], [-3.0, -1.5], [-0.5, -1.5]])
    targets = np.stack([reward + 2, cost + 3], -1)
    np.testing.assert_allclose(scale, 0.95 + 0.05 * np.sqrt((targets**2).mean((0, 1))), rtol=1e-5)
    np.testing.assert_allclose(batch.targets.reshape(3, 2, 2), targets / scale, rtol=1e-5)
    reward = (reward - reward.mean()) / reward.std()  # 0.39, above the least of 0.1
    combined = (reward - 0.5 * (cost - cost.mean())) / 1.5
    np.testing.assert_allclose(batch.advantage.reshape(3, 2), combined, rtol=1e-4)


def test_the_multiplier_follows_the_violation_within_its_bounds():
    learner = Learner(ROOM, PPOLagConfig(multiplier_rate=0.5, multiplier_cap=2.0))
    move = lambda *x: float(learner.move(*(jnp.float32(v) for v in x))[0])  # noqa: E731
    assert move(1.0, 2.4, 2.0, 3) == pytest.approx(1.0 + 0.5 * 0.4)
    assert move(1.0, 1.8, 2.0, 3) == pytest.approx(1.0 - 0.5 * 0.2)
    assert move(1.0, 25.0, 2.0, 3) == pytest.approx(1.0 + 0.5)  # one large violation is no landslide
    assert move(0.01, 0.0, 5.0, 3) == 0.0
    assert move(1.99, 10.0, 0.0, 3) == 2.0
    assert move(1.0, 4.0, 2.0, 0) == 1.0  # no episode ended
    damped = Learner(ROOM, PPOLagConfig(multiplier_rate=0.5, multiplier_gain=0.25, multiplier_cap=2.0))
    price = lambda *x: float(damped.move(*(jnp.float32(v) for v in x))[1])  # noqa: E731
    assert price(1.0, 2.4, 2.0, 3) == pytest.approx(1.0 + 0.75 * 0.4)
    assert price(0.1, 0.0, 2.0, 3) == 0.0
    assert price(2.0, 9.0, 2.0, 3) == 2.0
    assert price(1.0, 9.0, 2.0, 0) == 1.0


def test_an_iteration_in_which_no_episode_ends_is_sound():
    """Steps of half an episode: the ends come every second iteration."""
    env = Push(max_steps=16)
    config = dataclasses.replace(TINY, iterations=5, multiplier=0.3)
    learner, states, metrics = run(env, config, jnp.zeros(2), [0.0, 1.0])
    assert all(np.isfinite(x).all() for x in metrics.values())
    np.testing.assert_array_equal(metrics["episodes"][:, 0], [0, 4, 0, 4, 0])
    assert (metrics["lambda"][0] == np.float32(0.3)).all()
    np.testing.assert_array_equal(metrics["return"][1], metrics["return"][2])  # the last known
    # and the policy has the form that a card rebuilds, its normaliser filled
    agent = learner.agent(jax.tree.map(lambda x: x[0], states))
    form = eqx.filter_eval_shape(MlpAgent.build, env.spec, TINY.hidden)
    assert jax.tree.structure(agent) == jax.tree.structure(form)
    assert float(agent.normaliser.count) == config.iterations * config.envs * config.steps


def test_looking_up_cells_beside_others_is_evaluating_each_step_alone(monkeypatch):
    tasks = jax.tree.map(lambda x: jnp.stack([x] * 3), DETOUR)
    looked_up, states, metrics = run(ROOM, TINY, tasks, [0.0, 1.0, 2.0])
    assert looked_up.cells is not None
    monkeypatch.setattr(lagrangian, "TABLE", 0)
    learner = Learner(ROOM, TINY)
    assert learner.cells is None
    state = jax.jit(learner.init)(jax.random.split(jax.random.key(0), 3)[1], DETOUR)
    step = jax.jit(learner.iterate)
    for iteration in range(TINY.iterations):
        state, played, alone = step(state, DETOUR, jnp.float32(1.0))
        assert float(alone["return"]) == pytest.approx(metrics["return"][iteration, 1])
    assert played.reward.shape == (TINY.steps, TINY.envs)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(states.params), strict=True):
        np.testing.assert_allclose(a, b[1], atol=2e-4)


def test_values_stay_the_same_when_their_unit_changes():
    learner = Learner(ROOM, TINY)
    state = jax.jit(learner.init)(jax.random.key(0), DETOUR)
    where = jnp.array([[0, 0], [2, 3]])
    scale = jnp.array([4.0, 0.5])
    other = replace(state, scale=scale, params=lagrangian.rescale(state.params, state.scale / scale))
    values = jax.jit(learner.values)
    np.testing.assert_allclose(values(other, where), values(state, where), rtol=1e-5)
    np.testing.assert_array_equal(other.params.nets.weights[-1][0], state.params.nets.weights[-1][0])


def test_the_normaliser_is_the_mean_and_variance_of_all_it_saw():
    rng = np.random.default_rng(0)
    parts = [rng.normal(3, 2, (n, 4, 2)).astype(np.float32) for n in (5, 1, 20)]
    normaliser = Normaliser.start(2)
    np.testing.assert_allclose(normaliser(jnp.array([2.0, -3.0])), [2.0, -3.0], rtol=1e-5)
    update = jax.jit(Normaliser.update)
    for part in parts:
        normaliser = update(normaliser, part)
    seen = np.concatenate(parts).reshape(-1, 2)
    np.testing.assert_allclose(normaliser.mean, seen.mean(0), rtol=1e-5)
    np.testing.assert_allclose(normaliser.variance, seen.var(0), rtol=1e-4)
    np.testing.assert_allclose(normaliser(jnp.asarray(seen)).std(0), [1, 1], rtol=1e-3)
    assert normaliser(jnp.full(2, 1e9)).max() == 10.0


# -- the trainer and the user


def test_a_fixed_task_is_one_task_whoever_asks():
    sample = jax.jit(jax.vmap(lambda k: FIXED.sample_task(k, "test")))
    tasks = sample(jax.random.split(jax.random.key(0), 5))
    assert (tasks.goal == tasks.goal[0]).all()
    expected = jax.jit(lambda k: FIXED.inner.sample_task(k, "train"))(jax.random.key(0))
    np.testing.assert_array_equal(tasks.obstacles[3], expected.obstacles)
    assert FIXED.spec.train_budget == FIXED.spec.test_budget == (1.0, 1.0)
    assert FIXED.inner == SafeDarkRoom(size=3, obstacles=1, max_steps=5, episodes=3)
    other = dataclasses.replace(FIXED, args=("train_budget=[1, 2]",)).inner
    assert other.train_budget == (1, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "safe-dark-rom"}, "unknown environment 'safe-dark-rom'.* Did you mean 'safe-dark-room'"),
        ({"name": "fixed-task"}, "not from fixed-task"),
        ({"args": ("size",)}, "name=value pairs, got 'size'"),
        ({"args": ("sizes=3",)}, "unknown parameter of safe-dark-room 'sizes'"),
        ({"limit": -1.0}, "limit must be a finite number ≥ 0"),
        ({"split": "both"}, "split must be 'train' or 'test'"),
    ],
)
def test_a_fixed_task_that_cannot_be(changes, message):
    with pytest.raises(UserError, match=message):
        FixedTask(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"envs": 0}, "envs must be an integer ≥ 1, got 0"),
        ({"learning_rate": 0.0}, "learning_rate must be a finite number > 0"),
        ({"discount": 1.1}, "discount must be at most 1, got 1.1"),
        ({"multiplier": 11.0}, "multiplier 11.0 is above multiplier_cap 10.0"),
        ({"minibatches": 5}, r"envs · steps \(512\) must be a multiple of minibatches \(5\)"),
        ({"hidden": (64, 0)}, "hidden must be an integer ≥ 1, got 0"),
    ],
)
def test_settings_that_cannot_be(changes, message):
    with pytest.raises(UserError, match=message):
        PPOLagConfig(**changes)


def test_many_tasks_are_not_for_it():
    with pytest.raises(UserError, match=r"ppo-lag learns one task .* SafeDarkRoom has budgets from 1.0 to 15.0"):
        PPOLag(SafeDarkRoom(), PPOLagConfig())


def test_it_reports_what_every_algorithm_does():
    algorithm = PPOLag(FIXED, TINY)
    init = jax.jit(algorithm.init)
    state, metrics = jax.jit(algorithm.update)(init(jax.random.key(0)))
    assert set(METRICS) <= set(metrics)
    assert float(metrics["env_steps"]) == 4 * 8
    assert float(metrics["budget"]) == 1.0
    began = algorithm.start_from(init(jax.random.key(1)), state)
    assert began.params is state.params
    assert float(began.multiplier) == TINY.multiplier


def test_interrupted_and_resumed_is_uninterrupted_and_loads_in_one_line(tmp_path):
    options = TrainConfig(iterations=4, chunk=2, evaluation=EvalConfig(every=0, tasks=2, segments=1))
    whole = train(PPOLag(FIXED, TRAINED), options, out=tmp_path / "whole")
    train(PPOLag(FIXED, TRAINED), dataclasses.replace(options, iterations=2), out=tmp_path / "cut")
    resumed = train(PPOLag(FIXED, TRAINED), options, out=tmp_path / "cut", resume=True)
    for a, b in zip(jax.tree.leaves(whole.state.params), jax.tree.leaves(resumed.state.params), strict=True):
        np.testing.assert_array_equal(a, b)
    policy = load_policy(tmp_path / "whole")
    assert policy.card["env"]["name"] == "fixed-task"
    assert policy.env == FIXED
    policy.start(budget=1)
    assert policy.act([1, 1]) in range(5)
    trained = whole.agent(PPOLag(FIXED, TRAINED))
    np.testing.assert_array_equal(policy.agent.net.weights[0], trained.net.weights[0])


def test_the_command_line_names_an_algorithm_and_an_environment(tmp_path, capsys):
    tiny = "--algo.iterations 4 --chunk 2 --evaluation.tasks 2 --algo.envs 4 --algo.steps 8 --algo.minibatches 2"
    room = "--algo.epochs 2 --algo.hidden 8 --env.limit 1 --env.args size=3 obstacles=1 max_steps=5 episodes=3"
    out = tmp_path / "run"
    asked = ["train", "--algo", "ppo-lag", "--env=safe-dark-room", "--out", str(out), *tiny.split(), *room.split()]
    assert main(asked) == 0
    saved = json.loads((out / "config.json").read_text())
    assert load_experiment(out).algo == TRAINED
    assert saved["algo"]["name"] == "ppo-lag"
    assert saved["env"]["parameters"]["limit"] == 1.0
    capsys.readouterr()
    assert main(["evaluate", str(out), "--tasks", "2"]) == 0
    assert main(["train", "--algo", "ppo-lg"]) == 2
    assert "unknown algorithm 'ppo-lg'" in capsys.readouterr().err
    assert main(["train", "--algo", "ppo-lag", "--env", "moon"]) == 2
    assert "unknown environment 'moon'" in capsys.readouterr().err
    assert main(["train", "--algo", "ppo-lag", "--preset", "darkroom"]) == 2
    assert "leave out --preset" in capsys.readouterr().err
