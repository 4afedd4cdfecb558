"""Disks that fail under train, collect, evaluate and export: a kill at every single file operation.

After a kill nothing more reaches the disk, not even what cleans up. At every fourth operation, the disk is also
full or a write is cut short. The same command must then end as if nothing had happened. What is on the disk is at
all times whole, old or new, or refused in one line. No program is compiled: the numbers are made up.
"""

import contextlib
import dataclasses
import errno
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from standin import ROOM, TableAgent, TableAlgorithm, TableConfig

from safeicrl import files
from safeicrl.cli import main
from safeicrl.errors import UserError
from safeicrl.evaluation.archive import load_results
from safeicrl.evaluation.results import Results
from safeicrl.histories import collect as collector
from safeicrl.histories.store import ARRAYS, open_histories
from safeicrl.log import read_metrics
from safeicrl.optimisers.lagrangian import PPOLagConfig
from safeicrl.policies import catalogue, checkpoint
from safeicrl.policies.cards import read_card, save_policy
from safeicrl.train import EvalConfig, TrainConfig, train
from safeicrl.training import best, start, steps

EVERY_EIGHTH = {0: ("full",), 4: ("short",)}
QUIET = Console(file=io.StringIO())


class Killed(BaseException):
    """What a kill looks like from inside."""


class Disk:
    """Counts file operations; the one with number `at` fails in a `way`, and after a kill all others fail too."""

    def __init__(self, at: int = -1, way: str = "full") -> None:
        self.at, self.way, self.count, self.dead = at, way, 0, False

    def strikes(self) -> bool:
        """Count an operation; true if it is the one that is to fail."""
        if self.dead:
            raise Killed
        self.count += 1
        if self.count - 1 != self.at:
            return False
        if self.way == "kill":
            self.dead = True
        return True

    def fail(self) -> None:
        """What happens then."""
        if self.dead:
            raise Killed
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def wrapped(self, act, *, cleanup: bool = False):
        """A function of `os` that can fail; what cleans up is not counted, but a killed process does not do it."""

        def wrapper(*args, **kwargs):
            if cleanup and self.dead:
                raise Killed
            if not cleanup and self.strikes():
                self.fail()
            return act(*args, **kwargs)

        return wrapper

    def open(self, file, mode="r", *args, **kwargs):
        """`open` whose files can fail when they are written."""
        opened = open(file, mode, *args, **kwargs)  # noqa: SIM115
        return opened if set(mode) <= set("rbt") else File(opened, self)


