"""The CUDA device: one GPU, with a compute stream and a copy stream each way.

Each stream has a thread that enqueues its work on a CUDA stream, and a thread that waits for its
events and runs their callbacks. So enqueueing never blocks control. What waits on the GPU slows
launches there (`cuda_copies`), so only compute always does; the thread of a copy stream waits on
the host for what its copies come behind, unless somebody waits for them to be enqueued (`Hurry`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue

import torch

from kvstrata.errors import ConfigError, Where
from kvstrata.gpu_runtime import cuda_driver
from kvstrata.gpu_runtime.base import Device, Event
from kvstrata.gpu_runtime.cpu import CpuEvent, CpuStream, Item
from kvstrata.gpu_runtime.cuda_copies import CHUNK_BYTES, CudaCopies
from kvstrata.gpu_runtime.cuda_events import ReusedEvent
from kvstrata.gpu_runtime.device_pages import DevicePages, PageCopy
from kvstrata.gpu_runtime.hurry import Hurry
from kvstrata.gpu_runtime.timeline import Timeline

logger = logging.getLogger(__name__)

_ALREADY_REGISTERED = 712
"""cudaErrorHostMemoryAlreadyRegistered."""
_EXACT_MS = 60_000.0
"""CUDA tells the time between two events as a float of 32 bits: to 4 µs after a minute, to 1 ms
after three hours."""


class _Span:
    """Timing events around one piece of work; used again when they were read."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.start, self.end = (ReusedEvent(stream, timing=True) for _ in range(2))
        self.nbytes = 0


class CudaEvent(CpuEvent):
    """A CUDA event. `recorded` is set when it is enqueued on its stream; it is complete when the
    GPU has passed it and its callbacks have run.

    The host sleeps for it until an interrupt comes, or `spins`: that hears 0.1 to 0.5 ms sooner.
    """

    def __init__(self, hurry: Hurry, *, spins: bool = False) -> None:
        """`hurry`: of its stream."""
        super().__init__()
        self.hurry = hurry
        self.cuda = torch.cuda.Event(blocking=not spins)
        self.recorded = threading.Event()
        self.after: Sequence[Event] = ()
        """Events that its stream waited for: their callbacks run first."""
        self.spans: Sequence[_Span] = ()
        """Work before it, since the event before: how long it took is noted first."""


