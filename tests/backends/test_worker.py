"""The worker: one result a job, deadlines, order, room, framing."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvstrata.backends import (
    BackendContext,
    Health,
    HealthState,
    HostRegion,
    ObjectId,
    PageIO,
    PageResult,
    StorageWorker,
    WorkerSettings,
    WriteRequest,
)
from kvstrata.boundary import Outcome
from kvstrata.errors import (
    ConfigError,
    PluginError,
    StorageAccessError,
    StorageError,
    StorageUnavailableError,
)

LOADED, STORED, EXISTS = Outcome.LOADED, Outcome.STORED, Outcome.EXISTS
MISSING, CORRUPT, FULL = Outcome.MISSING, Outcome.CORRUPT, Outcome.FULL
TIMEOUT, CANCELLED, ERROR = Outcome.TIMEOUT, Outcome.CANCELLED, Outcome.ERROR
PARENT_MISSING, OVERLOADED = Outcome.PARENT_MISSING, Outcome.OVERLOADED


def payloads(pages: Sequence[PageIO]) -> list[bytes]:
    return [bytes(page.payload) for page in pages]


# ── what a job does ──────────────────────────────────────────────────────────────────────────────


def test_store_lookup_load_drop(start_worker, scripted, make_pages) -> None:
    jobs, pages = start_worker(scripted), make_pages()
    names = [pages.name(i) for i in range(10)]
    assert jobs.store(pages.stores(0, 6)).outcomes() == [STORED] * 6
    assert jobs.store(pages.stores(4, 10)).outcomes() == [EXISTS] * 2 + [STORED] * 4
    assert jobs.lookup([*names, pages.name(99), names[0]]).count() == 10
    loads = pages.loads(0, 10)
    assert jobs.load(loads).outcomes() == [LOADED] * 10
    assert payloads(loads) == [pages.data(i) for i in range(10)]
    assert jobs.drop([names[9], pages.name(99)]).count() == 1
    assert jobs.load(pages.loads(8, 10)).outcomes() == [LOADED, MISSING]
    assert jobs.worker.flush(20)
    stats = jobs.worker.stats()
    assert stats.pages["store"] == {STORED: 10, EXISTS: 2}
    assert stats.pages["load"] == {LOADED: 11, MISSING: 1}
    assert stats.pages["lookup"] == {EXISTS: 10, MISSING: 2}
    assert stats.pages["drop"] == {EXISTS: 1, MISSING: 1}
    assert stats.bytes_moved["store"] == 10 * pages.page_bytes
    assert stats.bytes_moved["load"] == 11 * pages.page_bytes


def test_phases_are_measured(start_worker, scripted, make_pages) -> None:
    """B114: every result says where its time went."""
    jobs, pages = start_worker(scripted), make_pages()
    result = jobs.store(pages.stores(0, 8)).result()
    assert result.io_s > 0
    assert result.check_s > 0
    assert result.queue_s >= 0
    assert jobs.worker.flush(20)
    stats = jobs.worker.stats()
    assert stats.io_s["store"] == pytest.approx(result.io_s)
    assert stats.check_s["store"] == pytest.approx(result.check_s)


def test_counters_reproduce_a_ratio(start_worker, scripted, make_pages) -> None:
    """B111: two snapshots give the hit rate between them."""
    jobs, pages = start_worker(scripted), make_pages()
    jobs.store(pages.stores(0, 4)).result()
    jobs.lookup([pages.name(i) for i in range(8)]).count()
    assert jobs.worker.flush(20)
    before = jobs.worker.stats().pages["lookup"]
    jobs.lookup([pages.name(i) for i in range(4)]).count()
    jobs.lookup([pages.name(7)]).count()
    assert jobs.worker.flush(20)
    after = jobs.worker.stats().pages["lookup"]
    hits, misses = (after[o] - before.get(o, 0) for o in (EXISTS, MISSING))
    assert (hits, misses) == (4, 1)


def test_empty_job(start_worker, scripted) -> None:
    jobs = start_worker(scripted)
    assert jobs.load([]).result().pages == ()
    assert jobs.lookup([]).count() == 0
    assert not scripted.calls


# ── failures of the backend ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (StorageUnavailableError("away"), Outcome.UNAVAILABLE),
        (StorageAccessError("EACCES: objects/…"), Outcome.ACCESS),
        (OSError(5, "EIO"), ERROR),
        (KeyError("evicted"), ERROR),
        (SystemExit(3), ERROR),
        (MemoryError(), ERROR),
    ],
)
def test_a_call_that_raises(start_worker, scripted, make_pages, error, outcome) -> None:
    """B001, B031, B042, B083: whatever a call raises is the result of its pages, once; the thread
    lives and the next job works."""
    jobs, pages = start_worker(scripted), make_pages()
    jobs.store(pages.stores(0, 3)).result()

    def fail(_: object) -> None:
        raise error

    for operation in ("read", "write", "exists", "delete"):
        scripted.hooks[operation] = fail
    assert jobs.load(pages.loads(0, 3)).outcomes() == [outcome] * 3
    assert jobs.store(pages.stores(3, 6)).outcomes() == [outcome, PARENT_MISSING, PARENT_MISSING]
    assert jobs.lookup([pages.name(0)]).count() == 0
    assert jobs.drop([pages.name(0)]).count() == 0
    scripted.hooks.clear()
    assert jobs.load(pages.loads(0, 3)).outcomes() == [LOADED] * 3
    assert jobs.worker.flush(20)
    assert jobs.worker.stats().pages["lookup"] == {outcome: 1}


def test_wrong_number_of_results(start_worker, scripted, make_pages) -> None:
    jobs, pages = start_worker(scripted), make_pages()
    scripted.hooks["read"] = lambda items: [PageResult(LOADED, 9999)]
    result = jobs.load(pages.loads(0, 3)).result()
    assert [page.outcome for page in result.pages] == [ERROR] * 3
    assert "1 results for 3 requests" in result.pages[0].message


def test_a_callback_that_raises(start_worker, scripted, make_pages) -> None:
    jobs, pages = start_worker(scripted), make_pages()

    def fail(_: object) -> None:
        raise SystemExit(1)

    jobs.worker.lookup([pages.name(0)], 10, fail)
    assert jobs.worker.flush(20)
    assert jobs.worker.stats().callback_errors == 1
    assert jobs.store(pages.stores(0, 1)).outcomes() == [STORED]


# ── frames ───────────────────────────────────────────────────────────────────────────────────────


def spoil(scripted: Any, name: ObjectId, change: Callable[[bytes], bytes]) -> None:
    """Put other bytes into the store, behind the worker."""
    [found] = [s for s in scripted.scan() if s.object == name]
    data = bytearray(found.nbytes)
    from kvstrata.backends import ReadRequest

    scripted.read([ReadRequest(name, (memoryview(data),))])
    assert scripted.delete([name]) == [True]
    new = memoryview(change(bytes(data)))
    assert scripted.write([WriteRequest(name, None, 0, (new,))])[0].outcome is STORED


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d[:-1] + bytes([d[-1] ^ 1]), "payload's checksum"),
        (lambda d: d[:3000] + bytes([d[3000] ^ 1]) + d[3001:], "header's checksum"),
        (lambda d: d[: len(d) // 2], "short"),
        (lambda d: b"", "short"),
        (lambda d: bytes(len(d)), "not a frame"),
        (lambda d: d + b"tail", None),
    ],
)
def test_corrupt_frames(start_worker, scripted, make_pages, change, reason) -> None:
    """B001, B002: not what was stored. A counted miss; the object is deleted, and stored anew."""
    jobs, pages = start_worker(scripted), make_pages()
    jobs.store(pages.stores(0, 3)).result()
    spoil(scripted, pages.name(1), change)
    loads = pages.loads(0, 3)
    result = jobs.load(loads).result()
    outcome = LOADED if reason is None else CORRUPT
    assert [page.outcome for page in result.pages] == [LOADED, outcome, LOADED]
    if reason is not None:
        assert reason in result.pages[1].message
        assert jobs.lookup([pages.name(1)]).count() == 0
        assert jobs.store(pages.stores(1, 2)).outcomes() == [STORED]
        assert jobs.worker.stats().corrupt_deleted == 1
        assert jobs.worker.stats().pages["load"][CORRUPT] == 1
    again = pages.loads(0, 3)
    assert jobs.load(again).outcomes() == [LOADED] * 3
    assert payloads(again) == [pages.data(i) for i in range(3)]


def test_swapped_frames(start_worker, scripted, make_pages) -> None:
    """B002: two whole frames, each under the name of the other."""
    jobs, pages = start_worker(scripted), make_pages()
    jobs.store(pages.stores(0, 2)).result()
    whole: list[bytes] = []
    for i in (0, 1):
        spoil(scripted, pages.name(i), lambda data: whole.append(data) or data)
    for i in (0, 1):
        spoil(scripted, pages.name(i), lambda data, i=i: whole[1 - i])
    assert jobs.load(pages.loads(0, 2)).outcomes() == [CORRUPT, CORRUPT]
    assert jobs.lookup([pages.name(0), pages.name(1)]).count() == 0


def test_another_page_size(start_worker, scripted, make_pages) -> None:
    """B012, B015: a store that holds pages of another size gives none of them."""
    jobs = start_worker(scripted)
    jobs.store(make_pages(8192).stores(0, 2)).result()
    assert jobs.load(make_pages(4096).loads(0, 2)).outcomes() == [CORRUPT] * 2


def test_header_buffers_are_aligned(start_worker, scripted, make_pages) -> None:
    seen: list[int] = []

    def look(requests: Sequence[WriteRequest]) -> None:
        for request in requests:
            header = (ctypes.c_char * 4096).from_buffer(request.buffers[0])
            seen.append(ctypes.addressof(header) % 4096)

    scripted.hooks["write"] = look
    jobs, pages = start_worker(scripted), make_pages()
    jobs.store(pages.stores(0, 6)).result()
    assert seen == [0] * 6


def test_regions(scripted, make_pages) -> None:
    """A backend is told where the buffers lie: the same memory behind the descriptor, and all
    headers are in it. The descriptor is closed with the worker."""
    staging = HostRegion(0, 4096, 8192)
    contexts: list[BackendContext] = []
    offsets: list[int] = []
    real = scripted.open

    def look(requests: Sequence[WriteRequest]) -> None:
        region = contexts[0].regions[-1]
        with mmap.mmap(region.fd, region.nbytes) as other:
            for request in requests:
                header = request.buffers[0]
                address = ctypes.addressof((ctypes.c_char * 4096).from_buffer(header))
                offsets.append(address - region.address)
                assert other[offsets[-1] : offsets[-1] + 4096] == bytes(header)

    scripted.open = lambda context: (contexts.append(context), real(context))
    scripted.hooks["write"] = look
    worker = StorageWorker("tested", scripted, WorkerSettings(), BackendContext("tested"))
    worker.start(regions=[staging])
    assert contexts[0].regions[0] == staging
    assert contexts[0].regions[1].nbytes == scripted.threads * scripted.batch * 4096
    results: list[Any] = []
    worker.store(make_pages().stores(0, 6), 1000, results.append, lambda: None)
    assert worker.flush(20)
    assert [page.outcome for page in results[0].pages] == [STORED] * 6
    assert len(offsets) == 6
    worker.close(5)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(contexts[0].regions[1].fd)


# ── life ─────────────────────────────────────────────────────────────────────────────────────────


def test_open_that_fails(make_scripted, start_worker) -> None:
    for error, kind in (
        (ConfigError("unwritable", remedy="another folder"), ConfigError),
        (StorageUnavailableError("away"), StorageUnavailableError),
        (ValueError("a bug"), StorageError),
    ):
        backend = make_scripted()

        def fail(context: object, error: Exception = error) -> None:
            raise error

        backend.open = fail
        with pytest.raises(kind):
            start_worker(backend)


def test_plugin_without_threads(make_scripted, start_worker) -> None:
    backend = make_scripted()
    backend.threads = 0
    with pytest.raises(PluginError, match="concurrency 0"):
        start_worker(backend)
    assert backend.close_calls == 0, "it was not opened"


def test_health(start_worker, scripted, make_pages, make_gate, clock) -> None:
    """B028, B072: health shows a stall, not only what the backend thinks of itself."""
    gate, pages = make_gate(), make_pages()
    jobs = start_worker(scripted, clock=clock)
    assert jobs.worker.health() == Health(HealthState.OK)
    scripted.hooks["read"] = gate
    load = jobs.load(pages.loads(0, 1), deadline_s=1)
    gate.wait_entered()
    clock.advance(2)
    assert load.outcomes() == [TIMEOUT]
    assert jobs.worker.health().state is HealthState.DEGRADED
    gate.open()
    load.wait_released()
    assert jobs.worker.flush(20)
    assert jobs.worker.health().state is HealthState.OK


def test_health_of_a_failing_backend(start_worker, scripted, make_pages) -> None:
    """B028: calls that all fail show in the health, with the last reason, until one succeeds;
    pages that are missing or do not fit are no failure."""
    jobs, pages = start_worker(scripted), make_pages()

    def fail(_: object) -> None:
        raise StorageAccessError("EROFS: Read-only file system: objects/x")

    for i in range(5):
        jobs.load(pages.loads(i, i + 1)).result()
    assert jobs.worker.health().state is HealthState.OK
    scripted.hooks["write"] = fail
    for i in range(3):
        assert jobs.worker.health().state is HealthState.OK
        jobs.store(make_pages(chain=str(i)).stores(0, 3)).result()
    health = jobs.worker.health()
    assert health.state is HealthState.DEGRADED
    assert "EROFS" in health.message
    scripted.hooks.clear()
    jobs.store(pages.stores(0, 1)).result()
    assert jobs.worker.health().state is HealthState.OK


def test_callbacks_submit_jobs(start_worker, scripted, make_pages) -> None:
    """Callbacks run without a lock of the worker, on its threads."""
    jobs, pages = start_worker(scripted), make_pages()
    main, ended, threads = threading.get_ident(), threading.Event(), set()

    def step(i: int) -> None:
        threads.add(threading.get_ident())
        jobs.worker.check_integrity()
        if i == 50:
            ended.set()
        else:
            page = pages.stores(i, i + 1)
            jobs.worker.store(page, 100, lambda result: step(i + 1), lambda: None)

    jobs.worker.lookup([pages.name(0)], 100, step)
    assert ended.wait(20)
    assert main not in threads
