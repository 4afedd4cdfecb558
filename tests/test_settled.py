"""A memory that lasts: after K episodes it is taken back, unless an episode was much better; rows apart."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import ROOM, random_weights

from safeicrl.agents.api import lasting, with_options
from safeicrl.agents.in_context import InContextAgent
from safeicrl.agents.reference import RandomAgent
from safeicrl.agents.settled import SPARE
from safeicrl.cli import main
from safeicrl.errors import UserError
from safeicrl.evaluation.evaluate import evaluate
from safeicrl.nets.heads import PolicyNet
from safeicrl.nets.transformer import NetConfig
from safeicrl.policies.cards import save_policy
from safeicrl.policies.contenders import released
from safeicrl.policies.export import export_policy
from safeicrl.policies.policy import load_policy
from safeicrl.tokens import first_token, next_token

K, STEPS = 3, ROOM.spec.max_steps
CONTEXTS = (K * STEPS, K * STEPS - STEPS // 2)  # all of a trial, and less: its ring closes before the K-th episode


def agent(context: int = CONTEXTS[0], settles: bool = True) -> InContextAgent:
    config = NetConfig(width=8, layers=2, heads=2, context=context, dtype="float32")
    net = random_weights(PolicyNet, config, ROOM.spec, scale=2.0)
    return InContextAgent(net=net, trained_episodes=K, settles=settles)


@jax.jit
def read(agent, memory, token):
    return agent.read(memory, token)[:2]


class Trial:
    """Two rows side by side, whose observations, rewards and ends are given step by step."""

    def __init__(self, agent: InContextAgent, budget: float = 2.0):
        self.agent, self.budget = agent, jnp.full(2, budget)
        self.memory = agent.extend(agent.init(None, 2), K * STEPS)
        self.token = None

    def step(self, seen, reward=(0.0, 0.0), cost=(0.0, 0.0), done=(False, False)) -> np.ndarray:
        seen = jnp.asarray(seen)
        if self.token is None:
            self.token = jax.vmap(first_token, (None, 0, 0))(ROOM.spec, seen, self.budget)
        else:
            given = (jnp.asarray(x) for x in (np.zeros(2, int), np.float32(reward), np.float32(cost), done))
            self.token = next_token(self.token, seen, *given, self.budget)
        self.memory, features = read(self.agent, self.memory, self.token)
        return np.asarray(features)

    def episode(self, path, reward=0.0, cost=0.0) -> np.ndarray:
        """All of an episode along `path`, [step] cells, and the first step of the next: features [step, row, …]."""
        found = []
        for step, cell in enumerate(path):
            end = step == len(path) - 1
            found.append(self.step([cell] * 2, [reward * end] * 2, [cost * end] * 2, [end] * 2))
        return np.stack(found)


def path(seed: int, steps: int = STEPS) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, ROOM.size, (steps, 2))


def begun(context: int = CONTEXTS[0], reward: float = 0.0) -> Trial:
    """At the first step of the K-th episode."""
    trial = Trial(agent(context))
    trial.step([[0, 0], [1, 1]])
    for seed in range(K - 1):
        trial.episode(path(seed, STEPS - seed), reward)
    return trial


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_last_episode_is_played_again_and_again(context):
    trial, found = begun(context), []
    for _ in range(2 * K):
        found.append(trial.episode(path(7)))
    assert np.std(found[0]) > 0.1
    # the first of them began with another last step
    for later in found[2:]:
        np.testing.assert_allclose(later, found[1], rtol=1e-4, atol=1e-5)
    without = Trial(agent(context, settles=False))
    without.step([[0, 0], [1, 1]])
    for seed in range(K - 1):
        without.episode(path(seed, STEPS - seed))
    grown = [without.episode(path(7)) for _ in range(2 * K)]
    np.testing.assert_allclose(grown[0][:-1], found[0][:-1], rtol=1e-4, atol=1e-5)  # K episodes: the same
    assert not np.allclose(grown[-1], grown[1], atol=1e-2)


def test_an_episode_of_another_kind_leaves_no_trace():
    trial = begun()
    trial.episode(path(7))
    expected = trial.episode(path(8))
    trial.episode(path(7))
    trial.episode(path(9, 2))
    trial.episode(path(7))
    np.testing.assert_allclose(trial.episode(path(8)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("before", "reward", "cost", "kept"),
    [
        (0.0, 1.0, 0.0, True),  # the goal, at last
        (0.0, 0.0, 0.0, False),
        (0.0, 1.0, 3.0, True),  # over budget: not to be forgotten ...
        (1.0, 1.0, 3.0, True),
        (1.0, 1.0, 2.0, False),  # ... but within it
        (1.0, 1.0, 2.0000005, False),  # ... up to rounding
        (1.0, 1.0, 0.0, False),  # found long ago
    ],
)
def test_an_episode_is_kept_if_it_is_much_better_or_broke_the_budget(before, reward, cost, kept):
    trial = begun(reward=before)
    trial.episode(path(7), before)
    clock = np.asarray(trial.memory.cache.clock)
    trial.episode(path(7), before)
    np.testing.assert_array_equal(trial.memory.cache.clock, clock)
    trial.episode(path(8), reward, cost)
    np.testing.assert_array_equal(np.asarray(trial.memory.cache.clock) > clock, kept)
    assert (np.asarray(trial.memory.best) == max(before, 0.0 if cost > 2.5 else reward)).all()


@pytest.mark.parametrize("context", CONTEXTS)
def test_kept_episodes_find_room_beside_those_of_training(context):
    """A few that broke their budgets overwrite nothing, if a whole trial of training was in sight, too."""
    trial = begun(context)
    first = np.asarray(trial.memory.cache.age)
    for number in range(SPARE):
        trial.episode(path(9 + number), cost=5.0)
    age = np.asarray(trial.memory.cache.age)
    if context == K * STEPS:
        assert (age == first + SPARE * STEPS).all()
        for number in range(2):  # the first of these fills the memory, the second overwrites the oldest tokens
            trial.episode(path(20 + number), cost=5.0)
            assert (np.asarray(trial.memory.cache.age) == context + SPARE * STEPS).all()
    else:
        assert (age == context).all()
        assert trial.agent.spare == 0
    assert agent(context, settles=False).spare == 0


def test_a_memory_may_settle_before_k():
    early, late = (Trial(dataclasses.replace(agent(), trained_episodes=K + 2, settle_after=n)) for n in (K, None))
    known = Trial(agent())
    for number in range(2 * K):
        found = [trial.episode(path(number), number == 1) for trial in (early, known, late)]
        np.testing.assert_array_equal(found[0], found[1])
    assert not np.allclose(found[2], found[0], atol=1e-2)
    assert early.agent.spare == late.agent.spare  # there is as much room, so more episodes can be kept


def test_luck_in_a_noisy_world_is_not_kept():
    trial = Trial(agent())
    trial.step([[0, 0], [1, 1]])
    for reward in (1.0, 5.0, 6.0):  # they differ by 5
        trial.episode(path(0), reward)
    clock = np.asarray(trial.memory.cache.clock)
    trial.episode(path(1), 10.0)
    np.testing.assert_array_equal(trial.memory.cache.clock, clock)
    assert (np.asarray(trial.memory.best) == 10.0).all()


def test_rows_are_taken_back_apart():
    trial, alone = begun(), begun()
    cells, others = path(7), path(8)
    for step in range(STEPS):  # the second row ends in mid-episode, too
        ends = [step == STEPS - 1, step in (2, STEPS - 1)]
        trial.step([cells[step], others[step]], done=ends)
        alone.step([cells[step]] * 2, done=[step == STEPS - 1] * 2)
    np.testing.assert_allclose(trial.step([cells[0]] * 2)[0], alone.step([cells[0]] * 2)[0], rtol=1e-4, atol=1e-5)
    assert int(trial.memory.cache.clock[0]) == int(trial.memory.cache.clock[1])


def test_evaluations_settle_past_k_only(monkeypatch):
    plain, init, used = agent(settles=False), InContextAgent.init, set()

    def noted(self, tasks, rows):
        used.add(self.settles)
        return init(self, tasks, rows)

    monkeypatch.setattr(InContextAgent, "init", noted)
    short, long, off = (
        evaluate(ROOM, plain, tasks=2, episodes=episodes, segments=1, settle=settle)
        for episodes, settle in ((K, True), (K + 2, True), (K + 2, False))
    )
    assert used == {True, False}
    with pytest.raises(UserError, match="settle must be true or false, got 'a'"):
        evaluate(ROOM, plain, tasks=2, episodes=K, settle="a")
    assert [each.meta.get("settles") for each in (short, long, off)] == [None, True, False]
    for later in (long, off):
        np.testing.assert_array_equal(later.returns[:, :K], short.returns)
    early = dataclasses.replace(plain, settle_after=K - 1)
    assert evaluate(ROOM, early, tasks=2, episodes=K, segments=1).meta["settles"]
    assert lasting(plain).settles
    assert lasting(dataclasses.replace(plain, trained_episodes=None)).settles is False


def test_cards_and_options_say_when_it_settles(tmp_path):
    mine = tmp_path / "mine"
    assert main(["export", "safe-dark-room", "--out", str(mine), "--settle-after", "2"]) == 0
    policy = load_policy(mine)
    assert (policy.agent.settle_after, policy.agent.last, policy.card["settle_after"]) == (2, 1, 2)
    assert load_policy(mine, settle_after=4).card["settle_after"] == 4
    on = load_policy(mine, settle=False)
    assert (on.agent.last, "settle_after" in on.card) == (policy.episodes - 1, False)
    with pytest.raises(UserError, match="a wiped context never settles: leave out settle_after 2"):
        released(str(mine), wipe=True, settle_after=2)
    assert "settle_after" not in load_policy("safe-dark-room").card
    policy.start(budget=2)
    policy.save_context(tmp_path / "trial")
    with pytest.raises(UserError, match="or with another `settle`, `settle_after` or `reserve`"):
        load_policy(mine, settle_after=4).load_context(tmp_path / "trial")


@pytest.mark.parametrize("after", [0, 51, 2.5, True])
def test_when_a_memory_cannot_settle(after, tmp_path):
    for use in (load_policy, lambda name, **given: export_policy(name, tmp_path / "other", **given)):
        with pytest.raises(UserError, match="settle_after must be a"):
            use("safe-dark-room", settle_after=after)
    policy = load_policy("safe-dark-room")
    save_policy(tmp_path / "bad.safetensors", policy.agent, {**policy.card, "settle_after": after})
    with pytest.raises(UserError, match="the card's settle_after must be a"):
        load_policy(tmp_path / "bad")


def test_whose_memory_never_settles(capsys):
    with pytest.raises(UserError, match="the memory of RandomAgent never settles: leave out settle_after 2"):
        with_options(ROOM, RandomAgent(action=ROOM.spec.action), settle_after=2)
    with pytest.raises(UserError, match="settle=False contradicts settle_after 2; give one of them"):
        load_policy("safe-dark-room", settle=False, settle_after=2)
    assert main(["evaluate", "--agent", "random", "--settle-after", "2"]) == 2
    assert "the memory of the random agent never settles: leave out --settle-after" in capsys.readouterr().err
