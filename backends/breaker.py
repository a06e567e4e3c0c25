"""Whether a backend is asked at all, and what is known of its health.

Guarded by the worker's lock, like everything in a `Schedule`.
"""

from __future__ import annotations

import enum

from kvstrata.backends.base import Health, HealthState
from kvstrata.backends.jobs import Chunk, Operation
from kvstrata.backends.policies import RETRYABLE, BreakerSettings
from kvstrata.boundary import Outcome

_UNWELL = (Outcome.ERROR, Outcome.ACCESS, *RETRYABLE)
_NOT_DONE = (*_UNWELL, Outcome.PARENT_MISSING)
_DEGRADED = 3
"""So many calls in a row without a page that succeeded are a degraded backend."""
_READS = (Operation.LOOKUP, Operation.LOAD)


class State(enum.Enum):
    CLOSED = "closed"
    """All is let through."""
    OPEN = "open"
    """Nothing is."""
    HALF_OPEN = "half open"
    """One call at a time is: a trial."""


class Breaker:
    """Of loads and lookups, or of stores and drops.

    CLOSED ──failures in a row──▶ OPEN ──cool-down, then a probe is answered──▶ HALF_OPEN
      ▲                            ▲──────────────── a trial fails ────────────────┤
      └── a trial succeeds; or, if the backend was only away, another probe does ──┘
    """

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self.state = State.CLOSED
        self.failures = 0
        """Calls since the last one that the backend was well in."""
        self.why = ""
        self.opened = 0
        """How often it opened."""
        self._away = False
        """The last failure was of a kind that a probe would have met too."""
        self._by: Operation | None = None
        """What failed last: that it is found does not show that it can be read."""
        self._opened_at = 0.0

    def succeeded(self, operation: Operation | None = None) -> None:
        if operation in (None, Operation.LOAD, Operation.STORE, self._by):
            self.state, self.failures, self.why = State.CLOSED, 0, ""

    def failed(self, operation: Operation, outcome: Outcome, why: str, now: float) -> bool:
        """Whether it has opened."""
        self.failures += 1
        self._by = operation
        self.why, self._away = why or outcome.value, outcome in RETRYABLE
        limit = self._settings.failures
        if self.state is State.HALF_OPEN or (limit and self.failures >= limit):
            return self.open(self.why, now)
        return False

    def open(self, why: str, now: float) -> bool:
        """Whether it was not open."""
        if not self._settings.failures:
            return False
        self.why = self.why or why
        was, self.state = self.state, State.OPEN
        self._opened_at = now
        self.opened += was is State.CLOSED
        return was is not State.OPEN

    def probed(self, now: float) -> None:
        """A probe was answered."""
        if self.state is State.OPEN:
            if now >= self._opened_at + self._settings.cooldown_s:
                self.state = State.HALF_OPEN
        elif self._away:
            self.succeeded()


class Condition:
    """What the worker knows of its backend: two breakers and the last probe."""

    def __init__(self, settings: BreakerSettings, now: float) -> None:
        self.settings = settings
        self.reads, self.writes = Breaker(settings), Breaker(settings)
        self.well_at = now
        """When a call last returned that the backend was well in."""
        self.probe_at = now
        """When the last probe was sent."""
        self.probes = 0
        self.probing = False
        """A probe is on its way, or stuck."""
        self.probe_failure = ""

    def of(self, operation: Operation) -> Breaker:
        return self.reads if operation in _READS else self.writes

    def note_call(self, operation: Operation, chunk: Chunk, now: float) -> bool:
        """Whether the backend was well: a page that is missing or does not fit is no failure.
        Returns whether a breaker has opened."""
        results = chunk.results
        first = results[0].outcome if results else chunk.failure
        if first not in _UNWELL or any(r.outcome not in _NOT_DONE for r in results):
            self.well_at, self.probe_failure = now, ""
            self.of(operation).succeeded(operation)
            return False
        message = results[0].message if results else ""
        return self.of(operation).failed(operation, first, message, now)

    def sent_probe(self, now: float) -> None:
        self.probe_at, self.probing = now, True
        self.probes += 1

    def note_probe(self, chunk: Chunk, now: float, *, writes_stuck: bool) -> bool:
        """As `note_call`, for a probe."""
        if chunk.failure is None:
            self.well_at, self.probe_failure = now, ""
            self.reads.probed(now)
            if not writes_stuck:
                self.writes.probed(now)
            return False
        why = chunk.results[0].message if chunk.results else chunk.failure.value
        self.probe_failure = f"a probe failed: {why}"
        return self.reads.failed(Operation.LOOKUP, chunk.failure, self.probe_failure, now)

    def note_probe_late(self, now: float, *, was_sent: bool) -> bool:
        """As `note_call`: a probe is not answered. One that found no free thread is no failure of
        the backend, which may only be slow; whether it hangs, the calls under way will show."""
        limit_s = self.settings.probe_deadline_s
        if not was_sent:
            self.probe_failure = f"all threads are busy for {limit_s} s"
            return False
        self.probe_failure = f"a probe is not answered within {limit_s} s"
        return self.reads.failed(Operation.LOOKUP, Outcome.TIMEOUT, self.probe_failure, now)

    def next_probe(self) -> float:
        """When to ask, if nothing else is heard before; infinite while a probe is on its way."""
        if not self.settings.probe_s or self.probing:
            return float("inf")
        heard = max(self.well_at, self.probe_at) if self._is_clear() else self.probe_at
        return heard + self.settings.probe_s

    def health(self, overdue: int, abandoned: int) -> Health:
        reads, writes = self.reads, self.writes
        if abandoned:
            return Health(HealthState.OPEN, f"{abandoned} threads are stuck in the backend")
        if reads.state is State.OPEN:
            return Health(HealthState.OPEN, f"nothing is asked of it for now: {reads.why}")
        if writes.state is State.OPEN:
            return Health(HealthState.DEGRADED, f"stores are refused for now: {writes.why}")
        if overdue:
            return Health(HealthState.DEGRADED, f"{overdue} calls run past their deadline")
        if self.probe_failure:
            return Health(HealthState.DEGRADED, self.probe_failure)
        for breaker in (reads, writes):
            if breaker.state is State.HALF_OPEN:
                return Health(HealthState.DEGRADED, f"the next call is a trial, for: {breaker.why}")
            if breaker.failures >= _DEGRADED:
                why = f"the last {breaker.failures} calls failed: {breaker.why}"
                return Health(HealthState.DEGRADED, why)
        return Health(HealthState.OK)

    def _is_clear(self) -> bool:
        return not (self.probe_failure or self.reads.failures or self.writes.failures)
