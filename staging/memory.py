"""Anonymous shared memory for staging: one memfd mapping, gone with its last process."""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

from kvstrata.errors import ConfigError, Where

ALIGNMENT = 4096
"""Every host page starts and ends on this border (direct I/O, Mooncake registration)."""


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class SharedRegion:
    """`nbytes` of memory behind a memfd.

    `fd` may be passed to a worker process, which maps the same pages. The mapping lives until
    `close`, and until the last view of `array` is gone.
    """

    def __init__(self, nbytes: int, name: str = "kvstrata-staging") -> None:
        self.nbytes = nbytes
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, nbytes)
            self._map = mmap.mmap(self.fd, nbytes, mmap.MAP_SHARED)
        except (OSError, ValueError, OverflowError) as exc:
            os.close(self.fd)
            raise ConfigError(
                f"cannot map {nbytes} bytes of host memory: {exc}",
                where=Where(key="staging.bytes"),
                remedy="make staging.bytes smaller, or raise the memory limit (ulimit -v, cgroup)",
            ) from exc
        self.view = memoryview(self._map)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        """Give up the descriptor; the memory goes when no view is left. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
