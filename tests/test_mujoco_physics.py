"""The physics function: vmap in every form, engines against each other, divergence, bad input."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from safeicrl.envs.mujoco import models, physics
from safeicrl.envs.registry import make_env
from safeicrl.errors import UserError

mujoco = pytest.importorskip("mujoco")

ENVS = {
    "point": "safe-dark-point",
    "car": "safe-dark-car",
    "half_cheetah": "safe-velocity-half-cheetah",
    "ant": "safe-velocity-ant",
}


def worlds(robot, count, seed=0):
    """Reset states and actions of `count` worlds."""
    env = make_env(ENVS[robot], engine="c")
    reset = jax.jit(jax.vmap(lambda key: env.reset(key, None)[0]))  # it does not depend on the task
    states = reset(jax.random.split(jax.random.key(seed), count))
    actions = np.random.default_rng(seed).uniform(-1, 1, (count, models.load(robot).nu))
    return states.physics, jnp.asarray(actions, float)


@functools.partial(jax.jit, static_argnums=0)
def roll(job, state, actions):
    """Open loop: state [world], actions [time, world, nu] → states [time, world, repeats]."""

    def step(state, action):
        motion = jax.vmap(functools.partial(physics.step, job))(state, action)
        return jax.tree.map(lambda x: x[:, -1], motion.states), motion.states

    return jax.lax.scan(step, state, actions)[1]


def by_hand(robot, state, ctrl, substeps):
    model = models.load(robot)
    data = mujoco.MjData(model)
    data.qpos[:], data.qvel[:], data.ctrl[:] = state.qpos, state.qvel, ctrl
    mujoco.mj_step(model, data, substeps)
    return data


@pytest.mark.parametrize("robot", ENVS)
def test_a_vmapped_step_is_a_loop_over_mj_step(robot):
    with jax.enable_x64(True):
        state, ctrl = worlds(robot, 3)
        job = physics.Job(robot, 4, 2, "c")
        motion = jax.jit(jax.vmap(functools.partial(physics.step, job)))(state, ctrl)
        for i in range(3):
            for repeat in range(2):
                data = by_hand(robot, jax.tree.map(lambda x, i=i: x[i], state), ctrl[i], 4 * (repeat + 1))
                np.testing.assert_array_equal(motion.states.qpos[i, repeat], data.qpos)
                np.testing.assert_array_equal(motion.states.qvel[i, repeat], data.qvel)


def test_one_callback_serves_a_whole_batch_however_it_is_vmapped(monkeypatch):
    calls = []
    inside = physics._advance_host
    monkeypatch.setattr(physics, "_advance_host", lambda *args: calls.append(len(args[-1])) or inside(*args))
    state, ctrl = worlds("point", 6)
    step = functools.partial(physics.step, physics.Job("point", 2, 1, "c"))
    flat = jax.jit(jax.vmap(step))(state, ctrl)
    fold = functools.partial(jax.tree.map, lambda x: x.reshape(2, 3, *x.shape[1:]))
    nested = jax.jit(jax.vmap(jax.vmap(step)))(fold(state), fold(ctrl))
    first = jax.tree.map(lambda x: x[0], state)
    shared = jax.jit(jax.vmap(step, (None, 0)))(first, ctrl)  # one state, many actions
    alone = step(first, ctrl[0])
    jax.block_until_ready((flat, nested, shared, alone))
    assert calls == [6, 6, 6, 1]
    jax.tree.map(np.testing.assert_array_equal, fold(flat), nested)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y), flat, alone)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y[0]), flat, shared)


def test_double_precision_survives_the_callback_in_a_scan():
    with jax.enable_x64(True):
        state, ctrl = worlds("car", 2)
        actions = jnp.stack([ctrl] * 5)
        states = roll(physics.Job("car", 3, 1, "c"), state, actions)
        data = by_hand("car", jax.tree.map(lambda x: x[1], state), ctrl[1], 15)
        np.testing.assert_array_equal(states.qpos[-1, 1, 0], data.qpos)


def test_any_number_of_threads_gives_the_same_bits():
    state, ctrl = worlds("half_cheetah", 8)
    job = physics.Job("half_cheetah", 5, 1, "c")
    seen = []
    for count in (1, 3):
        physics.set_threads(count)
        seen.append(jax.jit(jax.vmap(functools.partial(physics.step, job)))(state, ctrl))
    physics.set_threads(0)
    jax.tree.map(np.testing.assert_array_equal, *seen)


def test_planar_is_mujoco():
    with jax.enable_x64(True):
        state, ctrl = worlds("point", 64)
        jobs = [physics.Job("point", 10, 1, engine) for engine in ("c", "planar")]
        saturated = jnp.sign(ctrl) * jnp.ones((5, 64, 2))
        c, planar = (roll(job, state, saturated) for job in jobs)
        np.testing.assert_allclose(planar.qpos, c.qpos, rtol=0, atol=1e-13)
        # Between its limits the yaw servo chatters: each physics step amplifies rounding about fivefold.
        c, planar = (roll(job, state, ctrl[None]) for job in jobs)
        np.testing.assert_allclose(planar.qpos, c.qpos, rtol=0, atol=1e-8)


def test_a_car_in_the_plane_is_near_the_real_one():
    """Both under the same random torques for two seconds; the fit is of other ones."""
    random = np.random.default_rng(1)
    wheels = np.repeat(random.uniform(-1, 1, (5, 64, 2)), 10, axis=0)  # of a simulation step each, for 0.4 s
    qpos = jnp.broadcast_to(jnp.asarray(physics.models.load("car").qpos0, jnp.float32), (64, 13))
    state = jax.vmap(physics.RobotState.start)(qpos, jnp.zeros((64, 11))).physics
    jobs = [physics.Job("car", 10, 1, engine) for engine in ("c", "planar")]
    c, planar = (np.asarray(roll(job, state, wheels).qpos[-1, :, 0]) for job in jobs)
    moved, apart = (np.linalg.norm(x[:, :2], axis=-1).mean() for x in (c, c - planar))
    assert moved > 0.3
    assert apart < 0.35 * moved
    yaw, real = (2 * np.arctan2(qpos[:, 6], qpos[:, 3]) for qpos in (planar, c))
    assert np.abs(np.angle(np.exp(1j * (yaw - real)))).mean() < 0.35
    np.testing.assert_allclose(planar[:, 2], c[:, 2], atol=0.01)  # neither jumps nor sinks


def test_ant_by_euler_steps_is_near_the_real_one():
    """After one step of random torques; by as few steps as RK4's it would be five times as far."""
    state, ctrl = worlds("ant", 64)
    real, euler = (roll(physics.Job("ant", 5, 1, engine), state, ctrl[None]) for engine in ("c", "euler"))
    moved, apart = (np.abs(x).mean() for x in (real.qvel[0, :, 0] - state.qvel, (euler.qvel - real.qvel)[0, :, 0]))
    assert 0 < apart < 0.1 * moved
    np.testing.assert_allclose(euler.anchor, euler.qpos[..., :2])


