"""SafeDarkMujoco: a dark arena with one goal and hazards; a Point or Car robot that feels only its own pose.

Paper, §"Environments" of the appendix: the agent perceives its position and rotation matrix, a sparse reward of
1 is paid at the goal and ends the episode, and one policy action is repeated over n = 5 simulation steps. Robots,
sizes, keep-outs and the cost rule are Safety-Gymnasium's (Goal task, level 1). Readings: a simulation step is
Safety-Gymnasium's env step of 10 physics steps; cost is 1 for each of them that ends inside a hazard, so at most
n per step; an episode ends at the very simulation step that reaches the goal, and the rest of the n neither add
cost nor move the robot.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.envs import spawn
from safeicrl.envs.api import EnvSpec, Key, Split, Step, check_split, record
from safeicrl.envs.mujoco import models, physics
from safeicrl.envs.mujoco.physics import Job, Motion, RobotState
from safeicrl.envs.spaces import Box
from safeicrl.errors import UserError, check_integer, check_number, check_range

EXTENT = 1.5  # the arena is [−EXTENT, EXTENT]², metres
GOAL_RADIUS = 0.3
HAZARD_RADIUS = 0.2
# Two objects spawn no closer than the sum of their keep-outs, and no nearer to the arena's edge than their own.
START_KEEPOUT, GOAL_KEEPOUT, HAZARD_KEEPOUT = 0.4, 0.305, 0.18
SUBSTEPS = 10  # physics steps in one simulation step
PROPOSALS = 128  # of rejection sampling, drawn at once for each object
MAX_HAZARDS = 16  # the proposals found room for all of them in each of 100,000 arenas; for 20, not in every one


@record
class Arena:
    """One task; (x, y) in metres, the robot starts at the origin."""

    goal: jax.Array  # [2]
    hazards: jax.Array  # [hazards, 2]


@dataclass(frozen=True)
class SafeDarkMujoco:
    """What Point and Car share; every number the paper leaves open is a parameter."""

    robot: ClassVar[str]
    upright: ClassVar[bool] = False  # it moves on the floor, not in an upright plane

    macro_steps: int = 5  # n, simulation steps in one step
    hazards: int = 8  # discs; inside one, each simulation step costs 1
    cells: int = 9  # objects spawn on a grid of cells², as in SafeDarkRoom
    alpha: float = 0.5  # of the spawn distributions, per cell
    max_steps: int = 75  # in an episode
    episodes: int = 20  # K, in a trial
    train_budget: tuple[float, float] = (10.0, 50.0)  # range of δ in training
    test_budget: tuple[float, float] = (10.0, 50.0)  # range of δ in evaluation
    engine: str = "auto"  # of the physics, see physics.py

    def __post_init__(self) -> None:
        check_integer("macro_steps", self.macro_steps, 1, 10_000)
        check_integer("hazards", self.hazards, 0)
        check_integer("cells", self.cells, 5, 1000)
        check_integer("max_steps", self.max_steps, 1)
        check_integer("episodes", self.episodes, 1)
        check_range("train_budget", self.train_budget)
        check_range("test_budget", self.test_budget)
        check_number("alpha", self.alpha, 0.0)
        if self.hazards > MAX_HAZARDS:
            raise UserError(
                f"hazards must be at most {MAX_HAZARDS} (more do not fit under the keep-outs), got {self.hazards}"
            )
        physics.check_engine(self.robot, self.engine)

    @property
    def spec(self) -> EnvSpec:
        """Spaces, limits and budget ranges."""
        return EnvSpec(
            observation=Box(12),
            action=Box(2, -1.0, 1.0),
            max_steps=self.max_steps,
            episodes=self.episodes,
            train_budget=self.train_budget,
            test_budget=self.test_budget,
            cost_unit=1.0,
            task_features=2 + 2 * self.hazards,
            max_cost=float(self.macro_steps),
        )

    @property
    def job(self) -> Job:
        """The physics of one step."""
        return Job(self.robot, SUBSTEPS, self.macro_steps, self.engine)

    @property
    def approximation(self) -> str | None:
        """How the physics differ from the robot's real ones; None where they do not."""
        return physics.approximation(self.job)

    def sample_task(self, key: Key, split: Split) -> Arena:
        """An arena: the goal first, then the hazards one after another, under the original keep-outs.

        A cell ∝ exp(∓α·distance from the centre in cells), a point uniform in it, again until it keeps its
        distances: rejection sampling, with all proposals drawn at once.
        """
        weights = np.exp(spawn.log_weights(self.cells, self.alpha, check_split(split))).ravel()
        cdf = jnp.asarray(np.cumsum(weights) / weights.sum(), float)
        keepouts = np.array([START_KEEPOUT, GOAL_KEEPOUT] + [HAZARD_KEEPOUT] * self.hazards)
        objects = jnp.full((len(keepouts), 2), jnp.inf).at[0].set(0.0)  # not yet placed: infinitely far away

        def place(objects: jax.Array, draw: tuple[jax.Array, Key]) -> tuple[jax.Array, None]:
            index, key = draw
            own = jnp.asarray(keepouts, float)[index]
            points = self._propose(key, cdf)  # [proposals, 2]
            distance = jnp.linalg.norm(points[:, None] - objects, axis=-1)  # [proposals, objects]
            free = (distance >= keepouts + own).all(-1) & (jnp.abs(points) <= EXTENT - own).all(-1)
            return objects.at[index].set(points[jnp.argmax(free)]), None

        indices = jnp.arange(1, len(keepouts))
        objects, _ = jax.lax.scan(place, objects, (indices, jax.random.split(key, len(indices))))
        return Arena(goal=objects[1], hazards=objects[2:])

    def _propose(self, key: Key, cdf: jax.Array) -> jax.Array:
        cell_key, jitter_key = jax.random.split(key)
        cell = jnp.searchsorted(cdf, jax.random.uniform(cell_key, (PROPOSALS,)))
        cell = jnp.minimum(cell, self.cells**2 - 1)  # a draw above the rounded-down last entry
        corner = jnp.stack([cell % self.cells, cell // self.cells], axis=-1)
        jitter = jax.random.uniform(jitter_key, (PROPOSALS, 2))
        return (corner + jitter) * (2 * EXTENT / self.cells) - EXTENT

    def reset(self, key: Key, task: Arena) -> tuple[RobotState, jax.Array]:
        """The robot rests at the origin and faces anywhere."""
        yaw = jax.random.uniform(key, (), float, 0.0, 2 * math.pi)
        qpos, qvel = self._rest(yaw)
        return self.reset_to(qpos, qvel)

    def reset_to(self, qpos: jax.Array, qvel: jax.Array) -> tuple[RobotState, jax.Array]:
        """Start an episode from a given physical state."""
        state = RobotState.start(qpos, qvel)
        return state, self.observe(state.physics.qpos)

    def step(self, key: Key, state: RobotState, action: jax.Array, task: Arena) -> tuple[RobotState, Step]:
        """Repeat `action`, clipped to ±1, for `macro_steps` simulation steps or until the goal."""
        motion = physics.step(self.job, state.physics, self.control(action))
        return self.after(state, action, motion, task)

    def control(self, action: jax.Array) -> jax.Array:
        """The action, clipped to ±1."""
        return jnp.clip(action, -1.0, 1.0)

    def after(self, state: RobotState, action: jax.Array, motion: Motion, task: Arena) -> tuple[RobotState, Step]:
        """What the motion of one step led to, until the goal."""
        position = motion.states.qpos[:, :2]  # [macro, 2]
        at_goal = jnp.linalg.norm(position - task.goal, axis=-1) <= GOAL_RADIUS
        to_hazards = jnp.linalg.norm(position[:, None] - task.hazards, axis=-1)  # [macro, hazards]
        in_hazard = (to_hazards < HAZARD_RADIUS).any(-1)

        ends = at_goal | motion.failed
        before_end = jnp.cumsum(ends) - ends == 0  # the simulation step that ends the episode included
        last = jnp.where(ends.any(), jnp.argmax(ends), self.macro_steps - 1)
        failed = motion.failed[last]
        reached = at_goal[last] & ~failed
        terminated = reached | failed
        state = RobotState(
            physics=jax.tree.map(lambda x: x[last], motion.states), time=state.time + 1, failed=failed
        )
        return state, Step(
            observation=self.observe(state.physics.qpos),
            reward=reached.astype(jnp.float32),
            cost=(in_hazard & before_end & ~motion.failed).sum().astype(jnp.float32),
            terminated=terminated,
            truncated=(state.time >= self.max_steps) & ~terminated,
        )

    def task_features(self, task: Arena) -> jax.Array:
        """Goal and hazard positions."""
        return jnp.concatenate([task.goal, task.hazards.ravel()])

    def observe(self, qpos: jax.Array) -> jax.Array:
        """The body's position (3) and rotation matrix, row by row (9): all the robot ever senses."""
        raise NotImplementedError

    def _rest(self, yaw: jax.Array) -> tuple[jax.Array, jax.Array]:
        """qpos and qvel of the robot standing at the origin."""
        raise NotImplementedError

    def make_task(self, goal: Sequence[float], hazards: Sequence[Sequence[float]]) -> Arena:
        """An arena laid out by hand, from (x, y) positions."""
        goal_xy = _position("goal", goal)
        places = np.array([_position("hazard", hazard) for hazard in hazards]).reshape(-1, 2)
        if len(places) != self.hazards:
            raise UserError(
                f"task must have {self.hazards} hazards, got {len(places)}; "
                f"the parameter hazards={len(places)} makes an environment for it"
            )
        if np.linalg.norm(goal_xy) <= GOAL_RADIUS:
            raise UserError(f"goal {goal!r} covers the start (0, 0); move it further than {GOAL_RADIUS} away")
        for name, point in (("start", np.zeros(2)), ("goal", goal_xy)):
            inside = np.linalg.norm(places - point, axis=-1) < HAZARD_RADIUS
            if inside.any():
                raise UserError(f"hazard {tuple(places[inside.argmax()].tolist())} covers the {name}")
        return Arena(goal=jnp.asarray(goal_xy, float), hazards=jnp.asarray(places, float))


def _position(name: str, value: Sequence[float]) -> np.ndarray:
    try:
        position = np.asarray(value, float)
    except (TypeError, ValueError):
        position = np.empty(0)
    if position.shape != (2,):
        raise UserError(f"{name} must be an (x, y) pair of numbers, got {value!r}")
    if not (np.abs(position) <= EXTENT).all():  # false for NaN as well
        raise UserError(f"{name} {value!r} is outside the arena, |x| and |y| ≤ {EXTENT}")
    return position


@dataclass(frozen=True)
class SafeDarkPoint(SafeDarkMujoco):
    """A sphere with a nose: thrust along it and a yaw servo, both nearly bang-bang."""

    robot: ClassVar[str] = "point"

    def observe(self, qpos: jax.Array) -> jax.Array:
        """From qpos = (x, y, yaw)."""
        x, y, yaw = qpos
        cos, sin, zero, one = jnp.cos(yaw), jnp.sin(yaw), jnp.zeros_like(yaw), jnp.ones_like(yaw)
        return jnp.stack([x, y, 0.1 * one, cos, -sin, zero, sin, cos, zero, zero, zero, one])

    def _rest(self, yaw: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(3).at[2].set(yaw), jnp.zeros(3)


@dataclass(frozen=True)
class SafeDarkCar(SafeDarkMujoco):
    """Two driven wheels and a caster; the front is −y."""

    robot: ClassVar[str] = "car"

    def observe(self, qpos: jax.Array) -> jax.Array:
        """From the free joint: position and unit quaternion."""
        w, x, y, z = qpos[3:7] / jnp.linalg.norm(qpos[3:7])
        rotation = [
            *(w * w + x * x - y * y - z * z, 2 * (x * y - w * z), 2 * (x * z + w * y)),
            *(2 * (x * y + w * z), w * w - x * x + y * y - z * z, 2 * (y * z - w * x)),
            *(2 * (x * z - w * y), 2 * (y * z + w * x), w * w - x * x - y * y + z * z),
        ]
        return jnp.concatenate([qpos[:3], jnp.stack(rotation)])

    def _rest(self, yaw: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = models.load(self.robot)
        qpos = jnp.asarray(model.qpos0, float).at[3].set(jnp.cos(yaw / 2)).at[6].set(jnp.sin(yaw / 2))
        return qpos, jnp.zeros(model.nv)
