"""The clock of a worker: the monotonic one, or one that a test turns by hand."""

from __future__ import annotations

import threading
from typing import Protocol

MAX_WAIT_S = 3600.0
"""A longer wait would overflow on some platforms; who waits in a loop just waits again."""


class Clock(Protocol):
    """Seconds that only grow. A test's clock may have `wait(condition, timeout_s)` as well, which
    stands for `condition.wait(timeout_s)` in its time."""

    def __call__(self) -> float: ...


def wait_on(clock: Clock, condition: threading.Condition, timeout_s: float) -> None:
    """`condition.wait`, in the time of `clock`. The caller holds the condition."""
    wait = getattr(clock, "wait", None)
    if wait is not None:
        wait(condition, timeout_s)
    else:
        condition.wait(min(max(timeout_s, 0.0), MAX_WAIT_S))
