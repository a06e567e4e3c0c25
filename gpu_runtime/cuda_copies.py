"""Copies between GPU pages and pinned host pages that leave compute alone.

The bus is the copy engines' work, which takes no multiprocessor. They are slow only when pieces are
small, so there are two ways, by the size of a piece (a layer's K, say, of one page):

* `direct`, from DIRECT_BYTES on: one call of the driver names all pieces of a slice. Measured on an
  H200: 0.99 of a contiguous copy with pieces of 72 and 128 KiB, 0.96 and less below 64 KiB, where
  enqueueing (0.8 µs a piece, without the interpreter lock) also takes longer than the bus.
* through chunks: a small kernel gathers pieces into one of two contiguous chunks of device memory,
  and the copy engine moves whole pages from there, while the kernel fills the other chunk; scatter
  is the mirror image. Copies are on a stream of their own, one behind the other: on two streams the
  engine would mix them, and both chunks would be free at the same time, and then neither. Measured:
  0.98 and more with pieces of 18 and 32 KiB.

What a chunk costs the host is a captured graph, four events and one call of the driver. None of it
is on the thread that launches compute, and the calls that take long give the interpreter lock away.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvstrata.errors import ConfigError, Where
from kvstrata.gpu_runtime.cuda_driver import Addresses, copy_batch, has_batches
from kvstrata.gpu_runtime.device_pages import DevicePages, PageCopy, host_runs

HAS_TRITON = find_spec("triton") is not None
"""Without it torch gathers, with more launches and one more pass over the data."""
if HAS_TRITON:
    from kvstrata.gpu_runtime.gather import HEADER, fetch_order, move_pieces

DIRECT_BYTES = 64 << 10
CHUNK_BYTES = 64 << 20


class CopyStream(Protocol):
    """What `CudaCopies` needs of its stream."""

    cuda: torch.cuda.Stream
    has_waited: bool
    """Set when the stream was made to wait for an event."""


RING = 16
"""Chunks that may be enqueued at once: more than `CopyQueue` lets be under way. Even."""
ORDER_PAGES = 2048
"""Most pages of one chunk."""


@dataclass(eq=False, slots=True)
class _Step:
    """What one chunk's turn needs, again and again: an order for the kernel, and two events."""

    chunk: torch.Tensor
    pinned: torch.Tensor
    """The order, as the host writes it: int64 [HEADER + ORDER_PAGES]."""
    order: torch.Tensor
    moved: torch.cuda.Event
    """Behind the kernel."""
    bussed: torch.cuda.Event
    """Behind the copy engine."""
    graphs: dict[int, torch.cuda.CUDAGraph] = field(default_factory=dict)
    """The kernel with this chunk and order, by the number of the memory."""


