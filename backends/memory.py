"""The `memory` backend: frames in a dict of this process. For tests, and for trying things out."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from kvstrata.backends.base import (
    BackendContext,
    ObjectId,
    PageResult,
    ReadRequest,
    StorageBackend,
    StoredObject,
    Usage,
    WriteRequest,
)
from kvstrata.boundary import Outcome
from kvstrata.units import parse_size


class MemoryOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`[backends.NAME.options]` of a `memory` backend."""

    max_bytes: int | str = 0
    """Bound of all frames together, a number or text like "64MiB"; 0: none."""

    def __post_init__(self) -> None:
        parse_size(self.max_bytes)


@dataclass(slots=True)
class _Frame:
    data: bytes
    parent: ObjectId | None
    used_s: float
    stamp: int
    """Grows with each use."""


class MemoryBackend(StorageBackend):
    """Thread-safe. What does not fit evicts the least recently used frames that have no children;
    pages of the same call and their parents stay."""

    Options = MemoryOptions

    def __init__(self, options: MemoryOptions) -> None:
        super().__init__(options)
        self._limit = parse_size(options.max_bytes) or None
        self._lock = threading.Lock()
        self._frames: dict[ObjectId, _Frame] = {}
        self._children: dict[ObjectId, set[ObjectId]] = {}
        """The frames that are there, by their parent, be it there or not."""
        self._leaves: list[tuple[int, bytes, bytes]] = []
        """A heap of stamps and names; an entry whose stamp is not the frame's is out of date."""
        self._stamps = itertools.count()
        self._used = 0
        self._context = BackendContext("memory")

    def open(self, context: BackendContext) -> None:
        self._context = context

    def close(self, deadline_s: float) -> None:
        with self._lock:
            self._frames.clear()
            self._children.clear()
            self._leaves.clear()
            self._used = 0

    def exists(self, objects: Sequence[ObjectId]) -> list[bool]:
        frames = self._frames
        return [name in frames for name in objects]

    def read(self, requests: Sequence[ReadRequest]) -> list[PageResult]:
        results = []
        now = time.time()
        for request in requests:
            with self._lock:
                frame = self._frames.get(request.object)
                if frame is not None:
                    frame.used_s, frame.stamp = now, next(self._stamps)
                    self._note_leaf(request.object, frame)
            if frame is None:
                results.append(PageResult(Outcome.MISSING))
            else:
                results.append(PageResult(Outcome.LOADED, _scatter(frame.data, request.buffers)))
        return results

    def write(self, requests: Sequence[WriteRequest]) -> list[PageResult]:
        results: list[PageResult] = []
        evicted: list[ObjectId] = []
        lost: set[ObjectId] = set()
        kept = {request.object for request in requests}
        kept |= {request.parent for request in requests if request.parent is not None}
        for request in requests:
            result = self._write_one(request, lost, kept, evicted)
            if not result.outcome.is_stored:
                lost.add(request.object)
            results.append(result)
        if evicted and self._context.on_evicted is not None:
            self._context.on_evicted(evicted)
        return results

    def delete(self, objects: Sequence[ObjectId]) -> list[bool]:
        with self._lock:
            return [self._remove(name) for name in objects]

    def scan(self, namespace: bytes | None = None) -> Iterator[StoredObject]:
        with self._lock:
            found = list(self._frames.items())
        for name, frame in found:
            if namespace is None or name.namespace == namespace:
                yield StoredObject(name, len(frame.data), frame.used_s)

    def usage(self) -> Usage:
        with self._lock:
            return Usage(self._used, self._limit, len(self._frames))

    def check_integrity(self) -> None:
        """Assert that the sum is right and that children and parents agree."""
        with self._lock:
            assert self._used == sum(len(f.data) for f in self._frames.values())
            assert self._limit is None or self._used <= self._limit
            by_parent: dict[ObjectId, set[ObjectId]] = {}
            for name, frame in self._frames.items():
                if frame.parent is not None:
                    by_parent.setdefault(frame.parent, set()).add(name)
            assert by_parent == self._children
            if self._limit is not None:
                noted = set(self._leaves)
                for name, frame in self._frames.items():
                    entry = (frame.stamp, name.namespace, name.key)
                    assert name in self._children or entry in noted

    def _write_one(
        self,
        request: WriteRequest,
        lost: set[ObjectId],
        kept: set[ObjectId],
        evicted: list[ObjectId],
    ) -> PageResult:
        parent = request.parent
        if parent in lost:
            return PageResult(Outcome.PARENT_MISSING)
        data = b"".join(request.buffers)
        with self._lock:
            if request.object in self._frames:
                return PageResult(Outcome.EXISTS)
            if parent is not None and parent not in self._frames:
                return PageResult(Outcome.PARENT_MISSING)
            if not self._make_room(len(data), kept, evicted):
                return PageResult(Outcome.FULL, 0, f"{self._used} of {self._limit} bytes used")
            frame = _Frame(data, parent, time.time(), next(self._stamps))
            self._frames[request.object] = frame
            self._note_leaf(request.object, frame)
            self._used += len(data)
            if parent is not None:
                self._children.setdefault(parent, set()).add(request.object)
        return PageResult(Outcome.STORED, len(data))

    def _make_room(self, need: int, kept: set[ObjectId], evicted: list[ObjectId]) -> bool:
        skipped = []
        while self._limit is not None and self._used + need > self._limit and self._leaves:
            entry = heapq.heappop(self._leaves)
            name = ObjectId(entry[1], entry[2])
            frame = self._frames.get(name)
            if frame is None or frame.stamp != entry[0] or name in self._children:
                continue
            if name in kept:
                skipped.append(entry)
                continue
            self._remove(name)
            evicted.append(name)
        for entry in skipped:
            heapq.heappush(self._leaves, entry)
        return self._limit is None or self._used + need <= self._limit

    def _note_leaf(self, name: ObjectId, frame: _Frame) -> None:
        """Put a frame that has no children where it belongs in the order of eviction."""
        if self._limit is not None and name not in self._children:
            heapq.heappush(self._leaves, (frame.stamp, name.namespace, name.key))
            if len(self._leaves) > 64 and len(self._leaves) > 4 * len(self._frames):
                self._leaves = [
                    (f.stamp, n.namespace, n.key)
                    for n, f in self._frames.items()
                    if n not in self._children
                ]
                heapq.heapify(self._leaves)

    def _remove(self, name: ObjectId) -> bool:
        frame = self._frames.pop(name, None)
        if frame is None:
            return False
        self._used -= len(frame.data)
        if frame.parent is not None:
            siblings = self._children[frame.parent]
            siblings.discard(name)
            if not siblings:
                del self._children[frame.parent]
                parent = self._frames.get(frame.parent)
                if parent is not None:
                    self._note_leaf(frame.parent, parent)
        return True


def _scatter(data: bytes, buffers: Sequence[memoryview]) -> int:
    """Copy `data` into `buffers`, one after the other; how many bytes."""
    at = 0
    for buffer in buffers:
        part = memoryview(data)[at : at + buffer.nbytes]
        buffer[: part.nbytes] = part
        at += part.nbytes
    return at
