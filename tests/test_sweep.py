"""Sweeps: what a grid becomes, what is skipped and retried, what is said about failures, what compare reads."""

import dataclasses
import functools
import io
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import obstinate
import pytest
from rich.console import Console
from test_compare import results
from test_train import arrays, timeless

from safeicrl import plugins
from safeicrl.cli import main
from safeicrl.errors import Incomplete, UserError
from safeicrl.evaluation.archive import save_results
from safeicrl.evaluation.sweeps import read_sweep
from safeicrl.evaluation.tables import run_results
from safeicrl.files import LOCK, disown
from safeicrl.recipes import sweep as sweeping
from safeicrl.recipes.board import Board, latest
from safeicrl.recipes.grid import Plan, make_plan, option, parse_grid
from safeicrl.recipes.sweep import Resources, run_sweep
from safeicrl.show.report.content import find
from safeicrl.show.report.sweep import sweep_panels

TESTS = Path(__file__).parent


# -- the grid


def recipe(words: list[str], name: str = "mine") -> Any:
    """Stands in for a recipe: what a plan asks of it, with the seeds of the command line."""
    given = dict(word.removeprefix("--").split("=") for word in words if "=" in word)
    train = SimpleNamespace(seed=int(given.get("seed", 0)), seeds=int(given.get("seeds", 1)), iterations=None)
    algo = SimpleNamespace(iterations=int(given.get("algo.iterations", 5)))
    stage = SimpleNamespace(experiment=SimpleNamespace(train=train, algo=algo))
    return SimpleNamespace(name=name, stages=[stage, stage])


def plan(*texts: str, settings: tuple[str, ...] = (), evaluate: int | None = None) -> Plan:
    return make_plan(texts, settings, evaluate=evaluate, resolve=recipe)


def test_a_grid_is_every_combination_named_after_what_differs():
    made = plan("algo.penalty.step=0.01,0.02", "env.size=5,7", settings=("--preset", "x"))
    assert [run.name for run in made.runs] == [
        "step=0.01,size=5", "step=0.01,size=7", "step=0.02,size=5", "step=0.02,size=7",
    ]  # fmt: skip
    assert made.runs[1].words == ("--preset", "x", "--algo.penalty.step=0.01", "--env.size=7")
    assert made.runs[1].iterations == 10  # two stages of five
    assert made.runs[1].command(Path("s")).startswith("safeicrl train --preset x --algo.penalty.step=0.01")


def test_names_are_as_long_as_they_must_be():
    (run,) = plan("algo.ppo.rate=1 2", "algo.ddpg.rate=3", "algo.histories=a/b c", "rate=-1").runs
    assert run.name == "ppo.rate=1-2,ddpg.rate=3,histories=a-b-c,rate=-1"
    with pytest.raises(UserError, match="longer than 200"):
        plan(f"start={'x' * 300}")
    with pytest.raises(UserError, match="would have the folder start=a-b"):
        plan("start=a/b,a:b")


def test_runs_that_differ_in_their_seed_only_share_a_label():
    made = plan("seed=0,2", "env.size=5,7", settings=("--seeds=2",))
    assert [(run.name, run.label) for run in made.runs][:3] == [
        ("seed=0,size=5", "size=5"), ("seed=0,size=7", "size=7"), ("seed=2,size=5", "size=5"),
    ]  # fmt: skip
    assert {run.label for run in plan("seed=0,1").runs} == {"mine"}
    with pytest.raises(UserError, match="seed=0 and seed=1 would both train seed 1"):
        plan("seed=0,1", settings=("--seeds=2",))


