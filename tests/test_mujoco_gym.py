"""The Gymnasium face of the MuJoCo worlds."""

import os
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import safeicrl  # noqa: F401  registers the ids
from safeicrl.envs import draw
from safeicrl.envs.mujoco import render
from safeicrl.errors import UserError

pytest.importorskip("mujoco")

GOLDEN = np.load(Path(__file__).parent / "golden" / "safety_gymnasium_1.0.0.npz")
IDS = {
    "point": "safeicrl/SafeDarkPoint-v0",
    "car": "safeicrl/SafeDarkCar-v0",
    "half_cheetah": "safeicrl/SafeVelocityHalfCheetah-v0",
    "ant": "safeicrl/SafeVelocityAnt-v0",
}
LAYOUT = {"goal": (1.2, 0.0), "hazards": [(-1.2, -1.2)] * 8}


def make(robot, **parameters):
    return gymnasium.make(IDS[robot], **parameters)


def offscreen(env):
    """A frame, or a skip that says what is missing."""
    try:
        return env.render()
    except UserError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("robot", IDS)
def test_gymnasium_accepts_it(robot):
    env = make(robot)
    check_env(env.unwrapped, skip_render_check=True)
    observation, info = env.reset(seed=1)
    assert observation.dtype == info["qpos"].dtype == info["qvel"].dtype == np.float64
    again, _ = make(robot).reset(seed=1)
    np.testing.assert_array_equal(observation, again)
    observation, _, _, _, info = env.step(env.action_space.sample())
    assert set(info) == {"cost", "qpos", "qvel", "diverged"}


@pytest.mark.parametrize("robot", IDS)
def test_one_step_from_recorded_states_is_exact(robot):
    dark = robot in ("point", "car")
    env = make(robot, **({"macro_steps": 1} if dark else {"multiplier": 1.0}))
    task = {"task": LAYOUT} if dark else {}
    qpos, qvel, action = (GOLDEN[f"{robot}/1/{name}"] for name in ("qpos", "qvel", "action"))
    for t in range(1, 12):
        env.reset(options={**task, "qpos": qpos[t - 1], "qvel": qvel[t - 1]})
        observation, reward, _, _, info = env.step(action[t])
        np.testing.assert_allclose(info["qpos"], qpos[t], rtol=0, atol=1e-10)
        np.testing.assert_allclose(info["qvel"], qvel[t], rtol=0, atol=1e-9)
        if dark:
            pose = np.concatenate([GOLDEN[f"{robot}/1/xpos"][t], GOLDEN[f"{robot}/1/xmat"][t]])
            np.testing.assert_allclose(observation, pose, rtol=0, atol=1e-10)
        else:
            np.testing.assert_allclose(observation, GOLDEN[f"{robot}/1/obs"][t], rtol=0, atol=1e-9)
        if robot == "half_cheetah":
            np.testing.assert_allclose(reward, GOLDEN[f"{robot}/1/reward"][t], rtol=0, atol=1e-10)


def test_layout_and_state_can_be_set():
    env = make("point")
    observation, _ = env.reset(options={"task": LAYOUT, "qpos": [0.89, 0.0, 0.0]})
    np.testing.assert_allclose(observation[:2], [0.89, 0.0])
    _, reward, terminated, _, info = env.step(np.array([1.0, 0.0]))  # to the goal's edge at x = 0.9
    for _ in range(5):
        if terminated:
            break
        _, reward, terminated, _, info = env.step(np.array([1.0, 0.0]))
    assert (reward, terminated, info["cost"]) == (1.0, True, 0.0)
    np.testing.assert_allclose(env.unwrapped.task.goal, [1.2, 0.0])
    env.reset()
    np.testing.assert_allclose(env.unwrapped.task.goal, [1.2, 0.0])  # a plain reset keeps the task


def test_the_speed_limit_can_be_set():
    env = make("half_cheetah", multiplier=0.5)
    env.reset(seed=0)
    assert float(env.unwrapped.task.multiplier) == 0.5
    costs = []
    for multiplier in (0.5, 1.0):
        env.reset(seed=0, options={"task": multiplier, "qvel": [2.5] + [0.0] * 8})  # between the two limits
        costs.append(env.step(np.zeros(6))[4]["cost"])
    assert costs == [1.0, 0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qpos": [0.0, 1.0]}, "qpos must be 3 finite numbers"),
        ({"qvel": [0.0, 1.0, np.nan]}, "qvel must be 3 finite numbers"),
        ({"qpo": [0.0] * 3}, "Did you mean 'qpos'"),
        ({"task": {"goal": (1, 0)}}, "must name 'goal' and 'hazards'"),
        ({"task": {**LAYOUT, "vases": []}}, "unknown entry of a task 'vases'"),
        ({"task": {**LAYOUT, "goal": (0, 0)}}, "covers the start"),
    ],
)
def test_bad_reset_options_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        make("point").unwrapped.reset(options=options)


@pytest.mark.parametrize("action", [[np.nan, 0.0], [np.inf, 0.0], [1.5, 0.0], [0.0], "left"])
def test_bad_actions_are_refused(action):
    env = make("point").unwrapped
    env.reset(seed=0)
    with pytest.raises(UserError, match="action"):
        env.step(action)


@pytest.mark.parametrize("robot", IDS)
def test_frames_show_the_world(robot):
    env = make(robot, render_mode="rgb_array")
    env.reset(seed=0)
    first = offscreen(env)
    assert first.shape == (render.SIZE, render.SIZE, 3)
    assert first.dtype == np.uint8
    for _ in range(8):
        env.step(np.ones(env.action_space.shape))
    assert not np.array_equal(first, env.render())  # the robot moved
    if robot in ("point", "car"):
        for colour in (draw.GOAL, draw.OBSTACLE):
            hue = np.array(colour) / np.linalg.norm(colour)
            pixels = first / np.maximum(np.linalg.norm(first, axis=-1, keepdims=True), 1)
            assert (pixels @ hue > 0.99).sum() > 300  # of 230,400


def test_no_graphics_is_a_clear_message_and_nothing_is_loaded_before_a_frame():
    code = """
import sys, gymnasium, safeicrl
env = gymnasium.make("safeicrl/SafeDarkPoint-v0", render_mode="rgb_array")
env.reset(seed=0)
assert "OpenGL" not in sys.modules and "mujoco.egl" not in sys.modules
sys.modules["mujoco.egl"] = sys.modules["mujoco.osmesa"] = None  # as if neither library could be loaded
env.render()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    last = done.stderr.strip().splitlines()[-1]
    assert "rendering needs EGL or OSMesa" in last
    assert "apt-get install" in last
