"""One chunk of a job as one call of a backend: framing, checks, and what to do about bad frames."""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvstrata.backends.base import (
    ObjectId,
    PageResult,
    ReadRequest,
    StorageBackend,
    WriteRequest,
)
from kvstrata.backends.frame import HEADER_BYTES, encode_header, parse_header, verify
from kvstrata.backends.jobs import Chunk, Operation, PageIO
from kvstrata.backends.outcomes import failure, outcome_of
from kvstrata.boundary import Outcome
from kvstrata.errors import CorruptFrameError, StorageError

logger = logging.getLogger(__name__)


class FrameIO:
    """Runs chunks in the thread that owns it, with header buffers of its own.

    The header buffers are page-aligned and as many as a call has pages: each worker thread has one
    `FrameIO`, so that together they are a pool of `concurrency * max_batch` that nobody waits for.
    """

    def __init__(self, name: str, backend: StorageBackend, max_batch: int) -> None:
        self._name = name
        self._backend = backend
        slab = memoryview(mmap.mmap(-1, max_batch * HEADER_BYTES))
        self._headers = [slab[i * HEADER_BYTES : (i + 1) * HEADER_BYTES] for i in range(max_batch)]
        self._run: dict[Operation, Callable[[Any], Chunk]] = {
            Operation.LOOKUP: self._lookup,
            Operation.LOAD: self._load,
            Operation.STORE: self._store,
            Operation.DROP: self._drop,
        }

    def run(self, operation: Operation, items: Sequence[Any]) -> Chunk:
        """Call the backend for `items` (at most `max_batch`). Never raises.

        Whatever a plugin raises, `SystemExit` included, is the result of this chunk: a worker
        thread does not end before `close`. (Retry and breaker belong around this call.)
        """
        start = time.perf_counter()
        try:
            chunk = self._run[operation](items)
        except BaseException as error:
            if not isinstance(error, StorageError):
                logger.exception("backend %s: %s failed", self._name, operation.value)
            chunk = Chunk([failure(error)] * len(items), failure=outcome_of(error))
            chunk.io_s = time.perf_counter() - start
        chunk.items = len(items)
        return chunk

    def _lookup(self, objects: Sequence[ObjectId]) -> Chunk:
        start = time.perf_counter()
        found = self._backend.exists(objects)
        io_s = time.perf_counter() - start
        _expect(found, objects)
        count = found.index(False) if False in found else len(objects)
        return Chunk((), count=count, io_s=io_s)

    def _drop(self, objects: Sequence[ObjectId]) -> Chunk:
        start = time.perf_counter()
        deleted = self._backend.delete(objects)
        io_s = time.perf_counter() - start
        _expect(deleted, objects)
        return Chunk((), count=sum(deleted), io_s=io_s)

    def _store(self, pages: Sequence[PageIO]) -> Chunk:
        start = time.perf_counter()
        requests = []
        for page, header in zip(pages, self._headers, strict=False):
            encode_header(header, page.object, page.parent, page.depth, page.payload)
            requests.append(
                WriteRequest(page.object, page.parent, page.depth, (header, page.payload))
            )
        framed = time.perf_counter()
        answers = self._backend.write(requests)
        written = time.perf_counter()
        _expect(answers, pages)
        stored: dict[int, PageResult] = {}
        results = []
        for page, answer in zip(pages, answers, strict=True):
            if answer.outcome is Outcome.STORED:
                nbytes = page.payload.nbytes
                answer = stored.get(nbytes) or stored.setdefault(  # noqa: PLW2901
                    nbytes, PageResult(Outcome.STORED, nbytes)
                )
            results.append(answer)
        return Chunk(results, io_s=written - framed, check_s=framed - start)

    def _load(self, pages: Sequence[PageIO]) -> Chunk:
        start = time.perf_counter()
        headers = self._headers
        requests = [
            ReadRequest(page.object, (header, page.payload))
            for page, header in zip(pages, headers, strict=False)
        ]
        answers = self._backend.read(requests)
        read = time.perf_counter()
        _expect(answers, pages)
        loaded: dict[int, PageResult] = {}
        results, corrupt = [], []
        for page, header, answer in zip(pages, headers, answers, strict=False):
            if answer.outcome is Outcome.LOADED:
                nbytes = page.payload.nbytes
                try:
                    if answer.nbytes < HEADER_BYTES + nbytes:
                        raise CorruptFrameError(
                            f"short: {answer.nbytes} of {HEADER_BYTES + nbytes} bytes"
                        )
                    verify(parse_header(header), page.object, page.payload)
                except CorruptFrameError as error:
                    corrupt.append(page.object)
                    results.append(failure(error))
                else:
                    result = loaded.get(nbytes)
                    if result is None:
                        result = loaded[nbytes] = PageResult(Outcome.LOADED, nbytes)
                    results.append(result)
            else:
                if answer.outcome is Outcome.CORRUPT:
                    corrupt.append(page.object)
                results.append(answer)
        chunk = Chunk(results, io_s=read - start, check_s=time.perf_counter() - read)
        if corrupt:
            chunk.corrupt_deleted = self._delete_corrupt(corrupt)
        return chunk

    def _delete_corrupt(self, objects: Sequence[ObjectId]) -> int:
        """Make room for the right bytes: an existing object would never be overwritten."""
        logger.warning(
            "backend %s: %d corrupt frames deleted, the first is %s",
            self._name,
            len(objects),
            objects[0].name,
        )
        try:
            return sum(self._backend.delete(objects))
        except Exception:
            logger.exception("backend %s: corrupt frames cannot be deleted", self._name)
            return 0


def _expect(answers: Sequence[object], items: Sequence[object]) -> None:
    if len(answers) != len(items):
        raise StorageError(f"the backend gave {len(answers)} results for {len(items)} requests")
