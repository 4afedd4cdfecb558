"""The evaluation protocol on agents whose numbers are known, and results on disk."""

import dataclasses
import json
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from safeicrl.agents.api import with_options
from safeicrl.agents.reference import RandomAgent
from safeicrl.budgets import budget_edges
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.errors import UserError
from safeicrl.evaluation.archive import load_results, results_equal, save_results
from safeicrl.evaluation.evaluate import budget_grid, evaluate
from safeicrl.evaluation.results import ARRAYS, Results
from safeicrl.evaluation.statistics import budget_bins, relative, rises, standard_error, summarise
from safeicrl.evaluation.tables import summary_table


class Corridor(SafeDarkRoom):
    """A 3×3 room that is always the same: obstacle right of the start, the goal below it, nothing else."""

    def sample_task(self, key, split):
        return self.make_task(goal=(2, 1), obstacles=[(1, 2)])


ENV = Corridor(size=3, obstacles=1, max_steps=4, episodes=3, test_budget=(1.0, 10.0))


class Scripted(eqx.Module):
    """Episode k plays actions[k], one a step; remembers how many steps it has taken in its life."""

    actions: jax.Array  # [episode, step]

    def init(self, tasks, rows):
        return jnp.zeros(rows, jnp.int32)

    def extend(self, memory, steps):
        return memory

    def act(self, memory, token, key):
        memory = jnp.where(token.first, 0, memory)
        return memory + 1, self.actions[token.episode, token.time], {"lives": memory}


STAY, UP, DOWN, LEFT, RIGHT = range(5)


def scripted(*episodes):
    return Scripted(actions=jnp.array(episodes, jnp.int32))


def test_an_agent_that_stays_earns_and_costs_nothing():
    found = evaluate(ENV, scripted(*[[STAY] * 4] * 3), tasks=5)
    for name in ("returns", "costs"):
        np.testing.assert_array_equal(getattr(found, name), np.zeros((5, 3)))
    np.testing.assert_array_equal(found.lengths, np.full((5, 3), 4))
    assert not found.over.any()


def test_a_script_gives_its_known_numbers():
    agent = scripted([RIGHT, STAY, STAY, STAY], [RIGHT, LEFT, DOWN, STAY], [DOWN, STAY, STAY, STAY])
    found = evaluate(ENV, agent, tasks=18, rows=7)  # the last of three chunks is filled up
    np.testing.assert_array_equal(found.costs, np.tile([4, 1, 0], (18, 1)))
    np.testing.assert_array_equal(found.returns, np.tile([0, 1, 1], (18, 1)))
    np.testing.assert_array_equal(found.lengths, np.tile([4, 3, 1], (18, 1)))
    # 18 of the 100 budgets 1.045, 1.135, …; the first episode's cost of 4 is over those below 4, the others never
    np.testing.assert_allclose(found.budgets[[0, -1]], [1.045, 9.505], atol=1e-5)
    np.testing.assert_array_equal(found.over[:, 0], found.budgets < 4)
    assert not found.over[:, 1:].any()

    summary = summarise(found, last=2)
    assert summary.total_return == 2.0
    assert summary.total_return_error == 0.0
    assert summary.last_return == 1.0
    assert summary.over_budget == pytest.approx((found.budgets < 4).sum() / (18 * 3))
    assert summary.over_budget_last == 0.0
    assert summary.trials_over == pytest.approx((found.budgets < 4).mean())
    assert list(summary.by_budget) == ["1–2", "2–4", "4–6", "6–8", "8–10"]
    assert set(summary.by_budget.values()) == {2.0}
    over = list(summary.over_by_budget.values())
    assert over == pytest.approx([1 / 3, 1 / 3, 0, 0, 0])
    assert (summary.tasks, summary.episodes) == (18, 3)


def test_chunks_and_segments_do_not_change_a_script():
    agent = scripted([RIGHT, STAY, STAY, STAY], [RIGHT, LEFT, DOWN, STAY], [DOWN, STAY, STAY, STAY])
    whole = evaluate(ENV, agent, tasks=10)
    assert results_equal(whole, evaluate(ENV, agent, tasks=10, rows=3))
    assert not results_equal(whole, evaluate(ENV, scripted(*[[STAY] * 4] * 3), tasks=10))


