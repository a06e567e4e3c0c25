"""`PinnedHostBufferPool`: host pages, page-first, in one shared mapping, lent to one use each."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from kvstrata.errors import IntegrityError
from kvstrata.handles import Tier
from kvstrata.staging.base import SlotKind, SlotRequest, Slots, StagingSettings
from kvstrata.staging.memory import SharedRegion, aligned
from kvstrata.staging.pages import Pages, PageTable

PIN_CHUNK_BYTES = 1 << 30
"""Memory is registered with the device in chunks of this size: drivers limit single regions."""


class PinnedHostBufferPool:
    """Host pages of every component, with queues that let loads go first.

    A host page holds all layers of one page of one component, contiguous, at a 4 KiB border. Every
    component has the same number of pages; each has a `PageTable`. Requests are granted in order
    within a kind, loads ahead of writes, and a backend that holds all it may holds up nobody else.
    Writes leave `load_reserve` pages free. One backend holds at most `backend_cap` pages,
    quarantined ones included, of which writes leave the reserve to loads as well.

    Not locked: the runtime calls everything under its own lock; `grant` and `refuse` callbacks run
    under it too and may enqueue device work, but never wait.
    """

    def __init__(
        self,
        runtime_id: int,
        page_bytes: Mapping[str, int],
        settings: StagingSettings,
        *,
        stamp_source: Iterator[int] | None = None,
        order: Callable[[int], Pages] | None = None,
    ) -> None:
        self.page_bytes = dict(page_bytes)
        self.stride = {name: aligned(nbytes) for name, nbytes in page_bytes.items()}
        self.pages = settings.page_count(sum(self.stride.values()))
        self.region = SharedRegion(self.pages * sum(self.stride.values()))
        self.tables: dict[str, PageTable] = {}
        self._arrays: dict[str, npt.NDArray[np.uint8]] = {}
        self._views: dict[str, memoryview] = {}
        offset = 0
        for name, stride in self.stride.items():
            nbytes = self.pages * stride
            self._arrays[name] = self.region.array[offset : offset + nbytes].reshape(-1, stride)
            self._views[name] = self.region.view[offset : offset + nbytes]
            self.tables[name] = PageTable(
                runtime_id,
                Tier.L2,
                name,
                self.pages,
                stamp_source=stamp_source,
                order=order(self.pages) if order else None,
            )
            offset += nbytes
        self.reserve_pages = min(self.pages - 1, max(1, int(self.pages * settings.load_reserve)))
        self.cap_pages = max(1, int(self.pages * settings.backend_cap))
        self._lent: Counter[str] = Counter()
        self._loads: deque[SlotRequest] = deque()
        self._writes: deque[SlotRequest] = deque()
        self._lends: deque[SlotRequest] = deque()
        self._granting = False
        self._stopped = ""

    # ── memory ───────────────────────────────────────────────────────────────────────────────────

    def array(self, component: str) -> npt.NDArray[np.uint8]:
        """All host pages of a component: uint8 [pages, stride]; a page's bytes come first."""
        return self._arrays[component]

    def pin_chunks(self) -> tuple[int, list[int], dict[str, int]]:
        """For `Device.pin`: the address, chunks that end at page borders, and pages a chunk."""
        pages = {name: max(1, PIN_CHUNK_BYTES // stride) for name, stride in self.stride.items()}
        chunks = [
            min(pages[name], self.pages - first) * stride
            for name, stride in self.stride.items()
            for first in range(0, self.pages, pages[name])
        ]
        return self.region.array.ctypes.data, chunks, pages

    def payload(self, component: str, page: int) -> memoryview:
        """The bytes of one page, writable. Whoever lends it keeps the page until it is returned."""
        start = page * self.stride[component]
        return self._views[component][start : start + self.page_bytes[component]]

    # ── taking and returning ─────────────────────────────────────────────────────────────────────

    @property
    def load_window(self) -> int:
        """The most pages that one load of a backend may ask for."""
        return self.cap_pages

    @property
    def write_window(self) -> int:
        """The most pages that one write to a backend may ask for."""
        return min(self._write_cap, self.pages - self.reserve_pages)

    @property
    def _write_cap(self) -> int:
        return max(1, self.cap_pages - self.reserve_pages)

    def request(self, request: SlotRequest) -> None:
        """Queue for pages; grants what can be granted at once."""
        cause = self._stopped or ("capacity" if request.count > self._most(request) else "")
        if cause:
            request.refuse(cause)
            return
        self._queue_of(request).append(request)
        self.pump()

    def cancel(self, request: SlotRequest) -> None:
        """Refuse a request that waits; nothing happens to one that was granted or refused."""
        if request in self._queue_of(request):
            self._refuse([request], "cancelled")

    def expire(self, now_s: float) -> float:
        """Refuse what has waited until its `end_s`; returns the next `end_s` (infinite: none)."""
        waiting = [r for queue in self._queues for r in queue]
        late = [r for r in waiting if r.end_s <= now_s]
        if late:
            self._refuse(late, "timeout")
        return min((r.end_s for queue in self._queues for r in queue), default=math.inf)

    def give_back(self, slots: Slots) -> None:
        """Return the holds of pages; those that nobody claims become free for the queue."""
        for name, pages in slots.items():
            self.tables[name].release(pages)
        self.pump()

    def end_lend(self, backend: str, count: int) -> None:
        """The backend does not touch `count` pages any more."""
        if count > self._lent[backend]:
            raise IntegrityError(f"backend {backend!r} gave back more pages than it was lent")
        self._lent[backend] -= count
        self.pump()

    def lent(self, backend: str) -> int:
        return self._lent[backend]

    def pump(self) -> None:
        """Grant what can be granted. Call it whenever pages became free."""
        if self._granting:
            return  # a grant callback freed pages: the loop below goes on
        self._granting = True
        try:
            while (request := self._next()) is not None:
                self._grant(request)
        finally:
            self._granting = False

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    @property
    def _queues(self) -> tuple[deque[SlotRequest], ...]:
        return (self._loads, self._lends, self._writes)

    def _queue_of(self, request: SlotRequest) -> deque[SlotRequest]:
        if not request.pages_needed:
            return self._lends
        return self._loads if request.kind is SlotKind.LOAD else self._writes

    def _most(self, request: SlotRequest) -> int:
        """The most pages that a request of this kind can ever get."""
        if request.backend is not None:
            return self.load_window if request.kind is SlotKind.LOAD else self.write_window
        return self.pages if request.kind is SlotKind.LOAD else self.pages - self.reserve_pages

    def _next(self) -> SlotRequest | None:
        """What is to be granted now: loads first, then lends (they make host pages free), then
        writes.

        A load that waits for pages keeps writes from taking them; it never waits for a write that
        needs pages, so the order cannot wedge. What waits for its backend's share keeps only that
        backend's later and lesser requests waiting.
        """
        capped: set[str] = set()
        request, short = self._first(self._loads, 0, capped)
        if request is None:
            request, _ = self._first(self._lends, 0, capped)
        if request is None and not short:
            request, _ = self._first(self._writes, self.reserve_pages, capped)
        return request

    def _first(
        self, queue: deque[SlotRequest], keep_free: int, capped: set[str]
    ) -> tuple[SlotRequest | None, bool]:
        """The first request of a queue that can be granted; or whether one waits for pages."""
        for request in queue:
            backend = request.backend
            if backend is not None:
                cap = self.cap_pages if request.kind is SlotKind.LOAD else self._write_cap
                if self._lent[backend] + request.count > cap:
                    capped.add(backend)
                if backend in capped:
                    continue
            if request.pages_needed and self.free < request.count + keep_free:
                return None, True
            return request, False
        return None, False

    def _grant(self, request: SlotRequest) -> None:
        self._queue_of(request).remove(request)
        slots: dict[str, Pages] = {}
        if request.pages_needed:
            slots = {name: table.reserve(request.count) for name, table in self.tables.items()}
        if request.backend is not None:
            self._lent[request.backend] += request.count
        request.grant(slots)

    def _refuse(self, requests: list[SlotRequest], cause: str) -> None:
        for request in requests:  # all leave first: a callback may look at the queues
            self._queue_of(request).remove(request)
        for request in requests:
            request.refuse(cause)
        self.pump()

    # ── reports ──────────────────────────────────────────────────────────────────────────────────

    @property
    def free(self) -> int:
        return min(table.free for table in self.tables.values())

    @property
    def freeing(self) -> int:
        """Pages that become free soon, by themselves."""
        return min(table.freeing - table.stuck for table in self.tables.values())

    @property
    def waiting(self) -> int:
        """Pages that must become free before all loads and the first write can be granted."""
        need = sum(r.count for r in self._loads)
        if self._writes:
            need += self._writes[0].count + self.reserve_pages
        return max(0, need - self.free)

    @property
    def queued(self) -> tuple[int, int]:
        """Requests in the queues: loads, writes (those that only lend included)."""
        return len(self._loads), len(self._writes) + len(self._lends)

    def check_integrity(self) -> None:
        for table in self.tables.values():
            table.check_integrity()
        over = {b: n for b, n in self._lent.items() if n > self.cap_pages or n < 0}
        if over:
            raise IntegrityError(f"lent beyond the cap of {self.cap_pages}: {over}")
        if not self._granting and (stuck := self._next()) is not None:
            raise IntegrityError(f"waits although it could be granted: {stuck}")
        if self._stopped and any(self._queues):
            raise IntegrityError("requests wait in a pool that has stopped")

    # ── end ──────────────────────────────────────────────────────────────────────────────────────

    def stop(self, cause: str) -> None:
        """From now on nothing is granted: what waits and what comes is refused with `cause`."""
        self._stopped = cause
        self._refuse([r for queue in self._queues for r in queue], cause)

    def close(self) -> None:
        """Stop, and give the memory's descriptor up. Idempotent."""
        self.stop("closed")
        self._views.clear()
        self.region.close()
