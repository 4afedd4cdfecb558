"""Numbers that would count as safe by mistake (nan, negative costs, overflow) are refused wherever they come in."""

import dataclasses
import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import ROOM, random_rows, random_weights
from probe import Casino, Push
from standin import TableAlgorithm, TableConfig

from safeicrl.agents.in_context import InContextAgent
from safeicrl.agents.reference import RandomAgent
from safeicrl.algos.scared import Scared, ScaredConfig, ScaredState
from safeicrl.envs.api import record, replace
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.envs.faults import NO_FAULT, NONE, first_of, refuse_fault
from safeicrl.envs.spaces import Box
from safeicrl.errors import LARGEST, UserError, check_seed
from safeicrl.evaluation.archive import load_results, save_results
from safeicrl.evaluation.evaluate import evaluate
from safeicrl.evaluation.results import ARRAYS, Results
from safeicrl.evaluation.statistics import Summary, rank
from safeicrl.histories.collect import CollectConfig
from safeicrl.histories.demonstrations import EpsConfig
from safeicrl.histories.store import HistoryWriter
from safeicrl.histories.windows import make_windows
from safeicrl.log import read_metrics
from safeicrl.nets.heads import PolicyNet
from safeicrl.nets.transformer import NetConfig
from safeicrl.optimisers import episodes, lagrangian
from safeicrl.policies import checkpoint
from safeicrl.policies.policy import Policy
from safeicrl.train import EvalConfig, TrainConfig, _refuse_faults, train
from safeicrl.training.status import Status
from safeicrl.trial import first_fault

PUSH = Push().spec  # episodes of at most 4 steps
BAD = [float("nan"), float("inf"), -float("inf"), 3e38, -1.0]
SPEC = {"size": 3, "obstacles": 2, "max_steps": 5, "episodes": 4, "train_budget": (1.0, 3.0)}


def test_any_bad_number_is_found_with_its_place():
    rows = random_rows()
    real = replace(rows.token, observation=rows.token.observation.astype(jnp.float32))
    rows = replace(rows, token=real, final_observation=rows.final_observation.astype(jnp.float32))
    find = jax.jit(first_fault)
    np.testing.assert_array_equal(find(rows), NO_FAULT)
    row, time = 5, int(np.flatnonzero(np.asarray(rows.token.start[5]))[1])  # an episode's first step
    for kind, value in itertools.product(("cost", "reward", "observation", "first observation"), BAD):
        if kind in ("cost", "reward"):
            broken = replace(rows, **{kind: getattr(rows, kind).at[row, time].set(value)})
        elif kind == "observation":
            broken = replace(rows, final_observation=rows.final_observation.at[row, time, 1].set(value))
        else:
            seen = rows.token.observation.at[row, time, 1].set(value)
            broken = replace(rows, token=replace(rows.token, observation=seen))
        found = np.asarray(find(broken))
        if value == -1.0 and kind != "cost":
            assert found[0] == NONE
            continue
        place = [row, int(rows.token.episode[row, time]), int(rows.token.time[row, time])]
        np.testing.assert_array_equal(found[1:4], place)
        np.testing.assert_array_equal(found[4], np.float32(value))
        with pytest.raises(UserError, match=rf"^probe gave {kind.split()[-1]} .* \(here, episode {place[1] + 1}, "):
            refuse_fault(found, "probe", ["here"])
        unplayed = replace(broken, valid=rows.valid.at[row, time].set(False))
        assert find(unplayed)[0] == NONE


class Bounded:
    """An environment with a spec."""

    spec = dataclasses.replace(ROOM.spec, max_cost=2.0)


