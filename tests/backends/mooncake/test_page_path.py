"""The way of a page: no copy of payload, pieces, sizes, calls that end within a lease."""

from __future__ import annotations

import dataclasses
import os

import pytest

from kvstrata.backends import BackendContext
from kvstrata.backends.frame import HEADER_BYTES
from kvstrata.backends.mooncake.memory import FrameWindow, Spans
from kvstrata.backends.mooncake.transfer import Pace
from kvstrata.boundary import Outcome


@pytest.mark.parametrize("page_bytes", [65536, 2 << 20, 40_000])
def test_pages_of_staging_through_a_worker(
    shared, start_worker, make_pages, make_staging, page_bytes
) -> None:
    staging, pages = make_staging(24, page_bytes), make_pages(page_bytes, chain=str(page_bytes))
    backend = shared.make()
    context = BackendContext("tested", {"kv": page_bytes}, regions=(staging.region,))
    jobs = start_worker(backend, context=context)
    stores = [staging.io(page, i) for i, page in enumerate(pages.stores(0, 12))]
    assert jobs.store(stores).outcomes() == [Outcome.STORED] * 12
    loads = [staging.io(page, 12 + i) for i, page in enumerate(pages.loads(0, 12))]
    assert jobs.load(loads).outcomes() == [Outcome.LOADED] * 12
    assert [bytes(staging.page(12 + i)) for i in range(12)] == [pages.data(i) for i in range(12)]
    window = backend._transfers.window
    assert len(window) == 24, "every page went through its own slot"
    backend.check_integrity()
    assert jobs.drop(pages.names(0, 12)).count() == 12


def test_the_payload_of_a_slot_is_the_page_itself(make_staging) -> None:
    headers, staging = make_staging(4, HEADER_BYTES), make_staging(4, 65536)
    window = FrameWindow((headers.region, staging.region))
    spans = Spans((headers.region, staging.region), window)
    span = spans.known([(headers.page(1), staging.page(2))])[0]
    assert span.is_whole
    assert span.sizes == [HEADER_BYTES + 65536]
    at = span.addresses[0] - window.memory.address + HEADER_BYTES
    staging.page(2)[:5] = b"there"
    assert bytes(window.memory.view[at : at + 5]) == b"there"
    window.memory.view[at + 65535 :][:1] = b"!"
    assert bytes(staging.page(2)[-1:]) == b"!"
    window.check_integrity()
    second = spans.known([(headers.page(2), staging.page(2))])[0]
    assert not second.is_whole, "a slot has one user at a time: the other goes in pieces"
    spans.release([span, second])
    assert spans.known([(headers.page(2), staging.page(2))])[0].is_whole
    window.check_integrity()


def test_a_window_that_is_full_leaves_pieces(make_staging) -> None:
    headers, staging = make_staging(4, HEADER_BYTES), make_staging(4, 65536)
    regions = (headers.region, staging.region)
    spans = Spans(regions, FrameWindow(regions, most_slots=1))
    lists = [
        (headers.page(0), staging.page(0)),
        (headers.page(1), staging.page(1)),
        (memoryview(bytearray(10)), staging.page(1)),
    ]
    whole, pieces, stranger = spans.known(lists)
    assert whole.is_whole
    assert pieces.sizes == [HEADER_BYTES, 65536]
    assert stranger is None


def test_huge_pages_leave_pieces(make_staging) -> None:
    """A header cannot be mapped in front of a payload there."""
    headers, staging = make_staging(4, HEADER_BYTES), make_staging(4, 65536)
    fd = os.memfd_create("huge", os.MFD_HUGETLB | os.MFD_HUGE_2MB)  # none is taken before `mmap`
    try:
        huge = dataclasses.replace(staging.region, fd=fd)
        regions = (headers.region, huge)
        spans = Spans(regions, FrameWindow(regions))
        (pieces,) = spans.known([(headers.page(1), staging.page(2))])
        assert pieces.sizes == [HEADER_BYTES, 65536]
    finally:
        os.close(fd)


def test_pieces_and_other_sizes(shared, make_pages, make_staging) -> None:
    """What the window does not take goes in pieces, and short and long frames are found out."""
    staging, pages = make_staging(8, 65536), make_pages(65536, chain="pieces")
    backend = shared.open(BackendContext("tested", regions=(staging.region,)))
    request = pages.writes(0, 1)[0]
    staging.page(0)[:HEADER_BYTES] = request.buffers[0]
    staging.page(1)[:] = request.buffers[1]
    three = (staging.page(0)[:HEADER_BYTES], staging.page(1)[:1000], staging.page(1)[1000:])
    stored = type(request)(request.object, None, 0, three)
    assert [r.outcome for r in backend.write([stored])] == [Outcome.STORED]
    read = pages.reads(0, 1)[0]
    long = type(read)(request.object, (staging.page(2), staging.page(3), staging.page(4)))
    result = backend.read([long])[0]
    assert (result.outcome, result.nbytes) == (Outcome.LOADED, HEADER_BYTES + 65536)
    assert bytes(staging.page(2)) + bytes(staging.page(3)[:HEADER_BYTES]) == b"".join(three)
    short = type(read)(request.object, (staging.page(5)[:100], staging.page(6)[:50]))
    assert backend.read([short])[0].nbytes == 150
    assert bytes(staging.page(5)[:100]) == bytes(request.buffers[0][:100])
    assert backend.delete([request.object]) == [True]


def test_calls_are_bounded_by_what_a_lease_allows() -> None:
    pace = Pace(lease_s=1.0, most_bytes=64 << 20)
    assert pace.limit_bytes == 50_000_000
    pace.moved(10 << 20, 10.0)
    assert pace.limit_bytes == (1 << 20) // 2, "a slow network: half of what a lease lets through"
    pace.too_slow()
    assert pace.limit_bytes == (1 << 20) // 4
    for _ in range(100):
        pace.moved(1 << 30, 0.1)
    assert pace.limit_bytes == 64 << 20
    pace.moved(100, 0.01)
    assert pace.limit_bytes == 64 << 20, "a short call tells of latency only"


def test_a_lease_shorter_than_its_transfer(site, make_pages) -> None:
    """The library says that the lease has expired although the bytes came: such a page is read
    again by itself, in a call that is short enough, or is a miss."""
    site.start(1, lease_s=0.05, segment_bytes="256MiB")
    pages = make_pages(1 << 20, chain="lease")
    backend = site.open()
    results = backend.write(pages.writes(0, 64))
    assert [r.outcome for r in results] == [Outcome.STORED] * 64
    reads = pages.reads(0, 64)
    for read, result in zip(reads, backend.read(reads), strict=True):
        assert result.outcome in (Outcome.LOADED, Outcome.TIMEOUT)
        if result.outcome is Outcome.LOADED:
            assert read.buffers[0][HEADER_BYTES:] == pages.data(int(reads.index(read)))
