"""Stopping a run politely: after an interrupt it finishes the current chunk and saves before it ends."""

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Inside its `with` block the first Ctrl-C or SIGTERM sets `requested`; a second one acts as usual."""

    def __init__(self) -> None:
        self.requested = False
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        # Only the main thread may set handlers. In other threads a run cannot be stopped this way.
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
