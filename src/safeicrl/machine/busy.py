"""A clock that runs while anybody is at work."""

import threading
import time


class BusyClock:
    """Counts the seconds in which at least one thread is inside its `with` block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._since = 0.0
        self._total = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._since = time.perf_counter()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._total += time.perf_counter() - self._since

    @property
    def seconds(self) -> float:
        """How long it has run so far."""
        with self._lock:
            return self._total + (time.perf_counter() - self._since if self._inside else 0.0)
