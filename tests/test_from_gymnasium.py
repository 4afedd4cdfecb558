"""Gymnasium environments of others: every number of a trial is the environment's own, in training too."""

import dataclasses
import functools
import runpy
from pathlib import Path

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from networks import random_weights
from standin import TableAlgorithm, TableConfig, TableState

from safeicrl import from_gymnasium, load_policy
from safeicrl.agents.in_context import InContextAgent
from safeicrl.agents.reference import RandomAgent
from safeicrl.algos.api import METRICS
from safeicrl.algos.scared import Scared, ScaredConfig
from safeicrl.cli.entry import main
from safeicrl.envs import from_gymnasium as module
from safeicrl.envs.from_gymnasium import GymTask
from safeicrl.envs.registry import WORLDS, env_from_plain, env_to_plain
from safeicrl.envs.spaces import Box, Discrete, Grid
from safeicrl.envs.wrappers import FixedTask
from safeicrl.errors import UserError
from safeicrl.evaluation.evaluate import evaluate
from safeicrl.machine.callbacks import own_errors
from safeicrl.nets.heads import PolicyNet
from safeicrl.nets.transformer import NetConfig
from safeicrl.optimisers.ppo import PPOConfig
from safeicrl.policies import catalogue
from safeicrl.policies.cards import save_policy
from safeicrl.train import TrainConfig, train
from safeicrl.trial import episode_sums, first_fault, run_trials, sample_queue

EXAMPLE = Path(__file__).parent.parent / "examples" / "frozen_lake.py"
ROWS, QUEUE, EPISODES, STEPS = 3, 2, 3, 24
MODES = list(AutoresetMode)


class Clock(gymnasium.Env):
    """It shows the time and the last action, costs half the time, and ends at the third action 2."""

    observation_space = spaces.Box(-1.0, 100.0, (3,))
    action_space = spaces.Discrete(3, start=1)
    made: list = []  # noqa: RUF012
    resets: list = []  # noqa: RUF012

    def __init__(self, kind: float = 0.0):
        self.kind = kind
        self.made.append(kind)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets.append((self.kind, seed, options))
        self.time, self.twos = 0, 0
        return np.array([self.kind, 0, -1], np.float32), {}

    def step(self, action):
        assert action in (1, 2, 3)
        self.time, self.twos = self.time + 1, self.twos + (action == 2)
        seen = np.array([self.kind, self.time, action], np.float32)
        return seen, action / 4, bool(self.twos == 3), False, {"cost": self.time / 2}


def make(kind: float = 0.0) -> gymnasium.Env:
    """Clocks of several kinds."""
    return gymnasium.wrappers.TimeLimit(Clock(kind), 5)


@pytest.fixture(autouse=True)
def tidy():
    """Nothing that a test registers stays."""
    before = dict(WORLDS)
    Clock.made.clear()
    Clock.resets.clear()
    yield
    for name in set(WORLDS) - set(before):
        del WORLDS[name]
        module._FLOTILLAS.pop(name, None)


def clocks(tasks, **more):
    settings = {"name": "clocks", "budget": (0.0, 4.0), "episodes": EPISODES, "max_steps": 5, **more}
    return from_gymnasium(make, tasks, **settings)


def play(env, numbers, key=0):
    """Random actions in trials of the tasks with these numbers, [row, queue]."""
    tasks = module._Task(number=jnp.asarray(numbers, jnp.uint32), test=jnp.zeros((ROWS, QUEUE), jnp.int32))
    budgets = jnp.full((ROWS, QUEUE), 4.0)
    agent = RandomAgent(env.spec.action)
    trials = run_trials(env, agent, tasks, budgets, jax.random.key(key), episodes=EPISODES, steps=STEPS)
    return jax.tree.map(np.asarray, trials)


KINDS = [{"kind": 5.0}, {"kind": 6.0}, {"kind": 7.0}]
TASKS = [*KINDS, 3, GymTask(seed=4, options={"wind": 2}), GymTask(kwargs={"kind": 9.0})]
NUMBERS = [[0, 1], [2, 0], [1, 1]]


