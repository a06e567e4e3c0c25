"""What a storage worker counts. Guarded by the worker's lock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from kvstrata.backends.base import PageResult
from kvstrata.backends.jobs import Chunk, Job, Operation
from kvstrata.boundary import Outcome

_T = TypeVar("_T")
_MOVED = (Outcome.LOADED, Outcome.STORED)


class Counters:
    """Sums that only grow."""

    def __init__(self) -> None:
        self.pages: dict[Operation, dict[Outcome, int]] = {op: {} for op in Operation}
        self.jobs = dict.fromkeys(Operation, 0)
        self.calls = dict.fromkeys(Operation, 0)
        self.bytes_moved = dict.fromkeys(Operation, 0)
        self.queue_s = dict.fromkeys(Operation, 0.0)
        self.io_s = dict.fromkeys(Operation, 0.0)
        self.check_s = dict.fromkeys(Operation, 0.0)
        self.copy_s = dict.fromkeys(Operation, 0.0)
        self.retries = dict.fromkeys(Operation, 0)
        self.late_pages = 0
        self.corrupt_deleted = 0
        self.callback_errors = 0
        self.kills = 0

    def snapshot(self) -> dict[str, Any]:
        """The fields of `WorkerStats` that are counted here."""
        return {
            "pages": {op.value: dict(counts) for op, counts in self.pages.items()},
            "jobs": _by_name(self.jobs),
            "calls": _by_name(self.calls),
            "bytes_moved": _by_name(self.bytes_moved),
            "queue_s": _by_name(self.queue_s),
            "io_s": _by_name(self.io_s),
            "check_s": _by_name(self.check_s),
            "copy_s": _by_name(self.copy_s),
            "retries": _by_name(self.retries),
            "late_pages": self.late_pages,
            "corrupt_deleted": self.corrupt_deleted,
            "callback_errors": self.callback_errors,
            "kills": self.kills,
        }

    def add_call(self, operation: Operation, chunk: Chunk) -> None:
        self.calls[operation] += 1
        self.io_s[operation] += chunk.io_s
        self.check_s[operation] += chunk.check_s
        self.copy_s[operation] += chunk.copy_s
        self.corrupt_deleted += chunk.corrupt_deleted

    def add_job(self, job: Job) -> None:
        self.jobs[job.operation] += 1
        self.queue_s[job.operation] += job.queue_s

    def add_outcome(self, operation: Operation, outcome: Outcome, pages: int) -> None:
        if pages:
            counts = self.pages[operation]
            counts[outcome] = counts.get(outcome, 0) + pages

    def add_results(self, operation: Operation, results: Sequence[PageResult]) -> None:
        """Count page results; equal neighbours (nearly all) cost one dict access."""
        if not results:
            return
        moved, run, last = 0, 0, results[0].outcome
        for result in results:
            if result.outcome is not last:
                self.add_outcome(operation, last, run)
                run, last = 0, result.outcome
            run += 1
            if last in _MOVED:
                moved += result.nbytes
        self.add_outcome(operation, last, run)
        self.bytes_moved[operation] += moved


def _by_name(values: dict[Operation, _T]) -> dict[str, _T]:
    return {operation.value: value for operation, value in values.items()}
