"""Throughput of a storage backend, as a worker drives it, beside the raw client's own."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from kvstrata.backends import (
    BackendContext,
    HostRegion,
    JobResult,
    ObjectId,
    PageIO,
    StorageBackend,
    StorageWorker,
    WorkerSettings,
)
from kvstrata.backends.frame import HEADER_BYTES
from kvstrata.backends.mooncake import MooncakeBackend, MooncakeOptions
from kvstrata.backends.mooncake.client import Client, apply_environment
from kvstrata.backends.mooncake.cluster import LocalCluster
from kvstrata.backends.mooncake.network import enter_private_network, return_to_network
from kvstrata.backends.process import ProcessBackend
from kvstrata.boundary import Outcome
from kvstrata.errors import InputError, StorageError, Where
from kvstrata.gpu_runtime.transfers import chunk_pages
from kvstrata.units import parse_size

PAGE_BYTES = (2 << 20, 64 << 10)
RAW = "raw"
DEADLINE_S = 120.0
OPTIONS = MooncakeOptions(master="127.0.0.1:21700", admin="127.0.0.1:21701")


@dataclass(frozen=True, slots=True)
class Spread:
    """Of the rounds: GB/s (10^9 bytes of payload)."""

    median: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class PathReport:
    """One way to move the pages."""

    name: str
    put_gb_per_s: Spread
    get_gb_per_s: Spread
    put_of_raw: float
    """Median over the rounds of our throughput by that of the raw client in the same round."""
    get_of_raw: float


@dataclass(frozen=True, slots=True)
class SizeReport:
    page_bytes: int
    pages: int
    batch_pages: int
    paths: list[PathReport]


@dataclass(frozen=True, slots=True)
class StorageReport:
    """What `run` measured. Every page that came back was compared."""

    backend: str
    rounds: int
    sizes: list[SizeReport]


class Pages:
    """Shared memory with pages to put and room to get them into, as staging has it."""

    def __init__(self, page_bytes: int, count: int) -> None:
        self.page_bytes = page_bytes
        self.count = count
        nbytes = 2 * self.count * page_bytes
        self.fd = os.memfd_create("kvstrata-bench", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, nbytes)
        self._map = mmap.mmap(self.fd, nbytes)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.region = HostRegion(self.fd, self.address, nbytes)
        half = nbytes // 2
        block = random.Random(1).randbytes(min(half, (8 << 20) + 4096 * 7 + 1))
        for start in range(0, half, len(block)):
            self.view[start : min(half, start + len(block))] = block[: half - start]

    def source(self, i: int) -> int:
        return i * self.page_bytes

    def target(self, i: int) -> int:
        return (self.count + i) * self.page_bytes

    def payload(self, offset: int) -> memoryview:
        return self.view[offset : offset + self.page_bytes]

    def check(self) -> None:
        put, got = np.frombuffer(self.view, np.uint8).reshape(2, self.count, -1)
        if not all(map(np.array_equal, put, got)):
            raise StorageError("pages came back with other bytes")
        got[:] = 0

    def close(self) -> None:
        os.close(self.fd)


class Path(Protocol):
    """A way to put and get pages. Raises `StorageError` when one of them does not arrive."""

    pages: Pages

    def put(self, keys: Sequence[bytes]) -> None: ...
    def get(self, keys: Sequence[bytes]) -> None: ...
    def drop(self, keys: Sequence[bytes]) -> None: ...


class RawPath:
    """The client library alone, with the payloads only: no header, no checksum, no copies."""

    def __init__(self, pages: Pages, batch: int) -> None:
        self.pages = pages
        self._batch = batch
        self._client = Client(OPTIONS, "tcp")
        self._client.register(pages.address, pages.region.nbytes)

    def put(self, keys: Sequence[bytes]) -> None:
        pages = self.pages

        def call(names: list[str], first: int) -> list[int]:
            addresses = [pages.address + pages.source(first + i) for i in range(len(names))]
            return self._client.put(names, addresses, [pages.page_bytes] * len(names), ())

        self._run(keys, call, 0)

    def get(self, keys: Sequence[bytes]) -> None:
        pages = self.pages

        def call(names: list[str], first: int) -> list[int]:
            addresses = [pages.address + pages.target(first + i) for i in range(len(names))]
            return self._client.get(names, addresses, [pages.page_bytes] * len(names))

        self._run(keys, call, pages.page_bytes)

    def drop(self, keys: Sequence[bytes]) -> None:
        self._client.remove([f"raw/{key.hex()}" for key in keys])

    def close(self) -> None:
        self._client.retire()

    def _run(
        self, keys: Sequence[bytes], call: Callable[[list[str], int], list[int]], expected: int
    ) -> None:
        for first in range(0, len(keys), self._batch):
            names = [f"raw/{key.hex()}" for key in keys[first : first + self._batch]]
            if any(code != expected for code in call(names, first)):
                raise StorageError("the raw client failed")


class WorkerPath:
    """A backend behind its worker: framed, checked, on the worker's threads."""

    def __init__(self, pages: Pages, backend: StorageBackend) -> None:
        self.pages = pages
        self._namespace = hashlib.sha256(b"bench").digest()
        context = BackendContext("bench", {"kv": pages.page_bytes})
        self._worker = StorageWorker("bench", backend, WorkerSettings(), context)
        self._worker.start((pages.region,))

    def put(self, keys: Sequence[bytes]) -> None:
        self._run(self._worker.store, keys, self.pages.source, Outcome.STORED)

    def get(self, keys: Sequence[bytes]) -> None:
        self._run(self._worker.load, keys, self.pages.target, Outcome.LOADED)

    def drop(self, keys: Sequence[bytes]) -> None:
        done = threading.Event()
        names = [ObjectId(self._namespace, key) for key in keys]
        self._worker.drop(names, DEADLINE_S, lambda _: done.set())
        done.wait(DEADLINE_S)

    def close(self) -> None:
        self._worker.close(10.0)

    def _run(
        self,
        submit: Callable[..., None],
        keys: Sequence[bytes],
        place: Callable[[int], int],
        expected: Outcome,
    ) -> None:
        """In jobs as a runtime makes them, of a chain of its own each."""
        pages, results = self.pages, list[JobResult]()
        each = chunk_pages(pages.page_bytes)
        left = threading.Semaphore(0)

        def done(result: JobResult) -> None:
            results.append(result)
            left.release()

        jobs = range(0, len(keys), each)
        for first in jobs:
            ios = [
                PageIO(ObjectId(self._namespace, key), None, 0, pages.payload(place(first + i)))
                for i, key in enumerate(keys[first : first + each])
            ]
            submit(ios, DEADLINE_S, done, lambda: None)
        for _ in jobs:
            left.acquire(timeout=DEADLINE_S)
        bad = [p for r in results for p in r.pages if p.outcome is not expected]
        if bad or len(results) != len(jobs):
            raise StorageError(f"{len(bad)} pages failed, the first: {bad[:1]}")


