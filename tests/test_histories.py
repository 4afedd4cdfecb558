"""Learning histories on disk: what is written is read, group by group, and anything amiss is one line."""

import json
import warnings

import numpy as np
import pytest
from probe import Push

from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.envs.registry import env_to_plain
from safeicrl.errors import UserError
from safeicrl.histories.minari import export_minari
from safeicrl.histories.store import ARRAYS, STEPWISE, Histories, HistoryWriter, open_histories

ROOM = SafeDarkRoom(size=3, obstacles=1, max_steps=3)
STEPS = 7
# One history by hand: a truncated episode of 3 steps (cost 1), a terminated one of 2, and 2 steps of a third.
DONE = np.array([0, 0, 2, 0, 1, 0, 0], np.uint8)
REWARD = np.array([0, 0, 0, 0, 1, 0, 0], np.float32)
COST = np.array([0, 1, 0, 0, 0, 1, 0], np.float32)


def group(count: int, first: int = 0) -> dict[str, np.ndarray]:
    """Histories that differ in their observations."""
    rng = np.random.default_rng(first)
    return {
        "observation": rng.integers(0, 3, (count, STEPS, 2), dtype=np.int32),
        "action": rng.integers(0, 5, (count, STEPS), dtype=np.int32),
        "reward": np.tile(REWARD, (count, 1)),
        "cost": np.tile(COST, (count, 1)),
        "done": np.tile(DONE, (count, 1)),
        "final": np.full((count, 2, 2), 1 + first),
    }


def writer(folder, env=ROOM, seed=0, histories=4) -> HistoryWriter:
    request = {"env": env_to_plain(env), "algo": {"name": "by hand", "config": {}}, "collection": {"seed": seed}}
    limit, task = np.arange(histories) / 2, np.arange(histories) // 2
    return HistoryWriter(folder, env=env, request=request, steps=STEPS, limit=limit, task=task)


@pytest.fixture
def folder(tmp_path):
    out = writer(tmp_path / "h")
    out.append(group(2, 0), seconds=1.5, device="test")
    out.append(group(2, 2), seconds=1.0, device="test")
    return tmp_path / "h"


def test_what_is_written_is_read(folder):
    found = open_histories(folder, env=ROOM, verify=True)
    assert isinstance(found, Histories)
    assert found.env == ROOM
    for name in STEPWISE:
        both = np.concatenate([group(2, 0)[name], group(2, 2)[name]])
        np.testing.assert_array_equal(getattr(found, name), both)
        assert getattr(found, name).dtype == np.uint8
        assert isinstance(getattr(found, name), np.memmap)
        assert not getattr(found, name).flags.writeable
    np.testing.assert_array_equal(found.limit, [0, 0.5, 1, 1.5])
    np.testing.assert_array_equal(found.task, [0, 0, 1, 1])
    assert found.meta["complete"] == found.meta["histories"] == 4
    assert found.meta["seconds"] == 2.5
    assert found.meta["device"] == "test"


def test_a_room_takes_six_bytes_a_step(folder):
    found = open_histories(folder)
    assert sum(getattr(found, name).nbytes for name in STEPWISE) == 6 * found.reward.size


def test_episodes_are_summed_between_their_ends(folder):
    sums = open_histories(folder).episodes(0)
    np.testing.assert_array_equal(sums.starts, [0, 3])
    np.testing.assert_array_equal(sums.ends, [3, 5])
    np.testing.assert_array_equal(sums.returns, [0, 1])
    np.testing.assert_array_equal(sums.costs, [1, 0])


def test_an_interrupted_writer_continues_to_the_same_bytes(folder, tmp_path):
    other = tmp_path / "other"
    writer(other).append(group(2, 0), seconds=9.0)
    broken = writer(other)  # dies between the arrays and the card
    with pytest.raises(RuntimeError):
        broken.append(group(2, 99), seconds=Unwritable())
    with pytest.raises(UserError, match="2 of 4 histories"):
        open_histories(other)
    assert len(open_histories(other, partial=True).limit) == 2
    again = writer(other)
    assert again.complete == 2
    again.append(group(2, 2), seconds=1.0)
    for name in ARRAYS:
        assert (other / f"{name}.npy").read_bytes() == (folder / f"{name}.npy").read_bytes()
    assert open_histories(other).meta["groups"] == open_histories(folder).meta["groups"]


class Unwritable:
    def __radd__(self, other):
        raise RuntimeError("killed")


