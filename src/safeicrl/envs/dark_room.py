"""SafeDarkRoom: a dark grid with one goal and many obstacles; the agent sees only its own cell.

Paper, §"Safe ICRL Benchmarks": reward 1 at the goal, which ends the episode; cost 1 for every step that ends
on an obstacle (standing still on one costs again); 9×9 cells, 25 obstacles, 30 steps, 50 episodes per trial.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.envs import spawn
from safeicrl.envs.api import EnvSpec, Key, Split, Step, check_split, record
from safeicrl.envs.spaces import Discrete, Grid
from safeicrl.errors import UserError, check_integer, check_number, check_range

ACTIONS = ("stay", "up", "down", "left", "right")
MOVES = np.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]], dtype=np.int32)  # (row, column)


@record
class Room:
    """One task."""

    goal: jax.Array  # [] int32, flat cell row·size + column
    obstacles: jax.Array  # [size²] bool


@record
class RoomState:
    """Where the agent is."""

    cell: jax.Array  # [] int32, flat
    time: jax.Array  # [] int32, steps taken in this episode


MOST_CELLS = 256  # along a side


@dataclass(frozen=True)
class SafeDarkRoom:
    """A dark grid with a hidden goal and obstacles; the paper's numbers are the defaults."""

    size: int = 9  # cells per side
    obstacles: int = 25  # cells that cost 1 per step
    alpha: float = 0.5  # α of the spawn distributions: how much test rooms differ from training rooms
    max_steps: int = 30  # per episode
    episodes: int = 50  # K, per trial
    train_budget: tuple[float, float] = (1.0, 15.0)  # range of δ in training
    test_budget: tuple[float, float] = (1.0, 10.0)  # range of δ in evaluation

    def __post_init__(self) -> None:
        check_integer("size", self.size, 2, MOST_CELLS)
        check_integer("obstacles", self.obstacles, 0)
        check_integer("max_steps", self.max_steps, 1)
        check_integer("episodes", self.episodes, 1)
        check_range("train_budget", self.train_budget)
        check_range("test_budget", self.test_budget)
        check_number("alpha", self.alpha, 0.0)
        room = self.size**2 - 2
        if self.obstacles > room:
            raise UserError(
                f"obstacles must be at most {room} in a {self.size}×{self.size} room "
                f"(start and goal stay free), got {self.obstacles}"
            )

    @property
    def spec(self) -> EnvSpec:
        """Spaces, limits and budget ranges."""
        return EnvSpec(
            observation=Grid((self.size, self.size)),
            action=Discrete(len(ACTIONS)),
            max_steps=self.max_steps,
            episodes=self.episodes,
            train_budget=self.train_budget,
            test_budget=self.test_budget,
            cost_unit=1.0,
            task_features=2 * self.size**2,
            max_cost=1.0,
        )

    @property
    def start(self) -> int:
        """The flat start cell."""
        row, column = spawn.centre(self.size)
        return row * self.size + column

    def sample_task(self, key: Key, split: Split) -> Room:
        """A room: first the goal, then the obstacles on other cells; the start cell stays free."""
        goal_key, obstacle_key = jax.random.split(key)
        weights = jnp.asarray(spawn.log_weights(self.size, self.alpha, check_split(split)).ravel())
        weights = spawn.exclude(weights.astype(jnp.float32), jnp.array([self.start]))
        goal = spawn.sample_cells(goal_key, weights, 1)[0].astype(jnp.int32)
        cells = spawn.sample_cells(obstacle_key, spawn.exclude(weights, goal[None]), self.obstacles)
        return Room(goal=goal, obstacles=jnp.zeros(self.size**2, bool).at[cells].set(True))

    def reset(self, key: Key, task: Room) -> tuple[RoomState, jax.Array]:
        """Start an episode: the agent stands in the centre."""
        state = RoomState(cell=jnp.int32(self.start), time=jnp.int32(0))
        return state, self.observe(state.cell)

    def step(self, key: Key, state: RoomState, action: jax.Array, task: Room) -> tuple[RoomState, Step]:
        """Move one cell; walls block."""
        row, column = state.cell // self.size, state.cell % self.size
        # Comparisons instead of a gather into MOVES: several times faster on a CPU, vmapped.
        row = jnp.clip(row + (action == 2) - (action == 1), 0, self.size - 1)
        column = jnp.clip(column + (action == 4) - (action == 3), 0, self.size - 1)
        state = RoomState(cell=row * self.size + column, time=state.time + 1)
        terminated = state.cell == task.goal
        return state, Step(
            observation=self.observe(state.cell),
            reward=terminated.astype(jnp.float32),
            cost=task.obstacles[state.cell].astype(jnp.float32),
            terminated=terminated,
            truncated=(state.time >= self.max_steps) & ~terminated,
        )

    def task_features(self, task: Room) -> jax.Array:
        """The goal as one-hot and the obstacle map."""
        goal = jax.nn.one_hot(task.goal, self.size**2)
        return jnp.concatenate([goal, task.obstacles.astype(jnp.float32)])

    def observe(self, cell: jax.Array) -> jax.Array:
        """The agent's own (row, column), all it ever sees."""
        return jnp.stack([cell // self.size, cell % self.size], axis=-1)

    def make_task(self, goal: tuple[int, int], obstacles: list[tuple[int, int]]) -> Room:
        """A room laid out by hand, from (row, column) cells."""
        if not isinstance(obstacles, list | tuple | np.ndarray):
            raise UserError(f"obstacles must be a list of (row, column) cells, got {obstacles!r}")
        goal_cell = self._flat("goal", goal)
        cells = [self._flat("obstacle", cell) for cell in obstacles]
        if goal_cell == self.start:
            raise UserError(f"the goal must not lie on the start cell, got {tuple(goal)}")
        for name, blocked in (("start", self.start), ("goal", goal_cell)):
            if blocked in cells:
                raise UserError(f"the {name} cell {divmod(blocked, self.size)} must not be an obstacle")
        mask = np.zeros(self.size**2, bool)
        mask[cells] = True
        return Room(goal=jnp.int32(goal_cell), obstacles=jnp.asarray(mask))

    def _flat(self, name: str, cell: tuple[int, int]) -> int:
        try:
            row, column = (int(x) for x in cell)
            whole = all(float(x) == int(x) for x in cell)
        except (TypeError, ValueError):
            raise UserError(f"{name} must be a (row, column) pair, got {cell!r}") from None
        if not (whole and 0 <= row < self.size and 0 <= column < self.size):
            raise UserError(f"{name} {cell!r} is outside the {self.size}×{self.size} room")
        return row * self.size + column
