"""Frames as tools see them: read whole, checked, compared; buffers of their own."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvstrata.backends import ObjectId, PageResult, ReadRequest, StorageBackend, StoredObject
from kvstrata.backends.abilities import SupportsPeek
from kvstrata.backends.frame import (
    HEADER_BYTES,
    NO_PARENT,
    ForeignFrameError,
    FrameHeader,
    parse_header,
    verify,
)
from kvstrata.backends.outcomes import failure
from kvstrata.boundary import Outcome
from kvstrata.errors import CorruptFrameError, StorageError

ALIGN_BYTES = 4096
MAX_FRAME_BYTES = 1 << 30
"""No page comes near it; a larger length in a header is a damaged one."""


class FrameBuffer:
    """Page-aligned memory, cut into pieces for one call at a time. Grows to what a call needs."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, _aligned(max(nbytes, ALIGN_BYTES)))

    @property
    def nbytes(self) -> int:
        return len(self._map)

    def cut(self, sizes: Sequence[int]) -> list[memoryview]:
        """A piece a size, each at an aligned place. What was cut before is invalid now."""
        need = sum(map(_aligned, sizes))
        if need > len(self._map):
            self._map = mmap.mmap(-1, need)
        whole, at, pieces = memoryview(self._map), 0, []
        for size in sizes:
            pieces.append(whole[at : at + size])
            at += _aligned(size)
        return pieces


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def peek(backend: StorageBackend, requests: Sequence[ReadRequest]) -> list[PageResult]:
    """Read, without a trace where the backend can. A call that raises is a failure of each page."""
    try:
        if isinstance(backend, SupportsPeek):
            return backend.peek(requests)
        return backend.read(requests)
    except StorageError as error:
        return [failure(error)] * len(requests)


@dataclass(frozen=True, slots=True)
class Checked:
    """What a look at one frame came to."""

    outcome: Outcome
    """LOADED, MISSING, CORRUPT, or what the backend said."""
    header: FrameHeader | None = None
    message: str = ""
    is_foreign: bool = False
    """Another version of this program may be able to read it."""


def read_frames(
    backend: StorageBackend, names: Sequence[ObjectId], pieces: Sequence[memoryview]
) -> list[Checked]:
    """Read whole frames and check them. Each piece is larger than its frame: one that is filled
    holds a frame that is too long."""
    requests = [ReadRequest(name, (p,)) for name, p in zip(names, pieces, strict=True)]
    results = peek(backend, requests)
    return [
        _checked(result, lambda: check_frame(name, piece[: result.nbytes]))  # noqa: B023 (at once)
        for name, piece, result in zip(names, pieces, results, strict=True)
    ]


def read_headers(
    backend: StorageBackend, names: Sequence[ObjectId], pieces: Sequence[memoryview]
) -> list[Checked]:
    """Read the first 4 KiB of each frame; the payload is not looked at."""
    requests = [
        ReadRequest(name, (p[:HEADER_BYTES],)) for name, p in zip(names, pieces, strict=True)
    ]
    results = peek(backend, requests)
    return [
        _checked(result, lambda: check_header(name, piece[: result.nbytes]))  # noqa: B023
        for name, piece, result in zip(names, pieces, results, strict=True)
    ]


def _checked(result: PageResult, check: Callable[[], FrameHeader]) -> Checked:
    if result.outcome is not Outcome.LOADED:
        return Checked(result.outcome, message=result.message)
    try:
        return Checked(Outcome.LOADED, check())
    except CorruptFrameError as error:
        return Checked(Outcome.CORRUPT, None, str(error), isinstance(error, ForeignFrameError))


def check_header(name: ObjectId, frame: memoryview) -> FrameHeader:
    """The header of the frame that is stored as `name`. Raises `CorruptFrameError`."""
    header = parse_header(frame[:HEADER_BYTES])
    if header.namespace != name.namespace:
        raise CorruptFrameError(f"a frame of namespace {header.namespace.hex()[:16]}… lies here")
    if header.key != name.key:
        raise CorruptFrameError(f"the frame of page {header.key.hex()[:16]}… lies here")
    if (header.depth == 0) != (header.parent_key == NO_PARENT):
        raise CorruptFrameError(f"depth {header.depth} does not go with its parent")
    if header.parent_key == header.key:
        raise CorruptFrameError("the page is its own parent")
    if header.stored_bytes > MAX_FRAME_BYTES:
        raise CorruptFrameError(f"a payload of {header.stored_bytes} bytes")
    return header


def check_frame(name: ObjectId, frame: memoryview) -> FrameHeader:
    """The header of the whole `frame`, every byte of which was checked. Raises
    `CorruptFrameError`."""
    header = check_header(name, frame)
    need = HEADER_BYTES + header.stored_bytes
    if frame.nbytes < need:
        raise CorruptFrameError(f"cut off: {frame.nbytes} of {need} bytes")
    if frame.nbytes > need:
        raise CorruptFrameError(f"too long: something follows its {need} bytes")
    verify(header, name, frame[HEADER_BYTES:])
    return header


def batches(
    objects: Iterable[StoredObject], most: int, most_bytes: int = MAX_FRAME_BYTES
) -> Iterator[list[StoredObject]]:
    """Groups of at most `most` objects and about `most_bytes`; one at least."""
    group: list[StoredObject] = []
    nbytes = 0
    for found in objects:
        if group and (len(group) == most or nbytes + found.nbytes > most_bytes):
            yield group
            group, nbytes = [], 0
        group.append(found)
        nbytes += found.nbytes
    if group:
        yield group
