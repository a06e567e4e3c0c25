"""The storage contract: what a backend plugin implements, and the values it is handed.

A backend stores opaque frames under an `ObjectId`. It sees no tensor, stream, device or tree; it
reads into and writes from lists of buffers that somebody else owns. One `StorageWorker` owns one
backend instance and calls it from its own threads (`kvstrata.backends.worker`).
"""

from __future__ import annotations

import enum
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import msgspec

from kvstrata.boundary import Outcome

API_VERSION = 2
"""Version of this contract. 2 adds `StorageBackend.isolation`, which a backend of version 1 takes
over from its base class."""

SUPPORTED_VERSIONS = (1, 2)
"""A plugin with another `api_version` is refused with a clear message."""

Buffer = memoryview
"""A writable (reads) or readable (writes) contiguous byte view, one dimension, format "B"."""


@dataclass(frozen=True, slots=True)
class ObjectId:
    """The name of one frame: 32 bytes of namespace fingerprint and 32 bytes of page key."""

    namespace: bytes
    key: bytes

    @property
    def name(self) -> str:
        """A safe name: `<64 hex digits>/<64 hex digits>`."""
        return f"{self.namespace.hex()}/{self.key.hex()}"


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """Store the concatenation of `buffers` as one frame, unless the object exists already."""

    object: ObjectId
    parent: ObjectId | None
    """The frame of the page before this one; None for the first page of a chain."""
    depth: int
    """Index of the page in its chain, from 0."""
    buffers: tuple[Buffer, ...]
    """Gather list. Lent until `write` returns; never written to."""

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self.buffers)


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Read one frame into `buffers`, filled one after the other."""

    object: ObjectId
    buffers: tuple[Buffer, ...]
    """Scatter list. Lent until `read` returns; its content is undefined after a failure."""

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self.buffers)


@dataclass(frozen=True, slots=True)
class PageResult:
    """What became of one page. `nbytes` were moved; `message` explains a failure."""

    outcome: Outcome
    nbytes: int = 0
    message: str = ""


@functools.lru_cache(maxsize=64)
def plain_result(outcome: Outcome, nbytes: int) -> PageResult:
    """A `PageResult` without a message, shared: nearly all pages end alike, and have few sizes."""
    return PageResult(outcome, nbytes)


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One frame as `scan` finds it."""

    object: ObjectId
    nbytes: int
    """What it costs in the unit of `Usage`."""
    last_used_s: float
    """Seconds since the epoch, as well as the backend knows."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Room taken and allowed. The unit is what frames cost where they lie (blocks of a disk)."""

    used_bytes: int
    limit_bytes: int | None
    """None: no limit of its own."""
    objects: int


class HealthState(enum.Enum):
    OK = "ok"
    DEGRADED = "degraded"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Health:
    state: HealthState
    message: str = ""


@dataclass(frozen=True, slots=True)
class HostRegion:
    """Host memory that lent buffers may lie in: what a backend registers with a device or a
    network card, or maps in a process of its own. Valid until the backend's `close` returns."""

    fd: int
    """A memfd: mapped shared it is the same memory, byte for byte. Not the backend's to close."""
    address: int
    """Where this process has mapped it; of use in this process only."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class BackendContext:
    """What `open` is told about its surroundings."""

    name: str
    """The name of the instance in the config file."""
    page_bytes: dict[str, int] = field(default_factory=dict)
    """Payload bytes of a page, by component. A frame has 4 KiB more."""
    on_evicted: Any = None
    """`Callable[[Sequence[ObjectId]], None]` or None: call it after frames were evicted. Any
    thread; it does not block."""
    regions: tuple[HostRegion, ...] = ()
    """Where the buffers of calls lie: staging memory and the worker's headers. A buffer may lie
    outside all the same (tests, tools), so a backend that needs them has a slower way too."""


class NoOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Options of a backend that has none."""


