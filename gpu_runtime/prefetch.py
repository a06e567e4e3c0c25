"""Prefetch: L3 → L2 pages that stay, or L3 → L1 through the window."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.boundary import Prefetch, PrefetchReady
from kvstrata.gpu_runtime.core import PageSet, RuntimeCore
from kvstrata.gpu_runtime.move import Move
from kvstrata.gpu_runtime.transfers import (
    ComponentJobs,
    Copies,
    chunk_pages,
    chunks_of,
    part_of,
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
    cause: str = ""
    """Why the page after them is not."""
    released: bool = False
    """Whether the backend is done with the host pages."""

    @property
    def count(self) -> int:
        return self.stop - self.start


class _Load(Move):
    def __init__(self, core: RuntimeCore, copies: Copies, action: Prefetch, window: int) -> None:
        """`window`: the most pages of a chunk, whatever their size."""
        super().__init__(core, copies, action.action_id, action.deadline_s)
        self.keys = action.keys
        most = min(chunk_pages(max(core.staging.page_bytes.values())), max(1, window))
        self.chunks = [_Chunk(a, b) for a, b in chunks_of(self.keys.page_count, most)]
        self.cause = ""
        """Why no further chunk is asked for."""

    def n_valid(self) -> int:
        n = 0
        for chunk in self.chunks:
            n += max(chunk.valid, 0)
            if chunk.valid < chunk.count:
                break
        return n

    def end_with(self, n: int, extents: Extents) -> None:
        cause = ""
        if n < self.keys.page_count:
            short = next(c for c in self.chunks if c.valid < c.count)
            cause = short.cause or self.cause or "cancelled"
        self.end(PrefetchReady(action_id=self.action_id, n_valid=n, extents=extents, cause=cause))


class PrefetchToL2(_Load):
    """All host pages are taken at once; the chunks load in parallel."""

    def __init__(self, core: RuntimeCore, copies: Copies, action: Prefetch) -> None:
        super().__init__(core, copies, action, action.keys.page_count)
        self.slots: Slots = {}
        self.request = SlotRequest(
            SlotKind.LOAD,
            self.keys.page_count,
            self._granted,
            self._refused,
            backend=self.lender,
            end_s=self.end_s,
        )
        core.staging.request(self.request)

    def cancel(self) -> None:
        super().cancel()
        self.core.staging.cancel(self.request)

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
            chunk.valid, chunk.cause = n, cause
            if all(c.valid >= 0 for c in self.chunks):
                self._settle()

        def released() -> None:
            chunk.released = True
            self.core.staging.end_lend(self.lender, chunk.count)
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
        super().__init__(core, copies, action, core.staging.load_window // STREAM_DEPTH)
        self.target: PageSet = {}
        self.next = 0
        self.running = 0
        self._requests: list[SlotRequest] = []
        """Those that wait for host pages."""

    def cancel(self) -> None:
        super().cancel()
        for request in list(self._requests):
            self.core.staging.cancel(request)

    def start(self, target: PageSet) -> None:
        """Go, with the device pages that it fills."""
        self.target = target
        for name, pages in target.items():
            self.core.tables[name].begin_load(pages)
        self._advance()

    def give_up(self, cause: str) -> None:
        """It got no device pages."""
        self.cause = cause
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
        def granted(slots: Slots) -> None:
            self._requests.remove(request)
            self._load(chunk, slots)

        def refused(cause: str) -> None:
            self._requests.remove(request)
            self._chunk_done(chunk, 0, cause)

        request = SlotRequest(
            SlotKind.LOAD,
            chunk.count,
            granted,
            refused,
            backend=self.lender,
            end_s=self.end_s,
        )
        self._requests.append(request)
        self.core.staging.request(request)

    def _load(self, chunk: _Chunk, slots: Slots) -> None:
        copying = [True]
        for name, pages in slots.items():
            self.core.staging.tables[name].begin_load(pages)

        def give_back() -> None:
            if chunk.released and not copying[0]:
                self.core.staging.give_back(slots)

        def copied(n: int, cause: str) -> None:
            copying[0] = False
            give_back()
            self._chunk_done(chunk, n, cause)

        def done(n: int, cause: str) -> None:
            if not chunk.released:
                _quarantine(self.core, part_of(slots, n, chunk.count))
            if n == 0:
                copied(0, cause)
                return
            target = part_of(self.target, chunk.start, chunk.start + n)
            source = part_of(slots, 0, n)
            self.copies.h2d(source, target, lambda e: copied(0 if e else n, e or cause))

        def released() -> None:
            chunk.released = True
            self.core.staging.end_lend(self.lender, chunk.count)
            give_back()

        keys = self.keys.slice(chunk.start, chunk.stop)
        ComponentJobs(
            self.core, keys, slots, self.remaining_s(), load=True, done=done, released=released
        )

    def _chunk_done(self, chunk: _Chunk, n: int, cause: str) -> None:
        chunk.valid, chunk.cause = n, cause
        self.cause = self.cause or cause
        self.running -= 1
        self._advance()


def _quarantine(core: RuntimeCore, slots: Slots) -> None:
    for name, pages in slots.items():
        core.staging.tables[name].quarantine(pages)