class File:
    """An open file on a `Disk`."""

    def __init__(self, file, disk: Disk) -> None:
        self.file, self.disk = file, disk

    def write(self, data) -> int:
        data = bytes(data)
        if self.disk.strikes():
            self.file.write(data[: len(data) // 2])
            self.file.flush()
            if self.disk.way != "short" or not isinstance(self.file, io.RawIOBase):
                self.disk.fail()
            return len(data) // 2  # a short write without an error
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()


@contextlib.contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, disk: Disk) -> Iterator[None]:
    """Everything that the library writes goes through `disk`."""
    with monkeypatch.context() as patch:
        for module in ("files", "log", "histories.store"):
            patch.setattr(f"safeicrl.{module}.open", disk.open, raising=False)
        for name in ("replace", "fsync", "truncate", "mkdir"):
            patch.setattr(os, name, disk.wrapped(getattr(os, name)))
        for name in ("unlink", "rmdir"):
            patch.setattr(os, name, disk.wrapped(getattr(os, name), cleanup=True))
        with contextlib.suppress(Killed, UserError):
            yield
    files._in_use.clear()  # what a killed process used is nobody's


def at_every_operation(monkeypatch, folder: Path, work, judge, prepare=lambda here: None) -> None:
    """Run `work(folder)` with every fault and `judge(folder)` what is there; then the same without a fault."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # is counted, but takes no time
    counted = Disk()
    prepare(folder / "whole")
    with failing(monkeypatch, counted):
        work(folder / "whole")
    whole = judge(folder / "whole", ended=True)
    assert counted.count > 3
    for operation in range(counted.count):
        for way in ("kill", *EVERY_EIGHTH.get(operation % 8, ())):
            here = folder / f"{way}-{operation}"
            disk = Disk(operation, way)
            prepare(here)
            with failing(monkeypatch, disk):
                work(here)
            assert disk.count > operation, "the fault was never met"
            judge(here, ended=False)
            work(here)
            assert judge(here, ended=True) == whole, f"{way} at operation {operation}"
            assert not list(here.rglob("*.tmp"))
            shutil.rmtree(here)


RESULTS = Results(
    returns=np.ones((4, 3)), costs=np.ones((4, 3)), lengths=np.ones((4, 3)), budgets=np.full(4, 2.0),
    meta={"label": "x", "actions": "any", "context": "kept", "seconds": 1.0},
)  # fmt: skip


# -- train


def made_up(*_):
    """A program that counts, and moves the table by one."""

    def step(state):
        names = ("return", "cost", "budget", "over_budget", "lambda", "env_steps", "rolled_back")
        values = {name: np.zeros((1, 1)) for name in names} | {"fault": np.full((1, 1, 5), -1.0)}
        return dataclasses.replace(state, step=state.step + 1, table=state.table + 1), values

    return step


def test_train(tmp_path, monkeypatch):
    algorithm = TableAlgorithm(env=ROOM, config=TableConfig())
    first = algorithm.init(jax.random.key(0))
    monkeypatch.setattr(steps, "_compile", made_up)
    monkeypatch.setattr(start, "first_state", lambda *_: first)
    monkeypatch.setattr(eqx, "filter_eval_shape", lambda *_: first)
    monkeypatch.setattr(eqx, "filter_jit", lambda function: function)
    about = dict.fromkeys(("command", "device", "safeicrl", "jax", "date"))
    for module in (start, best):
        monkeypatch.setattr(module, "surroundings", lambda: about)

    def better(*_, meta, **__):
        return dataclasses.replace(RESULTS, returns=RESULTS.returns * meta["iteration"], meta=meta)

    monkeypatch.setattr(best, "evaluate", better)
    settings = TrainConfig(iterations=2, checkpoint_minutes=0.0, evaluation=EvalConfig(every=2))

    def work(folder):
        begun = (folder / "checkpoint.safetensors").exists()
        train(algorithm, settings, out=folder, resume=begun, console=QUIET)

    def judge(folder, *, ended):
        lines = read_metrics(folder / "metrics.jsonl")
        if (path := folder / "checkpoint.safetensors").exists():
            checkpoint.read(path, kind="checkpoint")  # at all times whole
        if not ended:
            return None
        best = folder / "best-seed0"
        return (
            [(line["iteration"], "eval/cost" in line) for line in lines],
            checkpoint.read(path, kind="checkpoint")[0]["table"].tolist(),
            checkpoint.read(best.with_suffix(".safetensors"), kind="policy")[0]["table"].tolist(),
            read_card(best.with_suffix(".safetensors"))["training"]["iteration"],
            load_results(folder / "best-seed0-evaluation").returns.tolist(),
        )

    at_every_operation(monkeypatch, tmp_path, work, judge)


# -- collect


def numbered(self):
    """Learners that write the number of their history, and end an episode every third step."""
    side, steps = self.config.learner.envs, self.config.learner.steps * self.chunk

    def advance(state, tasks, limits):
        rows = len(limits)
        number = np.broadcast_to(state[:, None, None] % 5, (rows, side, steps)).astype(np.float32)
        done = np.zeros((rows, side, steps), np.uint8)
        done[..., 2::3] = 2
        seen = np.repeat(number[..., None], 2, -1).astype(np.uint8) % 3
        played = {"observation": seen, "action": number.astype(np.uint8), "reward": number + 0.5 * (self.late > 0)}
        self.late += 1
        return state, {**played, "cost": number, "done": done, "final": seen}

    def begin(rows, task):
        self.late = 0  # in a later call the rewards are no longer whole numbers
        return None, np.asarray(rows)

    return begin, advance, 0.0


def test_collect(tmp_path, monkeypatch):
    monkeypatch.setattr(collector.Program, "_compile", numbered)
    monkeypatch.setattr(collector, "surroundings", dict)
    monkeypatch.setattr(collector, "CHUNK", 4)  # two calls per group
    learner = PPOLagConfig(envs=2, steps=12, minibatches=1)
    config = collector.CollectConfig(tasks=2, limits=(1.0,), steps=150, group=1, learner=learner)

    def work(folder):
        collector.collect(ROOM, config, out=folder, console=QUIET)

    def judge(folder, *, ended):
        if not ended:
            with contextlib.suppress(UserError):
                open_histories(folder, partial=True, verify=True)  # what counts is whole
            return None
        found = open_histories(folder, verify=True)
        return [getattr(found, name).tolist() for name in ARRAYS]

    at_every_operation(monkeypatch, tmp_path, work, judge)


# -- evaluate, export


def test_evaluate(tmp_path, monkeypatch, capsys):
    from safeicrl.policies import contenders

    monkeypatch.setattr(contenders, "evaluate", lambda *_, **__: RESULTS)

    def work(folder):
        code = main(["evaluate", "--agent", "random", "--out", str(folder / "r")])
        said = capsys.readouterr()
        assert code in (0, 2)
        assert len(said.err.splitlines()) == (code == 2)
        if folder.exists() and "cannot make the folder" not in said.err:
            assert "total return" in said.out  # the work of minutes is not lost with its file

    def judge(folder, *, ended):
        try:
            return load_results(folder / "r").returns.tolist()
        except UserError:
            assert not ended
            return None

    at_every_operation(monkeypatch, tmp_path, work, judge)


def test_export(tmp_path, monkeypatch, capsys):
    make = lambda card, env: TableAgent(table=jnp.zeros((env.size**2, 5)), size=env.size)  # noqa: E731
    monkeypatch.setitem(catalogue.KINDS, "table", make)
    card = {"kind": "table", "env": {"name": "safe-dark-room", "parameters": {"size": 3, "obstacles": 2}}}
    for name, value in (("old", 1.0), ("new", 2.0)):
        agent = TableAgent(table=jnp.full((9, 5), value), size=3)
        save_policy(tmp_path / name / "p.safetensors", agent, {**card, "name": name})

    def work(folder):
        code = main(["export", str(tmp_path / "new" / "p"), "--out", str(folder / "p"), "--overwrite"])
        assert code in (0, 2)
        assert len(capsys.readouterr().err.splitlines()) == (code == 2)

    def judge(folder, *, ended):
        try:
            name = read_card(folder / "p.safetensors")["name"]
        except (UserError, KeyError):
            assert not ended
            return None
        value = checkpoint.read(folder / "p.safetensors", kind="policy")[0]["table"][0, 0]
        assert value == {"old": 1.0, "new": 2.0}[name]  # never the card of one with the weights of the other
        return name

    at_every_operation(monkeypatch, tmp_path, work, judge, lambda here: shutil.copytree(tmp_path / "old", here))
