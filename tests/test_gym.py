"""The Gymnasium face: Gymnasium's own checker, when tasks change, rendering."""

import warnings

import gymnasium
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from probe import Push

from safeicrl.envs.gym import GymEnv
from safeicrl.envs.registry import WORLDS
from safeicrl.errors import UserError

ID = "safeicrl/SafeDarkRoom-v0"
LAYOUT = {"goal": (0, 1), "obstacles": [(1, 1), (3, 3)]}  # in a 4×4 room, whose start is (2, 2)


def room(env: gymnasium.Env) -> tuple:
    task = env.unwrapped.task
    return int(task.goal), tuple(np.flatnonzero(task.obstacles).tolist())


def test_importing_the_package_registers():
    assert {world.gym_id for world in WORLDS.values() if world.gym_id} <= set(gymnasium.registry)


@pytest.mark.parametrize("render_mode", [None, "rgb_array", "ansi"])
def test_gymnasiums_checker_has_nothing_to_say(render_mode):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make(ID, render_mode=render_mode).unwrapped)


def test_there_is_no_time_limit_wrapper():
    env = gymnasium.make(ID)
    while not isinstance(env, GymEnv):
        assert not isinstance(env, gymnasium.wrappers.TimeLimit)
        env = env.env


def test_step_returns_the_rules_of_the_room():
    env = gymnasium.make(ID, size=4, obstacles=2, max_steps=5)
    observation, info = env.reset(options={"task": LAYOUT})
    assert observation.tolist() == [2, 2]
    assert info["cost"] == 0.0
    observation, reward, terminated, truncated, info = env.step(1)
    assert (observation.tolist(), reward, terminated, truncated) == ([1, 2], 0.0, False, False)
    assert info["cost"] == 0.0
    assert env.step(3)[4]["cost"] == 1.0
    observation, reward, terminated, truncated, info = env.step(1)
    assert (observation.tolist(), reward, terminated, truncated) == ([0, 1], 1.0, True, False)
    assert isinstance(reward, float)
    assert isinstance(terminated, bool)


def test_it_truncates_at_its_own_limit():
    env = gymnasium.make(ID, max_steps=3)
    env.reset(options={"task": {"goal": (0, 0), "obstacles": []}})
    assert [env.step(0)[3] for _ in range(3)] == [False, False, True]
    with pytest.raises(UserError, match="the episode is over"):
        env.step(0)


def test_a_task_changes_only_when_asked():
    env = gymnasium.make(ID, split="test")
    env.reset(seed=1)
    first = room(env)
    for _ in range(3):
        env.reset()
        assert room(env) == first
    env.reset(options={"new_task": True})
    second = room(env)
    env.reset(seed=2)
    assert len({first, second, room(env)}) == 3
    env.reset(seed=1)
    assert room(env) == first


def test_a_task_laid_by_hand_stays():
    env = gymnasium.make(ID, size=4, obstacles=2)
    env.reset(seed=1, options={"task": LAYOUT})
    assert room(env) == (1, (5, 15))
    env.reset()
    assert room(env) == (1, (5, 15))
    env.reset(seed=1)
    assert room(env) != (1, (5, 15))


def test_splits_differ():
    """Goals of test rooms lie further out; 40 seeds each."""

    def mean_distance(split: str) -> float:
        env = gymnasium.make(ID, split=split)
        goals = []
        for seed in range(40):
            env.reset(seed=seed)
            goals.append(divmod(room(env)[0], 9))
        return float(np.hypot(*(np.array(goals) - 4).T).mean())

    assert mean_distance("test") > mean_distance("train") + 0.8


@pytest.mark.parametrize(("mode", "count"), [("sync", 2), ("async", 1)])
def test_vector_environments(mode, count):
    """Also in a process of its own, which takes seconds to start."""
    options = {"vector_kwargs": {"context": "spawn"}} if mode == "async" else {}
    envs = gymnasium.make_vec(ID, num_envs=count, vectorization_mode=mode, max_steps=2, **options)
    observation, info = envs.reset(seed=0)
    assert observation.tolist() == [[4, 4]] * count
    actions = np.zeros(count, int)
    info = envs.step(actions)[4]
    assert info["cost"].tolist() == [0.0] * count
    assert envs.step(actions)[3].tolist() == [True] * count
    assert envs.step(actions)[0].tolist() == [[4, 4]] * count  # autoreset
    envs.close()


def test_text_shows_obstacles_goal_path_and_agent():
    env = gymnasium.make(ID, size=4, obstacles=2, render_mode="ansi")
    env.reset(options={"task": {"goal": (0, 0), "obstacles": [(1, 2), (3, 3)]}})
    for action in (1, 4):  # up onto the obstacle, right
        env.step(action)
    assert env.render() == "G . . .\n. . x A\n. . o .\n. . . #\n"


def test_image_shows_obstacles_goal_path_and_agent():
    env = gymnasium.make(ID, size=4, obstacles=2, render_mode="rgb_array")
    env.reset(options={"task": {"goal": (0, 0), "obstacles": [(1, 2), (3, 3)]}})
    before = env.render()
    env.step(4)
    after = env.render()
    assert before.shape == (128, 128, 3)
    assert before.dtype == np.uint8
    changed = (before != after).any(axis=-1).reshape(4, 32, 4, 32).any(axis=(1, 3))
    assert np.argwhere(changed).tolist() == [[2, 2], [2, 3]]
    middles = after[16::32, 16::32].reshape(16, 3)
    looks = [tuple(middles[cell]) for cell in (0, 15, 11, 10, 1)]  # goal, obstacle, agent, trail, floor
    assert len(set(looks)) == 5


def test_any_environment_has_a_face():
    """A custom environment object, unknown to the registry, with a real-valued observation and action."""
    env = GymEnv(Push())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*spec.*")
        check_env(env)
    env.reset(seed=0)
    assert env.step(np.array([0.5], np.float32))[0].dtype == np.float32
    with pytest.raises(UserError, match="action must be 1 real numbers"):
        env.step(np.zeros(3))
    with pytest.raises(UserError, match=r"must lie in"):
        env.step(np.array([np.nan]))
    with pytest.raises(UserError, match="no tasks laid out by hand"):
        env.reset(options={"task": {}})
    assert jnp.isfinite(env.task)
