"""Several devices and several processes do what one does, and say so in one line when they cannot."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from standin import ROOM, TableAlgorithm, TableConfig

from safeicrl.cli import main
from safeicrl.errors import UserError
from safeicrl.evaluation.archive import load_results
from safeicrl.evaluation.results import Results
from safeicrl.log import read_metrics
from safeicrl.machine import devices, hosts
from safeicrl.policies import checkpoint
from safeicrl.train import EvalConfig, TrainConfig, train
from safeicrl.training import best

HERE = Path(__file__).parent
ONES = np.ones((1, 4))
EMPTY = Results(returns=ONES, costs=ONES, lengths=ONES, budgets=np.ones(1), meta={"label": "none"})


@pytest.fixture(scope="module")
def eight(tmp_path_factory) -> Path:
    """What eight_devices.py leaves behind."""
    folder = tmp_path_factory.mktemp("eight")
    subprocess.run([sys.executable, HERE / "eight_devices.py", folder], check=True, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture(scope="module")
def found(eight) -> dict:
    return json.loads((eight / "found.json").read_text())


def state(folder: Path) -> dict[str, np.ndarray]:
    return checkpoint.read(folder / "checkpoint.safetensors", kind="checkpoint")[0]


@pytest.mark.parametrize("name", ["eight", "four-one-four"])
def test_a_run_does_not_depend_on_the_number_of_devices(eight, name):
    ours, alone = state(eight / name), state(eight / "one")
    assert ours.keys() == alone.keys()
    for array, values in alone.items():
        mine = ours[array][0] if name == "eight" else ours[array]  # which has a second seed
        assert mine.shape == values.shape
        np.testing.assert_allclose(mine, values, rtol=1e-5, atol=1e-6)
    assert alone["step"] == 6


def test_an_evaluation_does_not_depend_on_the_devices_even_if_its_rows_cannot_be_divided(eight):
    tables = [checkpoint.read(eight / run / "best-seed0.safetensors", kind="policy")[0] for run in ("one", "eight")]
    np.testing.assert_allclose(tables[0]["table"], tables[1]["table"], rtol=1e-5, atol=1e-6)
    results = [load_results(eight / run / "best-seed0-evaluation") for run in ("one", "eight")]
    for name in ("returns", "costs", "lengths"):
        np.testing.assert_array_equal(getattr(results[0], name), getattr(results[1], name))


def test_the_log_has_the_throughput_of_all_devices_and_of_each(eight):
    log = [line for line in read_metrics(eight / "eight" / "metrics.jsonl") if "return" in line]
    assert log[0]["devices"] == 8
    rates = log[0]["steps_per_second/seeds"]
    assert log[0]["steps_per_second"] == pytest.approx(sum(rates))
    assert log[0]["steps_per_second_per_device"] == pytest.approx(log[0]["steps_per_second"] / 8)
    alone = [line for line in read_metrics(eight / "one" / "metrics.jsonl") if "return" in line]
    assert "devices" not in alone[0]
    assert [line["return/seeds"][0] for line in log] == pytest.approx([line["return"] for line in alone])


def test_a_minibatch_is_drawn_from_all_rows_and_divided_again(found):
    assert found["minibatch"] == {"same": True, "divided": True}


def test_each_device_has_its_own_worlds_moved(found):
    assert found["worlds"]["calls"] == [8, 2, 2, 2, 2]
    assert found["worlds"]["alone"] == found["worlds"]["shared"]


# -- which devices


@pytest.mark.parametrize(
    ("count", "rows", "seeds", "why"),
    [
        (8, {"algo.rows": 64, "algo.ppo.minibatch": 16}, 1, None),
        (8, {"algo.rows": 64, "algo.ppo.minibatch": 12}, 1, "algo.ppo.minibatch must be a multiple of the 8 "),
        (8, {"algo.ppo.minibatch": 12}, 2, None),  # each seed has four
        (8, {"algo.ppo.minibatch": 12}, 3, "multiple of the 8 devices that share it, got 12"),
        (2, None, 1, "this runs on one device, got 2"),
        (4, None, 8, None),
        (4, None, 2, "as many devices as divide its 2 seeds, got 4"),
    ],
)
def test_work_that_cannot_be_divided_is_refused(count, rows, seeds, why):
    said = devices._misfit(count, rows, seeds)
    assert said is None if why is None else why in said


def test_more_devices_than_there_are_are_refused(capsys):
    for line in (["train", "--devices", "9"], ["evaluate", "--agent", "random", "--devices", "9"]):
        assert main(line) == 2
        assert capsys.readouterr().err.startswith("safeicrl: --devices 9 is more than there are: 1 (")


def test_an_environment_on_the_host_takes_one_device():
    class Hosted:
        def restart(self) -> None: ...

    with pytest.raises(UserError, match="Hosted lives on one host"):
        devices.make_mesh(2, rows={}, env=Hosted())
    assert devices.make_mesh(None, rows={}, env=Hosted()) is None


# -- several processes


LAUNCHED = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "2"}


def test_a_launcher_says_where_the_others_are():
    assert hosts.find_cluster({}) == hosts.Cluster()
    ray = hosts.Cluster(coordinator="10.0.0.1:29500", processes=4, process=2)
    assert hosts.find_cluster(LAUNCHED) == ray
    own = {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}
    assert hosts.find_cluster({**LAUNCHED, **own}) == hosts.Cluster(coordinator="h:1", processes=2, process=0)
    with pytest.raises(UserError, match=r"variables of Ray Train or torchrun .*invalid literal"):
        hosts.find_cluster({**LAUNCHED, "RANK": "two"})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--coordinator", "h:1"], "belong together"),
        (["--coordinator", "h", "--processes", "2", "--process", "0"], "--coordinator must be HOST:PORT, got 'h'"),
        (["--coordinator", "h:1", "--processes", "2", "--process", "2"], "--process must be below --processes"),
        (["--coordinator", "h:1", "--processes", "2", "--process", "1"], "add --distributed"),
    ],
)
def test_mistakes_about_processes_are_one_line(options, why, capsys):
    assert main(["train", *options]) == 2
    said = capsys.readouterr().err
    assert why in said
    assert len(said.splitlines()) == 1


def test_a_coordinator_that_is_not_there_is_one_line():
    with pytest.raises(UserError, match=r"no coordinator at 127.0.0.1:9 after 1 s: is process 0 running\?"):
        hosts.join(hosts.Cluster(coordinator="127.0.0.1:9", processes=2, process=1), timeout=1.0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_lost_process_ends_the_run_which_then_goes_on(tmp_path, monkeypatch):
    folder, room = tmp_path / "run", dict(size=3, obstacles=2, max_steps=5, episodes=4)
    command = [
        sys.executable, "-m", "safeicrl", "train", "--import", str(HERE / "standin.py"), "--algo", "table",
        *(f"--env.{name.replace('_', '-')}={value}" for name, value in room.items()),
        "--env.train-budget", "1", "3", "--env.test-budget", "1", "3", "--evaluation.every", "0",
        "--iterations", "1000000", "--checkpoint-minutes", "0", "--out", str(folder), "--distributed",
        "--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2", "--process",
    ]  # fmt: skip
    both = [
        subprocess.Popen([*command, str(index)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for index in range(2)
    ]
    deadline = time.monotonic() + 200
    while len(read_metrics(folder / "metrics.jsonl")) < 3 and time.monotonic() < deadline:
        assert all(process.poll() is None for process in both), [process.communicate() for process in both]
        time.sleep(0.1)
    os.kill(both[1].pid, signal.SIGKILL)  # its child, which works, must not outlive it
    said, complained = both[0].communicate(timeout=60)
    both[1].communicate(timeout=60)
    assert both[0].returncode == 2
    assert complained.splitlines()[-1] == f"safeicrl: {hosts.LOST_TEXT}"
    assert "2 devices (cpu) in 2 processes" in said
    log = read_metrics(folder / "metrics.jsonl")
    assert log[0]["devices"] == 2

    _, meta = checkpoint.read(folder / "checkpoint.safetensors", kind="checkpoint")
    reached = meta["status"]["iteration"]
    config = TrainConfig(iterations=reached + 1, evaluation=EvalConfig(every=0))
    algorithm = TableAlgorithm(env=ROOM, config=TableConfig())
    monkeypatch.setattr(best, "evaluate", lambda *_, **__: EMPTY)
    trained = train(algorithm, config, out=folder, resume=True)
    alone = train(algorithm, config, out=tmp_path / "alone")
    assert int(trained.state.step) == reached + 1
    np.testing.assert_allclose(trained.state.table, alone.state.table, rtol=1e-4, atol=1e-5)
