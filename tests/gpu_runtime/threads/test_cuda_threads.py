"""The threads of `CudaStream` when something breaks, and registered memory, without a GPU."""

from __future__ import annotations

import time
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from kvstrata.errors import ConfigError, IntegrityError
from kvstrata.gpu_runtime import Timeline, cuda
from kvstrata.gpu_runtime.cpu import CpuEvent
from kvstrata.gpu_runtime.testing import Gate

LONG_S = 20.0
"""Longer than any of these tests may take: who waits for a deadline of this is seen."""


def close_at_once(device: Any) -> bool:
    started_s = time.monotonic()
    ended = device.close(LONG_S)
    assert time.monotonic() - started_s < LONG_S / 2, "it waited for what does not come"
    for stream in (device.compute, device.h2d, device.d2h):
        assert not stream._thread.is_alive()
        assert not stream._completer.is_alive()
    return bool(ended)


def broken() -> None:
    raise MemoryError("planted")


def test_order_and_completions(device: Any, registry: Any) -> None:
    device.pin(4096, [100, 50])
    heard: list[str] = []
    follower = type(device.compute.cuda)()
    device.compute.followers.append(follower)
    work, callback = Gate(shut=True), Gate(shut=True)
    device.h2d.enqueue(work.pass_through)
    event = device.h2d.record()
    device.compute.wait_event(event)
    behind = device.compute.record()
    event.on_complete(lambda: (callback.pass_through(), heard.append("event")))
    behind.on_complete(lambda: heard.append("behind"))
    work.open()
    callback.wait_for_one()
    assert not behind.wait(0.05), "the GPU has passed both; the callback of the first runs"
    callback.open()
    assert behind.wait(LONG_S)
    assert heard == ["event", "behind"]
    assert follower.waited == [event.cuda]
    assert device.compute.cuda.waited == [event.cuda]
    assert registry.registered == {4096: 100, 4196: 50}
    assert close_at_once(device)
    assert not registry.registered


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("joins", [True, False])
def test_who_waits_for_a_copy_to_be_enqueued_is_in_a_hurry(
    device: Any, joins: bool, is_new: bool
) -> None:
    """As long as it waits; copies the other way go at their pace."""

    def enqueue() -> None:
        hurry.sleep_until(CpuEvent(), device.await_unless_broken)
        others.append(bool(device.d2h.hurry))

    hurry, others = device.h2d.hurry, list[bool]()
    device.h2d.enqueue(enqueue)
    event = device.h2d.record(device.h2d.new_event() if is_new else None)
    if joins:
        device.join(event)
    else:
        device.compute.wait_event(event)
        assert device.compute.record().wait(LONG_S)
    assert (others, bool(hurry)) == ([False], False)
    with hurry:
        with hurry:
            pass
        assert hurry
    assert not hurry
    event.hurry = None  # nobody is, who need not wait
    device.await_recorded(event)


def test_a_hurry_is_handed_on(device: Any) -> None:
    """Who waits for a copy out that comes behind one in, waits for that as well."""
    device.h2d.enqueue(lambda: device.h2d.hurry.sleep_until(CpuEvent(), device.await_unless_broken))
    device.d2h.wait_event(device.h2d.record())
    device.join(device.d2h.record())
    assert not device.h2d.hurry
    assert not device.d2h.hurry
    assert device.fault is None


def test_who_sleeps_hears_of_a_device_that_broke(device: Any) -> None:
    """Within LOOK_S: nobody wakes it."""
    event = device.compute.new_event()
    device.h2d.wait_event(event)
    device.fault = MemoryError("planted")
    device.h2d._thread.join(LONG_S)
    assert not device.h2d._thread.is_alive()
    assert not device.h2d.hurry._sleepers


def test_a_hurry_that_is_interrupted_is_none(device: Any) -> None:
    class Interrupted:
        def put(self, _: None) -> None:
            raise KeyboardInterrupt

    hurry = device.h2d.hurry
    hurry._sleepers.add(Interrupted())
    with pytest.raises(KeyboardInterrupt), hurry:
        pass
    assert not hurry
    hurry._sleepers.clear()


@pytest.mark.parametrize("in_a_hurry", [True, False])
def test_what_a_copy_comes_behind_is_waited_for_on_the_host(device: Any, in_a_hurry: bool) -> None:
    """Unless somebody is in a hurry: what waits on the GPU slows launches there. Compute does."""
    work = Gate(shut=True)
    event = device.compute.new_event()
    event.cuda.synchronize = work.pass_through
    device.compute.record(event)
    work.wait_for_one()
    device.d2h.wait_event(event)
    behind = device.d2h.record()
    assert not behind.wait(0.05)
    waits = device.d2h.cuda.waited
    assert not waits
    with device.d2h.hurry if in_a_hurry else nullcontext():
        if not in_a_hurry:
            work.open()
        device.await_unless_broken(behind.recorded.wait)
    assert waits == [event.cuda]
    assert event.query() == (not in_a_hurry)
    work.open()
    assert behind.wait(LONG_S)
    assert not device.d2h.hurry._sleepers


