"""Retries, breakers, rates, probes and deadlines of what is no job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from kvstrata.backends import (
    BackendContext,
    Health,
    HealthState,
    PageResult,
    StorageWorker,
    WorkerSettings,
)
from kvstrata.backends.policies import BreakerSettings, Rate, RateSettings, Retry, RetrySettings
from kvstrata.boundary import Outcome
from kvstrata.errors import (
    StorageAccessError,
    StorageBusyError,
    StorageError,
    StorageTimeoutError,
    StorageUnavailableError,
)

LOADED, STORED, TIMEOUT = Outcome.LOADED, Outcome.STORED, Outcome.TIMEOUT
AWAY, ERROR = Outcome.UNAVAILABLE, Outcome.ERROR
RETRY = RetrySettings(attempts=3, first_delay_s=1.0, max_delay_s=8.0)
BREAKER = BreakerSettings(failures=3, cooldown_s=1.0, probe_s=0.5, probe_deadline_s=1.0)


def failing(error: Exception, times: int) -> Callable[[Sequence[Any]], None]:
    left = [times]

    def hook(_: Sequence[Any]) -> None:
        if left[0]:
            left[0] -= 1
            raise error

    return hook


class Turn:
    """Turns the clock in steps until something holds."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock

    def until(self, holds: Callable[[], bool], step_s: float = 0.1, most_s: float = 60.0) -> float:
        """How long it took, on the clock of the worker."""
        begin, tick = self._clock(), threading.Event()
        end = time.monotonic() + 20
        while not holds():
            assert self._clock() - begin < most_s, "it did not come about"
            assert time.monotonic() < end, "the worker does nothing"
            tick.wait(0.005)  # lets the threads of the worker look at the clock
            if not holds():
                self._clock.advance(step_s)
        return self._clock() - begin


@pytest.fixture
def turn(clock: Any) -> Turn:
    return Turn(clock)


# ── retry ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("operation", ["read", "write", "exists", "delete"])
def test_what_may_pass_is_tried_again(
    start_worker, scripted, make_pages, clock, turn, operation
) -> None:
    pages = make_pages()
    jobs = start_worker(scripted, clock=clock, retry=RETRY)
    if operation != "write":
        jobs.store(pages.stores(0, 3)).result()
    scripted.hooks[operation] = failing(StorageUnavailableError("away"), 2)
    job = {
        "read": lambda: jobs.load(pages.loads(0, 3)),
        "write": lambda: jobs.store(pages.stores(0, 3)),
        "exists": lambda: jobs.lookup(pages.names(0, 3)),
        "delete": lambda: jobs.drop(pages.names(0, 3)),
    }[operation]()
    waited = turn.until(lambda: job.is_done)
    assert waited >= 3.0  # 1 s and 2 s, and jitter
    if operation in ("exists", "delete"):
        assert job.count() == 3
    else:
        assert job.outcomes() == [LOADED if operation == "read" else STORED] * 3
    assert sum(jobs.worker.stats().retries.values()) == 2


def test_attempts_are_bounded(start_worker, scripted, make_pages, clock, turn) -> None:
    jobs, pages = start_worker(scripted, clock=clock, retry=RETRY), make_pages()
    scripted.hooks["read"] = failing(StorageBusyError("busy"), 100)
    job = jobs.load(pages.loads(0, 2))
    turn.until(lambda: job.is_done)
    assert job.outcomes() == [Outcome.OVERLOADED] * 2
    assert len(scripted.names("read")) == 3


def test_no_retry_beyond_the_deadline(start_worker, scripted, make_pages, clock) -> None:
    """The answer comes at once when the back-off would not end in time."""
    jobs, pages = start_worker(scripted, clock=clock, retry=RETRY), make_pages()
    scripted.hooks["read"] = failing(StorageUnavailableError("away"), 100)
    job = jobs.load(pages.loads(0, 2), deadline_s=0.9)
    assert job.outcomes() == [AWAY] * 2
    assert len(scripted.names("read")) == 1
    assert clock() == 0.0


@pytest.mark.parametrize("error", [StorageAccessError("no"), StorageError("broken"), ValueError()])
def test_what_will_not_pass_is_not_tried_again(
    start_worker, scripted, make_pages, clock, error
) -> None:
    jobs, pages = start_worker(scripted, clock=clock, retry=RETRY), make_pages()
    scripted.hooks["write"] = failing(error, 100)
    jobs.store(pages.stores(0, 2)).result()
    assert len(scripted.names("write")) == 1