class CudaStream(CpuStream):
    """A CUDA stream behind a thread, which has it as its current one: what work allocates belongs
    to the stream and is reused in its order."""

    def __init__(
        self, name: str, timeline: Timeline, device: CudaDevice, *, copies: bool = False
    ) -> None:
        self._device = device
        self._has_failed = False
        self.cuda = torch.cuda.Stream(device.torch_device, priority=-1 if copies else 0)
        self._after: list[Event] = []
        self._spans: list[_Span] = []
        self._spare_spans: deque[_Span] = deque()
        self.followers: list[torch.cuda.Stream] = []
        """They wait for what this one waits for: `CudaCopies` runs on them as well."""
        self.hurry = Hurry()
        self.copies: CudaCopies | None = None
        """What it runs, if it is for copies."""
        self._completions: SimpleQueue[CudaEvent | None] = SimpleQueue()
        self._completer = threading.Thread(
            target=self._complete, name=f"kvstrata-{name}-done", daemon=True
        )
        super().__init__(name, timeline, device)
        self._completer.start()

    def new_event(self) -> CudaEvent:
        """Somebody waits for it. Behind a copy, what is left to wait for is one slice at most."""
        return CudaEvent(self.hurry, spins=self.copies is not None)

    def record(self, event: Event | None = None) -> Event:
        return super().record(event or CudaEvent(self.hurry))

    def note(self, event: CudaEvent) -> None:
        """Complete `event`, which was recorded elsewhere, when the GPU has passed it."""
        self._completions.put(event)

    def _run(self) -> None:
        with self._breaks_the_device():
            torch.cuda.set_device(self._device.torch_device)
            torch.cuda.set_stream(self.cuda)
            cuda_driver.leave_captures_alone()
            super()._run()
            if not self._has_failed:
                self._catch_up()

    def _take(self) -> Item | None:
        if self._queue.empty():
            self._catch_up()
        return None if self._has_failed else super()._take()

    def _catch_up(self) -> None:
        if self.copies is not None:
            self.copies.catch_up()

    def _afterwards(self, what: Callable[[], None]) -> None:
        """Do it when the stream is behind all copies."""
        if self.copies is None:
            what()
        else:
            self.copies.afterwards(partial(self._do_or_fail, what))

    def _do_or_fail(self, what: Callable[[], None]) -> None:
        if not self._has_failed:
            with self._breaks_the_device():  # it is no fault of the copy that runs now
                what()

    def fail(self, error: BaseException) -> None:
        self._has_failed = True
        self._device.fault = self._device.fault or error

    def _work_now(self, work: Callable[[], None], nbytes: int) -> None:
        span = self._spare_spans.popleft() if self._spare_spans else _Span(self.cuda)
        span.nbytes = nbytes
        may_block = self.copies is None  # a model's launches fill the stream
        self._afterwards(partial(span.start.record, self.cuda, may_block=may_block))
        work()
        self._afterwards(partial(self._end, span, may_block=may_block))

    def _end(self, span: _Span, *, may_block: bool) -> None:
        span.end.record(self.cuda, may_block=may_block)
        self._spans.append(span)

    def _record_now(self, event: CpuEvent) -> None:
        assert isinstance(event, CudaEvent), "events of one device only"
        self._afterwards(partial(self._record_here, event))

    def _record_here(self, event: CudaEvent) -> None:
        event.after, self._after = tuple(self._after), []
        event.spans, self._spans = self._spans, []
        event.cuda.record(self.cuda)
        event.recorded.set()
        self._completions.put(event)

    def _wait_now(self, event: Event) -> None:
        assert isinstance(event, CudaEvent), "events of one device only"
        if self.copies is not None:
            self.copies.catch_up()
            self.hurry.sleep_until(event, self._device.await_unless_broken)
        self._device.await_recorded(event)
        for stream in (self.cuda, *self.followers):
            stream.wait_event(event.cuda)
        self._after.append(event)

    def _complete(self) -> None:
        """Wait for events in order and run their callbacks. After a CUDA error (the context is lost
        then), or a callback that raised, nothing completes: what depends on it must not be
        believed."""
        with self._breaks_the_device():
            cuda_driver.leave_captures_alone()
        while (event := self._completions.get()) is not None:
            with self._breaks_the_device():
                self._complete_one(event)

    @contextmanager
    def _breaks_the_device(self) -> Iterator[None]:
        try:
            yield
        except BaseException as exc:
            logger.exception("stream %s failed", self.name)
            self.fail(exc)

    def _complete_one(self, event: CudaEvent) -> None:
        for before in event.after:  # these may take long: nobody spins meanwhile
            self._device.await_unless_broken(before.wait)
        event.cuda.synchronize()
        if self._device.fault is not None:
            return
        for span in event.spans:
            self._device.note_span(self, span)
        self._spare_spans.extend(event.spans)
        event.complete()

    def close(self, deadline_s: float) -> bool:
        end_s = time.monotonic() + deadline_s
        ended = super().close(deadline_s)
        self._completions.put(None)
        if threading.current_thread() is not self._completer:
            self._completer.join(max(0.0, end_s - time.monotonic()))
        return ended and not self._completer.is_alive()


