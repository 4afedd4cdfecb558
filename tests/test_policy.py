"""Released policies: start and act give what `run_trials` gives, and every misuse is one line."""

import copy
import dataclasses
import pickle
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from standin import ROOM, TableAgent

from safeicrl import load_policy
from safeicrl.agents.in_context import InContextAgent
from safeicrl.algos.scared import Scared, ScaredConfig
from safeicrl.envs.api import replace
from safeicrl.envs.registry import env_to_plain
from safeicrl.errors import BeyondTraining, UserError
from safeicrl.nets.heads import PolicyNet
from safeicrl.nets.transformer import NetConfig
from safeicrl.policies import cards, catalogue
from safeicrl.policies import policy as policy_module
from safeicrl.policies.export import export_policy
from safeicrl.policies.policy import Policy
from safeicrl.tokens import first_token
from safeicrl.trial import run_trials, sample_queue


class Nosy(eqx.Module):
    """Actions from a hash of everything in all tokens so far: any slip in the history changes what follows."""

    salt: jax.Array  # [] int32

    def init(self, tasks, rows):
        return jnp.zeros(rows, jnp.uint32)

    def extend(self, memory, steps):
        return memory

    def act(self, memory, token, key):
        memory = jnp.where(token.first, 0, memory)
        parts = [
            token.observation[:, 0], token.observation[:, 1], token.previous[:, 0], token.previous[:, 1],
            token.action, token.reward * 2, token.cost * 3, token.ctg * 5, token.start, token.time, token.episode,
            jnp.full_like(token.time, self.salt),
        ]  # fmt: skip
        for part in parts:
            memory = memory * 31 + part.astype(jnp.int32).astype(jnp.uint32) + 7
        return memory, ((memory >> 7) % 5).astype(jnp.int32), None


def nosy() -> Policy:
    card = {"kind": "nosy", "env": env_to_plain(ROOM)}
    return Policy(env=ROOM, agent=Nosy(salt=jnp.int32(3)), card=card)


def played(rows):
    tasks, _ = sample_queue(ROOM, "test", (0, 1), (rows, 1), jax.random.key(1))
    budgets = jnp.array([1.7, 2.0, 3.0, 1.0])[:rows, None]
    steps = ROOM.spec.trial_steps
    trials = run_trials(ROOM, nosy().agent, tasks, budgets, jax.random.key(0), episodes=4, steps=steps)
    return budgets[:, 0], jax.tree.map(np.asarray, trials)


def test_a_batch_acts_as_in_run_trials():
    budgets, trials = played(4)
    policy = nosy()
    policy.start(budget=budgets.tolist())
    last = {}
    for time in range(trials.action.shape[1]):
        alive = trials.valid[:, time]
        action = policy.act(trials.token.observation[:, time], **last)
        np.testing.assert_array_equal(action[alive], trials.action[alive, time])
        last = {name: getattr(trials, name)[:, time] for name in ("reward", "cost", "terminated", "truncated")}
    ends = trials.done & trials.valid
    assert ends.sum() == 16
    assert len({tuple(row) for row in ends}) > 1  # rows did end their episodes at different times


def test_a_single_row_acts_as_in_run_trials_and_goes_on_after_the_last_episode():
    _, trials = played(1)
    policy = nosy()
    policy.start(budget=1.7)
    steps = int(trials.valid[0].sum())
    for time in range(steps):
        last = (
            []
            if time == 0
            else [x[0, time - 1] for x in (trials.reward, trials.cost, trials.terminated, trials.truncated)]
        )
        action = policy.act(tuple(trials.token.observation[0, time]), *last)
        assert type(action) is int
        assert action == trials.action[0, time]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        more = [policy.act((1, 1), 0.0, 1.0, False, True) for _ in range(50)]
    assert set(more) <= set(range(5))


def test_start_forgets_everything():
    policy = nosy()
    runs = []
    for _ in range(2):
        policy.start(budget=2)
        runs.append([policy.act((1, 1)), *(policy.act((1, 0), 0.0, 1.0) for _ in range(4))])
    assert runs[0] == runs[1]
    policy.start(budget=3)
    assert [policy.act((1, 1)), *(policy.act((1, 0), 0.0, 1.0) for _ in range(4))] != runs[0]


