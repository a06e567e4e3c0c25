"""Slow storage is not storage that fails: what breakers hold against a backend, and what not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstrata.backends.breaker import Condition, State
from kvstrata.backends.policies import BreakerSettings
from kvstrata.boundary import Outcome

BREAKER = BreakerSettings(failures=3, cooldown_s=1.0, probe_s=0.5, probe_deadline_s=1.0)


def test_slow_storage_is_no_storage_that_hangs(
    start_worker, scripted, make_pages, make_gate, clock
) -> None:
    """A store whose deadline left it no time is blamed after three times what stores take here."""
    jobs = start_worker(scripted, clock=clock, breaker=BREAKER)

    def slow(items: Sequence[Any]) -> None:
        clock.advance(2.0 * len(items))

    scripted.hooks["write"] = slow
    for chain in "abcdefghijkl":  # until the measured pace is what it is
        assert jobs.store(make_pages(chain=chain).stores(0, 1)).outcomes() == [Outcome.STORED]
    gate = scripted.hooks["write"] = make_gate()
    late = jobs.store(make_pages(chain="y").stores(0, 1), deadline_s=0.01)
    gate.wait_entered()
    clock.advance(4.0)
    assert late.outcomes() == [Outcome.TIMEOUT]
    waits = jobs.store(make_pages(chain="z").stores(0, 1))
    assert not waits.is_done
    clock.advance(3.0)
    assert waits.outcomes() == [Outcome.UNAVAILABLE]
    gate.open()
    late.wait_released()


def test_a_probe_that_found_no_thread_is_no_failure_and_an_open_breaker_says_why() -> None:
    condition = Condition(BREAKER, 0.0)
    for now in range(10):
        assert not condition.note_probe_late(float(now), was_sent=False)
    assert "busy" in condition.probe_failure
    assert condition.reads.state is State.CLOSED
    opened = [condition.note_probe_late(20.0, was_sent=True) for _ in range(BREAKER.failures)]
    assert opened == [False] * (BREAKER.failures - 1) + [True]
    assert "not answered" in condition.reads.why
    assert condition.writes.open("it hangs", 21.0)
    assert condition.writes.why == "it hangs"
