"""A clock that tests turn by hand, pages to store, and a backend that does as it is told."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvstrata.backends import (
    BackendContext,
    JobResult,
    ObjectId,
    PageIO,
    PageResult,
    ReadRequest,
    StorageBackend,
    StorageWorker,
    WorkerSettings,
    WriteRequest,
)
from kvstrata.backends.frame import HEADER_BYTES, encode_header
from kvstrata.backends.memory import MemoryBackend, MemoryOptions
from kvstrata.backends.policies import BreakerSettings, RetrySettings
from kvstrata.boundary import Outcome

NO_RETRY = RetrySettings(attempts=1)
NO_BREAKER = BreakerSettings(failures=0, probe_s=0)

WAIT_S = 20.0
"""How long a test waits for what must happen. Never reached when all is well."""


class ManualClock:
    """Time stands still until `advance`; who waits on it wakes up then."""

    def __init__(self) -> None:
        self._now = 0.0
        self._lock = threading.Lock()
        self._waiting: list[threading.Condition] = []

    def __call__(self) -> float:
        with self._lock:
            return self._now

    def wait(self, condition: threading.Condition, timeout_s: float) -> None:
        """In place of `condition.wait(timeout_s)`; the caller holds the condition."""
        if timeout_s <= 0:
            return
        with self._lock:
            self._waiting.append(condition)
        try:
            # A time that passes between the caller's look at the clock and this line is not
            # missed for ever: it looks again after a moment of real time.
            condition.wait(0.05)
        finally:
            with self._lock:
                self._waiting.remove(condition)

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds
            waiting = list(self._waiting)
        for condition in waiting:
            with condition:
                condition.notify_all()


class Pages:
    """Chains of pages of one namespace; every byte follows from the index of the page."""

    def __init__(
        self, page_bytes: int = 8192, namespace: bytes = b"tests", chain: str = ""
    ) -> None:
        self.page_bytes = page_bytes
        self.namespace = hashlib.sha256(namespace).digest()
        self.chain = chain

    def name(self, i: int) -> ObjectId:
        key = hashlib.sha256(f"{self.chain} page {i}".encode()).digest()
        return ObjectId(self.namespace, key)

    def data(self, i: int) -> bytes:
        return random.Random(f"{self.chain} {i}").randbytes(self.page_bytes)

    def io(self, i: int, payload: bytearray | bytes) -> PageIO:
        parent = self.name(i - 1) if i else None
        return PageIO(self.name(i), parent, i, memoryview(payload))

    def writes(self, start: int, stop: int) -> list[WriteRequest]:
        """Whole frames, for a backend without a worker."""
        requests = []
        for page in self.stores(start, stop):
            header = memoryview(bytearray(HEADER_BYTES))
            encode_header(header, page.object, page.parent, page.depth, page.payload)
            buffers = (header, page.payload)
            requests.append(WriteRequest(page.object, page.parent, page.depth, buffers))
        return requests

    def reads(self, start: int, stop: int) -> list[ReadRequest]:
        size = HEADER_BYTES + self.page_bytes
        return [
            ReadRequest(self.name(i), (memoryview(bytearray(size)),)) for i in range(start, stop)
        ]

    def names(self, start: int, stop: int) -> list[ObjectId]:
        return [self.name(i) for i in range(start, stop)]

    def stores(self, start: int, stop: int) -> list[PageIO]:
        return [self.io(i, self.data(i)) for i in range(start, stop)]

    def loads(self, start: int, stop: int) -> list[PageIO]:
        return [self.io(i, bytearray(self.page_bytes)) for i in range(start, stop)]


class Caught:
    """The callbacks of one job: they are called once each, and can be waited for."""

    def __init__(self) -> None:
        self.results: list[JobResult | int] = []
        self.releases = 0
        self._condition = threading.Condition()

    def done(self, result: JobResult | int) -> None:
        with self._condition:
            self.results.append(result)
            self._condition.notify_all()

    def released(self) -> None:
        with self._condition:
            self.releases += 1
            self._condition.notify_all()

    @property
    def is_done(self) -> bool:
        return bool(self.results)

    def result(self) -> JobResult:
        """Wait for `done`."""
        with self._condition:
            assert self._condition.wait_for(lambda: self.results, WAIT_S), "done was not called"
        result = self.results[0]
        assert isinstance(result, JobResult)
        return result

    def outcomes(self) -> list[Outcome]:
        return [page.outcome for page in self.result().pages]

    def count(self) -> int:
        """Wait for the `done` of a lookup or a drop."""
        with self._condition:
            assert self._condition.wait_for(lambda: self.results, WAIT_S), "done was not called"
        result = self.results[0]
        assert isinstance(result, int)
        return result

    def wait_released(self) -> None:
        with self._condition:
            assert self._condition.wait_for(lambda: self.releases, WAIT_S), "not released"

    def check_once(self) -> None:
        assert len(self.results) == 1
        assert self.releases == 1


class Jobs:
    """Submits jobs to a worker and keeps what came back."""

    def __init__(self, worker: StorageWorker) -> None:
        self.worker = worker
        self.caught: list[Caught] = []

    def store(self, pages: Sequence[PageIO], deadline_s: float = 1000.0) -> Caught:
        return self._submit(self.worker.store, pages, deadline_s)

    def load(self, pages: Sequence[PageIO], deadline_s: float = 1000.0) -> Caught:
        return self._submit(self.worker.load, pages, deadline_s)

    def lookup(self, names: Sequence[ObjectId], deadline_s: float = 1000.0) -> Caught:
        caught = Caught()
        self.worker.lookup(names, deadline_s, caught.done)
        return caught

    def drop(self, names: Sequence[ObjectId], deadline_s: float = 1000.0) -> Caught:
        caught = Caught()
        self.worker.drop(names, deadline_s, caught.done)
        return caught

    def _submit(
        self, method: Callable[..., None], pages: Sequence[PageIO], deadline_s: float
    ) -> Caught:
        caught = Caught()
        self.caught.append(caught)
        method(pages, deadline_s, caught.done, caught.released)
        return caught


class Gate:
    """Where a call of the backend waits until the test lets it pass."""

    def __init__(self) -> None:
        self._entered = threading.Semaphore(0)
        self._opened = threading.Event()

    def __call__(self, *_: object) -> None:
        self._entered.release()
        assert self._opened.wait(WAIT_S), "the gate was never opened"

    def wait_entered(self, calls: int = 1) -> None:
        for _ in range(calls):
            assert self._entered.acquire(timeout=WAIT_S), "nobody came to the gate"

    def open(self) -> None:
        self._opened.set()


class ScriptedBackend(MemoryBackend):
    """A memory backend that counts calls and does `hooks[operation]` before each."""

    threads = 2
    batch = 4

    def __init__(self, max_bytes: int = 0) -> None:
        super().__init__(MemoryOptions(max_bytes=max_bytes))
        self.hooks: dict[str, Callable[[Sequence[Any]], Any]] = {}
        self.calls: list[tuple[str, list[ObjectId]]] = []
        self.close_calls = 0

    @property
    def concurrency(self) -> int:
        return self.threads

    @property
    def max_batch(self) -> int:
        return self.batch

    def hold(self, operation: str) -> Gate:
        """Every call of `operation` waits at this gate."""
        gate = self.hooks[operation] = Gate()
        return gate

    def names(self, operation: str) -> list[list[ObjectId]]:
        return [names for op, names in self.calls if op == operation]

    def _call(self, operation: str, items: Sequence[Any], call: Callable[..., Any]) -> Any:
        self.calls.append((operation, [getattr(item, "object", item) for item in items]))
        hook = self.hooks.get(operation)
        answer = None if hook is None else hook(items)
        return call(items) if answer is None else answer

    def exists(self, objects: Sequence[ObjectId]) -> list[bool]:
        return self._call("exists", objects, super().exists)

    def read(self, requests: Sequence[ReadRequest]) -> list[PageResult]:
        return self._call("read", requests, super().read)

    def write(self, requests: Sequence[WriteRequest]) -> list[PageResult]:
        return self._call("write", requests, super().write)

    def delete(self, objects: Sequence[ObjectId]) -> list[bool]:
        return self._call("delete", objects, super().delete)

    def close(self, deadline_s: float) -> None:
        self.close_calls += 1
        hook = self.hooks.get("close")
        if hook is not None:
            hook([])
        super().close(deadline_s)


@pytest.fixture
def make_gate() -> type[Gate]:
    return Gate


@pytest.fixture
def scripted() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture
def make_scripted() -> type[ScriptedBackend]:
    return ScriptedBackend


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def make_pages() -> type[Pages]:
    return Pages


StartWorker = Callable[..., Jobs]


@pytest.fixture
def start_worker() -> Iterator[StartWorker]:
    """Start workers that are closed, and checked, when the test ends. They neither try again nor
    open a breaker nor probe, if the test does not say so."""
    started: list[Jobs] = []

    def start(backend: StorageBackend, **options: object) -> Jobs:
        clock = options.pop("clock", None)
        context = options.pop("context", None) or BackendContext("tested")
        options = {"retry": NO_RETRY, "breaker": NO_BREAKER, **options}
        settings = WorkerSettings(**options)  # type: ignore[arg-type]
        extra = {} if clock is None else {"clock": clock}
        worker = StorageWorker("tested", backend, settings, context, **extra)  # type: ignore[arg-type]
        worker.start()
        started.append(Jobs(worker))
        return started[-1]

    yield start
    for jobs in started:
        jobs.worker.check_integrity()
        jobs.worker.close(5.0)
        jobs.worker.check_integrity()
        for caught in jobs.caught:
            caught.check_once()
