"""Copies between GPU pages and pinned host pages that leave compute alone.

The bus is the copy engines' work, which takes no multiprocessor. They are slow only when pieces are
small, so there are two ways, by the size of a piece (a layer's K, say, of one page):

* `direct`, from DIRECT_BYTES on: one call of the driver names all pieces of a slice. Measured on an
  H200: 0.99 of a contiguous copy with pieces of 72 and 128 KiB, 0.96 and less below 64 KiB, where
  enqueueing (0.8 µs a piece, without the interpreter lock) also takes longer than the bus.
* through chunks: a small kernel gathers pieces into a contiguous chunk of device memory, and the
  copy engine moves whole pages from there; scatter is the mirror image. Two lanes take turns, each
  a CUDA stream with a chunk of its own: while one is on the bus, the other gathers. No event is
  needed between them. Measured: 0.98 and more with pieces of 18 and 32 KiB.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvstrata.gpu_runtime.cuda_driver import Addresses, copy_batch, has_batches
from kvstrata.gpu_runtime.device_pages import DevicePages, PageCopy, host_runs

HAS_TRITON = find_spec("triton") is not None
"""Without it torch gathers, with more launches and one more pass over the data."""
if HAS_TRITON:
    from kvstrata.gpu_runtime.gather import copy_numbers, move_pieces

DIRECT_BYTES = 64 << 10
CHUNK_BYTES = 64 << 20


class CopyStream(Protocol):
    """What `CudaCopies` needs of its stream."""

    cuda: torch.cuda.Stream
    has_waited: bool
    """Set when the stream was made to wait for an event."""


@dataclass(eq=False, slots=True)
class _Lane:
    """A stream and its chunk, which is used in the stream's order."""

    stream: torch.cuda.Stream
    ended: torch.cuda.Event
    chunk: torch.Tensor

    def make_room(self, nbytes: int) -> None:
        if len(self.chunk) < nbytes:
            # Made on the stream: the allocator reuses the one before it in the stream's order.
            with torch.cuda.stream(self.stream):
                self.chunk = torch.empty(nbytes, dtype=torch.uint8, device=self.chunk.device)


