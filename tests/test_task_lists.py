"""Frozen task lists: the arrays are those of the hash, of the right world, and an evaluation plays them."""

import shutil

import jax
import numpy as np
import pytest
from rich.console import Console

from safeicrl.agents.reference import RandomAgent
from safeicrl.envs.registry import make_env
from safeicrl.envs.safe_velocity import TRAIN_MULTIPLIERS
from safeicrl.errors import UserError
from safeicrl.evaluation import task_lists
from safeicrl.evaluation.evaluate import evaluate
from safeicrl.evaluation.results import Results
from safeicrl.evaluation.tables import limits_table
from safeicrl.evaluation.task_lists import FOLDER, LISTS, load_list, seeded_tasks, wide_limits
from safeicrl.train import EvalConfig

ROOM = make_env("safe-dark-room")


def test_the_rooms_lists_are_the_tasks_of_their_seeds():
    for name, (split, seed) in LISTS.items():
        frozen = load_list(ROOM, name)
        assert (frozen.count, frozen.split) == (1000, split)
        drawn = seeded_tasks(ROOM, split, seed, 1000)
        jax.tree.map(np.testing.assert_array_equal, frozen.tasks, drawn)


def test_training_evaluates_on_the_seed_of_validation_only():
    assert EvalConfig().seed == LISTS["validation"][1]
    assert len({seed for _, seed in LISTS.values()}) == len(LISTS)


@pytest.mark.parametrize("world", sorted(path.stem for path in FOLDER.glob("safe-*.json")))
def test_every_worlds_lists_are_whole(world):
    pytest.importorskip("mujoco")
    env = make_env(world)
    lists = [load_list(env, name) for name in ("train", "validation", "test")]
    assert len({frozen.sha256 for frozen in lists}) == 3
    if world.startswith("safe-velocity"):
        wide = load_list(env, "wide")
        np.testing.assert_allclose(wide.tasks.multiplier, wide_limits(), rtol=1e-6)


def test_wide_limits_lie_between_those_of_training():
    limits = wide_limits()
    edges = np.sort(TRAIN_MULTIPLIERS)
    assert np.bincount(np.searchsorted(edges, limits) - 1).tolist() == [6] * (len(edges) - 1)
    assert np.abs(limits[:, None] - edges).min() >= 0.0049  # a tenth of the smallest gap


def test_changed_tasks_and_other_worlds_are_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="for size=9, got size=5"):
        load_list(make_env("safe-dark-room", size=5, obstacles=6), "test")
    with pytest.raises(UserError, match="wide"):
        load_list(ROOM, "wide")
    monkeypatch.setattr(task_lists, "FOLDER", tmp_path)
    with pytest.raises(UserError, match="has no task lists"):
        load_list(ROOM, "test")
    shutil.copy(FOLDER / "safe-dark-room.json", tmp_path)
    with np.load(FOLDER / "safe-dark-room.npz") as file:
        arrays = dict(file)
    arrays["test.0"][7] += 1
    np.savez(tmp_path / "safe-dark-room.npz", **arrays)
    load_list(ROOM, "train")
    with pytest.raises(UserError, match="'test' of safe-dark-room was changed"):
        load_list(ROOM, "test")


def test_an_evaluation_plays_the_list_and_says_so():
    agent = RandomAgent(action=ROOM.spec.action)
    short = {"tasks": 3, "episodes": 1, "rows": 3}
    played = evaluate(ROOM, agent, task_list="validation", **short)
    assert played.meta["task_list"]["sha256"] == load_list(ROOM, "validation").sha256
    assert played.meta["task_list"]["name"] == "validation"
    other = evaluate(ROOM, agent, task_list="train", **short)
    assert other.meta["split"] == "train"
    assert not np.array_equal(played.costs, other.costs)  # same actions, other rooms


def test_a_repeated_limit_counts_once():
    returns = np.array([[10.0, 10], [30, 30], [60, 60], [0, 0]])
    meta = {"limits": [0.6, 0.6, 0.9, 0.75], "budget_range": [1, 1]}
    costs = np.array([[0.0, 2], [0, 0], [0, 0], [2, 2]])
    result = Results(returns=returns, costs=costs, lengths=np.ones((4, 2)), budgets=np.ones(4), meta=meta)
    console = Console(width=100, record=True)
    console.print(limits_table(result, last=1))
    said = " ".join(console.export_text().split())
    assert "0.6 2 20.0 20.0 0.00 1.00 25.0%" in said
    assert "0.75 1 0.0 0.0 2.00 2.00 100.0%" in said
    # Means by limit 20, 0, 60: their mean is 26.7, and their standard error √(933.3 / 3) = 17.6.
    assert "26.7 ± 17.6" in said
