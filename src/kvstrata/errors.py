"""Every error that kvstrata raises, in one tree.

    KvstrataError
    ├── ConfigError          a setting is unknown, malformed or impossible (exit code 2)
    ├── InputError           a file or argument a person gave is wrong (exit code 2)
    ├── PluginError          a backend plugin cannot be found, imported or used (exit code 2)
    ├── CapacityError        a reservation does not fit; nothing was taken
    ├── PlanError            a plan contradicts itself or the contract; nothing took effect
    ├── StaleHandleError     a handle or extent is not the runtime's any more
    ├── ClosedError          the object was closed
    ├── IntegrityError       an invariant does not hold: a bug in kvstrata, never a user's fault
    └── StorageError         one storage operation failed; the page is a miss
        ├── RetryableStorageError
        │   ├── StorageUnavailableError   the store cannot be reached now
        │   ├── StorageTimeoutError       the deadline passed
        │   └── StorageBusyError          the store refuses work for now
        └── PermanentStorageError
            ├── StorageFullError          no room, and eviction cannot make any
            ├── StorageAccessError        permission, read-only file system, wrong owner
            └── CorruptFrameError         bytes are there and are not what was stored

Foreign exceptions are translated at one place a backend, most specific first, `from exc`.
Only `StorageError` is ever a normal event: it costs a recompute and is counted by its `cause`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar


class KvstrataError(Exception):
    """Base of all errors of this package."""


@dataclass(frozen=True)
class Where:
    """The place in a user's file that an error is about; `line` counts from 1."""

    file: Path | None = None
    line: int | None = None
    key: str | None = None

    def __str__(self) -> str:
        place = str(self.file) if self.file else ""
        if self.line is not None:
            place += f":{self.line}"
        if self.key:
            place = f"{place}: {self.key}" if place else self.key
        return place


class UserError(KvstrataError):
    """What a person can mend: says what is wrong, where, and what to do about it."""

    def __init__(self, message: str, *, remedy: str, where: Where | None = None) -> None:
        self.message = message
        self.remedy = remedy
        self.where = where or Where()
        place = str(self.where)
        super().__init__(f"{place + ': ' if place else ''}{message} ({remedy})")


class ConfigError(UserError):
    """A setting is unknown, malformed or impossible. Raised before anything is allocated."""


class InputError(UserError):
    """A file or argument is not what it should be."""


class PluginError(UserError):
    """A plugin cannot be used; the message names the plugin and its distribution."""


class CapacityError(KvstrataError):
    """A reservation of `need` pages (or rows, positions) does not fit. Nothing was taken.

    `freeing` pages become free by themselves (transfers that are under way); when `free + freeing`
    does not suffice either, only freeing extents or finishing requests can help.
    """

    def __init__(self, pool: str, *, need: int, free: int, freeing: int) -> None:
        self.pool, self.need, self.free, self.freeing = pool, need, free, freeing
        super().__init__(f"{pool}: {need} needed, {free} free, {freeing} being freed")


class PlanError(KvstrataError):
    """A plan contradicts itself or the contract of the boundary. Nothing took effect."""


class StaleHandleError(KvstrataError):
    """A handle or extent whose generation or page stamp is not the runtime's."""


class ClosedError(KvstrataError):
    """The object does not take work any more."""


class IntegrityError(KvstrataError):
    """An invariant is broken. Never caught: going on could serve wrong bytes."""


class StorageError(KvstrataError):
    """One storage operation failed. `cause` is the label it is counted under."""

    cause: ClassVar[str] = "error"


class RetryableStorageError(StorageError):
    """The same operation may succeed later."""

    cause = "retryable"


class StorageUnavailableError(RetryableStorageError):
    """The store cannot be reached now."""

    cause = "unavailable"


class StorageTimeoutError(RetryableStorageError):
    """The deadline passed."""

    cause = "timeout"


class StorageBusyError(RetryableStorageError):
    """The store refuses work for now."""

    cause = "busy"


class PermanentStorageError(StorageError):
    """The same operation will fail again."""

    cause = "permanent"


class StorageFullError(PermanentStorageError):
    """No room, and eviction cannot make any."""

    cause = "full"


class StorageAccessError(PermanentStorageError):
    """Permission denied, read-only file system or a wrong owner."""

    cause = "access"


class CorruptFrameError(PermanentStorageError):
    """Bytes are there and are not what was stored."""

    cause = "corrupt"
