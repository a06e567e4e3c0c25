"""A worker over a process: deadlines, kills, and the end."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.backends import BackendContext, HealthState, StorageWorker, WorkerSettings
from kvstrata.backends.policies import BreakerSettings, ProcessSettings, RetrySettings
from kvstrata.backends.process import ProcessBackend
from kvstrata.backends.testing.faults import FaultyBackend, FaultyOptions
from kvstrata.boundary import Outcome

WAIT_S = 20.0
LOADED, STORED, TIMEOUT = Outcome.LOADED, Outcome.STORED, Outcome.TIMEOUT
AWAY = Outcome.UNAVAILABLE


class Seen:
    """The callbacks of one job, and whether the process lived when they came."""

    def __init__(self, backend: ProcessBackend) -> None:
        self._pid = backend.pid
        self.results: list[Any] = []
        self.lived_at_done: list[bool] = []
        self.lived_at_release: list[bool] = []
        self.done_event, self.released_event = threading.Event(), threading.Event()

    def done(self, result: Any) -> None:
        self.results.append(result)
        self.lived_at_done.append(Path(f"/proc/{self._pid}").exists())
        self.done_event.set()

    def released(self) -> None:
        self.lived_at_release.append(Path(f"/proc/{self._pid}").exists())
        self.released_event.set()

    def outcomes(self) -> list[Outcome]:
        assert self.done_event.wait(WAIT_S)
        return [page.outcome for page in self.results[0].pages]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., tuple[StorageWorker, ProcessBackend]]]:
    """A worker over a process whose frames outlive it; each fault happens once."""
    opened: list[StorageWorker] = []

    def make(**faults: dict[str, float]) -> tuple[StorageWorker, ProcessBackend]:
        for name in ("frames", "once"):
            (tmp_path / name).mkdir()
        options = FaultyOptions(
            faults=faults, path=str(tmp_path / "frames"), once=str(tmp_path / "once")
        )
        backend = ProcessBackend(FaultyBackend, options, ProcessSettings(restart_delay_s=0.01))
        settings = WorkerSettings(
            kill_after_s=0.1,
            retry=RetrySettings(attempts=1),
            breaker=BreakerSettings(failures=0, probe_s=0.2),
        )
        worker = StorageWorker("tested", backend, settings, BackendContext("tested"))
        worker.start()
        opened.append(worker)
        return worker, backend

    yield make
    for worker in opened:
        worker.close(5.0)
        worker.check_integrity()
        assert worker.stats().abandoned_threads == 0


@pytest.mark.parametrize("kind", ["hang", "gil"])
def test_buffers_come_back_when_the_process_is_dead(start, make_pages, kind: str) -> None:
    """B003, B057, B062: the result comes at the deadline; the process is killed a little later;
    its buffers are released when it was reaped, not before; then all goes on."""
    pages = make_pages()
    worker, backend = start(read={kind: 1.0})
    stored = Seen(backend)
    worker.store(pages.stores(0, 4), WAIT_S, stored.done, stored.released)
    assert stored.outcomes() == [STORED] * 4
    job = Seen(backend)
    worker.load(pages.loads(0, 4), 0.3, job.done, job.released)
    assert job.outcomes() == [TIMEOUT] * 4
    assert job.released_event.wait(WAIT_S)
    assert (job.lived_at_done, job.lived_at_release) == ([True], [False])
    assert len(job.results) == 1
    assert backend.wait_up(WAIT_S)
    again = Seen(backend)
    loads = pages.loads(0, 4)
    worker.load(loads, WAIT_S, again.done, again.released)
    assert again.outcomes() == [LOADED] * 4
    assert [bytes(page.payload) for page in loads] == [pages.data(i) for i in range(4)]
    assert worker.stats().kills == 1


@pytest.mark.parametrize("kind", ["segfault", "kill", "exit"])
def test_a_crash_is_a_miss(start, make_pages, kind: str) -> None:
    """B036, B098: everything under way gets one result; the next load is answered as before."""
    pages = make_pages()
    worker, backend = start(read={kind: 1.0})
    jobs = [Seen(backend) for _ in range(6)]
    for job in jobs:
        worker.load(pages.loads(0, 2), WAIT_S, job.done, job.released)
    for job in jobs:
        assert set(job.outcomes()) <= {AWAY, Outcome.MISSING}
        assert job.released_event.wait(WAIT_S)
        assert len(job.results) == len(job.lived_at_release) == 1
    assert any(AWAY in job.outcomes() for job in jobs)
    assert backend.wait_up(WAIT_S)
    stored = Seen(backend)
    worker.store(pages.stores(0, 2), WAIT_S, stored.done, stored.released)
    assert stored.outcomes() == [STORED] * 2


def test_a_held_lock_is_seen_though_nothing_is_asked(start) -> None:
    """A process that answers nothing is not healthy, and is ended in the end, by a probe alone."""
    worker, backend = start(exists={"gil": 1.0})
    end = time.monotonic() + WAIT_S
    seen: set[HealthState] = set()
    while worker.stats().kills == 0:
        assert time.monotonic() < end
        seen.add(worker.condition().state)
    assert HealthState.DEGRADED in seen
    assert backend.wait_up(WAIT_S)
    while worker.condition().state is not HealthState.OK:
        assert time.monotonic() < end


def test_close_while_a_call_hangs(start, make_pages) -> None:
    """The process is killed, so nothing is abandoned and every buffer comes back."""
    worker, backend = start(read={"gil": 1.0})
    pid = backend.pid
    job = Seen(backend)
    worker.load(make_pages().loads(0, 4), WAIT_S, job.done, job.released)
    begun = time.monotonic()
    worker.close(1.0)
    assert time.monotonic() - begun < WAIT_S / 2, "the call hangs for ever"
    assert job.outcomes() == [Outcome.CANCELLED] * 4
    assert job.released_event.wait(WAIT_S)
    assert not Path(f"/proc/{pid}").exists()


def test_nothing_leaks_over_a_hundred_failures(start, make_pages) -> None:
    """B090: descriptors, after calls that fail in every way."""
    worker, backend = start(read={"kill": 1.0})
    pages = make_pages()
    once = Path(backend.options.once)  # type: ignore[attr-defined]

    def load() -> None:
        job = Seen(backend)
        worker.load(pages.loads(0, 4), WAIT_S, job.done, job.released)
        job.outcomes()
        assert job.released_event.wait(WAIT_S)

    load()
    assert backend.wait_up(WAIT_S)
    load()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for i in range(100):
        if i % 20 == 0:
            (once / "read-kill").unlink()
            load()
            assert backend.wait_up(WAIT_S)
        load()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert backend.restarts == 6