def test_real_values_stay_real(tmp_path):
    env = Push(max_steps=3)
    rows = group(1)
    rows["observation"] = np.linspace(0, 1, STEPS, dtype=np.float32).reshape(1, STEPS, 1)
    rows["action"] = -rows["observation"]
    rows["reward"] = np.full((1, STEPS), 0.5, np.float32)
    rows["final"] = np.full((1, 2, 1), 0.25, np.float32)
    writer(tmp_path / "p", env=env, histories=1).append(rows)
    with pytest.raises(UserError, match="unknown environment 'Push'"):
        open_histories(tmp_path / "p")
    found = open_histories(tmp_path / "p", env=env, verify=True)
    for name in ("observation", "action", "reward", "final"):
        assert getattr(found, name).dtype == np.float32
        np.testing.assert_array_equal(getattr(found, name), rows[name])
    assert found.cost.dtype == np.uint8  # all costs are 0 or 1


def test_a_later_group_that_does_not_fit_one_byte_is_refused(tmp_path):
    out = writer(tmp_path / "h")
    out.append(group(2))
    odd = group(2)
    odd["reward"] = odd["reward"] - 0.5
    with pytest.raises(UserError, match=r"reward.npy holds whole numbers from 0 to 255, got reward -0.5"):
        out.append(odd)
    assert open_histories(tmp_path / "h", partial=True).meta["complete"] == 2


# -- what is amiss


def edit(folder, **changes):
    path = folder / "histories.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(UserError, match="no learning histories at"):
        open_histories(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no card of learning histories"):
        open_histories(tmp_path)
    (tmp_path / "histories.json").write_text("[1]")
    with pytest.raises(UserError, match="is not a card of learning histories"):
        open_histories(tmp_path)


def test_another_version(folder):
    edit(folder, version=2)
    with pytest.raises(UserError, match="version 2, this library reads 1"):
        open_histories(folder)


@pytest.mark.parametrize("name", ["reward", "limit"])
def test_a_file_cut_short(folder, name):
    path = folder / f"{name}.npy"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match=f"{name}.npy is cut short: {size - 3} bytes of {size}"):
        open_histories(folder)
    with pytest.raises(UserError, match="cut short"):  # nor is it continued
        writer(folder)


def test_a_file_missing_or_of_another_shape(folder):
    np.save(folder / "done.npy", np.zeros((9, 9, 9)))
    with pytest.raises(UserError, match=r"done.npy is float64 \[9, 9, 9\], but its card says uint8 \[4, 7\]"):
        open_histories(folder)
    (folder / "done.npy").write_bytes(b"x" * 1000)
    with pytest.raises(UserError, match=r"done.npy is damaged"):
        open_histories(folder)
    (folder / "done.npy").unlink()
    with pytest.raises(UserError, match=r"no done.npy"):
        open_histories(folder)


def test_a_flipped_byte_fails_the_checksum(folder):
    data = bytearray((folder / "action.npy").read_bytes())
    data[-1] ^= 1
    (folder / "action.npy").write_bytes(data)
    open_histories(folder)
    with pytest.raises(UserError, match="histories 2 to 3 fail their checksum"):
        open_histories(folder, verify=True)


def test_another_environment(folder):
    with pytest.raises(UserError, match=r"histories of safe-dark-room, not of Push"):
        open_histories(folder, env=Push())
    with pytest.raises(UserError, match="with size 3, not 4"):
        open_histories(folder, env=SafeDarkRoom(size=4, obstacles=1, max_steps=3))


def test_a_folder_of_another_request_is_left_alone(folder):
    with pytest.raises(UserError, match=r"collection.seed is 0 there, 1 here; choose another folder"):
        writer(folder, seed=1)


# -- Minari


def test_minari_gets_whole_episodes_with_costs(folder, tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    pytest.importorskip("h5py")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    found = open_histories(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert export_minari(found, "safeicrl/fewer-v0", every=3).total_episodes == 3
        dataset = export_minari(found, "safeicrl/tiny-v0")
    assert minari.load_dataset("safeicrl/tiny-v0").recover_environment().unwrapped.env == found.env
    assert dataset.total_episodes == 8
    assert dataset.total_steps == 4 * 5
    first, second = list(dataset.iterate_episodes())[:2]
    np.testing.assert_array_equal(first.infos["cost"], [0, 0, 1, 0])
    np.testing.assert_array_equal(first.observations[:-1], found.observation[0, :3])
    np.testing.assert_array_equal(first.observations[-1], [1, 1])  # stored: the episode was truncated
    np.testing.assert_array_equal(first.truncations, [False, False, True])
    np.testing.assert_array_equal(second.terminations, [False, True])
    np.testing.assert_array_equal(second.rewards, [0, 1])
    np.testing.assert_array_equal(second.observations[-1], found.observation[0, 4])


def test_minari_is_asked_for_by_name(folder, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(UserError, match=r"minari is not installed: pip install 'safeicrl\[minari\]'"):
        export_minari(open_histories(folder), "x-v0")
