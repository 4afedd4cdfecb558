"""Ending a run politely: an interrupt finishes the chunk at hand, saves, and only then leaves."""

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """While entered, the first Ctrl-C or SIGTERM sets `requested`; a second one acts as usual."""

    def __init__(self) -> None:
        self.requested = False
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        # only the main thread may set handlers; elsewhere (a notebook's worker) a run just cannot be stopped so
        if threading.current_thread() is threading.main_thread():
            self.previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self.previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self.__exit__()
