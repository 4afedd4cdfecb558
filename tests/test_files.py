"""Folders with one owner, files of killed processes, damaged logs and JSON, cards whose digests must fit."""

import contextlib
import dataclasses
import errno
import io
import json
import os
import platform
import signal
import subprocess
import sys
import time
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from standin import ROOM, TableAlgorithm, TableConfig

from safeicrl import files
from safeicrl.cli import main
from safeicrl.errors import Damaged, UserError, printable
from safeicrl.evaluation import plots, tables
from safeicrl.evaluation.archive import load_results, save_results
from safeicrl.evaluation.results import ARRAYS, Results
from safeicrl.files import LOCK, atomic_write, check_output, owned, parse_json, read_json, sweep, write_json
from safeicrl.histories.collect import CollectConfig, collect
from safeicrl.log import JsonLines, read_metrics
from safeicrl.policies import cards, checkpoint
from safeicrl.train import EvalConfig, TrainConfig, train

ALGORITHM = TableAlgorithm(env=ROOM, config=TableConfig())
QUICK = TrainConfig(iterations=2, evaluation=EvalConfig(every=0, tasks=20, rows=20), checkpoint_minutes=9.0)

# -- one owner


def test_a_folder_has_one_owner(tmp_path):
    with owned(tmp_path):
        for work in (
            lambda: train(ALGORITHM, QUICK, out=tmp_path),
            lambda: collect(ROOM, CollectConfig(), out=tmp_path),
        ):
            with pytest.raises(UserError, match=f"in use by process {os.getpid()} on {platform.node()} since"):
                work()
    assert list(tmp_path.iterdir()) == []
    with owned(tmp_path):  # free again
        pass


HOLD = """
import sys, time
from pathlib import Path
from safeicrl.files import owned
with owned(Path(sys.argv[1])):
    print("mine", flush=True)
    time.sleep(60)
"""


