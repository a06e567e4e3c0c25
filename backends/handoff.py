"""How soon a thread that computes hands the interpreter lock over, while storage workers run.

A storage thread lets the lock go in each system call, some twenty times a page, and where another
thread spins in Python it gets it back only when that thread's turn is over: 5 ms each time, as
Python comes, which made a page wait for 0.1 s. Turns cost next to nothing when nobody waits.
"""

from __future__ import annotations

import sys
import threading

TURN_S = 0.0002
"""Longest turn while a worker runs; shorter ones would be felt by the thread that computes."""


class Turns:
    """The interpreter's switch interval, which is one for the whole process. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers = 0
        self._before_s = 0.0

    def shorten(self) -> None:
        """A worker starts. An interval that is shorter already stays."""
        with self._lock:
            self._workers += 1
            if self._workers == 1:
                self._before_s = sys.getswitchinterval()
                if self._before_s > TURN_S:
                    sys.setswitchinterval(TURN_S)

    def restore(self) -> None:
        """A worker has ended; after the last one the interval is what it was, unless somebody else
        has set it meanwhile."""
        with self._lock:
            assert self._workers > 0
            self._workers -= 1
            if self._workers == 0 and sys.getswitchinterval() < 1.01 * TURN_S < self._before_s:
                sys.setswitchinterval(self._before_s)


TURNS = Turns()
