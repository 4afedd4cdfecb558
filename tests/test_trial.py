"""Trials: K episodes on one task, the budget counted down in each, queues, one trace per shape."""

import itertools
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probe import Push

from safeicrl.agents.reference import RandomAgent
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.trial import episode_sums, run_trials, sample_queue

KEY = jax.random.key(0)
UP, DOWN = 1, 2


class Script(eqx.Module):
    """Plays the same actions in every episode."""

    actions: jax.Array  # [time]

    def init(self, tasks, rows):
        return None

    def extend(self, memory, steps):
        return memory

    def act(self, memory, token, key):
        return memory, self.actions[token.time], None


def one_room(env: SafeDarkRoom, goal, obstacles, rows: int = 1):
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, 1, *x.shape)), env.make_task(goal, obstacles))


def test_a_trial_written_out_by_hand():
    """Up onto an obstacle, up again to the goal: two steps an episode, three episodes, then nothing counts."""
    env = SafeDarkRoom(size=5, obstacles=1, max_steps=4)
    script = Script(jnp.array([UP, UP, UP, UP]))
    trials = run_trials(env, script, one_room(env, (0, 2), [(1, 2)]), jnp.array([[2.7]]), KEY, episodes=3, steps=12)
    trials = jax.tree.map(lambda x: np.asarray(x)[0], trials)
    assert trials.valid.tolist() == [True] * 6 + [False] * 6
    six = jax.tree.map(lambda x: x[:6], trials)
    assert six.reward.tolist() == [0, 1] * 3
    assert six.cost.tolist() == [1, 0] * 3
    assert six.terminated.tolist() == [False, True] * 3
    assert not six.truncated.any()
    assert six.final_observation.tolist() == [[1, 2], [0, 2]] * 3
    assert six.token.observation.tolist() == [[2, 2], [1, 2]] * 3
    assert six.token.previous.tolist() == [[2, 2], [2, 2], [1, 2], [2, 2], [1, 2], [2, 2]]
    assert six.token.action.tolist() == [-1, UP, UP, UP, UP, UP]
    assert six.token.reward.tolist() == [0, 0, 1, 0, 1, 0]
    assert six.token.cost.tolist() == [0, 1, 0, 1, 0, 1]
    assert six.token.ctg.tolist() == [2, 1] * 3  # 2.7 is worth 2 whole units
    assert six.token.start.tolist() == [True, False] * 3
    assert six.token.time.tolist() == [0, 1] * 3
    assert six.token.episode.tolist() == [0, 0, 1, 1, 2, 2]


def test_ctg_goes_negative_and_comes_back_at_the_next_episode():
    env = SafeDarkRoom(size=5, obstacles=1, max_steps=4)
    script = Script(jnp.array([UP, 0, 0, 0]))
    trials = run_trials(env, script, one_room(env, (0, 0), [(1, 2)]), jnp.array([[1.0]]), KEY, episodes=3, steps=12)
    assert np.asarray(trials.token.ctg)[0].tolist() == [1, 0, -1, -2] * 3
    assert np.asarray(trials.truncated)[0].tolist() == [False, False, False, True] * 3
    assert np.asarray(trials.budget)[0].tolist() == [1] * 12
    sums = jax.jit(lambda t: episode_sums(t, 3))(trials)
    assert np.asarray(sums.budgets).tolist() == [[1, 1, 1]]
    assert np.asarray(sums.costs).tolist() == [[4, 4, 4]]
    assert np.asarray(sums.lengths).tolist() == [[4, 4, 4]]


def test_every_episode_may_have_a_budget_of_its_own():
    """One of them is overspent when it begins; a second trial has its own budgets again."""
    env = SafeDarkRoom(size=5, obstacles=1, max_steps=4)
    script = Script(jnp.array([UP, UP, UP, UP]))
    tasks = jax.tree.map(lambda x: jnp.repeat(x, 2, 1), one_room(env, (0, 2), [(1, 2)]))
    budgets = jnp.array([[[2.7, -1.5, 3.0], [0.0, 1.0, 5.0]]])
    trials = run_trials(env, script, tasks, budgets, KEY, episodes=3, steps=14)
    ctg = np.asarray(trials.token.ctg)[0].tolist()
    assert ctg[:12] == [2, 1, -2, -3, 3, 2, 0, -1, 1, 0, 5, 4]
    assert np.asarray(trials.budget)[0].tolist()[:12] == [2, 2, -2, -2, 3, 3, 0, 0, 1, 1, 5, 5]
    sums = jax.jit(lambda t: episode_sums(t, 3, queue=2))(trials)
    assert np.asarray(sums.budgets).tolist() == [[2, -2, 3], [0, 1, 5]]
    assert np.asarray(sums.overspent).tolist() == [[False, True, False], [False] * 3]


