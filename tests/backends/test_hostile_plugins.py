"""Plugins that lie, raise what ends a program, or are slow where nobody expects it."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvstrata.backends import (
    BackendContext,
    HealthState,
    PageResult,
    StorageWorker,
    WorkerSettings,
)
from kvstrata.backends.asks import MOST_STUCK, Asks
from kvstrata.backends.policies import BreakerSettings, RateSettings
from kvstrata.boundary import Outcome
from kvstrata.errors import StorageAccessError, StorageError, StorageUnavailableError

LOADED, STORED, TIMEOUT = Outcome.LOADED, Outcome.STORED, Outcome.TIMEOUT
BREAKER = BreakerSettings(failures=3, cooldown_s=1.0, probe_s=0.5, probe_deadline_s=1.0)
WAIT_S = 20.0


def wait_until(holds: Any, most_s: float = WAIT_S) -> float:
    """In real time; how long it took."""
    begin, tick = time.monotonic(), threading.Event()
    while not holds():
        assert time.monotonic() - begin < most_s, "it did not come about"
        tick.wait(0.005)
    return time.monotonic() - begin


# ── what ends a program ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, ValueError])
def test_what_a_question_raises_is_an_error_of_storage(start_worker, scripted, kind) -> None:
    """A plugin that calls `sys.exit` in `usage` ended whoever asked for a report."""

    def end(*_: object) -> Any:
        raise kind("enough")

    worker = start_worker(scripted).worker
    scripted.usage = scripted.health = scripted.scan = end
    with pytest.raises(StorageError, match=f"usage.*{kind.__name__}: enough"):
        worker.usage()
    with pytest.raises(StorageError, match=f"scan.*{kind.__name__}: enough"):
        list(worker.scan())
    assert worker.health().state is HealthState.DEGRADED
    assert "enough" in worker.health().message


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_an_open_that_ends_the_program(scripted, kind) -> None:
    def end(_: object) -> None:
        raise kind("no licence")

    scripted.open = end
    worker = StorageWorker("tested", scripted, WorkerSettings(), BackendContext("tested"))
    with pytest.raises(StorageError, match="no licence"):
        worker.start()


def test_a_close_that_ends_the_program(start_worker, scripted, caplog) -> None:
    def end(_: object) -> None:
        raise SystemExit("bye")

    jobs = start_worker(scripted)
    scripted.hooks["close"] = end
    jobs.worker.close(5.0)
    assert "close failed" in caplog.text


def test_threads_that_cannot_be_started_take_no_place(monkeypatch) -> None:
    asks = Asks("tested")

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(2 * MOST_STUCK):
        with pytest.raises(StorageUnavailableError, match="can't start new thread"):
            asks.ask("usage", lambda: 1, 1.0)


class Interrupt(Exception):  # noqa: N818 (what a handler raises)
    pass


def test_a_signal_that_comes_just_before_the_wait_ends_it() -> None:
    """Its handler runs when the wait ends: it used to be the deadline of the `open`. To come to
    another thread is as bad, and can be made to happen."""
    asks, release = Asks("tested"), threading.Event()
    main = threading.get_ident()

    def handler(*_: object) -> None:
        raise Interrupt

    def hang() -> None:
        while not waits(main):
            pass
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        release.wait(3 * WAIT_S)

    before, begin = signal.signal(signal.SIGUSR1, handler), time.monotonic()
    try:
        with pytest.raises(Interrupt):
            asks.ask("open", hang, 2 * WAIT_S)
        assert time.monotonic() - begin < WAIT_S
    finally:
        release.set()
        signal.signal(signal.SIGUSR1, before)


def waits(thread: int) -> bool:
    """For an answer."""
    frame = sys._current_frames().get(thread)
    if frame is None or frame.f_code.co_filename != threading.__file__:
        return False
    while frame is not None and not frame.f_code.co_filename.endswith("asks.py"):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "wait"


# ── counts that are none ─────────────────────────────────────────────────────────────────────────


def test_truth_of_answers(start_worker, scripted, make_pages) -> None:
    """What a client library answers may be a count, or nothing; it counts as yes or no."""
    pages = make_pages()
    jobs = start_worker(scripted)
    jobs.store(pages.stores(0, 3)).result()
    scripted.hooks["exists"] = lambda names: [1, None, 1][: len(names)]
    assert jobs.lookup(pages.names(0, 3)).count() == 1
    scripted.hooks["delete"] = lambda names: [7, None, 2][: len(names)]
    assert jobs.drop(pages.names(0, 3)).count() == 2
    counts = jobs.worker.stats().pages["drop"]
    assert counts == {Outcome.EXISTS: 2, Outcome.MISSING: 1}
    scripted.hooks["exists"] = lambda _: (True, False, True)
    assert jobs.lookup(pages.names(0, 3)).count() == 1


# ── trials, rates, room ──────────────────────────────────────────────────────────────────────────


def test_a_trial_beside_a_call_that_hangs_for_ever(
    start_worker, make_scripted, make_pages, make_gate, clock
) -> None:
    """Half open lets one call through at a time; one that hangs since before is not that one."""
    scripted = make_scripted()
    scripted.threads = 4
    jobs, gate = start_worker(scripted, clock=clock, breaker=BREAKER), make_gate()
    scripted.hooks["write"] = gate
    stuck = jobs.store(make_pages(chain="stuck").stores(0, 1), deadline_s=1.0)
    gate.wait_entered()
    failures = [3]

    def fail(_: Sequence[Any]) -> None:
        if failures[0]:
            failures[0] -= 1
            raise StorageAccessError("read-only")

    scripted.hooks["write"] = fail
    for i in range(3):
        assert not jobs.store(make_pages(chain=str(i)).stores(0, 1)).outcomes()[0].is_stored
    found: list[Outcome] = []
    try:
        while STORED not in found:  # refused at first
            trial = jobs.store(make_pages(chain=f"trial {len(found)}").stores(0, 1))
            wait_until(lambda trial=trial: trial.is_done)
            found += trial.outcomes()
            clock.advance(0.1)
    finally:
        gate.open()
    assert found[0] is Outcome.UNAVAILABLE
    stuck.wait_released()


def test_a_rate_is_no_fault_of_the_backend(start_worker, scripted, make_pages) -> None:
    """What is held back by a rate holds no probe back: the backend would pass for one that hangs,
    and loads would be refused."""
    breaker = BreakerSettings(failures=2, probe_s=0.05, probe_deadline_s=0.1)
    rate = RateSettings(bytes_per_s=4000)
    jobs = start_worker(scripted, breaker=breaker, rate=rate)
    stores = [jobs.store(make_pages(page_bytes=1000, chain=str(i)).stores(0, 4)) for i in range(3)]
    seen = set()
    wait_until(
        lambda: seen.add(jobs.worker.condition().state) or all(job.is_done for job in stores)
    )
    assert seen == {HealthState.OK}
    assert jobs.worker.stats().breaker_opened == 0
    assert jobs.worker.stats().probes > 2


@pytest.mark.parametrize("what", ["bytes_per_s", "ops_per_s"])
def test_a_rate_holds_from_the_beginning(start_worker, make_scripted, make_pages, what) -> None:
    """No more than a tenth beyond it, over two seconds: an idle time is no licence for a burst. (It
    is never less on a clock of the tests: `test_policies`.)"""
    scripted = make_scripted()
    scripted.threads, scripted.batch = 3, 1
    rate = RateSettings(**{what: 100_000.0 if what == "bytes_per_s" else 100.0})
    jobs = start_worker(scripted, rate=rate)
    begin = time.monotonic()
    caught = [
        jobs.store(make_pages(page_bytes=1000, chain=str(i)).stores(0, 1)) for i in range(300)
    ]
    threading.Event().wait(2.0)
    passed = sum(job.is_done for job in caught)
    took = time.monotonic() - begin
    assert passed <= 1.1 * 100 * took + 1
    wait_until(lambda: sum(job.is_done for job in caught) >= 200)
    jobs.worker.close(1.0)


def test_stores_that_wait_for_room_leave_a_full_backend_alone(
    start_worker, make_scripted, make_pages
) -> None:
    """One of them tries, now and then; not each of them, each time."""
    scripted = make_scripted()
    scripted.hooks["write"] = lambda requests: [PageResult(Outcome.FULL)] * len(requests)
    poll_s = 0.2
    jobs = start_worker(scripted, full_poll_s=poll_s)
    waiting = [jobs.store(make_pages(chain=str(i)).stores(0, 1)) for i in range(100)]
    wait_until(lambda: jobs.worker.stats().waiting_for_room_now == 100)
    before, begin = len(scripted.names("write")), time.monotonic()
    wait_until(lambda: len(scripted.names("write")) >= before + 2)
    tries = len(scripted.names("write")) - before
    assert tries <= (time.monotonic() - begin) / poll_s + 3
    del scripted.hooks["write"]
    wait_until(lambda: all(job.is_done for job in waiting), most_s=50 * poll_s)  # not one a poll
    assert all(job.outcomes() == [STORED] for job in waiting)


def test_a_rate_is_part_of_how_long_a_store_would_wait(start_worker, scripted, make_pages) -> None:
    """With "drop", ten times more than the rate is dropped when it comes, not at its deadline."""
    jobs = start_worker(
        scripted, on_full="drop", queue_s=0.5, rate=RateSettings(bytes_per_s=10_000)
    )
    caught = [
        jobs.store(make_pages(page_bytes=1000, chain=str(i)).stores(0, 1), deadline_s=10.0)
        for i in range(100)
    ]
    wait_until(lambda: all(job.is_done for job in caught))
    found = [job.outcomes()[0] for job in caught]
    assert found.count(TIMEOUT) == 0
    assert found.count(Outcome.OVERLOADED) >= 80
    assert found.count(STORED) >= 3
