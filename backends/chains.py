"""The order of stores: no page is stored before its parent, none under a parent that failed.

Guarded by the worker's lock, like everything in a `Schedule`.
"""

from __future__ import annotations

from kvstrata.backends.jobs import Job, JobState

PageName = tuple[bytes, bytes]

MAX_FAILED = 65536
"""Most failed pages that are remembered; the oldest are forgotten first (the backend itself still
refuses a page whose parent it does not hold, if it cares)."""


class StoreOrder:
    """Which open store jobs wait for which, and which pages failed while stores were open."""

    def __init__(self) -> None:
        self._pending: dict[PageName, Job] = {}
        """The last job, not yet reported, that stores this page."""
        self._failed: dict[PageName, None] = {}
        """The oldest first."""

    def add(self, job: Job) -> None:
        """Make a new store wait for earlier jobs that store its pages or their parents."""
        pending, previous = self._pending, b""
        blockers: set[Job] = set()
        for page in job.items:
            parent, name = page.parent, (page.object.namespace, page.object.key)
            if parent is not None and parent.key != previous:
                blocker = pending.get((parent.namespace, parent.key))
                if blocker is not None:
                    blockers.add(blocker)
            blocker = pending.get(name)
            if blocker is not None:
                blockers.add(blocker)
            pending[name] = job
            previous = page.object.key
        blockers.discard(job)
        job.waits = len(blockers)
        for blocker in blockers:
            blocker.dependents.append(job)

    def first_orphan(self, job: Job) -> int:
        """Index of the first page of `job` whose parent is known to have failed (or its length)."""
        if self._failed:
            previous = b""
            for i, page in enumerate(job.items):
                parent = page.parent
                if (
                    parent is not None
                    and parent.key != previous
                    and (parent.namespace, parent.key) in self._failed
                ):
                    return i
                previous = page.object.key
        return len(job.items)

    def record(self, job: Job) -> list[Job]:
        """Note the results of a store that is reported; the jobs that wait for nothing now."""
        pending, failed = self._pending, self._failed
        for page, result in zip(job.items, job.results, strict=True):
            name = (page.object.namespace, page.object.key)
            if pending.get(name) is job:
                del pending[name]
            if not result.outcome.is_stored:
                failed[name] = None
            elif failed:
                failed.pop(name, None)
        while len(failed) > MAX_FAILED:
            del failed[next(iter(failed))]
        ready = []
        for dependent in job.dependents:
            if dependent.state is JobState.WAITING:
                dependent.waits -= 1
                if dependent.waits == 0:
                    ready.append(dependent)
        job.dependents = []
        return ready

    def forget(self) -> None:
        """No store is open any more: nothing is left that a failed page could matter to."""
        self._failed.clear()

    def check_integrity(self, live: set[Job]) -> None:
        assert all(job in live and not job.reported for job in self._pending.values())
        assert len(self._failed) <= MAX_FAILED
        assert live or not (self._pending or self._failed)