class Isolation(enum.Enum):
    """Where the instance of a backend lives."""

    THREAD = "thread"
    """In the server's process, on threads of its worker. Enough for what only waits or fails."""
    PROCESS = "process"
    """In a process of its own, which maps the same buffers: for what may hold the interpreter lock,
    crash, or leak."""


@runtime_checkable
class SupportsKill(Protocol):
    """A backend whose calls can be ended from outside."""

    def kill(self, why: str) -> None:
        """End all calls under way, at once; they raise `StorageUnavailableError`, when nothing
        touches their buffers any more. Any thread."""
        ...


class StorageBackend(ABC):
    """A place for frames.

    Life: the constructor gets the validated `Options` and does no I/O; `open` once; then any
    number of batched calls; `close` once. A backend never retries, times out or counts: the worker
    does.

    Threads: `read`, `write`, `exists`, `delete` are called from up to `concurrency` worker threads
    at once; `scan`, `usage`, `health` from any thread at any time between `open` and `close`. All
    may block. `close` is called once, when no other call is under way or the deadline has passed.

    Buffers: borrowed for the duration of the call, which must not return while anything may still
    touch them, even if it raises.

    Results: `read` and `write` return exactly one `PageResult` a request, in order. A failure of
    one page is its result; an exception means that all pages of the call failed. Raise errors from
    `kvstrata.errors` (translate foreign ones at one place); any other exception counts as `error`.

    Data before name: an object is visible to `exists`, `read` and `scan`, also after a crash and
    from another process, only when all its bytes are there. An existing object is never
    overwritten: `write` returns `Outcome.EXISTS`.
    """

    api_version: ClassVar[int] = API_VERSION
    isolation: ClassVar[Isolation] = Isolation.THREAD
    """Where instances live if the config file does not say. `PROCESS`: importing the module and
    constructing an instance, which happen in the server too, must still be harmless."""
    Options: ClassVar[type[msgspec.Struct]] = NoOptions
    """Schema of the plugin's table in the config file (frozen, `forbid_unknown_fields`). Its
    `__post_init__` may raise ValueError with a message and remedy for impossible values."""

    def __init__(self, options: msgspec.Struct) -> None:
        self.options = options

    @property
    def concurrency(self) -> int:
        """How many calls may run at once (threads the worker starts). Asked for before `open`."""
        return 2

    @property
    def max_batch(self) -> int:
        """Most pages in one call; the worker splits larger batches. Asked for before `open`."""
        return 64

    @abstractmethod
    def open(self, context: BackendContext) -> None:
        """Get ready. Fast: indexes are recovered behind the first calls. Raises `ConfigError` for
        a target that cannot work (unwritable directory), `StorageError` for one that is away."""

    @abstractmethod
    def close(self, deadline_s: float) -> None:
        """Release everything. Idempotent."""

    @abstractmethod
    def exists(self, objects: Sequence[ObjectId]) -> list[bool]:
        """A hint a object; may be stale at once."""

    @abstractmethod
    def read(self, requests: Sequence[ReadRequest]) -> list[PageResult]:
        """LOADED with the number of bytes filled (a short object is LOADED with fewer), MISSING,
        or a failure."""

    @abstractmethod
    def write(self, requests: Sequence[WriteRequest]) -> list[PageResult]:
        """STORED, EXISTS, FULL, PARENT_MISSING or a failure, a page. Requests come parents first.
        When a page of a chain is not stored, the pages after it in the same call must not be."""

    @abstractmethod
    def delete(self, objects: Sequence[ObjectId]) -> list[bool]:
        """True where an object was there and is gone now."""

    @abstractmethod
    def scan(self, namespace: bytes | None = None) -> Iterator[StoredObject]:
        """All objects (of one namespace), in no order; those written meanwhile may be missing."""

    @abstractmethod
    def usage(self) -> Usage:
        """Room taken now, work in flight included."""

    def health(self) -> Health:
        """The backend's own opinion. The worker adds what it measures; for people and tools, no
        decision rests on it."""
        return Health(HealthState.OK)
