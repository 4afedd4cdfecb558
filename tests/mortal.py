"""The table of standin.py in a process that dies once; the processes of a sweep import it."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from standin import TableAlgorithm, TableConfig

from safeicrl.algos import registry


@dataclass(frozen=True)
class MortalConfig(TableConfig):
    fate: str = ""  # a file; whoever evaluates first while it is there removes it and is killed


@dataclass(frozen=True)
class Mortal(TableAlgorithm):
    config: MortalConfig

    def card(self) -> dict[str, Any]:
        """Asked for at the start, then when an evaluation has found a better policy, before the next checkpoint."""
        begun = hasattr(self, "asked")
        object.__setattr__(self, "asked", True)
        if begun and self.config.fate and Path(self.config.fate).exists():
            Path(self.config.fate).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().card()


if "mortal" not in registry.ALGOS:
    registry.register("mortal", registry.Entry(algorithm=f"{__name__}:Mortal", config=f"{__name__}:MortalConfig"))
