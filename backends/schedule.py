"""Which job of a storage worker runs next, and what becomes of it.

Pure bookkeeping: no thread, no clock, no backend. Every method is called with the worker's lock
held and takes the time as an argument; callbacks become notices, which the worker runs without
the lock.

    submit ──▶ QUEUED ──take──▶ RUNNING ──progress──▶ ENDED
                 ▲ ▲               │  ├─ no room ─▶ PARKED ─ room ─▶ QUEUED
                 │ └── next chunk ─┘  └─ failed ─▶ DELAYED ─ back-off ─▶ QUEUED
                 └── WAITING (a store, until an earlier job stored its parent or the same page)

A job is *reported* once (its `done`): when it ends, or at its deadline if it is running then. It
is *retired* once (its `released`): when no thread touches its buffers any more.
"""

from __future__ import annotations

import heapq
import math

from kvstrata.backends.base import ObjectId
from kvstrata.backends.book import MUTATIONS, JobBook
from kvstrata.backends.breaker import Condition, State
from kvstrata.backends.jobs import Chunk, Job, JobState, Operation, WorkerSettings, WorkerStats
from kvstrata.backends.policies import RETRYABLE, Rate, Retry
from kvstrata.boundary import KEY_BYTES, Outcome

PROBE = ObjectId(bytes(KEY_BYTES), b"kvstrata probe".ljust(KEY_BYTES, b"\0"))
"""What no backend has. (No digest is known that is zero.)"""
_LATE = "a call did not return before its deadline"
_FAIR_S = 1.0
"""A deadline may leave a call next to no time: that it needs so long is no sign of a fault."""
_FAIR_PACE = 3
"""Nor so many times what a store takes."""
_PACE = 0.2
"""Weight of the newest store in the measured pace."""


