"""`PinnedHostBufferPool`: host pages, page-first, in one shared mapping, lent to one use each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from kvstrata.errors import IntegrityError
from kvstrata.handles import Tier
from kvstrata.staging.base import SlotKind, SlotRequest, Slots, StagingSettings
from kvstrata.staging.memory import SharedRegion, aligned
from kvstrata.staging.pages import Pages, PageTable
from kvstrata.staging.waiting import Room, Waiting

PIN_CHUNK_BYTES = 1 << 30
"""Memory is registered with the device in chunks of this size: drivers limit single regions."""


class PinnedHostBufferPool:
    """Host pages of every component, with queues that let loads go first.

    A host page holds all layers of one page of one component, contiguous, at a 4 KiB border. Every
    component has the same number of pages; each has a `PageTable`. Requests are granted in order
    within a kind, loads ahead of writes, and a backend that holds all it may holds up nobody else.
    Writes leave `load_reserve` pages free. One backend holds at most `backend_cap` pages,
    quarantined ones included, of which writes leave the reserve to loads as well. Where pages
    stay (cache mode), `store_share` of them is left to stores: writes of a backend, whose pages
    come back by themselves. A page may wait to be free until it was stored, behind other stores;
    so a store must not wait for a page to become free.

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
        store_share: float = 0.0,
    ) -> None:
        self.page_bytes = dict(page_bytes)
        self._first_name = next(iter(page_bytes))
        self.stride = {name: aligned(nbytes) for name, nbytes in page_bytes.items()}
        self.pages = settings.page_count(sum(self.stride.values()))
        nbytes = self.pages * sum(self.stride.values())
        self.region = SharedRegion(nbytes, huge_pages=settings.huge_pages)
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
        self.store_pages = max(1, int(self.pages * store_share)) if store_share else 0
        reserve = max(1, int(self.pages * settings.load_reserve))
        self.reserve_pages = min(self.pages - self.store_pages - 1, reserve)
        self.cap_pages = max(1, int(self.pages * settings.backend_cap))
        self._lent: Counter[str] = Counter()
        self._in_store = np.zeros(self.pages, np.bool_)
        """Pages of the first component that stores use now."""
        self._waiting = Waiting()
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
        return min(self.cap_pages, self.pages - self.store_pages)

    @property
    def write_window(self) -> int:
        """The most pages that one write to a backend may ask for."""
        return min(self._write_cap, self.pages - self.reserve_pages)

    @property
    def store_window(self) -> int:
        """The most pages of one store that is granted however full the pool is."""
        return self.store_pages or self.write_window

    @property
    def _write_cap(self) -> int:
        return max(1, self.cap_pages - self.reserve_pages)

    def request(self, request: SlotRequest) -> None:
        """Queue for pages; grants what can be granted at once."""
        cause = self._stopped or ("capacity" if request.count > self._most(request) else "")
        if cause:
            request.refuse(cause)
            return
        self._waiting.add(request)
        self.pump()

    def cancel(self, request: SlotRequest) -> None:
        """Refuse a request that waits; nothing happens to one that was granted or refused."""
        if request in self._waiting:
            self._refuse([request], "cancelled")

    def expire(self, now_s: float) -> float:
        """Refuse what has waited until its `end_s`; returns the next `end_s` (infinite: none)."""
        late = self._waiting.late(now_s)
        if late:
            self._refuse(late, "timeout")
        return self._waiting.next_end_s()

    def give_back(self, slots: Slots) -> None:
        """Return the holds of pages; those that nobody claims become free for the queue."""
        for name, pages in slots.items():
            self.tables[name].release(pages)
        self._in_store[slots.get(self._first_name, [])] = False
        self.pump()

    def end_lend(self, backend: str, count: int) -> None:
        """The backend does not touch `count` pages any more."""
        if count > self._lent[backend]:
            raise IntegrityError(f"backend {backend!r} gave back more pages than it was lent")
        self._lent[backend] -= count
        self.pump()

    def refuse_stuck(self, backend: str) -> int:
        """Refuse, as "unavailable", what would exceed the share of `backend` while it holds all of
        that beyond a deadline: nobody knows until when it would wait. How many were refused."""
        lent = self._lent[backend]
        if not lent or min(table.stuck for table in self.tables.values()) < self._lent.total():
            return 0  # some of it comes back by itself
        hopeless = []
        for request in self._waiting.all():
            cap = self.cap_pages if request.kind is SlotKind.LOAD else self._write_cap
            if request.backend == backend and lent + request.count > cap:
                hopeless.append(request)
        if hopeless:
            self._refuse(hopeless, "unavailable")
        return len(hopeless)

    def lent(self, backend: str) -> int:
        return self._lent[backend]

    def pump(self) -> None:
        """Grant what can be granted. Call it whenever pages became free."""
        if self._granting:
            return  # a grant callback freed pages: the loop below goes on
        self._granting = True
        try:
            while self._waiting and (request := self._waiting.next(self._room())) is not None:
                self._grant(request)
        finally:
            self._granting = False

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _most(self, request: SlotRequest) -> int:
        """The most pages that a request of this kind can ever get."""
        if request.backend is not None:
            return self.load_window if request.kind is SlotKind.LOAD else self.write_window
        stay = self.pages - self.store_pages
        return stay if request.kind is SlotKind.LOAD else stay - self.reserve_pages

    def _room(self) -> Room:
        in_store = int(np.count_nonzero(self._in_store)) if self.store_pages else 0
        return Room(
            free=self.free,
            reserve=self.reserve_pages,
            for_stores=max(0, self.store_pages - in_store),
            lent=self._lent,
            load_cap=self.cap_pages,
            write_cap=self._write_cap,
        )

    def _grant(self, request: SlotRequest) -> None:
        self._waiting.remove(request)
        slots: dict[str, Pages] = {}
        if request.pages_needed:
            slots = {name: table.reserve(request.count) for name, table in self.tables.items()}
        if request.backend is not None:
            self._lent[request.backend] += request.count
        if request.is_store and slots:
            self._in_store[slots[self._first_name]] = True
        request.grant(slots)

    def _refuse(self, requests: list[SlotRequest], cause: str) -> None:
        for request in requests:  # all leave first: a callback may look at the queues
            self._waiting.remove(request)
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
        return self._waiting.pages_short(self._room())

    @property
    def reserve(self) -> int:
        """Pages that a write leaves free which is no store."""
        return self.reserve_pages + self.store_pages

    @property
    def queued(self) -> tuple[int, int]:
        """Requests in the queues: loads, writes (those that only lend included)."""
        waiting = self._waiting
        return len(waiting.loads), len(waiting.writes) + len(waiting.lends)

    def check_integrity(self) -> None:
        for table in self.tables.values():
            table.check_integrity()
        over = {b: n for b, n in self._lent.items() if n > self.cap_pages or n < 0}
        if over:
            raise IntegrityError(f"lent beyond the cap of {self.cap_pages}: {over}")
        room = self._room()
        if room.free < room.for_stores:
            raise IntegrityError(f"{room.for_stores} pages are kept for stores, {room.free} free")
        if not self._granting and (stuck := self._waiting.next(room)) is not None:
            raise IntegrityError(f"waits although it could be granted: {stuck}")
        if self._stopped and self._waiting.all():
            raise IntegrityError("requests wait in a pool that has stopped")

    # ── end ──────────────────────────────────────────────────────────────────────────────────────

    def stop(self, cause: str) -> None:
        """From now on nothing is granted: what waits and what comes is refused with `cause`."""
        self._stopped = cause
        self._refuse(self._waiting.all(), cause)

    def close(self) -> None:
        """Stop, and give the memory's descriptor up. Idempotent."""
        self.stop("closed")
        self._views.clear()
        self.region.close()
