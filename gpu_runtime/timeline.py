"""When compute and transfers ran, and how much of the transfers compute has hidden."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PathTotals:
    """What one stream did: bytes moved and seconds it was busy."""

    nbytes: int
    busy_s: float
    operations: int


class Timeline:
    """Collects spans of work, by stream, when they have ended; any thread, any order.

    Overlap is summed as spans come in, each against those that it meets of a bounded history of the
    other side's, so a run of any length costs constant memory, and a span constant time. Spans of
    one stream do not overlap. One compute stream; any number of transfer streams, and seconds in
    which two of them ran count twice.
    """

    HISTORY = 512

    def __init__(self, compute: str = "compute") -> None:
        self._lock = threading.Lock()
        self._compute = compute
        self._totals: dict[str, list[float]] = {}
        self._spans: dict[str, list[tuple[float, float]]] = {}
        """The last ones of each stream, in order."""
        self._transfer_s = 0.0
        self._hidden_s = 0.0

    def span(self, stream: str, start_s: float, end_s: float, nbytes: int) -> None:
        """`stream` was busy from `start_s` to `end_s` and moved `nbytes`."""
        is_compute = stream == self._compute
        with self._lock:
            for other, spans in self._spans.items():
                if is_compute != (other == self._compute):
                    self._hidden_s += _overlap(start_s, end_s, spans)
            if not is_compute:
                self._transfer_s += end_s - start_s
            mine = self._spans.setdefault(stream, [])
            insort(mine, (start_s, end_s))
            del mine[: -self.HISTORY]
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


def _overlap(start: float, end: float, spans: list[tuple[float, float]]) -> float:
    """Seconds from `start` to `end` that lie in `spans`, which are in order."""
    total = 0.0
    for at in range(bisect_left(spans, (end,)) - 1, -1, -1):
        first, last = spans[at]
        if last < start:
            break
        total += max(0.0, min(last, end) - max(first, start))
    return total
