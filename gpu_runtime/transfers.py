"""The pieces that moves are made of: copies between host and device pages, and storage jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from kvstrata.backends import JobResult, ObjectId, PageIO
from kvstrata.boundary import KeyRun, Outcome
from kvstrata.errors import IntegrityError
from kvstrata.gpu_runtime.base import Device, Event
from kvstrata.gpu_runtime.copy_queue import CopyPriority, CopyQueue, Slice
from kvstrata.gpu_runtime.core import PageSet, RuntimeCore, page_set_count
from kvstrata.gpu_runtime.device_pages import PageCopy
from kvstrata.handles import Extents, Tier
from kvstrata.staging import Slots

_CHUNK_PAGES = 64
_SMALL_CHUNK_PAGES, _SMALL_CHUNK_BYTES = 128, 8 << 20


def chunk_pages(page_bytes: int) -> int:
    """Most pages of one storage job and of one step through the window: 64, or up to 128 as long
    as they are 8 MiB at most. `page_bytes`: of the largest component.

    A worker makes no call of two jobs, and a call to a store over the network costs as much for
    few small pages as for many: with 128 instead of 64 a job, Mooncake moves 1.1 to 1.2 times as
    much of 64 KiB pages a second, 1.3 to 1.5 times of 32 KiB; file systems as much. More than 128
    gain nothing, and the larger a step, the less its storage and its copy overlap.
    """
    return max(_CHUNK_PAGES, min(_SMALL_CHUNK_PAGES, _SMALL_CHUNK_BYTES // page_bytes))


@dataclass(eq=False, slots=True)
class CopyResult:
    """What became of a copy. `error` is set, if at all, before its event is reached: work that
    waited for the event may look at it, long before the host's callback ran."""

    error: str = ""


@dataclass(eq=False, slots=True)
class Copy(CopyResult):
    """A copy under way."""

    event: Event = field(init=False)


class CopyQueues:
    """Both directions of one device: cuts copies into slices and queues them."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._out, self._in = CopyQueue(device.d2h), CopyQueue(device.h2d)

    def add(
        self,
        groups: Sequence[Sequence[PageCopy]],
        priority: CopyPriority,
        result: CopyResult,
        *,
        out: bool,
        enqueued: Callable[[], None] | None = None,
    ) -> list[Event]:
        """Queue copies, group after group; returns the event behind each group. `result` gets the
        first error. `enqueued` is called on the stream's thread, behind the last."""
        move = self._device.copy_out if out else self._device.copy_in
        queued = [
            [
                Slice(partial(_run, result, partial(move, part)), part.nbytes)
                for copy in group
                for part in slices_of(copy, self._device.copy_slice_bytes)
            ]
            for group in groups
        ]
        if enqueued is not None:
            last = queued[-1][-1]
            queued[-1][-1] = Slice(partial(_both, last.run, enqueued), last.nbytes)
        return (self._out if out else self._in).add(queued, priority)

    def flush(self) -> None:
        """At shutdown: nothing waits for its turn any more."""
        self._out.flush()
        self._in.flush()

    def check_integrity(self) -> None:
        self._out.check_integrity()
        self._in.check_integrity()


class Copies:
    """The two copies between host and device pages, ordered by events."""

    def __init__(self, core: RuntimeCore) -> None:
        self._core, self.queues = core, CopyQueues(core.device)

    def d2h(
        self,
        source: PageSet,
        target: Slots,
        done: Callable[[str], None],
        *,
        enqueued: Callable[[], None] | None = None,
    ) -> Copy:
        """Gather device pages into host pages. `done("")` or `done(error)` follows under the lock,
        from a device thread; the caller keeps both sides held until then. `enqueued()` comes before
        that, without the lock, from the stream's thread when all is enqueued: time for what would
        keep control, or a copy that ends later than that, waiting."""
        return self._copy(
            source, target, done, CopyPriority.WRITE_BACK, out=True, enqueued=enqueued
        )

    def h2d(
        self,
        source: Slots,
        target: PageSet,
        done: Callable[[str], None],
        priority: CopyPriority = CopyPriority.PREFETCH,
        *,
        enqueued: Callable[[], None] | None = None,
    ) -> Copy:
        """Scatter host pages into device pages; otherwise as `d2h`."""
        return self._copy(target, source, done, priority, out=False, enqueued=enqueued)

    def _copy(
        self,
        device_pages: PageSet,
        host_pages: Slots,
        done: Callable[[str], None],
        priority: CopyPriority,
        *,
        out: bool,
        enqueued: Callable[[], None] | None,
    ) -> Copy:
        core, state = self._core, Copy()
        copies = [
            PageCopy(core.pools[name], pages, core.staging.array(name), host_pages[name])
            for name, pages in device_pages.items()
        ]
        (state.event,) = self.queues.add([copies], priority, state, out=out, enqueued=enqueued)

        def finish() -> None:
            with core.callback():
                done(state.error)

        state.event.on_complete(finish)
        return state


