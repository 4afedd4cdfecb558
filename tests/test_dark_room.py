"""SafeDarkRoom's rules, step by step."""

import jax
import numpy as np
import pytest

from safeicrl.envs.dark_room import ACTIONS, SafeDarkRoom

KEY = jax.random.key(0)
STAY, UP, DOWN, LEFT, RIGHT = range(5)


def play(env: SafeDarkRoom, task, actions: list[int]) -> list:
    """Observation, reward, cost, terminated, truncated after each action."""
    state, first = env.reset(KEY, task)
    np.testing.assert_array_equal(first, (env.size // 2, env.size // 2))
    steps = []
    for action in actions:
        state, step = env.step(KEY, state, action, task)
        steps.append(
            (tuple(np.asarray(step.observation).tolist()), float(step.reward), float(step.cost),
             bool(step.terminated), bool(step.truncated))
        )  # fmt: skip
    return steps


@pytest.mark.parametrize(
    ("action", "cell"), [(STAY, (4, 4)), (UP, (3, 4)), (DOWN, (5, 4)), (LEFT, (4, 3)), (RIGHT, (4, 5))]
)
def test_moves(action, cell):
    env = SafeDarkRoom()
    task = env.make_task((0, 0), [])
    assert play(env, task, [action]) == [(cell, 0.0, 0.0, False, False)]
    assert len(ACTIONS) == env.spec.action.n == 5


@pytest.mark.parametrize(("action", "wall"), [(UP, (0, 2)), (DOWN, (4, 2)), (LEFT, (2, 0)), (RIGHT, (2, 4))])
def test_walls_block(action, wall):
    env = SafeDarkRoom(size=5, obstacles=0)
    task = env.make_task((0, 0), [])
    cells = [step[0] for step in play(env, task, [action] * 4)]
    assert cells[1] == cells[2] == cells[3] == wall


def test_every_step_that_ends_on_an_obstacle_costs_one():
    env = SafeDarkRoom(size=5, obstacles=2)
    task = env.make_task((0, 0), [(2, 4), (1, 2)])
    # onto the obstacle, against the wall (still on it), stay (still on it), off, and back on
    costs = [step[2] for step in play(env, task, [RIGHT, RIGHT, RIGHT, STAY, LEFT, RIGHT])]
    assert costs == [0, 1, 1, 1, 0, 1]


def test_the_goal_rewards_and_terminates():
    env = SafeDarkRoom(size=5, obstacles=0)
    task = env.make_task((1, 3), [])
    assert play(env, task, [UP, RIGHT]) == [((1, 2), 0.0, 0.0, False, False), ((1, 3), 1.0, 0.0, True, False)]


def test_the_time_limit_truncates_unless_the_goal_is_reached_then():
    env = SafeDarkRoom(size=5, obstacles=0, max_steps=2)
    away, there = env.make_task((0, 0), []), env.make_task((1, 3), [])
    assert [step[3:] for step in play(env, away, [UP, RIGHT])] == [(False, False), (False, True)]
    assert [step[3:] for step in play(env, there, [UP, RIGHT])] == [(False, False), (True, False)]


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(("size", "obstacles"), [(9, 25), (4, 14), (2, 0)])
def test_every_sampled_room_is_lawful(split, size, obstacles):
    env = SafeDarkRoom(size=size, obstacles=obstacles)
    keys = jax.random.split(jax.random.key(3), 500)
    tasks = jax.tree.map(np.asarray, jax.vmap(lambda key: env.sample_task(key, split))(keys))
    assert (tasks.obstacles.sum(axis=1) == obstacles).all()  # distinct
    assert not tasks.obstacles[:, env.start].any()
    assert not tasks.obstacles[np.arange(500), tasks.goal].any()
    assert (tasks.goal != env.start).all()
    assert ((tasks.goal >= 0) & (tasks.goal < size**2)).all()


def test_task_features_are_the_whole_room():
    env = SafeDarkRoom(size=4, obstacles=3)
    task = env.make_task((0, 1), [(3, 3), (1, 0), (0, 0)])
    features = np.asarray(env.task_features(task))
    assert features.shape == (env.spec.task_features,)
    assert np.flatnonzero(features[:16]).tolist() == [1]
    assert np.flatnonzero(features[16:]).tolist() == [0, 4, 15]


def test_the_papers_numbers_are_the_defaults():
    spec = SafeDarkRoom().spec
    assert spec.observation.sizes == (9, 9)
    assert (spec.max_steps, spec.episodes, spec.trial_steps) == (30, 50, 1500)
    assert (spec.train_budget, spec.test_budget) == ((1, 15), (1, 10))
    assert SafeDarkRoom().obstacles == 25
    assert SafeDarkRoom().alpha == 0.5
