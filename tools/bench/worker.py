"""What a storage worker costs, and what a bad neighbour costs a healthy one."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from rich.table import Table

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
from kvstrata.backends.memory import MemoryBackend, MemoryOptions
from kvstrata.backends.policies import BreakerSettings, ProcessSettings
from kvstrata.backends.process import ProcessBackend
from kvstrata.backends.testing.faults import FaultyBackend, FaultyOptions
from kvstrata.boundary import Outcome
from kvstrata.errors import InputError, Where

DEADLINE_S = 20.0
BATCH = 64
MOST_PAGE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Overhead:
    """Microseconds a page, the median over batches."""

    isolation: str
    store_us: float
    load_us: float
    raw_store_us: float
    """The same batch as one bare call of the backend: its own copy, no frame, no checksum."""
    raw_load_us: float
    check_us: float
    """Of `load_us`: header and checksum."""
    overhead_us: float
    """What the worker adds to a page: queue, threads, callbacks, frame, checksum; the larger one of
    stores and loads."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A healthy worker's loads beside a bad one."""

    beside: str
    p50_ms: float
    p99_ms: float
    alone_p99_ms: float
    """Of the same worker in rounds in between, with no neighbour."""
    ratio: float
    """Of the two."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What `run` measured."""

    page_bytes: int
    overheads: tuple[Overhead, ...]
    neighbours: tuple[Neighbour, ...]


