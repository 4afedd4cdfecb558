"""Collecting learning histories: the order of episodes by hand, the room's rules, interrupts, the command line."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest

from safeicrl.cli import main
from safeicrl.envs.dark_room import MOVES, SafeDarkRoom
from safeicrl.errors import UserError
from safeicrl.histories import collect as module
from safeicrl.histories.collect import CollectConfig, Stream, collect, default_config, learning_progress
from safeicrl.histories.store import ARRAYS, TERMINATED, TRUNCATED, open_histories
from safeicrl.optimisers.lagrangian import PPOLagConfig

ROOM = SafeDarkRoom(size=3, obstacles=2, max_steps=5)
SMALL = {"envs": 3, "steps": 4, "minibatches": 1, "epochs": 1, "hidden": (8,)}
TINY = CollectConfig(
    tasks=2, limits=(0.0, 2.0), steps=200, group=2,
    learner=dataclasses.replace(default_config(ROOM).learner, **SMALL),  # as the command line has it
)  # fmt: skip


@pytest.fixture(scope="module")
def histories(tmp_path_factory):
    return collect(ROOM, TINY, out=tmp_path_factory.mktemp("collected"))


def written(stream: Stream, parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """What a stream gives for the parts, put where it says."""
    found = {name: np.full(11 if name != "final" else 2, -1) for name in ("action", "done", "final")}
    for part in parts:
        for name, at, values in stream.feed(part):
            if name in found:
                found[name][at : at + len(values)] = values.reshape(len(values))
    return found


@pytest.mark.parametrize("cuts", [(), (3,), (1, 2, 4)])
def test_episodes_come_whole_in_the_order_in_which_they_ended(cuts):
    """Two environments side by side, six steps; a step is named by its environment and time."""
    done = np.array([[0, 0, 2, 0, 1, 0], [0, 1, 0, 0, 0, 2]], np.uint8)
    name = np.array([[0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15]])
    played = {key: name for key in ("action", "reward", "cost")} | {"done": done}
    played |= {"observation": name[..., None], "final": 100 + name[..., None]}
    bounds = (0, *cuts, 6)
    parts = [{n: x[:, a:b] for n, x in played.items()} for a, b in itertools.pairwise(bounds)]
    found = written(Stream(11), parts)
    # the episode that ended first began second; environment 0's last step belongs to no whole episode
    np.testing.assert_array_equal(found["action"], [10, 11, 0, 1, 2, 3, 4, 12, 13, 14, 15])
    np.testing.assert_array_equal(found["done"], [0, 1, 0, 0, 2, 0, 1, 0, 0, 0, 2])
    np.testing.assert_array_equal(found["final"], [102, 115])
    # a shorter history ends in the middle of an episode
    np.testing.assert_array_equal(written(Stream(6), parts)["action"], [10, 11, 0, 1, 2, 3, -1, -1, -1, -1, -1])


def test_every_recorded_step_obeys_the_rules_of_its_room(histories):
    task_key, _ = jax.random.split(jax.random.key(TINY.seed))
    for i, (task, limit) in enumerate(((0, 0.0), (0, 2.0), (1, 0.0), (1, 2.0))):
        assert histories.task[i] == task
        assert histories.limit[i] == limit
        room = ROOM.sample_task(jax.random.fold_in(task_key, task), "train")
        goal, obstacles = divmod(int(room.goal), 3), np.asarray(room.obstacles).reshape(3, 3)
        cell, time, truncated = (1, 1), 0, 0
        for t in range(TINY.steps):
            assert tuple(histories.observation[i, t]) == cell
            cell = tuple(np.clip(np.array(cell) + MOVES[histories.action[i, t]], 0, 2))
            assert histories.reward[i, t] == (cell == goal)
            assert histories.cost[i, t] == obstacles[cell]
            time += 1
            expected = TERMINATED if cell == goal else TRUNCATED if time == 5 else 0
            assert histories.done[i, t] == expected
            if expected == TRUNCATED:
                assert tuple(histories.final[i, truncated]) == cell
                truncated += 1
            if expected:
                cell, time = (1, 1), 0


def test_the_card_says_what_was_collected(histories):
    meta = histories.meta
    assert meta["env"] == {"name": "safe-dark-room", "parameters": json.loads(json.dumps(dataclasses.asdict(ROOM)))}
    assert meta["algo"]["name"] == "ppo-lag"
    assert meta["algo"]["config"]["hidden"] == [8]
    assert meta["collection"]["limits"] == [0.0, 2.0]
    assert meta["complete"] == 4
    for name in ("seconds", "compile_seconds", "device", "safeicrl", "command"):
        assert name in meta


class Leave:
    """A request to stop that comes with the n-th look."""

    def __init__(self, after: int):
        self.left = after

    def __call__(self):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    @property
    def requested(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_interrupted_and_started_again_gives_the_same_bytes(histories, tmp_path, monkeypatch):
    # 18 iterations in two calls a group: stopped in the middle of the second group
    monkeypatch.setattr(module, "StopRequest", Leave(after=2))
    assert collect(ROOM, TINY, out=tmp_path) is None
    assert open_histories(tmp_path, partial=True).meta["complete"] == 2
    # asked to stop in the last call of all: the work is done, so it counts
    monkeypatch.setattr(module, "StopRequest", Leave(after=1))
    again = collect(ROOM, TINY, out=tmp_path)
    for name in ARRAYS:
        assert (tmp_path / f"{name}.npy").read_bytes() == (histories.folder / f"{name}.npy").read_bytes()
    assert again.meta["groups"] == histories.meta["groups"]


def test_other_seeds_are_other_histories_in_another_folder(histories, tmp_path):
    other = dataclasses.replace(TINY, seed=1, tasks=1)
    with pytest.raises(UserError, match=r"holds other histories: collection\.\w+ is"):
        collect(ROOM, other, out=histories.folder)
    found = collect(ROOM, other, out=tmp_path)
    assert (found.action != histories.action[:2]).any()


def test_progress_is_measured_at_the_start_in_the_middle_and_at_the_end(histories):
    found = learning_progress(histories)
    assert list(found) == [0.0, 2.0]
    sums = [histories.episodes(i) for i in (0, 2)]  # the histories at limit 0
    middle = [s.costs[(s.ends > 95) & (s.ends <= 105)] for s in sums]
    assert all(len(costs) for costs in middle)
    assert found[0.0]["cost"][1] == pytest.approx(np.mean([costs.mean() for costs in middle]))
    assert found[0.0]["episodes"] == sum(len(s.ends) for s in sums)


def test_defaults_are_the_papers_four_million_steps():
    config = default_config(SafeDarkRoom())
    assert config.histories * config.steps == 4_050_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": 0}, "tasks must be an integer ≥ 1"),
        ({"limits": ()}, "at least one cost limit"),
        ({"limits": (-1.0,)}, "must be a finite number ≥ 0"),
        ({"split": "both"}, "split must be"),
        ({"learner": PPOLagConfig(iterations=7)}, "set by steps: leave out learner.iterations"),
    ],
)
def test_settings_that_cannot_be(changes, message):
    with pytest.raises(UserError, match=message):
        CollectConfig(**changes)


def test_the_command_line(tmp_path, capsys):
    room = ["--env-args", "size=3", "obstacles=2", "max_steps=5"]
    small = ["--tasks", "1", "--limits", "0", "2", "--steps", "200", "--group", "2", "--learner.hidden", "8"]
    small += [f"--learner.{name}={value}" for name, value in SMALL.items() if name != "hidden"]  # TINY's program
    out = ["--out", str(tmp_path / "h")]
    assert main(["collect", *room, *small, *out]) == 0
    said = capsys.readouterr().out
    assert "2 histories, 400 steps" in said
    assert "middle" in said
    assert main(["collect", *room, *small, *out]) == 0
    assert "2 of 2 histories already" in capsys.readouterr().out
    assert main(["collect", *room, *small, *out, "--seed", "3"]) == 2
    assert "collection.seed is 0 there, 3 here" in capsys.readouterr().err
    assert main(["collect", "--env", "moon"]) == 2
    assert "unknown environment 'moon'" in capsys.readouterr().err
    assert main(["collect", "--task", "2"]) == 2
    assert "did you mean --tasks" in capsys.readouterr().err