@pytest.fixture(scope="module")
def shared():
    """One environment for most tests: a program with callbacks is compiled anew for each."""
    env = clocks(TASKS, name="shared clocks")
    return env, play(env, NUMBERS)


@pytest.mark.parametrize("mode", MODES, ids=[mode.value for mode in MODES])
def test_trials_are_as_in_gymnasiums_vector_environments(mode, shared):
    """The same actions in the real ones, one task each: the rows of the trials' first tasks."""
    _, trials = shared
    kinds = [KINDS[first]["kind"] for first, _ in NUMBERS]
    envs = SyncVectorEnv([functools.partial(make, kind) for kind in kinds], autoreset_mode=mode)
    observation, _ = envs.reset()
    taken = np.zeros(ROWS, int)  # steps of each row: in NEXT_STEP they do not stay in step
    steps = ((trials.trial == 0) & trials.valid).sum(1)
    resetting = np.zeros(ROWS, bool)
    ends = 0
    while (taken < steps).any():
        at = np.minimum(taken, STEPS - 1)
        rows = np.arange(ROWS)
        alive = (taken < steps) & ~resetting
        np.testing.assert_array_equal(observation[alive], trials.token.observation[rows, at][alive])
        observation, reward, terminated, truncated, info = envs.step(trials.action[rows, at] + 1)
        over = terminated | truncated
        final, cost = observation.copy(), info["cost"] if "cost" in info else np.zeros(ROWS)
        if mode is AutoresetMode.SAME_STEP and over.any():
            cost = np.where(over, info["final_info"]["cost"], cost)
            for row in np.flatnonzero(over):
                final[row] = info["final_obs"][row]
        for name, theirs in (
            ("reward", reward), ("cost", cost), ("terminated", terminated), ("truncated", truncated & ~terminated),
            ("final_observation", final),
        ):  # fmt: skip
            np.testing.assert_array_equal(getattr(trials, name)[rows, at][alive], theirs[alive].astype(np.float32))
        ends += over[alive].sum()
        taken = taken + alive
        if mode is AutoresetMode.DISABLED and over.any():
            observation, _ = envs.reset(options={"reset_mask": over})
        resetting = over & (mode is AutoresetMode.NEXT_STEP)
    assert ends == ROWS * EPISODES
    assert trials.terminated.any()
    assert trials.truncated.any()


def test_a_trial_has_one_task_and_the_next_trial_another(shared):
    _, trials = shared
    for row, queue in enumerate(NUMBERS):
        for trial, task in enumerate(queue):
            here = trials.valid[row] & (trials.trial[row] == trial)
            seen = trials.token.observation[row, here]
            assert set(seen[:, 0]) == {KINDS[task]["kind"]}
            if trials.trial_done[row, here].any():
                assert trials.token.start[row, here].sum() == EPISODES


def test_seeds_options_and_kwargs_are_tasks(shared):
    env, _ = shared
    play(env, [[3, 4], [5, 3], [4, 4]])
    seen = {(kind, seed if kind == 0 else None, str(options)) for kind, seed, options in Clock.resets}
    assert seen == {(0.0, 3, "None"), (0.0, 4, "{'wind': 2}"), (9.0, None, "None")}
    drawn = [seed for kind, seed, _ in Clock.resets if kind == 9]
    assert drawn[0] is not None  # without a seed of its own, a trial has one from the run's, at its first reset
    assert set(drawn[1:]) == {None}
    assert len(Clock.made) == ROWS + 1  # one for each row; another only where it is made in another way: 9, then 0


def test_a_function_draws_the_same_task_from_the_same_number():
    env = clocks(lambda rng: {"kind": float(rng.integers(10**6))})
    task = env._host._task
    assert task(11, 0) == task(11, 0) != task(12, 0)
    assert task(11, 1) != task(11, 0)  # the split `test` has other tasks
    numbers = {int(env.sample_task(jax.random.key(seed), "train").number) for seed in range(5)}
    assert len(numbers) == 5