class CudaDevice(Device):
    """GPU `index`. Raises ConfigError where there is none."""

    def __init__(
        self, timeline: Timeline, index: int = 0, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise ConfigError(
                f"there is no CUDA device {index}",
                where=Where(key="device.kind"),
                remedy='use device.kind = "cpu", or install a driver and a CUDA build of torch',
            )
        self.torch_device = torch.device("cuda", index)
        self._timeline = timeline
        self._registered: list[int] = []
        with torch.cuda.device(self.torch_device):
            zero = ReusedEvent(torch.cuda.current_stream(), timing=True)
            zero.synchronize()
        self._zero = zero, time.monotonic()
        """An event, and when it was by the host's clock."""
        self.compute: CudaStream = CudaStream("compute", timeline, self)
        self.h2d: CudaStream = CudaStream("h2d", timeline, self, copies=True)
        self.d2h: CudaStream = CudaStream("d2h", timeline, self, copies=True)
        self._copies_in, self._copies_out = (
            CudaCopies(
                self.torch_device,
                stream,
                out=out,
                chunk_bytes=chunk_bytes // 16 * 16,
            )
            for stream, out in ((self.h2d, False), (self.d2h, True))
        )
        self.h2d.copies, self.d2h.copies = self._copies_in, self._copies_out

    def copy_out(self, copy: PageCopy) -> None:
        self._copies_out.copy(copy)

    def copy_in(self, copy: PageCopy) -> None:
        self._copies_in.copy(copy)

    def fence(self) -> Event:
        event = self.compute.new_event()
        event.cuda.record(torch.cuda.current_stream(self.torch_device))
        event.recorded.set()
        self.compute.note(event)
        return event

    def join(self, event: Event) -> None:
        assert isinstance(event, CudaEvent), "events of one device only"
        self.await_recorded(event)
        torch.cuda.current_stream(self.torch_device).wait_event(event.cuda)

    def await_recorded(self, event: CudaEvent) -> None:
        """Until its own thread has enqueued it; from then on the GPU can wait for it."""
        if not event.recorded.is_set():
            with event.hurry:
                self.await_unless_broken(event.recorded.wait)

    def prepare(self, memory: DevicePages) -> None:
        with torch.cuda.device(self.torch_device):
            self._copies_in.prepare(memory)
            self._copies_out.prepare(memory)
            torch.cuda.synchronize()

    def note_span(self, stream: CudaStream, span: _Span) -> None:
        """Times on the GPU, as seconds of the host's clock. Any thread, for spans of its stream."""
        zero, zero_s = self._zero
        start_ms = zero.ms_until(span.start)
        start_s = zero_s + start_ms / 1e3
        end_s = start_s + span.start.ms_until(span.end) / 1e3
        self._timeline.span(stream.name, start_s, end_s, span.nbytes)
        if start_ms > _EXACT_MS:
            self._zero = span.start, start_s
            span.start = ReusedEvent(stream.cuda, timing=True)

    def pin(self, address: int, chunk_bytes: Sequence[int]) -> None:
        cudart = torch.cuda.cudart()
        total, done, before = sum(chunk_bytes), 0, len(self._registered)
        for nbytes in chunk_bytes:
            with torch.cuda.device(self.torch_device):
                code = int(cudart.cudaHostRegister(address + done, nbytes, 0))
            if code:
                self._unpin(before)  # what was pinned earlier may be in use
                with suppress(RuntimeError):  # the next call of torch would report it again
                    torch.zeros((), device=self.torch_device)
                why = "memory is registered already" if code == _ALREADY_REGISTERED else "refused"
                raise ConfigError(
                    f"cannot pin host memory: {done} of {total} bytes, then error {code} ({why})",
                    where=Where(key="staging.bytes"),
                    remedy="make staging.bytes smaller, or raise the memory and memlock limits",
                )
            self._registered.append(address + done)
            done += nbytes

    def _unpin(self, first: int = 0) -> None:
        cudart = torch.cuda.cudart()
        with torch.cuda.device(self.torch_device):
            for address in self._registered[first:]:
                cudart.cudaHostUnregister(address)
        del self._registered[first:]

    def close(self, deadline_s: float) -> bool:
        end_s = time.monotonic() + deadline_s
        ended = True
        for stream in (self.compute, self.h2d, self.d2h):
            ended = stream.close(end_s - time.monotonic()) and ended
        # What was enqueued before something broke was not waited for.
        ended = ended and self.fault is None
        if ended:  # else something may still copy: the memory stays pinned, and mapped
            self._copies_in.close()
            self._copies_out.close()
            self._unpin()
        return ended