def test_agents_meet_the_same_rooms_and_seeds_others():
    env = SafeDarkRoom(size=4, obstacles=5, max_steps=4, episodes=2)
    agent = RandomAgent(action=env.spec.action)
    one, again, other = (evaluate(env, agent, tasks=30, seed=seed) for seed in (0, 0, 1))
    assert results_equal(one, again)
    assert not results_equal(one, other)


def test_a_wiped_agent_meets_every_episode_as_the_first():
    # the script's second and third episode never come: token.episode stays 0
    agent = scripted([RIGHT, STAY, STAY, STAY], [DOWN] * 4, [DOWN] * 4)
    wiped, how = with_options(ENV, agent, wipe=True)
    found = evaluate(ENV, wiped, tasks=4, meta=how)
    np.testing.assert_array_equal(found.costs, np.full((4, 3), 4))
    assert found.meta["context"] == "wiped at every episode"
    kept, how = with_options(ENV, agent)
    assert how["context"] == "kept"
    assert evaluate(ENV, kept, tasks=4).returns[:, 1:].all()


class Tempered(eqx.Module):
    temperature: float = eqx.field(static=True, default=1.0)


def test_actions_are_labelled():
    assert with_options(ENV, Tempered())[1]["actions"] == "sampled, temperature 1"
    agent, how = with_options(ENV, Tempered(), temperature=0.2)
    assert (agent.temperature, how["actions"]) == (0.2, "sampled, temperature 0.2")
    agent, how = with_options(ENV, Tempered(), greedy=True)
    assert (agent.temperature, how["actions"]) == (0.0, "greedy")
    with pytest.raises(UserError, match="greedy contradicts temperature"):
        with_options(ENV, Tempered(), greedy=True, temperature=0.5)
    with pytest.raises(UserError, match="temperature must be"):
        with_options(ENV, Tempered(), temperature=-1.0)
    with pytest.raises(UserError, match="Scripted does not sample"):
        with_options(ENV, scripted([0]), temperature=0.5)


def test_budgets_are_distinct_uniform_and_used_equally_often():
    grid = budget_grid(1, 10)
    assert len(set(grid.tolist())) == 100
    assert grid.min() > 1
    assert grid.max() < 10
    np.testing.assert_allclose(np.diff(grid), 0.09, atol=1e-5)
    found = evaluate(ENV, scripted(*[[STAY] * 4] * 3), tasks=20, budgets=(2.0, 6.0), budget_count=5)
    values, counts = np.unique(found.budgets, return_counts=True)
    np.testing.assert_allclose(values, [2.4, 3.2, 4.0, 4.8, 5.6], atol=1e-6)
    assert set(counts) == {4}
    assert found.budget_range == (2.0, 6.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tasks": 0}, "tasks must be"),
        ({"rows": 0}, "rows must be"),
        ({"episodes": 0}, "episodes must be"),
        ({"budgets": (5.0, 1.0)}, "must rise"),
        ({"budgets": (-1.0, 1.0)}, "budget must be"),
        ({"budgets": (float("nan"), 1.0)}, "budget must be"),
        ({"budget_count": 0}, "number of budgets"),
        ({"budgets_per_task": 0}, "budgets_per_task must be"),
        ({"budgets_per_task": 9, "budget_count": 8}, "budgets_per_task must be at most budget_count, got 9 > 8"),
        ({"split": "tset"}, "split must be"),
    ],
)
def test_bad_questions(changes, words):
    with pytest.raises(UserError, match=words):
        evaluate(ENV, scripted(*[[STAY] * 4] * 3), **{"tasks": 2, **changes})


def results(**changes) -> Results:
    values = {
        "returns": np.arange(12.0).reshape(4, 3),
        "costs": np.ones((4, 3)),
        "lengths": np.full((4, 3), 5.0),
        "budgets": np.array([1.0, 2.0, 8.0, 10.0]),
        "meta": {"label": "x", "budget_range": [1, 10]},
    }
    return Results(**{**values, **changes})


