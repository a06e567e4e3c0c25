"""Migrations between backends that change, lie, refuse or hang meanwhile."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvstrata.backends import BackendContext, ObjectId, PageResult, StorageBackend, WriteRequest
from kvstrata.backends.memory import MemoryBackend, MemoryOptions
from kvstrata.boundary import Outcome
from kvstrata.errors import InputError, StorageUnavailableError
from kvstrata.tools.catalog import State
from kvstrata.tools.migrate import MigrateSettings, Migration
from kvstrata.tools.migrate_journal import Journal, Selection
from kvstrata.tools.migrate_report import MigrateReport, build_report
from kvstrata.tools.replay_control import Interruption

WAIT_S = 30.0


class Durable(MemoryBackend):
    """Memory that says it is a disk, with hooks for a test."""

    def __init__(self, max_bytes: int = 0) -> None:
        super().__init__(MemoryOptions(max_bytes=max_bytes))
        self.before_read: Callable[[ObjectId], None] = lambda name: None
        self.before_persist: Callable[[], None] = lambda: None
        self.written: list[WriteRequest] = []
        self.persisted: set[ObjectId] = set()
        self.deleted: list[ObjectId] = []
        self.open(BackendContext("memory"))

    @property
    def max_batch(self) -> int:
        return 4

    def read(self, requests: Any) -> list[PageResult]:
        for request in requests:
            self.before_read(request.object)
        return super().read(requests)

    def write(self, requests: Sequence[WriteRequest]) -> list[PageResult]:
        there = set(self._frames)
        for request in requests:
            assert request.parent is None or request.parent in there, "a page before its parent"
            there.add(request.object)
        self.written += requests
        return super().write(requests)

    def persist(self, objects: Sequence[ObjectId]) -> list[bool]:
        self.before_persist()
        there = self.exists(objects)
        self.persisted |= {name for name, is_there in zip(objects, there, strict=True) if is_there}
        return there

    def delete(self, objects: Sequence[ObjectId]) -> list[bool]:
        self.deleted += objects
        return super().delete(objects)


def _filled(tree: Any) -> Durable:
    backend = Durable()
    for request in tree.requests:
        assert backend.write([request])[0].outcome is Outcome.STORED
    return backend


def _content(backend: MemoryBackend) -> dict[ObjectId, bytes]:
    return {name: frame.data for name, frame in backend._frames.items()}


def _run(
    source: StorageBackend,
    target: StorageBackend,
    stop: Interruption | None = None,
    **settings: Any,
) -> MigrateReport:
    with Journal("", "") as journal:
        how = MigrateSettings(**settings)
        migration = Migration(source, target, journal, Selection(), how, stop or Interruption())
        if isinstance(target, MemoryBackend):
            target.open(BackendContext("target", on_evicted=migration.evicted))
        migration.prepare()
        migration.run()
        assert migration.is_complete == (journal.phase == "done")
        return build_report(
            journal, {}, source="a", destination="b", move=how.move, may_evict=how.may_evict,
            stopped_because=migration.stopped_because,
        )  # fmt: skip


@pytest.fixture
def tree(make_tree: Any, seed: int) -> Any:
    return make_tree(b"\x01" * 32, seed).grow(20, 10)


def test_parents_first_with_many_in_flight(tree: Any) -> None:
    """`Durable.write` asserts it; whoever looks at the destination sees closed prefixes."""
    source, target = _filled(tree), Durable()
    report = _run(source, target, threads=8)
    assert report.copied == len(tree.requests)
    assert _content(source) == _content(target)
    target.check_integrity()


def test_pages_in_flight_are_bounded(tree: Any) -> None:
    """However many there are, no more are read than the threads hold."""
    source, target = _filled(tree), Durable()
    read: list[ObjectId] = []
    source.before_read = read.append
    worst, lock = 0, threading.Lock()
    write = target.write

    def watched(requests: Sequence[WriteRequest]) -> list[PageResult]:
        nonlocal worst
        with lock:
            worst = max(worst, len(read) - len(tree.requests) - len(target.written))
        return write(requests)

    target.write = watched  # type: ignore[method-assign]
    _run(source, target, threads=2)
    assert 0 < worst <= 2 * 4, "two threads, four pages a batch"


def test_pages_that_vanish_are_counted(tree: Any) -> None:
    """A server evicts at the source, children first, while it is migrated: no fault."""
    source, target = _filled(tree), Durable()
    leaves = [r.object for r in tree.requests if all(o.parent != r.object for o in tree.requests)]
    reads = 0

    def evict(name: ObjectId) -> None:
        nonlocal reads
        reads += 1
        if reads == len(tree.requests) + 1:  # the scan is over, the copy begins
            MemoryBackend.delete(source, leaves)

    source.before_read = evict
    report = _run(source, target, threads=1)
    assert report.is_clean
    assert report.vanished == len(leaves)
    assert report.copied == len(tree.requests) - len(leaves)


def test_pages_that_come_while_it_scans(tree: Any) -> None:
    """A child is found whose parent was not there yet when its turn was: it is asked for."""
    source, target = _filled(tree), Durable()
    hidden = {r.object for r in tree.requests if r.depth % 2 == 0}
    scan = source.scan
    source.scan = lambda namespace=None: (  # type: ignore[method-assign]
        found for found in scan(namespace) if found.object not in hidden
    )
    report = _run(source, target)
    covered = {r.object for r in tree.requests if r.object not in hidden}
    covered |= {r.parent for r in tree.requests if r.object in covered and r.parent}
    assert report.copied == len(covered)
    assert report.is_clean


def test_an_orphan_at_the_source_is_a_problem(tree: Any) -> None:
    source, target = _filled(tree), Durable()
    parents = {request.parent for request in tree.requests}
    gone = next(r.object for r in tree.requests if r.object in parents and r.depth == 1)
    MemoryBackend.delete(source, [gone])
    report = _run(source, target)
    assert not report.is_clean
    assert report.cut >= 1
    assert report.problems[0].fault == "parent missing"
    assert "not at the source" in report.problems[0].message


def test_nothing_moves_away_from_under_new_pages(tree: Any, make_frame: Any) -> None:
    """A server stores a page at the source after the scan: what it hangs on stays there."""
    source, target = _filled(tree), Durable()
    above = max(tree.requests, key=lambda request: request.depth)
    late = make_frame(ObjectId(tree.namespace, b"\x09" * 32), above.object, above.depth + 1, b"x")
    target.before_persist = lambda: source.write([late]) and None
    report = _run(source, target, move=True)
    kept = {late.object}
    for request in sorted(tree.requests, key=lambda r: -r.depth):
        if request.object == late.parent or request.object in {
            r.parent for r in tree.requests if r.object in kept
        }:
            kept.add(request.object)
    assert set(_content(source)) == kept
    assert report.deleted == len(tree.requests) - len(kept) + 1


def test_move_deletes_only_what_is_durable_and_children_first(tree: Any) -> None:
    source, target = _filled(tree), Durable()
    _run(source, target, move=True, reads_back=True)
    assert set(source.deleted) == target.persisted == {r.object for r in tree.requests}
    order = {name: i for i, name in enumerate(source.deleted)}
    for request in tree.requests:
        assert request.parent is None or order[request.object] < order[request.parent]


def test_move_needs_a_destination_that_is_durable(tree: Any) -> None:
    with pytest.raises(InputError, match="durable"):
        _run(_filled(tree), MemoryBackend(MemoryOptions()), move=True)


def test_one_store_under_two_names_keeps_its_pages(tree: Any) -> None:
    """What options do not tell, the first deletion does: the page is put back."""
    store = _filled(tree)
    before = _content(store)
    with pytest.raises(InputError, match="one store"):
        _run(store, store, move=True)
    assert _content(store) == before


def test_a_destination_that_lies_is_found_out(tree: Any) -> None:
    """It stores one page with a wrong byte: the copy is removed, and what hangs on it."""
    source, target = _filled(tree), Durable()
    parents = {request.parent for request in tree.requests}
    victim = next(r.object for r in tree.requests if r.object in parents and r.depth == 1)
    write = target.write

    def lying(requests: Sequence[WriteRequest]) -> list[PageResult]:
        results = write(requests)
        frame = target._frames.get(victim)
        if frame is not None and any(request.object == victim for request in requests):
            frame.data = frame.data[:-1] + bytes([frame.data[-1] ^ 1])
        return results

    target.write = lying  # type: ignore[method-assign]
    report = _run(source, target, reads_back=True)
    assert report.failed == 1
    assert report.problems[0].fault == "destination"
    there = _content(target)
    assert victim not in there
    for request in tree.requests:
        assert request.object not in there or request.parent is None or request.parent in there


def test_corrupt_pages_that_were_there_are_said(tree: Any) -> None:
    source, target = _filled(tree), _filled(tree)
    name = tree.requests[3].object
    target._frames[name].data = target._frames[name].data[:-1]
    report = _run(source, target, reads_back=True)
    assert (report.failed, report.copied) == (1, 0)
    assert report.existed == len(tree.requests) - 1
    assert _run(source, target).existed == len(tree.requests), "only a check finds it"


def test_a_destination_that_evicts_ends_it(tree: Any) -> None:
    source, target = _filled(tree), Durable(max_bytes=40 * 4608)
    report = _run(source, target, threads=1)
    assert report.stopped_because == "the destination evicts pages to make room"
    assert not report.complete
    assert not report.is_clean
    again = Durable(max_bytes=40 * 4608)
    report = _run(source, again, threads=1, may_evict=True)
    assert report.complete
    assert report.copied == len(_content(again))


def test_a_destination_that_is_away_ends_it_soon(make_tree: Any, seed: int) -> None:
    tree, rng = make_tree(b"\x01" * 32, seed), random.Random(seed)
    for _ in range(60):
        tree.add(None, rng)
    source, target = _filled(tree), Durable()
    calls = 0

    def away(requests: Sequence[WriteRequest]) -> list[PageResult]:
        nonlocal calls
        calls += 1
        raise StorageUnavailableError("no route to the store")

    target.write = away  # type: ignore[method-assign]
    report = _run(source, target, threads=1)
    assert not report.complete
    assert "no route to the store" in report.problems[0].message
    assert report.failed + report.left == len(tree.requests)
    assert calls < 15, "not every page waits for it"


def test_a_destination_that_hangs_can_be_left(tree: Any) -> None:
    source, target = _filled(tree), Durable()
    stop, hangs, goes_on = Interruption(), threading.Event(), threading.Event()

    def hang(requests: Sequence[WriteRequest]) -> list[PageResult]:
        hangs.set()
        goes_on.wait(WAIT_S)
        return [PageResult(Outcome.ERROR)] * len(requests)

    def leave() -> None:
        assert hangs.wait(WAIT_S)
        stop.finish.set()
        stop.leave.set()

    target.write = hang  # type: ignore[method-assign]
    other = threading.Thread(target=leave)
    other.start()
    report = _run(source, target, stop)
    assert not goes_on.is_set(), "nobody waited for it"
    goes_on.set()
    other.join(WAIT_S)
    assert not report.complete
    assert report.left == len(tree.requests)


def test_interrupted_while_it_scans(tree: Any) -> None:
    stop = Interruption()
    stop.finish.set()
    report = _run(_filled(tree), Durable(), stop)
    assert (report.phase, report.complete, report.copied) == ("scan", False, 0)


def test_forged_depths_close_no_circle(make_frame: Any, seed: int) -> None:
    """Two pages that name each other as parent, and one at an absurd depth."""
    names = [ObjectId(b"\x01" * 32, bytes([i]) * 32) for i in (1, 2, 3)]
    source, target = Durable(), Durable()
    forged = [
        make_frame(names[0], names[1], 1, b"x"),
        make_frame(names[1], names[0], 2, b"y"),
        make_frame(names[2], names[1], 2**63, b"z"),
    ]
    for request in forged:
        data = b"".join(request.buffers)
        assert MemoryBackend.write(
            source, [WriteRequest(request.object, None, 0, (memoryview(data),))]
        )[0].outcome is Outcome.STORED  # fmt: skip
    report = _run(source, target)
    assert report.copied == 0
    assert not report.is_clean


def test_the_order_holds_for_any_ages(make_tree: Any, seed: int) -> None:
    """Whatever was used when, no page comes before its parent."""
    tree = make_tree(b"\x01" * 32, seed).grow(30, 8)
    source = _filled(tree)
    for i, frame in enumerate(source._frames.values()):
        frame.used_s = (i * 7919) % 101
    with Journal("", "") as journal:
        how, stop = MigrateSettings(), Interruption()
        Migration(source, Durable(), journal, Selection(), how, stop).prepare()
        rows = journal.pages("state=? ORDER BY place", (State.PENDING,))
    seen: set[ObjectId] = set()
    for page in rows:
        assert page.parent is None or page.parent in seen
        seen.add(page.object)
    assert len(seen) == len(tree.requests)


@pytest.mark.parametrize("outcome", [Outcome.ERROR, Outcome.ACCESS, Outcome.TIMEOUT])
def test_pages_that_cannot_be_read_are_named(tree: Any, outcome: Outcome) -> None:
    """EIO, EACCES and the like of single pages: the rest is copied, the threads live on."""
    source, target = _filled(tree), Durable()
    leaves = [r.object for r in tree.requests if all(o.parent != r.object for o in tree.requests)]
    bad, read = set(leaves[:2]), source.read

    def refuse(requests: Any) -> list[PageResult]:
        results = read(requests)
        if requests[0].nbytes == 4096:  # a header, of the scan
            return results
        refused = PageResult(outcome, 0, "EIO: Input/output error")
        return [refused if q.object in bad else r for q, r in zip(requests, results, strict=True)]

    source.read = refuse  # type: ignore[method-assign]
    report = _run(source, target)
    assert (report.failed, report.copied) == (2, len(tree.requests) - 2)
    assert {p.page for p in report.problems} == {name.name for name in bad}
    assert {p.fault for p in report.problems} == {outcome.value}
    assert "EIO" in report.problems[0].message


def test_nothing_is_left_open(tree: Any) -> None:
    """Descriptors and threads, also when the work was stopped or has failed."""

    def own() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name.startswith("kvstrata-tool")]

    _run(_filled(tree), Durable())
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        _run(_filled(tree), Durable(), reads_back=True, move=True)
        _run(_filled(tree), Durable(max_bytes=40 * 4608), threads=2)
        broken = Durable()
        broken.exists = lambda objects: 1 // 0  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError):
            _run(_filled(tree), broken)
    for thread in own():
        thread.join(WAIT_S)
    gc.collect()
    assert own() == []
    assert len(os.listdir("/proc/self/fd")) <= before