def test_who_spins_and_what_is_used_again(device: Any) -> None:
    """A host thread spins for the end of a copy alone: not for a slice, nor for a model's step."""
    assert not device.h2d.new_event().cuda.kind["blocking"]
    assert device.compute.new_event().cuda.kind["blocking"]
    assert device.h2d.record().cuda.kind["blocking"]
    spans = []
    for _ in range(3):
        device.d2h.enqueue(lambda: None, 5)
        event = device.d2h.record()
        assert event.wait(LONG_S)
        spans.append(event.spans)
    assert spans[0] == spans[1] == spans[2]
    assert len(spans[0]) == 1
    assert device._timeline.totals()["d2h"].nbytes == 15


def test_times_stay_exact(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After seven hours CUDA's own are multiples of 2 ms."""
    zero_s, now_ms = device._zero[1], 0.0
    for step_ms in np.random.default_rng(1).uniform(40e3, 60e3, 500):
        now_ms += step_ms
        monkeypatch.setattr(type(device._zero[0]), "now_ms", now_ms)
        device.h2d.enqueue(lambda: None, 1)
        assert device.h2d.record().wait(LONG_S)
        start_s, _ = device._timeline._spans["h2d"][-1]
        assert start_s - zero_s == pytest.approx(now_ms / 1e3, abs=1e-4)


def test_a_stream_that_cannot_begin_breaks_the_device(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for what it would have done."""

    def fail(_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(cuda.torch.cuda, "set_device", fail)
    stream = cuda.CudaStream("late", Timeline(), device)
    stream.enqueue(lambda: None)
    event = stream.record()
    with pytest.raises(IntegrityError, match="planted"):
        device.await_unless_broken(event.wait)
    stream.close(LONG_S)


def test_a_completer_that_cannot_begin_breaks_the_device(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda.cuda_driver, "leave_captures_alone", broken)
    stream = cuda.CudaStream.__new__(cuda.CudaStream)
    stream.name, stream._device, stream._completions = "late", device, SimpleQueue()
    stream._completions.put(None)
    stream._complete()
    with pytest.raises(IntegrityError, match="planted"):
        device.check_fault()


def test_a_callback_that_raises_breaks_the_device(device: Any) -> None:
    """Else its thread would end unseen, and nothing of its stream would complete any more."""
    gate = Gate(shut=True)
    device.d2h.enqueue(gate.pass_through)
    device.d2h.record().on_complete(broken)
    behind = device.d2h.record()
    gate.open()
    with pytest.raises(IntegrityError, match="planted"):
        device.await_unless_broken(behind.wait)
    close_at_once(device)


def test_nobody_waits_for_a_stream_that_broke(device: Any, registry: Any) -> None:
    """Its events are never recorded. What is registered stays: something may still copy."""
    device.pin(4096, [100])
    gate = Gate(shut=True)
    device.h2d.enqueue(gate.pass_through)
    device.h2d.enqueue(broken)
    event = device.h2d.record()
    device.compute.wait_event(event)
    device.compute.enqueue(lambda: pytest.fail("it ran without what it waits for"))
    gate.open()
    with pytest.raises(IntegrityError, match="planted"):
        device.join(event)
    assert not close_at_once(device)
    assert registry.registered == {4096: 100}


def test_an_error_of_one_stream_keeps_no_others_completions_waiting(device: Any) -> None:
    gate = Gate(shut=True)
    device.h2d.enqueue(gate.pass_through)
    event = device.h2d.new_event()
    event.cuda.synchronize = broken_by_the_gpu
    device.h2d.record(event)
    device.compute.wait_event(event)
    behind = device.compute.record()
    gate.open()
    with pytest.raises(IntegrityError, match="illegal"):
        device.await_unless_broken(behind.wait)
    assert not close_at_once(device)


def broken_by_the_gpu() -> None:
    raise RuntimeError("an illegal memory access")


def test_memory_that_is_refused_costs_only_itself(device: Any, registry: Any) -> None:
    """Copies of what was pinned before go on: it must stay pinned."""
    device.pin(4096, [100, 50])
    registry.refuses.add(9100)
    with pytest.raises(ConfigError, match="100 of 150 bytes, then error 2"):
        device.pin(9000, [100, 50])
    assert registry.registered == {4096: 100, 4196: 50}
    assert close_at_once(device)
    assert not registry.registered
