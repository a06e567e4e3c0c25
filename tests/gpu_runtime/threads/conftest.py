"""A `CudaDevice` without a GPU: one that has done everything at once stands in for it. What a real
one orders is in `test_cuda.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvstrata.gpu_runtime import Timeline, cuda

LONG_S = 20.0


class InstantEvent:
    now_ms = 0.0

    def __init__(self, stream: object = None, **kind: bool) -> None:
        self.kind = kind
        self.synchronize: Callable[[], None] = lambda: None
        self.record(stream)

    def record(self, stream: object = None, *, may_block: bool = False) -> None:
        del stream, may_block
        self.ms = InstantEvent.now_ms

    def ms_until(self, later: InstantEvent) -> float:
        return float(np.float32(later.ms - self.ms))


class FakeStream:
    def __init__(self) -> None:
        self.waited: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


class FakeCopies:
    """Late when a test says so."""

    def __init__(self) -> None:
        self.is_late = False
        self._behind: list[Callable[[], None]] = []
        self.caught_up: list[str] = []
        """By which threads."""

    def catch_up(self) -> None:
        if self.is_late:
            self.is_late = False
            self.caught_up.append(threading.current_thread().name)
            while self._behind:
                self._behind.pop(0)()

    def afterwards(self, what: Callable[[], None]) -> None:
        if self.is_late:
            self._behind.append(what)
        else:
            what()

    def close(self) -> None: ...


class Registry:
    """`cudaHostRegister` and its undoing; refuses the addresses in `refuses`."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.refuses: set[int] = set()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        del flags
        if address in self.refuses:
            return 2
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, registry: Registry) -> Iterator[Any]:
    stream, made = FakeStream(), list[int]()

    def make(device: object, priority: int) -> FakeStream:
        del device
        made.append(priority)
        return stream

    def fail(*args: Any, **more: Any) -> None:
        raise RuntimeError("the error of the call before")

    gpu = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 1, cudart=lambda: registry,
        Event=InstantEvent, Stream=make, current_stream=lambda *_: stream,
        device=lambda device: nullcontext(), set_device=lambda device: None,
        set_stream=lambda stream: None,
    )  # fmt: skip
    monkeypatch.setattr(cuda, "torch", SimpleNamespace(cuda=gpu, device=torch.device, zeros=fail))
    monkeypatch.setattr(cuda, "CudaCopies", lambda *_, **__: FakeCopies())
    monkeypatch.setattr(cuda, "ReusedEvent", InstantEvent)
    left_alone: list[int] = []
    leave = lambda: left_alone.append(threading.get_ident())  # noqa: E731
    monkeypatch.setattr(cuda.cuda_driver, "leave_captures_alone", leave)
    monkeypatch.setattr(InstantEvent, "now_ms", 0.0)
    device = cuda.CudaDevice(Timeline())
    assert made == [0, -1, -1], "kernels of copies do not wait for a model's"
    yield device
    device.close(LONG_S)
    streams = (device.compute, device.h2d, device.d2h)
    threads = {t.ident for s in streams for t in (s._thread, s._completer)}
    assert threads <= set(left_alone), "a model captures graphs meanwhile"
