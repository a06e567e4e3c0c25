"""`CopyQueue`: large copies in slices, the urgent ones first, a few at a time on the device."""

from __future__ import annotations

import enum
import heapq
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstrata.errors import IntegrityError
from kvstrata.gpu_runtime.base import Event, Stream

DEPTH = 3
"""Slices that are enqueued at once: one moves, one is next, and one is for the time in which the
host hears that one has ended."""


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
    copies go in order. At most DEPTH slices are on the device, so an urgent one waits for these.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._lock = threading.RLock()
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()
        self._under_way = 0
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
            could_go = self._under_way < DEPTH or not self._open
            if self._waiting and could_go:
                raise IntegrityError(f"{len(self._waiting)} copies wait with room on the device")
            if self._under_way < 0 or (self._open and self._under_way > DEPTH):
                raise IntegrityError(f"{self._under_way} slices are on the device")
            if not all(copy.slices for copy in self._waiting):
                raise IntegrityError("a copy waits that is wholly enqueued")

    def _pump(self) -> None:
        if self._pumping:
            return  # the loop below goes on
        self._pumping = True
        try:
            while self._waiting and (self._under_way < DEPTH or not self._open):
                self._under_way += 1
                self._enqueue(self._waiting[0]).on_complete(self._ended)
        finally:
            self._pumping = False

    def _enqueue(self, copy: _Waiting) -> Event:
        part, event = copy.slices.pop()
        if not copy.slices:
            heapq.heappop(self._waiting)
        self._stream.enqueue(part.run, part.nbytes)
        return self._stream.record(event)

    def _ended(self) -> None:
        """On a thread of the device, or within `_pump` when the slice has ended already."""
        with self._lock:
            self._under_way -= 1
            if self._open:
                self._pump()