def test_pages_before_the_failure_are_not_read_again(
    start_worker, scripted, make_pages, clock, turn
) -> None:
    pages = make_pages()
    jobs = start_worker(scripted, clock=clock, retry=RETRY)
    jobs.store(pages.stores(0, 4)).result()
    seen: list[int] = []

    def third_is_away(requests: Sequence[Any]) -> list[PageResult] | None:
        seen.append(len(requests))
        if len(seen) > 1:
            return None
        results = type(scripted).__mro__[1].read(scripted, requests)
        return [*results[:2], PageResult(AWAY), *results[3:]]

    scripted.hooks["read"] = third_is_away
    loads = pages.loads(0, 4)
    job = jobs.load(loads)
    turn.until(lambda: job.is_done)
    assert job.outcomes() == [LOADED] * 4
    assert [bytes(p.payload) for p in loads] == [pages.data(i) for i in range(4)]
    assert seen == [4, 2]


def test_a_call_under_way_is_never_doubled(
    start_worker, scripted, make_pages, make_gate, clock, turn
) -> None:
    """A late call still has the buffers: there is no second one for the same job."""
    gate, pages = make_gate(), make_pages()
    jobs = start_worker(scripted, clock=clock, retry=RETRY)
    jobs.store(pages.stores(0, 1)).result()
    scripted.hooks["read"] = gate
    job = jobs.load(pages.loads(0, 1), deadline_s=5)
    gate.wait_entered()
    turn.until(lambda: job.is_done, step_s=1.0)
    assert job.outcomes() == [TIMEOUT]
    assert job.releases == 0
    clock.advance(100)
    assert len(scripted.names("read")) == 1
    gate.open()
    job.wait_released()


def test_delays_grow_and_have_jitter() -> None:
    retry = Retry(RetrySettings(attempts=50, first_delay_s=0.1, max_delay_s=3.0))
    drawn = [[retry.next_at(n, 10.0, 1e9) - 10.0 for _ in range(50)] for n in range(1, 9)]
    for n, delays in enumerate(drawn):
        base = min(0.1 * 2**n, 3.0)
        assert all(base <= d <= base + 0.1 for d in delays)
        assert len(set(delays)) > 40
    assert retry.next_at(50, 10.0, 1e9) is None
    assert retry.next_at(1, 10.0, 10.05) is None


# ── breaker, probes, health ──────────────────────────────────────────────────────────────────────


def state(jobs: Any) -> HealthState:
    return jobs.worker.condition().state


def test_a_failing_backend_is_left_alone(start_worker, scripted, make_pages, clock, turn) -> None:
    pages = make_pages()
    jobs = start_worker(scripted, clock=clock, breaker=BREAKER)
    jobs.store(pages.stores(0, 2)).result()
    scripted.hooks["read"] = scripted.hooks["exists"] = failing(StorageUnavailableError("x"), 10**6)
    for _ in range(3):
        assert jobs.load(pages.loads(0, 2)).outcomes() == [AWAY] * 2
    assert state(jobs) is HealthState.OPEN
    asked = len(scripted.names("read"))
    assert jobs.load(pages.loads(0, 2)).outcomes() == [AWAY] * 2
    assert jobs.lookup(pages.names(0, 2)).count() == 0
    assert len(scripted.names("read")) == asked
    assert jobs.store(make_pages(chain="x").stores(0, 1)).outcomes() == [STORED]  # stores go on
    probes = jobs.worker.stats().probes
    turn.until(lambda: jobs.worker.stats().probes > probes + 3)
    assert state(jobs) is HealthState.OPEN
    scripted.hooks.clear()
    assert turn.until(lambda: state(jobs) is HealthState.OK) <= 2.0
    assert jobs.load(pages.loads(0, 2)).outcomes() == [LOADED] * 2
    assert jobs.worker.stats().breaker_opened == 1


