"""Where a result came from."""

import platform
import shlex
import sys
import time
from typing import Any

import jax

from safeicrl import plugins
from safeicrl.version import VERSION


def surroundings() -> dict[str, Any]:
    """Version, device, command, date and modules of others, for a results file, a card or a run's folder."""
    device = jax.devices()[0]
    return {
        "safeicrl": VERSION,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": device.device_kind if device.platform != "cpu" else f"CPU ({platform.machine()})",
        "command": shlex.join([_program(), *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        **({"imports": list(plugins.imported)} if plugins.imported else {}),
    }


def _program() -> str:
    """The program's name as a user would type it, without its folder."""
    name = sys.argv[0].replace("\\", "/").rsplit("/", 1)[-1] if sys.argv else ""
    return "safeicrl" if name == "__main__.py" else name or "python"
