"""What the conformance suite is made of: frames with reproducible bytes, and ways to demand."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvstrata.backends.base import (
    BackendContext,
    ObjectId,
    PageResult,
    ReadRequest,
    StorageBackend,
    WriteRequest,
)
from kvstrata.boundary import Outcome

MakeBackend = Callable[[], StorageBackend]

HEADER = 4096
PAYLOAD = 32768
_counter = itertools.count()


class ConformanceError(AssertionError):
    """The backend does not do what the contract demands."""


def require(condition: object, message: str) -> None:
    """Raises `ConformanceError` with `message` unless `condition`."""
    if not condition:
        raise ConformanceError(message)


class Frames:
    """Objects of one fresh namespace, with reproducible bytes."""

    def __init__(self) -> None:
        fresh = f"{os.getpid()} {time.time_ns()} {next(_counter)}"
        self.namespace = hashlib.sha256(fresh.encode()).digest()

    def name(self, i: int) -> ObjectId:
        return ObjectId(self.namespace, hashlib.sha256(b"key %d" % i).digest())

    def data(self, i: int, nbytes: int = HEADER + PAYLOAD) -> bytes:
        return random.Random(i).randbytes(nbytes)

    def write(self, i: int, nbytes: int = HEADER + PAYLOAD) -> WriteRequest:
        """Frame `i`, the first page of a chain, in two buffers."""
        view = memoryview(self.data(i, nbytes))
        at = min(HEADER, nbytes // 2)
        return WriteRequest(self.name(i), None, 0, (view[:at], view[at:]))

    def chained(self, i: int) -> WriteRequest:
        """Frame `i` as page `i` of one chain."""
        request = self.write(i)
        parent = self.name(i - 1) if i else None
        return WriteRequest(request.object, parent, i, request.buffers)

    def read(self, i: int, *sizes: int) -> ReadRequest:
        """Frame `i` into fresh buffers of these sizes."""
        sizes = sizes or (HEADER, PAYLOAD)
        buffers = tuple(memoryview(bytearray(b"\xee" * size)) for size in sizes)
        return ReadRequest(self.name(i), buffers)


def content(request: ReadRequest) -> bytes:
    """What a read has left in its buffers."""
    return b"".join(request.buffers)


@contextlib.contextmanager
def opened(make_backend: MakeBackend, name: str = "conformance") -> Iterator[StorageBackend]:
    """A backend between `open` and `close`."""
    backend = make_backend()
    backend.open(BackendContext(name, {"kv": PAYLOAD}))
    try:
        yield backend
    finally:
        backend.close(10.0)


def expect(results: Sequence[PageResult], outcomes: Sequence[Outcome]) -> None:
    require(len(results) == len(outcomes), f"{len(results)} results for {len(outcomes)} requests")
    found = [result.outcome for result in results]
    if found != list(outcomes):
        messages = "; ".join(sorted({r.message for r in results if r.message}))
        expected, given = [o.value for o in outcomes], [o.value for o in found]
        raise ConformanceError(f"expected {expected}, got {given} {messages}")


def expect_frame(
    backend: StorageBackend, frames: Frames, i: int, nbytes: int = HEADER + PAYLOAD
) -> None:
    read = frames.read(i, nbytes // 2, nbytes - nbytes // 2)
    results = backend.read([read])
    expect(results, [Outcome.LOADED])
    require(results[0].nbytes == nbytes, f"{results[0].nbytes} bytes were filled, not {nbytes}")
    require(content(read) == frames.data(i, nbytes), "a frame came back with other bytes")


def at_once(threads: int, work: Callable[[int], None]) -> None:
    """Run `work(0)` … `work(threads - 1)`, all started together."""
    barrier = threading.Barrier(threads)

    def start(thread: int) -> None:
        barrier.wait(10)
        work(thread)

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(start, thread) for thread in range(threads)]:
            future.result()
