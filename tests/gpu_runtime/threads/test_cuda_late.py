"""What a followed copy into the device leaves to the next one, on the threads of its stream."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kvstrata.errors import IntegrityError
from kvstrata.gpu_runtime.testing import Gate


def leave_late(device: Any) -> tuple[Any, Any, Gate]:
    """A followed copy into the device: the event behind it, the event behind what follows, and what
    shuts that out."""
    gate = Gate(shut=True)
    device.h2d.enqueue(lambda: setattr(device._copies_in, "is_late", True), 7)
    event = device.h2d.record()
    device.h2d.enqueue(gate.pass_through)
    gate.wait_for_one()
    assert not event.recorded.is_set()
    return event, device.h2d.record(), gate


@pytest.mark.parametrize("end", ["nothing comes", "a copy", "a wait", "the end"])
def test_what_is_late_does_not_stay_so(
    device: Any, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """When nothing follows, before the stream waits for anything, and at its end."""
    ticks = itertools.count(1.0)
    tick = lambda event, *_, **__: setattr(event, "ms", next(ticks))  # noqa: E731
    monkeypatch.setattr(type(device._zero[0]), "record", tick)
    event, behind, gate = leave_late(device)
    if end == "a copy":
        device.h2d.enqueue(device._copies_in.catch_up)
    elif end == "a wait":
        device.h2d.wait_event(device.compute.new_event())  # never recorded
    elif end == "the end":
        device.h2d._queue.put(None)
    gate.open()
    for one in (event, behind):
        device.await_unless_broken(one.wait)
    assert device._copies_in.caught_up == ["kvstrata-h2d"]
    (start, first_end), (second_start, end_s) = device._timeline._spans["h2d"][:2]
    assert start < first_end < second_start < end_s
    assert device._timeline.totals()["h2d"].nbytes == 7
    assert device.fault is None
    if end == "a wait":
        device.fault = MemoryError("planted")  # nobody would ever wake it


def test_an_event_that_cannot_be_recorded_late_breaks_the_device(device: Any) -> None:
    """Not the copy that is enqueued meanwhile. Nothing behind it is enqueued: who waits is told."""
    event, behind, gate = leave_late(device)
    event.cuda.record = 0  # it cannot be called
    errors: list[Exception] = []

    def copy() -> None:
        try:
            device._copies_in.catch_up()
        except TypeError as error:
            errors.append(error)

    device.h2d.enqueue(copy)
    last = device.h2d.record()
    gate.open()
    for one in (event, behind, last):
        with pytest.raises(IntegrityError, match="not callable"):
            device.join(one)
    assert not errors
