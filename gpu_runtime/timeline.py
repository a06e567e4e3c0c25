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
    """Collects spans of work, by stream; any thread.

    Overlap is summed as transfers end, against a bounded history of compute spans, so a run of any
    length costs constant memory. One compute stream; any number of transfer streams, and seconds
    in which two of them ran count twice.
    """

    HISTORY = 512

    def __init__(self, compute: str = "compute") -> None:
        self._lock = threading.Lock()
        self._compute = compute
        self._totals: dict[str, list[float]] = {}
        self._open_compute: float | None = None
        self._compute_spans: deque[tuple[float, float]] = deque(maxlen=self.HISTORY)
        self._open_transfers: dict[str, float] = {}
        self._transfer_s = 0.0
        self._hidden_s = 0.0

    def begin(self, stream: str, now_s: float) -> None:
        with self._lock:
            if stream == self._compute:
                self._open_compute = now_s
            else:
                self._open_transfers[stream] = now_s

    def end(self, stream: str, now_s: float, nbytes: int) -> None:
        with self._lock:
            if stream == self._compute:
                start = self._open_compute if self._open_compute is not None else now_s
                self._open_compute = None
                self._compute_spans.append((start, now_s))
            else:
                start = self._open_transfers.pop(stream, now_s)
                self._transfer_s += now_s - start
                self._hidden_s += _overlap((start, now_s), reversed(self._compute_spans))
                if self._open_compute is not None:  # it runs now, so it ends later
                    self._hidden_s += max(0.0, now_s - max(start, self._open_compute))
            totals = self._totals.setdefault(stream, [0.0, 0.0, 0.0])
            totals[0] += nbytes
            totals[1] += now_s - start
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
    """Seconds of `span` that lie in `others`, latest first."""
    start, end = span
    total = 0.0
    for a, b in others:
        if b <= start:
            break
        total += max(0.0, min(b, end) - max(a, start))
    return total