class Schedule(JobBook):
    """The rules: urgency, deadlines, retries, breakers, rates, and what is refused."""

    def __init__(
        self,
        settings: WorkerSettings,
        threads: int,
        max_batch: int,
        now: float,
        *,
        can_kill: bool = False,
    ) -> None:
        super().__init__(settings, max(1, threads - 1))
        self.condition = Condition(settings.breaker, now)
        self.draining = False
        """Nothing new is taken; what is there goes on."""
        self.kill_wanted = ""
        """Why the backend is to be killed."""
        self._threads, self._max_batch = threads, max_batch
        self._kill_after_s = settings.kill_after_s if can_kill else math.inf
        self._retry, self._rate = Retry(settings.retry), Rate(settings.rate)
        self._throttled = False
        self._delayed: list[tuple[float, int, Job]] = []
        self._store_page_s = 0.0
        self._store_page_bytes = 0

    @property
    def store_wait_s(self) -> float:
        """How long a store would wait that came now, at the measured pace and within the rate."""
        pages = self._queued_pages[Operation.STORE]
        bounded_s = self._rate.duration_s(pages * self._store_page_bytes, pages)
        return max(pages * self._store_page_s / self._mutators, bounded_s)

    def runnable(self) -> int:
        """How many queued jobs a free thread could take now."""
        if self._throttled:
            return self._queued_probe() is not None
        queues = self._queues
        mutations = len(queues[Operation.DROP]) + len(queues[Operation.STORE])
        room = self._mutators - self._mutating
        return len(queues[Operation.LOOKUP]) + len(queues[Operation.LOAD]) + min(mutations, room)

    def next_wake(self) -> float:
        """When `expire` has something to do."""
        alarm = self._alarms[0][0] if self._alarms else math.inf
        delayed = self._delayed[0][0] if self._delayed else math.inf
        probe = math.inf if self._closing else self.condition.next_probe()
        throttle = self._rate.free_at if self._throttled else math.inf
        return min(alarm, self._unpark_at, delayed, probe, throttle)

    def stats(self, abandoned_threads: int) -> WorkerStats:
        return WorkerStats(
            **self.counters.snapshot(),
            probes=self.condition.probes,
            breaker_opened=self.condition.reads.opened + self.condition.writes.opened,
            abandoned_threads=abandoned_threads,
            queued_pages_now=self.queued_pages,
            running_jobs_now=self.running,
            waiting_for_room_now=self.waiting_for_room,
            store_wait_s_now=self.store_wait_s,
        )

    def take_kill(self) -> str:
        """Why the backend is to be killed now; "" if it is not."""
        why, self.kill_wanted = self.kill_wanted, ""
        self.counters.kills += bool(why)
        return why

    # ── transitions ──────────────────────────────────────────────────────────────────────────────

    def submit(self, job: Job, now: float) -> None:
        """Queue `job`, or end it at once with the reason it cannot be queued."""
        pages, operation = len(job.items), job.operation
        job.queued_at = now
        self._live.add(job)
        if operation is Operation.STORE and pages:
            self._store_page_bytes = job.items[0].payload.nbytes
        is_crowded = self._is_crowded(operation, pages)
        self._queued_pages[operation] += pages
        self._stores += operation is Operation.STORE
        job.state = JobState.WAITING
        if self._closing or self.draining:
            # Not CANCELLED, which says nothing about the page: control would ask again at once.
            self._end(job, Outcome.UNAVAILABLE)
        elif pages == 0:
            self._end(job, None)
        elif job.deadline <= now:
            self._end(job, Outcome.TIMEOUT)
        elif self.condition.of(operation).state is State.OPEN:
            self._end(job, Outcome.UNAVAILABLE)
        elif is_crowded:
            self._end(job, Outcome.OVERLOADED)
        else:
            if job.deadline < math.inf:
                self._alarm(job.deadline, job)
            if operation is Operation.STORE:
                self._order.add(job)
            if job.waits == 0 and not self._admit(job):
                self._end(job, Outcome.PARENT_MISSING)

    def take(self, now: float) -> Job | None:
        """The most urgent job that may run; it is RUNNING and its caller owns it."""
        self._throttled = now < self._rate.free_at
        if self._throttled:
            probe = self._queued_probe()
            return None if probe is None else self._take(probe, now)
        for operation, queue in self._queues.items():
            if queue and self._may_run(operation, queue[0]):
                return self._take(queue[0], now)
        return None

    def progress(self, job: Job, chunk: Chunk, now: float) -> None:
        """The call that `job` was taken for has returned."""
        counters, operation = self.counters, job.operation
        if job.is_probe:
            self._progress_probe(job, chunk, now)
            return
        counters.add_call(operation, chunk)
        if chunk.corrupt_deleted:
            self.unpark()
        if not job.blamed and self.condition.note_call(operation, chunk, now):
            self._refuse_waiting(operation)
        if job.reported:
            counters.late_pages += chunk.items
            self._retire(job)
            return
        job.io_s += chunk.io_s
        job.check_s += chunk.check_s
        job.copy_s += chunk.copy_s
        if operation is Operation.STORE:
            self._progress_store(job, chunk, now)
        elif operation is Operation.LOAD:
            self._progress_load(job, chunk, now)
        elif chunk.failure is not None:
            if not self._try_again(job, chunk.failure, now):
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
        """Report every job whose deadline has passed; let go on what waited until now; probe."""
        while self._alarms and self._alarms[0][0] <= now:
            job = heapq.heappop(self._alarms)[2]
            if job.state is JobState.RUNNING:
                if not job.reported:
                    self._report(job, Outcome.TIMEOUT)
                    self._resolve()
                self._note_late(job, now)
            elif not job.reported:
                job.queue_s += now - job.queued_at
                self._end(job, Outcome.TIMEOUT)
                if job.is_probe:
                    self.condition.probing = False
                    self.condition.note_probe_late(now, was_sent=False)
        while self._delayed and self._delayed[0][0] <= now:
            job = heapq.heappop(self._delayed)[2]
            if job.state is JobState.DELAYED:
                job.state = JobState.QUEUED
                self._queues[job.operation].appendleft(job)
        if now >= self._unpark_at:
            self._unpark_at = now + self.settings.full_poll_s
            self.unpark(1)
        self._throttled = self._throttled and now < self._rate.free_at
        if now >= self.condition.next_probe() and not self._closing:
            self._send_probe(now)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _progress_load(self, job: Job, chunk: Chunk, now: float) -> None:
        results = chunk.results
        failed = next((i for i, r in enumerate(results) if r.outcome in RETRYABLE), None)
        if failed is not None:
            job.advance(failed)
            if self._try_again(job, results[failed].outcome, now):
                job.results.extend(results[:failed])
                return
            job.next -= failed
        job.results.extend(results)
        self._advance(job, chunk.items, now)

    def _progress_store(self, job: Job, chunk: Chunk, now: float) -> None:
        pace = (chunk.io_s + chunk.check_s + chunk.copy_s) / max(1, chunk.items)
        known = self._store_page_s
        self._store_page_s = known + _PACE * (pace - known) if known else pace
        stored = 0
        for result in chunk.results:
            if not result.outcome.is_stored:
                break
            stored += 1
        if stored:
            self.unpark(2)  # there is room for one: soon all know, or find that it was the last
        job.results.extend(chunk.results[:stored])
        if stored == len(chunk.results):
            self._advance(job, chunk.items, now)
            return
        job.advance(stored)
        first = chunk.results[stored]
        wait = first.outcome is Outcome.FULL and self.settings.on_full == "block"
        if wait and not self._closing:
            self._stop(job, JobState.PARKED, now)
            self._queued_pages[job.operation] += len(job.items) - job.next
            if not self._parked:
                self._unpark_at = now + self.settings.full_poll_s
            self._parked.append(job)
        elif not self._try_again(job, first.outcome, now):
            job.results.append(first)
            self._end(job, Outcome.PARENT_MISSING)

    def _advance(self, job: Job, items: int, now: float) -> None:
        """The next chunk of `job`, if there is one; more urgent jobs may come in between."""
        job.advance(items)
        if job.next >= job.limit:
            self._end(job, Outcome.PARENT_MISSING if job.limit < len(job.items) else None)
        elif self._closing:
            self._end(job, Outcome.CANCELLED)
        else:
            self._stop(job, JobState.QUEUED, now)
            self._queued_pages[job.operation] += len(job.items) - job.next
            self._queues[job.operation].appendleft(job)

    def _is_crowded(self, operation: Operation, pages: int) -> bool:
        """Whether so many more do not fit into the queue, or into the time that a store may wait.
        Stores that may wait always do: their buffers, which the caller has lent, bound them."""
        if operation is Operation.STORE:
            if self.settings.on_full == "block":
                return False
            if self.store_wait_s > self.settings.queue_s:
                return True
        queued = self._queued_pages[operation]
        return queued > 0 and queued + pages > self.settings.queue_pages

    def _may_run(self, operation: Operation, job: Job) -> bool:
        is_mutation = operation in MUTATIONS
        if is_mutation and self._mutating == self._mutators:
            return False
        if self.condition.of(operation).state is not State.HALF_OPEN or job.is_probe:
            return True
        return not any(  # one at a time is a trial; what is stuck since before is none
            (other.operation in MUTATIONS) == is_mutation
            for other in self._running
            if not (other.is_probe or other.blamed)
        )

    def _take(self, job: Job, now: float) -> Job:
        queue = self._queues[job.operation]
        if queue[0] is job:
            queue.popleft()
        else:
            queue.remove(job)
        self._queued_pages[job.operation] -= len(job.items) - job.next
        self._start(job)
        job.queue_s += now - job.queued_at
        job.started_at = now
        self._charge(job, now)
        return job

    def _queued_probe(self) -> Job | None:
        """No rate holds it back: a backend that is not asked would pass for one that hangs."""
        return next((job for job in self._queues[Operation.LOOKUP] if job.is_probe), None)

    def _charge(self, job: Job, now: float) -> None:
        if self._rate.is_bounded and not job.is_probe:
            items = job.next_items(self._max_batch)
            has_payload = job.operation in (Operation.LOAD, Operation.STORE)
            nbytes = sum(page.payload.nbytes for page in items) if has_payload else 0
            self._rate.charge(nbytes, len(items), now)

    def _try_again(self, job: Job, outcome: Outcome, now: float) -> bool:
        """Delay `job`, which failed with `outcome`, if it may be tried again. The call has
        returned, so its buffers are free to be used by the next one."""
        if outcome not in RETRYABLE or self._closing:
            return False
        if self.condition.of(job.operation).state is State.OPEN:
            return False
        at = self._retry.next_at(job.attempts + 1, now, job.deadline)
        if at is None:
            return False
        job.attempts += 1
        self.counters.retries[job.operation] += 1
        self._stop(job, JobState.DELAYED, now)
        self._queued_pages[job.operation] += len(job.items) - job.next
        heapq.heappush(self._delayed, (at, next(self._numbers), job))
        return True

    def _refuse_waiting(self, operation: Operation) -> None:
        """The breaker has opened: what waits is answered now."""
        breaker = self.condition.of(operation)
        for job in list(self._live):
            if job.is_probe or job.state in (JobState.RUNNING, JobState.ENDED):
                continue
            if self.condition.of(job.operation) is breaker:
                self._end(job, Outcome.UNAVAILABLE)

    def _note_late(self, job: Job, now: float) -> None:
        """A call runs past its deadline. One that was given little time is not held against the
        backend before it has run for `_fair_s`."""
        condition, operation = self.condition, job.operation
        due = max(job.deadline, job.started_at + self._fair_s(job))
        if now < due:
            self._alarm(due, job)
            return
        if job.blamed:
            self.kill_wanted = f"{_LATE}, nor {self._kill_after_s} s later"
            return
        job.blamed = True
        if self._kill_after_s < math.inf:
            self._alarm(due + self._kill_after_s, job)
        if job.is_probe:
            opened = condition.note_probe_late(now, was_sent=True)
        else:
            opened = condition.of(operation).failed(operation, Outcome.TIMEOUT, _LATE, now)
        if opened:
            self._refuse_waiting(operation)
        if sum(j.blamed for j in self._running) == self._threads and condition.reads.open(
            _LATE, now
        ):
            self._refuse_waiting(Operation.LOAD)
        if self._are_writes_stuck() and condition.writes.open(_LATE, now):
            self._refuse_waiting(Operation.STORE)

    def _fair_s(self, job: Job) -> float:
        """What a call may take that its deadline has left no time, on storage that is slow."""
        if job.operation is not Operation.STORE:
            return _FAIR_S
        pages = len(job.next_items(self._max_batch))
        return max(_FAIR_S, _FAIR_PACE * self._store_page_s * pages)

    def _are_writes_stuck(self) -> bool:
        late = sum(job.blamed and job.operation in MUTATIONS for job in self._running)
        return late == self._mutators

    def _send_probe(self, now: float) -> None:
        job = Job(
            Operation.LOOKUP, (PROBE,), now + self.settings.breaker.probe_deadline_s, _no, None
        )
        job.is_probe, job.queued_at = True, now
        self.condition.sent_probe(now)
        self._live.add(job)
        self._probes += 1
        self._queued_pages[job.operation] += 1
        self._alarm(job.deadline, job)
        self._queues[job.operation].appendleft(job)

    def _progress_probe(self, job: Job, chunk: Chunk, now: float) -> None:
        opened = self.condition.note_probe(chunk, now, writes_stuck=self._are_writes_stuck())
        job.reported, self.condition.probing = True, False
        self._retire(job)
        if opened:
            self._refuse_waiting(Operation.LOOKUP)


def _no(_: object) -> None:
    """Nobody waits for a probe."""