def test_a_trial_that_fails(start_worker, scripted, make_pages, clock, turn) -> None:
    """Half open, one call is let through; what a probe does not show, only a success clears."""
    pages = make_pages()
    jobs = start_worker(scripted, clock=clock, breaker=BREAKER)
    scripted.hooks["write"] = failing(StorageAccessError("read-only"), 4)
    for i in range(3):
        jobs.store(make_pages(chain=str(i)).stores(0, 1)).result()
    assert state(jobs) is HealthState.DEGRADED
    assert "read-only" in jobs.worker.condition().message
    assert jobs.store(pages.stores(0, 1)).outcomes() == [AWAY]
    turn.until(lambda: "trial" in jobs.worker.condition().message)
    assert jobs.store(pages.stores(0, 1)).outcomes() == [Outcome.ACCESS]
    assert jobs.store(pages.stores(0, 1)).outcomes() == [AWAY]
    turn.until(lambda: "trial" in jobs.worker.condition().message)
    probes = jobs.worker.stats().probes
    turn.until(lambda: jobs.worker.stats().probes > probes + 3)
    assert state(jobs) is HealthState.DEGRADED
    assert jobs.store(pages.stores(0, 1)).outcomes() == [STORED]
    assert state(jobs) is HealthState.OK


def test_what_waits_is_answered_when_it_opens(
    start_worker, scripted, make_pages, make_gate, clock
) -> None:
    """B003, B072: all threads are stuck; nobody waits behind them for a deadline of minutes."""
    gate, pages = make_gate(), make_pages()
    jobs = start_worker(scripted, clock=clock, breaker=BREAKER)
    scripted.hooks["read"] = scripted.hooks["write"] = gate
    stuck = [jobs.load(pages.loads(0, 1), deadline_s=1.0) for _ in range(2)]
    gate.wait_entered(2)
    waiting = [jobs.load(pages.loads(0, 1)), jobs.store(pages.stores(0, 1))]
    lookup = jobs.lookup(pages.names(0, 1))
    clock.advance(1.1)
    assert all(job.outcomes() == [TIMEOUT] for job in stuck)
    assert waiting[0].outcomes() == [AWAY]
    assert lookup.count() == 0
    assert not waiting[1].is_done  # no store has failed
    assert state(jobs) is HealthState.OPEN
    gate.open()
    for job in stuck:
        job.wait_released()


def test_a_short_deadline_is_no_fault_of_the_backend(
    start_worker, scripted, make_pages, make_gate, clock
) -> None:
    """What is left of a deadline may be next to nothing; a call is blamed when it runs for long."""
    gate, pages = make_gate(), make_pages()
    jobs = start_worker(scripted, clock=clock, breaker=BREAKER)
    scripted.hooks["write"] = gate
    late = jobs.store(pages.stores(0, 1), deadline_s=0.01)
    gate.wait_entered()
    clock.advance(0.5)
    assert late.outcomes() == [TIMEOUT]
    assert "run past their deadline" in jobs.worker.condition().message
    waits = jobs.store(make_pages(chain="y").stores(0, 1))
    assert not waits.is_done
    clock.advance(0.6)
    assert waits.outcomes() == [AWAY]
    refused = jobs.store(make_pages(chain="x").stores(0, 1))
    assert refused.outcomes() == [AWAY]
    assert state(jobs) is HealthState.DEGRADED
    gate.open()
    late.wait_released()


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_health_is_true_when_nothing_is_asked(
    start_worker, scripted, make_gate, clock, turn, how
) -> None:
    jobs = start_worker(scripted, clock=clock, breaker=BREAKER)
    gate = make_gate()
    assert state(jobs) is HealthState.OK
    scripted.hooks["exists"] = (
        gate if how == "hangs" else failing(StorageUnavailableError("gone"), 10**6)
    )
    assert turn.until(lambda: state(jobs) is not HealthState.OK) <= 2.0
    scripted.hooks.pop("exists")
    gate.open()
    assert turn.until(lambda: state(jobs) is HealthState.OK) <= 2.0
    assert jobs.worker.flush(0)  # nobody waits for a probe


def test_no_probe_while_others_show_that_it_answers(
    start_worker, scripted, make_pages, clock
) -> None:
    pages = make_pages()
    jobs = start_worker(scripted, clock=clock, breaker=BREAKER)
    jobs.store(pages.stores(0, 1)).result()
    for _ in range(20):
        jobs.load(pages.loads(0, 1)).result()
        clock.advance(0.2)
    assert jobs.worker.stats().probes <= 4  # where the clock was turned before a load ended


# ── rates and back-pressure ──────────────────────────────────────────────────────────────────────


