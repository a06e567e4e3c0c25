"""When compute and transfers ran, and how much of the transfers compute has hidden."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PathTotals:
    """What one stream did: bytes moved and seconds it was busy."""

    nbytes: int
    busy_s: float
    operations: int


class Timeline:
    """Collects spans of work, by stream, when they have ended; any thread, any order.

    Overlap is summed as spans come in, each against a bounded history of the other side's, so a run
    of any length costs constant memory. One compute stream; any number of transfer streams, and
    seconds in which two of them ran count twice.
    """

    HISTORY = 512

    def __init__(self, compute: str = "compute") -> None:
        self._lock = threading.Lock()
        self._compute = compute
        self._totals: dict[str, list[float]] = {}
        self._computes: deque[tuple[float, float]] = deque(maxlen=self.HISTORY)
        self._transfers: deque[tuple[float, float]] = deque(maxlen=self.HISTORY)
        self._transfer_s = 0.0
        self._hidden_s = 0.0

    def span(self, stream: str, start_s: float, end_s: float, nbytes: int) -> None:
        """`stream` was busy from `start_s` to `end_s` and moved `nbytes`."""
        with self._lock:
            if stream == self._compute:
                self._computes.append((start_s, end_s))
                self._hidden_s += _overlap((start_s, end_s), self._transfers)
            else:
                self._transfers.append((start_s, end_s))
                self._hidden_s += _overlap((start_s, end_s), self._computes)
                self._transfer_s += end_s - start_s
            totals = self._totals.setdefault(stream, [0.0, 0.0, 0.0])
            totals[0] += nbytes
            totals[1] += end_s - start_s
            totals[2] += 1

    def totals(self) -> dict[str, PathTotals]:
        with self._lock:
            return {k: PathTotals(int(b), s, int(n)) for k, (b, s, n) in self._totals.items()}

    def hidden_share(self) -> float | None:
        """Share of transfer seconds during which compute ran; None before any transfer."""
        with self._lock:
            if self._transfer_s <= 0:
                return None
            return min(1.0, self._hidden_s / self._transfer_s)


def _overlap(span: tuple[float, float], others: Iterable[tuple[float, float]]) -> float:
    """Seconds of `span` that lie in `others`."""
    start, end = span
    return sum(max(0.0, min(b, end) - max(a, start)) for a, b in others)
