"""The header buffers of a worker: one region of shared memory, which a backend may register."""

from __future__ import annotations

import ctypes
import mmap
import os

from kvstrata.backends.base import HostRegion
from kvstrata.backends.frame import HEADER_BYTES


class HeaderRegion:
    """`threads` times `headers` buffers of `HEADER_BYTES` behind a memfd, page-aligned.

    The mapping lives as long as any of its buffers; the descriptor until `close`.
    """

    def __init__(self, name: str, threads: int, headers: int) -> None:
        self._headers = headers
        nbytes = threads * headers * HEADER_BYTES
        fd = os.memfd_create(f"kvstrata-{name}-headers"[:200], os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            memory = mmap.mmap(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        self._slab = memoryview(memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.region = HostRegion(fd, address, nbytes)
        self._is_open = True

    def buffers(self, thread: int) -> list[memoryview]:
        """The buffers of one thread, from 0."""
        first = thread * self._headers
        return [
            self._slab[i * HEADER_BYTES : (i + 1) * HEADER_BYTES]
            for i in range(first, first + self._headers)
        ]

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self._is_open:
            self._is_open = False
            os.close(self.region.fd)
