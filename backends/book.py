"""The jobs of a storage worker: the state of each, and how it ends.

Guarded by the worker's lock; the rules of who runs when are in `schedule`.
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
from kvstrata.backends.jobs import Job, JobResult, JobState, Operation, WorkerSettings
from kvstrata.boundary import Outcome

Notice = Callable[[], None]
MUTATIONS = (Operation.STORE, Operation.DROP)


class JobBook:
    """All jobs that were submitted and are not retired."""

    def __init__(self, settings: WorkerSettings, mutators: int) -> None:
        self.settings = settings
        self.counters = Counters()
        self._mutators = mutators
        self._mutating = 0
        self._queues: dict[Operation, deque[Job]] = {op: deque() for op in Operation}
        """In the order of their urgency."""
        self._queued_pages = dict.fromkeys(Operation, 0)
        self._parked: list[Job] = []
        self._unpark_at = math.inf
        self._live: set[Job] = set()
        self._running: set[Job] = set()
        """Of `_live`: what is in the backend, a job a thread."""
        self._stores = 0
        self._probes = 0
        """Of `_live`; nobody waits for them."""
        self._order = StoreOrder()
        self._alarms: list[tuple[float, int, Job]] = []
        self._numbers = itertools.count()
        self._ready: list[Job] = []
        """Stores that wait for nothing any more and are not admitted yet."""
        self._notices: list[Notice] = []
        self._closing = False

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def idle(self) -> bool:
        return len(self._live) == self._probes

    @property
    def waiting_for_room(self) -> int:
        return len(self._parked)

    @property
    def queued_pages(self) -> dict[str, int]:
        return {op.value: pages for op, pages in self._queued_pages.items()}

    @property
    def has_notices(self) -> bool:
        return bool(self._notices)

    def overdue(self) -> int:
        """Jobs whose call of the backend is running past their deadline."""
        return sum(job.reported for job in self._running)

    def take_notices(self) -> list[Notice]:
        notices, self._notices = self._notices, []
        return notices

    def unpark(self, most: int | None = None) -> None:
        """There may be room: parked stores, or the first of them, are the first in the queue."""
        let_go, self._parked = self._parked[:most], self._parked[len(self._parked[:most]) :]
        for job in reversed(let_go):
            job.state = JobState.QUEUED
            self._queues[Operation.STORE].appendleft(job)
        if not self._parked:
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

    # ── for the schedule ─────────────────────────────────────────────────────────────────────────

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
        self._running.add(job)
        self._mutating += job.operation in MUTATIONS

    def _stop(self, job: Job, state: JobState, now: float) -> None:
        job.state = state
        job.queued_at = now
        self._running.discard(job)
        self._mutating -= job.operation in MUTATIONS

    def _end(self, job: Job, rest: Outcome | None) -> None:
        """Report `job`, `rest` being the outcome of what was not handled, and retire it."""
        self._settle(job, rest)
        self._resolve()

    def _settle(self, job: Job, rest: Outcome | None) -> None:
        """`_end` of one job. `released` comes before `done`: who hears of the end of a job whose
        buffers are still out knows that it was given up in the backend."""
        first = len(self._notices)
        self._report(job, rest)
        self._retire(job)
        self._notices[first:] = reversed(self._notices[first:])

    def _report(self, job: Job, rest: Outcome | None) -> None:
        operation, counters = job.operation, self.counters
        job.reported = True
        if job.is_probe:
            return
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
        result = JobResult(tuple(job.results), job.queue_s, job.io_s, job.check_s, job.copy_s)
        self._notices.append(partial(job.done, result))

    def _resolve(self) -> None:
        """Admit or end the stores that waited for jobs just reported (a list, not a recursion)."""
        while self._ready:
            job = self._ready.pop()
            if self._closing:
                self._settle(job, Outcome.CANCELLED)
            elif not self._admit(job):
                self._settle(job, Outcome.PARENT_MISSING)

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
        if job.is_probe:
            self._probes -= 1
        if job.released is not None:
            self._notices.append(job.released)
        if job.operation is Operation.STORE:
            self._stores -= 1
            if self._stores == 0:
                self._order.forget()
        if len(self._alarms) > 64 and len(self._alarms) > 4 * len(self._live):
            self._alarms = [a for a in self._alarms if a[2].state is not JobState.ENDED]
            heapq.heapify(self._alarms)

    def _alarm(self, at: float, job: Job) -> None:
        """`expire` looks at `job` then."""
        heapq.heappush(self._alarms, (at, next(self._numbers), job))

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
        assert states[JobState.RUNNING] == len(self._running)
        assert self._running <= self._live
        assert states[JobState.PARKED] == len(self._parked)
        assert states[JobState.QUEUED] == sum(len(q) for q in self._queues.values())
        assert all(j.state is JobState.QUEUED for q in self._queues.values() for j in q)
        assert pages == self._queued_pages
        assert 0 <= self._mutating <= self._mutators
        assert self._mutating <= self.running
        assert self._stores == sum(j.operation is Operation.STORE for j in self._live)
        assert not self._ready
        assert self._live or not self._parked
        assert bool(self._parked) == (self._unpark_at < math.inf)
        self._order.check_integrity(self._live)
        waiting = [j for j in self._live if j.deadline < math.inf and not j.reported]
        assert {id(j) for j in waiting} <= {id(alarm[2]) for alarm in self._alarms}