@pytest.mark.parametrize(("budget", "named"), [(0.5, 0.5), (4, 4), ([1, 2, 3, 9], 9)])
def test_a_budget_it_was_not_trained_on_is_warned_of(budget, named):
    with pytest.warns(BeyondTraining, match=f"budgets from 1 to 3, not {named}$") as said:
        nosy().start(budget)
    assert len(said) == 1
    assert said[0].filename == __file__  # where the user called it


def test_nothing_is_warned_of_within_its_training():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy = nosy()
        policy.start(budget=[1, 3.9])  # costs are whole: 3.9 is 3
        policy.act(np.ones((2, 2), int))
        for ends in ([True, False],) * 4 + ([True, True],) * 3:  # the first row's trial is over long before
            policy.act(np.ones((2, 2), int), np.zeros(2), np.zeros(2), ends)


def test_an_episode_past_its_time_limit_is_warned_of():
    policy = nosy()
    policy.start(budget=2)
    policy.act((1, 1))
    for _ in range(4):
        policy.act((1, 1), 0.0, 0.0)
    with pytest.warns(BeyondTraining, match="episodes of at most 5 steps, not 6") as said:
        _ = [policy.act((1, 1), 0.0, 0.0) for _ in range(3)]
    assert len(said) == 1


def test_k_is_the_algorithms_where_it_has_its_own():
    policy = nosy()
    assert policy.episodes == ROOM.episodes
    policy.card["training"] = {"algo": {"config": {"episodes": 2}}}
    assert policy.episodes == 2


def test_a_second_episode_is_warned_of_after_single_ones():
    policy = nosy()
    policy.card["training"] = {"algo": {"config": {"episodes": 1}}}
    policy.start(budget=[1, 2])
    policy.act(np.ones((2, 2), int))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy.act(np.ones((2, 2), int), np.zeros(2), np.zeros(2), [True, False])  # the first row waits
    with pytest.warns(BeyondTraining, match="trained on single episodes: it does not learn from earlier") as said:
        _ = [policy.act(np.ones((2, 2), int), np.zeros(2), np.zeros(2), True) for _ in range(2)]
    assert len(said) == 1


@pytest.mark.parametrize("name", catalogue.policy_names())
def test_a_shipped_policy_knows_what_it_was_trained_on(name):
    policy = load_policy(name)
    low, high = policy.env.spec.train_budget
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy.start(budget=[low, high])
    assert policy.episodes == policy.env.spec.episodes
    with pytest.warns(BeyondTraining, match=f"budgets from {low:g} to {high:g}, not {high + 1:g}"):
        policy.start(budget=high + 1)


def test_seeds_decide_sampled_actions():
    policy = Policy(env=ROOM, agent=TableAgent(table=jnp.zeros((9, 5)), size=3), card={})
    runs = []
    for seed in (0, 0, 1):
        policy.start(budget=1, batch=20, seed=seed)
        runs.append(policy.act(np.ones((20, 2), int)).tolist())
    assert runs[0] == runs[1] != runs[2]


@pytest.fixture
def released(tmp_path, monkeypatch):
    monkeypatch.setitem(
        catalogue.KINDS, "table", lambda card, env: TableAgent(table=jnp.zeros((env.size**2, 5)), size=env.size)
    )
    agent = TableAgent(table=jnp.arange(45.0).reshape(9, 5), size=3)
    path = tmp_path / "best-seed0.safetensors"
    cards.save_policy(path, agent, {"kind": "table", "env": env_to_plain(ROOM), "note": "δ"})
    return path


def test_a_policy_is_found_by_any_of_its_names(released):
    for name in (released, released.with_suffix(""), released.with_suffix(".json"), released.parent, str(released)):
        policy = load_policy(name)
        assert policy.card["note"] == "δ"
        assert policy.env == ROOM
        np.testing.assert_array_equal(policy.agent.table, np.arange(45.0).reshape(9, 5))


def test_the_papers_method_has_a_name_of_its_own():
    worlds = {
        "safe-dark-room",
        "safe-dark-point",
        "safe-dark-car",
        "safe-velocity-half-cheetah",
        "safe-velocity-ant",
    }
    assert catalogue.penalty_names() == {f"{world}-penalty": world for world in worlds}
    for world in worlds:
        assert catalogue.find_policy(f"{world}-penalty") == catalogue.find_policy(world)
    assert load_policy("safe-dark-room-penalty").agent.risk is None
    with pytest.raises(UserError, match="unknown policy 'safe-dark-room-guard-penalty'"):
        load_policy("safe-dark-room-guard-penalty")


