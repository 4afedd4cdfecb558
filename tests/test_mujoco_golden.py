"""Against trajectories recorded from Safety-Gymnasium 1.0.0 on MuJoCo 2.3.3; see docs/environments.md."""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from safeicrl.envs.mujoco import physics
from safeicrl.envs.registry import make_env

pytest.importorskip("mujoco")

GOLDEN = np.load(Path(__file__).parent / "golden" / "safety_gymnasium_1.0.0.npz")
RUNS = range(4)
DARK = {"point": "safe-dark-point", "car": "safe-dark-car"}
VELOCITY = {"half_cheetah": "safe-velocity-half-cheetah", "ant": "safe-velocity-ant"}


@pytest.fixture(autouse=True)
def _double_precision():
    with jax.enable_x64(True):
        yield


def recorded(robot: str, run: int) -> dict[str, np.ndarray]:
    prefix = f"{robot}/{run}/"
    return {key.removeprefix(prefix): GOLDEN[key] for key in GOLDEN.files if key.startswith(prefix)}


@functools.partial(jax.jit, static_argnums=0)
def one_steps(env, task, before, actions):
    """One step from each of many states at once."""

    def one(qpos, qvel, action):
        state, _ = env.reset_to(qpos, qvel)
        return env.step(jax.random.key(0), state, action, task)

    return jax.vmap(one)(*before, actions)


@functools.partial(jax.jit, static_argnums=0)  # once for all runs of a robot
def open_loop(env, task, state, actions):
    """All the actions from one first state."""
    return jax.lax.scan(lambda s, a: env.step(jax.random.key(0), s, a, task), state, actions)[1]


def far_away(env):
    return env.make_task((1.5, 1.5), [(-1.5, 1.5)] * env.hazards)


@pytest.mark.parametrize(("robot", "engine"), [("point", "c"), ("point", "planar"), ("car", "c")])
def test_one_step_from_every_recorded_state_of_point_and_car(robot, engine):
    env = make_env(DARK[robot], macro_steps=1, engine=engine)
    for run in RUNS:
        golden = recorded(robot, run)
        before = golden["qpos"][:-1], golden["qvel"][:-1]
        state, step = one_steps(env, far_away(env), before, golden["action"][1:])
        pose = np.concatenate([golden["xpos"], golden["xmat"]], axis=1)[1:]
        np.testing.assert_allclose(step.observation, pose, rtol=0, atol=1e-9)
        np.testing.assert_allclose(state.physics.qpos, golden["qpos"][1:], rtol=0, atol=1e-9)
        np.testing.assert_allclose(state.physics.qvel, golden["qvel"][1:], rtol=0, atol=1e-9)


@pytest.mark.parametrize(("robot", "engine"), [("point", "c"), ("point", "planar"), ("car", "c")])
def test_open_loop_of_point_and_car_from_rest(robot, engine):
    env = make_env(DARK[robot], macro_steps=1, engine=engine)
    for run in RUNS:
        golden = recorded(robot, run)
        state, _ = env.reset_to(*env._rest(0.0))
        step = open_loop(env, far_away(env), state, golden["action"])
        pose = np.concatenate([golden["xpos"], golden["xmat"]], axis=1)
        np.testing.assert_allclose(step.observation, pose, rtol=0, atol=1e-10)


@pytest.mark.parametrize("robot", VELOCITY)
def test_one_step_from_every_recorded_state_of_half_cheetah_and_ant(robot):
    env = make_env(VELOCITY[robot], engine="c")
    for run in RUNS:
        golden = recorded(robot, run)
        qpos = np.concatenate([golden["qpos0"][None], golden["qpos"][:-1]])
        qvel = np.concatenate([golden["qvel0"][None], golden["qvel"][:-1]])
        _, step = one_steps(env, env.make_task(1.0), (qpos, qvel), golden["action"])
        np.testing.assert_allclose(step.observation, golden["obs"], rtol=0, atol=1e-9)
        np.testing.assert_array_equal(step.terminated, golden["terminated"])
        # The original measures Ant's velocity between two evaluations inside RK4, and the first of them is not
        # part of (qpos, qvel): from a state set by hand only the first step's reward can agree exactly.
        exact = slice(None) if robot == "half_cheetah" else slice(1)
        np.testing.assert_allclose(step.reward[exact], golden["reward"][exact], rtol=0, atol=1e-9)
        np.testing.assert_array_equal(step.cost[exact], golden["cost"][exact])
        np.testing.assert_allclose(step.reward, golden["reward"], rtol=0, atol=0.06)


@pytest.mark.parametrize(("robot", "steps"), [("half_cheetah", 15), ("ant", 75)])
def test_open_loop_of_half_cheetah_and_ant(robot, steps):
    env = make_env(VELOCITY[robot], engine="c")
    costs = ends = 0
    for run in RUNS:
        golden = recorded(robot, run)
        length = min(steps, len(golden["action"]))
        state, first = env.reset_to(golden["qpos0"], golden["qvel0"])
        np.testing.assert_array_equal(first, golden["obs0"])
        step = open_loop(env, env.make_task(1.0), state, golden["action"][:length])
        np.testing.assert_allclose(step.observation, golden["obs"][:length], rtol=0, atol=1e-6)
        np.testing.assert_allclose(step.reward, golden["reward"][:length], rtol=0, atol=1e-6)
        np.testing.assert_array_equal(step.cost, golden["cost"][:length])
        np.testing.assert_array_equal(step.terminated, golden["terminated"][:length])
        costs, ends = costs + golden["cost"][:length].sum(), ends + golden["terminated"][:length].sum()
    assert costs > 0  # the comparison saw costs ...
    assert ends == (1 if robot == "ant" else 0)  # ... and a fall


def test_the_multiplier_scales_the_limit():
    golden = recorded("half_cheetah", 3)
    env = make_env("safe-velocity-half-cheetah", engine="c")
    limit = 0.5 * 3.2096
    state, _ = env.reset_to(golden["qpos0"], golden["qvel0"])
    step = open_loop(env, env.make_task(0.5), state, golden["action"][:30])
    np.testing.assert_array_equal(step.cost, golden["x_velocity"][:30] > limit)
    assert step.cost.sum() > golden["cost"][:30].sum()


FINGERPRINTS = [  # robot, action, env steps from rest at yaw 0, x, y, yaw (None: not recorded)
    ("point", (1, 0), 1, 0.000626, None, None),
    ("point", (1, 0), 50, 0.835387, None, None),
    ("point", (0, 1), 1, None, None, 0.044727),
    ("point", (0, 1), 50, None, None, 2.982702),
    ("point", (1, 1), 50, 0.308164, 0.564434, 2.965862),
    ("car", (1, 1), 50, None, -1.434262, None),
    ("car", (-1, -1), 50, None, 1.263083, None),
    ("car", (1, -1), 50, None, None, 2.601556),
]


@pytest.mark.parametrize(("robot", "action", "steps", "x", "y", "yaw"), FINGERPRINTS)
def test_fingerprints_of_the_original(robot, action, steps, x, y, yaw):
    env = make_env(DARK[robot], macro_steps=steps, engine="c")
    state, _ = env.reset_to(*env._rest(0.0))
    motion = physics.step(env.job, state.physics, np.array(action, float))
    pose = env.observe(jax.tree.map(lambda x: x[-1], motion.states).qpos)
    seen = {"x": pose[0], "y": pose[1], "yaw": np.arctan2(pose[6], pose[3])}
    for name, expected in {"x": x, "y": y, "yaw": yaw}.items():
        if expected is not None:
            np.testing.assert_allclose(seen[name], expected, rtol=0, atol=2e-6)
