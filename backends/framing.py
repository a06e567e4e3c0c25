"""One chunk of a job as one call of a backend: framing, checks, and what to do about bad frames."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstrata.backends.base import (
    ObjectId,
    PageResult,
    ReadRequest,
    StorageBackend,
    WriteRequest,
    plain_result,
)
from kvstrata.backends.frame import (
    HEADER_BYTES,
    ForeignFrameError,
    encode_header,
    parse_header,
    verify,
)
from kvstrata.backends.jobs import Chunk, Operation, PageIO
from kvstrata.backends.outcomes import failure, outcome_of
from kvstrata.backends.phases import take_copy
from kvstrata.backends.unreadable import Unreadable
from kvstrata.boundary import Outcome
from kvstrata.errors import CorruptFrameError, StorageError

logger = logging.getLogger(__name__)

_UNREADABLE = (Outcome.ACCESS, Outcome.ERROR)
"""Of a page, while the call as a whole went well: the fault is the frame's."""
_BAD = (Outcome.CORRUPT, *_UNREADABLE)


class FrameIO:
    """Runs chunks in the thread that owns it, with header buffers of its own.

    `headers` are page-aligned and as many as a call has pages: each worker thread has one
    `FrameIO`, so that together they are a pool of `concurrency * max_batch` that nobody waits for.
    """

    def __init__(
        self,
        name: str,
        backend: StorageBackend,
        headers: Sequence[memoryview],
        unreadable: Unreadable,
        on_removed: Callable[[Sequence[ObjectId]], None],
    ) -> None:
        self._name = name
        self._backend = backend
        self._unreadable = unreadable
        self._on_removed = on_removed
        self._headers = headers

    def run(self, operation: Operation, items: Sequence[Any]) -> Chunk:
        """Call the backend for `items` (at most `max_batch`). Never raises.

        Whatever a plugin raises, `SystemExit` included, is the result of this chunk: a worker
        thread does not end before `close`.
        """
        start = time.perf_counter()
        try:
            chunk = _RUN[operation](self, items)
        except BaseException as error:
            if not isinstance(error, StorageError):
                logger.exception("backend %s: %s failed", self._name, operation.value)
            chunk = Chunk([failure(error)] * len(items), failure=outcome_of(error))
            chunk.io_s = time.perf_counter() - start
        chunk.items = len(items)
        chunk.copy_s = min(take_copy(), chunk.io_s)
        chunk.io_s -= chunk.copy_s
        return chunk

    def _lookup(self, objects: Sequence[ObjectId]) -> Chunk:
        start = time.perf_counter()
        found = self._backend.exists(objects)
        io_s = time.perf_counter() - start
        _expect(found, objects)
        found = self._unreadable.without(objects, [bool(there) for there in found])
        count = found.index(False) if False in found else len(objects)
        return Chunk((), count=count, io_s=io_s)

    def _drop(self, objects: Sequence[ObjectId]) -> Chunk:
        start = time.perf_counter()
        deleted = self._backend.delete(objects)
        io_s = time.perf_counter() - start
        _expect(deleted, objects)
        self._unreadable.discard(o for o, gone in zip(objects, deleted, strict=True) if gone)
        return Chunk((), count=sum(map(bool, deleted)), io_s=io_s)

    def _store(self, pages: Sequence[PageIO]) -> Chunk:
        start = time.perf_counter()
        requests = []
        for page, header in zip(pages, self._headers, strict=False):
            encode_header(header, page.object, page.parent, page.depth, page.payload)
            requests.append(
                WriteRequest(page.object, page.parent, page.depth, (header, page.payload))
            )
        framed = time.perf_counter()
        if stuck := self._unreadable.removable(page.object for page in pages):
            self._remove(stuck)
        answers = self._backend.write(requests)
        written = time.perf_counter()
        _expect(answers, pages)
        if self._unreadable:
            self._unreadable.discard(
                page.object
                for page, answer in zip(pages, answers, strict=True)
                if answer.outcome is Outcome.STORED
            )
            answers = [
                (answer.outcome is Outcome.EXISTS and self._unreadable.get(page.object)) or answer
                for page, answer in zip(pages, answers, strict=True)
            ]
        results = [
            plain_result(Outcome.STORED, page.payload.nbytes)
            if answer.outcome is Outcome.STORED
            else answer
            for page, answer in zip(pages, answers, strict=True)
        ]
        return Chunk(results, io_s=written - framed, check_s=framed - start)

    def _load(self, pages: Sequence[PageIO]) -> Chunk:
        start = time.perf_counter()
        headers = self._headers
        requests = [
            ReadRequest(page.object, (header, page.payload))
            for page, header in zip(pages, headers, strict=False)
        ]
        first = self._backend.read(requests)
        _expect(first, pages)
        answers = self._again(requests, first)
        read = time.perf_counter()
        results = [*map(self._check, pages, headers, answers)]
        bad: dict[ObjectId, PageResult] = {}
        for page, answer, result in zip(pages, answers, results, strict=True):
            outcome = result.outcome
            if outcome is Outcome.LOADED:
                continue
            if outcome in _BAD:
                bad[page.object] = result
            elif answer.outcome is Outcome.MISSING:
                self._unreadable.discard((page.object,))
        if self._unreadable:
            loaded = zip(pages, results, strict=True)
            self._unreadable.discard(p.object for p, r in loaded if r.outcome is Outcome.LOADED)
        chunk = Chunk(results, io_s=read - start, check_s=time.perf_counter() - read)
        if bad:
            chunk.corrupt_deleted = self._replace(bad)
        return chunk

    def _again(
        self, requests: Sequence[ReadRequest], answers: Sequence[PageResult]
    ) -> Sequence[PageResult]:
        """Read once more what could not be read: it is about to be removed."""
        failed = [i for i, answer in enumerate(answers) if answer.outcome in _UNREADABLE]
        if not failed:
            return answers
        again = [requests[i] for i in failed]
        repeated = self._backend.read(again)
        _expect(repeated, again)
        merged = list(answers)
        for i, answer in zip(failed, repeated, strict=True):
            merged[i] = answer
        return merged

    def _check(self, page: PageIO, header: memoryview, answer: PageResult) -> PageResult:
        """What a load of `page` comes to, given the backend's answer."""
        if answer.outcome is not Outcome.LOADED:
            return answer
        payload = page.payload
        nbytes = payload.nbytes
        try:
            if answer.nbytes < HEADER_BYTES:
                raise CorruptFrameError(f"short: {answer.nbytes} of {HEADER_BYTES + nbytes} bytes")
            parsed = parse_header(header)
            if answer.nbytes < HEADER_BYTES + nbytes:
                raise CorruptFrameError(f"short: {answer.nbytes} of {HEADER_BYTES + nbytes} bytes")
            verify(parsed, page.object, payload)
        except ForeignFrameError as error:
            foreign = PageResult(Outcome.ERROR, 0, f"another program's frame is there: {error}")
            self._unreadable.add(page.object, foreign, is_ours=False)
            return PageResult(Outcome.MISSING, 0, str(error))
        except CorruptFrameError as error:
            return failure(error)
        return plain_result(Outcome.LOADED, nbytes)

    def _replace(self, bad: Mapping[ObjectId, PageResult]) -> int:
        """Make room for the right bytes: an existing object would never be overwritten. How many
        are gone."""
        first, result = next(iter(bad.items()))
        logger.warning(
            "backend %s: %d frames are corrupt or unreadable and are deleted, the first is %s: %s",
            self._name,
            len(bad),
            first.name,
            result.message or result.outcome.value,
        )
        for name, result in bad.items():
            self._unreadable.add(name, result, is_ours=True)
        return self._remove(list(bad))

    def _remove(self, objects: Sequence[ObjectId]) -> int:
        """Delete what cannot be used, and forget it if it is gone. How many are gone by this."""
        try:
            deleted = self._backend.delete(objects)
            _expect(deleted, objects)
            left = [o for o, gone in zip(objects, deleted, strict=True) if not gone]
            there = self._backend.exists(left) if left else []
            _expect(there, left)
        except Exception:
            logger.exception("backend %s: bad frames cannot be deleted", self._name)
            return 0
        stuck = {o for o, is_there in zip(left, there, strict=True) if is_there}
        self._unreadable.discard(o for o in objects if o not in stuck)
        gone = [o for o, is_gone in zip(objects, deleted, strict=True) if is_gone]
        if gone:
            self._on_removed(gone)
        return len(gone)


_RUN: dict[Operation, Callable[[FrameIO, Any], Chunk]] = {
    Operation.LOOKUP: FrameIO._lookup,
    Operation.LOAD: FrameIO._load,
    Operation.STORE: FrameIO._store,
    Operation.DROP: FrameIO._drop,
}
"""Not bound to an object: the cycle would keep its buffers, and a descriptor, for a while."""


def _expect(answers: Sequence[object], items: Sequence[object]) -> None:
    if len(answers) != len(items):
        raise StorageError(f"the backend gave {len(answers)} results for {len(items)} requests")
