"""The backend in a process of its own, which is its default."""

from __future__ import annotations

import os
import signal
import threading

import msgspec
import pytest

from kvstrata.backends import BackendContext
from kvstrata.backends.base import Isolation
from kvstrata.backends.mooncake import MooncakeBackend
from kvstrata.backends.mooncake.client import (
    MOVING_BYTES,
    MOVING_CALLS,
    POLLING_NICE,
    Client,
    _may_be_polite,
)
from kvstrata.backends.process import ProcessBackend
from kvstrata.boundary import Outcome

PAGE = 65536


def test_pages_through_a_process_that_is_killed(
    shared, start_worker, make_pages, make_staging, until
) -> None:
    assert MooncakeBackend.isolation is Isolation.PROCESS
    staging, pages = make_staging(16, PAGE), make_pages(PAGE, chain="process")
    backend = ProcessBackend(MooncakeBackend, msgspec.structs.replace(shared.options, replicas=2))
    jobs = start_worker(backend, context=BackendContext("tested", regions=(staging.region,)))
    stores = [staging.io(page, i) for i, page in enumerate(pages.stores(0, 8))]
    assert jobs.store(stores).outcomes() == [Outcome.STORED] * 8
    os.kill(backend.pid, signal.SIGKILL)
    until(lambda: backend.restarts == 1 and backend.pid is not None)
    loads = [staging.io(page, 8 + i) for i, page in enumerate(pages.loads(0, 8))]
    assert jobs.load(loads).outcomes() == [Outcome.LOADED] * 8
    assert [bytes(staging.page(8 + i)) for i in range(8)] == [pages.data(i) for i in range(8)]
    assert jobs.drop(pages.names(0, 8)).count() == 8


def test_closing_keeps_nobody_waiting(shared, make_staging, until, monkeypatch) -> None:
    """The library's close takes up to a second: it follows when the backend is closed, and its
    pages are not known to the client any more."""
    backend = shared.open(BackendContext("tested", regions=(make_staging(4, PAGE).region,)))
    with backend.link.use() as client:
        assert client._registered
    close, may = client.close, threading.Event()
    monkeypatch.setattr(client, "close", lambda: (may.wait(20.0), close()))
    backend.close(5.0)
    assert not client._registered
    assert client._store is not None
    may.set()
    until(lambda: client._store is None)


@pytest.mark.parametrize(
    ("nbytes", "calls"), [(1, MOVING_CALLS), (MOVING_BYTES // 2 + 1, 1), (2 * MOVING_BYTES, 1)]
)
def test_calls_take_turns_and_do_not_wait_for_long_for_those_that_hang(
    shared, monkeypatch, nbytes, calls
) -> None:
    begun, end, last = threading.Semaphore(0), threading.Event(), threading.Event()

    def hang() -> bool:
        begun.release()
        return end.wait(20.0)

    with shared.open().link.use() as client:
        threads = [threading.Thread(target=client._poll, args=(nbytes, hang)) for _ in range(calls)]
        threads.append(threading.Thread(target=client._poll, args=(nbytes, last.set)))
        for thread in threads[:-1]:
            thread.start()
            assert begun.acquire(timeout=10.0)
        monkeypatch.setattr("kvstrata.backends.mooncake.client.PATIENCE_S", 0.01)
        assert client._poll(nbytes, lambda: 7) == 7, "who hangs holds nobody back for ever"
        monkeypatch.setattr("kvstrata.backends.mooncake.client.PATIENCE_S", 20.0)
        threads[-1].start()
        assert not last.wait(0.05), "it is not its turn"
        end.set()
        for thread in threads:
            thread.join(10.0)
            assert not thread.is_alive()
        assert last.is_set()


def test_a_thread_that_polls_gives_way_and_takes_its_priority_back(shared, monkeypatch) -> None:
    """In a process for the backend only: elsewhere nobody's priority changes."""

    def nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = nice()
    with shared.open().link.use() as client:
        assert client._poll(1, nice) == before
    monkeypatch.setattr("kvstrata.backends.mooncake.client._is_alone", lambda: True)
    polite = Client(shared.options, "tcp")
    try:
        expected = before + POLLING_NICE if _may_be_polite() else before
        assert polite._poll(1, nice) == min(expected, 19)
        assert nice() == before
    finally:
        polite.retire()
