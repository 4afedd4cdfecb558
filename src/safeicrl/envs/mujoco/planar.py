"""Point and Car as bodies that move in the plane, in a few lines of JAX: engine `planar` of physics.py.

Point's equations are MuJoCo's own, so its worlds can run on an accelerator and nothing changes. Car's are an
approximation, fitted to MuJoCo's car when it is first asked for: no tilt, no skidding, no chaos of contacts. It is
there to pretrain in and hundreds of times faster than the real one; policies are evaluated in MuJoCo.

Both advance [worlds]: (qpos, qvel, ctrl, substeps) → (qpos, qvel).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.envs.mujoco import models

Advance = Callable[[jax.Array, jax.Array, jax.Array, int], tuple[jax.Array, jax.Array]]


# ----------------------------------------------------------------------------------------------------- Point


@dataclass(frozen=True)
class Point:
    """Constants of the model."""

    timestep: float
    mass: float
    lever: float  # mass times the mass centre's distance from the yaw axis
    inertia: float  # about the yaw axis
    drag: float
    yaw_drag: float
    gear: float  # of both actuators
    force: float  # both saturate here, before the gear


@functools.cache
def point_constants() -> Point:
    """Read from the MuJoCo model."""
    import mujoco

    model = models.load("point")
    mass, centre = float(model.body_mass[1]), float(model.body_ipos[1, 0])
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    full = np.zeros((model.nv, model.nv))
    mujoco.mj_fullM(model, data, full)
    return Point(
        timestep=float(model.opt.timestep),
        mass=mass,
        lever=mass * centre,
        inertia=float(full[2, 2]),
        drag=float(model.dof_damping[0]),
        yaw_drag=float(model.dof_damping[2]),
        gear=float(model.actuator_gear[0, 0]),
        force=float(model.actuator_forcerange[0, 1]),
    )


def advance_point(qpos: jax.Array, qvel: jax.Array, ctrl: jax.Array, substeps: int) -> tuple[jax.Array, jax.Array]:
    """A thrust along the nose, a saturating yaw servo, linear damping.

    The floor contact has a zero normal force and does nothing. MuJoCo's Euler step solves (M + hD) v̇ = forces with
    damping implicit and everything else explicit, then moves qpos with the new velocity.
    """
    point = point_constants()
    h, lever = point.timestep, point.lever
    # M + hD = [[a, 0, −l sin], [0, a, l cos], [−l sin, l cos, b]], solved for the yaw first
    a, b = point.mass + h * point.drag, point.inertia + h * point.yaw_drag
    thrust = point.gear * jnp.clip(ctrl[:, 0], -point.force, point.force)
    wanted = jnp.clip(ctrl[:, 1], -1, 1)

    def substep(_: int, now: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x, y, yaw, x_rate, y_rate, yaw_rate = now
        cos, sin = jnp.cos(yaw), jnp.sin(yaw)
        turn = jnp.clip(wanted - point.gear * yaw_rate, -point.force, point.force)
        pull = thrust + lever * yaw_rate**2  # along the nose: thrust and the mass centre's centrifugal
        force_x = pull * cos - point.drag * x_rate
        force_y = pull * sin - point.drag * y_rate
        torque = point.gear * turn - point.yaw_drag * yaw_rate
        yaw_acc = (torque - lever * (cos * force_y - sin * force_x) / a) / (b - lever**2 / a)
        x_rate = x_rate + h * (force_x + lever * sin * yaw_acc) / a
        y_rate = y_rate + h * (force_y - lever * cos * yaw_acc) / a
        yaw_rate = yaw_rate + h * yaw_acc
        return x + h * x_rate, y + h * y_rate, yaw + h * yaw_rate, x_rate, y_rate, yaw_rate

    # Coordinates apart, so that a substep is one kernel. Unrolled it is slower: fusion repeats what is shared.
    now = (*jnp.moveaxis(qpos, -1, 0), *jnp.moveaxis(qvel, -1, 0))
    now = jax.lax.fori_loop(0, substeps, substep, now)
    return jnp.stack(now[:3], -1), jnp.stack(now[3:], -1)


# ------------------------------------------------------------------------------------------------------- Car


@dataclass(frozen=True)
class Car:
    """Constants of the fit, for one simulation step of `seconds`."""

    seconds: float
    force: float  # at which a wheel's torque saturates
    keep_speed: float  # of the forward speed, what is left after a step ...
    push: float  # ... and what the sum of both wheels' torques, in units of `force`, adds
    keep_turn: float  # the same of the yaw rate ...
    steer: float  # ... for their difference
    drift: float  # change of the yaw rate for each product of it and the speed
    side: float  # speed to the side for each yaw rate: the origin is ahead of the axle


FIT_WORLDS, FIT_STEPS = 64, 40  # of five simulation steps each: some seconds


@functools.cache
def car_constants(substeps: int) -> Car:
    """Fit the model to MuJoCo's car under random wheel torques: linear least squares, always the same."""
    import mujoco.batch

    model, random = models.load("car"), np.random.default_rng(0)
    batch = mujoco.batch.Batch(model, FIT_WORLDS, 1)
    qpos, ctrl = batch.bind("qpos"), batch.bind("ctrl")
    qpos[:] = model.qpos0
    seconds, force = substeps * float(model.opt.timestep), float(model.actuator_forcerange[0, 1])
    poses, wheels = [_pose(qpos)], []
    for _ in range(FIT_STEPS):
        ctrl[:] = random.uniform(-1, 1, ctrl.shape)  # nearly always saturated, as under a policy
        for _ in range(5):
            batch.step(nstep=substeps)
            poses.append(_pose(qpos))
            wheels.append(np.clip(ctrl / force, -1, 1))
    x, y, yaw = np.moveaxis(np.array(poses), -1, 0)  # [time, world]
    turn = np.angle(np.exp(1j * np.diff(yaw, axis=0))) / seconds
    middle = yaw[:-1] + turn * seconds / 2
    x_rate, y_rate = np.diff(x, axis=0) / seconds, np.diff(y, axis=0) / seconds
    forward, side = (
        x_rate * np.sin(middle) - y_rate * np.cos(middle),
        x_rate * np.cos(middle) + y_rate * np.sin(middle),
    )
    left, right = np.moveaxis(np.array(wheels)[1:], -1, 0)
    keep_speed, push = _least_squares(forward[1:], forward[:-1], left + right)
    keep_turn, steer, drift = _least_squares(turn[1:], turn[:-1], left - right, turn[:-1] * forward[:-1])
    (aside,) = _least_squares(side, turn)
    return Car(seconds, force, keep_speed, push, keep_turn, steer, drift, aside)


