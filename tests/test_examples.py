"""The examples that need nothing extra run as they are."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(script: str, *arguments: object) -> str:
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_custom_environment_takes_at_most_60_lines():
    assert len((EXAMPLES / "custom_env.py").read_text().splitlines()) <= 60
    assert "over budget" in run("custom_env.py")


def test_proposition_1_draws_its_figure(tmp_path):
    assert "0.4871" in run("proposition_1.py", "--out", tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").read_text().startswith("<?xml")
