"""Backends written with asyncio: one hop a batch, buffers safe whatever a coroutine does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvstrata.backends import (
    BackendContext,
    ObjectId,
    PageResult,
    ReadRequest,
    StorageBackend,
    StoredObject,
    Usage,
    WriteRequest,
)
from kvstrata.backends.asyncio_backend import AsyncStorageBackend
from kvstrata.backends.testing import BackendTests
from kvstrata.boundary import Outcome
from kvstrata.errors import ClosedError, StorageAccessError, StorageUnavailableError

LOADED, STORED = Outcome.LOADED, Outcome.STORED


class AsyncMemory(AsyncStorageBackend):
    """Frames in a dict. It gives up the loop in the middle of everything."""

    def __init__(self) -> None:
        super().__init__(self.Options())
        self.frames: dict[ObjectId, bytes] = {}
        self.errors: dict[ObjectId, BaseException] = {}
        self.threads: set[str] = set()
        self.now = self.most = 0
        self.hold: asyncio.Event | None = None

    async def _pause(self, name: ObjectId) -> None:
        self.threads.add(threading.current_thread().name)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        if self.hold is not None:
            await self.hold.wait()
        self.now -= 1
        if name in self.errors:
            raise self.errors[name]

    async def exists_page(self, name: ObjectId) -> bool:
        await self._pause(name)
        return name in self.frames

    async def read_page(self, request: ReadRequest) -> PageResult:
        await self._pause(request.object)
        frame = self.frames.get(request.object)
        if frame is None:
            return PageResult(Outcome.MISSING)
        at = 0
        for buffer in request.buffers:
            part = frame[at : at + buffer.nbytes]
            buffer[: len(part)] = part
            at += len(part)
        return PageResult(LOADED, at)

    async def write_page(self, request: WriteRequest) -> PageResult:
        await self._pause(request.object)
        if request.object in self.frames:
            return PageResult(Outcome.EXISTS)
        self.frames[request.object] = b"".join(request.buffers)
        return PageResult(STORED, request.nbytes)

    async def delete_page(self, name: ObjectId) -> bool:
        await self._pause(name)
        return self.frames.pop(name, None) is not None

    def scan(self, namespace: bytes | None = None) -> Iterator[StoredObject]:
        for name, frame in list(self.frames.items()):
            if namespace in (None, name.namespace):
                yield StoredObject(name, len(frame), 0.0)

    def usage(self) -> Usage:
        return Usage(sum(map(len, self.frames.values())), None, len(self.frames))


class TestAsyncMemory(BackendTests):
    @pytest.fixture
    def make_backend(self) -> Callable[[], StorageBackend]:
        return AsyncMemory


@pytest.fixture
def backend() -> Iterator[AsyncMemory]:
    opened = AsyncMemory()
    opened.open(BackendContext("store"))
    yield opened
    opened.close(5)


def outcomes(results: Sequence[PageResult]) -> list[Outcome]:
    return [result.outcome for result in results]


def test_one_loop_many_pages(backend, make_pages) -> None:
    """All coroutines on one thread; the pages of a read at once, those of a write in order."""
    pages = make_pages()
    assert outcomes(backend.write(pages.writes(0, 20))) == [STORED] * 20
    assert backend.most == 1
    assert outcomes(backend.read(pages.reads(0, 20))) == [LOADED] * 20
    assert backend.most == 20
    assert backend.threads == {"kvstrata-store-loop"}


def test_failures_of_pages(backend, make_pages) -> None:
    """Each is the result of its page; a write stores nothing that builds on it."""
    pages = make_pages()
    backend.errors[pages.name(1)] = StorageAccessError("no")
    assert outcomes(backend.write(pages.writes(0, 4))) == [
        STORED, Outcome.ACCESS, Outcome.PARENT_MISSING, Outcome.PARENT_MISSING,
    ]  # fmt: skip
    for error, outcome in (
        (StorageUnavailableError("away"), Outcome.UNAVAILABLE),
        (SystemExit(1), Outcome.ERROR),
        (asyncio.CancelledError(), Outcome.ERROR),
        (OSError(5, "EIO"), Outcome.ERROR),
    ):
        backend.errors[pages.name(1)] = error
        found = outcomes(backend.read(pages.reads(0, 3)))
        assert found == [LOADED, outcome, Outcome.MISSING]
        with pytest.raises(Exception, match=r"away|1|EIO|Cancelled"):
            backend.exists(pages.names(0, 3))


def test_in_a_worker(start_worker, make_pages) -> None:
    jobs, pages = start_worker(AsyncMemory()), make_pages()
    assert jobs.store(pages.stores(0, 200)).outcomes() == [STORED] * 200
    loads = pages.loads(0, 200)
    assert jobs.load(loads).outcomes() == [LOADED] * 200
    assert all(page.payload == pages.data(page.depth) for page in loads)
    assert jobs.lookup(pages.names(0, 201)).count() == 200
    assert jobs.drop(pages.names(0, 200)).count() == 200


def test_open_that_fails() -> None:
    class Away(AsyncMemory):
        async def open_async(self, context: BackendContext) -> None:
            raise StorageUnavailableError("away")

    backend, before = Away(), threading.active_count()
    with pytest.raises(StorageUnavailableError):
        backend.open(BackendContext("x"))
    assert threading.active_count() == before
    with pytest.raises(ClosedError):
        backend.exists([])


def test_close_while_a_call_hangs(make_pages) -> None:
    """The call ends with a failure, and then nothing touches its buffers any more."""
    backend, pages = AsyncMemory(), make_pages()
    backend.open(BackendContext("x"))
    backend.hold = asyncio.Event()
    errors: list[str] = []

    def read() -> None:
        try:
            backend.read(pages.reads(0, 2))
        except StorageUnavailableError as error:
            errors.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    while backend.now < 2:
        pass
    backend.close(5)
    thread.join(20)
    assert errors == ["closed while the call was under way"]
    with pytest.raises(ClosedError):
        backend.read([])