def test_the_same_key_plays_the_same_trial_again(shared):
    env, _ = shared
    one, again, other = (play(env, [[5, 0], [1, 5], [2, 3]], key) for key in (1, 1, 2))
    np.testing.assert_array_equal(one.action, again.action)
    np.testing.assert_array_equal(one.token.observation, again.token.observation)
    assert (one.action != other.action).any()


def test_an_environment_cannot_go_back(shared):
    env, _ = shared
    state, _ = env.reset(jax.random.key(0), env.sample_task(jax.random.key(1), "train"))
    after, step = env.step(jax.random.key(0), state, jnp.int32(0), None)
    assert step.observation.tolist()[1:] == [1.0, 1.0]
    with pytest.raises(UserError, match="cannot go back to an earlier state"):
        env.step(jax.random.key(0), state, jnp.int32(0), None)
    for _ in range(module.FLEETS):
        env.reset(jax.random.key(0), env.sample_task(jax.random.key(1), "train"))
    with pytest.raises(UserError, match="groups of environments are in use"):
        env.step(jax.random.key(0), after, jnp.int32(0), None)


def test_it_cannot_be_wrapped(shared):
    env, _ = shared
    with pytest.raises(
        UserError, match="a fixed task must be made from an environment in JAX; shared clocks is one of"
    ):
        FixedTask(name=env.registered)


def test_spaces_become_the_librarys():
    for space, value, ours, seen in (
        (spaces.Discrete(4, start=2), 3, Grid((4,)), [1]),
        (spaces.MultiDiscrete([3, 2]), np.array([2, 1]), Grid((3, 2)), [2, 1]),
        (spaces.Box(0, 255, (2, 2), np.uint8), np.full((2, 2), 7, np.uint8), Box(4, 0.0, 255.0), [7.0] * 4),
        (spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(0, 1, (1,))), {"a": 1, "b": np.array([0.5])}, Box(3), None),
    ):
        found, encode = module._observation(space)
        assert found == ours
        assert encode(value).tolist() == (seen or [0.0, 1.0, 0.5])
        assert encode(value).dtype == ours.dtype
    found, decode = module._action(spaces.Box(np.array([0, -4], np.float32), np.array([2, 4], np.float32)))
    assert found == Box(2, -1.0, 1.0)
    assert decode(np.array([-1.0, 0.5])).tolist() == [0.0, 2.0]
    found, decode = module._action(spaces.Discrete(3, start=-1))
    assert (found, decode(np.int32(0))) == (Discrete(3), -1)
    for space, words in (
        (spaces.Box(-np.inf, np.inf, (1,)), "finite bounds"),
        (spaces.MultiBinary(2), "must be Discrete or a Box"),
    ):
        with pytest.raises(UserError, match=words):
            module._action(space)
    with pytest.raises(UserError, match="fixed size"):
        module._observation(spaces.Sequence(spaces.Discrete(2)))


@pytest.mark.parametrize(
    ("tasks", "more", "words"),
    [
        ([], {}, "there are no tasks to train on"),
        (["one"], {}, "a task must be a seed, keyword arguments or a GymTask, got 'one'"),
        (KINDS, {"episodes": 0}, "episodes must be"),
        (KINDS, {"budget": (2, 1)}, "budget must rise"),
        (KINDS, {"budget": 5.0}, r"budget must be two numbers, got 5\.0"),
        (KINDS, {"name": "safe-dark-room"}, "registered already"),
        (KINDS, {"features": lambda task: [np.nan]}, "features must be finite"),
        (lambda rng: 1, {"features": lambda task: [1.0]}, "features are of listed tasks"),
    ],
)
def test_what_cannot_be_an_environment_is_one_line(tasks, more, words):
    with pytest.raises(UserError, match=words):
        clocks(tasks, **more)


