"""Anonymous shared memory for staging: one memfd mapping, gone with its last process."""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

from kvstrata.errors import ConfigError, Where
from kvstrata.memory_limits import free_huge_bytes

ALIGNMENT = 4096
"""Every host page starts and ends on this border (direct I/O, Mooncake registration)."""


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


HUGE_BYTES = 2 << 20
"""A huge page."""
_MADV_POPULATE_WRITE = 23
"""Linux 5.14."""


class SharedRegion:
    """At least `nbytes` of memory behind a memfd; `nbytes` then says how many.

    `fd` may be passed to a worker process, which maps the same pages. The mapping lives until
    `close`, and until the last view of `array` is gone. With `huge_pages` it is made of pages of
    2 MiB, which the system must have reserved; all of them are taken at once.
    """

    def __init__(
        self, nbytes: int, name: str = "kvstrata-staging", *, huge_pages: bool = False
    ) -> None:
        flags = os.MFD_CLOEXEC
        if huge_pages:
            flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
            nbytes = -(-nbytes // HUGE_BYTES) * HUGE_BYTES
        self.nbytes, self.fd = nbytes, -1
        try:
            self.fd = os.memfd_create(name, flags)
            os.ftruncate(self.fd, nbytes)
            self._map = mmap.mmap(self.fd, nbytes, mmap.MAP_SHARED)
            if huge_pages:  # one that a control group forbids is an error here, and SIGBUS later
                self._map.madvise(_MADV_POPULATE_WRITE)
        except (OSError, ValueError, OverflowError) as exc:
            self.close()
            self.__dict__.pop("_map", None)
            raise _cannot_map(nbytes, exc, huge_pages=huge_pages) from exc
        self.view = memoryview(self._map)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        """Give up the descriptor; the memory goes when no view is left. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _cannot_map(nbytes: int, error: Exception, *, huge_pages: bool) -> ConfigError:
    if not huge_pages:
        return ConfigError(
            f"cannot map {nbytes} bytes of host memory: {error}",
            where=Where(key="staging.bytes"),
            remedy="make staging.bytes smaller, or raise the memory limit (ulimit -v, cgroup)",
        )
    count, free = nbytes // HUGE_BYTES, free_huge_bytes() // HUGE_BYTES
    return ConfigError(
        f"cannot map {count} huge pages of 2 MiB, {free} are free: {error}",
        where=Where(key="staging.huge_pages"),
        remedy=f"reserve them (sysctl vm.nr_hugepages={count}), or set staging.huge_pages = false",
    )