def test_bins_hold_every_budget_once():
    np.testing.assert_allclose(budget_edges(1, 10), [1, 2, 4, 6, 8, 10])
    bins = budget_bins(results())
    np.testing.assert_array_equal(np.stack(list(bins.values())).sum(axis=0), np.ones(4))
    assert [int(rows.sum()) for rows in bins.values()] == [1, 1, 0, 0, 2]
    assert np.isnan(summarise(results()).by_budget["4–6"])
    assert list(budget_bins(results(budgets=np.full(4, 3.0), meta={}))) == ["3"]


def test_standard_error_by_hand():
    assert standard_error(np.array([1.0, 2.0, 3.0])) == pytest.approx(1 / np.sqrt(3))
    assert standard_error(np.array([1.0])) == 0
    # two tasks, each met twice with the same outcome: as if each had been met once
    twice = np.array([1.0, 3.0, 1.0, 3.0])
    assert standard_error(twice, np.array([0, 1, 0, 1])) == pytest.approx(standard_error(twice[:2]))
    assert standard_error(twice, np.arange(4)) == pytest.approx(standard_error(twice))
    # two groups of opposite outcomes: their means are equal, and so certain
    assert standard_error(twice, np.array([0, 0, 1, 1])) == pytest.approx(0)
    both = standard_error(np.stack([twice, 2 * twice], 1), np.array([0, 1, 0, 1]))
    np.testing.assert_allclose(both, [1.0, 2.0])


def test_every_task_under_small_and_large_budgets():
    """Nine budgets a task put each of them once into the first bin and twice into every other."""
    room = SafeDarkRoom(size=3, obstacles=2, max_steps=4, episodes=3)
    agent = scripted([DOWN, RIGHT, UP, UP], [RIGHT, UP, LEFT, LEFT], [LEFT, DOWN, RIGHT, RIGHT])
    some = {"tasks": 20, "seed": 4, "budgets": (0.0, 9.0)}
    once, often = evaluate(room, agent, **some), evaluate(room, agent, budgets_per_task=9, rows=16, **some)
    bins = [often.task[rows] for rows in budget_bins(often).values()]
    counts = np.array([np.bincount(tasks, minlength=20) for tasks in bins])
    expected = np.array([1, 2, 2, 2, 2])[:, None]
    assert np.abs(counts - expected).max() <= 1  # 100 budgets are not nine times as many
    assert (counts == expected).mean() > 0.9
    even = evaluate(room, agent, budgets_per_task=9, budget_count=99, **some)
    bins = [np.bincount(even.task[rows], minlength=20) for rows in budget_bins(even).values()]
    np.testing.assert_array_equal(bins, np.tile(expected, 20))
    np.testing.assert_array_equal(np.sort(often.budgets), often.budgets)
    assert len(np.unique(often.budgets)) == 100
    # the tasks are those of an evaluation with one budget each, and the script does not look at budgets
    for name in ("returns", "costs"):
        np.testing.assert_array_equal(getattr(often, name), np.tile(getattr(once, name), (9, 1)))
        assert len(np.unique(getattr(once, name).sum(axis=1))) > 1  # and they differ
    summary = summarise(often)
    assert (summary.tasks, summary.budgets_per_task) == (20, 9)
    assert summary.total_return_error == pytest.approx(summarise(once).total_return_error)
    assert summarise(once).budgets_per_task == 1
    with pytest.raises(UserError, match="differ in their budgets per task, 1 and 9"):
        relative(once, upper=often, lower=once)
    other = evaluate(room, agent, **{**some, "tasks": 180})
    with pytest.raises(UserError, match="differ in their budgets per task, 9 and 1"):
        relative(often, upper=often, lower=other)


