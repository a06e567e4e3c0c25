"""The values a storage worker takes and gives, and its settings."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from kvstrata.backends.base import ObjectId, PageResult
from kvstrata.backends.policies import BreakerSettings, RateSettings, RetrySettings
from kvstrata.boundary import Outcome

CALL_BYTES = 32 << 20
"""Payload of one call of a backend, or one page. What a call has moved is compared when it returns:
while the next one moves, unless it was the last. And what is more urgent goes in between."""


class Operation(enum.Enum):
    """What a job does, the most urgent first."""

    LOOKUP = "lookup"
    LOAD = "load"
    DROP = "drop"
    STORE = "store"

    # Members are compared by identity and used as keys on every page: the default `__hash__` of
    # an enum runs in Python.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class PageIO:
    """One page of a load or a store."""

    object: ObjectId
    parent: ObjectId | None
    """The page before it in its chain; None at depth 0."""
    depth: int
    payload: memoryview
    """Exactly the bytes of the page, format "B". Lent until `released` was called."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """What became of a load or a store. The phases overlap with nothing and add up to its time."""

    pages: tuple[PageResult, ...]
    """One a page, in order; `nbytes` counts payload."""
    queue_s: float = 0.0
    """Waiting for a thread, for room, or for the store of a parent."""
    io_s: float = 0.0
    """In calls of the backend."""
    check_s: float = 0.0
    """Framing, checksums."""
    copy_s: float = 0.0
    """Copying payloads on their way to the backend's process or client."""


class WorkerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The worker's part of a backend's table in the config file."""

    on_full: Literal["block", "drop"] = "block"
    """A store that does not fit waits for room until its deadline, or is dropped at once: room in
    the backend and room in the queue. With "block", what bounds the stores that wait is their
    caller, who lends a buffer for each page until it has an answer."""
    queue_pages: int = 16384
    """Most pages that wait in each class (lookups, loads, drops, and with `on_full = "drop"`
    stores); more are answered with OVERLOADED."""
    full_poll_s: float = 0.05
    """How often a store that waits for room tries again, if the backend reports no eviction."""
    queue_s: float = 10.0
    """With `on_full = "drop"`, a store that would wait longer, at the pace of the last ones, is
    dropped: OVERLOADED."""
    retry: RetrySettings = RetrySettings()
    breaker: BreakerSettings = BreakerSettings()
    rate: RateSettings = RateSettings()
    open_deadline_s: float = 60.0
    """For the backend's `open`."""
    ask_deadline_s: float = 2.0
    """For `usage` and `health`, and for each step of `scan`."""
    kill_after_s: float = 5.0
    """A backend that can be killed (isolation "process") is, when a call runs so long past its
    deadline."""

    def __post_init__(self) -> None:
        if self.queue_pages < 1:
            raise ValueError(f"queue_pages is {self.queue_pages}: give at least 1")
        for key in ("full_poll_s", "queue_s", "open_deadline_s", "ask_deadline_s", "kill_after_s"):
            if not 0 < getattr(self, key) < math.inf:
                raise ValueError(f"{key} is {getattr(self, key)}: give seconds above 0")


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """A snapshot. All but the `…_now` fields only ever grow. Keys are `Operation.value`."""

    pages: dict[str, dict[Outcome, int]]
    """Pages by operation and outcome. Lookups count EXISTS and MISSING, drops the same: EXISTS
    was there and is deleted."""
    jobs: dict[str, int]
    """Jobs that were reported."""
    calls: dict[str, int]
    """Calls of the backend."""
    bytes_moved: dict[str, int]
    """Payload bytes of pages that were loaded or stored (not of those that existed)."""
    queue_s: dict[str, float]
    io_s: dict[str, float]
    check_s: dict[str, float]
    copy_s: dict[str, float]
    retries: dict[str, int]
    """Calls that were made again."""
    late_pages: int
    """Pages whose call came back after their deadline; the result was thrown away."""
    corrupt_deleted: int
    """Corrupt objects that were deleted, so that they can be stored anew."""
    callback_errors: int
    """Callbacks that raised (a bug of the caller; logged)."""
    probes: int
    """Times that the backend was asked for a page that it does not have."""
    breaker_opened: int
    kills: int
    """Times that the backend was killed because a call ran too long past its deadline."""
    abandoned_threads: int
    """Threads that were stuck in the backend when `close` ran out of time."""
    queued_pages_now: dict[str, int]
    running_jobs_now: int
    waiting_for_room_now: int
    """Stores that wait because the backend is full."""
    store_wait_s_now: float
    """How long a store would wait that came now, at the pace of the last ones."""


@dataclass(slots=True)
class Chunk:
    """What one call of the backend did to the items `job.next …` of a job."""

    results: Sequence[PageResult]
    """One an item for loads and stores; empty for lookups and drops."""
    count: int = 0
    """Lookups: leading objects found. Drops: objects deleted."""
    items: int = 0
    io_s: float = 0.0
    check_s: float = 0.0
    copy_s: float = 0.0
    corrupt_deleted: int = 0
    failure: Outcome | None = None
    """Lookups and drops: why the call failed."""


class JobState(enum.Enum):
    QUEUED = "queued"
    WAITING = "waiting"
    """A store whose parent, or the same page, is being stored by an earlier job."""
    PARKED = "parked"
    """A store that found the backend full."""
    DELAYED = "delayed"
    """Failed, and will be tried again."""
    RUNNING = "running"
    ENDED = "ended"


class Job:
    """One submitted job: the worker's own record. Every field is guarded by the worker's lock."""

    __slots__ = (
        "attempts",
        "blamed",
        "check_s",
        "copy_s",
        "count",
        "deadline",
        "dependents",
        "done",
        "io_s",
        "is_probe",
        "items",
        "limit",
        "next",
        "operation",
        "queue_s",
        "queued_at",
        "released",
        "reported",
        "results",
        "started_at",
        "state",
        "waits",
    )

    def __init__(
        self,
        operation: Operation,
        items: Sequence[Any],
        deadline: float,
        done: Callable[[Any], None],
        released: Callable[[], None] | None,
    ) -> None:
        self.operation = operation
        self.items = items
        """`PageIO` for loads and stores, `ObjectId` for lookups and drops."""
        self.deadline = deadline
        self.done = done
        self.released = released
        self.state = JobState.QUEUED
        self.reported = False
        self.next = 0
        """Items before this one have been handled."""
        self.limit = len(items)
        """Items from this one on are not tried: their parent was not stored."""
        self.results: list[PageResult] = []
        self.count = 0
        self.waits = 0
        self.dependents: list[Job] = []
        self.queue_s = self.io_s = self.check_s = self.copy_s = 0.0
        self.queued_at = 0.0
        self.attempts = 0
        """Calls that failed, one behind the other and with nothing done, and are made again."""
        self.started_at = 0.0
        """When its last call began."""
        self.blamed = False
        """Its call is held against the backend: it runs past the deadline, and has for long."""
        self.is_probe = False
        """A lookup of the worker's own; not counted with those of others."""

    def advance(self, items: int) -> None:
        """So many more have been handled: what is behind them may fail as often again."""
        self.next += items
        if items:
            self.attempts = 0

    def next_items(self, most: int) -> Sequence[Any]:
        """What its next call is about: at most `most` items, and CALL_BYTES of payload, where all
        pages are as large as the next one: they are of one component."""
        if self.operation in (Operation.LOAD, Operation.STORE):
            page_bytes = self.items[self.next].payload.nbytes
            most = max(1, min(most, CALL_BYTES // max(1, page_bytes)))
        return self.items[self.next : min(self.next + most, self.limit)]
