"""Copies between GPU pages and pinned host pages that leave compute alone.

The bus is the copy engines' work, which takes no multiprocessor. They are slow only when pieces are
small, so there are two ways, by the size of a piece (a layer's K, say, of one page):

* `direct`, from DIRECT_BYTES on: a few calls of the driver name all pieces of a slice. Below that
  enqueueing them (0.5 to 1.2 µs a piece) takes nearly as long as the bus, or longer.
* through chunks: a small kernel gathers pieces into one of two contiguous chunks of device memory,
  and the copy engine moves whole pages from there, while the kernel fills the other chunk; scatter
  is the mirror image.

Copies through chunks are on one stream each way: on two the engine would mix them, and both chunks
would be free at the same time, and then neither. Kernels are on another. Of these two the one that
ends a copy is the stream that others wait for.

A stream that waits on the GPU asks for its event again and again, on one of the two ways by which
the GPU takes launches, and the streams that share it, about half of all, launch slower: a loop of
launches beside copies into the device lost 29 % on one of those, else 11 %. So the host launches
kernels when their chunk is there, as long as nobody waits for the rest to be enqueued (`Hurry`);
the last one of a copy into the device when the next copy is on the bus, where that is at hand.

Storage that reaches the device itself (GPUDirect) moves whole pages to and from chunks of its own
there. Between those and pages small pieces go by the same kernels, large ones directly as well.

What a chunk costs the host is a captured graph, four events and one call of the driver. None of it
is on the thread that launches compute, and most of it is compiled C without the interpreter lock
(`cuda_chunks`). The figures are in docs/decisions/0008.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch

from kvstrata.errors import ConfigError, Where
from kvstrata.gpu_runtime import cuda_driver
from kvstrata.gpu_runtime.chunk_kernels import HAS_TRITON, ORDER_PAGES, capture, new_steps
from kvstrata.gpu_runtime.cuda_chunks import PAUSE, ChunkLoop, Step, borders_of, compiled
from kvstrata.gpu_runtime.cuda_driver import Numbers
from kvstrata.gpu_runtime.cuda_events import ReusedEvent
from kvstrata.gpu_runtime.device_pages import DevicePages, PageCopy, host_runs
from kvstrata.gpu_runtime.hurry import Hurry

DIRECT_BYTES = 128 << 10
CHUNK_BYTES = 64 << 20
"""As fast as 32 MiB with half the calls; 128 MiB are no faster (H200)."""


class CopyStream(Protocol):
    """What `CudaCopies` needs of its stream."""

    cuda: torch.cuda.Stream
    """Into the device it runs kernels: of high priority, these do not wait for a model's."""
    followers: list[torch.cuda.Stream]
    """They wait for every event that the stream waits for."""
    hurry: Hurry
    """Of who waits for the stream."""

    def fail(self, error: BaseException) -> None:
        """What was enqueued before this will never be complete."""


FIRST_BYTES, CALL_BYTES = 4 << 20, 32 << 20
"""Of a direct copy, so much goes with one call: the driver starts when it returns, so the first one
is short where nothing moves yet, and each of the next moves while twice as much is enqueued. None
is long: other threads' calls wait for it."""
FIRST_CHUNK_BYTES = 8 << 20
"""Out of the device where nothing moves yet: a chunk is gathered before it moves."""
LAST_CHUNK_BYTES = 16 << 20
"""Into the device, where no copy follows at once: the kernel of the last chunk waits on the GPU,
for 0.3 ms."""
RING = 24
"""Chunks that may be enqueued at once. Even. More than `CopyQueue` lets be under way, of pages of
16 KiB and more; else the enqueueing thread waits for the first of them."""


class Late(NamedTuple):
    """A kernel that is not launched yet: its pages are on their way to the chunk of its step."""

    number: int
    copy: PageCopy
    step: Step


