"""A base class for backends written with asyncio."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from kvstrata.backends.base import (
    BackendContext,
    ObjectId,
    PageResult,
    ReadRequest,
    StorageBackend,
    WriteRequest,
)
from kvstrata.backends.outcomes import failure
from kvstrata.boundary import Outcome
from kvstrata.errors import ClosedError, StorageError, StorageUnavailableError

_T = TypeVar("_T")
_R = TypeVar("_R")


class AsyncStorageBackend(StorageBackend):
    """Implement a page as a coroutine; `StorageBackend` is done from it.

    Threads: all coroutines run on one event loop, on a thread of its own, from `open_async` to
    `close_async`: no locks are needed. A call of the worker is one hop to that loop. The pages of
    a `read`, `exists` or `delete` run at once, those of a `write` one after the other, so that no
    page is stored after one that was not; up to `concurrency` calls run at once. A backend whose
    protocol has batches overrides `read_batch` or `write_batch` instead.

    Buffers: borrowed until the coroutine returns. It must not return, or be left by an exception,
    while anything may still touch them.

    Results: a coroutine that raises is the failure of its page. `write_page` is not called for a
    page whose parent was refused earlier in the same call.
    """

    @abstractmethod
    async def exists_page(self, name: ObjectId) -> bool:
        """Is it there?"""

    @abstractmethod
    async def read_page(self, request: ReadRequest) -> PageResult:
        """As `StorageBackend.read`, for one page."""

    @abstractmethod
    async def write_page(self, request: WriteRequest) -> PageResult:
        """As `StorageBackend.write`, for one page."""

    @abstractmethod
    async def delete_page(self, name: ObjectId) -> bool:
        """True if it was there and is gone now."""

    async def open_async(self, context: BackendContext) -> None:
        """As `StorageBackend.open`; the first thing on the loop."""

    async def close_async(self) -> None:
        """As `StorageBackend.close`; the last thing on the loop."""

    async def read_batch(self, requests: Sequence[ReadRequest]) -> list[PageResult]:
        """All pages of one call of `read`."""
        return await _gather(self.read_page, requests)

    async def write_batch(self, requests: Sequence[WriteRequest]) -> list[PageResult]:
        """All pages of one call of `write`, parents first."""
        results: list[PageResult] = []
        lost: set[ObjectId] = set()
        for request in requests:
            if request.parent in lost:
                result = PageResult(Outcome.PARENT_MISSING)
            else:
                result = _result(await _outcome(self.write_page, request))
            if not result.outcome.is_stored:
                lost.add(request.object)
            results.append(result)
        return results

    # ── StorageBackend ───────────────────────────────────────────────────────────────────────────

    _loop: asyncio.AbstractEventLoop | None = None
    _thread: threading.Thread | None = None

    def open(self, context: BackendContext) -> None:
        loop = self._loop = asyncio.new_event_loop()
        name = f"kvstrata-{context.name}-loop"
        self._thread = threading.Thread(target=_run_loop, args=(loop,), name=name, daemon=True)
        self._thread.start()
        try:
            self._call(self.open_async(context))
        except BaseException:
            self._stop_loop(10.0)
            raise

    def close(self, deadline_s: float) -> None:
        loop = self._loop
        if loop is not None:
            try:
                done = asyncio.run_coroutine_threadsafe(self.close_async(), loop)
                with contextlib.suppress(TimeoutError):
                    done.result(deadline_s)
            finally:
                self._stop_loop(deadline_s)

    def exists(self, objects: Sequence[ObjectId]) -> list[bool]:
        return self._call(_gather_flags(self.exists_page, objects))

    def read(self, requests: Sequence[ReadRequest]) -> list[PageResult]:
        return self._call(self.read_batch(requests))

    def write(self, requests: Sequence[WriteRequest]) -> list[PageResult]:
        return self._call(self.write_batch(requests))

    def delete(self, objects: Sequence[ObjectId]) -> list[bool]:
        return self._call(_gather_flags(self.delete_page, objects))

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run `work` on the loop and wait for it."""
        if self._loop is None:
            work.close()
            raise ClosedError("the backend is not open")
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except concurrent.futures.CancelledError as error:
            raise StorageUnavailableError("closed while the call was under way") from error

    def _stop_loop(self, deadline_s: float) -> None:
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(deadline_s)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        left = asyncio.all_tasks(loop)  # calls that outlived the deadline of `close`
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _outcome(page: Callable[[_T], Awaitable[_R]], item: _T) -> _R | BaseException:
    """What `page` returns or raises. `SystemExit` too: on a loop it would end everything."""
    try:
        return await page(item)
    except BaseException as error:  # noqa: BLE001 (see above)
        return error


def _result(outcome: PageResult | BaseException) -> PageResult:
    return failure(outcome) if isinstance(outcome, BaseException) else outcome


async def _gather(
    page: Callable[[_T], Awaitable[PageResult]], items: Sequence[_T]
) -> list[PageResult]:
    """All pages at once; returns when the last one has ended, whatever the others did."""
    outcomes = await asyncio.gather(*[_outcome(page, item) for item in items])
    return [_result(outcome) for outcome in outcomes]


async def _gather_flags(page: Callable[[_T], Awaitable[bool]], items: Sequence[_T]) -> list[bool]:
    """As `_gather`; the first failure is that of the whole call."""
    flags: list[bool] = []
    for outcome in await asyncio.gather(*[_outcome(page, item) for item in items]):
        if isinstance(outcome, StorageError):
            raise outcome
        if isinstance(outcome, BaseException):
            raise StorageError(f"{type(outcome).__name__}: {outcome}") from outcome
        flags.append(outcome)
    return flags
