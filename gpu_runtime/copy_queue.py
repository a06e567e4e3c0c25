"""`CopyQueue`: large copies in slices, the urgent ones first, a few at a time on the device."""

from __future__ import annotations

import enum
import heapq
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvstrata.errors import IntegrityError
from kvstrata.gpu_runtime.base import Event, Stream

LEAST, MOST, MOST_BYTES = 2, 8, 360 << 20
"""Slices that are enqueued at once: one moves, and one is next for as long as it takes the host to
hear that one has ended. Of short ones more, for these end faster than that."""


class CopyPriority(enum.IntEnum):
    """Which copy of one direction goes first."""

    RESTORE = 0
    """A prepared batch waits for it."""
    PREFETCH = 1
    WRITE_BACK = 2


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a copy: `run` enqueues it on the device; called on the stream's thread."""

    run: Callable[[], None]
    nbytes: int


@dataclass(order=True, slots=True)
class _Waiting:
    turn: tuple[int, int]
    slices: list[tuple[Slice, Event | None]] = field(compare=False)
    """The next one last; with the event that is recorded behind it, if somebody waits for it."""


class CopyQueue:
    """In front of one copy stream. Any thread; takes no other lock than that of the stream.

    A copy that comes later and is more urgent overtakes at the border of a slice. Within a priority
    copies go in order. An urgent one waits for what is on the device: MOST_BYTES, or two slices.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._lock = threading.RLock()
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()
        self._under_way, self._bytes = 0, 0
        self._open = True
        self._pumping = False

    def add(self, groups: Sequence[Sequence[Slice]], priority: CopyPriority) -> list[Event]:
        """Queue a copy, its groups in order; returns the event behind each. Events may be waited
        for at once."""
        events = [self._stream.new_event() for _ in groups]
        slices: list[tuple[Slice, Event | None]] = []
        for group, event in zip(groups, events, strict=True):
            slices += [(part, None) for part in group]
            slices[-1] = (group[-1], event)
        with self._lock:
            turn = (int(priority), next(self._numbers))
            heapq.heappush(self._waiting, _Waiting(turn, slices[::-1]))
            self._pump()
        return events

    def flush(self) -> None:
        """At shutdown: enqueue everything at once, now and later. Nothing may wait for a turn that
        does not come when the streams end."""
        with self._lock:
            self._open = False
            self._pump()

    @property
    def queued(self) -> int:
        """Copies that are not wholly enqueued."""
        with self._lock:
            return len(self._waiting)

    def check_integrity(self) -> None:
        """Raise IntegrityError when an invariant is broken."""
        with self._lock:
            if self._next_may_go():
                raise IntegrityError(f"{len(self._waiting)} copies wait with room on the device")
            if self._under_way < 0 or (self._open and self._under_way > MOST):
                raise IntegrityError(f"{self._under_way} slices are on the device")
            if self._bytes < 0 or (self._bytes > 0) != (self._under_way > 0):
                raise IntegrityError(f"{self._under_way} slices of {self._bytes} bytes")
            if not all(copy.slices for copy in self._waiting):
                raise IntegrityError("a copy waits that is wholly enqueued")

    def _pump(self) -> None:
        if self._pumping:
            return  # the loop below goes on
        self._pumping = True
        try:
            while self._next_may_go():
                copy = self._waiting[0]
                nbytes = copy.slices[-1][0].nbytes
                self._under_way += 1
                self._bytes += nbytes
                self._enqueue(copy).on_complete(partial(self._ended, nbytes))
        finally:
            self._pumping = False

    def _next_may_go(self) -> bool:
        if not self._waiting or not self._open:
            return bool(self._waiting)
        nbytes = self._bytes + self._waiting[0].slices[-1][0].nbytes
        return self._under_way < LEAST or (self._under_way < MOST and nbytes <= MOST_BYTES)

    def _enqueue(self, copy: _Waiting) -> Event:
        part, event = copy.slices.pop()
        if not copy.slices:
            heapq.heappop(self._waiting)
        self._stream.enqueue(part.run, part.nbytes)
        return self._stream.record(event)

    def _ended(self, nbytes: int) -> None:
        """On a thread of the device, or within `_pump` when the slice has ended already."""
        with self._lock:
            self._under_way -= 1
            self._bytes -= nbytes
            if self._open:
                self._pump()