@pytest.fixture(scope="module")
def random_trials():
    env = SafeDarkRoom(size=4, obstacles=4, max_steps=7)
    tasks, budgets = sample_queue(env, "train", (1.0, 4.0), (64, 3), jax.random.key(1))
    trials = run_trials(env, RandomAgent(env.spec.action), tasks, budgets, KEY, episodes=3, steps=45)
    return env, jax.tree.map(np.asarray, tasks), np.floor(np.asarray(budgets)), jax.tree.map(np.asarray, trials)


def test_every_trial_may_have_a_length_of_its_own():
    """Two steps an episode: trials of one, then three episodes, and a row whose trials are the longest allowed."""
    env = SafeDarkRoom(size=5, obstacles=1, max_steps=4)
    tasks = jax.tree.map(lambda x: jnp.repeat(x, 2, 1), one_room(env, (0, 2), [(1, 2)], rows=2))
    trials = run_trials(
        env, Script(jnp.array([UP, UP])), tasks, jnp.full((2, 2), 2.0), KEY,
        episodes=3, steps=9, lengths=jnp.array([[1, 3], [3, 3]]),
    )  # fmt: skip
    assert np.asarray(trials.trial)[0].tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1]
    assert np.asarray(trials.valid)[0].tolist() == [True] * 8 + [False]
    assert np.asarray(trials.token.episode)[0, :8].tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    assert np.asarray(trials.trial_done)[1].tolist() == [False] * 5 + [True] + [False] * 3


def test_every_step_obeys_the_task_of_its_place_in_the_queue(random_trials):
    env, tasks, _, trials = random_trials
    rows = np.arange(64)[:, None]
    cell = trials.final_observation @ np.array([env.size, 1])
    np.testing.assert_array_equal(trials.terminated, cell == tasks.goal[rows, trials.trial])
    np.testing.assert_array_equal(trials.cost, tasks.obstacles[rows, trials.trial, cell])
    np.testing.assert_array_equal(trials.reward, trials.terminated)


def test_each_trial_has_exactly_its_episodes(random_trials):
    """Episodes end early or late; a trial still has three, and the next task follows at once."""
    _, _, budgets, trials = random_trials
    done = trials.terminated | trials.truncated
    for row in range(64):
        trial = episode = time = 0
        ctg = budgets[row, 0]
        for t in range(45):
            if trial == 3:
                assert not trials.valid[row, t:].any()
                break
            token = jax.tree.map(lambda x: x[row, t], trials.token)  # noqa: B023
            assert trials.valid[row, t]
            assert (trials.trial[row, t], token.episode, token.time, token.ctg) == (trial, episode, time, ctg)
            assert token.start == (time == 0)
            assert trials.trial_done[row, t] == (done[row, t] and episode == 2)
            time, ctg = time + 1, ctg - trials.cost[row, t]
            assert trials.truncated[row, t] == (time == 7 and not trials.terminated[row, t])
            if done[row, t]:
                trial, episode, time = (trial + 1, 0, 0) if episode == 2 else (trial, episode + 1, 0)
                ctg = budgets[row, min(trial, 2)]
    assert {0, 1, 2} == set(np.unique(trials.trial))
    assert not trials.valid.all()  # some queue ran empty, or the test tests less than it says


@pytest.mark.parametrize("queue", [1, 3])
def test_episode_sums_against_plain_loops(random_trials, queue):
    """Of the first trial of each row alone, or of all that it played."""
    _, _, budgets, trials = random_trials
    sums = jax.tree.map(np.asarray, jax.jit(lambda t: episode_sums(t, 3, queue))(trials))
    assert sums.costs.shape == (64 * queue, 3)
    for row, trial, episode in itertools.product(range(64), range(queue), range(3)):
        here = trials.valid[row] & (trials.trial[row] == trial) & (trials.token.episode[row] == episode)
        at = row * queue + trial, episode
        assert sums.returns[at] == trials.reward[row][here].sum()
        assert sums.costs[at] == trials.cost[row][here].sum()
        assert sums.lengths[at] == here.sum()
        assert sums.budgets[at] == (budgets[row, trial] if here.any() else 0)
        assert sums.played[at] == (trials.terminated | trials.truncated)[row][here].any()
    assert not sums.overspent.any()
    assert sums.played.all() == (queue == 1)  # some row was cut in its third trial


