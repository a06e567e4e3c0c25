"""`PinnedHostBufferPool`: host pages, page-first, in one shared mapping, lent to one use each."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from kvstrata.errors import ConfigError, IntegrityError, Where
from kvstrata.handles import Tier
from kvstrata.staging.base import SlotKind, SlotRequest, Slots, StagingSettings
from kvstrata.staging.memory import SharedRegion, aligned
from kvstrata.staging.pages import Pages, PageTable

MIN_PAGES = 4
"""Fewer cannot hold a load and a write at the same time with a reserve between them."""


class PinnedHostBufferPool:
    """Host pages of every component, with queues that let loads go first.

    A host page holds all layers of one page of one component, contiguous, at a 4 KiB border. Every
    component has the same number of pages; each has a `PageTable`. Requests are granted in order
    within a kind, loads ahead of writes. Writes leave `load_reserve` pages free; one backend holds
    at most `backend_cap` pages, quarantined ones included.

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
        order: Pages | None = None,
    ) -> None:
        self.page_bytes = dict(page_bytes)
        self.stride = {name: aligned(nbytes) for name, nbytes in page_bytes.items()}
        self.pages = settings.total_bytes // sum(self.stride.values())
        if self.pages < MIN_PAGES:
            need = MIN_PAGES * sum(self.stride.values())
            raise ConfigError(
                f"staging of {settings.total_bytes} bytes holds {self.pages} pages",
                where=Where(key="staging.bytes"),
                remedy=f"give it at least {need} bytes ({MIN_PAGES} pages)",
            )
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
                runtime_id, Tier.L2, name, self.pages, stamp_source=stamp_source, order=order
            )
            offset += nbytes
        self.reserve_pages = max(1, int(self.pages * settings.load_reserve))
        self.cap_pages = max(1, int(self.pages * settings.backend_cap))
        self._lent: Counter[str] = Counter()
        self._loads: deque[SlotRequest] = deque()
        self._writes: deque[SlotRequest] = deque()
        self._lends: deque[SlotRequest] = deque()
        self._granting = False

    # ── memory ───────────────────────────────────────────────────────────────────────────────────

    def array(self, component: str) -> npt.NDArray[np.uint8]:
        """All host pages of a component: uint8 [pages, stride]; a page's bytes come first."""
        return self._arrays[component]

    def payload(self, component: str, page: int) -> memoryview:
        """The bytes of one page, writable. Whoever lends it keeps the page until it is returned."""
        start = page * self.stride[component]
        return self._views[component][start : start + self.page_bytes[component]]

    # ── taking and returning ─────────────────────────────────────────────────────────────────────

    @property
    def load_window(self) -> int:
        """The most pages that one load may ask for."""
        return self.cap_pages

    @property
    def write_window(self) -> int:
        """The most pages that one write may ask for."""
        return max(1, min(self.cap_pages, self.pages - self.reserve_pages))

    def request(self, request: SlotRequest) -> None:
        """Queue for pages; grants what can be granted at once."""
        most = self.load_window if request.kind is SlotKind.LOAD else self.write_window
        if request.backend is None and request.kind is SlotKind.LOAD:
            most = self.pages
        if request.count > most:
            request.refuse("capacity")
            return
        if not request.pages_needed:
            self._lends.append(request)
        elif request.kind is SlotKind.LOAD:
            self._loads.append(request)
        else:
            self._writes.append(request)
        self.pump()

    def give_back(self, slots: Slots) -> None:
        """Return the holds of pages; those that nobody claims become free for the queue."""
        for name, pages in slots.items():
            self.tables[name].release(pages)
        self.pump()

    def end_lend(self, backend: str, count: int) -> None:
        """The backend does not touch `count` pages any more."""
        self._lent[backend] -= count
        if self._lent[backend] < 0:
            raise IntegrityError(f"backend {backend!r} gave back more pages than it was lent")
        self.pump()

    def lent(self, backend: str) -> int:
        return self._lent[backend]

    def pump(self) -> None:
        """Grant from the heads of the queues, loads first. Call it whenever pages became free."""
        if self._granting:
            return  # a grant callback freed pages: the loop below goes on
        self._granting = True
        try:
            while self._grant_some():
                pass
        finally:
            self._granting = False

    def _grant_some(self) -> bool:
        """Loads first, then lends (they make host pages free), then writes.

        A load that waits for pages keeps writes from taking them; it never waits for a write that
        needs pages, so the order cannot wedge.
        """
        granted = self._grant_head(self._loads, 0) or self._grant_head(self._lends, 0)
        if granted or self._loads:
            return granted
        return self._grant_head(self._writes, self.reserve_pages)

    def _grant_head(self, queue: deque[SlotRequest], keep_free: int) -> bool:
        while queue and queue[0].cancelled:
            queue.popleft().refuse("cancelled")
        if not queue:
            return False
        head = queue[0]
        if head.backend is not None and self._lent[head.backend] + head.count > self.cap_pages:
            return False
        slots: dict[str, Pages] = {}
        if head.pages_needed:
            if self.free < head.count + keep_free:
                return False
            slots = {name: table.reserve(head.count) for name, table in self.tables.items()}
        queue.popleft()
        if head.backend is not None:
            self._lent[head.backend] += head.count
        head.grant(slots)
        return True

    # ── reports ──────────────────────────────────────────────────────────────────────────────────

    @property
    def free(self) -> int:
        return min(table.free for table in self.tables.values())

    @property
    def freeing(self) -> int:
        return min(table.freeing for table in self.tables.values())

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
        if self._loads and not self._granting and self._loads[0].backend is None:
            head = self._loads[0]
            if not head.cancelled and head.count <= self.free:
                raise IntegrityError("a load waits although its pages are free")

    def close(self) -> None:
        """Refuse what waits and give the descriptor up."""
        for queue in (self._loads, self._lends, self._writes):
            while queue:
                queue.popleft().refuse("closed")
        self._views.clear()
        self.region.close()