def _run(state: CopyResult, move: Callable[[], None]) -> None:
    """One slice; after one that failed the rest of the copy is not worth its time."""
    if state.error:
        return
    try:
        move()
    except Exception as exc:  # noqa: BLE001 - a failed copy is a failed page, not a crash
        state.error = f"{type(exc).__name__}: {exc}"


def _both(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


def slices_of(copy: PageCopy, most_bytes: int) -> list[PageCopy]:
    """A copy cut into slices of `most_bytes`, or of one page where that is more.

    They go through the host's pages in order: neighbours move as one, and the bus finds where the
    next page lies beside where it found the last.
    """
    most = max(1, most_bytes * len(copy.pages) // copy.nbytes)
    order, count = np.argsort(copy.slots), len(copy.pages)
    pages, slots = copy.pages[order], copy.slots[order]
    return [
        replace(copy, pages=pages[at:end], slots=slots[at:end], is_followed=end < count)
        for at, end in chunks_of(count, most)
    ]


def objects_of(core: RuntimeCore, keys: KeyRun, component: str) -> list[ObjectId]:
    namespace = core.storage.component_namespace(keys.namespace, component)
    return [ObjectId(namespace, keys.key(i)) for i in range(keys.page_count)]


def page_ios(core: RuntimeCore, keys: KeyRun, component: str, slots: Slots) -> list[PageIO]:
    """Storage jobs for host pages, in the order of the chain."""
    objects = objects_of(core, keys, component)
    parent: ObjectId | None = None
    if keys.first_page_index > 0:
        parent = ObjectId(objects[0].namespace, keys.parent)
    pages = []
    for i, (obj, slot) in enumerate(zip(objects, slots[component].tolist(), strict=True)):
        payload = core.staging.payload(component, slot)
        pages.append(PageIO(obj, parent, keys.first_page_index + i, payload))
        parent = obj
    return pages


def reserve_all(core: RuntimeCore, count: int) -> PageSet:
    """Reserve L1 pages in every pool, all or none. Raises CapacityError."""
    for table in core.tables.values():
        table.check_room(count)
    return {name: table.reserve(count) for name, table in core.tables.items()}


def settle_l1(core: RuntimeCore, pages: PageSet, n_valid: int, named: Extents = ()) -> Extents:
    """End a fill of L1 pages that nobody writes any more: the first `n_valid` become READY and
    control's, the rest FREE. `named`: what all of them are called, if that was asked before."""
    good = {name: p[:n_valid] for name, p in pages.items()}
    for name, p in good.items():
        core.tables[name].ready(p)
    extents = core.claim(Tier.L1, good, named if n_valid == page_set_count(pages) else ())
    core.release_l1(pages)
    return extents


class ComponentJobs:
    """One storage job a component over the same pages; their results seen as one.

    `done(n, cause)` is called under the lock when the last result is there: the leading pages that
    succeeded in every component, and why the next did not. `released()` is called under the lock
    when no thread touches the buffers any more: before `done`, unless a job was given up while the
    backend had it.
    """

    def __init__(
        self,
        core: RuntimeCore,
        keys: KeyRun,
        slots: Slots,
        deadline_s: float,
        *,
        load: bool,
        done: Callable[[int, str], None],
        released: Callable[[], None],
    ) -> None:
        self._core, self._load, self._done, self._released = core, load, done, released
        self._results: list[JobResult] = []
        self._open_results = self._open_releases = len(core.pools)
        worker = core.worker
        if worker is None:
            raise IntegrityError("a storage job without a backend")
        submit = worker.load if load else worker.store
        for component in core.pools:
            pages = page_ios(core, keys, component, slots)
            submit(pages, deadline_s, self._on_done, self._on_released)

    def _on_done(self, result: JobResult) -> None:
        with self._core.callback():
            self._results.append(result)
            self._open_results -= 1
            if self._open_results == 0:
                self._done(*self._summary())

    def _on_released(self) -> None:
        with self._core.callback():
            self._open_releases -= 1
            if self._open_releases == 0:
                self._released()

    def _summary(self) -> tuple[int, str]:
        least, cause = -1, ""
        for result in self._results:
            good = [
                page.outcome is Outcome.LOADED if self._load else page.outcome.is_stored
                for page in result.pages
            ]
            n = good.index(False) if False in good else len(good)
            if least < 0 or n < least:
                least = n
                cause = result.pages[n].outcome.value if n < len(good) else ""
        return least, cause


def chunks_of(count: int, most: int) -> list[tuple[int, int]]:
    """`[start, stop)` borders that cut `count` pages into pieces of at most `most`."""
    return [(at, min(at + most, count)) for at in range(0, count, most)]


def part_of(pages: Slots, start: int, stop: int) -> PageSet:
    return {name: p[start:stop] for name, p in pages.items()}
