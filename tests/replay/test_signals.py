"""Replays that are asked to end: a partial report, an L3 that the next run goes on with."""

from __future__ import annotations

import fcntl
import signal
import time
from typing import Any

import pytest

from kvstrata.tools.replay_control import Flag

END_S = 12.0
"""Most that a replay takes to end now: 3 s for storage that hangs (an end in good order would give
it ten times as much), and what a busy machine takes for the rest."""


def check_partial(done: Any, code: int, trace: Any) -> None:
    assert done.code == code, done.err
    assert "Traceback" not in done.err
    assert "stopped early" in done.err
    assert f"stopped early: {len(trace.requests)} were asked for" in done.out
    assert "pages mismatched" in done.out
    assert done.report["run"]["complete"] is False
    assert done.report["requests"] < len(trace.requests)
    assert done.report["pages_mismatched"] == 0


def test_ctrl_c(kvstrata: Any, store: Any, opening: Any, names_of: Any, hits_on: Any) -> None:
    plant = {"os": {"signals": [(40, signal.SIGINT)]}}
    done = kvstrata.replay("replay-cache", opening, store, plant=plant).wait()
    check_partial(done, 130, opening)
    assert done.report["requests"] > 0
    before = store.check()
    report = kvstrata.replay("replay-cache", opening, store).wait().ok()
    expected = hits_on(names_of(opening, "replay-cache"), before)
    assert report["page_hits"] + report["duplicates_in_flight"] == expected


NOW = [([signal.SIGTERM], 143), ([signal.SIGINT, signal.SIGINT], 130)]
"""What ends a replay at once, and its exit code."""


@pytest.mark.parametrize(("signals", "code"), NOW)
def test_ended_now(kvstrata: Any, store: Any, opening: Any, signals: Any, code: int) -> None:
    """What is under way is given up; nothing of it is left half done."""
    plant = {"os": {"signals": [(40 + i, signum) for i, signum in enumerate(signals)]}}
    check_partial(
        kvstrata.replay("replay-cache", opening, store, plant=plant).wait(), code, opening
    )
    store.check()
    kvstrata.replay("replay-cache", opening, store, "--requests", "30").wait().ok()
    store.check()


@pytest.mark.parametrize(("signals", "code"), NOW)
def test_ended_now_while_storage_hangs(
    kvstrata: Any, store: Any, opening: Any, signals: Any, code: int
) -> None:
    """A write never returns (B003): the command ends all the same, in seconds."""
    plant = {"os": {"hang_on": 60}}
    running = kvstrata.replay("replay-cache", opening, store, plant=plant)
    while len(store.frames()) < 40:
        assert not running.ends_within(0.001)
    for signum in signals:
        running.send(signum)
        running.ends_within(0.05)
    began = time.monotonic()
    done = running.wait(2 * END_S)
    assert time.monotonic() - began < END_S
    check_partial(done, code, opening)
    store.headers()
    kvstrata.replay("replay-cache", opening, store, "--requests", "30").wait().ok()
    store.check()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ended_before_it_began(
    kvstrata: Any, store: Any, small: Any, signum: int, code: int
) -> None:
    """While it waits for another process to open the root: nothing to report, no traceback."""
    store.path.mkdir()
    with (store.path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        running = kvstrata.replay("local", small, store, plant={"says_that_it_opens": {}})
        while not (kvstrata.folder / "opens").exists():
            assert not running.ends_within(0.001)
        running.send(signum)
        done = running.wait(END_S)
    assert done.code == code, done.err
    assert "Traceback" not in done.err
    assert done.report == {}
    kvstrata.replay("local", small, store, "--requests", "5").wait().ok()
    store.check()


def test_a_signal_comes_at_any_moment() -> None:
    """Also while the thread that it interrupts is waiting for the flag, or setting it."""
    flags = [Flag()]

    def handler(signum: int, frame: object) -> None:
        flags[0].set()

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
    try:
        for _ in range(20):
            flags[0] = flag = Flag()
            assert flag.wait(20.0)
            assert flag.is_set()
            flag.set()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not Flag().wait(0.0)
