"""A command line for sweeps that dies, is interrupted or waits, as its run's name says; it needs no JAX."""

import os
import signal
import time
from pathlib import Path

from safeicrl.machine.signals import StopRequest


def command(words: list[str]) -> int:
    """Pretend to train; every attempt leaves a letter in the run's folder."""
    folder = Path(words[-1])
    with open(folder / "attempts", "a") as file:
        file.write("x")
    kind = folder.name.partition("=")[2]
    if kind == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "moves" and attempts(folder) == 1:
        return 128 + signal.SIGTERM  # its machine is needed for something else
    if kind == "waits":
        with StopRequest() as stop:
            end = time.monotonic() + 60
            while not stop.requested and time.monotonic() < end:
                time.sleep(0.05)
            return stop.exit_status
    return 0


def attempts(folder: Path) -> int:
    """How often a run was begun."""
    path = folder / "attempts"
    return len(path.read_text()) if path.exists() else 0
