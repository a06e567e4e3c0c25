"""The simulated device: whatever events leave free is reordered, by a seed.

Streams keep their own order and what events demand, and nothing else, as on a GPU. At each turn a
seed picks what goes on: the head of a stream, or a completion on its way to the host. Completions
are late: work behind an event, on its own stream and on those that waited for it, may have run long
before the host hears of it. Copies come in pieces, so that a reader in between sees torn pages
(`tear`), and pages are overwritten at the moment they become FREE (`poison`). So a missing wait
shows as a wrong byte or as a broken invariant, and the seed repeats it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvstrata.backends import ObjectId, PageResult, ReadRequest, WriteRequest
from kvstrata.backends.memory import MemoryBackend, MemoryOptions
from kvstrata.boundary import Outcome
from kvstrata.errors import ClosedError
from kvstrata.gpu_runtime.base import (
    Device,
    Event,
    ForwardContext,
    ForwardResult,
    ForwardRow,
    Stream,
)
from kvstrata.gpu_runtime.core import RuntimeCore
from kvstrata.gpu_runtime.device_pages import PageCopy
from kvstrata.gpu_runtime.oracle import OracleRunner
from kvstrata.gpu_runtime.timeline import Timeline
from kvstrata.gpu_runtime.turns import Turns, pause, rest
from kvstrata.staging import Pages

POISON = 0xDB
"""What the bytes of a FREE page are."""
DAWDLE_S = 0.3
MAX_WAIT_S = 3600.0


class SimEvent(Event):
    """`reached` is the device's view, on which streams wait; what the host sees comes later."""

    def __init__(self, turns: Turns, stream: str) -> None:
        self._turns, self.stream = turns, stream
        self.reached = False
        self.after: Sequence[SimEvent] = ()
        """What its stream waited for: their callbacks come first."""
        self._delivering = self._delivered = False
        self._callbacks: list[Callable[[], None]] = []

    def query(self) -> bool:
        return self._delivered

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._turns.wait_for(self.query, MAX_WAIT_S if timeout_s is None else timeout_s)

    def on_complete(self, callback: Callable[[], None]) -> None:
        with self._turns.lock:
            if not self._delivering:
                self._callbacks.append(callback)
                return
        callback()

    def deliver(self) -> None:
        with self._turns.lock:
            self._delivering = True
        for callback in self._callbacks:
            callback()
        self._callbacks.clear()
        self._delivered = True


class _Completions:
    """An actor: the events of one stream on their way to the host, in order."""

    def __init__(self) -> None:
        self.queue: deque[SimEvent] = deque()

    def ready(self) -> bool:
        return bool(self.queue) and all(event.query() for event in self.queue[0].after)

    def turn(self) -> None:
        self.queue.popleft().deliver()


_Work = tuple[Callable[[], None], int]