class CudaCopies:
    """One direction of one GPU. Called by the thread of its stream only, which is current.

    The stream is behind every copy: what waits for it, waits for them. Of one into the device that
    is followed, it may be so when that comes, or at `catch_up`. Copies wait for what the
    stream has waited for since this was made; no copy may count on the order among them. Device and
    host pages must stay until the stream has passed them; index tensors and chunks are kept here
    until then.
    """

    def __init__(
        self,
        device: torch.device,
        owner: CopyStream,
        *,
        out: bool,
        chunk_bytes: int,
        ring: int = RING,
    ) -> None:
        self._device, self._owner, self._out = device, owner, out
        self._chunk_bytes, self._ring = chunk_bytes, ring
        with torch.cuda.device(device):
            self._follower = torch.cuda.Stream(priority=-1)
            self._last_direct = ReusedEvent(owner.cuda)
        self._kernels, self._bus = (
            (self._follower, owner.cuda) if out else (owner.cuda, self._follower)
        )
        owner.followers.append(self._follower)
        self._steps: list[Step] = []
        self._turn = 0
        self._known: list[tuple[DevicePages, torch.Tensor]] = []
        """Memory that was prepared, and where its pieces start: int64 words, on the device."""
        self._loop: ChunkLoop | None = None
        self._late: Late | None = None
        self._behind: list[Callable[[], None]] = []
        """Called when the kernel that is late is launched, before any that comes next."""
        self.batched = cuda_driver.has_batches()

    @property
    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        """All that the copies run on."""
        return self._owner.cuda, self._follower

    def copy(self, copy: PageCopy) -> None:
        """Enqueue, while it moves unless anybody is in a hurry. Raises CudaCopyError and what torch
        and Triton raise; the stream is behind what was enqueued all the same. A kernel that a copy
        before has left is launched then, too; if that cannot be, the stream fails."""
        torch.cuda.set_device(self._device)  # the driver's calls need this thread to have a context
        late = self._late
        try:
            self.prepare(copy.memory)
            if self._is_direct(copy.memory):
                self.catch_up()
                self._direct(copy)
            elif copy.is_staged_on_device:
                self.catch_up()
                self._on_device(copy)
            else:
                self._through_chunks(copy)
        except BaseException:
            if self._late is not late:
                self._late = None  # it is of the copy that failed
            self._close_ranks()
            self._end_late()
            raise

    def afterwards(self, what: Callable[[], None]) -> None:
        """Call `what`, which does not raise, when the stream is behind all copies: now, or as part
        of the next one or of `catch_up`."""
        if self._late is None:
            what()
        else:
            self._behind.append(what)

    def catch_up(self) -> None:
        """The stream is behind all copies: the GPU waits for what is late."""
        if self._late is not None:
            self._late.step.bussed.hold_back(self._kernels)
            self._move_late()

    def _move_late(self) -> None:
        assert self._late is not None, "asked before"
        self._move(*self._late)
        self._caught_up()

    def _end_late(self) -> None:
        """No copy that comes next may find one here whose chunk it would use."""
        try:
            self.catch_up()
        except cuda_driver.CudaCopyError as error:
            self._late = None
            self._behind.clear()
            self._owner.fail(error)

    def _caught_up(self) -> None:
        self._late = None
        behind, self._behind = self._behind, []
        for what in behind:
            what()

    def _close_ranks(self) -> None:
        """After a failure, wherever it was: who uses a chunk next waits for what was enqueued on
        either stream, and so does the owner's; who writes an order, for the kernels."""
        moved, bussed = ReusedEvent(self._kernels), ReusedEvent(self._bus)
        moved.hold_back(self._bus)
        bussed.hold_back(self._kernels)
        for step in self._steps:
            step.moved.record(self._kernels)

    def prepare(self, memory: DevicePages) -> None:
        """Compile and capture what copies of `memory` need. Idempotent. Raises ConfigError for
        pages that are larger than a chunk."""
        if self._is_direct(memory) or any(known is memory for known, _ in self._known):
            return
        self.catch_up()  # what is made here may be in its way
        if memory.page_bytes > self._chunk_bytes:
            raise ConfigError(
                f"a page has {memory.page_bytes} bytes, in pieces of {memory.layout.piece_bytes}: "
                f"more than a chunk of {self._chunk_bytes}",
                where=Where(key="device.chunk_bytes"),
                remedy="make pages smaller, or chunks larger",
            )
        if not self._steps:
            steps = new_steps(self._device, self._ring, self._chunk_bytes, self._kernels, self._bus)
            function = compiled() if HAS_TRITON and self.batched else None
            if function is not None:
                self._loop = ChunkLoop(function, steps, self._owner.hurry, most_pages=ORDER_PAGES)
            self._steps = steps
        starts = memory.layout.starts - memory.layout.starts[0]
        words = torch.from_numpy(starts // memory.layout.word_bytes).to(self._device)
        captured = capture(self._steps, memory, words, out=self._out) if HAS_TRITON else []
        torch.cuda.synchronize(self._device)
        for step, (graph, kernel) in zip(self._steps, captured, strict=False):
            step.captured.append(graph)
            step.graphs.append(kernel)
        if self._loop is not None:
            self._loop.add_kernels([kernel for _, kernel in captured])
        self._known.append((memory, words))

    def close(self) -> None:
        """When the streams have ended: give graphs and chunks back."""
        with torch.cuda.device(self._device):
            for graph in (graph for step in self._steps for graph in step.graphs):
                with suppress(cuda_driver.CudaCopyError):  # the others go all the same
                    cuda_driver.destroy(graph)
        self._late = None
        self._steps.clear()
        self._known.clear()
        self._loop = None

    def _is_direct(self, memory: DevicePages) -> bool:
        return self.batched and memory.layout.piece_bytes >= DIRECT_BYTES

    # ── large pieces ─────────────────────────────────────────────────────────────────────────────

    def _direct(self, copy: PageCopy) -> None:
        layout = copy.memory.layout
        there = layout.starts[copy.part] + copy.pages[:, None] * layout.page_stride
        offsets = np.asarray(copy.pieces) * layout.piece_bytes
        here = copy.host_address + copy.slots[:, None] * copy.host_step + offsets
        there, here = there.ravel(), here.ravel()
        runs = np.array([there, here, np.full(there.size, layout.piece_bytes)])
        first, most = (max(1, n // layout.piece_bytes) for n in (FIRST_BYTES, CALL_BYTES))
        count, at = first if self._last_direct.has_passed() else most, 0
        while at < there.size:
            self._enqueue(runs[:, at : at + count], self._owner.cuda)
            at, count = at + count, min(2 * count, most)
        self._last_direct.record(self._owner.cuda)

    def _enqueue(self, runs: Numbers, stream: torch.cuda.Stream) -> None:
        """`runs`: addresses on the device and on the host, and bytes; int64 [3, n]."""
        device, host, nbytes = runs
        target, source = (host, device) if self._out else (device, host)
        cuda_driver.copy_batch(target, source, nbytes, stream.cuda_stream, batched=self.batched)

    # ── through chunks ───────────────────────────────────────────────────────────────────────────

    def _through_chunks(self, copy: PageCopy) -> None:
        nbytes = len(copy.pieces) * copy.memory.layout.piece_bytes
        borders = self._borders(copy, nbytes)
        run = self._by_python if self._loop is None else partial(self._by_c, self._loop)
        run(copy, borders, nbytes, leaves=copy.is_followed and not self._out)

    def _by_c(
        self, loop: ChunkLoop, copy: PageCopy, borders: list[int], nbytes: int, *, leaves: bool
    ) -> None:
        late, number = self._late, self._number_of(copy.memory)
        self._turn, code, call = loop.run(
            copy, borders, number, self._turn, nbytes=nbytes, joins=_joins(copy, nbytes),
            out=self._out, kernels=self._kernels.cuda_stream, bus=self._bus.cuda_stream,
            late=late and (late.step.turn, late.number), caught_up=self._caught_up, leaves=leaves,
        )  # fmt: skip
        cuda_driver.check(code, call)
        if leaves and len(borders) > 1:
            self._late = Late(number, copy, self._steps[self._turn - 1])

    def _by_python(self, copy: PageCopy, borders: list[int], nbytes: int, *, leaves: bool) -> None:
        number = self._number_of(copy.memory)
        places, here, lengths = self._host_runs(copy, nbytes, borders)
        for at, end in pairwise(borders):
            before = self._steps[self._turn - 2]  # the last one with this chunk
            step, some = self._next_step(), copy.some(slice(at, end))
            now = slice(*np.searchsorted(places, (at, end)))
            there = step.address + (places[now] - at) * nbytes
            runs = np.array([there, here[now], lengths[now]])
            order = step.write_order(some, page_bytes=nbytes)
            if self._out:
                self._come_behind(before.bussed, (end - at) * nbytes)
                self._move(number, some, step)
            elif HAS_TRITON:
                runs = np.concatenate((runs, order), axis=1)
            (step if self._out else before).moved.hold_back(self._bus)
            self._enqueue(runs, self._bus)
            step.bussed.record(self._bus)
            if self._late is not None:
                self._come_behind(self._late.step.bussed, (end - at) * nbytes)
                self._move_late()
            if not self._out:  # the next one goes on the bus first
                self._late = Late(number, some, step)
        if not leaves:
            self.catch_up()

    def _come_behind(self, event: ReusedEvent, nbytes: int) -> None:
        """What goes to the kernels' stream next does: the host sleeps, or if anybody is in a hurry,
        the stream waits. `nbytes` move after the event, so it may be late."""
        while not event.has_passed():
            if self._owner.hurry:
                event.hold_back(self._kernels)
                return
            time.sleep(nbytes / PAUSE / 1e9)

    def _next_step(self) -> Step:
        step = self._steps[self._turn]
        self._turn = (self._turn + 1) % self._ring
        step.moved.synchronize()  # long ago, as a rule: then its order may be written again
        return step

    def _borders(self, copy: PageCopy, nbytes: int) -> list[int]:
        """Of its chunks, with `nbytes` of each page. The first is short where the bus waits for it,
        and the last where the GPU waits for it alone."""
        most, first, last = min(self._chunk_bytes // nbytes, ORDER_PAGES), 0, 0
        if self._out and self._steps[self._turn - 1].bussed.has_passed():
            first = max(1, FIRST_CHUNK_BYTES // nbytes)
        elif not (self._out or copy.is_followed):
            last = max(1, LAST_CHUNK_BYTES // nbytes)
        return borders_of(len(copy.pages), most, first=first, last=last)

    @staticmethod
    def _host_runs(
        copy: PageCopy, nbytes: int, borders: list[int]
    ) -> tuple[Numbers, Numbers, Numbers]:
        """What single copies can cover of the host side, `nbytes` of each page, none across one of
        `borders`: first places in `copy.slots`, addresses, lengths in bytes."""
        border, joined = copy.memory.host_chunk_pages, _joins(copy, nbytes)
        first, count = host_runs(copy.slots, border, joined=joined, borders=borders)
        here = copy.part_address + copy.slots[first] * copy.host_step
        return first, here, count * nbytes

    def _move(self, number: int, copy: PageCopy, step: Step) -> None:
        """Gather pages, or scatter them, on the stream of the kernels, as the order says."""
        if HAS_TRITON:
            cuda_driver.launch(step.graphs[number], self._kernels.cuda_stream)
        else:
            with torch.cuda.stream(self._kernels):
                self._move_by_torch(copy, step)
        step.moved.record(self._kernels)

    def _move_by_torch(self, copy: PageCopy, step: Step) -> None:
        memory, index = copy.memory, torch.from_numpy(copy.pages).to(self._device)
        if copy.is_staged_on_device:
            (memory.gather if self._out else memory.scatter)(copy)
            return
        words = memory.words_of(step.chunk, len(copy.pages), len(copy.pieces))
        if self._out:
            words.copy_(memory.take(index, copy.part))
        else:
            memory.put(index, words, copy.part)

    # ── chunks of others, on the device ──────────────────────────────────────────────────────────

    def _on_device(self, copy: PageCopy) -> None:
        """By the kernels alone."""
        number = self._number_of(copy.memory)
        for at in range(0, len(copy.pages), ORDER_PAGES):
            step, some = self._next_step(), copy.some(slice(at, at + ORDER_PAGES))
            order = step.write_order(some, page_bytes=copy.host_step)
            if HAS_TRITON and not self._out:
                self._enqueue(order, self._kernels)
            self._move(number, some, step)
            if self._out:
                step.bussed.record(self._bus)  # who gathers into the chunk of this step next waits
                step.moved.hold_back(self._owner.cuda)

    def _number_of(self, memory: DevicePages) -> int:
        """Of memory that is prepared."""
        return next(n for n, (known, _) in enumerate(self._known) if known is memory)


def _joins(copy: PageCopy, nbytes: int) -> bool:
    """Whether neighbours on the host move as one."""
    return nbytes == copy.memory.page_bytes == copy.host_step