def _pose(qpos: np.ndarray) -> np.ndarray:
    """x, y and yaw of free joints, [world, 3]."""
    w, x, y, z = qpos[:, 3:7].T
    return np.stack([qpos[:, 0], qpos[:, 1], np.arctan2(2 * (w * z + x * y), 1 - 2 * (y**2 + z**2))], -1)


def _least_squares(target: np.ndarray, *inputs: np.ndarray) -> tuple[float, ...]:
    columns = np.stack([values.ravel() for values in inputs], -1)
    return tuple(np.linalg.lstsq(columns, target.ravel(), rcond=None)[0].tolist())


def advance_car(qpos: jax.Array, qvel: jax.Array, ctrl: jax.Array, substeps: int) -> tuple[jax.Array, jax.Array]:
    """Forward speed and yaw rate follow the wheels' torques with a lag; it stays upright, wheels do not turn."""
    car = car_constants(substeps)
    wheels = jnp.clip(ctrl / car.force, -1, 1)
    yaw = 2 * jnp.arctan2(qpos[:, 6], qpos[:, 3])
    forward = qvel[:, 0] * jnp.sin(yaw) - qvel[:, 1] * jnp.cos(yaw)
    turn = qvel[:, 5]
    new_turn = car.keep_turn * turn + car.steer * (wheels[:, 0] - wheels[:, 1]) + car.drift * turn * forward
    forward = car.keep_speed * forward + car.push * wheels.sum(-1)

    def velocity(yaw: jax.Array) -> tuple[jax.Array, jax.Array]:
        side = car.side * new_turn
        return (
            forward * jnp.sin(yaw) + side * jnp.cos(yaw),
            -forward * jnp.cos(yaw) + side * jnp.sin(yaw),
        )

    x_rate, y_rate = velocity(yaw + new_turn * car.seconds / 2)
    yaw = yaw + new_turn * car.seconds
    qpos = qpos.at[:, 0].add(car.seconds * x_rate).at[:, 1].add(car.seconds * y_rate)
    qpos = qpos.at[:, 3].set(jnp.cos(yaw / 2)).at[:, 6].set(jnp.sin(yaw / 2))
    x_rate, y_rate = velocity(yaw)
    return qpos, qvel.at[:, 0].set(x_rate).at[:, 1].set(y_rate).at[:, 5].set(new_turn)


PLANAR: dict[str, Advance] = {"point": advance_point, "car": advance_car}
EXACT = ("point",)  # the robots of PLANAR whose equations are MuJoCo's own
