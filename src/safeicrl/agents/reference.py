"""Reference agents: what is reached with no knowledge, with the rules alone, and with full knowledge.

    RandomAgent     uniform actions, any environment
    ExplorerAgent   SafeDarkRoom: knows the rules, not the room; remembers what it saw; never breaks its budget
    PlannerAgent    SafeDarkRoom: sees the room; the upper bound for each room and budget

The two that plan share one dynamic programme, `arrival_values`: a shortest path over cell × budget left. It needs
no axis for time, because moves are deterministic: the goal can be reached in t steps exactly when its shortest
affordable path has at most t. Inside, arrays have the rows last, so that the CPU's vector lanes run along them, and
cells are [row of the grid, column], so that a neighbour is a shift and not a gather.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.envs.api import Key, PyTree, record, replace
from safeicrl.envs.dark_room import MOVES, Room, SafeDarkRoom
from safeicrl.envs.spaces import Box, Discrete
from safeicrl.tokens import Token, usable_budget

INF = np.float32(np.inf)
UNKNOWN, FREE, OBSTACLE, GOAL = range(4)  # what the explorer remembers of a cell
GOAL_FIRST = np.float32(-(2**20))  # the value of a known goal: below that of any unknown cell
CHECK_EVERY = 4  # sweeps between two checks for convergence: a check costs as much as a sweep


class RandomAgent(eqx.Module):
    """Uniform random actions: the lowest baseline."""

    action: Discrete | Box = eqx.field(static=True)

    def init(self, tasks: PyTree, rows: int) -> None:
        """No memory."""

    def extend(self, memory: None, steps: int) -> None:
        """No memory."""

    def act(self, memory: None, token: Token, key: Key) -> tuple[None, jax.Array, PyTree]:
        """A uniform action for each row."""
        return None, self.action.sample(key, token.reward.shape), None


@record
class RoomMap:
    """What the explorer knows of the room it is in."""

    cells: jax.Array  # [size, size, row] UNKNOWN, FREE, OBSTACLE or GOAL
    stuck: jax.Array  # [row] bool: in this episode, no unknown cell with a way back is left


class ExplorerAgent(eqx.Module):
    """Knows the rules and remembers, over a trial's episodes, which cells were free, an obstacle or the goal.

    If the goal is known, it takes the cheapest known route that is in time; the route by which it found the goal
    always is. Otherwise it goes to the unknown cell with the least steps + price · cost; the price of a unit of
    budget is the number of steps left per unit left.

    Before it enters an unknown cell, it assumes an obstacle there. It never steps where the rest of the budget
    would not pay for the way back to a free cell, so it keeps its budget in every room. When no unknown cell with a
    way back is left, it enters one with the episode's last step, after which it needs no way back.
    """

    env: SafeDarkRoom = eqx.field(static=True)
    levels: int = eqx.field(static=True, default=11)  # it plans with a budget of at most levels − 1

    def init(self, tasks: PyTree, rows: int) -> RoomMap:
        """Nothing is known; the tasks are ignored."""
        cells = jnp.full((self.env.size, self.env.size, rows), UNKNOWN)
        return RoomMap(cells=cells, stuck=jnp.zeros(rows, bool))

    def extend(self, memory: RoomMap, steps: int) -> RoomMap:
        """The memory has its full size from the start."""
        return memory

    def act(self, memory: RoomMap, token: Token, key: Key) -> tuple[RoomMap, jax.Array, PyTree]:
        """Remember the last step, plan, and take the plan's first step."""
        cells = self._remember(memory.cells, token)
        stuck = memory.stuck & ~token.start
        budget = jnp.clip(token.ctg, 0, self.levels - 1).astype(jnp.int32)
        left = self.env.max_steps - token.time
        way_back = _way_back((cells == FREE) | (cells == GOAL))  # [size, size, row]
        goal_seen = (cells == GOAL).any(axis=(0, 1))
        price = jnp.where(goal_seen | stuck, 0.0, left / jnp.maximum(budget, 1))
        values = self._plan(cells, jnp.where(stuck, 0, way_back), price)

        rows = jnp.arange(len(budget))
        row, column = _neighbours(token.observation, self.env.size)  # [action, row]
        values = values[:, row, column, rows]  # [level, action, row]
        level = self._allowance(values.min(axis=1), budget, left)
        value = values[level, :, rows].T  # [action, row]
        nearest = value.min(axis=0)
        go = jnp.isfinite(nearest) & (~stuck | (nearest == left))
        retreat = way_back[row, column, rows] + (cells[row, column, rows] != FREE)  # 0 for staying on a free cell
        action = jnp.where(go, value.argmin(axis=0), retreat.argmin(axis=0))
        return RoomMap(cells=cells, stuck=stuck | ~go), action.astype(jnp.int32), None

    def _remember(self, cells: jax.Array, token: Token) -> jax.Array:
        rows = jnp.arange(len(token.reward))
        # The observation that ended an episode is not told; the rules say where the last action led.
        row, column = (x[jnp.maximum(token.action, 0), rows] for x in _neighbours(token.previous, self.env.size))
        what = jnp.where(token.reward > 0, GOAL, jnp.where(token.cost > 0, OBSTACLE, FREE))
        start = divmod(self.env.start, self.env.size)
        blank = jnp.full_like(cells, UNKNOWN).at[start].set(FREE)
        return jnp.where(token.first, blank, cells.at[row, column, rows].set(what))

    def _plan(self, cells: jax.Array, reserve: jax.Array, price: jax.Array) -> jax.Array:
        """Values of entering each cell on the way to the goal, or to an unknown cell; [level, size, size, row]."""
        left = jnp.arange(self.levels)[:, None, None, None] - 1
        unknown = jnp.where((cells == UNKNOWN) & (left >= reserve), 1.0, INF)
        return arrival_values(
            target=jnp.where(cells == GOAL, GOAL_FIRST + 1, unknown),
            free=cells == FREE,
            obstacle=cells == OBSTACLE,
            reserve=reserve,
            price=price,
            levels=self.levels,
            sweeps=self.env.max_steps,
        )

    def _allowance(self, value: jax.Array, budget: jax.Array, left: jax.Array) -> jax.Array:
        """[row] The least budget that reaches a known goal in time, or else all of it; `value` is [level, row]."""
        enough = (value - GOAL_FIRST <= left) & (jnp.arange(self.levels)[:, None] <= budget)
        return jnp.where(enough.any(axis=0), enough.argmax(axis=0), budget)