class CudaCopies:
    """One direction of one GPU. Called by the thread of its stream only, which is current.

    The stream is behind every copy: what waits for it, waits for them. Copies wait for what the
    stream has waited for, and not for each other. Device and host pages must stay until the stream
    has passed them; index tensors and chunks are kept here until then.
    """

    def __init__(
        self, device: torch.device, owner: CopyStream, *, out: bool, chunk_bytes: int
    ) -> None:
        self._device, self._owner, self._out = device, owner, out
        self._stream = owner.cuda
        self._chunk_bytes = chunk_bytes
        with torch.cuda.device(device):
            self._lanes = [
                _Lane(torch.cuda.Stream(priority=-1), torch.cuda.Event(), _no_bytes(device))
                for _ in range(2)
            ]
            self._numbers, self._uploaded = torch.cuda.Stream(priority=-1), torch.cuda.Event()
        self._turn = 0
        self._starts: dict[int, tuple[DevicePages, torch.Tensor]] = {}
        self._held: deque[tuple[torch.cuda.Event, object]] = deque()
        self.batched = has_batches()

    def copy(self, copy: PageCopy) -> None:
        """Enqueue. Raises CudaCopyError and what torch and Triton raise; `stream` is behind what
        was enqueued all the same."""
        while self._held and self._held[0][0].query():
            self._held.popleft()
        if self._owner.has_waited:
            self._owner.has_waited = False
            for lane in self._lanes:
                lane.stream.wait_stream(self._stream)
        if self._is_direct(copy.memory):
            self._direct(copy)
        else:
            self._through_chunks(copy)

    def _is_direct(self, memory: DevicePages) -> bool:
        return self.batched and memory.layout.piece_bytes >= DIRECT_BYTES

    def prepare(self, memory: DevicePages) -> None:
        """Compile what copies of `memory` need, so that the first one is as fast as the others."""
        if HAS_TRITON and not self._is_direct(memory):
            index = torch.zeros(1, dtype=torch.int64, pin_memory=True)
            self._move(memory, range(memory.layout.pieces), self._upload(index)[:0], self._lanes[0])

    # ── large pieces ─────────────────────────────────────────────────────────────────────────────

    def _direct(self, copy: PageCopy) -> None:
        layout = copy.memory.layout
        there = layout.starts[copy.part] + copy.pages[:, None] * layout.page_stride
        offsets = np.asarray(copy.pieces) * layout.piece_bytes
        here = copy.host.ctypes.data + copy.slots[:, None] * copy.host_step + offsets
        nbytes = np.full(there.size, layout.piece_bytes)
        self._enqueue(_flat(there), _flat(here), _flat(nbytes), self._stream)

    def _enqueue(
        self, device: Addresses, host: Addresses, nbytes: Addresses, stream: torch.cuda.Stream
    ) -> None:
        target, source = (host, device) if self._out else (device, host)
        copy_batch(target, source, nbytes, stream.cuda_stream, batched=self.batched)

    # ── through chunks ───────────────────────────────────────────────────────────────────────────

    def _through_chunks(self, copy: PageCopy) -> None:
        pinned = torch.empty(len(copy.pages), dtype=torch.int64, pin_memory=True)
        pinned.numpy()[:] = copy.pages
        index = self._upload(pinned)
        nbytes = len(copy.pieces) * copy.memory.layout.piece_bytes
        most = max(1, min(self._chunk_bytes // nbytes, -(-len(copy.pages) // 2)))
        try:
            for at in range(0, len(copy.pages), most):
                lane = self._lanes[self._turn]
                self._turn = 1 - self._turn
                lane.make_room(most * nbytes)
                if self._out:
                    self._move(copy.memory, copy.pieces, index[at : at + most], lane)
                self._bus(copy, slice(at, at + most), nbytes, lane)
                if not self._out:
                    self._move(copy.memory, copy.pieces, index[at : at + most], lane)
        finally:
            for lane in self._lanes:
                lane.ended.record(lane.stream)
                self._stream.wait_event(lane.ended)
            event = torch.cuda.Event()
            event.record(self._stream)
            self._held.append((event, (pinned, index)))

    def _bus(self, copy: PageCopy, some: slice, nbytes: int, lane: _Lane) -> None:
        """Between the lane's chunk and `some` of the host pages, `nbytes` of each."""
        slots = copy.slots[some]
        whole = nbytes == copy.memory.page_bytes == copy.host_step
        first, count = host_runs(slots, copy.memory.host_chunk_pages, joined=whole)
        here = copy.host.ctypes.data + slots[first] * copy.host_step
        here += copy.pieces.start * copy.memory.layout.piece_bytes
        there = lane.chunk.data_ptr() + first * nbytes
        self._enqueue(_flat(there), _flat(here), _flat(count * nbytes), lane.stream)

    def _upload(self, pinned: torch.Tensor) -> torch.Tensor:
        """Page numbers on the device, before what is enqueued on the lanes from now on."""
        index = torch.empty(len(pinned), dtype=torch.int64, device=self._device)
        with torch.cuda.stream(self._numbers):
            if not HAS_TRITON:
                index.copy_(pinned, non_blocking=True)
            else:
                copy_numbers(pinned, index)
            self._uploaded.record(self._numbers)
        for lane in self._lanes:
            lane.stream.wait_event(self._uploaded)
        return index

    def _move(self, memory: DevicePages, pieces: range, index: torch.Tensor, lane: _Lane) -> None:
        """Gather into the lane's chunk, or scatter from it, on its stream."""
        layout, part = memory.layout, slice(pieces.start, pieces.stop)
        with torch.cuda.stream(lane.stream):
            if not HAS_TRITON:
                words = memory.words_of(lane.chunk, len(index), len(pieces))
                if self._out:
                    words.copy_(memory.take(index, part))
                else:
                    memory.put(index, words, part)
                return
            pool = memory.first_word
            move_pieces(
                pool,
                self._starts_of(memory)[part],
                index,
                lane.chunk.view(pool.dtype),
                page_stride=layout.page_stride,
                piece_bytes=layout.piece_bytes,
                out=self._out,
                aligned=layout.is_multiple_of(16),
            )

    def _starts_of(self, memory: DevicePages) -> torch.Tensor:
        """Where pieces start, in words from the first one, on the device."""
        known = self._starts.get(id(memory))
        if known is None:
            starts = memory.layout.starts - memory.layout.starts[0]
            words = torch.from_numpy(starts // memory.layout.word_bytes)
            known = self._starts[id(memory)] = (memory, words.to(self._device))
            torch.cuda.current_stream(self._device).synchronize()
        return known[1]


def _no_bytes(device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device)


def _flat(addresses: npt.NDArray[np.int64]) -> Addresses:
    return np.ascontiguousarray(addresses, np.int64).view(np.uint64).ravel()
