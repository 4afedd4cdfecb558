"""The reference lines: the planner against brute force, the explorer against its promises."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probe import OPTIMISED

from safeicrl.agents.reference import (
    FREE,
    GOAL,
    OBSTACLE,
    UNKNOWN,
    ExplorerAgent,
    PlannerAgent,
    RandomAgent,
    RoomMap,
    optimum,
)
from safeicrl.envs.api import replace
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.tokens import first_token
from safeicrl.trial import episode_sums, run_trials, sample_queue

SMALL = SafeDarkRoom(size=4, obstacles=8, max_steps=6, episodes=2)
KEY = jax.random.key(0)
play = eqx.filter_jit(run_trials, compiler_options=OPTIMISED)  # planning is work


def sample(env: SafeDarkRoom, split: str, count: int, seed: int = 0):
    return sample_queue(env, split, (1.0, 2.0), (count, 1), jax.random.key(seed))[0]


def brute_force(env: SafeDarkRoom, goal: int, obstacles: np.ndarray) -> dict[int, int]:
    """Fewest steps for each cost at which the goal can be reached, by playing all 5^max_steps action sequences."""
    sequences = np.array(list(itertools.product(range(5), repeat=env.max_steps)))
    row = np.full(len(sequences), env.size // 2)
    column, cost, done = row.copy(), np.zeros(len(row), int), np.zeros(len(row), bool)
    best: dict[int, int] = {}
    for time, action in enumerate(sequences.T, start=1):
        row = np.clip(row + (action == 2) - (action == 1), 0, env.size - 1)
        column = np.clip(column + (action == 4) - (action == 3), 0, env.size - 1)
        cell = row * env.size + column
        cost += np.where(done, 0, obstacles[cell])
        for c in np.unique(cost[(cell == goal) & ~done]):
            best.setdefault(int(c), time)
        done |= cell == goal
    return best


@pytest.fixture(scope="module")
def solved():
    tasks = jax.tree.map(lambda *x: jnp.concatenate(x), sample(SMALL, "test", 16), sample(SMALL, "train", 4))
    rooms = jax.tree.map(lambda x: np.asarray(x[:, 0]), tasks)
    return tasks, [brute_force(SMALL, *room) for room in zip(rooms.goal, rooms.obstacles, strict=True)]


solve = eqx.filter_jit(optimum, compiler_options=OPTIMISED)


def test_optimum_against_brute_force(solved):
    tasks, answers = solved
    rooms = jax.tree.map(lambda x: x[:, 0], tasks)
    for budget in range(5):
        found = solve(SMALL, rooms, jnp.full(len(answers), budget + 0.5))
        for i, best in enumerate(answers):
            cost = min(best, default=np.inf)
            assert float(found.cost[i]) == cost
            assert float(found.steps[i]) == best.get(cost, np.inf)
            assert bool(found.goal[i]) == (cost <= budget)
    assert len({min(best, default=None) for best in answers}) >= 3  # the rooms ask something


def test_a_costlier_route_is_taken_when_the_free_one_is_too_long():
    env = SafeDarkRoom(size=5, obstacles=3, max_steps=4)
    wall = [(1, 2), (1, 3), (1, 1)]  # the goal (0, 2) lies two steps up, behind a wall; the way round takes six
    task = jax.tree.map(lambda x: x[None], env.make_task((0, 2), wall))
    found = solve(env, task, jnp.array([1.0]))
    assert (bool(found.goal[0]), float(found.cost[0]), float(found.steps[0])) == (True, 1.0, 2.0)
    patient = SafeDarkRoom(size=5, obstacles=3, max_steps=8)
    found = solve(patient, task, jnp.array([0.0]))
    assert (bool(found.goal[0]), float(found.cost[0]), float(found.steps[0])) == (True, 0.0, 6.0)


def test_the_planner_plays_the_optimum(solved):
    tasks, answers = solved
    rows = len(answers)
    for budget in (0, 1, 3):
        queue = jax.tree.map(lambda x: jnp.concatenate([x, x[::-1]], axis=1), tasks)  # two trials a row
        budgets = jnp.full((rows, 2), float(budget))
        trials = play(SMALL, PlannerAgent(SMALL), queue, budgets, KEY, episodes=2, steps=24)
        sums = jax.tree.map(np.asarray, episode_sums(trials, 2))
        second = jax.tree.map(np.asarray, trials)
        for i, best in enumerate(answers):
            cost = min(best, default=np.inf)
            expected = (1.0, cost, best[cost]) if cost <= budget else (0.0, 0.0, 6.0)
            for episode in range(2):
                got = tuple(float(x[i, episode]) for x in (sums.returns, sums.costs, sums.lengths))
                assert got == expected
            played = second.valid[i] & (second.trial[i] == 1)
            other = min(answers[rows - 1 - i], default=np.inf)
            assert second.reward[i][played].sum() == (2 if other <= budget else 0)


def known_when_entered(trials, start: int, size: int):
    """[row, time]: was the cell that a step led to known from earlier steps, or as the start cell?"""
    cell = trials.final_observation @ np.array([size, 1])
    answer = np.ones(cell.shape, bool)
    for row in range(len(cell)):
        seen = {start}
        for time in np.flatnonzero(trials.valid[row]):
            answer[row, time] = cell[row, time] in seen
            seen.add(cell[row, time])
    return answer


def check_promises(env: SafeDarkRoom, trials, sums, budgets: np.ndarray) -> None:
    trials, costs = jax.tree.map(np.asarray, trials), np.asarray(sums.costs)
    assert (costs <= budgets[:, None]).all()
    entered = ~known_when_entered(trials, env.start, env.size) & trials.valid
    assert (trials.token.ctg[entered] >= 1).all()
    # once the goal was found, every later episode reaches it
    returns = np.asarray(sums.returns)
    assert (np.diff(returns, axis=1) >= 0).all()


@pytest.mark.parametrize("env", [SMALL, SafeDarkRoom(size=5, obstacles=14, max_steps=14)], ids=["4×4", "5×5"])
def test_the_explorer_keeps_its_promises_in_crowded_rooms(env):
    rows, episodes = 120, 12
    budgets = np.arange(rows) % 6.0
    steps = episodes * env.max_steps
    tasks = sample(env, "train", rows)
    agent = ExplorerAgent(env)
    trials = play(env, agent, tasks, budgets[:, None], KEY, episodes=episodes, steps=steps)
    sums = episode_sums(trials, episodes)
    check_promises(env, trials, sums, budgets)
    assert np.asarray(sums.returns)[budgets == 0].sum() == 0  # nothing unknown may be entered
    assert np.asarray(sums.returns)[budgets >= 3, -1].mean() > 0.5


def test_the_explorer_in_the_papers_rooms():
    """No budget broken, at least 44 of 50 goals over budgets 1 … 9 (uniform in [1, 10], rounded down)."""
    env = SafeDarkRoom()
    budgets = np.repeat(np.arange(1.0, 10.0), 2)
    tasks = sample(env, "test", len(budgets))
    trials = play(env, ExplorerAgent(env), tasks, budgets[:, None], KEY, episodes=50, steps=1500)
    sums = episode_sums(trials, 50)
    check_promises(env, trials, sums, budgets)
    assert np.asarray(sums.returns).sum(axis=1).mean() >= 44


@pytest.mark.parametrize(("budget", "action"), [(2.0, 1), (1.0, 4)], ids=["affordable", "not affordable"])
def test_a_known_goal_out_of_budget_sends_the_explorer_looking(budget, action):
    """Two known obstacles lie between the start and the goal above; only the cell to the right is unknown."""
    env = SafeDarkRoom(size=5, obstacles=2)
    cells = jnp.full((5, 5, 1), FREE).at[:2].set(OBSTACLE).at[0, 2].set(GOAL).at[2, 3].set(UNKNOWN)
    cells = cells.at[2, :2].set(OBSTACLE).at[2, 4].set(OBSTACLE).at[1, 2].set(OBSTACLE)
    if budget == 1:
        cells = cells.at[0, 2].set(OBSTACLE).at[0, 0].set(GOAL)  # further in: three obstacles on the way
    token = first_token(env.spec, jnp.array([2, 2]), jnp.float32(budget))
    token = jax.tree.map(lambda x: x[None], replace(token, episode=jnp.int32(1), action=jnp.int32(0)))
    memory = RoomMap(cells=cells, stuck=jnp.array([False]))
    assert int(eqx.filter_jit(ExplorerAgent(env).act)(memory, token, KEY)[1][0]) == action


def test_the_explorer_forgets_between_trials():
    """A second trial in another room starts from nothing: the same as that room alone."""
    env = SafeDarkRoom(size=4, obstacles=3, max_steps=10)
    first, second = sample(env, "test", 20, seed=1), sample(env, "test", 20, seed=2)
    budgets = jnp.full((20, 1), 3.0)
    agent = ExplorerAgent(env)
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), first, second)
    queue = play(env, agent, both, jnp.tile(budgets, 2), KEY, episodes=3, steps=60)
    alone = play(env, agent, second, budgets, KEY, episodes=3, steps=30)
    for row in range(20):
        of_queue = np.asarray(queue.action[row])[np.asarray(queue.valid[row] & (queue.trial[row] == 1))]
        of_alone = np.asarray(alone.action[row])[np.asarray(alone.valid[row])]
        np.testing.assert_array_equal(of_queue, of_alone)


def test_the_random_agent_is_uniform():
    token = first_token(SMALL.spec, jnp.array([2, 2]), jnp.float32(1))
    token = jax.tree.map(lambda x: jnp.broadcast_to(x, (20_000, *x.shape)), token)
    action = RandomAgent(SMALL.spec.action).act(None, token, KEY)[1]
    np.testing.assert_allclose(np.bincount(action, minlength=5) / 20_000, 0.2, atol=0.015)
