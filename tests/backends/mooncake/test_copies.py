"""`replicas = 2`: copies are ours, on different segments, read with fail-over, made anew."""

from __future__ import annotations

import threading

import pytest

from kvstrata.backends import ObjectId
from kvstrata.backends.frame import HEADER_BYTES
from kvstrata.backends.mooncake.names import by_segment, key_of, parse_key, ranked
from kvstrata.boundary import Outcome

PAGE = 65536
SOON_S = 8.0
"""For what takes two seconds at most on a machine that does nothing else."""


def _check(backend, pages, start: int, stop: int) -> None:
    reads = pages.reads(start, stop)
    results = backend.read(reads)
    assert [r.outcome for r in results] == [Outcome.LOADED] * (stop - start)
    for i, read in enumerate(reads):
        assert read.buffers[0][HEADER_BYTES:] == pages.data(start + i)


def _apart(backend, pages, start: int, stop: int) -> set[int]:
    """On how many segments the copies of pages lie."""
    with backend.link.use() as client:
        return set(backend._copies.apart(client, pages.names(start, stop)))


def test_a_store_is_killed_and_no_page_is_lost(site, make_pages, until) -> None:
    cluster = site.start(2, replicas=2)
    backend, pages = site.open(), make_pages(PAGE, chain="kill")
    assert all(r.outcome is Outcome.STORED for r in backend.write(pages.writes(0, 64)))
    assert _apart(backend, pages, 0, 64) == {2}
    assert backend.counts.snapshot()["stored_with_all_copies"] == 64

    cluster.kill_store(0)
    _check(backend, pages, 0, 64)  # at once: by fail-over, before anybody knows
    assert backend.counts.snapshot()["failovers"] > 0
    took = until(lambda: backend.health().state.value == "degraded")
    assert took < SOON_S
    _check(backend, pages, 0, 64)
    assert backend.exists(pages.names(0, 64)) == [True] * 64

    more = backend.write(pages.writes(64, 80))
    assert all(r.outcome is Outcome.STORED for r in more), "one copy is better than none"
    assert backend.counts.snapshot()["stored_short_of_copies"] == 16

    cluster.start_stores(1)
    until(lambda: backend.wait_repaired(5.0) and _apart(backend, pages, 0, 80) == {2})
    assert backend.counts.snapshot()["repaired"] >= 16
    assert "16 pages stored with fewer copies than asked for" in backend.health().message

    cluster.kill_store(0)  # the one that had them all in between
    _check(backend, pages, 0, 80)
    backend.check_integrity()


def test_a_lost_copy_is_made_anew_by_a_read(site, make_pages, until) -> None:
    site.start(2, replicas=2)
    backend, pages = site.open(), make_pages(PAGE, chain="read")
    backend.write(pages.writes(0, 8))
    with backend.link.use() as client:
        client.remove([key_of(name) for name in pages.names(0, 8)])
    assert backend.exists(pages.names(0, 8)) == [True] * 8
    _check(backend, pages, 0, 8)
    until(lambda: backend.wait_repaired(5.0) and _apart(backend, pages, 0, 8) == {2})
    assert backend.counts.snapshot()["failovers"] == 8
    assert backend.delete(pages.names(0, 8)) == [True] * 8
    assert backend.usage().objects == 0


def test_a_store_dies_in_the_middle_of_reads(site, make_pages) -> None:
    cluster = site.start(2, replicas=2)
    backend, pages = site.open(), make_pages(PAGE, chain="middle")
    backend.write(pages.writes(0, 64))
    failures: list[BaseException] = []
    begun, done = threading.Barrier(3), threading.Event()

    def work() -> None:
        try:
            begun.wait(10)
            while not done.is_set():
                _check(backend, pages, 0, 64)
            _check(backend, pages, 0, 64)
        except BaseException as error:  # noqa: BLE001 (told to the test)
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    begun.wait(10)
    cluster.kill_store(1)
    done.set()
    for thread in threads:
        thread.join(20)
    assert not failures, failures


def test_replicas_can_be_raised_later(site, make_pages, until) -> None:
    site.start(2)
    one, pages = site.open(), make_pages(PAGE, chain="raise")
    one.write(pages.writes(0, 8))
    two = site.open(replicas=2)
    _check(two, pages, 0, 8)
    two._repair.sweep()
    until(lambda: two.wait_repaired(5.0) and _apart(two, pages, 0, 8) == {2})


def test_fewer_segments_than_copies(site, make_pages) -> None:
    site.start(1, replicas=2)
    backend, pages = site.open(), make_pages(PAGE, chain="one")
    assert all(r.outcome is Outcome.STORED for r in backend.write(pages.writes(0, 4)))
    assert backend.counts.snapshot()["stored_short_of_copies"] == 4
    _check(backend, pages, 0, 4)


def test_names_and_places() -> None:
    name = ObjectId(bytes(range(32)), bytes(range(32, 64)))
    assert parse_key(key_of(name)) == (name, 0)
    assert parse_key(key_of(name, 3)) == (name, 3)
    for foreign in ("", "k1", key_of(name) + "/", key_of(name) + "/0", key_of(name)[:-1]):
        assert parse_key(foreign) is None
    segments = [f"host{i}:1" for i in range(8)]
    names = [ObjectId(bytes(32), i.to_bytes(8, "little") * 4) for i in range(800)]
    groups = by_segment(list(enumerate(names)), 0, segments)
    assert set(groups) == set(segments)
    assert all(60 < len(group) < 150 for group in groups.values()), "evenly spread"
    fewer = by_segment(list(enumerate(names)), 0, segments[:-1])
    moved = [i for s, group in groups.items() if s != segments[-1] for i in group]
    kept = {i for s, group in fewer.items() for i in group if i in set(groups[s])}
    assert kept == set(moved), "only pages of the segment that went have another place"
    for copy in (0, 1):
        for segment, group in by_segment(list(enumerate(names)), copy, segments).items():
            assert all(ranked(names[i], segments)[copy] == segment for i in group)
    assert by_segment([(0, names[0])], 1, segments[:1]) == {}


@pytest.mark.parametrize("preferred", [0, 1])
def test_preferred_segments(site, make_pages, preferred: int) -> None:
    cluster = site.start(2)
    backend = site.open(preferred_segments=(cluster.names[preferred],))
    pages = make_pages(PAGE, chain="preferred")
    backend.write(pages.writes(0, 16))
    endpoint = {s.name: s.endpoint for s in backend.link.view.segments}[cluster.names[preferred]]
    with backend.link.use() as client:
        places = client.places([key_of(name) for name in pages.names(0, 16)])
    assert {place for place, _ in places.values()} == {endpoint}
