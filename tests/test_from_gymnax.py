"""gymnax's environments: a stand-in with its interface always, the real CartPole where gymnax is installed."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from safeicrl.agents.reference import RandomAgent
from safeicrl.envs import from_gymnax as module
from safeicrl.envs.from_gymnax import from_gymnax
from safeicrl.envs.registry import WORLDS, env_from_plain, env_to_plain
from safeicrl.envs.spaces import Box, Discrete
from safeicrl.errors import UserError
from safeicrl.trial import run_trials, sample_queue


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Params:
    goal: jax.Array
    max_steps_in_episode: int = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    place: jax.Array
    time: jax.Array


class Line:
    """A point on a line; it ends beyond the goal, and the effort costs."""

    default_params = Params(goal=jnp.float32(1.0))

    def observation_space(self, params):
        return SimpleNamespace(low=-9.0, high=9.0, shape=(1,))

    def action_space(self, params):
        return SimpleNamespace(low=np.array([-1.0]), high=np.array([3.0]), shape=(1,))

    def reset_env(self, key, params):
        state = State(place=jnp.zeros(1), time=jnp.int32(0))
        return state.place, state

    def step_env(self, key, state, action, params):
        state = State(place=state.place + action, time=state.time + 1)
        over = state.place[0] >= params.goal
        return state.place, state, over.astype(jnp.float32), over, {"cost": jnp.abs(action[0])}

    def is_truncated(self, state, params):
        return state.time >= params.max_steps_in_episode


@pytest.fixture(autouse=True)
def tidy():
    before = set(WORLDS)
    yield
    for name in set(WORLDS) - before:
        del WORLDS[name]
        del module._SETUPS[name]


def goals(key, split):
    return Params(goal=jax.random.uniform(key, minval=1.0, maxval=2.0 if split == "train" else 6.0))


def line(**more):
    return from_gymnax(Line(), goals, **{"name": "line", "budget": (0.0, 5.0), "episodes": 3, **more})


def test_a_trial_is_gymnaxs_own():
    env = line()
    assert env.spec.action == Box(1, -1.0, 1.0)
    assert (env.spec.max_steps, env.spec.task_features) == (4, 2)
    assert env_from_plain(**env_to_plain(env)) == env
    tasks, budgets = sample_queue(env, "test", (0.0, 5.0), (5, 1), jax.random.key(0))
    agent = RandomAgent(env.spec.action)
    trials = run_trials(env, agent, tasks, budgets, jax.random.key(1), episodes=3, steps=12)
    trials = jax.tree.map(np.asarray, trials)
    moves = 2 * trials.action[..., 0] + 1  # from [−1, 1] to [−1, 3]
    np.testing.assert_allclose(trials.cost, np.abs(moves), rtol=1e-5)
    arrived = trials.token.observation[..., 0] + moves
    np.testing.assert_allclose(trials.final_observation[..., 0], arrived, rtol=1e-5, atol=1e-6)
    goal = np.asarray(tasks.goal)  # [row, 1]
    np.testing.assert_array_equal(trials.terminated, trials.final_observation[..., 0] >= goal)
    np.testing.assert_array_equal(trials.truncated, (trials.token.time == 3) & ~trials.terminated)
    assert trials.terminated.any()
    assert trials.truncated.any()
    np.testing.assert_array_equal(env.task_features(jax.tree.map(lambda x: x[0, 0], tasks)), [goal[0, 0], 4.0])


def test_a_cost_of_ones_own_a_shorter_limit_and_what_is_refused():
    env = line(cost=lambda before, action, after, params: after.place[0] - before.place[0] + 7, max_steps=2)
    state, _ = env.reset(jax.random.key(0), Params(goal=jnp.float32(9)))
    for late in (False, True):
        state, step = env.step(jax.random.key(0), state, jnp.array([0.0]), Params(goal=jnp.float32(9)))
        assert (step.cost, step.truncated) == (8.0, late)
    with pytest.raises(UserError, match="not an environment of gymnax, version 1"):
        from_gymnax(object(), goals, name="x", budget=(0, 1), episodes=1)
    with pytest.raises(UserError, match="registered already"):
        line(name="safe-dark-room")
    with pytest.raises(UserError, match="finite bounds"):
        module._action(SimpleNamespace(low=-np.inf, high=np.inf, shape=(1,)))
    assert module._action(SimpleNamespace(n=3)) == Discrete(3)


def test_the_real_cart_pole():
    gymnax = pytest.importorskip("gymnax")
    cart, usual = gymnax.make("CartPole-v1")

    def lengths(key, split):
        return usual.replace(length=jax.random.uniform(key, minval=0.3, maxval=0.8))

    far = lambda before, action, after, params: jnp.abs(after.x) > 0.1  # noqa: E731
    env = from_gymnax(cart, lengths, name="cart", budget=(0, 20), episodes=2, cost=far, max_steps=30, cost_unit=1.0)
    tasks, budgets = sample_queue(env, "train", (0.0, 20.0), (4, 1), jax.random.key(0))
    agent = RandomAgent(env.spec.action)
    trials = run_trials(env, agent, tasks, budgets, jax.random.key(1), episodes=2, steps=60)
    np.testing.assert_array_equal(trials.cost, jnp.abs(trials.final_observation[..., 0]) > 0.1)
    assert bool(trials.terminated.any())
