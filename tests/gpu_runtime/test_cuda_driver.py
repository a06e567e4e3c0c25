"""Calls of the CUDA driver that need none: what it is asked, and what is made of its answers."""

from __future__ import annotations

import ctypes
import gc
import re
from types import SimpleNamespace
from typing import Any

import pytest

from kvstrata.gpu_runtime import cuda_driver
from kvstrata.gpu_runtime.cuda_chunks import SOURCE
from kvstrata.gpu_runtime.cuda_driver import CudaCopyError
from kvstrata.gpu_runtime.cuda_events import ReusedEvent


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    driver = SimpleNamespace()
    monkeypatch.setattr(cuda_driver, "_driver", lambda **_: driver)
    return driver


def test_an_event_that_has_not_passed_is_no_error(driver: SimpleNamespace) -> None:
    answers = [600, 0, 700]
    driver.cuEventQuery = lambda event: answers.pop(0)
    event: Any = ReusedEvent.__new__(ReusedEvent)
    event.handle = 5
    assert [event.has_passed(), event.has_passed()] == [False, True]
    with pytest.raises(CudaCopyError, match="refused cuEventQuery: error 700"):
        event.has_passed()


def test_no_garbage_is_collected_while_a_graph_is_captured() -> None:
    """And whoever had switched that off finds it off."""
    try:
        for collects in (True, False):
            (gc.enable if collects else gc.disable)()
            with cuda_driver.no_collection():
                assert not gc.isenabled()
            assert gc.isenabled() == collects
    finally:
        gc.enable()


def test_a_thread_leaves_captures_of_others_alone(driver: SimpleNamespace) -> None:
    asked: list[int] = []

    def exchange(mode: Any) -> int:
        asked.append(ctypes.cast(mode, ctypes.POINTER(ctypes.c_int))[0])
        return 0

    driver.cuThreadExchangeStreamCaptureMode = exchange
    cuda_driver.leave_captures_alone()
    assert asked == [1], "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL"


def test_addresses_are_those_that_c_reads(
    driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of `Driver` in `enqueue.c`."""
    source = SOURCE.read_text()
    fields = re.findall(r"\(\*(\w+)\)\(", source[: source.index("} Driver;")])
    assert fields == ["record", "wait", "launch", "synchronize", "query", "copy_batch"]
    for field, name in zip(fields[:-1], cuda_driver.ADDRESSES, strict=True):
        assert field in name.lower()
    made = [ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0) for _ in range(6)]
    for name, function in zip(cuda_driver.ADDRESSES, made, strict=False):
        setattr(driver, name, function)
    batches = SimpleNamespace(long=made[5], tells_failed=True, constants=(11, 22))
    monkeypatch.setattr(cuda_driver, "_batches", lambda: batches)
    want = [ctypes.cast(function, ctypes.c_void_p).value for function in made]
    assert cuda_driver.addresses().tolist() == [*want, 1, 11, 22]