def test_what_a_budget_is_worth_is_a_matter_of_the_same_tasks():
    """One task returns 1 and one 100, each more under a larger budget; in the last bin there is the first only."""
    totals = np.array([1.0, 100.0, 3.0, 106.0, 4.0])
    found = Results(
        returns=np.repeat(totals[:, None] / 2, 2, axis=1), costs=np.zeros((5, 2)), lengths=np.ones((5, 2)),
        budgets=np.array([1.0, 1.5, 2.5, 3.5, 9.0]), meta={"budget_range": [1, 10]},
    )  # fmt: skip
    assert rises(found) == {}  # five tasks
    six = dataclasses.replace(
        found, meta={**found.meta, "budgets_per_task": 3},
        **{name: np.concatenate([getattr(found, name), getattr(found, name)[-1:]]) for name in ARRAYS},
    )  # fmt: skip
    six.returns[-1], six.budgets[-1] = 54.0, 2.0
    # the second task is in the second bin twice, with 106 and 108, and not in the last
    assert rises(six) == {"2–4": [pytest.approx((2 + 7) / 2), pytest.approx(2.5)]}
    assert "rise from δ 1–2 +4.5 ± 2.5" in " ".join(_printed(summary_table([six])).split())
    for table in (summary_table([found]), summary_table([six, six])):
        assert "rise" not in _printed(table)


def _printed(table) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_budgets_per_task_survive_a_file(tmp_path):
    meta = {"label": "x", "budgets_per_task": 2}
    arrays, card = save_results(results(meta=meta), tmp_path / "a")
    assert load_results(arrays).task.tolist() == [0, 1, 0, 1]
    for damaged in ("0", "3", '"x"', "null"):
        card.write_text(f'{{"meta": {{"budgets_per_task": {damaged}}}}}')
        with pytest.raises(UserError, match=r"a\.npz is not a results file"):
            load_results(arrays)


@pytest.mark.parametrize("name", ["a", "a.npz", "a.json", "v1.5"])
def test_results_round_trip(tmp_path, name):
    before = results(meta={"label": "δ", "seed": 3, "nested": {"a": [1, 2]}})
    save_results(before, tmp_path / name)
    after = load_results(tmp_path / name)
    assert results_equal(before, after)
    assert after.meta == before.meta
    card = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert card["summary"]["total_return"] == summarise(before).total_return


def test_provenance_is_complete():
    meta = evaluate(ENV, scripted(*[[STAY] * 4] * 3), tasks=2, label="stay").meta
    for name in (
        "env",
        "seed",
        "safeicrl",
        "jax",
        "device",
        "command",
        "seconds",
        "label",
        "budget_range",
        "split",
    ):
        assert name in meta
    assert meta["env"]["parameters"]["size"] == 3


def test_results_that_are_none(tmp_path):
    with pytest.raises(UserError, match="no results file at"):
        load_results(tmp_path / "a")
    arrays, card = save_results(results(), tmp_path / "a")
    data = arrays.read_bytes()
    for broken in (data[: len(data) // 2], b"", b"nonsense"):
        arrays.write_bytes(broken)
        with pytest.raises(UserError, match="is not a results file"):
            load_results(tmp_path / "a")
    card.write_text('{"meta": {}}')  # without the digest of the arrays
    np.savez(arrays, returns=np.zeros((2, 3)), costs=np.zeros((2, 2)), lengths=np.zeros(1), budgets=np.zeros(2))
    with pytest.raises(UserError, match="do not fit together"):
        load_results(tmp_path / "a")
    save_results(results(), tmp_path / "a")
    for text in ("{", "[]", '{"meta": 3}'):
        card.write_text(text)
        with pytest.raises(UserError, match=r"a\.json is (no|not a) results file"):
            load_results(tmp_path / "a")


def test_missing_results_are_called_what_the_user_called_them(tmp_path):
    for name in ("a", "a.npz", "a.json"):
        with pytest.raises(UserError, match=f"no results file at .*/{re.escape(name)}$"):
            load_results(tmp_path / name)
    arrays, card = save_results(results(), tmp_path / "a")
    card.unlink()
    with pytest.raises(UserError, match=r"no results file at .*/a\.json"):
        load_results(card)
    with pytest.raises(UserError, match=r"a\.npz is half a results file: a\.json is missing"):
        load_results(arrays)
