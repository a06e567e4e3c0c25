"""The CPU device: a real device whose streams are ordered queues on threads of their own.

Copies and compute run in torch, which releases the interpreter lock, so streams do overlap. Order
between streams exists only where an event makes it, exactly as on a GPU.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import torch

from kvstrata.errors import ClosedError
from kvstrata.gpu_runtime.base import Device, Event, Stream
from kvstrata.gpu_runtime.timeline import Timeline

logger = logging.getLogger(__name__)

EXIT_S = 2.0
"""For all streams that nobody closed to end their work when the process does."""


class CpuEvent(Event):
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._completing = False
        self._callbacks: list[Callable[[], None]] = []

    def query(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._done.wait(timeout_s)

    def on_complete(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self._completing:
                self._callbacks.append(callback)
                return
        callback()

    def complete(self) -> None:
        """Run the callbacks, then let waiters go: so a waiting stream's callbacks come later."""
        with self._lock:
            self._completing = True
        for callback in self._callbacks:
            callback()
        self._callbacks = []
        self._done.set()


_Work = tuple[Callable[[], None], int]
Item = _Work | CpuEvent | tuple[Event]
"""Of a stream's queue: work and its bytes, an event to record, an event to wait for."""


class CpuStream(Stream):
    """One thread that runs what was enqueued, in order."""

    def __init__(self, name: str, timeline: Timeline, device: Device) -> None:
        self.name = name
        self._timeline = timeline
        self._owner = device
        self._queue: SimpleQueue[Item | None] = SimpleQueue()
        """None is the last."""
        self._putting = threading.RLock()  # a signal's handler may close while its thread puts
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"kvstrata-{name}", daemon=True)
        self._thread.start()
        _streams.add(self)

    def enqueue(self, work: Callable[[], None], nbytes: int = 0) -> None:
        self._put((work, nbytes))

    def new_event(self) -> CpuEvent:
        return CpuEvent()

    def record(self, event: Event | None = None) -> Event:
        event = event or self.new_event()
        assert isinstance(event, CpuEvent), "events of one device only"
        self._put(event)
        return event

    def wait_event(self, event: Event) -> None:
        if not event.query():
            self._put((event,))

    def _put(self, item: Item) -> None:
        with self._putting:
            if self._closing and not _exiting:
                raise ClosedError(f"stream {self.name!r} is closed")
            self._queue.put(item)

    def _run(self) -> None:
        while (item := self._take()) is not None:
            try:
                if isinstance(item, CpuEvent):
                    self._record_now(item)
                elif len(item) == 1:
                    self._wait_now(item[0])
                else:
                    self._work_now(*item)
            except BaseException as exc:
                logger.exception("stream %s is broken", self.name)
                self._owner.fault = self._owner.fault or exc
                return  # nothing behind it completes: what depends on it must not be believed

    def _take(self) -> Item | None:
        return self._queue.get()

    def _work_now(self, work: Callable[[], None], nbytes: int) -> None:
        """On the stream's thread, as the two below: `CudaStream` does them on the GPU."""
        start_s = time.monotonic()
        try:
            work()
        finally:
            self._timeline.span(self.name, start_s, time.monotonic(), nbytes)

    def _record_now(self, event: CpuEvent) -> None:
        event.complete()

    def _wait_now(self, event: Event) -> None:
        self._owner.await_unless_broken(event.wait)

    def close(self, deadline_s: float) -> bool:
        with self._putting:
            self._closing = True
            self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(max(0.0, deadline_s))
        return not self._thread.is_alive()


_streams: weakref.WeakSet[CpuStream] = weakref.WeakSet()
_exiting = False


@atexit.register
def _end_streams() -> None:
    """An interpreter that goes away under a thread that is in torch aborts the process. What has
    not begun then does not run."""
    global _exiting  # noqa: PLW0603
    _exiting = True
    end_s = time.monotonic() + EXIT_S
    for stream in list(_streams):
        stream.close(end_s - time.monotonic())


class CpuDevice(Device):
    def __init__(self, timeline: Timeline) -> None:
        self.torch_device = torch.device("cpu")
        self.compute: CpuStream = CpuStream("compute", timeline, self)
        self.h2d: CpuStream = CpuStream("h2d", timeline, self)
        self.d2h: CpuStream = CpuStream("d2h", timeline, self)

    def fence(self) -> Event:
        event = CpuEvent()
        event.complete()  # who calls has done its work: the host is the device
        return event

    def join(self, event: Event) -> None:
        self.await_unless_broken(event.wait)

    def close(self, deadline_s: float) -> bool:
        end = time.monotonic() + deadline_s
        ended = True
        for stream in (self.compute, self.h2d, self.d2h):
            ended = stream.close(end - time.monotonic()) and ended
        return ended
