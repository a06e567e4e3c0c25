"""The worker that owns one backend instance: threads, queue, deadlines, one result a job.

Deadlines are relative to the call. `done` is called exactly once a job, and so is `released`: after
`released` no thread touches the buffers of the job any more. At a deadline a job that waits ends at
once with both; one that is in the backend is reported as TIMEOUT at once and released when the call
returns (what came late is thrown away and counted). Pages of earlier chunks of such a job keep
their results. `released` comes first, except for a job that is given up in the backend.

Callbacks run on threads of the worker, without a lock, never inside the call that submitted the
job (after `close`, when there is no thread left, they do). They may submit further jobs; they do
not block, and they must not call `flush` or `close`.

Loads go ahead of stores, lookups ahead of both, also between the chunks of one job. Stores and
drops leave one thread to loads and lookups if there are two. A store that finds the backend full
waits in the queue, not on a thread.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from kvstrata.backends.asks import Asks, close_backend, limits_of
from kvstrata.backends.base import (
    BackendContext,
    Health,
    HealthState,
    HostRegion,
    ObjectId,
    StorageBackend,
    StoredObject,
    SupportsKill,
    Usage,
)
from kvstrata.backends.book import Notice
from kvstrata.backends.clock import MAX_WAIT_S, Clock, wait_on
from kvstrata.backends.framing import FrameIO
from kvstrata.backends.handoff import TURNS
from kvstrata.backends.jobs import (
    Job,
    JobResult,
    Operation,
    PageIO,
    WorkerSettings,
    WorkerStats,
)
from kvstrata.backends.regions import HeaderRegion
from kvstrata.backends.schedule import Schedule
from kvstrata.backends.unreadable import Unreadable

__all__ = ["JobResult", "PageIO", "StorageWorker", "WorkerSettings", "WorkerStats"]

logger = logging.getLogger(__name__)

_MOST_IN_A_CALL = 1024
"""Pages, however many a backend would take: each needs a header buffer in each thread."""


class StorageWorker:
    """See the module's docstring. Any thread may call any method."""

    def __init__(
        self,
        name: str,
        backend: StorageBackend,
        settings: WorkerSettings,
        context: BackendContext,
        clock: Clock = time.monotonic,
    ) -> None:
        self.name = name
        self.settings = settings
        self._backend = backend
        self._context = dataclasses.replace(context, on_evicted=self._evicted)
        self.on_evicted: Callable[[Sequence[ObjectId]], None] | None = context.on_evicted
        """Hears of frames that were evicted, or deleted as unusable; set it before `start`. Any
        thread; it does not block."""
        self._unreadable = Unreadable()
        self._clock = clock
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        """Worker threads wait here for jobs."""
        self._alarm = threading.Condition(self._lock)
        """The deadline thread waits here."""
        self._quiet = threading.Condition(self._lock)
        """`flush` and `close` wait here for jobs to end."""
        self._schedule, self._asks = Schedule(settings, 1, 1, clock()), Asks(name)
        self._wake_at = math.inf
        self._undelivered = 0
        self._started = self._closing = self._stopping = False
        self._max_batch = 1
        self._headers: HeaderRegion | None = None
        self._threads: list[threading.Thread] = []
        self._abandoned = 0

    # ── life ─────────────────────────────────────────────────────────────────────────────────────

    def start(self, regions: Sequence[HostRegion] = ()) -> None:
        """Open the backend and start the threads.

        `regions`, the memory that payloads will lie in, and that of the worker's header buffers
        are what the backend's context lists. They stay until `close` returns.

        Raises errors of this package that the backend raises, `StorageError` for anything else,
        `StorageTimeoutError` at the deadline. Then nothing is left running, but an `open` that
        hangs; it is closed should it return. Shortens the turns of other threads (`handoff`).
        """
        assert not self._started, "start once"
        concurrency, max_batch = limits_of(self.name, self._backend)
        self._max_batch = min(max_batch, _MOST_IN_A_CALL)
        headers = self._headers = HeaderRegion(self.name, concurrency, self._max_batch)
        known = (*self._context.regions, *regions, headers.region)
        context = dataclasses.replace(self._context, regions=known)
        try:
            self._asks.open(self._backend, context, self.settings.open_deadline_s)
        except BaseException:
            headers.close()
            raise
        now, can_kill = self._clock(), isinstance(self._backend, SupportsKill)
        self._schedule = Schedule(
            self.settings, concurrency, self._max_batch, now, can_kill=can_kill
        )
        self._started = True
        TURNS.shorten()
        for i in range(concurrency):
            self._start_thread(str(i), partial(self._serve, headers.buffers(i)))
        self._start_thread("deadlines", self._watch)

    def flush(self, deadline_s: float) -> bool:
        """Wait until every job has ended and its callbacks have returned; False if time ran out."""
        with self._lock:
            return self._wait_quiet(self._is_idle, deadline_s)

    def drain(self, deadline_s: float) -> bool:
        """From now on new jobs end as UNAVAILABLE; `flush` those that are there."""
        with self._lock:
            self._schedule.draining = True
        return self.flush(deadline_s)

    def close(self, deadline_s: float) -> None:
        """Stop within `deadline_s` in all.

        Jobs that wait end as CANCELLED; those in the backend get most of the time, then are too,
        and a backend that can be killed is. A thread that is stuck is abandoned, logged and
        counted; should it return some day, it releases its buffers and ends. Idempotent.
        """
        end = self._clock() + deadline_s
        with self._lock:
            if self._closing or not self._started:
                self._closing = True
                return
            self._closing = True
            self._schedule.cancel_waiting()
            notices = self._take_notices()
        self._deliver(notices)
        with self._lock:
            self._wait_quiet(lambda: self._schedule.running == 0, 0.8 * (end - self._clock()))
            is_stuck = self._schedule.running > 0
            self._schedule.cancel_running()
            self._stopping = True
            notices = self._take_notices()
            self._work.notify_all()
            self._alarm.notify_all()
        self._deliver(notices)
        self._kill("closed while calls were under way" if is_stuck else "")
        closing = partial(close_backend, self.name, self._backend, lambda: end - self._clock())
        self._start_thread("close", partial(closing, self._headers))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, min(end - self._clock(), MAX_WAIT_S)))
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        stuck += self._asks.join(lambda: end - self._clock())
        TURNS.restore()
        with self._lock:
            self._abandoned = len(stuck)
        if stuck:
            logger.error("backend %s: abandoned, stuck in the backend: %s", self.name, stuck)

    # ── jobs ─────────────────────────────────────────────────────────────────────────────────────

    def lookup(
        self, objects: Sequence[ObjectId], deadline_s: float, done: Callable[[int], None]
    ) -> None:
        """`done(n)`: the first `n` objects seem to exist; 0 after a failure or the deadline."""
        self._submit(Operation.LOOKUP, objects, deadline_s, done, None)

    def load(
        self,
        pages: Sequence[PageIO],
        deadline_s: float,
        done: Callable[[JobResult], None],
        released: Callable[[], None],
    ) -> None:
        """Fill the payloads. Only a page with outcome LOADED holds what was stored.

        A frame that is corrupt, or twice could not be read (ACCESS, ERROR), is deleted and reported
        to `on_evicted`, so that it can be stored anew. While that fails, lookups do not find it and
        stores give the reason, not EXISTS. A frame of another format is MISSING, and stays.
        """
        self._submit(Operation.LOAD, pages, deadline_s, done, released)

    def store(
        self,
        pages: Sequence[PageIO],
        deadline_s: float,
        done: Callable[[JobResult], None],
        released: Callable[[], None],
    ) -> None:
        """Store the payloads, parents first. The prefix stays closed: after the first page that is
        not stored the rest is PARENT_MISSING, in this job and in later ones that build on it."""
        self._submit(Operation.STORE, pages, deadline_s, done, released)

    def drop(
        self, objects: Sequence[ObjectId], deadline_s: float, done: Callable[[int], None]
    ) -> None:
        """Delete. `done(n)`: how many were there and are gone."""
        self._submit(Operation.DROP, objects, deadline_s, done, None)

    # ── questions ────────────────────────────────────────────────────────────────────────────────

    def stats(self) -> WorkerStats:
        """A snapshot; cheap, waits for no backend."""
        with self._lock:
            return self._schedule.stats(self._abandoned)

    def usage(self) -> Usage:
        """The backend's answer. Raises `StorageError`; blocks for `ask_deadline_s` at most."""
        return self._asks.ask("usage", self._backend.usage, self.settings.ask_deadline_s)

    def scan(self, namespace: bytes | None = None) -> Iterator[StoredObject]:
        """As the backend's `scan`; each step blocks for `ask_deadline_s` at most."""
        return self._asks.scan(lambda: self._backend.scan(namespace), self.settings.ask_deadline_s)

    def condition(self) -> Health:
        """What the worker itself sees, by calls, breakers and probes: true also when nothing is
        asked. Never blocks."""
        with self._lock:
            return self._schedule.condition.health(self._schedule.overdue(), self._abandoned)

    def health(self) -> Health:
        """What the worker sees, or else the backend's opinion, for people and tools: unlike
        `condition`, it blocks, for `ask_deadline_s` at most."""
        own = self.condition()
        if own.state is not HealthState.OK:
            return own
        try:
            return self._asks.ask("health", self._backend.health, self.settings.ask_deadline_s)
        except Exception as error:  # noqa: BLE001 (a plugin's health check is no reason to fail)
            return Health(HealthState.DEGRADED, f"health check failed: {error}")

    def check_integrity(self) -> None:
        """Raises AssertionError if the worker's bookkeeping contradicts itself."""
        with self._lock:
            self._schedule.check_integrity()
            assert self._undelivered >= 0
            assert not self._stopping or self._closing
        self._unreadable.check_integrity()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _submit(
        self,
        operation: Operation,
        items: Sequence[Any],
        deadline_s: float,
        done: Callable[[Any], None],
        released: Callable[[], None] | None,
    ) -> None:
        assert self._started, "start the worker first"
        now = self._clock()
        job = Job(operation, tuple(items), now + deadline_s, done, released)
        with self._lock:
            self._schedule.submit(job, now)
            notices = self._take_notices() if self._stopping else []
            if not self._stopping:
                self._wake()
        self._deliver(notices)

    def _is_idle(self) -> bool:
        schedule = self._schedule
        return schedule.idle and not schedule.has_notices and not self._undelivered

    def _wake(self) -> None:
        """Wake whom the last transition concerns. Needs the lock."""
        if runnable := self._schedule.runnable():
            self._work.notify(runnable)
        self._wake_watch()

    def _wake_watch(self) -> None:
        if self._schedule.has_notices or self._schedule.next_wake() < self._wake_at:
            self._alarm.notify()

    def _take_notices(self) -> list[Notice]:
        notices = self._schedule.take_notices()
        self._undelivered += len(notices)
        return notices

    def _deliver(self, notices: list[Notice]) -> None:
        """Run callbacks, without the lock. One that raises harms nobody else."""
        if not notices:
            return
        errors = 0
        for notice in notices:
            try:
                notice()
            except BaseException:
                errors += 1
                logger.exception("backend %s: a callback raised", self.name)
        with self._lock:
            self._schedule.counters.callback_errors += errors
            self._undelivered -= len(notices)
            self._quiet.notify_all()

    def _serve(self, headers: Sequence[memoryview]) -> None:
        """A worker thread: take a job, run one chunk of it, again."""
        frames = FrameIO(self.name, self._backend, headers, self._unreadable, self._removed)
        schedule, clock = self._schedule, self._clock
        while True:
            with self._lock:
                while (job := schedule.take(clock())) is None:
                    if self._stopping:
                        return
                    self._wake_watch()  # a rate may hold back what waits
                    self._work.wait()
                items = job.next_items(self._max_batch)
            chunk = frames.run(job.operation, items)
            del items
            with self._lock:
                schedule.progress(job, chunk, clock())
                notices = self._take_notices()
                self._wake()
                self._quiet.notify_all()
            del job, chunk
            self._deliver(notices)

    def _watch(self) -> None:
        """The deadline thread. It also runs the callbacks of jobs that were never queued."""
        while True:
            with self._lock:
                while True:
                    now = self._clock()
                    self._schedule.expire(now)
                    notices = self._take_notices()
                    if notices or self._stopping or self._schedule.kill_wanted:
                        break
                    self._wake_at = self._schedule.next_wake()
                    if runnable := self._schedule.runnable():
                        self._work.notify(runnable)
                    wait_on(self._clock, self._alarm, self._wake_at - now)
                self._wake_at = -math.inf
                self._wake()
                stopping = self._stopping
                why = self._schedule.take_kill()
            self._deliver(notices)
            self._kill(why)
            if stopping:
                return

    def _kill(self, why: str) -> None:
        if why and isinstance(self._backend, SupportsKill):
            logger.error("backend %s: is killed: %s", self.name, why)
            self._backend.kill(why)

    def _evicted(self, objects: Sequence[ObjectId]) -> None:
        """There is room, or may be (`objects` is empty then): waiting stores try again."""
        self._removed(objects)
        with self._lock:
            if self._schedule.waiting_for_room:
                self._schedule.unpark()
                self._wake()

    def _removed(self, objects: Sequence[ObjectId]) -> None:
        """They are gone, and nobody asked for it: what was known of them holds no more."""
        self._unreadable.discard(objects)
        if objects and self.on_evicted is not None:
            try:
                self.on_evicted(objects)
            except Exception:
                logger.exception("backend %s: on_evicted raised", self.name)

    def _wait_quiet(self, quiet: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for `quiet()`, which is asked with the lock held. Needs the lock."""
        end = self._clock() + timeout_s
        while not quiet():
            left = end - self._clock()
            if left <= 0:
                return False
            wait_on(self._clock, self._quiet, left)
        return True

    def _start_thread(self, role: str, target: Callable[[], None]) -> None:
        name = f"kvstrata-{self.name}-{role}"
        self._threads.append(threading.Thread(target=target, name=name, daemon=True))
        self._threads[-1].start()
