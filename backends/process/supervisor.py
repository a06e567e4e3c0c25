"""Keeps a process with an open backend in it: starts it, attends to it, starts it again."""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
from collections.abc import Sequence

import msgspec

from kvstrata.backends.base import BackendContext
from kvstrata.backends.policies import ProcessSettings
from kvstrata.backends.process import wire
from kvstrata.backends.process.child import Child
from kvstrata.errors import (
    ClosedError,
    KvstrataError,
    StorageError,
    StorageTimeoutError,
    StorageUnavailableError,
)
from kvstrata.units import parse_size

logger = logging.getLogger(__name__)

_CLOSE_SHARE = 0.8
"""Of the time to close, for the backend's own `close`; then its process is killed."""
_LOOK_S = 1.0
"""How often the memory of the process is looked at."""


class Supervisor:
    """One thread, which starts every process: the kernel ends them with it.

    `child` is the process that is open, None while there is none; `down` says why, then. Both are
    read from any thread.
    """

    def __init__(
        self, target: str, options: msgspec.Struct, settings: ProcessSettings, concurrency: int
    ) -> None:
        self.settings = settings
        self.child: Child | None = None
        self.down = "it is not open"
        self.restarts = 0
        self._target, self._options, self._concurrency = target, options, concurrency
        self._context = BackendContext("")
        self._lock = threading.Lock()
        """Guards the descriptors and `_closing`."""
        self._fds: list[int] = []
        self._wake = -1
        self._closing = False
        self._parent = os.getpid()
        self._close_s = 0.0
        self._close_before = math.inf
        self._thread: threading.Thread | None = None
        self._opened = threading.Event()
        self._open_error: BaseException | None = None
        self._up = threading.Event()

    def wait_up(self, timeout_s: float) -> bool:
        """Wait until there is a process that is open."""
        return self._up.wait(timeout_s)

    def open(self, context: BackendContext) -> None:
        """Start the first process; raises why it cannot be, and nothing is left then."""
        self._context = context
        self._fds = [os.dup(region.fd) for region in context.regions]
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        name = f"kvstrata-{context.name}-process"
        self._thread = threading.Thread(target=self._supervise, name=name, daemon=True)
        self._thread.start()
        self._opened.wait()
        if self._open_error is not None:
            self._thread.join()
            raise self._open_error

    def close(self, deadline_s: float) -> None:
        """See `ProcessBackend.close`. Idempotent. A fork of this process closes nothing."""
        with self._lock:
            if self._closing or self._thread is None or os.getpid() != self._parent:
                return
            self._closing = True
            self._close_s = _CLOSE_SHARE * deadline_s
            self._close_before = time.monotonic() + self._close_s
            os.eventfd_write(self._wake, 1)
        self._thread.join(max(0.1, deadline_s))

    # ── its thread ───────────────────────────────────────────────────────────────────────────────

    def _supervise(self) -> None:
        delay_s = self.settings.restart_delay_s
        try:
            while not self._closing:
                child = self._start()
                if child is not None:
                    lived_s = self._attend(child)
                    if lived_s > self.settings.restart_delay_max_s:
                        delay_s = self.settings.restart_delay_s
                if not self._opened.is_set() or self._pause(delay_s):
                    break
                delay_s = min(2 * delay_s, self.settings.restart_delay_max_s)
                self.restarts += 1
        except BaseException as error:
            self._open_error = error
            logger.exception("backend %s: its supervisor failed", self._context.name)
        finally:
            with self._lock:
                self._closing = True
                self.down = "it is closed"
                for fd in (*self._fds, self._wake):
                    os.close(fd)
                self._fds.clear()
            self._opened.set()

    def _start(self) -> Child | None:
        """Start a process and open the backend in it; None if that failed, and it is reaped."""
        child: Child | None = None
        try:
            child = Child(self._concurrency, self._fds)
            self._open_in(child)
        except (KvstrataError, EOFError, OSError, ValueError) as error:
            if child is not None:
                child.kill("it could not be opened")
                child.reap()
            found = error if isinstance(error, KvstrataError) else _died(child, error)
            if not self._opened.is_set():
                self._open_error = found
            else:
                logger.error("backend %s: cannot be restarted: %s", self._context.name, found)
            self.down = f"it cannot be restarted: {found}"
            return None
        self.child = child
        self._opened.set()
        self._up.set()
        return child

    def _open_in(self, child: Child) -> None:
        context = self._context
        sizes = [region.nbytes for region in context.regions]
        request = wire.Open(
            target=self._target,
            options=msgspec.to_builtins(self._options),
            name=context.name,
            page_bytes=context.page_bytes,
            regions=tuple(zip(self._fds, sizes, strict=True)),
            data_threads=self._concurrency,
            reports_evictions=context.on_evicted is not None,
        )
        channel = child.data.take()
        assert channel is not None
        with_end = time.monotonic() + self.settings.open_deadline_s
        try:
            channel.send(request)
            ready = _wait_for([channel.socket.fileno(), child.pidfd], [self._wake], with_end)
            if ready is None:
                raise StorageTimeoutError(f"not open after {self.settings.open_deadline_s} s")
            if ready == self._wake:
                raise ClosedError("closed while it was being opened")
            if ready == child.pidfd:
                raise EOFError
            channel.socket.settimeout(max(0.1, with_end - time.monotonic()))
            answer = child.hear(channel)
            channel.socket.settimeout(None)
        finally:
            child.data.give(channel)
        if isinstance(answer, wire.Failed):
            raise wire.unpack_error(answer)
        if not isinstance(answer, wire.Done):
            raise ValueError(f"{type(answer).__name__} is no answer to Open")

    def _attend(self, child: Child) -> float:
        """Serve an open process until its end, and reap it. How long it lived, in seconds."""
        try:
            self._serve(child)
        except BaseException:
            child.kill("its supervisor failed")
            raise
        finally:
            self.child, self.down = None, "its process has ended"
            self._up.clear()
            child.reap()
        if not self._closing:
            logger.error("backend %s: %s; it is restarted", self._context.name, child.why)
            self.down = f"{child.why}, and is being restarted"
        return time.monotonic() - child.started_at

    def _serve(self, child: Child) -> None:
        """Until the process has ended or was killed."""
        events, limit = child.events.socket.fileno(), parse_size(self.settings.memory_bytes)
        look = time.monotonic() + _LOOK_S if limit else math.inf
        while not self._closing:
            ready = _wait_for([child.pidfd, events], [self._wake], look)
            if ready == child.pidfd:
                return
            if ready == events and not self._hear(child):
                child.kill()
                return
            if time.monotonic() >= look:  # also while it tells of evictions all the time
                look = time.monotonic() + _LOOK_S
                if child.anonymous_bytes() > limit:
                    child.kill(f"it held more than {limit} bytes of memory")
                    return
        self._close_in(child, self._close_before)

    def _hear(self, child: Child) -> bool:
        """One message about evictions; False if there was none."""
        try:
            message = child.hear(child.events)
        except (EOFError, OSError, ValueError):
            return False
        if isinstance(message, wire.Evicted) and self._context.on_evicted is not None:
            try:
                self._context.on_evicted(wire.unpack_all(message.names))
            except Exception:
                logger.exception("backend %s: on_evicted raised", self._context.name)
        return True

    def _close_in(self, child: Child, end: float) -> None:
        """Close the backend in its process, which ends then, or is killed at `end`."""
        self.child, self.down = None, "it is closed"

        def ask() -> None:
            try:
                child.ask(child.asks, wire.Close(self._close_s))
            except StorageError as error:
                logger.error("backend %s: close failed: %s", self._context.name, error)

        asking = threading.Thread(target=ask, name=f"kvstrata-{self._context.name}-closing")
        asking.daemon = True
        asking.start()
        if _wait_for([child.pidfd], [], end) is None:
            child.kill("it did not close in time")

    def _pause(self, delay_s: float) -> bool:
        """Wait before a restart; True if there is none, because of `close`."""
        _wait_for([], [self._wake], time.monotonic() + delay_s)
        return self._closing


def _died(child: Child | None, error: BaseException) -> StorageError:
    why = child.why if child is not None else str(error)
    return StorageUnavailableError(f"its process ended while it was being opened: {why}")


def _wait_for(fds: Sequence[int], wakes: Sequence[int], end: float) -> int | None:
    """The first of the descriptors that can be read; None at `end`."""
    poll = select.poll()
    for fd in (*fds, *wakes):
        poll.register(fd, select.POLLIN)
    while True:
        left = end - time.monotonic()
        ready = poll.poll(None if left == math.inf else max(0.0, min(left, 3600.0)) * 1000)
        if ready:
            found = {fd for fd, _ in ready}
            return next(fd for fd in (*wakes, *fds) if fd in found)
        if left <= 0:
            return None
