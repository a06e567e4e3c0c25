"""Calls of the CUDA driver that torch has no name for: batched copies.

Through ctypes, which gives the interpreter lock away for the time of a call: a thread that launches
compute goes on meanwhile. Measured on an H200 with driver 580: one call with 512 copies of 2 MiB
takes 0.3 ms and moves 55 GB/s; the same copies enqueued one by one from Python hold the lock for
4 ms.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.uint64]
"""Device or pinned host addresses, or lengths in bytes: uint64 [n]."""

_ATTRIBUTES = np.dtype(
    [
        ("source_order", "<i4"),
        ("source_location", "<i4", 2),
        ("target_location", "<i4", 2),
        ("flags", "<u4"),
    ]
)
"""CUmemcpyAttributes."""
_ORDER_OF_STREAM = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read when the stream gets there, not before."""


class CudaCopyError(RuntimeError):
    """The driver refused a copy. What it took before may still run: wait for the stream."""


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def has_batches() -> bool:
    """Whether the driver can take many copies with one call (CUDA 12.8 and newer)."""
    return hasattr(_driver(), "cuMemcpyBatchAsync_v2") or hasattr(_driver(), "cuMemcpyBatchAsync")


def copy_batch(
    targets: Addresses, sources: Addresses, nbytes: Addresses, stream: int, *, batched: bool = True
) -> None:
    """Enqueue `len(targets)` copies on `stream` (a CUstream); they run in any order.

    Device memory and registered host memory, either way; a copy must not cross two regions that
    were registered apart. Returns when all are enqueued; the arrays may go then. Raises
    CudaCopyError.
    """
    if not len(targets):
        return
    if batched and has_batches():
        code = _one_call(targets, sources, nbytes, stream)
    else:
        code = _one_by_one(targets, sources, nbytes, stream)
    if code:
        raise CudaCopyError(f"the CUDA driver refused a copy: error {code}")


def _one_call(targets: Addresses, sources: Addresses, nbytes: Addresses, stream: int) -> int:
    attributes = np.zeros(1, _ATTRIBUTES)
    attributes["source_order"] = _ORDER_OF_STREAM
    first = np.zeros(1, np.uint64)
    arguments = [
        _pointer(targets),
        _pointer(sources),
        _pointer(nbytes),
        ctypes.c_size_t(len(targets)),
        _pointer(attributes),
        _pointer(first),
        ctypes.c_size_t(1),
    ]
    driver = _driver()
    if hasattr(driver, "cuMemcpyBatchAsync_v2"):
        return int(driver.cuMemcpyBatchAsync_v2(*arguments, ctypes.c_void_p(stream)))
    failed = ctypes.c_size_t()
    return int(driver.cuMemcpyBatchAsync(*arguments, ctypes.byref(failed), ctypes.c_void_p(stream)))


def _one_by_one(targets: Addresses, sources: Addresses, nbytes: Addresses, stream: int) -> int:
    copy, handle = _driver().cuMemcpyAsync, ctypes.c_void_p(stream)
    for target, source, n in zip(targets.tolist(), sources.tolist(), nbytes.tolist(), strict=True):
        code = copy(ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(n), handle)
        if code:
            return int(code)
    return 0


def _pointer(array: npt.NDArray[np.generic]) -> ctypes.c_void_p:
    assert array.flags.c_contiguous, "the driver reads it as a C array"
    return ctypes.c_void_p(array.ctypes.data)
