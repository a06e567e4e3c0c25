"""Errors as outcomes: under which label a failed page is counted."""

from __future__ import annotations

from kvstrata.backends.base import PageResult
from kvstrata.boundary import Outcome
from kvstrata.errors import StorageError

_BY_CAUSE = {
    "timeout": Outcome.TIMEOUT,
    "unavailable": Outcome.UNAVAILABLE,
    "retryable": Outcome.UNAVAILABLE,
    "busy": Outcome.OVERLOADED,
    "full": Outcome.FULL,
    "access": Outcome.ACCESS,
    "corrupt": Outcome.CORRUPT,
}
"""By `StorageError.cause`. Any other is an ERROR."""


def outcome_of(error: BaseException) -> Outcome:
    """The label of `error`; `ERROR` for what is not a `StorageError`."""
    return (
        _BY_CAUSE.get(error.cause, Outcome.ERROR)
        if isinstance(error, StorageError)
        else Outcome.ERROR
    )


def failure(error: BaseException) -> PageResult:
    """The result of a page that failed with `error`."""
    text = str(error)
    message = text if isinstance(error, StorageError) else f"{type(error).__name__}: {text}"
    return PageResult(outcome_of(error), 0, message)