@pytest.mark.parametrize("engine", ["c", "planar"])
def test_a_world_that_diverges_is_held_and_the_others_go_on(engine):
    state, ctrl = worlds("point", 4)
    broken = physics.replace(state, qvel=state.qvel.at[1, 0].set(1e30))
    job = physics.Job("point", 10, 3, engine)
    step = jax.jit(jax.vmap(functools.partial(physics.step, job)))
    before = physics.failures()
    if engine == "c":  # planar diverges only on what it is given, and reports it in the flag alone
        with pytest.warns(RuntimeWarning, match="1 of 4 MuJoCo worlds diverged"):
            motion = jax.block_until_ready(step(broken, ctrl))
        assert physics.failures() == before + 1
    else:
        motion = step(broken, ctrl)
    np.testing.assert_array_equal(motion.failed, np.array([[False], [True], [False], [False]]).repeat(3, 1))
    np.testing.assert_array_equal(motion.states.qpos[1], np.stack([state.qpos[1]] * 3))
    healthy = step(state, ctrl)
    others = np.array([0, 2, 3])
    np.testing.assert_array_equal(motion.states.qpos[others], healthy.states.qpos[others])
    assert np.isfinite(motion.states.qpos).all()


def test_a_car_driven_to_nan_inside_mujoco_keeps_its_last_good_state():
    state, ctrl = worlds("car", 2)
    spinning = physics.replace(state, qvel=state.qvel.at[0, 3:6].set(3e9))  # legal input; diverges in the step
    with pytest.warns(RuntimeWarning, match="diverged"):
        motion = jax.block_until_ready(
            jax.jit(jax.vmap(functools.partial(physics.step, physics.Job("car", 10, 2, "c"))))(spinning, ctrl)
        )
    np.testing.assert_array_equal(motion.failed, [[True, True], [False, False]])
    np.testing.assert_array_equal(motion.states.qvel[0, 1], spinning.qvel[0])


def test_a_non_finite_action_fails_its_world_only():
    state, ctrl = worlds("car", 2)
    with pytest.warns(RuntimeWarning, match="diverged"):
        motion = jax.block_until_ready(
            jax.jit(jax.vmap(functools.partial(physics.step, physics.Job("car", 2, 1, "c"))))(
                state, ctrl.at[0, 0].set(jnp.nan)
            )
        )
    np.testing.assert_array_equal(motion.failed[:, 0], [True, False])


def test_auto_is_planar_for_point_and_c_for_the_rest():
    found = {robot: physics.resolve_engine(physics.Job(robot, 10)) for robot in models.ROBOTS}
    assert found == {robot: "planar" if robot == "point" else "c" for robot in models.ROBOTS}
    assert physics.resolve_engine(physics.Job("point", 10, engine="c")) == "c"


def test_bad_engines_are_named():
    for unknown in ("mjx", "cc"):
        with pytest.raises(UserError, match=f"unknown engine '{unknown}'; known: auto, c, euler, planar"):
            make_env("safe-dark-car", engine=unknown)
    with pytest.raises(UserError, match="'planar' knows only the robots point, car"):
        make_env("safe-velocity-ant", engine="planar")
    with pytest.raises(UserError, match="'euler' replaces RK4, which MuJoCo does not use for the robot 'half_"):
        make_env("safe-velocity-half-cheetah", engine="euler")
    with pytest.raises(UserError, match="threads must be an integer ≥ 0"):
        physics.set_threads(-1)
    with pytest.raises(UserError, match=r"unknown robot 'cat'.*'car'"):
        models.load("cat")


def test_only_approximations_are_called_so():
    exact = [("point", "planar"), ("point", "auto"), ("car", "c"), ("half_cheetah", "auto"), ("ant", "c")]
    assert not any(physics.approximation(physics.Job(robot, 5, engine=engine)) for robot, engine in exact)
    for robot, engine, name in (("car", "planar", "Car"), ("ant", "euler", "Ant")):
        said = physics.approximation(physics.Job(robot, 5, engine=engine))
        assert said == f"engine={engine} (an approximation of {name})"


def test_a_missing_package_is_named(monkeypatch):
    models.load.cache_clear()
    monkeypatch.setitem(sys.modules, "mujoco.batch", None)
    with pytest.raises(UserError, match=r"pip install 'safeicrl\[mujoco\]'"):
        make_env("safe-dark-point")
    assert make_env("safe-dark-room").spec.max_steps == 30