def test_what_is_no_gymnasium_environment_is_refused():
    with pytest.raises(UserError, match=r"must return a gymnasium\.Env, got str"):
        from_gymnasium(lambda: "env", [GymTask()], name="words", budget=(0, 1), episodes=1)
    with pytest.raises(UserError, match="no time limit: give max_steps"):
        from_gymnasium(Clock, [GymTask()], name="endless", budget=(0, 1), episodes=1)
    env = from_gymnasium(
        lambda: gymnasium.make("CartPole-v1"), [GymTask()], name="costless", budget=(0, 1), episodes=1
    )
    assert env.spec.max_steps == 500
    state, _ = env.reset(jax.random.key(0), env.sample_task(jax.random.key(1), "train"))
    with pytest.raises(UserError, match=r"^costless must put the cost of every step in info\['cost'\]$"):
        env.step(jax.random.key(0), state, jnp.int32(0), None)
    with pytest.raises(UserError, match=r"^make_env must be a function that makes a gymnasium\.Env, got 3$"):
        from_gymnasium(3, [GymTask()], name="three", budget=(0, 1), episodes=1)
    with pytest.raises(UserError, match=r"^make_env of picky raised TypeError: .*unexpected keyword") as error:
        from_gymnasium(Clock, [{"size": 3}], name="picky", budget=(0, 1), episodes=1)
    assert isinstance(error.value.__cause__, TypeError)


class Slip(gymnasium.Env):
    """The second step of an episode returns `second`, or raises it."""

    observation_space = spaces.Box(0.0, 1.0, (2,))
    action_space = spaces.Discrete(2)
    second: object = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.time += 1
        if self.time == 2 and isinstance(self.second, Exception):
            raise self.second
        return self.second if self.time == 2 else (np.zeros(2, np.float32), 0.0, False, False, {"cost": 0})


@pytest.fixture(scope="module")
def slips():
    return from_gymnasium(Slip, [1, 2], name="slips", budget=(0, 1), episodes=1, max_steps=3)


SEEN = np.zeros(2)
COSTLESS = "slips must put the cost of every step in info['cost']"


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ((SEEN, 0.0, False, False, {}), COSTLESS),
        ((SEEN, 0.0, False, False, None), COSTLESS),
        ((SEEN, 0.0, False, False, {"cost": "a"}), "info['cost'] of slips must be a number, got 'a'"),
        ((SEEN, 0.0, False, False, {"cost": [1, 2]}), "info['cost'] of slips must be a number, got [1, 2]"),
        ((SEEN, None, False, False, {"cost": 0}), "reward of slips must be a number, got None"),
        (
            (SEEN, 0.0, False, {"cost": 0}),
            "step of slips must return observation, reward, terminated,",
        ),
        (
            (np.ones(3), 0.0, False, False, {"cost": 0}),
            "observations of slips must be in Box(0.0, 1.0, (2,)",
        ),
        (KeyError("no\nsuch key"), "step of slips raised KeyError: 'no\\nsuch key'"),
    ],
)
def test_a_slip_on_the_host_is_one_line_of_an_evaluation(second, words, slips, monkeypatch, capfd):
    """The error itself, not JAX's about it, and nothing of JAX's on the terminal."""
    monkeypatch.setattr(Slip, "second", second)
    with pytest.raises(UserError) as error:
        evaluate(slips, RandomAgent(slips.spec.action), tasks=2)
    assert str(error.value).startswith(words)
    assert "\n" not in str(error.value)
    assert (error.value.__cause__ is second) == isinstance(second, Exception)
    assert capfd.readouterr() == ("", "")


def test_the_command_line_says_it_in_one_line(slips, monkeypatch, capfd):
    monkeypatch.setattr(Slip, "second", (SEEN, 0.0, False, False, {}))
    assert main(["evaluate", "--agent", "random", "--env", "slips", "--tasks", "2"]) == 2
    assert capfd.readouterr().err == f"safeicrl: {COSTLESS}\n"