CAREFUL = {
    "safe-dark-point": {"reserve": 8.0, "temperature": 0.5},
    "safe-dark-car": {"reserve": 5.0, "temperature": 0.5},
    "safe-velocity-half-cheetah": {"reserve": (1.0, 1.0, 0.1), "temperature": 0.0},
    "safe-velocity-ant": {"reserve": (1.0, 1.0), "brake": 2.0, "settle_after": 14, "temperature": 0.0},
}


def test_careful_policies_are_those_that_share_arrays():
    shared = {name: catalogue.shipped_card(name).get("arrays") for name in catalogue.policy_names()}
    assert {name: base for name, base in shared.items() if base} == {f"{base}-careful": base for base in CAREFUL}


@pytest.mark.parametrize("base", CAREFUL)
def test_a_careful_policy_is_another_one_that_acts_otherwise(base):
    careful, own = load_policy(f"{base}-careful").agent, load_policy(base).agent
    assert all(bool((x == y).all()) for x, y in zip(*map(jax.tree.leaves, (careful, own)), strict=True))
    assert careful == dataclasses.replace(own, net=careful.net, **CAREFUL[base])
    assert (own.reserve, own.brake, own.settle_after) == (0.0, 1.0, None)


def test_a_card_may_share_the_arrays_of_the_policy_beside_it(released):
    card, other = cards.read_card(released), released.with_name("best-seed1.safetensors")
    cards.write_card(other, {**card, "note": "shares", "arrays": "best-seed0"})
    for name in (other, other.with_suffix(""), other.with_suffix(".json")):
        policy = load_policy(name)
        assert policy.card["note"] == "shares"
        np.testing.assert_array_equal(policy.agent.table, np.arange(45.0).reshape(9, 5))
    copy = export_policy(other, released.with_name("copy"))  # has arrays of its own
    assert "arrays" not in cards.read_card(copy)
    np.testing.assert_array_equal(load_policy(copy).agent.table, np.arange(45.0).reshape(9, 5))
    cards.save_policy(released, TableAgent(table=jnp.zeros((9, 5)), size=3), card)
    with pytest.raises(UserError, match="is the card of another policy than the one in best-seed0"):
        cards.read_card(other)
    for name in ("../best-seed0", "/best-seed0", 7):
        with pytest.raises(UserError, match="'arrays' must be the name of a policy"):
            cards.write_card(other, {**card, "arrays": name})


def test_an_extension_of_ones_own(released, tmp_path):
    for extension in (".safetensors", ".json"):
        (tmp_path / f"b.txt{extension}").write_bytes(released.with_suffix(extension).read_bytes())
    for name in ("b.txt", "b.txt.json", "b.txt.safetensors"):
        assert catalogue.find_policy(tmp_path / name) == tmp_path / "b.txt.safetensors"
    (tmp_path / "b.txt").write_text("notes")  # of the two, the policy
    assert load_policy(tmp_path / "b.txt").card["note"] == "δ"
    released.rename(tmp_path / "best-seed0.weights")
    assert load_policy(tmp_path / "best-seed0.weights").card["note"] == "δ"


def test_a_runs_lowest_seed_comes_first(released):
    card = cards.read_card(released)
    for seed in (10, 2):
        cards.save_policy(released.with_name(f"best-seed{seed}.safetensors"), load_table(), {**card, "note": seed})
    assert load_policy(released.parent).card["note"] == "δ"
    released.unlink()
    assert load_policy(released.parent).card["note"] == 2
    assert list(catalogue.run_policies(released.parent)) == [2, 10]


def test_how_it_chooses_actions(released):
    assert load_policy(released).card["actions"] == "sampled, temperature 1"
    assert load_policy(released, greedy=True).card["actions"] == "greedy"
    greedy = load_policy(released, greedy=True)
    greedy.start(budget=1)
    assert greedy.act((1, 1)) == 4
    card = cards.read_card(released)
    cards.save_policy(released, greedy.agent, {**card, "temperature": 0.25})
    assert load_policy(released).card["actions"] == "sampled, temperature 0.25"


