"""The host loop: resuming, being killed, non-finite iterations, limits, seeds, what it leaves behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from standin import ROOM, TableAgent, TableAlgorithm, TableConfig

from safeicrl.algos.api import METRICS
from safeicrl.envs.api import replace
from safeicrl.errors import UserError
from safeicrl.evaluation.archive import load_results, results_equal
from safeicrl.evaluation.results import Results
from safeicrl.evaluation.statistics import Summary, rank
from safeicrl.log import read_metrics
from safeicrl.machine.signals import GRACE, StopRequest
from safeicrl.policies import cards, checkpoint
from safeicrl.train import EvalConfig, TrainConfig, train
from safeicrl.training import best

ALGORITHM = TableAlgorithm(env=ROOM, config=TableConfig())
EVALUATION = EvalConfig(every=0, tasks=20, rows=20)
EVERY = EvalConfig(every=1, tasks=20, rows=20)


def config(**changes):
    return TrainConfig(**{"iterations": 6, "evaluation": EVALUATION, "checkpoint_minutes": 0.0, **changes})


def arrays(folder: Path) -> dict[str, np.ndarray]:
    return checkpoint.read(folder / "checkpoint.safetensors", kind="checkpoint")[0]


def same_arrays(one: Path, other: Path) -> None:
    first, second = arrays(one), arrays(other)
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].tobytes() == second[name].tobytes(), name


def timeless(folder: Path) -> list[dict]:
    """The log without what depends on the clock."""
    clock = ("seconds", "steps_per_second", "steps_per_second/seeds")
    return [{k: v for k, v in line.items() if k not in clock} for line in read_metrics(folder / "metrics.jsonl")]


# Iteration → total return, and cost of every episode, where the budget is 2. The best is the third: the fifth
# returns more, but breaks its budget.
SCRIPT = {1: (1.0, 1.0), 2: (2.0, 1.0), 3: (3.0, 2.0), 4: (2.5, 0.0), 5: (9.0, 3.0), 6: (2.0, 1.0)}


def scripted(env, agent, *, label, meta, **_) -> Results:
    """An evaluation whose numbers are known: which policy is best hangs on no random number."""
    total, cost = SCRIPT[meta["iteration"]]
    shape = (20, env.episodes)
    return Results(
        returns=np.full(shape, total / env.episodes), costs=np.full(shape, cost), lengths=np.ones(shape),
        budgets=np.full(20, 2.0), meta={"label": label, **meta},
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run whose policy is evaluated after every iteration, by `SCRIPT`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(best, "evaluate", scripted)
        return train(ALGORITHM, config(evaluation=EVERY), out=tmp_path_factory.mktemp("whole")).folder


def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path):
    evaluation = EvalConfig(every=3, tasks=20, rows=20)
    train(ALGORITHM, config(evaluation=evaluation), out=tmp_path / "whole")
    train(ALGORITHM, config(iterations=3, evaluation=evaluation), out=tmp_path / "parts")
    assert int(arrays(tmp_path / "parts")["step"]) == 3
    train(ALGORITHM, config(evaluation=evaluation), out=tmp_path / "parts", resume=True)
    assert int(arrays(tmp_path / "parts")["step"]) == 6
    same_arrays(tmp_path / "whole", tmp_path / "parts")
    assert timeless(tmp_path / "whole") == timeless(tmp_path / "parts")
    same_best(tmp_path / "whole", tmp_path / "parts")


def same_best(one: Path, other: Path) -> None:
    """The same policy, and the evaluation and the card that belong to it."""
    assert (one / "best-seed0.safetensors").read_bytes() == (other / "best-seed0.safetensors").read_bytes()
    assert results_equal(*(load_results(folder / "best-seed0-evaluation") for folder in (one, other)))
    first, second = (cards.read_card(folder / "best-seed0.safetensors") for folder in (one, other))
    assert first["training"]["iteration"] == second["training"]["iteration"]
    assert first["evaluation"]["summary"] == second["evaluation"]["summary"]


@pytest.mark.parametrize("at", ["best-seed0.json", "best-seed0-evaluation.json"])
def test_a_run_killed_between_the_files_of_its_best_policy_mends_them(whole, tmp_path, monkeypatch, at):
    monkeypatch.setattr(best, "evaluate", scripted)
    replace, seen = os.replace, []

    def killed(source, target):
        seen.append(target)
        if seen.count(tmp_path / at) == 2:  # the second best policy's
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            train(ALGORITHM, config(evaluation=EVERY), out=tmp_path)
    assert int(arrays(tmp_path)["step"]) < 6
    train(ALGORITHM, config(evaluation=EVERY), out=tmp_path, resume=True)
    same_best(whole, tmp_path)
    assert sorted(path.name for path in whole.iterdir()) == sorted(path.name for path in tmp_path.iterdir())


def test_the_evaluation_that_chose_the_best_policy_is_kept(whole):
    found, card = load_results(whole / "best-seed0-evaluation"), cards.read_card(whole / "best-seed0.json")
    log = [line for line in read_metrics(whole / "metrics.jsonl") if "eval/total_return" in line]
    assert [line["eval/total_return"] for line in log] == pytest.approx([total for total, _ in SCRIPT.values()])
    assert [line["eval/over_budget"] for line in log] == [float(cost > 2) for _, cost in SCRIPT.values()]
    assert found.meta["iteration"] == card["training"]["iteration"] == 3
    assert found.returns.sum(axis=1).mean() == pytest.approx(3.0)
    weights = [checkpoint.read(whole / name, kind=kind)[0]["table"] for name, kind in FILES.items()]
    assert (weights[0] != weights[1]).any(), "the third iteration's policy, not the last one's"
    assert card["evaluation"] == {**found.meta, "summary": card["evaluation"]["summary"]}
    assert found.label == f"{whole.name}, in training"
    assert "temperature" not in card


FILES = {"best-seed0.safetensors": "policy", "checkpoint.safetensors": "checkpoint"}
KILLED = """
import sys
sys.path.insert(0, sys.argv[2])
from test_train import ALGORITHM, config
from safeicrl.train import train
train(ALGORITHM, config(iterations=10**6), out=sys.argv[1])
"""


def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, "-c", KILLED, str(killed), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 100
        while len(read_metrics(killed / "metrics.jsonl")) < 8 and time.monotonic() < deadline:
            assert process.poll() is None, "the run ended by itself"
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 99')  # what a kill in the middle of a line leaves
    _, meta = checkpoint.read(killed / "checkpoint.safetensors", kind="checkpoint")
    reached = meta["status"]["iteration"]
    assert reached >= 7, "every chunk was to be saved"
    train(ALGORITHM, config(iterations=reached + 3), out=killed, resume=True)
    train(ALGORITHM, config(iterations=reached + 3), out=whole)
    same_arrays(whole, killed)
    assert timeless(whole) == timeless(killed)


def test_a_bad_iteration_is_rolled_back_and_the_run_goes_on(tmp_path, capsys):
    algorithm = TableAlgorithm(env=ROOM, config=TableConfig(bad_share=0.3))
    trained = train(algorithm, config(iterations=12, seed=7), out=tmp_path)
    lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "return" in line]
    bad = [line for line in lines if line["rolled_back"]]
    assert len(lines) == 12
    assert len(bad) == 5
    assert all(line["return"] is None for line in bad)  # nan is no JSON
    assert int(trained.state.step) == 12 - len(bad)  # rolled back whole, but for the key
    assert np.isfinite(np.asarray(trained.state.table)).all()
    assert "rolled back" in capsys.readouterr().out
    clean = train(ALGORITHM, config(iterations=12, seed=7), out=tmp_path / "clean")
    key = lambda state: jax.random.key_data(state.key).tolist()  # noqa: E731
    assert key(trained.state) == key(clean.state)


def test_bad_iterations_in_a_row_end_the_run_with_a_sound_checkpoint(tmp_path):
    algorithm = TableAlgorithm(env=ROOM, config=TableConfig(bad_from=4))
    with pytest.raises(UserError, match="3 iterations in a row were not finite") as error:
        train(algorithm, config(iterations=50, checkpoint_minutes=9.0), out=tmp_path)
    assert "\n" not in str(error.value)
    saved = arrays(tmp_path)
    assert int(saved["step"]) == 4
    assert np.isfinite(saved["table"]).all()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 7


def test_seeds_train_side_by_side_as_each_would_alone(tmp_path):
    algorithm = TableAlgorithm(env=ROOM, config=TableConfig(bad_share=0.3))
    both = train(algorithm, config(seed=2, seeds=2), out=tmp_path / "both")
    assert [path.name for path in both.policies] == ["best-seed2.safetensors", "best-seed3.safetensors"]
    steps = []
    for index, seed in enumerate((2, 3)):
        alone = train(algorithm, config(seed=seed), out=tmp_path / str(seed))
        steps.append(int(alone.state.step))
        assert int(both.state.step[index]) == steps[-1]
        np.testing.assert_allclose(both.state.table[index], alone.state.table, atol=1e-6)
        np.testing.assert_array_equal(both.results[index].returns, alone.results[0].returns)
        card = cards.read_card(tmp_path / "both" / f"best-seed{seed}.json")
        assert card["training"]["seed"] == seed
    assert steps == [5, 2]  # the guard judged each seed by itself
    first, second = read_metrics(tmp_path / "both" / "metrics.jsonl")[:2]
    assert first["return/seeds"] == [first["return"], None]  # the mean is over the seeds that moved
    assert second["lambda"] == pytest.approx(np.mean(second["lambda/seeds"]))


def test_chunks_change_the_log_but_not_the_run(tmp_path):
    one = train(ALGORITHM, config(), out=tmp_path / "one")
    three = train(ALGORITHM, config(chunk=3), out=tmp_path / "three")
    np.testing.assert_allclose(one.state.table, three.state.table, atol=1e-6)
    logs = [
        [line for line in read_metrics(run.folder / "metrics.jsonl") if "return" in line] for run in (one, three)
    ]
    assert [len(log) for log in logs] == [6, 2]
    assert logs[1][0]["return"] == pytest.approx(np.mean([line["return"] for line in logs[0][:3]]))
    assert logs[1][-1]["env_steps"] == logs[0][-1]["env_steps"]


def test_the_time_limit_ends_a_run_cleanly(tmp_path):
    begin = time.monotonic()
    trained = train(ALGORITHM, config(iterations=None, minutes=0.02, checkpoint_minutes=9.0), out=tmp_path)
    assert trained.status.iteration == int(arrays(tmp_path)["step"])
    # a compiler slower than the limit leaves time for one iteration only
    assert trained.status.iteration == 1 or 0.8 < trained.status.seconds < 1.7
    assert time.monotonic() - begin < 60
    assert len(trained.results) == 1


def test_the_log_says_what_it_must(tmp_path, capsys):
    train(ALGORITHM, config(iterations=2, tensorboard=True), out=tmp_path)
    said = capsys.readouterr().out
    for words in ("compiled in", "steps", "/s", "ETA", "cost", "λ", "evaluation at iteration 2"):
        assert words in said
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert set(METRICS) <= lines[0].keys()
    assert lines[0]["over_budget_by_bin"][1] is None  # an empty bin is no failure
    assert lines[1]["env_steps"] > lines[0]["env_steps"]
    assert "eval/total_return" in lines[2]
    assert list((tmp_path / "tensorboard").iterdir())
    described = json.loads((tmp_path / "config.json").read_text())
    assert described["algo"] == {"name": "table", "config": vars(TableConfig())}
    assert described["env"]["name"] == "safe-dark-room"


def test_a_missing_sink_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"wandb is not installed: pip install 'safeicrl\[wandb\]'"):
        train(ALGORITHM, config(wandb="project"), out=tmp_path)


def test_runs_are_never_overwritten(tmp_path):
    train(ALGORITHM, config(iterations=1), out=tmp_path)
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    with pytest.raises(UserError, match="holds a run already"):
        train(ALGORITHM, config(iterations=1), out=tmp_path)
    other = TableAlgorithm(env=type(ROOM)(size=4, obstacles=2), config=TableConfig())
    with pytest.raises(UserError, match=r"'table' has shape \(9, 5\), expected \(16, 5\)"):
        train(other, config(iterations=2), out=tmp_path, resume=True)
    with pytest.raises(UserError, match="no checkpoint at"):
        train(ALGORITHM, config(), out=tmp_path / "nowhere", resume=True)
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"card": property()}, "Own has no 'card': an algorithm has env, config, init, update, agent, card"),
        ({"init": lambda self, key: {"table": key}}, "Own.init must return a state with a field 'key', got a dict"),
        ({"card": lambda self: ["net"]}, "Own.card must return a dictionary with a \"kind\", got ['net']"),
        ({"card": lambda self: {"kind": "tabel"}}, "unknown kind of policy in Own.card 'tabel'; known: "),
        ({"card": lambda self: {"kind": "net"}}, "Own.card is incomplete for the kind 'net': KeyError('net')"),
        (
            {"agent": lambda self, state: TableAgent(table=state.table[1:], size=3)},
            "Own.card describes another agent: array 'table' has shape (9, 5) there, and (8, 5) in the agent",
        ),
        (
            {"update": lambda self, state: state},
            "Own.update must return the new state and a dictionary of metrics, got a TableState",
        ),
        (
            {"update": lambda self, state: (replace(state, table=state.table[1:]), {})},
            "Own.update must keep the form of the state: 'table' was float32[9, 5], is float32[8, 5]",
        ),
        ({"update": lambda self, state: (state, {})}, "Own.update must report the metric 'env_steps'"),
    ],
)
def test_mistakes_in_an_algorithm_of_ones_own_are_one_line_before_anything_is_compiled(tmp_path, parts, words):
    own = type("Own", (TableAlgorithm,), parts)(env=ROOM, config=TableConfig())
    with pytest.raises(UserError, match=f"^{re.escape(words)}") as error:
        train(own, config(), out=tmp_path / "run")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"iterations": 0}, "iterations must be an integer ≥ 1"),
        ({"minutes": -1.0}, "minutes must be"),
        ({"seeds": 0}, "seeds must be"),
        ({"chunk": 4}, "multiple of chunk"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_settings_that_make_no_sense(changes, words):
    with pytest.raises(UserError, match=words):
        config(**changes)


def test_a_run_needs_a_limit(tmp_path):
    with pytest.raises(UserError, match="needs a limit"):
        train(ALGORITHM, config(iterations=None), out=tmp_path)


def summary(total: float, over: float) -> Summary:
    return Summary(
        total_return=total, total_return_error=0.0, last_return=0.0, over_budget=over, over_budget_last=0.0,
        cost=0.0, by_budget={}, over_by_budget={}, episodes=1, tasks=1,
    )  # fmt: skip


def test_what_best_means():
    by_rank = sorted(
        [summary(9.0, 0.5), summary(1.0, 0.01), summary(2.0, 0.03), summary(8.0, 0.2)], key=lambda s: rank(s, 0.03)
    )
    assert [s.total_return for s in by_rank] == [9.0, 8.0, 1.0, 2.0]


@pytest.fixture
def handlers():
    """Signals as in a terminal, however the tests were started; as they were afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.usefixtures("handlers")
def test_a_polite_signal_finishes_the_chunk(number, status):
    signal.signal(number, signal.default_int_handler)
    with StopRequest() as stop:
        assert not stop.requested
        assert stop.exit_status == 0
        signal.raise_signal(number)
        assert stop.requested
        assert stop.exit_status == status
        signal.raise_signal(signal.SIGINT)  # at once: belongs to the first one
        stop.since -= 2 * GRACE
        with pytest.raises(KeyboardInterrupt):  # a late one acts as usual
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("handlers")
def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as after nohup, or in the background of a script
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        assert not stop.requested
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