class Memory:
    """Pages behind a memfd, as staging has them."""

    def __init__(self, pages: int, page_bytes: int) -> None:
        self.fd = os.memfd_create("kvstrata-bench", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, pages * page_bytes)
        memory = mmap.mmap(self.fd, pages * page_bytes)
        self.view = memoryview(memory)
        for at in range(0, len(self.view), page_bytes):
            self.view[at : at + page_bytes] = os.urandom(page_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.region = HostRegion(self.fd, address, pages * page_bytes)
        self._page_bytes = page_bytes

    def pages(self, chain: int, count: int) -> list[PageIO]:
        space = hashlib.sha256(b"bench").digest()
        names = [
            ObjectId(space, hashlib.sha256(f"{chain} {i}".encode()).digest()) for i in range(count)
        ]
        size = self._page_bytes
        return [
            PageIO(name, names[i - 1] if i else None, i, self.view[i * size : (i + 1) * size])
            for i, name in enumerate(names)
        ]


class _Wait:
    """One job, and how long it took."""

    def __init__(self) -> None:
        self._ended = threading.Semaphore(0)
        self.result: JobResult | None = None

    def done(self, result: JobResult) -> None:
        self.result = result
        self._ended.release()

    def released(self) -> None:
        self._ended.release()

    def wait(self) -> JobResult:
        for _ in range(2):
            if not self._ended.acquire(timeout=2 * DEADLINE_S):
                raise TimeoutError("a job of the bench did not end")
        assert self.result is not None
        return self.result


def _timed(submit: Callable[..., None], pages: list[PageIO]) -> tuple[float, JobResult]:
    wait = _Wait()
    begun = time.perf_counter()
    submit(pages, DEADLINE_S, wait.done, wait.released)
    result = wait.wait()
    return time.perf_counter() - begun, result


@contextmanager
def _worker(
    name: str, backend: StorageBackend, memory: Memory, settings: WorkerSettings | None = None
) -> Iterator[StorageWorker]:
    worker = StorageWorker(name, backend, settings or WorkerSettings(), BackendContext(name))
    worker.start(regions=(memory.region,))
    try:
        yield worker
    finally:
        worker.close(1.0)


def measure_overhead(page_bytes: int, batches: int, *, process: bool) -> Overhead:
    """Batches of `BATCH` pages through a worker and the memory plugin, each as one job."""
    memory = Memory(BATCH, page_bytes)
    options = MemoryOptions()
    backend = ProcessBackend(MemoryBackend, options) if process else MemoryBackend(options)
    stores, loads, checks = [], [], []
    raw_stores, raw_loads = [], []
    with _worker("bench", backend, memory) as worker:
        for i in range(batches):
            pages = memory.pages(i, BATCH)
            seconds, result = _timed(worker.store, pages)
            _expect(result, Outcome.STORED)
            stores.append(seconds)
            seconds, result = _timed(worker.load, pages)
            _expect(result, Outcome.LOADED)
            loads.append(seconds)
            checks.append(result.check_s)
            raw_stores.append(_raw_store(pages))
            raw_loads.append(_raw_load(pages))
            worker.drop([page.object for page in pages], DEADLINE_S, _nothing)
            worker.flush(DEADLINE_S)

    def each_us(seconds: list[float]) -> float:
        return statistics.median(seconds) * 1e6 / BATCH

    store_us, raw_store_us = each_us(stores), each_us(raw_stores)
    load_us, raw_load_us = each_us(loads), each_us(raw_loads)
    return Overhead(
        isolation="process" if process else "thread",
        store_us=store_us,
        load_us=load_us,
        raw_store_us=raw_store_us,
        raw_load_us=raw_load_us,
        check_us=each_us(checks),
        overhead_us=max(store_us - raw_store_us, load_us - raw_load_us),
    )


_HEADER = bytes(HEADER_BYTES)


def _raw_store(pages: list[PageIO]) -> float:
    """What the memory plugin does for a batch, and nothing else."""
    begun = time.perf_counter()
    kept = {page.object: b"".join((_HEADER, page.payload)) for page in pages}
    seconds = time.perf_counter() - begun
    del kept
    return seconds


def _raw_load(pages: list[PageIO]) -> float:
    frames = [bytes(page.payload) for page in pages]
    begun = time.perf_counter()
    for page, frame in zip(pages, frames, strict=True):
        page.payload[:] = frame
    return time.perf_counter() - begun


def measure_neighbours(page_bytes: int, rounds: int) -> Iterator[Neighbour]:
    """p99 of loads of one worker, alone and beside each bad one, in turns."""
    memory = Memory(BATCH, page_bytes)
    with _worker("healthy", MemoryBackend(MemoryOptions()), memory) as healthy:
        pages = memory.pages(0, 8)
        _expect(_timed(healthy.store, pages)[1], Outcome.STORED)
        for beside, in_process, faults in (
            ("a hung one (threads)", False, {"read": {"hang": 1.0}, "exists": {"hang": 1.0}}),
            ("one that holds its GIL (process)", True, {"read": {"gil": 1.0}}),
            ("one that crashes (process)", True, {"read": {"segfault": 1.0}}),
        ):
            alone: list[float] = []
            beside_s: list[float] = []
            for _ in range(4):
                alone += _loads(healthy, pages, rounds // 4)
                with _bad(in_process, faults, memory):
                    beside_s += _loads(healthy, pages, rounds // 4)
            yield Neighbour(
                beside,
                p50_ms=statistics.median(beside_s) * 1e3,
                p99_ms=_p99(beside_s) * 1e3,
                alone_p99_ms=_p99(alone) * 1e3,
                ratio=_p99(beside_s) / _p99(alone),
            )


def _loads(worker: StorageWorker, pages: list[PageIO], count: int) -> list[float]:
    found = []
    for _ in range(count):
        seconds, result = _timed(worker.load, pages)
        _expect(result, Outcome.LOADED)
        found.append(seconds)
    return found


@contextmanager
def _bad(
    in_process: bool, faults: dict[str, dict[str, float]], memory: Memory
) -> Iterator[StorageWorker]:
    """A backend that fails as told, with loads that keep coming."""
    options = FaultyOptions(faults=faults)
    faulty = FaultyBackend(options)
    settings = WorkerSettings(breaker=BreakerSettings(cooldown_s=0.5), kill_after_s=0.3)
    backend = (
        ProcessBackend(FaultyBackend, options, ProcessSettings(restart_delay_s=0.1))
        if in_process
        else faulty
    )
    with ExitStack() as stack:
        worker = stack.enter_context(_worker("bad", backend, memory, settings))
        stack.callback(faulty.release)
        stop = threading.Event()

        def ask() -> None:
            while not stop.wait(0.05):
                worker.load(memory.pages(1, 8)[4:], 0.2, _nothing, lambda: None)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        stack.callback(asking.join)
        stack.callback(stop.set)
        yield worker


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) * 99 // 100]


def _expect(result: JobResult, outcome: Outcome) -> None:
    other = [page for page in result.pages if page.outcome is not outcome]
    if other:
        raise RuntimeError(f"a page of the bench is {other[0]}")


def _nothing(_: object) -> None:
    return


def run(page_bytes: int, batches: int, rounds: int) -> WorkerReport:
    """Measure. Raises `InputError` for sizes that cannot work."""
    if not 1 <= page_bytes <= MOST_PAGE_BYTES or batches < 1 or rounds < 4:
        raise InputError(
            f"{batches} batches of pages of {page_bytes} bytes, {rounds} rounds",
            remedy=f"pages of 1 to {MOST_PAGE_BYTES} bytes, at least 1 batch and 4 rounds",
            where=Where(key="--page-bytes"),
        )
    return WorkerReport(
        page_bytes,
        tuple(measure_overhead(page_bytes, batches, process=p) for p in (False, True)),
        tuple(measure_neighbours(page_bytes, rounds)),
    )


def tables(report: WorkerReport) -> Iterator[Table]:
    """For people."""
    table = Table(
        "isolation", title=f"µs a page of {report.page_bytes:,} bytes, batches of {BATCH}"
    )
    for name in ("store", "bare", "load", "bare", "check", "overhead"):
        table.add_column(name, justify="right")
    for o in report.overheads:
        times = (o.store_us, o.raw_store_us, o.load_us, o.raw_load_us, o.check_us, o.overhead_us)
        table.add_row(o.isolation, *(f"{us:.1f}" for us in times))
    yield table
    table = Table("loads of 8 pages beside", title="A healthy worker")
    for name in ("p50 ms", "p99 ms", "alone p99 ms", "ratio"):
        table.add_column(name, justify="right")
    for n in report.neighbours:
        figures = (n.p50_ms, n.p99_ms, n.alone_p99_ms, n.ratio)
        table.add_row(n.beside, *(f"{figure:.3f}" for figure in figures))
    yield table
