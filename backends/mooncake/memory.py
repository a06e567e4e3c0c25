"""Where frames lie in memory, in the form that the client takes.

A frame comes as a header and a payload, in two places; the client is fastest with one place an
object (over TCP each further piece costs a round trip). So each staging page is mapped a second
time, behind a page of its own for the header: the payload moves from and to staging as it is, and
only the 4 KiB of the header are copied.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from kvstrata.backends.base import Buffer, HostRegion
from kvstrata.backends.frame import HEADER_BYTES
from kvstrata.backends.process.memory import RegionMap

_PAGE = mmap.PAGESIZE
_MAX_MAP_COUNT = Path("/proc/sys/vm/max_map_count")
_MAPS_A_SLOT = 2
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

Place = tuple[int, int, int]
"""Region, offset, bytes."""


def _mmap(address: int | None, nbytes: int, flags: int, fd: int, offset: int) -> int | None:
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    found = _libc.mmap(address, nbytes, protection, flags, fd, offset)
    return None if found in (None, _FAILED) else int(found)


class Memory:
    """Anonymous memory with an address and a view. Free it when nobody uses it any more."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-max(nbytes, 1) // _PAGE) * _PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        address = _mmap(None, self.nbytes, flags, -1, 0)
        if address is None:
            raise MemoryError(f"{self.nbytes} bytes of address space")
        self.address = address
        self.view = memoryview((ctypes.c_char * self.nbytes).from_address(address)).cast("B")

    def free(self) -> None:
        """Idempotent."""
        if self.nbytes:
            self.view.release()
            _libc.munmap(self.address, self.nbytes)
            self.nbytes = 0


class Span:
    """Where the bytes of one request lie for the client: in one piece, or in several.

    `load` before a write, `store` after a read of `nbytes`; then `Spans.release`.
    """

    __slots__ = ("addresses", "buffers", "is_busy", "is_whole", "nbytes", "sizes", "view")

    def __init__(
        self,
        addresses: list[int],
        sizes: list[int],
        view: memoryview | None = None,
        buffers: Sequence[Buffer] = (),
    ) -> None:
        self.addresses = addresses
        self.sizes = sizes
        self.is_whole = len(addresses) == 1
        self.nbytes = sum(sizes)
        self.view = view
        self.buffers = buffers
        """Those that are copied from and to `view`."""
        self.is_busy = False
        """Of a slot: somebody uses it."""

    def load(self) -> None:
        at, view = 0, self.view
        for buffer in self.buffers:
            assert view is not None
            end = at + buffer.nbytes
            view[at:end] = buffer
            at = end

    def store(self, nbytes: int) -> None:
        at, view = 0, self.view
        for buffer in self.buffers:
            assert view is not None
            count = min(buffer.nbytes, nbytes - at)
            if count < 0:
                return
            buffer[:count] = view[at : at + count]
            at += count


class FrameWindow:
    """Slots of one header page and one payload, which is a page of a region.

    A slot is made when its payload is seen first, and stays. Needs `lock`, but for `memory`. There
    is none for memory in huge pages: a header cannot be mapped in front of a payload there.
    """

    def __init__(self, regions: Sequence[HostRegion], most_slots: int | None = None) -> None:
        self._regions = tuple(regions)
        self._most = most_slots if most_slots is not None else _slots_allowed()
        # Payloads of one page each would need twice their memory; address space costs nothing.
        total = sum(region.nbytes for region in regions)
        self.memory = Memory(2 * total + 2 * _PAGE * len(self._regions) + _PAGE)
        self.lock = threading.Lock()
        self._slots: dict[Place, Span] = {}
        """By payload. What a slot's span copies is the header."""
        self._next = 0
        self._is_full = any(os.fstatvfs(region.fd).f_bsize != _PAGE for region in regions)

    def __len__(self) -> int:
        return len(self._slots)

    def take(self, payload: Place, header: Buffer) -> Span | None:
        """The slot of `payload`, for one user at a time; None: there is none, use pieces."""
        span = self._slots.get(payload)
        if span is None:
            span = self._make(payload)
        if span is None or span.is_busy:
            return None
        span.is_busy = True
        span.buffers = (header,)
        return span

    def check_integrity(self) -> None:
        with self.lock:
            assert len(self._slots) <= self._most
            assert self._next <= self.memory.nbytes
            assert all(span.is_busy or not span.buffers for span in self._slots.values())
            places = sorted((s.addresses[0], _span(p[2])) for p, s in self._slots.items())
            assert all(at + size <= start for (at, size), (start, _) in itertools.pairwise(places))

    def _make(self, payload: Place) -> Span | None:
        region, offset, nbytes = payload
        size = _span(nbytes)
        if self._is_full or offset % _PAGE or len(self._slots) >= self._most:
            return None
        if self._next + size > self.memory.nbytes:
            return None
        at = self.memory.address + self._next
        flags = mmap.MAP_SHARED | _MAP_FIXED
        fd = self._regions[region].fd
        if _mmap(at + HEADER_BYTES, size - HEADER_BYTES, flags, fd, offset) is None:
            self._is_full = True  # too many mappings, or memory that cannot be mapped in pages
            return None
        header = self.memory.view[self._next : self._next + HEADER_BYTES]
        self._next += size
        span = self._slots[payload] = Span([at], [HEADER_BYTES + nbytes], header)
        return span


def _span(nbytes: int) -> int:
    return HEADER_BYTES + -(-nbytes // _PAGE) * _PAGE


def _slots_allowed() -> int:
    """Half of what the kernel allows a process is for others."""
    try:
        allowed = int(_MAX_MAP_COUNT.read_text())
    except (OSError, ValueError):
        allowed = 65530
    return allowed // (2 * _MAPS_A_SLOT)


class Spans:
    """Finds the spans of a call. Any thread."""

    def __init__(self, regions: Sequence[HostRegion], window: FrameWindow | None) -> None:
        self._regions = tuple(regions)
        self._map = RegionMap(regions)
        self._window = window

    def known(self, lists: Sequence[Sequence[Buffer]]) -> list[Span | None]:
        """The span of each list of buffers in registered memory, without a copy of payload; None
        where some lie elsewhere."""
        window, find = self._window, self._map.find
        if window is None:
            return [self._pieces(buffers) for buffers in lists]
        found: list[Span | None] = []
        with window.lock:
            for buffers in lists:
                span = None
                if len(buffers) == 2 and buffers[0].nbytes == HEADER_BYTES:
                    payload = find(buffers[1])
                    if payload is not None:
                        span = window.take(payload, buffers[0])
                found.append(span or self._pieces(buffers))
        return found

    def release(self, spans: Sequence[Span | None]) -> None:
        """The call is over: others may have the slots."""
        if self._window is not None:
            with self._window.lock:
                for span in spans:
                    if span is not None:
                        span.is_busy, span.buffers = False, ()

    def _pieces(self, buffers: Sequence[Buffer]) -> Span | None:
        addresses, sizes = [], []
        for buffer in buffers:
            place = self._map.find(buffer)
            if place is None:
                return None
            region, offset, nbytes = place
            addresses.append(self._regions[region].address + offset)
            sizes.append(nbytes)
        return Span(addresses, sizes)

    @staticmethod
    def copied(buffers: Sequence[Buffer], memory: Memory, at: int) -> Span:
        """The span of buffers that lie anywhere: their bytes pass through `memory`."""
        size = sum(buffer.nbytes for buffer in buffers)
        return Span([memory.address + at], [size], memory.view[at : at + size], buffers)
