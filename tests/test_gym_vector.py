"""Many environments in one program are as Gymnasium's own vector of single ones; the cost of an episode."""

import os
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics
from gymnasium.wrappers.vector import RecordEpisodeStatistics as VectorStatistics
from probe import Push

from safeicrl.envs.episode_cost import EpisodeCost, VectorEpisodeCost
from safeicrl.envs.gym import GymEnv
from safeicrl.envs.gym_vector import GymVectorEnv
from safeicrl.errors import UserError

ID = "safeicrl/SafeDarkRoom-v0"
ROOM = {"size": 3, "obstacles": 2, "max_steps": 3, "split": "test"}
MODES = list(AutoresetMode)


def assert_same(ours, theirs) -> None:
    """Equal, through dictionaries and arrays of objects."""
    if isinstance(theirs, tuple):
        for mine, own in zip(ours, theirs, strict=True):
            assert_same(mine, own)
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert_same(ours[name], theirs[name])
    elif isinstance(theirs, np.ndarray) and theirs.dtype == object:
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) == (other is None)
            np.testing.assert_array_equal(one, other)
    else:
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype


@pytest.mark.parametrize("mode", MODES, ids=[mode.value for mode in MODES])
def test_they_are_as_gymnasiums_own(mode):
    count, rng = 3, np.random.default_rng(0)
    ours = gymnasium.make_vec(ID, num_envs=count, autoreset_mode=mode, **ROOM)
    assert isinstance(ours, GymVectorEnv)
    single = lambda: gymnasium.make(ID, **ROOM)  # noqa: E731
    theirs = SyncVectorEnv([single] * count, autoreset_mode=mode)
    for name in ("observation_space", "action_space", "single_observation_space", "single_action_space"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert_same(ours.reset(seed=4), theirs.reset(seed=4))
    ends = 0
    for _ in range(25):
        actions = rng.integers(0, 5, count)
        one, other = ours.step(actions), theirs.step(actions)
        assert_same(one, other)
        over = one[2] | one[3]
        ends += over.sum()
        if mode is AutoresetMode.DISABLED and over.any():
            options = lambda over=over: {"reset_mask": over.copy()}  # noqa: E731
            assert_same(ours.reset(options=options()), theirs.reset(options=options()))
    assert ends > 10
    assert_same(ours.reset(options={"new_task": True}), theirs.reset(options={"new_task": True}))
    assert_same(ours.step(actions), theirs.step(actions))


def test_real_valued_actions_and_what_is_refused():
    envs = GymVectorEnv(Push(), 2)
    with pytest.raises(UserError, match="call reset"):
        envs.step(np.zeros((2, 1)))
    assert envs.reset(seed=[3, 3])[0].tolist() == [[0.0], [0.0]]
    assert envs.step(np.array([[0.5], [-0.25]], np.float32))[4]["cost"].tolist() == [0.5, 0.25]
    for actions, words in (
        (np.zeros((3, 1)), r"actions must have shape \(2, 1\)"),
        (np.array([[0.0], [2.0]]), r"must lie in \[-1.0, 1.0\]"),
        (np.array([[np.nan], [0.0]]), r"must lie in"),
    ):
        with pytest.raises(UserError, match=words):
            envs.step(actions)
    for options, words in (
        ({"qpos": 1}, "unknown reset option"),
        ({"reset_mask": np.zeros(2, bool)}, "reset_mask must be 2 booleans"),
        ({"reset_mask": [True, False]}, "reset_mask must be 2 booleans"),
    ):
        with pytest.raises(UserError, match=words):
            envs.reset(options=options)
    with pytest.raises(UserError, match="2 environments"):
        envs.reset(seed=[1, 2, 3])
    with pytest.raises(UserError, match="first reset must be of all"):
        GymVectorEnv(Push(), 2).reset(options={"reset_mask": np.array([True, False])})
    with pytest.raises(UserError, match="unknown autoreset mode"):
        GymVectorEnv(Push(), 2, autoreset_mode="now")
    with pytest.raises(UserError, match="leave out render_mode"):
        GymVectorEnv(Push(), 2, render_mode="ansi")


def test_a_task_laid_by_hand_is_every_environments():
    envs = gymnasium.make_vec(ID, num_envs=2, **ROOM)
    envs.reset(options={"task": {"goal": (0, 1), "obstacles": [(1, 2)]}})
    assert envs.step(np.array([1, 4]))[1].tolist() == [1.0, 0.0]  # the start is (1, 1): up is the goal, right costs
    assert envs.unwrapped.task.goal.tolist() == [1, 1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_fork_of_a_process_that_used_jax_is_refused_instead_of_hanging():
    env = GymEnv(Push())
    env.reset(seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python and JAX warn of every fork
        child = os.fork()
    if child == 0:
        try:
            env.reset()
            os._exit(1)
        except UserError as error:
            os._exit(0 if "context': 'spawn'" in str(error) else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_unknown_parameter_is_a_type_error_and_a_cost_is_a_numpy_number():
    for make in (gymnasium.make, gymnasium.make_vec):
        with pytest.raises(TypeError, match="Did you mean 'obstacles'"):
            make(ID, obstakles=3)
    env = gymnasium.make(ID)
    assert isinstance(env.reset(seed=0)[1]["cost"], np.floating)
    assert isinstance(env.step(0)[4]["cost"], np.floating)


# -- the cost of an episode -----------------------------------------------------------------------------------


class Steps(gymnasium.Env):
    """Step t costs t; an episode has two steps more than the one before, at first one."""

    observation_space = gymnasium.spaces.Discrete(100)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self.length = -1

    def reset(self, *, seed=None, options=None):
        self.time, self.length = 0, self.length + 2
        return 0, {"cost": 0.0}

    def step(self, action):
        self.time += 1
        return self.time, 1.0, False, self.time == self.length, {"cost": float(self.time)}


COSTS = [1.0, 1 + 2 + 3.0, 1 + 2 + 3 + 4 + 5.0]  # of the first three episodes


def test_the_cost_of_an_episode_of_one_environment():
    env = EpisodeCost(RecordEpisodeStatistics(Steps()))
    found = []
    for _ in range(3):
        env.reset()
        over = False
        while not over:
            *_, over, info = env.step(0)
            assert ("episode" in info) == over
        found.append((info["episode"]["c"], int(info["episode"]["l"])))
    assert found == list(zip(COSTS, (1, 3, 5), strict=True))
    bare = EpisodeCost(Steps())
    bare.reset()
    assert bare.step(0)[4]["episode"] == {"c": 1.0}


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("mode", MODES, ids=[mode.value for mode in MODES])
def test_the_cost_of_an_episode_in_every_autoreset_mode(mode, statistics):
    envs = SyncVectorEnv([Steps, lambda: gymnasium.wrappers.TimeLimit(Steps(), 2)], autoreset_mode=mode)
    envs = VectorEpisodeCost(VectorStatistics(envs) if statistics else envs)
    envs.reset()
    found, lengths, naive = [[], []], [[], []], 0.0
    for _ in range(12):
        *_, terminated, truncated, info = envs.step(np.zeros(2, int))
        over, naive = terminated | truncated, naive + info["cost"][0]
        assert ("episode" in info) == over.any()
        for index in np.flatnonzero(over):
            found[index].append(float(info["episode"]["c"][index]))
            if statistics:
                lengths[index].append(int(info["episode"]["l"][index]))
            assert info["_episode"][index]
        if mode is AutoresetMode.DISABLED and over.any():
            envs.reset(options={"reset_mask": over.copy()})
    assert found[0][:3] == COSTS
    assert found[1][:3] == [1.0, 3.0, 3.0]
    if statistics and mode is not AutoresetMode.DISABLED:  # there Gymnasium's own forgets all when one is reset
        assert lengths[0][:3] == [1, 3, 5]
    if mode is AutoresetMode.SAME_STEP:
        assert naive < sum(found[0])  # which is why there is a wrapper


def test_an_environment_without_costs_is_refused():
    env = EpisodeCost(gymnasium.make("CartPole-v1"))
    env.reset()
    with pytest.raises(UserError, match=r"cost of every step in info\['cost'\]"):
        env.step(0)
