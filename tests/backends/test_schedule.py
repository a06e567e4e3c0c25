"""The schedule of a worker, without threads: any order of events keeps its promises."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.backends import JobResult, ObjectId, PageIO, PageResult, WorkerSettings
from kvstrata.backends.jobs import Chunk, Job, Operation
from kvstrata.backends.policies import BreakerSettings, RateSettings, RetrySettings
from kvstrata.backends.schedule import PROBE, Schedule
from kvstrata.boundary import Outcome

BATCH = 3
MUTATORS = 2
THREADS = 3
PAYLOAD = memoryview(bytes(8))
STORED, FULL, ERROR, AWAY = Outcome.STORED, Outcome.FULL, Outcome.ERROR, Outcome.UNAVAILABLE
SETTINGS = [
    WorkerSettings(
        queue_pages=12,
        full_poll_s=5.0,
        retry=RetrySettings(attempts=3, first_delay_s=1.0),
        breaker=BreakerSettings(failures=4, cooldown_s=2.0, probe_s=3.0),
        rate=RateSettings(ops_per_s=ops_per_s),
        kill_after_s=2.0,
    )
    for ops_per_s in (0, 4)
]


def name(chain: int, depth: int) -> ObjectId:
    return ObjectId(b"n" * 32, bytes([chain, depth]) * 16)


def page(chain: int, depth: int) -> PageIO:
    parent = name(chain, depth - 1) if depth else None
    return PageIO(name(chain, depth), parent, depth, PAYLOAD)


@dataclass
class Seen:
    """One job as its caller sees it."""

    operation: Operation
    items: list[Any]
    deadline: float
    results: list[Any] = field(default_factory=list)
    releases: int = 0


class ScheduleMachine(RuleBasedStateMachine):
    """A store never overtakes one that it builds on; each job ends once; bounds hold."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.schedule = Schedule(SETTINGS[0], THREADS, BATCH, self.now, can_kill=True)
        self.seen: list[Seen] = []
        self.running: list[tuple[Job, Seen]] = []
        self.by_job: dict[int, tuple[Job, Seen]] = {}
        self.stored: set[ObjectId] = set()
        self.closing = False

    @initialize(which=st.integers(0, 1))
    def settle(self, which: int) -> None:
        self.schedule = Schedule(SETTINGS[which], THREADS, BATCH, self.now, can_kill=True)

    # ── what callers do ──────────────────────────────────────────────────────────────────────────

    @rule(
        operation=st.sampled_from(Operation),
        chain=st.integers(0, 2),
        start=st.integers(0, 6),
        count=st.integers(0, 7),
        deadline_s=st.sampled_from([0.0, 1.0, 4.0, 20.0, float("inf")]),
    )
    def submit(
        self, operation: Operation, chain: int, start: int, count: int, deadline_s: float
    ) -> None:
        pages = [page(chain, start + i) for i in range(count)]
        is_io = operation in (Operation.LOAD, Operation.STORE)
        items = pages if is_io else [p.object for p in pages]
        seen = Seen(operation, items, self.now + deadline_s)
        self.seen.append(seen)
        released = partial(self.release, seen) if is_io else None
        job = Job(operation, tuple(items), seen.deadline, partial(self.end, seen), released)
        self.by_job[id(job)] = (job, seen)
        self.schedule.submit(job, self.now)
        self.deliver()
        if operation is Operation.STORE and seen.results:
            outcomes = {result.outcome for result in seen.results[0].pages}
            assert Outcome.OVERLOADED not in outcomes, "a store was skipped"

    def end(self, seen: Seen, result: Any) -> None:
        is_out = any(other is seen for _, other in self.running)
        if seen.operation in (Operation.LOAD, Operation.STORE):
            assert seen.releases == (not is_out), "done before its buffers are back"
        seen.results.append(result)

    @staticmethod
    def release(seen: Seen) -> None:
        seen.releases += 1

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.schedule.expire(self.now)
        self.deliver()
        assert self.schedule.next_wake() > self.now

    @rule()
    def room(self) -> None:
        self.schedule.unpark()

    # ── what threads do ──────────────────────────────────────────────────────────────────────────

    @precondition(lambda self: len(self.running) < THREADS)
    @rule()
    def take(self) -> None:
        runnable = self.schedule.runnable()
        job = self.schedule.take(self.now)
        if job is None:
            return
        assert runnable > 0
        _, seen = self.by_job.get(id(job), (job, Seen(job.operation, [PROBE], job.deadline)))
        assert job.is_probe or not seen.results, "an ended job runs"
        self.running.append((job, seen))
        mutating = [j for j, _ in self.running if j.operation in (Operation.STORE, Operation.DROP)]
        assert len(mutating) <= MUTATORS
        if job.operation is Operation.STORE:
            self.check_order(job)

    def check_order(self, job: Job) -> None:
        """No other running store has a page, or a parent of a page, of this one."""
        wanted = {p.object for p in job.items} | {p.parent for p in job.items}
        for other, seen in self.running:
            if other is not job and other.operation is Operation.STORE and not seen.results:
                assert not wanted & {p.object for p in other.items}

    @precondition(lambda self: self.running)
    @rule(
        which=st.integers(0, THREADS - 1),
        good=st.integers(0, BATCH),
        bad=st.sampled_from([FULL, ERROR, AWAY]),
        failure=st.sampled_from([None, None, ERROR, AWAY]),
    )
    def call_returns(self, which: int, good: int, bad: Outcome, failure: Outcome | None) -> None:
        job, seen = self.running.pop(which % len(self.running))
        items = seen.items[job.next : min(job.next + BATCH, job.limit)]
        chunk = Chunk((), items=len(items))
        if job.operation in (Operation.LOOKUP, Operation.DROP):
            chunk.count, chunk.failure = min(good, len(items)), failure
        else:
            outcome = STORED if job.operation is Operation.STORE else Outcome.LOADED
            done = [PageResult(outcome, 8)] * min(good, len(items))
            chunk.results = done + [PageResult(bad)] * (len(items) - len(done))
            if job.operation is Operation.STORE:
                for stored in items[: len(done)]:
                    self.stored.add(stored.object)
        self.schedule.progress(job, chunk, self.now)
        self.deliver()

    @precondition(lambda self: len(self.seen) > 10)
    @rule()
    def close(self) -> None:
        self.closing = True
        self.schedule.cancel_waiting()
        self.deliver()
        running = {id(seen) for _, seen in self.running}
        assert all(seen.results for seen in self.seen if id(seen) not in running)
        self.schedule.cancel_running()
        self.deliver()
        assert all(len(seen.results) == 1 for seen in self.seen)

    # ── always ───────────────────────────────────────────────────────────────────────────────────

    def deliver(self) -> None:
        for notice in self.schedule.take_notices():
            notice()

    @invariant()
    def promises(self) -> None:
        self.schedule.check_integrity()
        busy = {id(seen) for _, seen in self.running}
        for seen in self.seen:
            is_io = seen.operation in (Operation.LOAD, Operation.STORE)
            assert len(seen.results) <= 1
            assert seen.releases <= 1
            if seen.deadline <= self.now:
                assert seen.results, "a deadline passed without a result"
            if is_io and seen.results:
                assert seen.releases == (id(seen) not in busy), "released while it runs, or not"
                self.check_result(seen)
        waiting = [s for s in self.seen if not s.results]
        running = [job for job, _ in self.running if not job.is_probe]
        assert self.schedule.idle == (not waiting and not running)
        assert self.schedule.condition.health(0, 0).message or (
            self.schedule.condition.reads.failures < 3
        )

    def check_result(self, seen: Seen) -> None:
        result: JobResult = seen.results[0]
        outcomes = [p.outcome for p in result.pages]
        assert len(outcomes) == len(seen.items)
        if seen.operation is Operation.STORE:
            is_stored = [outcome.is_stored for outcome in outcomes]
            assert is_stored == sorted(is_stored, reverse=True), "a gap in a chain"


ScheduleMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=60, deadline=None
)
TestSchedule = ScheduleMachine.TestCase