class SimStream(Stream):
    """An actor: its head runs when it is picked. Work runs on a fiber, so it may pause."""

    def __init__(self, name: str, turns: Turns, timeline: Timeline) -> None:
        self.name = name
        self._turns, self._timeline = turns, timeline
        self._queue: deque[_Work | SimEvent | tuple[SimEvent]] = deque()
        self._after: list[SimEvent] = []
        self._work: _Work | None = None
        """What the fiber is at."""
        self._closed = False
        self._completions = _Completions()
        self._fiber = turns.spawn(f"kvstrata-sim-{name}", self._serve, is_actor=False)
        turns.add(self)
        turns.add(self._completions)

    # ── for the runtime ──────────────────────────────────────────────────────────────────────────

    def enqueue(self, work: Callable[[], None], nbytes: int = 0) -> None:
        self._put((work, nbytes))

    def new_event(self) -> Event:
        return SimEvent(self._turns, self.name)

    def record(self, event: Event | None = None) -> Event:
        event = event or self.new_event()
        assert isinstance(event, SimEvent), "events of one device only"
        self._put(event)
        return event

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, SimEvent), "events of one device only"
        if not event.query():
            self._put((event,))

    def _put(self, item: _Work | SimEvent | tuple[SimEvent]) -> None:
        with self._turns.lock:
            if self._closed:
                raise ClosedError(f"stream {self.name!r} is closed")
            self._queue.append(item)
        self._turns.nudge()

    # ── as an actor ──────────────────────────────────────────────────────────────────────────────

    def ready(self) -> bool:
        if self._work is not None:
            return self._fiber.ready()
        if not self._queue:
            return False
        head = self._queue[0]
        return not (isinstance(head, tuple) and len(head) == 1) or head[0].reached

    def turn(self) -> None:
        if self._work is None:
            with self._turns.lock:
                item = self._queue.popleft()
            if isinstance(item, SimEvent):
                item.after, self._after = tuple(self._after), []
                item.reached = True
                self._completions.queue.append(item)
                return
            if len(item) == 1:
                self._after.append(item[0])
                return
            self._work = item
        self._fiber.turn()

    def _serve(self) -> None:
        while True:
            assert self._work is not None, "picked without work"
            work, nbytes = self._work
            start_s = self._turns.now()
            work()
            self._timeline.span(self.name, start_s, self._turns.now(), nbytes)
            self._work = None
            self._fiber.hand_back()

    @property
    def idle(self) -> bool:
        return self._work is None and not self._queue and not self._completions.queue

    def close(self) -> None:
        with self._turns.lock:
            self._closed = True


class SimDevice(Device):
    """A device of host memory whose order is drawn from the seed of `turns`."""

    def __init__(self, timeline: Timeline, turns: Turns) -> None:
        self.torch_device = torch.device("cpu")
        self.turns = turns
        self.compute: SimStream = SimStream("compute", turns, timeline)
        self.h2d: SimStream = SimStream("h2d", turns, timeline)
        self.d2h: SimStream = SimStream("d2h", turns, timeline)

    def fence(self) -> Event:
        event = SimEvent(self.turns, "host")
        event.reached = True  # who calls has done its work: the host is the device
        event.deliver()
        return event

    def close(self, deadline_s: float) -> bool:
        streams = (self.compute, self.h2d, self.d2h)
        for stream in streams:
            stream.close()
        return self.turns.wait_for(lambda: all(s.idle for s in streams), deadline_s)


# ── what makes a missing wait visible ────────────────────────────────────────────────────────────


def poison(core: RuntimeCore) -> None:
    """From now on a FREE page holds nothing but `POISON`. Before the first page is taken."""
    for name, table in core.tables.items():
        data = core.pools[name].data
        data.fill_(POISON)

        def spoil_device(pages: Pages, data: torch.Tensor = data) -> None:
            data[:, torch.from_numpy(pages)] = POISON

        table.on_free = spoil_device
    for name, table in core.staging.tables.items():
        array = core.staging.array(name)
        array.fill(POISON)

        def spoil_host(pages: Pages, array: np.ndarray[Any, Any] = array) -> None:
            array[pages] = POISON

        table.on_free = spoil_host


def written_while_free(core: RuntimeCore) -> list[str]:
    """Pools with FREE pages that do not hold what `poison` left: something has written there, too
    late or too early. So it is seen also when nobody takes the page and reads it."""
    device = {name: pool.data.transpose(0, 1).numpy() for name, pool in core.pools.items()}
    host = {name: core.staging.array(name) for name in core.pools}
    return [
        str(table)
        for tables, data in ((core.tables, device), (core.staging.tables, host))
        for name, table in tables.items()
        if (data[name][table._free_stack[: table.free]] != POISON).any()
    ]


def tear(core: RuntimeCore) -> None:
    """From now on copies between host and device run page by page, and each page in two halves,
    with turns of others in between."""
    for pool in core.pools.values():
        for method in ("gather", "scatter"):
            setattr(pool, method, _in_pieces(getattr(pool, method), out=method == "gather"))


def _in_pieces(whole: Callable[[PageCopy], None], *, out: bool) -> Callable[[PageCopy], None]:
    def one_page(copy: PageCopy) -> None:
        pause()
        first, second = _halves(copy, out=out)
        before = second.copy()
        whole(copy)
        second[...] = before
        pause()
        begun = first.copy()
        whole(copy)
        first[...] = begun

    def copy_in_pieces(copy: PageCopy) -> None:
        for i in range(len(copy.slots)):
            at = slice(i, i + 1)
            one_page(replace(copy, pages=copy.pages[at], slots=copy.slots[at]))

    return copy_in_pieces