def test_policies_that_are_none(released, tmp_path):
    with pytest.raises(UserError, match="unknown policy 'safe-dark-rom'"):
        load_policy("safe-dark-rom")
    with pytest.raises(UserError, match="no policy and no run folder at"):
        load_policy(tmp_path / "none.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty is a folder without a policy, and not the folder of a run"):
        load_policy(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").touch()
    with pytest.raises(UserError, match=r"empty holds no policy .*; its first evaluation writes one"):
        load_policy(tmp_path / "empty")
    card = cards.read_card(released)
    for changed, words in (
        ({"kind": "tabel"}, "unknown kind of policy 'tabel'"),
        ({"env": {"name": "safe-dark-room"}}, "incomplete policy card"),
        ({"env": {"name": "x", "parameters": {}}}, "unknown environment 'x'"),
        ({"env": {"name": "safe-dark-room", "parameters": {"sise": 3}}}, "Did you mean 'size'"),
        (
            {"env": {"name": "safe-dark-room", "parameters": {"size": 5, "obstacles": 6}}},
            r"shape \(9, 5\), expected \(25, 5\)",
        ),
    ):
        cards.save_policy(released, load_table(), {**card, **changed})
        with pytest.raises(UserError, match=words) as error:
            load_policy(released)
        assert "\n" not in str(error.value)


def load_table():
    return TableAgent(table=jnp.zeros((9, 5)), size=3)


@pytest.mark.parametrize(
    ("budget", "more", "words"),
    [
        (-1, {}, "budget must be a finite number ≥ 0, got -1"),
        (float("nan"), {}, "budget must be a finite number"),
        ("3", {}, "budget must be a number"),
        ([], {}, r"budget must be a number ≥ 0, got \[\]"),
        ([[1, 2]], {}, "a number or a list of numbers"),
        ((1, 2), {}, r"must be a number or, for a batch, a list; tuples are for several costs, got \(1, 2\)"),
        ([1, 2], {"batch": 3}, "2 budgets were given for a batch of 3"),
        (1, {"batch": 0}, "batch must be"),
        (1, {"seed": -1}, "seed must be"),
        (1, {"guard": 0}, "guard must be true or false, got 0"),
        (1, {"guard": "no"}, "guard must be true or false, got 'no'"),
    ],
)
def test_bad_starts(budget, more, words):
    with pytest.raises(UserError, match=words):
        nosy().start(budget, **more)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((0, 3), 0.0, 0.0), "observation must be a cell in"),
        (((-1, 0), 0.0, 0.0), "observation must be a cell in"),
        (((0.5, 0), 0.0, 0.0), "observation must be a cell in"),
        (((0, float("nan")), 0.0, 0.0), "observations must be finite"),
        (((0, 0, 0), 0.0, 0.0), r"observation must have shape \(2,\)"),
        (("up", 0.0, 0.0), "observation must be made of numbers"),
        (((0, 0),), "needs the last step's reward"),
        (((0, 0), 0.0), "needs the last step's cost"),
        (((0, 0), float("inf"), 0.0), "rewards must be finite"),
        (((0, 0), 0.0, float("nan")), "costs must be finite"),
        (((0, 0), 0.0, -1.0), "costs must be finite, ≥ 0"),
        (((0, 0), 0.0, 5.0), r"^costs must be at most 1, the environment's spec\.max_cost, got 5$"),
        (((0, 0), 0.0, 0.5), r"^costs must be multiples of 1, the environment's spec\.cost_unit, got 0\.5$"),
        (((0, 0), [0.0, 1.0], 0.0), "reward must be one number"),
        (((0, 0), 0.0, 0.0, "no"), "terminated must be true or false, got 'no'"),
        (((0, 0), 0.0, 0.0, 2), "terminated must be true or false, got 2"),
    ],
)
def test_bad_steps_change_nothing(arguments, words):
    policy, twin = nosy(), nosy()
    for each in (policy, twin):
        each.start(budget=2)
        each.act((1, 1))
    with pytest.raises(UserError, match=words):
        policy.act(*arguments)
    assert policy.act((1, 0), 0.0, 1.0, 0) == twin.act((1, 0), 0.0, 1.0, False)


