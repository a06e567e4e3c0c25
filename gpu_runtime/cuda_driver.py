"""Calls of the CUDA driver: batched copies, which torch has no name for, and short calls that keep
the interpreter lock.

Who gives the lock away waits for it afterwards, and a thread that launches a model's kernels gives
and takes it at each: two threads that do so in turn wait for each other's wake-up at every call. So
calls of a microsecond keep it; a batch that takes the driver long gives it away, and so does the C
code of `cuda_chunks`, which calls by `addresses`. Measured on
an H200 with driver 580: one call with 512 copies of 2 MiB takes 0.3 ms and moves 55 GB/s; the same
copies enqueued one by one from Python hold the lock for 4 ms.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
"""Device or pinned host addresses, or lengths in bytes: int64 [n], contiguous."""

_ATTRIBUTES = np.dtype(
    [
        ("source_order", "<i4"),
        ("source_location", "<i4", 2),
        ("target_location", "<i4", 2),
        ("flags", "<u4"),
    ]
)
"""CUmemcpyAttributes."""
_NOT_READY = 600
"""CUDA_ERROR_NOT_READY: no error."""
_CAPTURES_OF_THREAD = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL."""
_ORDER_OF_STREAM = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read when the stream gets there, not before."""


class CudaCopyError(RuntimeError):
    """The driver refused a copy. What it took before may still run: wait for the stream."""


ADDRESSES = (
    "cuEventRecord", "cuStreamWaitEvent", "cuGraphLaunch", "cuEventSynchronize", "cuEventQuery",
)  # fmt: skip
"""What `enqueue.c` calls, in the order of its `Driver`, but for the call for many copies."""
LONG_BATCH = 16
"""Copies of one call that take the driver so long (0.5 to 2 µs each) that it gives the lock
away."""


@lru_cache(maxsize=2)
def _driver(*, keeps_lock: bool = False) -> ctypes.CDLL:
    return (ctypes.PyDLL if keeps_lock else ctypes.CDLL)("libcuda.so.1")


class _Batches:
    """The driver's call for many copies, and the arguments that are always the same."""

    def __init__(self) -> None:
        name, self._failed = "cuMemcpyBatchAsync_v2", tuple[Any, ...]()
        if not hasattr(_driver(), name):
            name, self._failed = "cuMemcpyBatchAsync", (ctypes.byref(ctypes.c_size_t()),)
        self.long: Any = getattr(_driver(), name)
        self._short: Any = getattr(_driver(keeps_lock=True), name)
        attributes, first = np.zeros(1, _ATTRIBUTES), np.zeros(1, np.uint64)
        attributes["source_order"] = _ORDER_OF_STREAM
        self._kept = attributes, first
        self._attributes, self._first = pointer(attributes), pointer(first)
        self.tells_failed = bool(self._failed)
        self.constants = attributes.ctypes.data, first.ctypes.data
        self._one = ctypes.c_size_t(1)

    def __call__(self, targets: Numbers, sources: Numbers, nbytes: Numbers, stream: int) -> int:
        call = self.long if len(targets) >= LONG_BATCH else self._short
        return int(
            call(
                pointer(targets),
                pointer(sources),
                pointer(nbytes),
                ctypes.c_size_t(len(targets)),
                self._attributes,
                self._first,
                self._one,
                *self._failed,
                ctypes.c_void_p(stream),
            )
        )


@lru_cache(maxsize=1)
def _batches() -> _Batches | None:
    try:
        return _Batches()
    except AttributeError:
        return None


def has_batches() -> bool:
    """Whether the driver can take many copies with one call (CUDA 12.8 and newer)."""
    return _batches() is not None


def copy_batch(
    targets: Numbers, sources: Numbers, nbytes: Numbers, stream: int, *, batched: bool = True
) -> None:
    """Enqueue `len(targets)` copies on `stream` (a CUstream); they run in any order.

    Device memory and registered host memory, either way; a copy must not cross two regions that
    were registered apart. Returns when all are enqueued; the arrays may go then. Raises
    CudaCopyError.
    """
    if not len(targets):
        return
    one_call = _batches() if batched else None
    check((one_call or _one_by_one)(targets, sources, nbytes, stream), "a copy")


def addresses() -> Numbers:
    """For C code that calls the driver itself: those of ADDRESSES and the call for many copies;
    whether that also takes where to tell which one failed; and its attributes, and where these
    begin. Only if `has_batches`."""
    batches = _batches()
    assert batches is not None
    calls = [getattr(_driver(), name) for name in ADDRESSES] + [batches.long]
    found = [ctypes.cast(call, ctypes.c_void_p).value for call in calls]
    return np.array([*found, batches.tells_failed, *batches.constants], np.int64)


def record(event: int, stream: int) -> None:
    """cuEventRecord. All these take handles, as torch tells them, keep the interpreter lock, and
    raise CudaCopyError."""
    _call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))


def wait(stream: int, event: int) -> None:
    """cuStreamWaitEvent: for the last `record` of the event until now."""
    _call("cuStreamWaitEvent", ctypes.c_void_p(stream), ctypes.c_void_p(event), ctypes.c_uint(0))


def has_passed(event: int) -> bool:
    """cuEventQuery."""
    code = int(_driver(keeps_lock=True).cuEventQuery(ctypes.c_void_p(event)))
    check(0 if code == _NOT_READY else code, "cuEventQuery")
    return code == 0


def launch(graph: int, stream: int) -> None:
    """cuGraphLaunch, of what `instantiate` returned."""
    _call("cuGraphLaunch", ctypes.c_void_p(graph), ctypes.c_void_p(stream))


def instantiate(captured: int) -> int:
    """A graph that can be launched, of a CUgraph; `destroy` gives it back. Not for a thread that is
    in a hurry: it may take a millisecond."""
    graph = ctypes.c_void_p()
    arguments = ctypes.byref(graph), ctypes.c_void_p(captured), ctypes.c_ulonglong(0)
    _call("cuGraphInstantiateWithFlags", *arguments)
    return int(graph.value or 0)


def leave_captures_alone() -> None:
    """What the calling thread does from now on spoils no graph that another thread captures, and is
    not refused because of it. Else every wait for an event does and is, as captures are of the
    whole process unless they say otherwise (cuThreadExchangeStreamCaptureMode)."""
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_CAPTURES_OF_THREAD)))


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage is collected: a graph among it would spoil the one that is being captured."""
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def destroy(graph: int) -> None:
    _call("cuGraphExecDestroy", ctypes.c_void_p(graph))


def _call(name: str, *arguments: Any) -> None:
    check(getattr(_driver(keeps_lock=True), name)(*arguments), name)


def check(code: int, what: str) -> None:
    """Raises CudaCopyError unless `code` is that of success."""
    if code:
        raise CudaCopyError(f"the CUDA driver refused {what}: error {code}")


def _one_by_one(targets: Numbers, sources: Numbers, nbytes: Numbers, stream: int) -> int:
    copy, handle = _driver().cuMemcpyAsync, ctypes.c_void_p(stream)
    for target, source, n in zip(targets.tolist(), sources.tolist(), nbytes.tolist(), strict=True):
        code = copy(ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(n), handle)
        if code:
            return int(code)
    return 0


def pointer(array: npt.NDArray[np.generic]) -> ctypes.c_void_p:
    """For a call that reads or writes it; the caller keeps it alive."""
    assert array.flags.c_contiguous, "the driver reads it as a C array"
    return ctypes.c_void_p(array.ctypes.data)