@record
class Plan:
    """Every room of a row's queue, solved."""

    distance: jax.Array  # [level, size, size, row, queue] fewest steps to the goal at a cost of at most level
    obstacles: jax.Array  # [size, size, row, queue] bool
    trial: jax.Array  # [row] int32, place in the queue


class PlannerAgent(eqx.Module):
    """Reaches the goal whenever the budget allows it: by the cheapest route, and among those by the shortest.

    If no route is affordable, it stays in the start cell, which costs nothing.
    """

    env: SafeDarkRoom = eqx.field(static=True)

    def init(self, tasks: Room, rows: int) -> Plan:
        """Solve every room of every row's queue."""
        shape = tasks.goal.shape  # [row, queue]
        distance = steps_to_goal(self.env, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tasks))
        obstacles = _grid(tasks.obstacles.reshape(-1, self.env.size**2), self.env.size)
        return Plan(
            distance=distance.reshape(*distance.shape[:3], *shape),
            obstacles=obstacles.reshape(*obstacles.shape[:2], *shape),
            trial=jnp.full(rows, -1),
        )

    def extend(self, memory: Plan, steps: int) -> Plan:
        """The memory has its full size from the start."""
        return memory

    def act(self, memory: Plan, token: Token, key: Key) -> tuple[Plan, jax.Array, PyTree]:
        """Follow the shortest path of the smallest allowance that still reaches the goal in time."""
        trial = jnp.minimum(memory.trial + token.first, memory.distance.shape[-1] - 1)
        rows = jnp.arange(len(trial))
        here = memory.distance[:, token.observation[:, 0], token.observation[:, 1], rows, trial]  # [level, row]
        enough = (here <= self.env.max_steps - token.time) & (jnp.arange(len(here))[:, None] <= token.ctg)
        row, column = _neighbours(token.observation, self.env.size)  # [action, row]
        left = enough.argmax(axis=0) - memory.obstacles[row, column, rows, trial]
        ahead = jnp.where(left < 0, INF, memory.distance[jnp.maximum(left, 0), row, column, rows, trial])
        action = jnp.where(enough.any(axis=0), ahead.argmin(axis=0), 0)
        return replace(memory, trial=trial), action.astype(jnp.int32), None


@record
class Optimum:
    """What full knowledge reaches in a room; [row]."""

    goal: jax.Array  # bool: the goal can be reached in time and within the budget; the best return is 1, or else 0
    cost: jax.Array  # the lowest cost of reaching the goal in time, for any budget; inf if impossible
    steps: jax.Array  # fewest steps at that cost


