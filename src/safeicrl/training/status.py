"""Where a run stands, and whether it has reached its limit."""

import time
from dataclasses import dataclass, field
from typing import Any

from safeicrl.training.settings import TrainConfig


@dataclass(kw_only=True)
class Status:
    """Where a run stands; saved with every checkpoint."""

    iteration: int = 0
    env_steps: int = 0  # of each seed
    seconds: float = 0.0  # wall time, including that before the run was resumed
    pace: float = 0.0  # seconds of the last chunk
    failures: list[int] = field(default_factory=list)  # [seed] non-finite iterations in a row
    best: list[dict[str, Any] | None] = field(default_factory=list)  # [seed] iteration, summary
    evaluated: int = -1  # iteration of the last evaluation


def finished(config: TrainConfig, status: Status, started: float) -> bool:
    """A limit is reached, or the next chunk would overrun the time."""
    if config.iterations is not None and status.iteration >= config.iterations:
        return True
    if config.minutes is None or status.iteration == 0:  # however long compiling took, something must be learned
        return False
    return time.perf_counter() - started + status.pace > 60 * config.minutes


def limit_reached(config: TrainConfig, status: Status) -> str:
    """Why a resumed run has nothing left to do."""
    if config.iterations is not None and status.iteration >= config.iterations:
        done, more = times(status.iteration), status.iteration > config.iterations
        said = f"has done {done}, more than {config.iterations}" if more else f"has done its {done}"
        return f"{said}; a larger --iterations goes on"
    return f"has used its {config.minutes:g} minutes, {status.seconds / 60:.1f} of them; a larger --minutes goes on"


def times(iterations: int) -> str:
    """A number of iterations in words."""
    return f"{iterations} iteration{'' if iterations == 1 else 's'}"
