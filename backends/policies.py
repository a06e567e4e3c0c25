"""What a worker does about a backend that fails: ask again, ask no more, ask less."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from tenacity import RetryCallState, Retrying
from tenacity.wait import wait_exponential, wait_random

from kvstrata.boundary import Outcome
from kvstrata.units import parse_size

_Delay = Annotated[float, msgspec.Meta(gt=0, le=3600)]
_Rate = Annotated[float, msgspec.Meta(ge=0)]

RETRYABLE = frozenset((Outcome.UNAVAILABLE, Outcome.OVERLOADED, Outcome.TIMEOUT))
"""Outcomes of `RetryableStorageError`s: the same call may succeed later."""


class RetrySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[backends.NAME.retry]`: calls that failed for a reason that may pass are made again."""

    attempts: Annotated[int, msgspec.Meta(ge=1, le=100)] = 3
    """Calls in all for the same pages of a job; 1: none is made again."""
    first_delay_s: _Delay = 0.05
    """Before the second call; twice as long before each further one, with jitter on top."""
    max_delay_s: _Delay = 2.0


class BreakerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[backends.NAME.breaker]`: a backend that keeps failing is left alone for a while."""

    failures: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 5
    """So many calls in a row, of loads and lookups or of stores and drops, open it; 0: never."""
    cooldown_s: _Delay = 1.0
    """How long everything is refused at once, before a trial."""
    probe_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.5
    """How often the backend is asked for a page that it does not have, if nothing else shows
    whether it answers; 0: never."""
    probe_deadline_s: _Delay = 1.0


class RateSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[backends.NAME.rate]`: bounds of what is asked of the backend; loads go first."""

    bytes_per_s: _Rate = 0.0
    """Payload of loads and stores together; 0: no bound."""
    ops_per_s: _Rate = 0.0
    """Pages of all operations together; 0: no bound."""


class ProcessSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[backends.NAME.process]`: the process of its own, with isolation "process"."""

    open_deadline_s: _Delay = 30.0
    """Import, start and `open` of the backend in its process."""
    restart_delay_s: _Delay = 0.1
    """Before the first restart; twice as long before each further one."""
    restart_delay_max_s: _Delay = 10.0
    memory_bytes: int | str = 0
    """A process that holds more memory of its own is restarted; a number or text like "2GiB"; 0: no
    bound."""
    kill_after_s: _Delay = 5.0
    """It is killed when a call runs so long past its deadline."""

    def __post_init__(self) -> None:
        parse_size(self.memory_bytes)


class Retry:
    """When a job that failed is tried again."""

    def __init__(self, settings: RetrySettings) -> None:
        self._attempts = settings.attempts
        self._wait = wait_exponential(
            multiplier=settings.first_delay_s, max=settings.max_delay_s
        ) + wait_random(0, settings.first_delay_s)

    def next_at(self, attempt: int, now: float, deadline: float) -> float | None:
        """After call number `attempt`, from 1. None: it is not, for it had its calls, or its
        deadline would pass meanwhile."""
        if attempt >= self._attempts:
            return None
        state = RetryCallState(_NO_RETRYING, fn=None, args=(), kwargs={})
        state.attempt_number = attempt
        at = now + self._wait(state)
        return at if at < deadline else None


_NO_RETRYING = Retrying()
"""Only the schedule of delays is tenacity's: a worker waits in its queue, not on a thread."""


_BUCKET_S = 0.1


class Rate:
    """Two token buckets of a tenth of a second: enough that nobody who wakes up late loses a turn,
    too little for a burst. What was let through may leave them in debt, so that a page larger than
    a bucket passes too."""

    def __init__(self, settings: RateSettings) -> None:
        self._rates = (settings.bytes_per_s, settings.ops_per_s)
        self._tokens = [_BUCKET_S * rate for rate in self._rates]
        self._at = -math.inf
        self.is_bounded = any(self._rates)
        self.free_at = -math.inf
        """Nothing more before this time."""

    def charge(self, nbytes: int, ops: int, now: float) -> None:
        passed, self._at = now - self._at, now
        for i, (rate, cost) in enumerate(zip(self._rates, (nbytes, ops), strict=True)):
            if rate:
                self._tokens[i] = min(_BUCKET_S * rate, self._tokens[i] + passed * rate) - cost
                if self._tokens[i] < 0:
                    self.free_at = max(self.free_at, now - self._tokens[i] / rate)

    def duration_s(self, nbytes: int, ops: int) -> float:
        """How long so much takes, if nothing else is asked."""
        pairs = zip(self._rates, (nbytes, ops), strict=True)
        return max((cost / rate for rate, cost in pairs if rate), default=0.0)
