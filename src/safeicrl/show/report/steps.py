"""How many environment steps trained what a table shows. Never imports jax."""

from pathlib import Path

import numpy as np

from safeicrl.evaluation.results import Results
from safeicrl.log import read_metrics
from safeicrl.show.report.content import File

OF_ALL_STAGES = ("policy", "by-budget", "wiped", "wide", "wide-wiped")  # evaluations of a world's released policy


def trained_on(root: Path, files: list[File]) -> str:
    """The environment steps behind an agent's results, per seed; “–” where nothing was trained or recorded."""
    counts = [count for file in files if isinstance(file.value, Results) for count in _steps(root, file)]
    if not counts:
        return "–"
    training = (files[0].value.meta.get("card") or {}).get("training") or {}
    # Safe AD never plays: its steps are those of the windows it read, many of them several times.
    read = " read" if ((training.get("algo") or {}).get("name")) == "safe-ad" else ""
    # Ant's privileged agent was trained on, and its card has the steps of the second run.
    own = files[0].path
    again = " in its last run" if (root / own.parent / "training" / f"{own.stem}-continued").is_dir() else ""
    return f"{in_words(float(np.mean(counts)))}{read}{again}"


def in_words(steps: float) -> str:
    """1.01 million, 32 million, 12,000."""
    return f"{steps / 1e6:.3g} million" if steps >= 1e5 else f"{steps:,.0f}"


def _steps(root: Path, file: File) -> list[float]:
    """Of all stages where there are several (a card has those of its last one), else to the chosen checkpoint."""
    folder = (root / file.path).parent
    stages = sorted(folder.glob("training/[0-9]-*/metrics.jsonl"))
    if stages and file.path.stem in OF_ALL_STAGES:
        return [sum(float(read_metrics(log)[-1]["env_steps"]) for log in stages)]
    training = (file.value.meta.get("card") or {}).get("training") or {}
    return [float(training["env_steps"])] if "env_steps" in training else []