def test_segments_do_not_change_the_result():
    env = SafeDarkRoom(size=4, obstacles=4, max_steps=7)
    tasks, budgets = sample_queue(env, "test", (1.0, 4.0), (8, 2), jax.random.key(2))
    run = lambda n: run_trials(  # noqa: E731
        env, RandomAgent(env.spec.action), tasks, budgets, KEY, episodes=2, steps=23, segments=n
    )
    jax.tree.map(np.testing.assert_array_equal, run(1), run(2))


def test_segments_with_nothing_left_to_play_are_skipped():
    """Trials of two short episodes in rows of 12 steps: the sums are the same, and the agent acts no more."""
    env, calls = SafeDarkRoom(size=4, obstacles=4, max_steps=3), []

    class Counting(RandomAgent):
        def act(self, memory, token, key):
            jax.debug.callback(lambda: calls.append(1))
            return super().act(memory, token, key)

    tasks, budgets = sample_queue(env, "test", (1.0, 4.0), (8, 1), jax.random.key(2))
    sums = []
    for segments in (1, 2):
        played = run_trials(
            env, Counting(env.spec.action), tasks, budgets, KEY, episodes=2, steps=12, segments=segments
        )
        jax.block_until_ready(played)
        jax.effects_barrier()
        sums.append((jax.jit(lambda t: episode_sums(t, 2))(played), len(calls)))
        calls.clear()
    jax.tree.map(np.testing.assert_array_equal, sums[0][0], sums[1][0])
    assert [count for _, count in sums] == [12, 6]  # the first of two segments is long enough for six steps


def test_real_valued_worlds():
    env = Push()
    tasks, budgets = sample_queue(env, "test", (0.0, 2.0), (5, 1), jax.random.key(3))
    trials = run_trials(env, RandomAgent(env.spec.action), tasks, budgets, KEY, episodes=3, steps=12)
    assert trials.action.shape == (5, 12, 1)
    trials = jax.tree.map(np.asarray, trials)
    np.testing.assert_array_equal(trials.token.action[:, 0], 0)
    # costs are real numbers here, so the budget is not rounded
    budgets = np.asarray(budgets)
    np.testing.assert_array_equal(trials.token.ctg[:, 0], budgets[:, 0])
    np.testing.assert_array_equal(trials.token.ctg[:, 4], budgets[:, 0])
    # ... and is known exactly at every step, whatever the order in which costs are summed
    np.testing.assert_array_equal(trials.budget, np.broadcast_to(budgets, (5, 12)))
    sums = jax.jit(lambda t: episode_sums(t, 3))(trials)
    np.testing.assert_array_equal(sums.budgets, np.broadcast_to(budgets, (5, 3)))
    spent = budgets[:, 0] - np.abs(trials.action)[:, :3, 0].sum(axis=1)
    np.testing.assert_allclose(trials.token.ctg[:, 3], spent, rtol=1e-5)


TRACES = []


@dataclass(frozen=True)
class Counting(SafeDarkRoom):
    """Notes how often its step is traced."""

    def step(self, key, state, action, task):
        TRACES.append(self.size)
        return super().step(key, state, action, task)


def test_one_trace_per_shape():
    env = Counting(size=4, obstacles=4, max_steps=7)
    agent = RandomAgent(env.spec.action)

    def run(rows: int, seed: int) -> None:
        tasks, budgets = sample_queue(env, "test", (1.0, 4.0), (rows, 1), jax.random.key(seed))
        run_trials(env, agent, tasks, budgets, jax.random.key(seed), episodes=2, steps=14)

    run(4, 0)
    once = len(TRACES)
    assert once >= 1
    for seed in range(3):
        run(4, seed)
    run_trials(Counting(size=4, obstacles=4, max_steps=7), agent,
               *sample_queue(env, "train", (1.0, 2.0), (4, 1), KEY), KEY, episodes=2, steps=14)  # fmt: skip
    assert len(TRACES) == once
    run(5, 0)
    assert len(TRACES) > once