def _halves(copy: PageCopy, *, out: bool) -> tuple[Any, Any]:
    """Views of the two halves of what a copy of one page writes."""
    if out:
        page = copy.host[int(copy.slots[0]), : copy.memory.page_bytes]
        middle = len(page) // 2
        return page[:middle], page[middle:]
    (data,) = copy.memory.tensors
    page = data[:, int(copy.pages[0])].numpy()
    middle = len(page) // 2
    return page[:middle], page[middle:]


# ── parts of an engine that takes turns ──────────────────────────────────────────────────────────


class SimRunner(OracleRunner):
    """The oracle, which lets others go on before it reads and before it writes, and which also
    reads the pages that a row has computed itself. `fails` says when a step raises."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: Callable[[], bool] = lambda: False
        self.weights = b""
        self.mixed: list[bytes] = []
        """Namespaces that were computed with two weights."""
        self._made_by: dict[bytes, bytes] = {}

    def new_weights(self, payload: bytes) -> None:
        pause()
        self.weights = payload

    def forward(self, rows: Sequence[ForwardRow], context: ForwardContext) -> ForwardResult:
        if self.fails():
            raise RuntimeError("planted")
        for row in rows:
            row.attached_pages = max(row.attached_pages, row.start // context.page_tokens)
        return super().forward(rows, context)

    def _verify(self, row: ForwardRow, keys: bytes, context: ForwardContext) -> tuple[int, int]:
        pause()
        return super()._verify(row, keys, context)

    def _compute(self, row: ForwardRow, keys: bytes, context: ForwardContext) -> None:
        pause()
        if self._made_by.setdefault(row.namespace, self.weights) != self.weights:
            self.mixed.append(row.namespace)
        super()._compute(row, keys, context)
        pause()


class SimBackend(MemoryBackend):
    """Memory behind a slow bus: it touches lent buffers in two halves, with turns in between.
    `dawdles` says when it lets `DAWDLE_S` simulated seconds pass there, `loses` when it does not
    find a page."""

    def __init__(self) -> None:
        super().__init__(MemoryOptions())
        self.dawdles: Callable[[], bool] = lambda: False
        self.loses: Callable[[], bool] = lambda: False
        self.held = 0
        """Pages in calls now."""

    def _wait(self) -> None:
        if self.dawdles():
            rest(DAWDLE_S)
        else:
            pause()

    @property
    def concurrency(self) -> int:
        return 3

    @property
    def max_batch(self) -> int:
        return 4

    def exists(self, objects: Sequence[ObjectId]) -> list[bool]:
        pause()
        return super().exists(objects)

    def read(self, requests: Sequence[ReadRequest]) -> list[PageResult]:
        results = []
        self.held += len(requests)
        for request in requests:
            pause()
            if self.loses():
                results.append(PageResult(Outcome.MISSING))
                continue
            scratch = [bytearray(b.nbytes) for b in request.buffers]
            views = tuple(memoryview(s) for s in scratch)
            results += super().read([ReadRequest(request.object, views)])
            for buffer, view in zip(request.buffers, views, strict=True):
                middle = buffer.nbytes // 2
                buffer[:middle] = view[:middle]
                self._wait()
                buffer[middle:] = view[middle:]
        self.held -= len(requests)
        return results

    def write(self, requests: Sequence[WriteRequest]) -> list[PageResult]:
        copies = []
        self.held += len(requests)
        for request in requests:
            parts = []
            for buffer in request.buffers:
                middle = buffer.nbytes // 2
                first = bytes(buffer[:middle])
                self._wait()
                parts.append(memoryview(first + bytes(buffer[middle:])))
            copies.append(WriteRequest(request.object, request.parent, request.depth, tuple(parts)))
        results = super().write(copies)
        pause()
        self.held -= len(requests)
        return results
