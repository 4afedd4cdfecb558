"""What every benchmark says about itself."""

import os
import platform
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from safeicrl.version import VERSION


def fastest(run: Callable[[], Any], repeats: int) -> float:
    """Seconds of the fastest run: other programs only ever slow one down."""
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The processor's name, where the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def provenance(**versions: str) -> dict[str, Any]:
    """Command, machine and versions, for the JSON file."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "machine": {
            "device": jax.devices()[0].device_kind,
            "processor": processor(),
            "cores": cores(),
            "load_before": round(os.getloadavg()[0], 2),
        },
        "versions": {
            "safeicrl": VERSION, "python": platform.python_version(), "jax": jax.__version__, **versions,
        },
    }  # fmt: skip
