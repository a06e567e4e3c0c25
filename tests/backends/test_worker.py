"""The worker: one result a job, deadlines, order, room, framing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvstrata.backends import Health, HealthState, ObjectId, PageIO, PageResult, WriteRequest
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


def test_batches(start_worker, scripted, make_pages) -> None:
    """B116: a job takes as few calls as `max_batch` allows."""
    scripted.batch = 64
    jobs, pages = start_worker(scripted), make_pages(512)
    jobs.store(pages.stores(0, 256)).result()
    jobs.load(pages.loads(0, 256)).result()
    jobs.lookup([pages.name(i) for i in range(256)]).count()
    sizes = {op: [len(names) for names in scripted.names(op)] for op in ("write", "read", "exists")}
    assert sizes == {"write": [64] * 4, "read": [64] * 4, "exists": [64] * 4}


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
        import ctypes

        for request in requests:
            header = (ctypes.c_char * 4096).from_buffer(request.buffers[0])
            seen.append(ctypes.addressof(header) % 4096)

    scripted.hooks["write"] = look
    jobs, pages = start_worker(scripted), make_pages()
    jobs.store(pages.stores(0, 6)).result()
    assert seen == [0] * 6


# ── order ────────────────────────────────────────────────────────────────────────────────────────


def test_urgent_jobs_first(start_worker, scripted, make_pages, make_gate) -> None:
    """Lookups before loads before stores, also between the chunks of a job."""
    scripted.threads = 1
    gate, pages = make_gate(), make_pages()
    scripted.hooks["write"] = gate
    jobs = start_worker(scripted)
    first = jobs.store(pages.stores(0, 8))
    gate.wait_entered()
    second = jobs.store(pages.stores(8, 10))
    load = jobs.load(pages.loads(0, 2))
    lookup = jobs.lookup([pages.name(0)])
    gate.open()
    assert second.outcomes() == [STORED] * 2
    assert first.outcomes() == [STORED] * 8
    assert load.outcomes() == [LOADED] * 2
    assert lookup.count() == 1
    operations = [operation for operation, _ in scripted.calls]
    assert operations == ["write", "exists", "read", "write", "write"]


def test_stores_leave_a_thread_to_loads(start_worker, scripted, make_pages, make_gate) -> None:
    """B072: stores that hang do not hold loads and lookups."""
    scripted.threads = 3
    gate, pages = make_gate(), make_pages()
    jobs = start_worker(scripted)
    jobs.store(pages.stores(0, 1)).result()
    scripted.hooks["write"] = gate
    others = [make_pages(chain=str(i)) for i in range(5)]
    stores = [jobs.store(other.stores(0, 1)) for other in others]
    gate.wait_entered(2)
    assert jobs.load(pages.loads(0, 1)).outcomes() == [LOADED]
    assert jobs.lookup([pages.name(0)]).count() == 1
    assert len(scripted.names("write")) == 3
    gate.open()
    assert all(store.outcomes() == [STORED] for store in stores)


def test_children_wait_for_their_parents(start_worker, scripted, make_pages, make_gate) -> None:
    """Jobs of one chain run in its order, whatever threads are free."""
    scripted.threads = 4
    gate, pages = make_gate(), make_pages()
    scripted.hooks["write"] = gate
    jobs = start_worker(scripted)
    stores = [jobs.store(pages.stores(i, i + 1)) for i in range(4)]
    other = jobs.store(make_pages(chain="other").stores(0, 1))
    gate.wait_entered(2)
    assert len(scripted.names("write")) == 2
    gate.open()
    assert [store.outcomes() for store in stores] == [[STORED]] * 4
    assert other.outcomes() == [STORED]


def test_a_page_in_two_jobs_is_written_once(start_worker, scripted, make_pages, make_gate) -> None:
    scripted.threads = 4
    gate, pages = make_gate(), make_pages()
    scripted.hooks["write"] = gate
    jobs = start_worker(scripted)
    one, two = jobs.store(pages.stores(0, 2)), jobs.store(pages.stores(0, 3))
    gate.wait_entered()
    gate.open()
    assert one.outcomes() == [STORED, STORED]
    assert two.outcomes() == [EXISTS, EXISTS, STORED]


def test_prefix_stays_closed(start_worker, scripted, make_pages, make_gate) -> None:
    """After a page that is not stored nothing that builds on it is, in this job and in later ones;
    other chains go on."""
    gate, pages = make_gate(), make_pages()

    def fail_third(requests: Sequence[WriteRequest]) -> list[PageResult] | None:
        gate()
        if any(request.object == pages.name(2) for request in requests):
            good = [PageResult(STORED, 1) for r in requests if r.depth < 2]
            return good + [PageResult(ERROR)] * (len(requests) - len(good))
        return None

    scripted.hooks["write"] = fail_third
    jobs = start_worker(scripted)
    first = jobs.store(pages.stores(0, 4))
    later = [jobs.store(pages.stores(i, i + 2)) for i in (4, 6, 8)]
    other = jobs.store(make_pages(chain="other").stores(0, 2))
    gate.open()
    assert first.outcomes() == [STORED, STORED, ERROR, PARENT_MISSING]
    assert [job.outcomes() for job in later] == [[PARENT_MISSING] * 2] * 3
    assert other.outcomes() == [STORED] * 2
    assert jobs.worker.flush(20)
    scripted.hooks.clear()
    jobs.store(pages.stores(0, 2)).result()
    assert jobs.store(pages.stores(2, 10)).outcomes() == [STORED] * 8


def test_a_long_row_of_dependent_jobs(start_worker, scripted, make_pages, make_gate) -> None:
    """Thousands of jobs that wait for one another end without a deep recursion."""
    gate, pages = make_gate(), make_pages(64)
    scripted.hooks["write"] = lambda _: gate() or [PageResult(ERROR)]
    jobs = start_worker(scripted)
    stores = [jobs.store(pages.stores(i, i + 1)) for i in range(3000)]
    gate.open()
    assert stores[-1].outcomes() == [PARENT_MISSING]
    assert jobs.worker.flush(20)
    assert jobs.worker.stats().pages["store"] == {ERROR: 1, PARENT_MISSING: 2999}


# ── bounds ───────────────────────────────────────────────────────────────────────────────────────


def test_full_queue(start_worker, scripted, make_pages, make_gate) -> None:
    """B072, B077: what arrives faster than it is done is refused and counted, class by class."""
    gate, pages = make_gate(), make_pages()
    for operation in ("read", "write", "exists"):
        scripted.hooks[operation] = gate
    scripted.threads = 1
    jobs = start_worker(scripted, queue_pages=8)
    running = jobs.load(pages.loads(0, 2))
    gate.wait_entered()
    queued = [jobs.load(pages.loads(0, 4)) for _ in range(2)]
    assert jobs.load(pages.loads(0, 1)).outcomes() == [OVERLOADED]
    stores = [jobs.store(make_pages(chain=str(i)).stores(0, 4)) for i in range(3)]
    assert stores[2].outcomes() == [OVERLOADED] * 4
    assert jobs.lookup([pages.name(i) for i in range(9)]) is not None
    assert jobs.lookup([pages.name(0)]).count() == 0
    jobs.worker.check_integrity()
    gate.open()
    assert jobs.worker.flush(20)
    assert running.outcomes() == [MISSING] * 2
    assert [job.outcomes() for job in queued] == [[MISSING] * 4] * 2
    assert jobs.worker.stats().pages["store"] == {STORED: 8, OVERLOADED: 4}
    assert jobs.worker.stats().queued_pages_now == dict.fromkeys(
        ("lookup", "load", "store", "drop"), 0
    )


def test_drop_when_full(start_worker, make_scripted, make_pages) -> None:
    """`on_full = "drop"`: FULL at once."""
    pages = make_pages()
    backend = make_scripted(max_bytes=3 * (4096 + pages.page_bytes))
    jobs = start_worker(backend, on_full="drop")
    outcomes = jobs.store(pages.stores(0, 4)).outcomes()
    assert outcomes == [STORED] * 3 + [FULL]
    assert jobs.store(pages.stores(4, 5)).outcomes() == [PARENT_MISSING]


def test_block_when_full(start_worker, scripted, make_pages, clock) -> None:
    """`on_full = "block"`: the store waits, without a thread; loads go on; a drop makes room."""
    pages, other, rooms = make_pages(), make_pages(chain="other"), [4]

    def write(requests: Sequence[WriteRequest]) -> list[PageResult] | None:
        if rooms[0] < len(requests):
            return [PageResult(FULL)] + [PageResult(PARENT_MISSING)] * (len(requests) - 1)
        rooms[0] -= len(requests)
        return None

    scripted.hooks["write"] = write
    scripted.hooks["delete"] = lambda names: rooms.__setitem__(0, rooms[0] + len(names))
    scripted.threads = 1
    jobs = start_worker(scripted, clock=clock)
    jobs.store(other.stores(0, 1)).result()
    store = jobs.store(pages.stores(0, 4), deadline_s=100)
    later = jobs.store(pages.stores(4, 5), deadline_s=100)
    while not jobs.worker.stats().waiting_for_room_now:
        assert jobs.load(other.loads(0, 1)).outcomes() == [LOADED]
    assert not store.is_done
    assert jobs.drop([other.name(0)]).count() == 1
    assert store.outcomes() == [STORED] * 4
    while not jobs.worker.stats().waiting_for_room_now:
        assert jobs.lookup([pages.name(0)]).count() == 1
    assert not later.is_done
    clock.advance(101)
    assert later.outcomes() == [FULL]


def test_waiting_for_room_ends_at_the_deadline(
    start_worker, make_scripted, make_pages, clock
) -> None:
    """What was stored before counts; the page that did not fit is FULL, the rest lacks a parent."""
    pages = make_pages()
    backend = make_scripted(max_bytes=2 * (4096 + pages.page_bytes))
    jobs = start_worker(backend, clock=clock)
    store = jobs.store(pages.stores(0, 5), deadline_s=10)
    while not jobs.worker.stats().waiting_for_room_now:
        assert jobs.lookup([pages.name(9)]).count() == 0
    calls = len(backend.names("write"))
    clock.advance(5)  # it tries again by itself
    while len(backend.names("write")) == calls:
        assert jobs.lookup([pages.name(9)]).count() == 0
    clock.advance(6)
    assert store.outcomes() == [STORED, STORED, FULL, PARENT_MISSING, PARENT_MISSING]
    store.wait_released()


def test_an_eviction_wakes_who_waits_for_room(
    start_worker, make_scripted, make_pages, clock
) -> None:
    from kvstrata.backends import BackendContext

    pages, told = make_pages(), []
    backend = make_scripted(max_bytes=2 * (4096 + pages.page_bytes))
    context = BackendContext("tested", on_evicted=told.append)
    jobs = start_worker(backend, clock=clock, context=context)
    store = jobs.store(pages.stores(0, 3), deadline_s=10)
    while not jobs.worker.stats().waiting_for_room_now:
        assert jobs.lookup([pages.name(9)]).count() == 0
    backend._limit = 3 * (4096 + pages.page_bytes)
    gone = ObjectId(b"n" * 32, b"k" * 32)
    backend._context.on_evicted([gone])
    assert store.outcomes() == [STORED] * 3
    assert told == [[gone]]


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
    assert backend.close_calls == 1


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