def test_rate_of_bytes_and_operations(start_worker, scripted, make_pages, clock, turn) -> None:
    """Loads first, no burst beyond a tenth of a second, and nothing is lost."""
    pages = make_pages(page_bytes=1000)
    jobs = start_worker(scripted, clock=clock, rate=RateSettings(bytes_per_s=4000))
    caught = [jobs.store(make_pages(page_bytes=1000, chain=str(i)).stores(0, 4)) for i in range(6)]
    assert turn.until(lambda: all(c.is_done for c in caught)) >= 4.0
    assert all(c.outcomes() == [STORED] * 4 for c in caught)
    assert pages.page_bytes == 1000


def test_buckets() -> None:
    rate = Rate(RateSettings(bytes_per_s=100, ops_per_s=10))
    assert rate.is_bounded
    passed, now = 0, 0.0
    times = []
    while len(times) < 40:
        now = max(now, rate.free_at)
        rate.charge(5, 1, now)
        passed += 5
        times.append(now)
    assert times[-1] == pytest.approx((40 - 2) / 10, abs=0.1)
    assert all(b >= a for a, b in pairwise(times))


def test_back_pressure_from_latency(start_worker, scripted, make_pages, make_gate) -> None:
    """B072: with "drop", what would wait too long at the measured pace is dropped and counted;
    loads are not."""
    gate, pages = make_gate(), make_pages()
    slow = threading.Event()
    scripted.hooks["write"] = lambda _: slow.wait(0.05) or None
    jobs = start_worker(scripted, on_full="drop", queue_s=0.04)
    assert jobs.store(pages.stores(0, 1)).outcomes() == [STORED]  # 50 ms a page
    scripted.hooks["write"] = gate
    first = jobs.store(make_pages(chain="a").stores(0, 1))
    gate.wait_entered()
    second = jobs.store(make_pages(chain="b").stores(0, 1))
    dropped = jobs.store(make_pages(chain="c").stores(0, 2))
    assert dropped.outcomes() == [Outcome.OVERLOADED] * 2
    assert jobs.load(pages.loads(0, 1)).outcomes() == [LOADED]
    assert jobs.worker.stats().store_wait_s_now >= 0.04
    gate.open()
    assert first.outcomes() == second.outcomes() == [STORED]
    assert jobs.worker.stats().pages["store"][Outcome.OVERLOADED] == 2


# ── deadlines of what is no job ──────────────────────────────────────────────────────────────────


def test_questions_have_deadlines(start_worker, scripted, make_gate) -> None:
    gate = make_gate()
    jobs = start_worker(scripted, ask_deadline_s=0.05)
    scripted.usage = scripted.health = gate  # type: ignore[method-assign]
    scripted.scan = gate  # type: ignore[method-assign]
    with pytest.raises(StorageTimeoutError, match="usage did not return"):
        jobs.worker.usage()
    assert "did not return" in jobs.worker.health().message
    with pytest.raises(StorageTimeoutError, match="scan"):
        list(jobs.worker.scan())
    with pytest.raises(StorageTimeoutError):
        jobs.worker.usage()
    with pytest.raises(StorageBusyError):  # bounded: no fifth thread
        jobs.worker.usage()
    gate.open()


def test_scan_streams(start_worker, scripted, make_pages) -> None:
    pages = make_pages(page_bytes=64)
    jobs = start_worker(scripted)
    jobs.store(pages.stores(0, 9)).result()
    assert {o.object for o in jobs.worker.scan()} == set(pages.names(0, 9))
    assert next(jobs.worker.scan(pages.namespace)).object in pages.names(0, 9)
    assert list(jobs.worker.scan(b"x" * 32)) == []


def test_open_that_hangs(scripted, make_gate) -> None:
    """The server starts without it, or says so, in time; should it open some day, it is closed."""
    gate, closed = make_gate(), threading.Event()
    scripted.open = gate  # type: ignore[method-assign]
    scripted.hooks["close"] = lambda _: closed.set()
    settings = WorkerSettings(open_deadline_s=0.05)
    worker = StorageWorker("slow", scripted, settings, BackendContext("slow"))
    with pytest.raises(StorageTimeoutError, match=r"open .*did not return"):
        worker.start()
    gate.open()
    assert closed.wait(20)


def test_health_is_the_backends_own_when_all_is_well(start_worker, scripted) -> None:
    jobs = start_worker(scripted)
    opinion = Health(HealthState.DEGRADED, "one disk of two")
    scripted.health = lambda: opinion  # type: ignore[method-assign]
    assert jobs.worker.health() == opinion