@pytest.fixture(scope="module")
def promised():
    """Random play that keeps all promises, and what finds a broken one."""
    find = jax.jit(lambda rows: first_fault(rows, Bounded.spec))
    rows = random_rows()
    np.testing.assert_array_equal(find(rows), NO_FAULT)
    return rows, find


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("cost", 2.001, r"costs must be at most 2, the environment's spec\.max_cost"),
        ("cost", 5.0, r"costs must be at most 2, the environment's spec\.max_cost"),
        ("cost", 0.5, r"costs must be multiples of 1, the environment's spec\.cost_unit"),
        ("cost", 2.0, None),
        ("cost", 1.00001, None),  # rounding
        ("final_observation", 9, r"observations must be cells in \(0–\d, 0–\d\)"),
        ("final_observation", -1, r"observations must be cells in \(0–\d, 0–\d\)"),
    ],
)
def test_what_a_spec_promises_is_looked_at(name, value, rule, promised):
    rows, find = promised
    at = (5, 2) if name == "cost" else (5, 2, 1)
    found = np.asarray(find(replace(rows, **{name: getattr(rows, name).at[at].set(value)})))
    if rule is None:
        assert found[0] == NONE
        return
    place = r"\(iteration 1, seed 0, episode \d, step \d\)"
    with pytest.raises(UserError, match=rf"^Bounded gave {name.split('_')[-1]} {value:g} {place}: {rule}$"):
        _refuse_faults(found[None, None], Status(iteration=1), TrainConfig(), Bounded())


def test_a_first_observation_outside_the_grid_is_found(promised):
    rows, find = promised
    assert rows.token.start[5, 0]
    seen = rows.token.observation.at[5, 0, 0].set(ROOM.spec.observation.sizes[0])
    assert find(replace(rows, token=replace(rows.token, observation=seen)))[:2].tolist() == [3, 5]


def test_an_episode_that_does_not_end_is_found(promised):
    rows, find = promised
    most = ROOM.spec.max_steps
    row, time = np.argwhere(np.asarray(rows.valid & (rows.token.time == most - 1)))[0]
    going = {name: getattr(rows, name).at[row, time].set(False) for name in ("terminated", "truncated")}
    place = [row, rows.token.episode[row, time], most - 1, most]
    assert find(replace(rows, **going)).tolist() == [4, *map(int, place)]


@dataclass(frozen=True)
class Endless(Casino):
    """It ignores its limit."""

    def step(self, key, state, action, task):
        state, step = super().step(key, state, action, task)
        return state, replace(step, truncated=jnp.array(False))


def test_an_evaluation_says_that_episodes_do_not_end():
    with pytest.raises(UserError, match=r"^Endless did not end an episode .* of 4 \(task 0, episode 1\)$"):
        evaluate(Endless(), RandomAgent(Endless().spec.action), tasks=2)


def test_a_learner_of_one_task_finds_it_too():
    zeros, seen = jnp.zeros((4, 2)), jnp.zeros((4, 2, 3))
    played = lagrangian.Rollout(
        observation=seen, action=zeros, reward=zeros, cost=zeros, terminated=zeros > 0, truncated=zeros > 0,
        final_observation=seen, log_prob=zeros, returns=zeros, costs=zeros,
    )  # fmt: skip
    ended = replace(played, truncated=zeros.at[1].set(1.0) > 0)
    find = jax.jit(lambda played: lagrangian.first_fault(played, PUSH))
    assert find(ended)[0] == NONE  # two episodes of two steps
    with pytest.raises(UserError, match=r"probe gave cost -2 \(step 4\)"):
        refuse_fault(np.asarray(find(replace(ended, cost=zeros.at[3, 1].set(-2.0)))), "probe")
    with pytest.raises(UserError, match=r"^probe did not end an episode within its spec\.max_steps of 4$"):
        refuse_fault(np.asarray(find(played)), "probe")


def test_learners_that_play_whole_episodes_find_it_too():
    zeros = jnp.zeros((2, 3, 4))  # [task, episode, time]
    going = jnp.arange(4) < 3
    played = episodes.Played(
        observation=jnp.zeros((2, 3, 4, 1)), action=zeros, reward=zeros, cost=zeros,
        valid=jnp.broadcast_to(going, zeros.shape), done=jnp.broadcast_to(jnp.arange(4) == 2, zeros.shape),
    )  # fmt: skip
    find = jax.jit(lambda played: (found := episodes.first_fault(played, PUSH), first_of(found)))
    assert find(played)[1][0] == NONE
    assert find(replace(played, cost=zeros.at[..., 3].set(-1.0)))[1][0] == NONE  # after the episode's end
    each, first = find(replace(played, cost=zeros.at[1, 2, 1].set(-1.0)))
    assert each[:, 0].tolist() == [NONE, 0]
    with pytest.raises(UserError, match=r"probe gave cost -1 \(task 1, episode 3, step 2\)"):
        refuse_fault(np.asarray(first), "probe", [f"task {int(first[1])}"])
    never = find(replace(played, valid=zeros == 0, done=zeros.at[0].set(1.0) > 0))[1]  # those of task 1 go on
    with pytest.raises(UserError, match=r"^probe did not end an episode .* of 4 \(episode 1\)$"):
        refuse_fault(np.asarray(never), "probe")
    assert never[1] == 1


