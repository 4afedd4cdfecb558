"""Stopping a run politely: after a signal it finishes the current chunk and saves before it ends."""

import signal
import threading
import time
from types import FrameType
from typing import Any

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
GRACE = 1.0  # seconds in which further signals belong to the first one: a shell may send several at once


class StopRequest:
    """Inside its `with` block a first SIGINT (Ctrl-C), SIGTERM or SIGHUP is noted; a late second one acts as usual.

    A signal that was ignored before stays ignored: `nohup` and scripts ask for that.
    """

    def __init__(self) -> None:
        self.number: int | None = None  # of the first signal
        self.since = 0.0
        self.previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.number is not None

    @property
    def exit_status(self) -> int:
        """What a process that was stopped returns, as shells count: 128 + signal; 0 if it was not stopped."""
        return 0 if self.number is None else 128 + self.number

    def __enter__(self) -> "StopRequest":
        # Only the main thread may set handlers. In other threads a run cannot be stopped this way.
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self.previous = {number: signal.signal(number, self._handle) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self.previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self.number, self.since = number, time.monotonic()
        elif time.monotonic() - self.since > GRACE:
            self.__exit__()
            signal.raise_signal(number)
