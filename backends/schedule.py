"""Which job of a storage worker runs next, and when each one ends.

Pure bookkeeping: no thread, no clock, no backend. Every method is called with the worker's lock
held and takes the time as an argument; callbacks become notices, which the worker runs without
the lock.

    submit ──▶ QUEUED ──take──▶ RUNNING ──progress──▶ ENDED
                 ▲ ▲               │  │
                 │ └── next chunk ─┘  └─ no room ─▶ PARKED ─ room ─▶ QUEUED
                 └── WAITING (a store, until an earlier job stored its parent or the same page)

A job is *reported* once (its `done`): when it ends, or at its deadline if it is running then. It
is *retired* once (its `released`): when no thread touches its buffers any more.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from functools import partial

from kvstrata.backends.base import PageResult
from kvstrata.backends.chains import StoreOrder
from kvstrata.backends.counters import Counters
from kvstrata.backends.jobs import (
    Chunk,
    Job,
    JobResult,
    JobState,
    Operation,
    WorkerSettings,
    WorkerStats,
)
from kvstrata.boundary import Outcome

Notice = Callable[[], None]


class Schedule:
    """All jobs that were submitted and are not retired."""

    def __init__(self, settings: WorkerSettings, mutators: int) -> None:
        self.settings = settings
        self.counters = Counters()
        self.running = 0
        self._mutators = mutators
        self._mutating = 0
        self._queues: dict[Operation, deque[Job]] = {op: deque() for op in Operation}
        self._queued_pages = dict.fromkeys(Operation, 0)
        self._parked: list[Job] = []
        self._unpark_at = math.inf
        self._live: set[Job] = set()
        self._stores = 0
        self._order = StoreOrder()
        self._alarms: list[tuple[float, int, Job]] = []
        self._numbers = itertools.count()
        self._ready: list[Job] = []
        """Stores that wait for nothing any more and are not admitted yet."""
        self._notices: list[Notice] = []
        self._closing = False

    # ── questions ────────────────────────────────────────────────────────────────────────────────

    @property
    def idle(self) -> bool:
        return not self._live

    @property
    def waiting_for_room(self) -> int:
        return len(self._parked)

    @property
    def queued_pages(self) -> dict[str, int]:
        return {op.value: pages for op, pages in self._queued_pages.items()}

    @property
    def has_notices(self) -> bool:
        return bool(self._notices)

    def runnable(self) -> int:
        """How many queued jobs a free thread could take now."""
        queues = self._queues
        mutations = len(queues[Operation.DROP]) + len(queues[Operation.STORE])
        room = self._mutators - self._mutating
        return len(queues[Operation.LOOKUP]) + len(queues[Operation.LOAD]) + min(mutations, room)

    def next_wake(self) -> float:
        """When `expire` has something to do."""
        alarm = self._alarms[0][0] if self._alarms else math.inf
        return min(alarm, self._unpark_at)

    def overdue(self) -> int:
        """Jobs whose call of the backend is running past their deadline."""
        return sum(job.reported for job in self._live) if self.running else 0

    def take_notices(self) -> list[Notice]:
        notices, self._notices = self._notices, []
        return notices

    def stats(self, abandoned_threads: int) -> WorkerStats:
        return WorkerStats(
            **self.counters.snapshot(),
            abandoned_threads=abandoned_threads,
            queued_pages_now=self.queued_pages,
            running_jobs_now=self.running,
            waiting_for_room_now=self.waiting_for_room,
        )

    # ── transitions ──────────────────────────────────────────────────────────────────────────────

    def submit(self, job: Job, now: float) -> None:
        """Queue `job`, or end it at once with the reason it cannot be queued."""
        pages, operation = len(job.items), job.operation
        job.queued_at = now
        self._live.add(job)
        is_crowded = self._is_crowded(operation, pages)
        self._queued_pages[operation] += pages
        self._stores += operation is Operation.STORE
        job.state = JobState.WAITING
        if self._closing:
            self._end(job, Outcome.CANCELLED)
        elif pages == 0:
            self._end(job, None)
        elif job.deadline <= now:
            self._end(job, Outcome.TIMEOUT)
        elif is_crowded:
            self._end(job, Outcome.OVERLOADED)
        else:
            if job.deadline < math.inf:
                heapq.heappush(self._alarms, (job.deadline, next(self._numbers), job))
            if operation is Operation.STORE:
                self._order.add(job)
            if job.waits == 0 and not self._admit(job):
                self._end(job, Outcome.PARENT_MISSING)

    def take(self, now: float) -> Job | None:
        """The most urgent job that may run; it is RUNNING and its caller owns it."""
        queues = self._queues
        if queues[Operation.LOOKUP]:
            job = queues[Operation.LOOKUP].popleft()
        elif queues[Operation.LOAD]:
            job = queues[Operation.LOAD].popleft()
        elif self._mutating == self._mutators:
            return None
        elif queues[Operation.DROP]:
            job = queues[Operation.DROP].popleft()
        elif queues[Operation.STORE]:
            job = queues[Operation.STORE].popleft()
        else:
            return None
        self._queued_pages[job.operation] -= len(job.items) - job.next
        self._start(job)
        job.queue_s += now - job.queued_at
        return job

    def progress(self, job: Job, chunk: Chunk, now: float) -> None:
        """The call that `job` was taken for has returned."""
        counters, operation = self.counters, job.operation
        counters.calls[operation] += 1
        counters.add_call(chunk)
        counters.io_s[operation] += chunk.io_s
        counters.check_s[operation] += chunk.check_s
        counters.corrupt_deleted += chunk.corrupt_deleted
        if chunk.corrupt_deleted:
            self.unpark()
        if job.reported:
            counters.late_pages += chunk.items
            self._retire(job)
            return
        job.io_s += chunk.io_s
        job.check_s += chunk.check_s
        if operation is Operation.STORE:
            self._progress_store(job, chunk, now)
        elif operation is Operation.LOAD:
            job.results.extend(chunk.results)
            self._advance(job, chunk.items, now)
        elif chunk.failure is not None:
            self._end(job, chunk.failure)
        else:
            job.count += chunk.count
            if operation is Operation.DROP and chunk.count:
                self.unpark()
            if operation is Operation.LOOKUP and chunk.count < chunk.items:
                self._end(job, None)
            else:
                self._advance(job, chunk.items, now)

    def expire(self, now: float) -> None:
        """Report every job whose deadline has passed; let parked stores try again."""
        while self._alarms and self._alarms[0][0] <= now:
            job = heapq.heappop(self._alarms)[2]
            if job.reported:
                continue
            if job.state is JobState.RUNNING:
                self._report(job, Outcome.TIMEOUT)
                self._resolve()
            else:
                job.queue_s += now - job.queued_at
                self._end(job, Outcome.TIMEOUT)
        if now >= self._unpark_at:
            self.unpark()

    def unpark(self) -> None:
        """There may be room: parked stores are the first in the queue, in their order."""
        queue = self._queues[Operation.STORE]
        for job in reversed(self._parked):
            job.state = JobState.QUEUED
            queue.appendleft(job)
        self._parked.clear()
        self._unpark_at = math.inf

    def cancel_waiting(self) -> None:
        """From now on nothing is queued: what waits ends as CANCELLED."""
        self._closing = True
        for job in [job for job in self._live if job.state is not JobState.RUNNING]:
            if job.state is not JobState.ENDED:
                self._end(job, Outcome.CANCELLED)

    def cancel_running(self) -> None:
        """Report what still runs as CANCELLED; it is retired when its call returns."""
        for job in self._live:
            if not job.reported:
                self._report(job, Outcome.CANCELLED)
        self._resolve()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _progress_store(self, job: Job, chunk: Chunk, now: float) -> None:
        stored = 0
        for result in chunk.results:
            if not result.outcome.is_stored:
                break
            stored += 1
        job.results.extend(chunk.results[:stored])
        if stored == len(chunk.results):
            self._advance(job, chunk.items, now)
            return
        job.next += stored
        first = chunk.results[stored]
        wait = first.outcome is Outcome.FULL and self.settings.on_full == "block"
        if wait and not self._closing:
            self._stop(job, JobState.PARKED, now)
            self._queued_pages[job.operation] += len(job.items) - job.next
            if not self._parked:
                self._unpark_at = now + self.settings.full_poll_s
            self._parked.append(job)
        else:
            job.results.append(first)
            self._end(job, Outcome.PARENT_MISSING)

    def _advance(self, job: Job, items: int, now: float) -> None:
        """The next chunk of `job`, if there is one; more urgent jobs may come in between."""
        job.next += items
        if job.next >= job.limit:
            self._end(job, Outcome.PARENT_MISSING if job.limit < len(job.items) else None)
        elif self._closing:
            self._end(job, Outcome.CANCELLED)
        else:
            self._stop(job, JobState.QUEUED, now)
            self._queued_pages[job.operation] += len(job.items) - job.next
            self._queues[job.operation].appendleft(job)

    def _is_crowded(self, operation: Operation, pages: int) -> bool:
        """Whether so many more do not fit into the queue. Stores that may wait always do: their
        buffers, which the caller has lent, bound them."""
        if operation is Operation.STORE and self.settings.on_full == "block":
            return False
        queued = self._queued_pages[operation]
        return queued > 0 and queued + pages > self.settings.queue_pages

    def _admit(self, job: Job) -> bool:
        """Queue a job that waits for nothing; False if its first page has lost its parent."""
        if job.operation is Operation.STORE:
            job.limit = self._order.first_orphan(job)
            if job.limit == 0:
                return False
        job.state = JobState.QUEUED
        self._queues[job.operation].append(job)
        return True

    def _start(self, job: Job) -> None:
        job.state = JobState.RUNNING
        self.running += 1
        self._mutating += job.operation in (Operation.STORE, Operation.DROP)

    def _stop(self, job: Job, state: JobState, now: float) -> None:
        job.state = state
        job.queued_at = now
        self.running -= 1
        self._mutating -= job.operation in (Operation.STORE, Operation.DROP)

    def _end(self, job: Job, rest: Outcome | None) -> None:
        """Report `job`, `rest` being the outcome of what was not handled, and retire it."""
        self._report(job, rest)
        self._retire(job)
        self._resolve()

    def _report(self, job: Job, rest: Outcome | None) -> None:
        operation, counters = job.operation, self.counters
        job.reported = True
        counters.add_job(job)
        if operation in (Operation.LOOKUP, Operation.DROP):
            failed = rest is not None
            left = len(job.items) - job.count
            if operation is Operation.LOOKUP and failed:
                job.count, left = 0, len(job.items)
            counters.add_outcome(operation, Outcome.EXISTS, job.count)
            counters.add_outcome(operation, rest or Outcome.MISSING, left)
            self._notices.append(partial(job.done, job.count))
            return
        missing = len(job.items) - len(job.results)
        if missing and rest is not None:
            if job.state is JobState.PARKED and rest is Outcome.TIMEOUT:
                job.results.append(PageResult(Outcome.FULL, 0, "no room before the deadline"))
                missing, rest = missing - 1, Outcome.PARENT_MISSING
            job.results.extend(itertools.repeat(PageResult(rest), missing))
        counters.add_results(operation, job.results)
        if operation is Operation.STORE:
            self._ready += self._order.record(job)
        result = JobResult(tuple(job.results), job.queue_s, job.io_s, job.check_s)
        self._notices.append(partial(job.done, result))

    def _resolve(self) -> None:
        """Admit or end the stores that waited for jobs just reported (a list, not a recursion)."""
        while self._ready:
            job = self._ready.pop()
            if self._closing:
                self._report(job, Outcome.CANCELLED)
                self._retire(job)
            elif not self._admit(job):
                self._report(job, Outcome.PARENT_MISSING)
                self._retire(job)

    def _retire(self, job: Job) -> None:
        """No thread touches the buffers of `job` any more."""
        if job.state is JobState.RUNNING:
            self._stop(job, JobState.ENDED, job.queued_at)
        else:
            self._queued_pages[job.operation] -= len(job.items) - job.next
            if job.state is JobState.QUEUED:
                self._queues[job.operation].remove(job)
            elif job.state is JobState.PARKED:
                self._parked.remove(job)
                if not self._parked:
                    self._unpark_at = math.inf
        job.state = JobState.ENDED
        job.items = ()
        self._live.discard(job)
        if job.released is not None:
            self._notices.append(job.released)
        if job.operation is Operation.STORE:
            self._stores -= 1
            if self._stores == 0:
                self._order.forget()
        if len(self._alarms) > 64 and len(self._alarms) > 4 * len(self._live):
            self._alarms = [alarm for alarm in self._alarms if not alarm[2].reported]
            heapq.heapify(self._alarms)

    def check_integrity(self) -> None:
        """Assert what must hold between any two transitions."""
        states: dict[JobState, int] = dict.fromkeys(JobState, 0)
        pages = dict.fromkeys(Operation, 0)
        for job in self._live:
            states[job.state] += 1
            if job.state is not JobState.RUNNING:
                pages[job.operation] += len(job.items) - job.next
            assert job.reported is False or job.state is JobState.RUNNING
            assert (job.waits > 0) == (job.state is JobState.WAITING)
        assert states[JobState.ENDED] == 0
        assert states[JobState.RUNNING] == self.running
        assert states[JobState.PARKED] == len(self._parked)
        assert states[JobState.QUEUED] == sum(len(q) for q in self._queues.values())
        assert all(j.state is JobState.QUEUED for q in self._queues.values() for j in q)
        assert pages == self._queued_pages
        assert 0 <= self._mutating <= self._mutators
        assert self._mutating <= self.running
        assert self._stores == sum(j.operation is Operation.STORE for j in self._live)
        assert not self._ready
        assert self._live or not self._parked
        self._order.check_integrity(self._live)
        waiting = [j for j in self._live if j.deadline < math.inf and not j.reported]
        assert {id(j) for j in waiting} <= {id(alarm[2]) for alarm in self._alarms}
