"""A few threads that work through a stream of jobs: bounded in number, results in order.

The threads are daemons, so that a store that hangs does not keep the process from ending.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Generic, TypeVar

from kvstrata.tools.frames import FrameBuffer

T = TypeVar("T")
R = TypeVar("R")

_LOOK_EVERY_S = 0.2
JOIN_S = 5.0


class Crew(Generic[T, R]):
    """`work(item, buffer)` for a stream of items, by `threads` threads with a buffer each.

    At most `2 * threads` items are under way. Jobs are begun in the order of the stream, so a job
    may wait for one before it.
    """

    def __init__(
        self, threads: int, buffer_bytes: int, work: Callable[[T, FrameBuffer], R]
    ) -> None:
        self._work = work
        self._ahead = 2 * threads
        self._is_left = False
        self._jobs: queue.SimpleQueue[tuple[T, Future[R]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(
                target=self._serve, args=(buffer_bytes,), name=f"kvstrata-tool-{i}", daemon=True
            )
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Crew[T, R]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads if kind is None and not self._is_left else ():
            thread.join(JOIN_S)

    def run(self, items: Iterable[T], is_over: Callable[[], bool]) -> Iterator[R]:
        """Results in order. When `is_over` says so, nobody waits for what is under way. Raises
        what a job raised."""
        pending: deque[Future[R]] = deque()
        stream = iter(items)
        is_more = True
        while True:
            while is_more and len(pending) < self._ahead:
                try:
                    item = next(stream)
                except StopIteration:
                    is_more = False
                    break
                future: Future[R] = Future()
                pending.append(future)
                self._jobs.put((item, future))
            if not pending:
                return
            while not pending[0].done():
                if is_over():
                    self._is_left = True
                    return
                _wait(pending[0])
            yield pending.popleft().result()

    def _serve(self, buffer_bytes: int) -> None:
        buffer = FrameBuffer(buffer_bytes)
        while (job := self._jobs.get()) is not None:
            item, future = job
            try:
                future.set_result(self._work(item, buffer))
            except BaseException as error:  # noqa: BLE001 (raised where the result is asked for)
                future.set_exception(error)


def _wait(future: Future[R]) -> None:
    try:
        future.exception(_LOOK_EVERY_S)
    except TimeoutError:
        return
