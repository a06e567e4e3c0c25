"""Requests that wait for host pages, and whose turn it is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from kvstrata.staging.base import SlotKind, SlotRequest


@dataclass(frozen=True, slots=True)
class Room:
    """What there is to grant."""

    free: int
    """Free pages of every component."""
    reserve: int
    """Of these, writes leave so many to loads."""
    for_stores: int
    """Of these, all but stores leave so many to stores."""
    lent: Mapping[str, int]
    """Pages that each backend holds."""
    load_cap: int
    """Most pages of a backend, with a load."""
    write_cap: int
    """Most pages of a backend, with a write."""


class Waiting:
    """Three queues. Loads come first, then lends (they make host pages free), then writes.

    A load that waits for pages keeps writes from taking them. It never waits for a write that needs
    them: the one kind that could keep a page from becoming free is a store, and that has pages of
    its own. What waits for its backend's share keeps only that backend's later and lesser requests
    waiting.
    """

    def __init__(self) -> None:
        self.loads: deque[SlotRequest] = deque()
        self.lends: deque[SlotRequest] = deque()
        self.writes: deque[SlotRequest] = deque()

    def __bool__(self) -> bool:
        """Whether anybody waits."""
        return bool(self.loads or self.lends or self.writes)

    def all(self) -> list[SlotRequest]:
        return [*self.loads, *self.lends, *self.writes]

    def add(self, request: SlotRequest) -> None:
        self._queue_of(request).append(request)

    def remove(self, request: SlotRequest) -> None:
        self._queue_of(request).remove(request)

    def __contains__(self, request: SlotRequest) -> bool:
        return request in self._queue_of(request)

    def late(self, now_s: float) -> list[SlotRequest]:
        return [r for r in self.all() if r.end_s <= now_s]

    def next_end_s(self) -> float:
        return min((r.end_s for r in self.all()), default=math.inf)

    def next(self, room: Room) -> SlotRequest | None:
        """The request that is to be granted now; it stays in its queue."""
        capped: set[str] = set()
        request, short = _first(self.loads, room, 0, capped)
        if request is None:
            request, _ = _first(self.lends, room, 0, capped)
        if request is None:
            request = self._store_with_pages_of_its_own(room, capped)
        if request is None and not short:
            request, _ = _first(self.writes, room, room.reserve, capped)
        return request

    def pages_short(self, room: Room) -> int:
        """Pages that must become free before all loads and the first write can be granted."""
        need = sum(r.count for r in self.loads)
        if self.writes:
            need += self.writes[0].count + room.reserve
        return max(0, need + room.for_stores - room.free) if need else 0

    def _store_with_pages_of_its_own(self, room: Room, capped: set[str]) -> SlotRequest | None:
        for request in self.writes:
            if request.is_store and request.count <= room.for_stores:
                return None if _is_capped(request, room, capped) else request
        return None

    def _queue_of(self, request: SlotRequest) -> deque[SlotRequest]:
        if not request.pages_needed:
            return self.lends
        return self.loads if request.kind is SlotKind.LOAD else self.writes


def _first(
    queue: deque[SlotRequest], room: Room, keep_free: int, capped: set[str]
) -> tuple[SlotRequest | None, bool]:
    """The first request of a queue that can be granted; or whether one waits for pages."""
    for request in queue:
        if _is_capped(request, room, capped):
            continue
        keep = keep_free + (0 if request.is_store else room.for_stores)
        if request.pages_needed and room.free < request.count + keep:
            return None, True
        return request, False
    return None, False


def _is_capped(request: SlotRequest, room: Room, capped: set[str]) -> bool:
    """Whether it waits for its backend's share, or behind one that does."""
    if request.backend is None:
        return False
    cap = room.load_cap if request.kind is SlotKind.LOAD else room.write_cap
    if room.lent.get(request.backend, 0) + request.count > cap:
        capped.add(request.backend)
    return request.backend in capped