class CudaCopies:
    """One direction of one GPU. Called by the thread of its stream only, which is current.

    The stream is behind every copy: what waits for it, waits for them. Copies wait for what the
    stream has waited for, and not for each other. Device and host pages must stay until the stream
    has passed them; index tensors and chunks are kept here until then.
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
            self._bus, self._kernels = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
        self._steps: list[_Step] = []
        self._turn = 0
        self._known: list[tuple[DevicePages, torch.Tensor]] = []
        """Memory that was prepared, and where its pieces start: int64 words, on the device."""
        self.batched = has_batches()

    @property
    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        """All that the copies run on."""
        return self._owner.cuda, self._bus, self._kernels

    def copy(self, copy: PageCopy) -> None:
        """Enqueue. Raises CudaCopyError and what torch and Triton raise; the stream is behind what
        was enqueued all the same."""
        if self._owner.has_waited:
            self._bus.wait_stream(self._owner.cuda)
            self._kernels.wait_stream(self._owner.cuda)
            self._owner.has_waited = False  # last: if one of these raises, the next copy does both
        torch.cuda.set_device(self._device)  # the driver's calls need this thread to have a context
        direct = self._is_direct(copy.memory)
        try:
            with torch.cuda.stream(self._bus if direct else self._kernels):
                (self._direct if direct else self._through_chunks)(copy)
        finally:
            self._owner.cuda.wait_stream(self._bus)
            self._owner.cuda.wait_stream(self._kernels)

    def prepare(self, memory: DevicePages) -> None:
        """Compile and capture what copies of `memory` need. Raises ConfigError for pages that are
        larger than a chunk."""
        if self._is_direct(memory):
            return
        if memory.page_bytes > self._chunk_bytes:
            raise ConfigError(
                f"a page has {memory.page_bytes} bytes, in pieces of {memory.layout.piece_bytes}: "
                f"more than a chunk of {self._chunk_bytes}",
                where=Where(key="device.chunk_bytes"),
                remedy="make pages smaller, or chunks larger",
            )
        self._steps = self._steps or self._new_steps()
        starts = memory.layout.starts - memory.layout.starts[0]
        words = torch.from_numpy(starts // memory.layout.word_bytes).to(self._device)
        self._known.append((memory, words))
        if HAS_TRITON:
            self._capture(len(self._known) - 1)
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """When the streams have ended: give graphs and chunks back."""
        self._steps.clear()
        self._known.clear()

    def _is_direct(self, memory: DevicePages) -> bool:
        return self.batched and memory.layout.piece_bytes >= DIRECT_BYTES

    # ── large pieces ─────────────────────────────────────────────────────────────────────────────

    def _direct(self, copy: PageCopy) -> None:
        layout = copy.memory.layout
        there = layout.starts[copy.part] + copy.pages[:, None] * layout.page_stride
        offsets = np.asarray(copy.pieces) * layout.piece_bytes
        here = copy.host.ctypes.data + copy.slots[:, None] * copy.host_step + offsets
        nbytes = np.full(there.size, layout.piece_bytes)
        self._enqueue(_flat(there), _flat(here), _flat(nbytes))

    def _enqueue(self, device: Addresses, host: Addresses, nbytes: Addresses) -> None:
        target, source = (host, device) if self._out else (device, host)
        copy_batch(target, source, nbytes, self._bus.cuda_stream, batched=self.batched)

    # ── through chunks ───────────────────────────────────────────────────────────────────────────

    def _through_chunks(self, copy: PageCopy) -> None:
        number = self._number_of(copy.memory)
        nbytes = len(copy.pieces) * copy.memory.layout.piece_bytes
        most = min(self._chunk_bytes // nbytes, -(-len(copy.pages) // 2), ORDER_PAGES)
        for at in range(0, len(copy.pages), most):
            some = slice(at, at + most)
            step = self._steps[self._turn]
            before = self._steps[self._turn - 2]  # the last one with this chunk
            self._turn = (self._turn + 1) % self._ring
            step.moved.synchronize()  # long ago, as a rule: then its order may be written again
            if self._out:
                self._kernels.wait_event(before.bussed)
                self._move(number, copy, some, step)
                self._bus.wait_event(step.moved)
                self._over_the_bus(copy, some, nbytes, step)
            else:
                self._bus.wait_event(before.moved)
                self._over_the_bus(copy, some, nbytes, step)
                self._kernels.wait_event(step.bussed)
                self._move(number, copy, some, step)

    def _over_the_bus(self, copy: PageCopy, some: slice, nbytes: int, step: _Step) -> None:
        """Between the chunk and `some` of the host pages, `nbytes` of each."""
        slots = copy.slots[some]
        whole = nbytes == copy.memory.page_bytes == copy.host_step
        first, count = host_runs(slots, copy.memory.host_chunk_pages, joined=whole)
        here = copy.host.ctypes.data + slots[first] * copy.host_step
        here += copy.pieces.start * copy.memory.layout.piece_bytes
        there = step.chunk.data_ptr() + first * nbytes
        self._enqueue(_flat(there), _flat(here), _flat(count * nbytes))
        step.bussed.record(self._bus)

    def _move(self, number: int, copy: PageCopy, some: slice, step: _Step) -> None:
        """Gather into the chunk, or scatter from it, on the stream of the kernels."""
        pages, pieces = copy.pages[some], copy.pieces
        if HAS_TRITON:
            order = step.pinned.numpy()
            order[:3] = len(pages), pieces.start, len(pieces)
            order[HEADER : HEADER + len(pages)] = pages
            step.graphs[number].replay()
        else:
            memory, part = copy.memory, slice(pieces.start, pieces.stop)
            index = torch.from_numpy(pages).to(self._device)
            words = memory.words_of(step.chunk, len(pages), len(pieces))
            if self._out:
                words.copy_(memory.take(index, part))
            else:
                memory.put(index, words, part)
        step.moved.record(self._kernels)

    # ── what is made once ────────────────────────────────────────────────────────────────────────

    def _number_of(self, memory: DevicePages) -> int:
        for number, (known, _) in enumerate(self._known):
            if known is memory:
                return number
        self.prepare(memory)
        return len(self._known) - 1

    def _new_steps(self) -> list[_Step]:
        chunks = [
            torch.empty(self._chunk_bytes, dtype=torch.uint8, device=self._device) for _ in range(2)
        ]
        numbers = 4 + ORDER_PAGES
        return [
            _Step(
                chunks[i % 2],
                torch.zeros(numbers, dtype=torch.int64, pin_memory=True),
                torch.zeros(numbers, dtype=torch.int64, device=self._device),
                torch.cuda.Event(blocking=True),
                torch.cuda.Event(),
            )
            for i in range(self._ring)
        ]

    def _capture(self, number: int) -> None:
        memory, starts = self._known[number]
        layout, pool = memory.layout, memory.first_word

        def launch(step: _Step) -> None:
            fetch_order(step.pinned, step.order)
            move_pieces(
                pool,
                starts,
                step.order,
                step.chunk.view(pool.dtype),
                page_stride=layout.page_stride,
                piece_bytes=layout.piece_bytes,
                out=self._out,
                aligned=layout.is_multiple_of(16),
            )

        torch.cuda.synchronize(self._device)
        self._steps[0].pinned[0] = 0  # no pages
        with torch.cuda.stream(self._kernels):
            launch(self._steps[0])  # compiles, which a capture does not allow
        self._kernels.synchronize()
        with _no_collection():
            for step in self._steps:
                graph = step.graphs[number] = torch.cuda.CUDAGraph()
                # Other threads may use the device meanwhile.
                with torch.cuda.graph(
                    graph, stream=self._kernels, capture_error_mode="thread_local"
                ):
                    launch(step)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected: a graph among it would spoil the one that is being captured."""
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _flat(addresses: npt.NDArray[np.int64]) -> Addresses:
    return np.ascontiguousarray(addresses, np.int64).view(np.uint64).ravel()
