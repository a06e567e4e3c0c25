"""Buffers as places in shared memory, on both sides."""

from __future__ import annotations

import ctypes
import mmap
import os
from bisect import bisect_right
from collections.abc import Sequence

from kvstrata.backends.base import Buffer, HostRegion
from kvstrata.backends.process.wire import CALL_REGION, Part

_ALIGN = 4096
_Char = ctypes.c_char


class RegionMap:
    """Finds the region of a buffer. Immutable."""

    def __init__(self, regions: Sequence[HostRegion]) -> None:
        order = sorted(range(len(regions)), key=lambda i: regions[i].address)
        self._starts = [regions[i].address for i in order]
        self._found = [(i, regions[i].address, regions[i].nbytes) for i in order]

    def find(self, buffer: Buffer) -> Part | None:
        """None: it lies outside of all regions, or may not be written to (and so has no address
        that Python tells)."""
        nbytes = buffer.nbytes
        if nbytes == 0 or buffer.readonly:
            return None
        address = ctypes.addressof(_Char.from_buffer(buffer))
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        index, start, size = self._found[at]
        offset = address - start
        return (index, offset, nbytes) if offset + nbytes <= size else None


class CallMemory:
    """Memory of one call, for its buffers that lie in no region: the slower way."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.fd = -1
        self._places: list[tuple[int, Buffer]] = []
        self._map: mmap.mmap | None = None

    def place(self, buffer: Buffer) -> Part:
        offset = self.nbytes
        self._places.append((offset, buffer))
        self.nbytes += -(-max(buffer.nbytes, 1) // _ALIGN) * _ALIGN
        return CALL_REGION, offset, buffer.nbytes

    def make(self, *, copy_in: bool) -> None:
        """After the last `place`; does nothing if there was none."""
        if not self._places:
            return
        self.fd = os.memfd_create("kvstrata-call", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.nbytes)
        self._map = mmap.mmap(self.fd, self.nbytes)
        for offset, buffer in self._places if copy_in else ():
            self._map[offset : offset + buffer.nbytes] = buffer

    def copy_out(self) -> None:
        for offset, buffer in self._places:
            assert self._map is not None
            buffer[:] = memoryview(self._map)[offset : offset + buffer.nbytes]

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self._map is not None:
            self._map.close()


class MappedRegion:
    """A region as the process of the backend has mapped it."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self._map = mmap.mmap(fd, nbytes)
        self.view = memoryview(self._map)
        address = ctypes.addressof(_Char.from_buffer(self._map))
        self.region = HostRegion(fd, address, nbytes)
