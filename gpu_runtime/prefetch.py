"""Prefetch: L3 → L2 pages that stay, or L3 → L1 through the window."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvstrata.boundary import Prefetch, PrefetchReady
from kvstrata.errors import CapacityError
from kvstrata.gpu_runtime.core import PageSet, RuntimeCore
from kvstrata.gpu_runtime.move import Move
from kvstrata.gpu_runtime.transfers import (
    CHUNK_PAGES,
    ComponentJobs,
    Copies,
    chunks_of,
    part_of,
    reserve_all,
    settle_l1,
)
from kvstrata.handles import Extents, Tier
from kvstrata.staging import SlotKind, SlotRequest, Slots

STREAM_DEPTH = 2
"""Chunks of one prefetch under way at once: one loads while the other is copied."""


@dataclass(eq=False, slots=True)
class _Chunk:
    start: int
    stop: int
    valid: int = -1
    """Leading pages that are good; -1 while unknown."""
    released: bool = False
    """Whether the backend is done with the host pages."""

    @property
    def count(self) -> int:
        return self.stop - self.start


class _Load(Move):
    def __init__(self, core: RuntimeCore, copies: Copies, action: Prefetch, most: int) -> None:
        super().__init__(core, copies, action.action_id)
        self.keys = action.keys
        self.end_s = core.now() + action.deadline_s
        self.chunks = [_Chunk(a, b) for a, b in chunks_of(self.keys.page_count, most)]
        self.cause = ""

    def remaining_s(self) -> float:
        return max(0.0, self.end_s - self.core.now())

    def n_valid(self) -> int:
        n = 0
        for chunk in self.chunks:
            n += max(chunk.valid, 0)
            if chunk.valid < chunk.count:
                break
        return n

    def end_with(self, n: int, extents: Extents) -> None:
        cause = "" if n == self.keys.page_count else self.cause or "cancelled"
        self.end(PrefetchReady(action_id=self.action_id, n_valid=n, extents=extents, cause=cause))


class PrefetchToL2(_Load):
    """All host pages are taken at once; the chunks load in parallel."""

    def __init__(self, core: RuntimeCore, copies: Copies, action: Prefetch) -> None:
        super().__init__(core, copies, action, CHUNK_PAGES)
        self.slots: Slots = {}
        self.request = SlotRequest(
            SlotKind.LOAD,
            self.keys.page_count,
            self._granted,
            self._refused,
            backend=core.backend_name,
        )
        core.staging.request(self.request)

    def cancel(self) -> None:
        super().cancel()
        self.request.cancelled = True
        self.core.staging.pump()

    def _refused(self, cause: str) -> None:
        self.cause = cause
        self.end_with(0, ())

    def _granted(self, slots: Slots) -> None:
        self.slots = slots
        for name, pages in slots.items():
            self.core.staging.tables[name].begin_load(pages)
        for chunk in self.chunks:
            self._load(chunk)

    def _load(self, chunk: _Chunk) -> None:
        def done(n: int, cause: str) -> None:
            chunk.valid = n
            if n < chunk.count:
                self.cause = self.cause or cause
            if all(c.valid >= 0 for c in self.chunks):
                self._settle()

        def released() -> None:
            chunk.released = True
            self.core.staging.end_lend(self.core.backend_name, chunk.count)
            if self.ended:
                self._free_tail(chunk, self.n_valid())

        ComponentJobs(
            self.core,
            self.keys.slice(chunk.start, chunk.stop),
            part_of(self.slots, chunk.start, chunk.stop),
            self.remaining_s(),
            load=True,
            done=done,
            released=released,
        )

    def _settle(self) -> None:
        n = self.n_valid()
        good = part_of(self.slots, 0, n)
        for name, pages in good.items():
            self.core.staging.tables[name].ready(pages)
        extents = self.core.claim(Tier.L2, good)
        for chunk in self.chunks:
            if not chunk.released:
                tail = part_of(self.slots, max(chunk.start, n), chunk.stop)
                for name, pages in tail.items():
                    self.core.staging.tables[name].quarantine(pages)
        self.end_with(n, extents)
        self.core.staging.give_back(good)
        for chunk in self.chunks:
            if chunk.released:
                self._free_tail(chunk, n)

    def _free_tail(self, chunk: _Chunk, n: int) -> None:
        """Host pages of a chunk that hold nothing, when nobody writes into them any more."""
        start = max(chunk.start, n)
        if start < chunk.stop:
            self.core.staging.give_back(part_of(self.slots, start, chunk.stop))


class PrefetchToL1(_Load):
    """Device pages are reserved at its start; host pages are a window that the chunks share."""

    def __init__(self, core: RuntimeCore, copies: Copies, action: Prefetch) -> None:
        window = core.staging.load_window
        super().__init__(core, copies, action, max(1, min(CHUNK_PAGES, window // STREAM_DEPTH)))
        self.target: PageSet = {}
        self.next = 0
        self.running = 0

    def start(self, target: PageSet) -> None:
        """Go, with the device pages that it fills."""
        self.target = target
        for name, pages in target.items():
            self.core.tables[name].begin_load(pages)
        self._advance()

    def give_up(self) -> None:
        """It got no device pages."""
        self.end_with(0, ())

    def _advance(self) -> None:
        """Keep STREAM_DEPTH chunks under way; end when the last has ended."""
        while self.running < STREAM_DEPTH and self.next < len(self.chunks):
            if self.cause or self.cancelled:
                break
            chunk = self.chunks[self.next]
            self.next += 1
            self.running += 1
            self._ask(chunk)
        if self.running == 0 and not self.ended:
            n = self.n_valid()
            self.end_with(n, settle_l1(self.core, self.target, n))

    def _ask(self, chunk: _Chunk) -> None:
        def refused(cause: str) -> None:
            self.cause = self.cause or cause
            self._chunk_done(chunk, 0)

        self.core.staging.request(
            SlotRequest(
                SlotKind.LOAD,
                chunk.count,
                lambda slots: self._load(chunk, slots),
                refused,
                backend=self.core.backend_name,
            )
        )

    def _load(self, chunk: _Chunk, slots: Slots) -> None:
        copying = [True]
        for name, pages in slots.items():
            self.core.staging.tables[name].begin_load(pages)

        def give_back() -> None:
            if chunk.released and not copying[0]:
                self.core.staging.give_back(slots)

        def copied(n: int, error: str) -> None:
            copying[0] = False
            if error:
                self.cause, n = self.cause or error, 0
            give_back()
            self._chunk_done(chunk, n)

        def done(n: int, cause: str) -> None:
            if n < chunk.count:
                self.cause = self.cause or cause
            if not chunk.released:
                _quarantine(self.core, part_of(slots, n, chunk.count))
            if n == 0:
                copied(0, "")
                return
            target = part_of(self.target, chunk.start, chunk.start + n)
            self.copies.h2d(part_of(slots, 0, n), target, lambda error: copied(n, error))

        def released() -> None:
            chunk.released = True
            self.core.staging.end_lend(self.core.backend_name, chunk.count)
            give_back()

        keys = self.keys.slice(chunk.start, chunk.stop)
        ComponentJobs(
            self.core, keys, slots, self.remaining_s(), load=True, done=done, released=released
        )

    def _chunk_done(self, chunk: _Chunk, n: int) -> None:
        chunk.valid = n
        self.running -= 1
        self._advance()


def _quarantine(core: RuntimeCore, slots: Slots) -> None:
    for name, pages in slots.items():
        core.staging.tables[name].quarantine(pages)


class DevicePageQueue:
    """Prefetches to L1 that wait for pages that are being freed; first come, first served.

    One that even those pages cannot satisfy ends at once, with cause "capacity": only control can
    make room then. Under the runtime's lock.
    """

    def __init__(self, core: RuntimeCore, copies: Copies) -> None:
        self._core, self._copies = core, copies
        self._waiting: deque[PrefetchToL1] = deque()

    def join(self, action: Prefetch) -> Move:
        move = PrefetchToL1(self._core, self._copies, action)
        self._waiting.append(move)
        self.pump()
        return move

    def pump(self) -> None:
        """Call it whenever device pages became free."""
        while self._waiting:
            move = self._waiting[0]
            if not (move.cancelled or self._can_wait_for(move)):
                move.cause = "capacity"
            if move.cause or move.cancelled or move.remaining_s() <= 0:
                self._waiting.popleft()
                move.give_up()
                continue
            try:
                target = reserve_all(self._core, move.keys.page_count)
            except CapacityError:
                return
            self._waiting.popleft()
            move.start(target)

    def _can_wait_for(self, move: PrefetchToL1) -> bool:
        need = move.keys.page_count
        return all(need <= t.free + t.freeing for t in self._core.tables.values())