@eqx.filter_jit
def optimum(env: SafeDarkRoom, tasks: Room, budgets: jax.Array) -> Optimum:
    """The exact optimum of each room for each budget; `tasks` and `budgets` are [row]."""
    here = steps_to_goal(env, tasks)[:, *divmod(env.start, env.size)]  # [level, row]
    in_time = here <= env.max_steps
    level = jnp.argmax(in_time, axis=0)
    cost = jnp.where(in_time.any(axis=0), level, INF)
    steps = jnp.where(in_time.any(axis=0), jnp.take_along_axis(here, level[None], axis=0)[0], INF)
    return Optimum(goal=cost <= usable_budget(budgets, env.spec), cost=cost, steps=steps)


def steps_to_goal(env: SafeDarkRoom, tasks: Room) -> jax.Array:
    """Fewest steps to the goal at a cost of at most `level`: [level, size, size, row], inf where out of reach."""
    obstacles = _grid(tasks.obstacles, env.size)
    goal = _grid(jax.nn.one_hot(tasks.goal, env.size**2, dtype=bool), env.size)
    arrival = arrival_values(
        target=jnp.where(goal, 1.0, INF),
        free=~obstacles & ~goal,
        obstacle=obstacles,
        reserve=jnp.zeros_like(obstacles, jnp.int32),
        price=jnp.float32(0),
        levels=env.max_steps + 1,  # no episode can cost more than one unit per step
        sweeps=env.max_steps,
    )
    return jnp.where(goal, 0.0, _nearest(arrival))


def arrival_values(
    target: jax.Array,
    free: jax.Array,
    obstacle: jax.Array,
    reserve: jax.Array,
    price: jax.Array,
    levels: int,
    sweeps: int,
) -> jax.Array:
    """The least (steps + price · cost) of entering a cell and going on to a target: [level, size, size, row].

    `level` is the budget left before the cell is entered. `target` is the value of entering a target, inf
    elsewhere, [size, size, row], or [level, size, size, row] where it depends on the budget. An obstacle may be
    entered only if `reserve` of the budget is left afterwards. Bellman–Ford sweeps until nothing changes.
    """
    left = jnp.arange(levels)[:, None, None, None] - 1
    target = jnp.broadcast_to(target, (levels, *obstacle.shape))
    enter_free = jnp.where(free, 1.0, INF)
    enter_obstacle = jnp.where(obstacle & (left >= reserve), 1.0 + price, INF)

    def sweep(_: int, value: jax.Array) -> jax.Array:
        ahead = _nearest(value)
        # Entering an obstacle takes one level. The roll wraps level 0 round, but level 0 never enters an obstacle.
        paid = jnp.roll(ahead, 1, axis=0) + enter_obstacle
        return jnp.minimum(target, jnp.minimum(ahead + enter_free, paid))

    def several(carry: tuple) -> tuple:
        value, _, count = carry
        new = jax.lax.fori_loop(0, CHECK_EVERY, sweep, value)
        return new, jnp.any(new < value), count + CHECK_EVERY

    start = (target, jnp.array(True), jnp.int32(0))
    return jax.lax.while_loop(lambda c: c[1] & (c[2] < sweeps), several, start)[0]


def _nearest(value: jax.Array) -> jax.Array:
    """The least value among the four neighbours; the grid is the axes −3 and −2."""
    up = jnp.pad(value, [(0, 0)] * (value.ndim - 3) + [(1, 1), (1, 1), (0, 0)], constant_values=INF)
    vertical = jnp.minimum(up[..., :-2, 1:-1, :], up[..., 2:, 1:-1, :])
    return jnp.minimum(vertical, jnp.minimum(up[..., 1:-1, :-2, :], up[..., 1:-1, 2:, :]))


def _grid(cells: jax.Array, size: int) -> jax.Array:
    """[row, size²] as [size, size, row]."""
    return jnp.moveaxis(cells.reshape(*cells.shape[:-1], size, size), 0, -1)


def _neighbours(observation: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Rows and columns that each action leads to, both [action, row]; walls block."""
    cells = jnp.clip(observation[None] + jnp.asarray(MOVES)[:, None], 0, size - 1)
    return cells[..., 0], cells[..., 1]


def _way_back(free: jax.Array) -> jax.Array:
    """The budget that the way from each cell to a free one needs at worst, [size, size, row].

    Four sweeps: a cell further away than that counts as unreachable.
    """
    need = jnp.where(free, 0.0, INF)
    for _ in range(4):
        need = jnp.where(free, 0.0, _nearest(need + ~free))
    return jnp.where(jnp.isfinite(need), need, 99).astype(jnp.int32)