@dataclasses.dataclass(frozen=True)
class Player(TableAlgorithm):
    """It plays, and learns nothing."""

    def init(self, key):
        zero = jnp.zeros(())
        return TableState(table=zero, multiplier=zero, key=key, step=zero, bad_from=zero, bad_share=zero)

    def agent(self, state):
        return RandomAgent(self.env.spec.action)

    def card(self):
        return {"kind": "player"}

    def update(self, state):
        tasks, budgets = sample_queue(self.env, "train", (0.0, 1.0), (2, 1), state.key)
        played = run_trials(self.env, self.agent(state), tasks, budgets, state.key, episodes=1, steps=3)
        return state, dict.fromkeys(METRICS, played.cost.sum()) | {"fault": first_fault(played)}


def test_training_says_it_too(slips, monkeypatch, tmp_path):
    monkeypatch.setattr(Slip, "second", ValueError("out of fuel"))
    monkeypatch.setitem(catalogue.KINDS, "player", lambda card, env: RandomAgent(env.spec.action))
    with pytest.raises(UserError, match=r"^step of slips raised ValueError: out of fuel$"):
        train(Player(slips, TableConfig()), TrainConfig(iterations=1), out=tmp_path)


def test_another_error_of_a_program_stays_what_it_is(slips, monkeypatch):
    """The last user error is not raised for it."""
    monkeypatch.setattr(Slip, "second", (SEEN, 0.0, False, False, {}))
    with pytest.raises(UserError):
        evaluate(slips, RandomAgent(slips.spec.action), tasks=2)
    with pytest.raises(RuntimeError, match="out of memory"), own_errors():
        raise RuntimeError("out of memory")


def test_a_learner_plays_in_it_and_its_policy_is_loaded_like_any_other(tmp_path):
    env = clocks(KINDS, test_tasks=KINDS[:1], features=lambda task: [task["kind"]])
    assert env_from_plain(**env_to_plain(env)) == env
    assert clocks(KINDS) != env  # made anew under the same name
    assert env.task_features(env.sample_task(jax.random.key(0), "test")).tolist() == [5.0]
    net = NetConfig(width=8, layers=1, heads=2, context=15)
    algorithm = Scared(
        env, ScaredConfig(iterations=1, rows=4, queue=2, segments=1, net=net, ppo=PPOConfig(minibatch=4))
    )
    agent = InContextAgent(net=random_weights(PolicyNet, net, env.spec))
    tasks, budgets = algorithm.draw(jax.random.key(0))
    trials = eqx.filter_jit(algorithm.play)(agent, tasks, budgets, jax.random.key(1))
    sums = jax.tree.map(np.asarray, episode_sums(trials, EPISODES, 2))
    lengths = sums.lengths[sums.played]
    assert len(lengths) > 4
    np.testing.assert_allclose(sums.costs[sums.played], lengths * (lengths + 1) / 4)  # ½ + 1 + 1½ + …
    card = {**algorithm.card(), "env": env_to_plain(env)}
    save_policy(tmp_path / "policy.safetensors", agent, card)
    policy = load_policy(tmp_path / "policy")
    policy.start(budget=1)
    assert policy.act(np.zeros(3)) in range(3)


def test_the_example_is_frozen_lake_with_holes_as_costs():
    example = runpy.run_path(str(EXAMPLE))
    lake = example["Holes"](lake=("SFHF", "FFFF", "FFFG", "HFFF"))
    lake.reset(seed=0)
    right, down = 2, 1
    steps = [lake.step(action) for action in (right, right, right, down, down)]
    assert [step[0] for step in steps] == [1, 2, 3, 7, 11]
    assert [step[4]["cost"] for step in steps] == [0, 1, 0, 0, 0]
    assert [step[1] for step in steps] == [0, 0, 0, 0, 1]
    assert [step[2] for step in steps] == [False] * 4 + [True]
    tasks = [example["lake"](np.random.default_rng(seed)) for seed in range(20)]
    for task in tasks:
        cells = "".join(task["lake"])
        assert (cells.count("S"), cells.count("G"), cells.count("H")) == (1, 1, 3)
        assert sum(divmod(cells.index("G"), 4)) >= 3
    assert example["layout"](tasks[0]).count(1.0) == 4
    assert dataclasses.is_dataclass(example["env"])