def run(
    backend: str, rounds: int, total_bytes: int, page_bytes: Sequence[int] = PAGE_BYTES
) -> StorageReport:
    """Raw client and worker in turns, for each page size, in a network of this thread's own with a
    master and a store; once a process. Raises `StorageError` when something does not work,
    `InputError` for a backend without such a benchmark."""
    if backend != "mooncake":
        raise InputError(
            f"there is no benchmark of {backend!r}",
            remedy="the one there is: mooncake",
            where=Where(key="--backend"),
        )
    before = enter_private_network()
    try:
        apply_environment(OPTIONS.client_environment())
        segment = 3 * total_bytes + (
            64 << 20
        )  # two rounds' pages, so that all of it is touched soon
        options = msgspec.structs.replace(OPTIONS, segment_bytes=segment)
        with LocalCluster(options, 1):
            sizes = [_size(size, rounds, total_bytes) for size in page_bytes]
    finally:
        return_to_network(before)
    return StorageReport(backend, rounds, sizes)


def _size(page_bytes: int, rounds: int, total_bytes: int) -> SizeReport:
    call_bytes = parse_size(OPTIONS.call_bytes)
    batch = max(1, min(OPTIONS.batch_pages, call_bytes // page_bytes))
    count = max(1, total_bytes // page_bytes)
    with _paths(page_bytes, count, batch) as paths:
        puts: dict[str, list[float]] = {name: [] for name in paths}
        gets: dict[str, list[float]] = {name: [] for name in paths}
        for number in range(rounds + 1):
            names = list(paths)
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                put_s, get_s = _round(paths[name], f"{name} {number}")
                if number:  # the first touches memory and opens connections
                    puts[name].append(count * page_bytes / put_s / 1e9)
                    gets[name].append(count * page_bytes / get_s / 1e9)
    reports = [
        PathReport(
            name,
            _spread(puts[name]),
            _spread(gets[name]),
            _ratio(puts[name], puts[RAW]),
            _ratio(gets[name], gets[RAW]),
        )
        for name in puts
    ]
    return SizeReport(page_bytes, count, batch, reports)


@contextmanager
def _paths(page_bytes: int, count: int, batch: int) -> Iterator[dict[str, Path]]:
    """The ways to move the same payload; of raw frames, too: payload and header in one piece."""
    with ExitStack() as stack:
        pages, frames = Pages(page_bytes, count), Pages(page_bytes + HEADER_BYTES, count)
        thread = MooncakeBackend(OPTIONS)
        process = ProcessBackend(MooncakeBackend, OPTIONS)
        makers: dict[str, Callable[[], RawPath | WorkerPath]] = {
            RAW: lambda: RawPath(pages, batch),
            "raw frames": lambda: RawPath(frames, batch),
            "thread": lambda: WorkerPath(pages, thread),
            "process": lambda: WorkerPath(pages, process),
        }
        stack.callback(pages.close)
        stack.callback(frames.close)
        paths: dict[str, Path] = {}
        for name, make in makers.items():
            path = make()
            stack.callback(path.close)
            paths[name] = path
        yield paths


def _round(path: Path, seed: str) -> tuple[float, float]:
    pages = path.pages
    keys = [hashlib.sha256(f"{seed} {i}".encode()).digest() for i in range(pages.count)]
    start = time.perf_counter()
    path.put(keys)
    middle = time.perf_counter()
    path.get(keys)
    end = time.perf_counter()
    pages.check()
    path.drop(keys)
    return middle - start, end - middle


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def _ratio(ours: Sequence[float], raw: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, raw, strict=True))
