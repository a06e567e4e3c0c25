"""A migration: scan the source, copy parents before children, check, and with `move` remove.

    scan     every header of the source into the journal; what is asked for, in order
    copy     batches through a few threads; each is WRITING, then DONE
    persist  (move) the copies are made durable, parents first
    delete   (move) what is safe there leaves the source, children first
    done

Killed in any phase, the same command goes on with it. A server may read, write and evict on both
stores meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvstrata.backends import ObjectId, StorageBackend, WriteRequest
from kvstrata.backends.abilities import SupportsPersist
from kvstrata.errors import InputError, StorageError
from kvstrata.tools.catalog import Page, State, orphans, scan_headers
from kvstrata.tools.crew import Crew
from kvstrata.tools.frames import ALIGN_BYTES, FrameBuffer, read_frames
from kvstrata.tools.migrate_copy import Batch, Copier, RateLimit
from kvstrata.tools.migrate_journal import Journal, Result, Selection
from kvstrata.tools.replay_control import Interruption

OnProgress = Callable[[str, int, int, int], None]
"""`(phase, pages done, pages in all (0: not known), bytes done)`."""

MAX_FAILED_BATCHES = 8
"""So many with none stored in between: the store is away, and waiting for each is vain."""
_AWAY = ("unavailable", "timeout", "access", "overloaded", "error")


class StopMigration(Exception):  # noqa: N818 (no error: the way to end a scan)
    """Ctrl-C while the source is scanned."""


@dataclass(frozen=True, slots=True)
class MigrateSettings:
    """How to migrate; what to migrate is a `Selection`."""

    move: bool = False
    reads_back: bool = False
    may_evict: bool = False
    """Go on when the destination evicts to make room for what comes."""
    rate_bytes_per_s: int = 0
    """0: as fast as it goes."""
    threads: int = 4
    batch_bytes: int = 16 << 20
    """What a thread holds of frames at once, about; one frame at least."""


@dataclass(slots=True)
class Migration:
    """One migration between two open backends, with its journal. `run` once, from one thread.

    `evicted` is what the destination's `on_evicted` calls.
    """

    source: StorageBackend
    target: StorageBackend
    journal: Journal
    selection: Selection
    settings: MigrateSettings
    stop: Interruption
    on_progress: OnProgress = lambda phase, done, total, nbytes: None
    clock: Callable[[], float] = time.time
    stopped_because: str = ""
    """Why it ended early, if not by `stop`."""
    _began: float = 0.0
    """When it would have begun, had there been no pauses between its runs."""
    _evicted: int = 0
    _waits: dict[ObjectId, threading.Event] = field(default_factory=dict)

    def evicted(self, objects: Sequence[ObjectId]) -> None:
        self._evicted += len(objects)

    @property
    def is_complete(self) -> bool:
        return self.journal.phase == "done"

    def prepare(self) -> None:
        """Scan and select, unless that was done before. Returns early when it is stopped."""
        journal = self.journal
        if self.settings.move and not isinstance(self.target, SupportsPersist):
            raise InputError(
                "the destination does not say when its frames are durable, so nothing may be "
                "removed for them",
                remedy="leave out --move",
            )
        if journal.phase == "scan":
            try:
                self._scan()
            except StopMigration:
                return
            journal.select(self.selection, self.clock())
            journal.enter("copy")
        else:
            journal.retry()

    def run(self) -> None:
        """Copy, and with `move` remove. Call `prepare` before. Raises `StorageError` when a store
        or the journal fails as a whole; what was done is in the journal."""
        self._began = time.monotonic() - float(self.journal.get("seconds") or 0)
        self.journal.put(runs=str(int(self.journal.get("runs") or 0) + 1))
        try:
            self._run()
        finally:
            self.journal.put(seconds=str(self._spent_s))

    @property
    def _spent_s(self) -> float:
        return time.monotonic() - self._began

    # ── phases ───────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        journal = self.journal
        if journal.phase == "copy":
            self._copy()
            if not self._is_stopped:
                self._sweep()
            if self._is_stopped:
                return
            self._look_for_orphans()
            journal.enter("persist" if self.settings.move else "done")
        if journal.phase == "persist":
            self._persist()
            if self._is_stopped:
                return
            journal.enter("delete")
        if journal.phase == "delete":
            try:
                self._scan()  # pages that came meanwhile keep what they hang on
            except StopMigration:
                return
            self._delete()
            if not self._is_stopped:
                journal.enter("done")

    @property
    def _is_stopped(self) -> bool:
        return self.stop.finish.is_set() or bool(self.stopped_because)

    def _scan(self) -> None:
        done = 0

        def on_batch(count: int) -> None:
            nonlocal done
            done += count
            self.on_progress("scan", done, 0, 0)
            if self.stop.finish.is_set():
                raise StopMigration

        scan_headers(self.journal, self.source, self.selection.namespaces, on_batch)

    def _copy(self) -> None:
        settings, journal = self.settings, self.journal
        rate = RateLimit(settings.rate_bytes_per_s, self.stop.finish.wait)
        is_over = self.stop.leave.is_set
        copier = Copier(self.source, self.target, rate, is_over, settings.reads_back)
        total, _ = journal.count()
        pending = "state IN (?, ?)"
        left, _ = journal.count(pending, (State.PENDING, State.WRITING))
        done, moved, failed_batches = total - left, 0, 0
        buffer_bytes = settings.batch_bytes * (2 if settings.reads_back else 1) + ALIGN_BYTES
        with Crew(settings.threads, buffer_bytes, copier) as crew:
            for results in crew.run(self._batches(), is_over):
                journal.record(results, self._spent_s)
                done += len(results)
                moved += sum(result.nbytes for result in results)
                self.on_progress("copy", done, total, moved)
                if any(result.state is State.DONE for result in results):
                    failed_batches = 0
                failed_batches += any(result.fault in _AWAY for result in results)
                self._look_at(results, failed_batches)

    def _look_at(self, results: Sequence[Result], failed_batches: int) -> None:
        """End early what cannot go well."""
        if any(result.fault == "full" for result in results):
            self.stopped_because = "the destination is full"
        elif self._evicted and not self.settings.may_evict:
            self.stopped_because = "the destination evicts pages to make room"
        elif failed_batches >= MAX_FAILED_BATCHES:
            self.stopped_because = f"{failed_batches} batches in a row have failed"

    def _batches(self) -> Iterator[Batch]:
        """What is left to copy, in order, until it is stopped."""
        most = min(self.source.max_batch, self.target.max_batch)
        after = 0
        while not self._is_stopped:
            pages, after = self.journal.take(after, most, self.settings.batch_bytes)
            if not pages:
                return
            yield self._batch(pages)

    def _batch(self, pages: Sequence[Page]) -> Batch:
        """With the batches under way that hold parents of `pages`."""
        self._waits = {name: event for name, event in self._waits.items() if not event.is_set()}
        waits = {
            self._waits[page.parent]: None for page in pages if page.parent in self._waits
        }  # ordered
        batch = Batch(tuple(pages), tuple(waits))
        self._waits.update({page.object: batch.is_done for page in pages})
        return batch

    def _sweep(self) -> None:
        """Ask the destination once more for all that was copied: it may have evicted some."""
        journal, lost = self.journal, State.EVICTED if self.settings.may_evict else State.PENDING

        def ask(pages: list[Page]) -> None:
            there = self.target.exists([page.object for page in pages])
            gone = [page for page, is_there in zip(pages, there, strict=True) if not is_there]
            if gone:
                journal.set_state(gone, lost)

        journal.each([State.DONE], self.target.max_batch, ask)
        missing, _ = journal.count("state=?", (State.PENDING,))
        if missing:
            self.stopped_because = f"the destination has evicted {missing} of the pages copied"

    def _look_for_orphans(self) -> None:
        """Of pages that were cut since the scan has not found their parents: name those that the
        source has without. A server may as well have evicted both, and stored both again later."""
        journal, after = self.journal, 0
        while some := journal.without_parent(after, self.source.max_batch):
            after = some[-1].id
            message = "its parent is not at the source either"
            journal.record(
                Result(page.id, State.CUT, fault="parent missing", message=message)
                for page in orphans(self.source, some)
            )

    def _persist(self) -> None:
        target, journal = self.target, self.journal
        assert isinstance(target, SupportsPersist), "prepare has looked"
        total, _ = journal.count("state IN (?, ?)", (State.DONE, State.SAFE))
        done = 0

        def persist(pages: list[Page]) -> None:
            nonlocal done
            if self.stop.finish.is_set():
                return
            there = target.persist([page.object for page in pages])
            for state, wanted in ((State.SAFE, True), (State.EVICTED, False)):
                some = [p for p, is_there in zip(pages, there, strict=True) if is_there is wanted]
                journal.set_state(some, state)
            done += len(pages)
            self.on_progress("persist", done, total, 0)

        journal.each([State.DONE], target.max_batch, persist)

    def _delete(self) -> None:
        journal, source = self.journal, self.source
        total, _ = journal.count("selected=1 AND state=?", (State.SAFE,))
        done = 0
        most = 1  # the first one shows that the stores are two
        while not self.stop.finish.is_set():
            pages = journal.removable(most)
            if not pages:
                return
            there = self.target.exists([page.object for page in pages])
            gone = [page for page, is_there in zip(pages, there, strict=True) if not is_there]
            if gone:
                journal.set_state(gone, State.EVICTED)
                continue
            if most == 1:
                self._delete_first(pages[0])
                most = source.max_batch
            else:
                source.delete([page.object for page in pages])
            left = source.exists([page.object for page in pages])
            for state, wanted in ((State.DELETED, False), (State.FAILED, True)):
                some = [p for p, is_left in zip(pages, left, strict=True) if is_left is wanted]
                fault = "source" if wanted else None
                message = "it cannot be deleted at the source" if wanted else ""
                journal.record([Result(p.id, state, 0, p.copied, fault, message) for p in some])
            done += len(pages)
            self.on_progress("delete", done, total, 0)

    def _delete_first(self, page: Page) -> None:
        """Delete one page, and put it back if it is gone from the destination as well: the two
        names stand for one store."""
        buffer = FrameBuffer(page.nbytes + ALIGN_BYTES)
        pieces = buffer.cut([page.nbytes + ALIGN_BYTES])
        (look,) = read_frames(self.source, [page.object], pieces)
        self.source.delete([page.object])
        if self.target.exists([page.object]) == [True] or look.header is None:
            return
        header = look.header
        request = WriteRequest(
            header.object, header.parent, header.depth, (pieces[0][: page.nbytes],)
        )
        (result,) = self.source.write([request])
        if not result.outcome.is_stored:
            raise StorageError(f"{page.object.name} is gone from both stores: {result.message}")
        raise InputError(
            "what was deleted at the source went from the destination as well (it was put back): "
            "the two backends are one store, or a page was evicted at this moment",
            remedy="give --from and --to two stores; if they are, run the command again",
        )
