"""The worker: what goes first, what waits for what, what happens when it is too much."""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.backends import BackendContext, ObjectId, PageResult, WriteRequest
from kvstrata.boundary import Outcome

LOADED, STORED, EXISTS = Outcome.LOADED, Outcome.STORED, Outcome.EXISTS
MISSING, FULL, ERROR = Outcome.MISSING, Outcome.FULL, Outcome.ERROR
PARENT_MISSING, OVERLOADED = Outcome.PARENT_MISSING, Outcome.OVERLOADED


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
    """B072, B077: what arrives faster than it is done is refused and counted, class by class (and
    stores if they may be dropped)."""
    gate, pages = make_gate(), make_pages()
    for operation in ("read", "write", "exists"):
        scripted.hooks[operation] = gate
    scripted.threads = 1
    jobs = start_worker(scripted, queue_pages=8, on_full="drop")
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


def test_a_full_queue_skips_no_store(start_worker, scripted, make_pages) -> None:
    """`on_full = "block"`: stores wait, however many, and loads go ahead of them."""
    gate, pages = scripted.hold("write"), make_pages()
    jobs = start_worker(scripted, queue_pages=8, on_full="block")
    chains = [make_pages(chain=str(i)) for i in range(20)]
    stores = [jobs.store(chain.stores(0, 4)) for chain in chains]
    gate.wait_entered()
    children = [jobs.store(chain.stores(4, 5)) for chain in chains]
    assert jobs.load(pages.loads(0, 4)).outcomes() == [MISSING] * 4
    jobs.worker.check_integrity()
    assert jobs.worker.stats().queued_pages_now["store"] > 8
    gate.open()
    assert [store.outcomes() for store in stores] == [[STORED] * 4] * 20
    assert [store.outcomes() for store in children] == [[STORED]] * 20
    assert jobs.worker.flush(20)
    assert jobs.worker.stats().pages["store"] == {STORED: 100}


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
