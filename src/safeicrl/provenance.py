"""Where a result came from."""

import platform
import shlex
import sys
import time
from typing import Any

import jax

from safeicrl import plugins
from safeicrl.version import VERSION


def surroundings(*, device: bool = True) -> dict[str, Any]:
    """Version, device, command, date and modules of others, for a results file, a card or a run's folder.

    Without `device`, for a process that only starts others, JAX takes no device for itself.
    """
    return {
        "safeicrl": VERSION,
        "jax": jax.__version__,
        "python": platform.python_version(),
        **({"device": _device()} if device else {}),
        "command": shlex.join([_program(), *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        **({"imports": list(plugins.imported)} if plugins.imported else {}),
    }


def _device() -> str:
    device = jax.devices()[0]
    return device.device_kind if device.platform != "cpu" else f"CPU ({platform.machine()})"


def _program() -> str:
    """The program's name as a user would type it, without its folder."""
    name = sys.argv[0].replace("\\", "/").rsplit("/", 1)[-1] if sys.argv else ""
    return "safeicrl" if name == "__main__.py" else name or "python"