def test_another_process_is_told_of_and_its_lock_does_not_outlive_it(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "mine\n"
        with pytest.raises(UserError, match=f"in use by process {process.pid} on "), owned(tmp_path):
            pass
        os.kill(process.pid, signal.SIGKILL)
    assert (tmp_path / LOCK).exists()
    with owned(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_a_lock_of_another_host_counts_until_it_is_deleted(tmp_path):
    lock = tmp_path / LOCK
    lock.write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": "noon"}))
    with pytest.raises(UserError, match=rf"process 1 on elsewhere since noon.* delete {lock}"), owned(tmp_path):
        pass
    lock.write_text("{")  # cut short by a kill: nobody's
    with owned(tmp_path):
        pass


def test_without_locks_the_note_in_the_file_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_try_lock", lambda handle: None)
    with owned(tmp_path), pytest.raises(UserError, match="in use by process"), owned(tmp_path):
        pass
    dead = {"pid": 2**22 + 1, "host": platform.node(), "since": "noon"}  # above the kernel's largest
    (tmp_path / LOCK).write_text(json.dumps(dead))
    with owned(tmp_path):
        pass


# -- what killed processes leave


def left(folder, process, host=files.HOST):
    path = folder / f".checkpoint.safetensors.{host}.{process}.0.tmp"
    path.write_bytes(b"half")
    return path


def test_temporary_files_of_dead_processes_are_removed(tmp_path):
    dead, alive = left(tmp_path, 2**22 + 1), left(tmp_path, os.getppid())
    mine, elsewhere, old = left(tmp_path, os.getpid()), left(tmp_path, 1, "far"), left(tmp_path, 2, "far")
    os.utime(old, (time.time() - 9999,) * 2)
    notes = tmp_path / ".notes.tmp"
    notes.write_text("a user's")
    with files.temporary(tmp_path / "x") as used:
        used.write_bytes(b"")
        sweep(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {path.name for path in (alive, elsewhere, notes, used)}
    assert not any(path.exists() for path in (dead, mine, old))


@pytest.mark.parametrize("start", [files.make_folder, lambda folder: check_output(folder / "r")])
def test_they_are_removed_at_the_next_start(tmp_path, start):
    path = left(tmp_path, 2**22 + 1)
    start(tmp_path)
    assert not path.exists()


def test_the_folder_is_flushed_after_the_rename(tmp_path, monkeypatch):
    """Otherwise a power cut may bring the old file back, or leave none."""
    done = []
    replace, fsync = os.replace, os.fsync
    where = lambda handle: os.path.realpath(f"/proc/self/fd/{handle}")  # noqa: E731
    monkeypatch.setattr("os.replace", lambda a, b: (done.append(f"rename {b.name}"), replace(a, b)))
    monkeypatch.setattr("os.fsync", lambda handle: (done.append(where(handle)), fsync(handle)))
    atomic_write(tmp_path / "a", [b"x"])
    assert done[1:] == ["rename a", os.path.realpath(tmp_path)]
    done.clear()
    cards.save_policy(tmp_path / "p.safetensors", {"x": jnp.zeros(1)}, {"kind": "net", "env": {}})
    assert done[-3:] == ["rename p.safetensors", "rename p.json", os.path.realpath(tmp_path)]


# -- refused before the work


def test_what_cannot_be_written_is_refused_at_the_start(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("safeicrl.evaluation.evaluate.run_trials", None)  # any work would be an error
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.json").mkdir()
    for out in (tmp_path / "file" / "r", tmp_path / ("n" * 300), tmp_path / "folder"):
        assert main(["evaluate", "--agent", "random", "--out", str(out)]) == 2
        assert "cannot" in (said := capsys.readouterr().err) or "is a folder" in said
        assert len(said.splitlines()) == 1
    for command in ("collect", "train", "export"):
        what = ["safe-dark-room"] if command == "export" else []
        assert main([command, *what, "--out", str(tmp_path / "file" / "r")]) == 2
        assert "cannot" in capsys.readouterr().err


def test_the_table_is_printed_although_its_file_cannot_be_written(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise UserError("cannot write r.npz: the disk is full")

    monkeypatch.setattr("safeicrl.evaluation.archive.save_results", full)
    room = ["--env-args", "size=3", "obstacles=2", "max_steps=5", "episodes=4"]
    assert main(["evaluate", "--agent", "random", *room, "--tasks", "20", "--out", str(tmp_path / "r")]) == 2
    said = capsys.readouterr()
    assert "total return of 4" in said.out
    assert said.err == "safeicrl: cannot write r.npz: the disk is full\n"


# -- the log


def line(iteration, **values):
    return {"iteration": iteration, "env_steps": 10 * iteration, "seconds": 1.0, **values}


def test_damaged_lines_are_left_out_and_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    texts = [json.dumps(line(i)) for i in range(1, 6)]
    path.write_text("\n".join(texts) + "\n" + '{"iteration": 99')  # the rest of a killed process's last line
    assert [found["iteration"] for found in read_metrics(path)] == [1, 2, 3, 4, 5]
    for damaged in ('{"iteration": 3', "[3]", '{"iteration": "3"}', "\x00" * 30, "[" * 10**5, '{"a": true}'):
        path.write_text("\n".join([*texts[:2], damaged, *texts[3:]]) + "\n")
        with pytest.warns(Damaged, match=r"metrics.jsonl is damaged: left out line 3$"):
            assert [found["iteration"] for found in read_metrics(path)] == [1, 2, 4, 5]
    path.write_bytes(b"\xff\n\xfe\n" + texts[0].encode() + b"\n")
    with pytest.warns(Damaged, match="left out 2 lines, the first is 1"):
        assert len(read_metrics(path)) == 1
    path.write_text("hello\n")
    with pytest.raises(UserError, match="is no metrics file"):
        read_metrics(path)


@pytest.mark.parametrize(("evaluated", "last"), [(4, ["4 eval"]), (2, [])])
def test_a_resumed_log_keeps_what_its_checkpoint_knows(tmp_path, evaluated, last):
    path = tmp_path / "metrics.jsonl"
    lines = [line(1), line(2), line(2, **{"eval/cost": 1}), line(3), line(4), line(4, **{"eval/cost": 1}), line(5)]
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    JsonLines(path, keep_until=4, evaluated=evaluated).close()
    found = [f"{x['iteration']} eval" if "eval/cost" in x else x["iteration"] for x in read_metrics(path)]
    assert found == [1, 2, "2 eval", 3, 4, *last]


class Unwell:
    """A log file on a disk that takes a few bytes at a time, then none."""

    def __init__(self, limit):
        self.data, self.limit = b"", limit

    def write(self, data):
        if len(self.data) >= self.limit:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.data += data[:5]
        return len(data[:5])

    def close(self):
        pass


def test_a_log_survives_short_writes_and_a_full_disk_is_one_line(tmp_path):
    log = JsonLines(tmp_path / "metrics.jsonl")
    log.file.close()
    log.file = Unwell(10**6)
    log.write(0, line(1))
    assert json.loads(log.file.data) == line(1)
    log.file = Unwell(20)
    with pytest.raises(UserError, match=r"cannot write .*metrics.jsonl: No space left on device"):
        log.write(0, line(2))


def test_the_log_is_on_the_disk_before_the_checkpoint_that_counts_on_it(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(JsonLines, "sync", lambda self: order.append("log"))
    monkeypatch.setattr("safeicrl.policies.checkpoint.save", lambda *a, **k: order.append("checkpoint"))
    train(ALGORITHM, QUICK, out=tmp_path)
    assert order == ["log", "checkpoint"] * 2  # before the last evaluation, and after it


# -- runs that end


def test_a_finished_run_can_be_resumed_without_a_trace(tmp_path):
    train(ALGORITHM, QUICK, out=tmp_path)
    stored = lambda: checkpoint.read(tmp_path / "checkpoint.safetensors", kind="checkpoint")[0]  # noqa: E731
    log, saved = (tmp_path / "metrics.jsonl").read_bytes(), stored()
    again = train(ALGORITHM, QUICK, out=tmp_path, resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == log
    assert saved.keys() == stored().keys()
    for name, array in stored().items():
        np.testing.assert_array_equal(array, saved[name])
    assert again.results == []


def test_a_run_killed_in_its_last_evaluation_has_lost_nothing(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("safeicrl.training.best.log_evaluation", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(ALGORITHM, QUICK, out=tmp_path)
    ended = train(ALGORITHM, QUICK, out=tmp_path, resume=True)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [("eval/cost" in x, x["iteration"]) for x in lines] == [(False, 1), (False, 2), (True, 2)]
    assert ended.status.best[0]["iteration"] == 2


def test_a_stop_by_signal_has_its_own_exit_status(tmp_path, capsys, monkeypatch):
    from safeicrl.recipes import run

    def stopped(*_, stop, **__):
        stop.number = signal.SIGTERM
        return run.Ran(folder=tmp_path, finished=False, policies=[], iterations=0)

    monkeypatch.setattr(run, "run_recipe", stopped)
    assert main(["train", "--out", str(tmp_path)]) == 143
    assert "go on:  safeicrl train --resume" in capsys.readouterr().out


# -- what files say


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 10**5, "nested too deeply"),
        ('{"a": 9223372036854775808}', "9223372036854775808 has more than 64 bits"),
        ('{"a": ' + "9" * 5000 + "}", "has more than 64 bits"),
        ("[1e999]", "1e999 is not finite"),
        ("[NaN]", "NaN is not finite"),
        ('{"a": 1', "Expecting"),
    ],
)
def test_json_that_is_refused(tmp_path, text, words):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match=words) as error:
        read_json(tmp_path / "a.json", "policy card")
    assert len(str(error.value)) < len(str(tmp_path)) + 120
    assert parse_json("[9223372036854775807, -1.5]") == [2**63 - 1, -1.5]


def test_a_name_that_is_no_text_can_be_written_and_read(tmp_path):
    name = os.fsdecode(b"caf\xe9")
    write_json(tmp_path / "a.json", {"from": name})
    assert read_json(tmp_path / "a.json", "card") == {"from": name}


def test_control_characters_are_escaped(capsys):
    assert printable("a\x1b[2Jb\nδ\x7f") == "a\\x1b[2Jb\\nδ\\x7f"
    assert main(["evaluate", "\x1b[2J"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_an_array_that_asks_for_more_than_its_file_has(tmp_path):
    """A header that says 2**40 numbers would take the memory before anything is read."""
    ones = np.ones((2, 3))
    values = Results(returns=ones, costs=ones, lengths=ones, budgets=np.ones(2), meta={})
    arrays, card = save_results(values, tmp_path / "r")
    card.write_text('{"meta": {}}')  # as older versions wrote it, without a digest of the arrays
    forged = io.BytesIO()
    header = {"descr": "<f8", "fortran_order": False, "shape": (2**20, 2**20)}
    np.lib.format.write_array_header_1_0(forged, header)
    with zipfile.ZipFile(arrays, "w") as archive:
        for name in ARRAYS:
            archive.writestr(f"{name}.npy", forged.getvalue())
    with pytest.raises(UserError, match="but its file has 128 bytes"):
        load_results(tmp_path / "r")


@pytest.mark.parametrize("label", ["$x_{", "[/]", "[red]x", "\x1b[2J", "n" * 300])
def test_labels_are_shown_as_they_are(label):
    rows = np.arange(6.0).reshape(2, 3)
    found = Results(returns=rows, costs=rows, lengths=rows + 1, budgets=np.ones(2), meta={"label": label})
    upper = dataclasses.replace(found, returns=rows + 1)
    shown = io.StringIO()
    for table in (tables.summary_table([found]), tables.relative_table([found], upper=upper, lower=found)):
        Console(file=shown, width=999).print(table)
    assert shown.getvalue().count(printable(label)) >= 3
    assert "\x1b" not in shown.getvalue()
    figure = plots.by_episode({found.label: [found]})
    figure.canvas.draw()
    assert printable(label) in [text.get_text() for text in figure.axes[0].texts]


# -- cards


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy") / "p.safetensors"
    card = {"kind": "net", "env": {"name": "room"}, "temperature": 0.5, "limits": ["few"], "net": {"width": 8}}
    cards.save_policy(path, {"x": jnp.arange(3.0)}, card)
    return path


def test_a_flipped_bit_anywhere_in_a_card_is_noticed(policy, tmp_path):
    card, copy = policy.with_suffix(".json").read_bytes(), tmp_path / "p.safetensors"
    copy.write_bytes(policy.read_bytes())
    copy.with_suffix(".json").write_bytes(card)
    good = cards.read_card(copy)
    assert "digests" not in good
    unnoticed = []
    for position in range(len(card)):
        flipped = bytearray(card)
        flipped[position] ^= 1 << position % 8
        copy.with_suffix(".json").write_bytes(flipped)
        with contextlib.suppress(UserError):
            if cards.read_card(copy) != good:
                unnoticed.append(position)
    assert unnoticed == []


def test_a_card_beside_other_weights_is_noticed(policy, tmp_path):
    cards.save_policy(tmp_path / "p.safetensors", {"x": jnp.zeros(3)}, cards.read_card(policy))
    cards.read_card(tmp_path / "p.safetensors")
    (tmp_path / "p.safetensors").write_bytes(policy.read_bytes())
    with pytest.raises(UserError, match=r"p.json is the card of another policy than the one in p.safetensors"):
        cards.read_card(tmp_path / "p.safetensors")