def test_bad_batches():
    policy = nosy()
    with pytest.raises(UserError, match="before start"):
        policy.act((1, 1))
    policy.start(budget=2, batch=3)
    with pytest.raises(UserError, match=r"observation must have shape \(3, 2\), got \(2, 2\)"):
        policy.act(np.ones((2, 2)))
    with pytest.raises(UserError, match="first call after start"):
        policy.act(np.ones((3, 2)), np.ones(3), np.zeros(3))
    with pytest.raises(UserError, match="truncated must be true or false, or 3 of them, got 'yes'"):
        policy.act(np.ones((3, 2)), truncated="yes")
    policy.act(np.ones((3, 2)))
    with pytest.raises(UserError, match="cost must be one number for each of 3 rows"):
        policy.act(np.ones((3, 2)), np.zeros(3), 1.0)
    with pytest.raises(UserError, match="truncated must be true or false, or 3 of them"):
        policy.act(np.ones((3, 2)), np.zeros(3), np.zeros(3), False, [True, False])


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda policy: pickle.loads(pickle.dumps(policy))],
    ids=["copy", "deepcopy", "pickle"],
)  # fmt: skip
def test_a_copy_has_no_trial_and_leaves_the_first_alone(again):
    policy, alone = nosy(), nosy()
    for each in (policy, alone):
        each.start(budget=2)
        each.act((1, 1))
    twin = again(policy)
    with pytest.raises(UserError, match="before start"):
        twin.act((1, 0), 0.0, 1.0)
    twin.start(budget=3)
    twin.act((0, 0))
    for _ in range(3):
        twin.act((0, 1), 1.0, 0.0)
        assert policy.act((1, 0), 0.0, 1.0) == alone.act((1, 0), 0.0, 1.0)


def test_a_copy_shares_the_weights():
    policy = nosy()
    assert copy.copy(policy).agent is policy.agent


def test_a_second_thread_is_refused(monkeypatch):
    policy, alone = nosy(), nosy()
    for each in (policy, alone):
        each.start(budget=2)
        each.act((1, 1))
    inside, go_on = threading.Event(), threading.Event()
    acts = policy_module.take_step

    def slow(*arguments):
        inside.set()
        assert go_on.wait(60)
        return acts(*arguments)

    monkeypatch.setattr(policy_module, "take_step", slow)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(policy.act, (1, 0), 0.0, 1.0)
        assert inside.wait(60)
        for call in (lambda: policy.act((1, 0), 0.0, 1.0), lambda: policy.start(budget=1)):
            with pytest.raises(UserError, match=r"acting in another thread: give each thread its own, copy\.copy"):
                call()
        go_on.set()
        # the trial goes on as if nobody had asked, in any thread
        assert first.result(60) == alone.act((1, 0), 0.0, 1.0)
    assert policy.act((0, 0), 0.0, 1.0) == alone.act((0, 0), 0.0, 1.0)


@pytest.mark.parametrize("wrong", [None, 3, b"safe-dark-room", ["safe-dark-room"], "", nosy()])
def test_what_names_no_policy_is_refused(wrong):
    with pytest.raises(UserError, match=r"^a policy is the name of one that ships, or a path, got [^\n]+$"):
        load_policy(wrong)


NET = NetConfig(width=8, layers=1, heads=2, context=ROOM.spec.trial_steps, dtype="float32")


def network() -> PolicyNet:
    net = eqx.filter_jit(PolicyNet)(NET, ROOM.spec, jax.random.key(5))
    # louder than a fresh network, whose small last layer would choose the same action everywhere
    return jax.tree.map(lambda x: 8 * x if eqx.is_inexact_array(x) else x, net)


def released_network(path, **more) -> None:
    card = {"kind": "net", "net": dataclasses.asdict(NET), "env": env_to_plain(ROOM), **more}
    cards.save_policy(path, InContextAgent(net=network()), card)


