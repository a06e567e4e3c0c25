"""Calls of a backend that are no jobs, with a deadline: `open`, `usage`, `health`, `scan`."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from kvstrata.backends.base import BackendContext, StorageBackend, StoredObject
from kvstrata.backends.clock import MAX_WAIT_S
from kvstrata.backends.regions import HeaderRegion
from kvstrata.errors import (
    KvstrataError,
    PluginError,
    StorageBusyError,
    StorageError,
    StorageTimeoutError,
    StorageUnavailableError,
)

logger = logging.getLogger(__name__)

MOST_STUCK = 4
"""So many threads may be stuck in such calls; then further ones are refused."""
LOOK_S = 0.5
"""Who waits looks so often. A signal that comes just before the wait does not end it (its handler
runs when Python does), and Ctrl-C would wait for the deadline of an `open`."""
_SCAN_BATCH = 512
_LATE_CLOSE_S = 5.0

_T = TypeVar("_T")


def limits_of(name: str, backend: StorageBackend) -> tuple[int, int]:
    """Its `concurrency` and `max_batch`, checked."""
    concurrency, max_batch = backend.concurrency, backend.max_batch
    if concurrency < 1 or max_batch < 1:
        raise PluginError(
            f"backend {name!r} has concurrency {concurrency} and max_batch {max_batch}",
            remedy="both are at least 1; the plugin needs a fix",
        )
    return concurrency, max_batch


def close_backend(
    name: str, backend: StorageBackend, left_s: Callable[[], float], headers: HeaderRegion | None
) -> None:
    """Close it, and then the header buffers. For a thread of its own: a `close` that hangs is
    abandoned like any other call."""
    try:
        backend.close(max(0.0, left_s()))
    except BaseException:
        logger.exception("backend %s: close failed", name)
    finally:
        if headers is not None:
            headers.close()


class _Answer(Generic[_T]):
    """What a call comes to. `late` is told of a value that nobody waits for any more."""

    def __init__(self, late: Callable[[_T], None]) -> None:
        self._condition = threading.Condition()
        self._late = late
        self._given_up = self._done = False
        self._value: _T
        self._error: BaseException | None = None

    def run(self, call: Callable[[], _T]) -> None:
        try:
            value = call()
        except BaseException as error:  # noqa: BLE001 (it is raised where the answer is awaited)
            with self._condition:
                self._error, self._done = error, True
                self._condition.notify_all()
            return
        with self._condition:
            self._value, self._done = value, True
            self._condition.notify_all()
            given_up = self._given_up
        if given_up:
            self._late(value)

    def wait(self, what: str, deadline_s: float) -> _T:
        end_s = time.monotonic() + deadline_s
        with self._condition:
            while not self._done:
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    self._given_up = True
                    raise StorageTimeoutError(f"{what} did not return within {deadline_s:g} s")
                self._condition.wait(min(left_s, LOOK_S))
        if self._error is not None:
            raise _of_storage(what, self._error) from self._error
        return self._value


def _of_storage(what: str, error: BaseException) -> KvstrataError:
    """What a plugin raised, as an error of this package: a `SystemExit` of its own ends nobody."""
    if isinstance(error, KvstrataError):
        return error
    return StorageError(f"{what} failed: {type(error).__name__}: {error}")


class Asks:
    """Runs each call on a thread of its own and waits for it until its deadline."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()

    def ask(
        self,
        what: str,
        call: Callable[[], _T],
        deadline_s: float,
        late: Callable[[_T], None] = lambda _: None,
    ) -> _T:
        """What `call` returns, or raises: `StorageError` for what is no error of this package.
        `StorageTimeoutError` after `deadline_s`, and then `late(value)` if it returns all the same.
        `StorageBusyError` when too many are stuck."""
        answer: _Answer[_T] = _Answer(late)
        self._start(what, lambda: answer.run(call))
        return answer.wait(what, deadline_s)

    def open(self, backend: StorageBackend, context: BackendContext, deadline_s: float) -> None:
        """`backend.open`; one that returns after the deadline is closed. Raises as `ask`."""
        self.ask(
            f"open of backend {self._name!r}",
            lambda: backend.open(context),
            deadline_s,
            late=lambda _: backend.close(_LATE_CLOSE_S),
        )

    def scan(
        self, objects: Callable[[], Iterator[StoredObject]], step_s: float
    ) -> Iterator[StoredObject]:
        """The objects, from a thread of their own, at most `_SCAN_BATCH` ahead. Raises
        `StorageTimeoutError` when the next ones take longer than `step_s`."""
        found: queue.Queue[list[StoredObject] | BaseException | None] = queue.Queue(1)
        stopped = threading.Event()

        def put(what: list[StoredObject] | BaseException | None) -> bool:
            while not stopped.is_set():
                try:
                    found.put(what, timeout=0.1)
                except queue.Full:
                    continue
                return True
            return False

        def run() -> None:
            batch: list[StoredObject] = []
            try:
                for item in objects():
                    batch.append(item)
                    if len(batch) == _SCAN_BATCH:
                        if not put(batch):
                            return
                        batch = []
                put(batch)
                put(None)
            except BaseException as error:  # noqa: BLE001 (it is raised by the iterator)
                put(error)

        self._start("scan", run)
        try:
            while True:
                try:
                    batch = found.get(timeout=min(step_s, MAX_WAIT_S))
                except queue.Empty:
                    raise StorageTimeoutError(f"scan found nothing for {step_s:g} s") from None
                if batch is None:
                    return
                if isinstance(batch, BaseException):
                    raise _of_storage("scan", batch) from batch
                yield from batch
        finally:
            stopped.set()

    def join(self, deadline: Callable[[], float]) -> list[str]:
        """Wait until `deadline()`, the time that is left, is over; the names of what is stuck."""
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, min(deadline(), MAX_WAIT_S)))
        return [thread.name for thread in threads if thread.is_alive()]

    def _start(self, what: str, target: Callable[[], None]) -> None:
        def run() -> None:
            try:
                target()
            except BaseException:
                logger.exception("backend %s: %s failed", self._name, what)
            finally:
                with self._lock:
                    self._threads.discard(thread)

        name = f"kvstrata-{self._name}-{what}"
        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            if len(self._threads) >= MOST_STUCK:
                raise StorageBusyError(f"{len(self._threads)} calls such as {what} are under way")
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:
            with self._lock:
                self._threads.discard(thread)
            raise StorageUnavailableError(f"{what}: {error}") from error
