"""The examples that need nothing extra run as they are."""

import runpy
import subprocess
import sys
from pathlib import Path

from safeicrl.train import EvalConfig, TrainConfig, train

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(script: str, *arguments: object) -> str:
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_custom_environment_takes_at_most_60_lines_and_trains(tmp_path):
    script = EXAMPLES / "custom_env.py"
    assert len(script.read_text().splitlines()) <= 60
    learner = runpy.run_path(str(script))["learner"]
    trained = train(learner(1), TrainConfig(evaluation=EvalConfig(tasks=8)), out=tmp_path / "run")
    costs, returns = trained.results[0].costs, trained.results[0].returns
    # no lever pays over 1, the hot one costs 1 a pull; ten pulls an episode
    assert costs.shape == (8, 8)
    assert 0 < costs.mean() < 10
    assert 0 < returns.mean() < 10


def test_proposition_1_draws_its_figure(tmp_path):
    assert "0.4721" in run("proposition_1.py", "--out", tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").read_text().startswith("<?xml")
