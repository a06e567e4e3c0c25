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


class FrameWindow:
    """Slots of one header page and one payload, which is a page of a region.

    A slot is made when its payload is seen first, and stays. Any thread.
    """

    def __init__(self, regions: Sequence[HostRegion], most_slots: int | None = None) -> None:
        self._regions = tuple(regions)
        self._most = most_slots if most_slots is not None else _slots_allowed()
        # Payloads of one page each would need twice their memory; address space costs nothing.
        total = sum(region.nbytes for region in regions)
        self.memory = Memory(2 * total + 2 * _PAGE * len(self._regions) + _PAGE)
        self._lock = threading.Lock()
        self._slots: dict[Place, int] = {}
        """Offset of the header in the window, by payload."""
        self._busy: set[int] = set()
        self._next = 0
        self._is_full = False

    def __len__(self) -> int:
        return len(self._slots)

    def take(self, payload: Place) -> int | None:
        """The slot of `payload`, for one user at a time; None: there is none, use pieces."""
        with self._lock:
            slot = self._slots.get(payload)
            if slot is None:
                slot = self._make(payload)
            if slot is None or slot in self._busy:
                return None
            self._busy.add(slot)
            return slot

    def give(self, slot: int) -> None:
        with self._lock:
            self._busy.discard(slot)

    def header(self, slot: int) -> memoryview:
        return self.memory.view[slot : slot + HEADER_BYTES]

    def check_integrity(self) -> None:
        with self._lock:
            assert len(self._slots) <= self._most
            assert self._next <= self.memory.nbytes
            assert self._busy <= set(self._slots.values())
            spans = sorted((slot, slot + _span(p[2])) for p, slot in self._slots.items())
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))

    def _make(self, payload: Place) -> int | None:
        region, offset, nbytes = payload
        span = _span(nbytes)
        if self._is_full or offset % _PAGE or len(self._slots) >= self._most:
            return None
        if self._next + span > self.memory.nbytes:
            return None
        at = self.memory.address + self._next + HEADER_BYTES
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if _mmap(at, span - HEADER_BYTES, flags, self._regions[region].fd, offset) is None:
            self._is_full = True  # too many mappings, or memory that cannot be mapped in pages
            return None
        slot, self._next = self._next, self._next + span
        self._slots[payload] = slot
        return slot


def _span(nbytes: int) -> int:
    return HEADER_BYTES + -(-nbytes // _PAGE) * _PAGE


def _slots_allowed() -> int:
    """Half of what the kernel allows a process is for others."""
    try:
        allowed = int(_MAX_MAP_COUNT.read_text())
    except (OSError, ValueError):
        allowed = 65530
    return allowed // (2 * _MAPS_A_SLOT)


class Span:
    """Where the bytes of one request lie for the client: in one piece, or in several.

    `load` before a write, `store` after a read of `nbytes`; `release` in the end.
    """

    __slots__ = (
        "_buffers",
        "_slot",
        "_view",
        "_window",
        "addresses",
        "is_whole",
        "nbytes",
        "sizes",
    )

    def __init__(
        self,
        addresses: list[int],
        sizes: list[int],
        *,
        buffers: Sequence[Buffer] = (),
        view: memoryview | None = None,
        window: FrameWindow | None = None,
        slot: int = 0,
    ) -> None:
        self.addresses = addresses
        self.sizes = sizes
        self.is_whole = len(addresses) == 1
        self.nbytes = sum(sizes)
        self._buffers = buffers
        """Those that are copied from and to `view`."""
        self._view = view
        self._window = window
        self._slot = slot

    def load(self) -> None:
        at = 0
        for buffer in self._buffers:
            assert self._view is not None
            self._view[at : at + buffer.nbytes] = buffer
            at += buffer.nbytes

    def store(self, nbytes: int) -> None:
        at = 0
        for buffer in self._buffers:
            assert self._view is not None
            count = min(buffer.nbytes, nbytes - at)
            if count < 0:
                return
            buffer[:count] = self._view[at : at + count]
            at += count

    def release(self) -> None:
        if self._window is not None:
            self._window.give(self._slot)
            self._window = None


class Spans:
    """Finds the span of each request of a call."""

    def __init__(self, regions: Sequence[HostRegion], window: FrameWindow | None) -> None:
        self._regions = tuple(regions)
        self._map = RegionMap(regions)
        self._window = window

    def known(self, buffers: Sequence[Buffer]) -> Span | None:
        """The span of buffers in registered memory, without a copy of payload; None: some lie
        elsewhere."""
        places = []
        for buffer in buffers:
            place = self._map.find(buffer)
            if place is None:
                return None
            places.append(place)
        window = self._window
        if window is not None and len(places) == 2 and places[0][2] == HEADER_BYTES:
            slot = window.take(places[1])
            if slot is not None:
                size = HEADER_BYTES + places[1][2]
                address = window.memory.address + slot
                return Span(
                    [address],
                    [size],
                    buffers=buffers[:1],
                    view=window.header(slot),
                    window=window,
                    slot=slot,
                )
        addresses = [self._regions[region].address + offset for region, offset, _ in places]
        return Span(addresses, [nbytes for _, _, nbytes in places])

    @staticmethod
    def copied(buffers: Sequence[Buffer], memory: Memory, at: int) -> Span:
        """The span of buffers that lie anywhere: their bytes pass through `memory`."""
        size = sum(buffer.nbytes for buffer in buffers)
        view = memory.view[at : at + size]
        return Span([memory.address + at], [size], buffers=buffers, view=view)
