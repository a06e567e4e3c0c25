"""The CPU device: order in a stream, order by events between streams, callbacks, and its end."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.errors import ClosedError, IntegrityError
from kvstrata.gpu_runtime import CpuDevice, Stream, Timeline
from kvstrata.gpu_runtime.cpu import CpuStream
from kvstrata.gpu_runtime.testing import Gate

WAIT_S = 20.0


@pytest.fixture
def timeline() -> Timeline:
    return Timeline()


@pytest.fixture
def device(timeline: Timeline) -> Iterator[CpuDevice]:
    device = CpuDevice(timeline)
    yield device
    assert device.close(WAIT_S)


def finish(stream: Stream) -> None:
    assert stream.record().wait(WAIT_S)


def test_a_stream_runs_in_order(device: CpuDevice) -> None:
    ran: list[int] = []
    for i in range(500):
        device.compute.enqueue(lambda i=i: ran.append(i))  # type: ignore[misc]
    finish(device.compute)
    assert ran == list(range(500))


def test_streams_run_beside_each_other(device: CpuDevice) -> None:
    """Each waits for the other inside its work: that ends only if both run at once."""
    barrier = threading.Barrier(3, timeout=WAIT_S)
    for stream in (device.compute, device.h2d, device.d2h):
        stream.enqueue(lambda: barrier.wait() and None)
    for stream in (device.compute, device.h2d, device.d2h):
        finish(stream)


def test_an_event_is_complete_when_all_before_it_has_run(device: CpuDevice) -> None:
    gate = Gate(shut=True)
    device.h2d.enqueue(gate.pass_through)
    event = device.h2d.record()
    gate.wait_for_one()
    assert not event.query()
    assert not event.wait(0.01)
    gate.open()
    assert event.wait(WAIT_S)
    assert event.query()


def test_a_stream_waits_for_anothers_event_and_the_host_does_not(device: CpuDevice) -> None:
    gate, ran = Gate(shut=True), []
    device.h2d.enqueue(gate.pass_through)
    event = device.h2d.record()
    device.compute.enqueue(lambda: ran.append("before"))
    before = device.compute.record()
    device.compute.wait_event(event)
    device.compute.enqueue(lambda: ran.append("behind"))
    assert before.wait(WAIT_S)
    gate.wait_for_one()
    assert ran == ["before"]
    gate.open()
    finish(device.compute)
    assert ran == ["before", "behind"]
    device.d2h.wait_event(event)  # complete: no wait at all
    finish(device.d2h)


def test_callbacks_come_once_in_order_and_before_those_that_wait(device: CpuDevice) -> None:
    gate, said = Gate(shut=True), []
    device.h2d.enqueue(gate.pass_through)
    first = device.h2d.record()
    first.on_complete(lambda: said.append("h2d 1"))
    first.on_complete(lambda: said.append("h2d 2"))
    device.h2d.record().on_complete(lambda: said.append("h2d 3"))
    device.compute.wait_event(first)
    device.compute.enqueue(lambda: said.append("compute"))
    device.compute.record().on_complete(lambda: said.append("computed"))
    gate.open()
    finish(device.h2d)
    finish(device.compute)
    said.remove("h2d 3")  # of its own stream: before or behind what compute does
    assert said == ["h2d 1", "h2d 2", "compute", "computed"]
    first.on_complete(lambda: said.append("at once"))
    assert said[-1] == "at once"


@pytest.mark.parametrize("round_", range(5))
def test_any_order_that_events_ask_for_is_kept(device: CpuDevice, seed: int, round_: int) -> None:
    """Random work on three streams with random waits: everything runs behind what it waits for."""
    numbers = random.Random(f"{seed} {round_}")
    streams = (device.compute, device.h2d, device.d2h)
    lock, finished = threading.Lock(), set()
    broken: list[str] = []
    events: list[tuple[int, object]] = []
    before = {stream.name: set() for stream in streams}

    def work(number: int, wanted: frozenset[int]) -> None:
        with lock:
            if not wanted <= finished:
                broken.append(f"{number} ran before {sorted(wanted - finished)}")
            finished.add(number)

    for number in range(300):
        stream = numbers.choice(streams)
        known = before[stream.name]
        if events and numbers.random() < 0.4:
            _, (names, event) = numbers.choice(events)
            stream.wait_event(event)
            known |= names
        stream.enqueue(lambda n=number, w=frozenset(known): work(n, w))  # type: ignore[misc]
        known.add(number)
        events.append((number, (frozenset(known), stream.record())))
    for stream in streams:
        finish(stream)
    assert not broken
    assert len(finished) == 300


def test_work_is_on_the_timeline(device: CpuDevice, timeline: Timeline) -> None:
    device.d2h.enqueue(lambda: None, 100)
    device.d2h.enqueue(lambda: None, 23)
    device.h2d.enqueue(lambda: None)
    finish(device.d2h)
    finish(device.h2d)
    totals = timeline.totals()
    assert (totals["d2h"].nbytes, totals["d2h"].operations) == (123, 2)
    assert (totals["h2d"].nbytes, totals["h2d"].operations) == (0, 1)


def test_close_runs_what_is_enqueued_and_takes_nothing_more() -> None:
    device, ran = CpuDevice(Timeline()), []
    gate = Gate(shut=True)
    device.compute.enqueue(gate.pass_through)
    for i in range(50):
        device.compute.enqueue(lambda i=i: ran.append(i))  # type: ignore[misc]
    gate.open()
    assert device.close(WAIT_S)
    assert ran == list(range(50))
    for call in (device.compute.record, lambda: device.h2d.enqueue(lambda: None)):
        with pytest.raises(ClosedError):
            call()
    assert device.close(WAIT_S), "again"


def test_close_leaves_stuck_work_behind_in_time() -> None:
    device, gate = CpuDevice(Timeline()), Gate(shut=True)
    device.compute.enqueue(gate.pass_through)
    event = device.compute.record()
    gate.wait_for_one()
    assert not device.close(0.05)
    gate.open()
    assert event.wait(WAIT_S), "what was stuck still ends when it can"
    assert device.close(WAIT_S)


def test_a_callback_may_close_its_own_stream() -> None:
    """A stream does not wait for itself."""
    device, closed = CpuDevice(Timeline()), []
    device.compute.record().on_complete(lambda: closed.append(device.compute.close(WAIT_S)))
    assert device.close(WAIT_S)
    assert closed == [False]


def test_a_stream_that_broke_keeps_no_other_waiting() -> None:
    """Its events never complete: who waits for one hears of it, and close need not time out."""
    device, gate, ran = CpuDevice(Timeline()), Gate(shut=True), []

    def broken() -> None:
        gate.pass_through()
        raise MemoryError("planted")

    device.h2d.enqueue(broken)
    event = device.h2d.record()
    device.compute.wait_event(event)
    device.compute.enqueue(lambda: ran.append("behind"))
    gate.open()
    with pytest.raises(IntegrityError, match="planted"):
        device.join(event)
    started_s = time.monotonic()
    assert device.close(WAIT_S)
    assert time.monotonic() - started_s < WAIT_S / 2
    assert not ran


def test_a_handler_may_close_while_its_thread_enqueues(device: CpuDevice) -> None:
    stream = device.d2h
    assert isinstance(stream, CpuStream)
    with stream._putting:  # where the signal came
        assert stream.close(WAIT_S)


def test_a_process_may_end_without_close() -> None:
    """Its threads are in torch then; what they have begun ends, and nothing aborts."""
    script = """
import torch
from kvstrata.gpu_runtime import CpuDevice, Timeline
device = CpuDevice(Timeline())
pages = torch.zeros(1 << 24, dtype=torch.uint8)
def work():
    pages.add_(pages)
    device.d2h.enqueue(work)  # one without end
for _ in range(100):
    device.d2h.enqueue(work)
device.d2h.record().wait()
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(root / "src")}, timeout=WAIT_S * 3,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