class Idle:
    """An optimiser that plays nothing and learns nothing."""

    def explorer(self, state):
        return None

    def update(self, state, trials, tasks, multiplier, iteration, key):
        return state, {}


def test_scared_reports_what_it_played():
    room = Casino()
    algorithm = Scared(room, ScaredConfig(rows=64, segments=1, net=NetConfig(width=8, layers=1, heads=1)))
    play, algorithm.optimiser, key = algorithm.play, Idle(), jax.random.key(0)
    state = ScaredState(optimiser=None, multiplier=jnp.float32(0), iteration=jnp.int32(0), key=key)

    @jax.jit
    def fault(cost: jax.Array) -> jax.Array:
        played = play(RandomAgent(room.spec.action), *algorithm.draw(key), key)
        algorithm.play = lambda *_: replace(played, cost=played.cost.at[3, 2].set(cost))
        return algorithm.update(state)[1]["fault"]

    assert fault(1.0)[0] == NONE
    assert fault(jnp.nan)[0] == 0
    assert fault(0.5)[0] == 0  # costs are whole numbers there


# -- an environment that goes wrong, in training and in evaluation


@record
class Task:
    room: jax.Array
    cost: jax.Array  # [] of the third step of every episode


@dataclass(frozen=True)
class Faulty(SafeDarkRoom):
    """The third step of an episode costs nan, in a room made by hand −1."""

    def sample_task(self, key, split):
        return Task(room=super().sample_task(key, split), cost=jnp.float32(jnp.nan))

    def make_task(self, **layout):
        return Task(room=super().make_task(**layout), cost=jnp.float32(-1.0))

    def reset(self, key, task):
        return super().reset(key, task.room)

    def step(self, key, state, action, task):
        state, step = super().step(key, state, action, task.room)
        return state, replace(step, cost=jnp.where(state.time == 3, task.cost, step.cost))


def test_evaluation_refuses_a_nan_cost():
    """Unchecked, it would count as within every budget."""
    room = Faulty(**SPEC)
    with pytest.raises(UserError) as error:
        evaluate(room, RandomAgent(room.spec.action), tasks=8, rows=8)
    assert str(error.value).startswith(
        "Faulty gave cost nan (task 0, episode 1, step 3): costs must be finite, ≥ 0"
    )


def test_training_refuses_a_negative_cost_and_keeps_what_it_had(tmp_path):
    algorithm = TableAlgorithm(env=Faulty(**SPEC), config=TableConfig())
    settings = TrainConfig(iterations=6, seed=3, checkpoint_minutes=9.0, evaluation=EvalConfig(every=0, tasks=8))
    with pytest.raises(UserError, match=r"Faulty gave cost -1 \(iteration 1, seed 3, episode 1, step 3\)"):
        train(algorithm, settings, out=tmp_path)
    arrays, meta = checkpoint.read(tmp_path / "checkpoint.safetensors", kind="checkpoint")
    assert int(arrays["step"]) == 0  # nothing was learned from it
    assert meta["status"]["failures"] == [1]
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["rolled_back"] == 1


# -- results


def results(**changes):
    shape = (2, 3)
    arrays = {"returns": np.zeros(shape), "costs": np.ones(shape), "lengths": np.ones(shape), "budgets": np.ones(2)}
    return Results(meta={"label": "mine"}, **{**arrays, **changes})


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_results_with_impossible_numbers_are_refused(tmp_path, name, value):
    good = results()
    wrong = getattr(good, name).copy()
    wrong[1] = value
    if name == "returns" and value == -1.0:
        assert results(returns=wrong).returns[1, 0] == -1
        return
    with pytest.raises(UserError, match=f"{name} of results must be finite.* in trial 1.* of mine"):
        results(**{name: wrong})
    arrays, card = save_results(good, tmp_path / "r")
    card.write_text('{"meta": {}}')  # as older versions wrote it, without a digest of the arrays
    np.savez(arrays, **{**{each: getattr(good, each) for each in ARRAYS}, name: wrong})
    with pytest.raises(UserError, match=f"{name} of results must be finite"):
        load_results(tmp_path / "r")