def test_a_released_network_acts_as_in_run_trials_long_after_its_context_is_full(tmp_path):
    path = tmp_path / "net.safetensors"
    released_network(path)
    policy = load_policy(path, greedy=True)
    tasks, budgets = sample_queue(ROOM, "test", (1, 3), (6, 1), jax.random.key(1))
    steps = 3 * ROOM.spec.trial_steps
    trials = run_trials(ROOM, policy.agent, tasks, budgets, jax.random.key(0), episodes=12, steps=steps)
    assert len(set(np.asarray(trials.action).ravel().tolist())) > 2
    assert (np.asarray(trials.valid).sum(1) > NET.context).all()
    policy.start(budget=budgets[:, 0].tolist())
    last = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for time in range(trials.action.shape[1]):
            alive = np.asarray(trials.valid[:, time])
            action = policy.act(trials.token.observation[:, time], **last)
            np.testing.assert_array_equal(action[alive], np.asarray(trials.action)[alive, time])
            last = {name: getattr(trials, name)[:, time] for name in ("reward", "cost", "terminated", "truncated")}


def seen_at(agent: InContextAgent, episode: int, *, start: bool = False) -> jax.Array:
    """The logits at a token of this episode, after a trial's first token."""
    first = jax.tree.map(lambda x: x[None], first_token(ROOM.spec, jnp.array([1, 1]), jnp.float32(2)))
    token = replace(
        first, episode=jnp.array([episode]), start=jnp.array([start]), time=jnp.array([0 if start else 2])
    )
    memory, *_ = agent.read(agent.extend(agent.init(None, 1), 5), first)
    memory, features, _ = agent.read(memory, token)
    assert int(memory.age[0]) == 2  # nothing was forgotten
    return np.asarray(agent.net.distribution(features).logits)


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("trained", [1, 2, 4])
def test_later_episodes_look_like_the_last_of_training(trained, start):
    agent, free = InContextAgent(net=network(), trained_episodes=trained), InContextAgent(net=network())
    last = max(trained - 1, 1) if start else trained - 1  # a start in episode 0 is a trial's first token
    np.testing.assert_array_equal(seen_at(agent, trained + 5, start=start), seen_at(agent, last, start=start))
    for known in range(int(start), trained):  # bit for bit as without a limit
        np.testing.assert_array_equal(seen_at(agent, known, start=start), seen_at(free, known, start=start))
    assert not np.allclose(seen_at(agent, trained + 5, start=start), seen_at(free, trained + 5, start=start))


def test_a_network_is_loaded_with_the_number_of_episodes_of_its_training(tmp_path):
    path = tmp_path / "net.safetensors"
    released_network(path)
    assert load_policy(path).agent.trained_episodes == ROOM.episodes
    released_network(path, training={"algo": {"config": {"episodes": 2}}})
    assert load_policy(path).agent.trained_episodes == 2
    for episodes in (0, "two"):
        released_network(path, training={"algo": {"config": {"episodes": episodes}}})
        with pytest.raises(
            UserError, match=f"the card's number of episodes must be an integer ≥ 1, got {episodes!r}"
        ):
            load_policy(path)


def test_in_training_too_later_episodes_look_like_the_last():
    algorithm = Scared(ROOM, ScaredConfig(rows=64, episodes=2, net=NET))
    agent = algorithm.agent(eqx.filter_eval_shape(algorithm.init, jax.random.key(0)))
    assert agent.trained_episodes == 2


def test_a_policy_for_another_environment_sees_numbers_as_in_training(tmp_path):
    path = tmp_path / "net.safetensors"
    released_network(path)
    wider = {"episodes": 9, "train_budget": (1.0, 30.0), "max_steps": 8}
    moved = load_policy(export_policy(path, tmp_path / "moved", env_args=wider))
    assert moved.env.spec.episodes == 9
    assert (moved.episodes, moved.agent.trained_episodes, moved.agent.net.trunk.spec) == (4, 4, ROOM.spec)
    with pytest.warns(BeyondTraining, match="budgets from 1 to 3, not 9"):
        moved.start(9)
    # exported once more: the training stays where it was
    further = load_policy(export_policy(tmp_path / "moved", tmp_path / "further", env_args={"episodes": 6}))
    assert (further.episodes, further.card["trained_in"]["parameters"]["max_steps"]) == (4, ROOM.max_steps)
    (limit,) = further.card["limits"]
    assert limit.endswith("max_steps=5, here 8, episodes=4, here 6, train_budget=(1.0, 3.0), here (1.0, 30.0)")
    home = {name: getattr(ROOM, name) for name in wider}
    back = load_policy(export_policy(tmp_path / "further", tmp_path / "back", env_args=home))
    assert (back.env, back.card["limits"]) == (ROOM, [])
    assert "trained_in" not in back.card
