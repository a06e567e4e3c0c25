"""Frames that are there and cannot be used: they heal, or are known not to be stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvstrata.backends import BackendContext, ObjectId, PageResult, ReadRequest
from kvstrata.backends.frame import HEADER_BYTES, ForeignFrameError, encode_header, parse_header
from kvstrata.backends.outcomes import outcome_of
from kvstrata.backends.unreadable import Unreadable
from kvstrata.boundary import Outcome
from kvstrata.errors import (
    CorruptFrameError,
    PermanentStorageError,
    RetryableStorageError,
    StorageAccessError,
    StorageBusyError,
    StorageError,
    StorageFullError,
    StorageTimeoutError,
    StorageUnavailableError,
)

LOADED, STORED, EXISTS, MISSING = Outcome.LOADED, Outcome.STORED, Outcome.EXISTS, Outcome.MISSING
PARENT_MISSING, ERROR = Outcome.PARENT_MISSING, Outcome.ERROR
ACCESS, TIMEOUT = Outcome.ACCESS, Outcome.TIMEOUT


def fail_reads(scripted: Any, bad: set[ObjectId], outcome: Outcome) -> None:
    """Reads of `bad` fail until they are stored anew."""
    real_delete = scripted.hooks.get("delete")

    def read(requests: Sequence[ReadRequest]) -> list[PageResult]:
        answers = super(type(scripted), scripted).read(requests)
        return [
            PageResult(outcome, 0, "EIO: objects/x") if request.object in bad else answer
            for request, answer in zip(requests, answers, strict=True)
        ]

    def delete(names: Sequence[ObjectId]) -> Any:
        answer = None if real_delete is None else real_delete(names)
        if answer is None:
            bad.difference_update(names)
        return answer

    scripted.hooks.update(read=read, delete=delete)


@pytest.mark.parametrize("outcome", [ACCESS, ERROR])
def test_an_unreadable_frame_is_stored_anew(start_worker, scripted, make_pages, outcome) -> None:
    """It is deleted, whoever believes it stored hears of it, and the page is stored again."""
    evicted: list[ObjectId] = []
    jobs = start_worker(scripted, context=BackendContext("x", on_evicted=evicted.extend))
    pages = make_pages()
    jobs.store(pages.stores(0, 3)).result()
    fail_reads(scripted, {pages.name(1)}, outcome)
    assert jobs.load(pages.loads(0, 3)).outcomes() == [LOADED, outcome, LOADED]
    assert evicted == [pages.name(1)]
    assert jobs.lookup(pages.names(0, 3)).count() == 1
    assert jobs.store(pages.stores(0, 3)).outcomes() == [EXISTS, STORED, EXISTS]
    assert jobs.load(pages.loads(0, 3)).outcomes() == [LOADED] * 3
    assert jobs.worker.stats().corrupt_deleted == 1


def test_a_read_that_fails_once(start_worker, scripted, make_pages) -> None:
    """Is no reason to delete anything: it is read once more."""
    jobs, pages = start_worker(scripted), make_pages()
    jobs.store(pages.stores(0, 2)).result()
    answers = [[PageResult(ERROR)] * 2]
    scripted.hooks["read"] = lambda requests: answers.pop() if answers else None
    assert jobs.load(pages.loads(0, 2)).outcomes() == [LOADED] * 2
    assert not scripted.names("delete")


@pytest.mark.parametrize("outcome", [TIMEOUT, Outcome.UNAVAILABLE, Outcome.OVERLOADED])
def test_a_store_that_is_away(start_worker, scripted, make_pages, outcome) -> None:
    """Nothing is deleted for it, nor when a call as a whole fails."""
    jobs, pages = start_worker(scripted), make_pages()
    jobs.store(pages.stores(0, 2)).result()
    scripted.hooks["read"] = lambda requests: [PageResult(outcome)] * len(requests)
    assert jobs.load(pages.loads(0, 2)).outcomes() == [outcome] * 2

    def fail(_: object) -> None:
        raise OSError(5, "EIO")

    scripted.hooks["read"] = fail
    assert jobs.load(pages.loads(0, 2)).outcomes() == [ERROR] * 2
    scripted.hooks.clear()
    assert not scripted.names("delete")
    assert jobs.lookup(pages.names(0, 2)).count() == 2


@pytest.mark.parametrize("raises", [False, True])
def test_a_frame_that_cannot_be_deleted(start_worker, scripted, make_pages, raises) -> None:
    """Lookups do not find it, stores say why it is not stored; once it can be deleted, all is well
    with the next store."""

    def refuse(names: Sequence[ObjectId]) -> list[bool]:
        if raises:
            raise StorageAccessError("EROFS")
        return [False] * len(names)

    jobs, pages = start_worker(scripted), make_pages()
    jobs.store(pages.stores(0, 3)).result()
    scripted.hooks["delete"] = refuse
    fail_reads(scripted, {pages.name(1)}, ACCESS)
    for _ in range(2):
        assert jobs.load(pages.loads(0, 3)).outcomes() == [LOADED, ACCESS, LOADED]
        assert jobs.lookup(pages.names(0, 3)).count() == 1
        store = jobs.store(pages.stores(0, 3)).result()
        assert [p.outcome for p in store.pages] == [EXISTS, ACCESS, PARENT_MISSING]
        assert "EIO" in store.pages[1].message
    scripted.hooks.clear()
    assert jobs.store(pages.stores(0, 3)).outcomes() == [EXISTS, STORED, EXISTS]
    assert jobs.lookup(pages.names(0, 3)).count() == 3


@pytest.mark.parametrize("way", ["dropped", "evicted", "read", "vanished"])
def test_what_is_known_does_not_outlive_the_frame(start_worker, scripted, make_pages, way) -> None:
    jobs, pages = start_worker(scripted), make_pages()
    jobs.store(pages.stores(0, 1)).result()
    scripted.hooks["delete"] = lambda names: [False] * len(names)
    fail_reads(scripted, {pages.name(0)}, ACCESS)
    jobs.load(pages.loads(0, 1)).result()
    assert len(jobs.worker._unreadable) == 1
    scripted.hooks.clear()
    if way == "dropped":
        assert jobs.drop([pages.name(0)]).count() == 1
    elif way == "evicted":
        jobs.worker._evicted([pages.name(0)])
    elif way == "read":
        assert jobs.load(pages.loads(0, 1)).outcomes() == [LOADED]
    else:
        scripted.delete(pages.names(0, 1))
        assert jobs.load(pages.loads(0, 1)).outcomes() == [MISSING]
    assert len(jobs.worker._unreadable) == 0


def test_the_memory_is_bounded(make_pages) -> None:
    known, pages = Unreadable(most=3), make_pages()
    for i in range(5):
        known.add(pages.name(i), PageResult(ERROR, 0, str(i)), is_ours=i != 4)
    known.check_integrity()
    assert known.without(pages.names(0, 6), [True] * 6) == [True] * 2 + [False] * 3 + [True]
    assert known.removable(pages.names(0, 6)) == pages.names(2, 4)
    known.discard(pages.names(0, 6))
    assert len(known) == 0


# ── frames of other programs ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("at", "what"), [(8, "version"), (10, "checksum"), (12, "codec")])
def test_a_frame_of_a_newer_program(start_worker, scripted, make_pages, at, what) -> None:
    """It is a miss with a reason, and it stays; a store does not say that the page is stored."""
    from kvstrata.backends import WriteRequest
    from kvstrata.backends.frame import _CHECK, _CHECK_AT, payload_checksum

    jobs, pages = start_worker(scripted), make_pages()
    header, data = memoryview(bytearray(HEADER_BYTES)), memoryview(pages.data(0))
    encode_header(header, pages.name(0), None, 0, data)
    header[at] = 9
    _CHECK.pack_into(header, _CHECK_AT, payload_checksum(header[:_CHECK_AT]))
    with pytest.raises(ForeignFrameError, match=f"{what}.* 9"):
        parse_header(header)
    scripted.write([WriteRequest(pages.name(0), None, 0, (header, data))])
    load = jobs.load(pages.loads(0, 1)).result()
    assert load.pages[0].outcome is MISSING
    assert what in load.pages[0].message
    assert jobs.lookup(pages.names(0, 1)).count() == 0
    store = jobs.store(pages.stores(0, 1)).result()
    assert store.pages[0].outcome is ERROR
    assert what in store.pages[0].message
    assert not scripted.names("delete")
    assert scripted.exists(pages.names(0, 1)) == [True]


# ── labels ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (StorageError, ERROR),
        (PermanentStorageError, ERROR),
        (RetryableStorageError, Outcome.UNAVAILABLE),
        (StorageUnavailableError, Outcome.UNAVAILABLE),
        (StorageTimeoutError, TIMEOUT),
        (StorageBusyError, Outcome.OVERLOADED),
        (StorageFullError, Outcome.FULL),
        (StorageAccessError, ACCESS),
        (CorruptFrameError, Outcome.CORRUPT),
        (ValueError, ERROR),
    ],
)
def test_causes(error, outcome) -> None:
    assert outcome_of(error("x")) is outcome
    assert outcome_of(type("Own", (error,), {})("x")) is outcome
