"""Errors as outcomes: under which label a failed page is counted."""

from __future__ import annotations

from kvstrata.backends.base import PageResult
from kvstrata.boundary import Outcome
from kvstrata.errors import (
    CorruptFrameError,
    StorageAccessError,
    StorageBusyError,
    StorageError,
    StorageFullError,
    StorageTimeoutError,
    StorageUnavailableError,
)

_OUTCOMES: tuple[tuple[type[StorageError], Outcome], ...] = (
    (StorageTimeoutError, Outcome.TIMEOUT),
    (StorageUnavailableError, Outcome.UNAVAILABLE),
    (StorageBusyError, Outcome.OVERLOADED),
    (StorageFullError, Outcome.FULL),
    (StorageAccessError, Outcome.ACCESS),
    (CorruptFrameError, Outcome.CORRUPT),
)


def outcome_of(error: BaseException) -> Outcome:
    """The label of `error`; `ERROR` for what is not a `StorageError`."""
    for kind, outcome in _OUTCOMES:
        if isinstance(error, kind):
            return outcome
    return Outcome.ERROR


def failure(error: BaseException) -> PageResult:
    """The result of a page that failed with `error`."""
    text = str(error)
    message = text if isinstance(error, StorageError) else f"{type(error).__name__}: {text}"
    return PageResult(outcome_of(error), 0, message)
