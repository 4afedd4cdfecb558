"""SafeVelocity: HalfCheetah and Ant that must run, under a speed limit they are never told.

Safety-Gymnasium's SafetyHalfCheetahVelocity-v1 and SafetyAntVelocity-v1: reward, cost, termination and reset are
theirs. The task is a multiplier of their speed limit; nothing in the observation reveals it. Episodes are 75
steps long and trials 20 episodes, as the paper's table of parameters says.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from safeicrl.envs.api import EnvSpec, Key, Split, Step, check_split, record
from safeicrl.envs.mujoco import models, physics
from safeicrl.envs.mujoco.physics import Job, Motion, PhysicsState, RobotState
from safeicrl.envs.spaces import Box
from safeicrl.errors import check_integer, check_number, check_range

MULTIPLIERS = (0.50, 0.55, 0.60, 0.65, 0.70, 0.75, 0.80, 0.85, 0.90, 0.95, 1.00)
# Held out for testing. The paper does not say which; these lie between training ones, because it calls its
# SafeVelocity tasks unseen but in-distribution.
TEST_MULTIPLIERS = (0.60, 0.75, 0.90)
TRAIN_MULTIPLIERS = tuple(m for m in MULTIPLIERS if m not in TEST_MULTIPLIERS)

SUBSTEPS = 5  # physics steps in one step, both robots
RESET_NOISE = 0.1


@record
class SpeedLimit:
    """One task."""

    multiplier: jax.Array  # [] of the robot's base limit


@dataclass(frozen=True)
class SafeVelocity:
    """What both robots share."""

    robot: ClassVar[str]
    base_limit: ClassVar[float]  # m/s, at multiplier 1
    control_cost: ClassVar[float]  # reward lost per squared action
    alive_bonus: ClassVar[float]  # reward of every step, the terminating one included
    hidden: ClassVar[int]  # leading coordinates of qpos that are not observed: where in the world the robot is
    upright: ClassVar[bool] = False  # whether it moves in the upright plane y = 0

    multiplier: float | None = None  # set: the one task of both splits, instead of drawing
    max_steps: int = 75  # in an episode
    episodes: int = 20  # K, in a trial
    train_budget: tuple[float, float] = (0.0, 5.0)  # range of δ in training
    test_budget: tuple[float, float] = (0.0, 5.0)  # range of δ in evaluation
    engine: str = "auto"  # of the physics, see physics.py

    def __post_init__(self) -> None:
        check_integer("max_steps", self.max_steps, 1)
        check_integer("episodes", self.episodes, 1)
        check_range("train_budget", self.train_budget)
        check_range("test_budget", self.test_budget)
        if self.multiplier is not None:
            check_number("multiplier", self.multiplier, 0.0, strict=True)
        physics.check_engine(self.robot, self.engine)

    @property
    def spec(self) -> EnvSpec:
        """Spaces, limits and budget ranges."""
        model = models.load(self.robot)
        return EnvSpec(
            observation=Box(model.nq + model.nv - self.hidden),
            action=Box(model.nu, -1.0, 1.0),
            max_steps=self.max_steps,
            episodes=self.episodes,
            train_budget=self.train_budget,
            test_budget=self.test_budget,
            cost_unit=1.0,
            task_features=1,
            max_cost=1.0,
        )

    @property
    def job(self) -> Job:
        """The physics of one step."""
        return Job(self.robot, SUBSTEPS, 1, self.engine)

    @property
    def approximation(self) -> str | None:
        """How the physics differ from the robot's real ones; None where they do not."""
        return physics.approximation(self.job)

    def sample_task(self, key: Key, split: Split) -> SpeedLimit:
        """A multiplier, uniform over the split's."""
        choices = TRAIN_MULTIPLIERS if check_split(split) == "train" else TEST_MULTIPLIERS
        if self.multiplier is not None:
            choices = (self.multiplier,)
        return SpeedLimit(multiplier=jax.random.choice(key, jnp.asarray(choices, float)))

    def make_task(self, multiplier: float) -> SpeedLimit:
        """The task with a given multiplier, from the set or not."""
        return SpeedLimit(multiplier=jnp.asarray(check_number("multiplier", multiplier, 0.0, strict=True), float))

    def reset(self, key: Key, task: SpeedLimit) -> tuple[RobotState, jax.Array]:
        """Near the model's rest pose: uniform noise on qpos, normal noise on qvel."""
        model = models.load(self.robot)
        qpos_key, qvel_key = jax.random.split(key)
        noise = jax.random.uniform(qpos_key, (model.nq,), float, -RESET_NOISE, RESET_NOISE)
        qpos = jnp.asarray(model.qpos0, float) + noise
        return self.reset_to(self._valid(qpos), RESET_NOISE * jax.random.normal(qvel_key, (model.nv,)))

    def reset_to(self, qpos: jax.Array, qvel: jax.Array) -> tuple[RobotState, jax.Array]:
        """Start an episode from a given physical state."""
        state = RobotState.start(qpos, qvel)
        return state, self.observe(state.physics)

    def step(self, key: Key, state: RobotState, action: jax.Array, task: SpeedLimit) -> tuple[RobotState, Step]:
        """Five physics steps under `action`, clipped to ±1."""
        motion = physics.step(self.job, state.physics, self.control(action))
        return self.after(state, action, motion, task)

    def control(self, action: jax.Array) -> jax.Array:
        """The action, clipped to ±1."""
        return jnp.clip(action, -1.0, 1.0)

    def after(
        self, state: RobotState, action: jax.Array, motion: Motion, task: SpeedLimit
    ) -> tuple[RobotState, Step]:
        """What the motion of one step led to."""
        action = self.control(action)
        new, failed = jax.tree.map(lambda x: x[0], (motion.states, motion.failed))
        forward, speed = self._velocity(state.physics, new)
        reward = forward + self.alive_bonus - self.control_cost * jnp.square(action).sum()
        terminated = failed | ~self._healthy(new)
        state = RobotState(physics=new, time=state.time + 1, failed=failed)
        over_limit = speed > self.base_limit * task.multiplier
        return state, Step(
            observation=self.observe(new),
            reward=jnp.where(failed, 0.0, reward),
            cost=(over_limit & ~failed).astype(jnp.float32),
            terminated=terminated,
            truncated=(state.time >= self.max_steps) & ~terminated,
        )

    def task_features(self, task: SpeedLimit) -> jax.Array:
        """The multiplier."""
        return task.multiplier[None]

    def observe(self, state: PhysicsState) -> jax.Array:
        """Joint positions and velocities, without where in the world the robot is."""
        return jnp.concatenate([state.qpos[self.hidden :], state.qvel])

    def speed(self, old: PhysicsState, new: PhysicsState) -> jax.Array:
        """The speed that is limited, m/s, between two states one step apart."""
        return self._velocity(old, new)[1]

    @property
    def _dt(self) -> float:
        return SUBSTEPS * models.load(self.robot).opt.timestep

    def _velocity(self, old: PhysicsState, new: PhysicsState) -> tuple[jax.Array, jax.Array]:
        """Forward velocity, which is rewarded, and the speed that is limited."""
        raise NotImplementedError

    def _healthy(self, state: PhysicsState) -> jax.Array:
        raise NotImplementedError

    def _valid(self, qpos: jax.Array) -> jax.Array:
        """The configuration meant by noisy coordinates."""
        raise NotImplementedError


