"""Copies batches of frames from one backend to another: the part of a migration that has threads.

The destination never holds a page whose parent it lacks: a batch waits for the batches before it
that hold parents of its pages, asks the destination for every parent that is not in the batch, and
hands over parents first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstrata.backends import ObjectId, PageResult, StorageBackend, WriteRequest
from kvstrata.backends.frame import FrameHeader
from kvstrata.backends.outcomes import failure
from kvstrata.backends.policies import Rate, RateSettings
from kvstrata.boundary import Outcome
from kvstrata.errors import StorageError
from kvstrata.tools.catalog import Page, State
from kvstrata.tools.frames import ALIGN_BYTES, Checked, FrameBuffer, read_frames
from kvstrata.tools.migrate_journal import Result

_LOOK_EVERY_S = 0.2


class RateLimit:
    """So many bytes a second over all threads, after a second's worth at once; 0: no limit.

    `wait` sleeps for so many seconds, or returns earlier when the work is to end.
    """

    def __init__(
        self,
        bytes_per_s: int,
        wait: Callable[[float], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate = Rate(RateSettings(bytes_per_s=bytes_per_s))
        self._wait = wait
        self._clock = clock
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> None:
        """Wait until `nbytes` more may move."""
        if not self._rate.is_bounded:
            return
        with self._lock:
            now = self._clock()
            pause_s = self._rate.free_at - now
            self._rate.charge(nbytes, 1, now)
        if pause_s > 0:
            self._wait(pause_s)


@dataclass(frozen=True, slots=True)
class Batch:
    """Pages that are copied together, parents first."""

    pages: tuple[Page, ...]
    waits: tuple[threading.Event, ...] = ()
    """Of batches before this one that hold parents of its pages."""
    is_done: threading.Event = field(default_factory=threading.Event)

    @property
    def nbytes(self) -> int:
        return sum(page.nbytes for page in self.pages)


@dataclass(frozen=True, slots=True)
class Copier:
    """`copier(batch, buffer)` copies a batch, which fits into one call of either backend; called
    from several threads at once."""

    source: StorageBackend
    target: StorageBackend
    rate: RateLimit
    is_over: Callable[[], bool]
    """True when nobody waits for results any more."""
    reads_back: bool = False
    """Compare every frame as the destination gives it back with what was read from the source."""

    def __call__(self, batch: Batch, buffer: FrameBuffer) -> list[Result]:
        try:
            return self._copy(batch, buffer)
        finally:
            batch.is_done.set()

    def _copy(self, batch: Batch, buffer: FrameBuffer) -> list[Result]:
        pages = batch.pages
        self.rate.take(batch.nbytes)
        sizes = [page.nbytes + ALIGN_BYTES for page in pages]
        pieces = buffer.cut(sizes * 2 if self.reads_back else sizes)
        looks = read_frames(self.source, [p.object for p in pages], pieces[: len(pages)])
        for event in batch.waits:
            while not event.wait(_LOOK_EVERY_S):
                if self.is_over():
                    return []
        try:
            there = self._parents(pages)
        except StorageError as error:
            return [_failed(page, failure(error)) for page in pages]
        results: dict[int, Result] = {}
        writes: list[WriteRequest] = []
        written: list[Page] = []
        for page, look, piece in zip(pages, looks, pieces, strict=False):
            header = look.header
            if header is None:
                results[page.id] = _not_read(page, look)
            elif header.parent is not None and header.parent not in there:
                results[page.id] = Result(
                    page.id, State.CUT, message="its parent is not at the destination"
                )
            else:
                there.add(page.object)
                writes.append(_write(header, piece[: page.nbytes]))
                written.append(page)
        for result in self._write(written, writes):
            results[result.id] = result
        if self.reads_back:
            frames = {page.id: piece for page, piece in zip(pages, pieces, strict=False)}
            self._read_back(written, frames, pieces[len(pages) :], results)
        return [results[page.id] for page in pages]

    def _parents(self, pages: Sequence[Page]) -> set[ObjectId]:
        """The parents outside the batch that the destination has."""
        own = {page.object for page in pages}
        outer = list(
            dict.fromkeys(p.parent for p in pages if p.parent is not None and p.parent not in own)
        )
        found = self.target.exists(outer) if outer else []
        return {parent for parent, is_there in zip(outer, found, strict=True) if is_there}

    def _write(self, pages: Sequence[Page], writes: Sequence[WriteRequest]) -> list[Result]:
        try:
            answers = self.target.write(writes) if writes else []
        except StorageError as error:
            answers = [failure(error)] * len(writes)
        return [_written(page, answer) for page, answer in zip(pages, answers, strict=True)]

    def _read_back(
        self,
        pages: Sequence[Page],
        frames: dict[int, memoryview],
        pieces: Sequence[memoryview],
        results: dict[int, Result],
    ) -> None:
        """Change the results of pages that the destination does not give back as they are. What
        this migration wrote and is wrong is removed, and what hangs on it, children first."""
        done = [page for page in pages if results[page.id].state is State.DONE]
        looks = read_frames(self.target, [p.object for p in done], pieces[: len(done)])
        wrong: dict[ObjectId, Page] = {}
        for page, look, piece in zip(done, looks, pieces, strict=False):
            result = results[page.id]
            if look.outcome is Outcome.MISSING:  # evicted; the end of the migration counts it
                continue
            if page.parent in wrong:
                results[page.id] = Result(page.id, State.CUT, message="its parent was removed")
                wrong[page.object] = page
            elif look.header is None or (
                result.is_copied and piece[: page.nbytes] != frames[page.id][: page.nbytes]
            ):
                message = f"not what was written: {look.message or look.outcome.value}"
                results[page.id] = Result(
                    page.id, State.FAILED, fault="destination", message=message
                )
                if result.is_copied:
                    wrong[page.object] = page
        if wrong:
            self.target.delete(list(reversed(wrong)))


def _write(header: FrameHeader, frame: memoryview) -> WriteRequest:
    return WriteRequest(header.object, header.parent, header.depth, (frame,))


def _failed(page: Page, result: PageResult) -> Result:
    return Result(
        page.id, State.FAILED, fault=result.outcome.value, message=f"destination: {result.message}"
    )


def _not_read(page: Page, look: Checked) -> Result:
    if look.outcome is Outcome.MISSING:
        return Result(page.id, State.VANISHED)
    return Result(page.id, State.FAILED, fault=look.outcome.value, message=look.message)


def _written(page: Page, answer: PageResult) -> Result:
    outcome = answer.outcome
    if outcome is Outcome.STORED:
        return Result(page.id, State.DONE, page.nbytes, is_copied=True)
    if outcome is Outcome.EXISTS:  # what was handed out before a kill was written by that
        return Result(page.id, State.DONE, 0, is_copied=page.state is State.WRITING)
    if outcome is Outcome.PARENT_MISSING:
        return Result(page.id, State.CUT, message="its parent is not at the destination")
    return _failed(page, answer)