def test_nan_is_never_best():
    summary = Summary(
        total_return=9.0, total_return_error=0.0, last_return=0.0, over_budget=0.0, over_budget_last=0.0, cost=0.0,
        by_budget={}, over_by_budget={}, episodes=1, tasks=1,
    )  # fmt: skip
    assert rank(summary, 0.03) == (True, 9.0)
    for name in ("total_return", "over_budget"):
        with pytest.raises(UserError, match="cannot be ranked"):
            rank(dataclasses.replace(summary, **{name: float("nan")}), 0.03)


# -- histories


@pytest.mark.parametrize(("name", "value"), [("cost", -1.0), ("cost", np.nan), ("cost", 2.0), ("reward", np.inf)])
def test_histories_take_no_such_numbers(tmp_path, name, value):
    room = SafeDarkRoom(**SPEC)
    writer = HistoryWriter(
        tmp_path, env=room, request={"env": {"name": "room"}}, steps=6, limit=np.zeros(2), task=np.zeros(2)
    )
    with pytest.raises(UserError, match=rf"^room gave {name} {value:g} \(history 1, step 5\): {name}s must be"):
        writer.write(1, name, 3, np.array([0.0, 0.0, value]))


def test_windows_are_not_cut_from_such_numbers():
    """A folder may be older than the check, or be damaged."""
    arrays = {name: np.zeros((2, 6)) for name in ("action", "reward", "cost")}
    arrays |= {"done": np.tile([0, 0, 1], (2, 2)), "observation": np.zeros((2, 6, 1))}
    stored = type("Stored", (), {"folder": "data", **arrays})
    make_windows(stored, 3)
    stored.cost[1, 4] = np.nan
    with pytest.raises(UserError, match=r"history 1 of data: costs must be finite.* got nan at \[4\]"):
        make_windows(stored, 3)


# -- acting


@dataclass(frozen=True)
class Open(Casino):
    """With observations to see."""

    @property
    def spec(self):
        return dataclasses.replace(super().spec, observation=Box(2))


@pytest.mark.filterwarnings("ignore:this policy was trained on budgets")
def test_no_finite_number_breaks_the_context():
    """Large numbers are refused, or harmless: the actions after them are as random as before."""
    room = Open()
    net = random_weights(PolicyNet, NetConfig(width=8, layers=1, heads=1), room.spec)
    policy = Policy(env=room, agent=InContextAgent(net=net), card={"kind": "net", "env": {"name": "open"}})
    rows = 64
    policy.start(budget=3e38, batch=rows)
    policy.act(np.full((rows, 2), -LARGEST))
    most = np.full(rows, LARGEST)
    for _ in range(3):
        actions = policy.act(np.full((rows, 2), LARGEST), -most, most)
        features = np.asarray(policy._trial.memory.values[0])
        assert np.isfinite(features).all()
    assert len(set(actions.tolist())) > 1, "stuck on one action"
    for bad in (3e38, -3e38, 1e39, float("nan")):
        with pytest.raises(UserError, match="observations must be finite"):
            policy.act(np.full((rows, 2), bad), most, most)
        with pytest.raises(UserError, match="rewards must be finite"):
            policy.act(np.zeros((rows, 2)), np.full(rows, bad), most)
        with pytest.raises(UserError, match="costs must be finite"):
            policy.act(np.zeros((rows, 2)), most, np.full(rows, bad))


# -- seeds


@pytest.mark.parametrize(
    "make",
    [
        check_seed,
        lambda seed: TrainConfig(seed=seed),
        lambda seed: TrainConfig(seed=seed - 3, seeds=4),
        lambda seed: EvalConfig(seed=seed),
        lambda seed: CollectConfig(seed=seed),
        lambda seed: EpsConfig(seed=seed),
    ],
)
def test_seeds_do_not_wrap(make):
    make(2**32 - 1)
    for seed in (2**32, 2**32 + 7, 2**64):
        with pytest.raises(UserError, match=r"seed.* must be an integer ≥ 0 and below 2³², got"):
            make(seed)