@dataclass(frozen=True)
class SafeVelocityHalfCheetah(SafeVelocity):
    """Runs in the x–z plane; its limit is on signed forward velocity, and it never terminates."""

    robot: ClassVar[str] = "half_cheetah"
    base_limit: ClassVar[float] = 3.2096
    control_cost: ClassVar[float] = 0.1
    alive_bonus: ClassVar[float] = 0.0
    hidden: ClassVar[int] = 1
    upright: ClassVar[bool] = True

    def _velocity(self, old: PhysicsState, new: PhysicsState) -> tuple[jax.Array, jax.Array]:
        forward = (new.qpos[0] - old.qpos[0]) / self._dt
        return forward, forward

    def _healthy(self, state: PhysicsState) -> jax.Array:
        return jnp.bool_(True)

    def _valid(self, qpos: jax.Array) -> jax.Array:
        return qpos


@dataclass(frozen=True)
class SafeVelocityAnt(SafeVelocity):
    """Runs in space; its limit is on the horizontal speed of the torso, and a fall or a jump terminates."""

    robot: ClassVar[str] = "ant"
    base_limit: ClassVar[float] = 2.6222
    control_cost: ClassVar[float] = 0.5
    alive_bonus: ClassVar[float] = 1.0
    hidden: ClassVar[int] = 2

    def _velocity(self, old: PhysicsState, new: PhysicsState) -> tuple[jax.Array, jax.Array]:
        velocity = (new.anchor - old.anchor) / self._dt
        return velocity[0], jnp.linalg.norm(velocity)

    def _healthy(self, state: PhysicsState) -> jax.Array:
        height = state.qpos[2]
        return (height >= 0.2) & (height <= 1.0)

    def _valid(self, qpos: jax.Array) -> jax.Array:
        return qpos.at[3:7].divide(jnp.linalg.norm(qpos[3:7]))  # a rotation is a unit quaternion