def test_values_become_words_of_the_command_line():
    assert option("algo.net.width", "8") == ("--algo.net.width=8",)
    assert option("algo.ppo.learning-rate", "1e-3 1e-4") == ("--algo.ppo.learning-rate", "1e-3", "1e-4")
    assert option("algo.ddpg.privileged-critic", "False") == ("--algo.ddpg.no-privileged-critic",)
    assert option("tensorboard", "true") == ("--tensorboard",)
    assert parse_grid(["--algo.net.width=8, 16"]) == {"algo.net.width": ("8", "16")}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("", "a sweep needs --grid SETTING=VALUE,VALUE"),
        ("--grid algo.rows", "--grid takes SETTING=VALUE,VALUE, got 'algo.rows'"),
        ("--grid =1,2", "--grid takes SETTING=VALUE"),
        ("--grid algo.rows=", "--grid algo.rows has an empty value"),
        ("--grid algo.rows=1,,2", "--grid algo.rows has an empty value"),
        ("--grid algo.rows=1,1", "--grid algo.rows has the same value twice"),
        ("--grid algo.rows=1,2 --grid algo.rows=3", "--grid algo.rows is given twice"),
        ("--grid evaluation.max_a=1 --grid evaluation.max-a=3", "--grid evaluation.max-a is given twice"),
        ("--grid out=a,b", "a sweep chooses the folders of its runs"),
        ("--grid algo.rows=8 --resume runs/x", "a sweep resumes its runs by itself"),
        ("--grid seed=0,1 --distributed", "a run of a sweep is one process: leave out distributed"),
        ("--grid processes=1,2", "a run of a sweep is one process: leave out processes"),
        ("--grid algo.rowz=1,2", "--grid algo.rowz=1: unknown option --algo.rowz; did you mean --algo.rows"),
        ("--grid algo.rows=1,x", "--grid algo.rows=x: --algo.rows takes a whole number, got 'x'"),
        ("--grid preset=darkroom-smal", "unknown preset 'darkroom-smal'"),
        ("--grid seed=0,1 --seeds 2", "seed=0 and seed=1 would both train seed 1"),
        ("--grid seed=0,1 --retries -1", "retries must be an integer ≥ 0"),
        ("--grid seed=0,1 --gpus 1.5", "gpus must be a whole number, or a part of one GPU"),
        ("--grid seed=0,1 --evaluate 0", "--evaluate must be an integer ≥ 1"),
        ("--grid seed=0,1 --no-ray --ray-address auto", "leave out --ray-address"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(args, words, capsys, tmp_path):
    out = tmp_path / "sweep"
    assert main(["sweep", *args.split(), "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.search(re.escape(words).replace("'", "['\"]"), said), said
    assert not out.exists()


def test_a_dry_run_lists_the_runs_and_does_nothing(capsys, tmp_path):
    out = tmp_path / "sweep"
    words = "--algo scared --grid env=safe-dark-room --grid algo.rows=8,16 --seeds 2 --dry-run"
    assert main(["sweep", *words.split(" "), "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"env=safe-dark-room,rows={rows}:  safeicrl train --algo scared --seeds 2 --env=safe-dark-room "
        f"--algo.rows={rows} --out {out}/env=safe-dark-room,rows={rows}"
        for rows in (8, 16)
    ]
    assert not out.exists()


# -- running, with a command that only pretends


class Pretend:
    """A command line whose exit codes are known: by the run's name, the last one again and again."""

    def __init__(self, **codes: list[Any]) -> None:
        self.codes, self.called = codes, []

    def __call__(self, words: list[str]) -> int:
        self.called.append(words)
        folder = Path(words[-1] if words[0] == "train" else words[1])
        assert sys.argv == ["safeicrl", *words]
        codes = self.codes.get(re.split("[=,]", folder.name)[1], [0])
        code = codes.pop(0) if len(codes) > 1 else codes[0]
        if isinstance(code, Exception):
            raise code
        if code == 2:
            print("safeicrl: the rate is too large", file=sys.stderr)
        (folder / "checkpoint.safetensors").write_bytes(b"")
        return code


def pretend(made: Plan, out: Path, command: Pretend) -> tuple[int, str]:
    """The exit code of a sweep, and what it says."""
    console = Console(file=io.StringIO(), width=200)
    code = run_sweep(made, out=out, resources=Resources(ray=False), command=command, console=console)
    return code, console.file.getvalue()


def states(out: Path) -> dict[str, str]:
    return {run.name: run.status for run in read_sweep(out)["runs"]}


def test_a_failed_run_is_named_and_the_others_go_on_and_finished_ones_are_skipped(tmp_path):
    made, out = plan("lr=a,b,c,d", settings=("--x",)), tmp_path / "s"
    command = Pretend(b=[2, 0], c=[ValueError("a bug"), 0])
    code, said = pretend(made, out, command)
    assert code == 1
    assert states(out) == {"lr=a": "finished", "lr=b": "failed", "lr=c": "failed", "lr=d": "finished"}
    assert f"failed: lr=b: the rate is too large (see {out}/lr=b/log.txt)" in said
    assert f"failed: lr=c: ValueError: a bug (see {out}/lr=c/log.txt)" in said
    assert "Traceback" in (out / "lr=c" / "log.txt").read_text()
    assert f"safeicrl compare {out}" in said

    again = Pretend()
    assert pretend(made, out, again)[0] == 0
    assert set(states(out).values()) == {"finished"}
    # b has a checkpoint, c has none
    assert again.called == [
        ["train", "--resume", f"{out}/lr=b"],
        ["train", "--x", "--lr=c", "--out", f"{out}/lr=c"],
    ]

    (out / "lr=a" / "checkpoint.safetensors").unlink()  # somebody has cleaned up
    last = Pretend()
    assert pretend(made, out, last)[0] == 0
    assert [words[-1] for words in last.called] == [f"{out}/lr=a"]


def test_an_interrupted_sweep_stops_and_goes_on_where_it_was(tmp_path):
    made, out = plan("lr=a,b,c", settings=("--x", "--devices", "2")), tmp_path / "s"
    code, _ = pretend(made, out, Pretend(b=[130]))
    assert code == 130
    assert states(out) == {"lr=a": "finished", "lr=b": "stopped", "lr=c": "waiting"}
    rest = Pretend()
    assert pretend(made, out, rest)[0] == 0
    first, second = rest.called
    assert first == ["train", "--devices", "2", "--resume", f"{out}/lr=b"]
    assert second == ["train", "--x", "--devices", "2", "--lr=c", "--out", f"{out}/lr=c"]


def test_trained_runs_are_evaluated_if_asked_for(tmp_path):
    made, out = plan("lr=a", "seed=0", evaluate=9), tmp_path / "s"
    command = Pretend()
    assert pretend(made, out, command)[0] == 0
    run = f"{out}/lr=a,seed=0"
    assert command.called[1] == ["evaluate", run, "--tasks", "9", "--label", "lr=a", "--out", f"{run}/evaluation"]


def test_a_grid_may_grow_and_another_sweep_is_refused(tmp_path):
    out = tmp_path / "s"
    pretend(plan("lr=a", settings=("--x",)), out, Pretend())
    command = Pretend()
    assert pretend(plan("lr=b,a", settings=("--x",)), out, command)[0] == 0
    assert len(command.called) == 1
    index = read_sweep(out)
    assert [run.name for run in index["runs"]] == ["lr=a", "lr=b"]
    assert index["grid"] == {"lr": ["a", "b"]}
    assert {"safeicrl", "jax", "python", "command", "date"} <= set(index)
    others = (plan("lr=a"), plan("lr=a", settings=("--x",), evaluate=3), plan("lr=a", "k=1", settings=("--x",)))
    for other in others:
        with pytest.raises(UserError, match=r"holds another sweep \(.*\): choose another --out"):
            pretend(other, out, Pretend())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"has files but no sweep.json"):
        pretend(plan("lr=a"), tmp_path / "full", Pretend())


def test_without_ray_the_runs_follow_one_another(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweeping.importlib.util, "find_spec", lambda name: None)
    console = Console(file=io.StringIO())
    code = run_sweep(
        plan("lr=a,b"), out=tmp_path / "s", resources=Resources(), command=Pretend(), console=console
    )  # fmt: skip
    assert code == 0
    assert "pip install 'safeicrl[ray]'" in capsys.readouterr().out
    with pytest.raises(UserError, match="--ray-address needs Ray: pip install"):
        run_sweep(plan("lr=a"), out=tmp_path / "t", resources=Resources(address="auto"), command=Pretend())


def test_a_lock_of_a_lost_machine_is_removed_and_one_of_this_machine_stays(tmp_path):
    note = {"pid": 1, "host": "elsewhere", "since": "today"}
    (tmp_path / LOCK).write_text(json.dumps(note))
    disown(tmp_path)
    assert not (tmp_path / LOCK).exists()
    (tmp_path / LOCK).write_text(json.dumps({**note, "host": sweeping.platform.node()}))
    disown(tmp_path)
    assert (tmp_path / LOCK).exists()


# -- what is shown


def test_the_table_has_the_newest_numbers_of_all_stages(tmp_path):
    out = tmp_path / "s"
    pretend(plan("lr=a,b"), out, Pretend())
    runs = [dataclasses.replace(run, status="waiting") for run in read_sweep(out)["runs"]]
    lines = [
        {"iteration": 7, "seconds": 60.0, "return": 0.25, "over_budget": 0.5},
        {"iteration": 7, "eval/total_return": 3},
    ]
    for stage, name in ((lines, "1-walk"), (lines[:1], "2-run"), (lines[:1], "10-last")):
        (out / "lr=a" / name).mkdir()
        text = "".join(json.dumps(line) + "\n" for line in stage)
        (out / "lr=a" / name / "metrics.jsonl").write_text(f'{text}{{"iteration": 9, "ret')  # cut by a kill
    (out / "lr=a" / LOCK).touch()
    assert latest(out / "lr=a")["iteration"] == 21
    console = Console(file=io.StringIO(), width=120)
    console.print(Board(runs, {"lr=a": 30, "lr=b": None}, console).table())
    said = " ".join(console.file.getvalue().split())
    assert "1 running, 1 waiting" in said
    assert "lr=a running 21 of 30 03:00 0.250 50.0% 3.00" in said
    assert "lr=b waiting – – – – –" in said


def test_compare_and_plot_read_a_sweeps_folder(tmp_path, capsys):
    out = tmp_path / "s"
    pretend(plan("lr=a,b,c", "seed=0,1"), out, Pretend())
    for name, mean in (("lr=a,seed=0", 1.0), ("lr=a,seed=1", 2.0), ("lr=b,seed=0", 3.0)):
        save_results(results(mean), out / name / "best-seed0-evaluation")
    save_results(results(9.0), out / "lr=b,seed=0" / "evaluation")
    with pytest.warns(Incomplete, match="lr=b,seed=1, lr=c,seed=0, lr=c,seed=1"):
        found = run_results(out)
    assert [(each.label, each.returns.mean()) for each in found] == [
        ("lr=a", pytest.approx(1.0)), ("lr=a", pytest.approx(2.0)), ("lr=b", pytest.approx(9.0)),
    ]  # fmt: skip
    assert main(["compare", str(out)]) == 0
    said = capsys.readouterr()
    assert said.err.startswith("safeicrl: left out")
    assert re.search(r"lr=a +2 ", said.out)
    assert main(["plot", str(out), "--out", str(tmp_path)]) == 2
    assert "no training log at" in capsys.readouterr().err


def test_the_report_of_a_sweep_has_its_runs_and_says_what_is_missing(tmp_path, capsys):
    out = tmp_path / "s"
    pretend(plan("lr=a,b", "seed=0,1"), out, Pretend(b=[2]))
    for seed in (0, 1):
        save_results(results(1.0 + seed), out / f"lr=a,seed={seed}" / "evaluation")
        line = {"iteration": 1, "env_steps": 10, "seconds": 1.0, "return": 0.5, "cost": 1, "budget": 2}
        (out / f"lr=a,seed={seed}" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert main(["reproduce", "episodes", "--results", str(out), "--out", str(tmp_path / "page")]) == 0
    assert "missing, with the commands on the page: episodes-2" in capsys.readouterr().out
    page = (tmp_path / "page" / "index.html").read_text()
    assert "<td>lr=a</td><td>6</td><td>2</td><td>3 ± 1</td>" in page  # totals of two episodes: 2 and 4
    assert "Missing: lr=b." in page
    assert f"safeicrl reproduce episodes --results {out}" in page
    parts = {part.name: part for panel in sweep_panels(out) for part in panel.parts}
    assert [need.label for need in find(parts["training-1"], out).missing] == ["lr=b,seed=0", "lr=b,seed=1"]
    assert len(parts["training-1"].show(find(parts["training-1"], out))) == 1
    (table,) = parts["runs-1"].show(find(parts["runs-1"], out))
    assert table.rows[3][:2] == ["lr=b,seed=1", "failed"]
    assert table.rows[3][4] == "the rate is too large"
    assert main(["reproduce", "guard", "--results", str(out), "--out", str(tmp_path / "page")]) == 2
    assert "unknown figure 'guard'; known: budgets, episodes, runs, training" in capsys.readouterr().err


# -- Ray


@pytest.fixture(scope="module")
def ray():
    """One Ray for all tests, started as a sweep starts it, but for one run at a time: each process imports much."""
    package = pytest.importorskip("ray", reason="no Ray here: pip install 'safeicrl[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(TESTS)  # where Ray's processes find modules
        patch.setattr(package, "init", functools.partial(package.init, num_cpus=1))
        with sweeping._connected(package, None):
            yield package


def with_ray(made: Plan, out: Path, **resources: Any) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=200)
    code = run_sweep(
        made, out=out, resources=Resources(**resources), command=obstinate.command, console=console
    )  # fmt: skip
    return code, console.file.getvalue()


@pytest.mark.usefixtures("ray")
def test_a_run_whose_process_dies_is_tried_again_and_named_in_the_end(tmp_path):
    code, said = with_ray(plan("what=dies,moves,works"), tmp_path / "s", retries=1)
    assert code == 1
    assert states(tmp_path / "s") == {"what=dies": "failed", "what=moves": "finished", "what=works": "finished"}
    assert {what: obstinate.attempts(tmp_path / "s" / f"what={what}") for what in ("dies", "moves", "works")} == {
        "dies": 2, "moves": 2, "works": 1,
    }  # fmt: skip
    assert "failed: what=dies: its process died, and in 1 retries again" in said


@pytest.mark.usefixtures("ray")
def test_ctrl_c_stops_every_run_and_those_that_wait(tmp_path):
    def interrupt() -> None:
        end = time.monotonic() + 60
        while not obstinate.attempts(tmp_path / "s" / "what=waits") and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    # A shell's background job ignores SIGINT, and an ignored signal stays ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        code, _ = with_ray(plan("what=waits,works"), tmp_path / "s")
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 130
    assert states(tmp_path / "s") == {"what=waits": "stopped", "what=works": "stopped"}
    assert obstinate.attempts(tmp_path / "s" / "what=waits") == 1
    assert obstinate.attempts(tmp_path / "s" / "what=works") == 0


@pytest.mark.usefixtures("ray")
def test_what_this_machine_does_not_have_is_refused(tmp_path):
    with pytest.raises(UserError, match="a run asks for 2 CPUs, this machine has 1"):
        with_ray(plan("what=works,dies"), tmp_path / "s", cpus=2.0)


@pytest.mark.usefixtures("ray")
def test_a_killed_run_is_retried_and_resumes_from_its_checkpoint(tmp_path, monkeypatch):
    """One of two runs dies in its first evaluation; in the end it is the same as its twin, which did not."""
    monkeypatch.chdir(TESTS)  # for --import, here and in Ray's processes
    monkeypatch.setattr(plugins, "imported", [])
    fate, out = tmp_path / "fate", tmp_path / "s"
    fate.touch()
    room = "--env.size 3 --env.obstacles 2 --env.max-steps 5 --env.episodes 4 --env.train-budget 1 3"
    judged = "--evaluation.every 2 --evaluation.tasks 6 --evaluation.rows 6 --evaluation.segments 1"
    how = f"--algo mortal {room} --env.test-budget 1 3 --iterations 4 --checkpoint-minutes 0 {judged}"
    words = how.split(" ")
    grid = ["--grid", "seed=1", "--grid", "algo.bad-from=500,1000"]
    args = [*words, "--algo.fate", str(fate), *grid, "--import", "mortal", "--out", str(out)]
    assert main(["sweep", *args]) == 0
    assert not fate.exists()
    assert set(states(out).values()) == {"finished"}
    logs = {run.name: (run.folder / "log.txt").read_text() for run in read_sweep(out)["runs"]}
    compiled = {name: log.count("compiling") for name, log in logs.items()}
    (killed,) = (name for name, count in compiled.items() if count == 2)
    assert sorted(compiled.values()) == [1, 2]

    # bad-from changes nothing before its iteration, so the other run is the same but for that
    (twin,) = compiled.keys() - {killed}
    first, second = (
        {k: v for k, v in arrays(out / name).items() if "bad_from" not in k} for name in (killed, twin)
    )
    assert {name: each.tobytes() for name, each in first.items()} == {k: v.tobytes() for k, v in second.items()}
    assert len(first) > 3
    assert timeless(out / killed) == timeless(out / twin)
    assert timeless(out / killed)[-1]["iteration"] == 4
    assert {result.label for result in run_results(out)} == {"bad-from=500", "bad-from=1000"}
    assert len(run_results(out)) == 2
