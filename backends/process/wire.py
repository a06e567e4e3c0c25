"""What the two processes say to each other: one msgpack message each way, over a local socket.

Payloads do not cross: a buffer is a region of shared memory, an offset and a length.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from kvstrata import errors
from kvstrata.backends.base import Health, HealthState, ObjectId, PageResult, Usage, plain_result
from kvstrata.boundary import Outcome

_HEAD = struct.Struct("<IB")
"""Length of the message, number of descriptors that come with it."""
MAX_MESSAGE_BYTES = 64 * 2**20
MAX_FDS = 8
MAX_TEXT = 4096
"""Characters of a message for people."""
NAME_BYTES = 64

CALL_REGION = -1
"""In a `Part`: the memory whose descriptor came with the message."""

Part = tuple[int, int, int]
"""Index of a region, offset, number of bytes."""


class Parts(msgspec.Struct, frozen=True, array_like=True):
    """The buffers of many pages, without an object a page: that is dear."""

    counts: list[int]
    """How many parts each page has."""
    numbers: list[int]
    """Of each `Part`, one after the other."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


class Open(Message, frozen=True, array_like=True, tag=True):
    target: str
    """`module:attribute` of the backend's class."""
    options: Any
    name: str
    page_bytes: dict[str, int]
    regions: tuple[tuple[int, int], ...]
    """Descriptor (inherited) and size of each region."""
    data_threads: int
    reports_evictions: bool


class Exists(Message, frozen=True, array_like=True, tag=True):
    names: bytes


class Delete(Message, frozen=True, array_like=True, tag=True):
    names: bytes


class Read(Message, frozen=True, array_like=True, tag=True):
    names: bytes
    parts: Parts
    call_bytes: int = 0
    """Size of the call's own memory, if a descriptor comes with it."""


class Write(Message, frozen=True, array_like=True, tag=True):
    names: bytes
    parts: Parts
    parents: list[bytes]
    """b"" for none."""
    depths: list[int]
    call_bytes: int = 0


class AskUsage(Message, frozen=True, array_like=True, tag=True):
    pass


class AskHealth(Message, frozen=True, array_like=True, tag=True):
    pass


class Scan(Message, frozen=True, array_like=True, tag=True):
    """Begin; the answer is the first `Objects`."""

    namespace: bytes | None


class ScanMore(Message, frozen=True, array_like=True, tag=True):
    pass


class ScanEnd(Message, frozen=True, array_like=True, tag=True):
    pass


class Close(Message, frozen=True, array_like=True, tag=True):
    deadline_s: float


class Done(Message, frozen=True, array_like=True, tag=True):
    pass


class Flags(Message, frozen=True, array_like=True, tag=True):
    flags: list[bool]


class Results(Message, frozen=True, array_like=True, tag=True):
    """In order; a message only where there is one."""

    outcomes: list[Outcome]
    nbytes: list[int]
    messages: dict[int, str] = {}


class UsageIs(Message, frozen=True, array_like=True, tag=True):
    usage: Usage


class HealthIs(Message, frozen=True, array_like=True, tag=True):
    state: HealthState
    message: str


class Objects(Message, frozen=True, array_like=True, tag=True):
    found: list[tuple[bytes, int, float]]
    """Name, bytes, last use."""
    is_last: bool


class Evicted(Message, frozen=True, array_like=True, tag=True):
    names: bytes


class Failed(Message, frozen=True, array_like=True, tag=True):
    kind: str
    text: str
    remedy: str = ""
    key: str = ""


Request = (
    Open | Exists | Delete | Read | Write | AskUsage | AskHealth | Scan | ScanMore | ScanEnd | Close
)
Answer = Done | Flags | Results | UsageIs | HealthIs | Objects | Failed | Evicted

ANSWER_TO: dict[type[Message], type[Message]] = {
    Open: Done,
    Exists: Flags,
    Delete: Flags,
    Read: Results,
    Write: Results,
    AskUsage: UsageIs,
    AskHealth: HealthIs,
    Scan: Objects,
    ScanMore: Objects,
    ScanEnd: Done,
    Close: Done,
}
"""Or `Failed`."""

encode = msgspec.msgpack.Encoder().encode
"""Raises TypeError, ValueError for what no message may hold."""
requests = msgspec.msgpack.Decoder(Request)
answers = msgspec.msgpack.Decoder(Answer)

_M = TypeVar("_M")


class Channel(msgspec.Struct):
    """One end of a stream socket; one thread at a time sends, one receives."""

    socket: socket.socket

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Raises OSError when the other end is gone."""
        self.send_encoded(encode(message), fds)

    def send_encoded(self, body: bytes, fds: Sequence[int] = ()) -> None:
        head = _HEAD.pack(len(body), len(fds))
        if fds:
            socket.send_fds(self.socket, [head], list(fds))
            self.socket.sendall(body)
        else:
            self.socket.sendall(head + body)

    def receive(self, decoder: msgspec.msgpack.Decoder[_M]) -> tuple[_M, list[int]]:
        """The next message and its descriptors, which are the caller's. Raises EOFError or OSError
        when the other end is gone, ValueError for what is no message."""
        head, fds, _, _ = socket.recv_fds(self.socket, _HEAD.size, MAX_FDS)
        try:
            return decoder.decode(self._receive_body(head)), fds
        except BaseException:  # they came with half a message, or with none
            for fd in fds:
                os.close(fd)
            raise

    def _receive_body(self, head: bytes) -> bytearray:
        """What follows `head`, or the first bytes of one."""
        while 0 < len(head) < _HEAD.size:
            more = self.socket.recv(_HEAD.size - len(head))
            head += more
            if not more:
                break
        if len(head) < _HEAD.size:
            raise EOFError
        length, _ = _HEAD.unpack(head)
        if length > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {length} bytes")
        body = bytearray(length)
        view, got = memoryview(body), 0
        while got < length:
            n = self.socket.recv_into(view[got:])
            if n == 0:
                raise EOFError
            got += n
        return body

    def shutdown(self) -> None:
        """End whatever waits on it, in any thread."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        self.socket.close()


# ── values ───────────────────────────────────────────────────────────────────────────────────────


def pack(name: ObjectId) -> bytes:
    return name.namespace + name.key


def unpack(name: bytes) -> ObjectId:
    return ObjectId(name[:32], name[32:])


def pack_all(names: Iterable[ObjectId]) -> bytes:
    return b"".join([name.namespace + name.key for name in names])


def unpack_all(names: bytes) -> list[ObjectId]:
    return [unpack(names[i : i + NAME_BYTES]) for i in range(0, len(names), NAME_BYTES)]


def text(message: str) -> str:
    """What can be sent of it: the name of a file need not be Unicode, nor short."""
    if message.isascii():
        return message[:MAX_TEXT]
    return message[:MAX_TEXT].encode(errors="backslashreplace").decode()


def pack_results(pages: Sequence[PageResult]) -> Results:
    return Results(
        [page.outcome for page in pages],
        [page.nbytes for page in pages],
        {i: text(page.message) for i, page in enumerate(pages) if page.message},
    )


def unpack_results(message: Results) -> list[PageResult]:
    """Raises ValueError when it contradicts itself."""
    pages = [*map(plain_result, message.outcomes, message.nbytes)]
    if len(message.outcomes) != len(message.nbytes):
        raise ValueError("results of different numbers")
    for i, words in message.messages.items():
        if not 0 <= i < len(pages):
            raise ValueError(f"a message for page {i} of {len(pages)}")
        pages[i] = PageResult(pages[i].outcome, pages[i].nbytes, words)
    return pages


def unpack_health(message: HealthIs) -> Health:
    return Health(message.state, message.message)


def pack_error(error: BaseException) -> Failed:
    """An error of this package by its name; any other as a `StorageError` that names it."""
    kind = type(error).__name__
    if isinstance(error, errors.UserError):
        return Failed(kind, text(error.message), text(error.remedy), error.where.key or "")
    if isinstance(error, errors.KvstrataError):
        return Failed(kind, text(str(error)))
    return Failed("StorageError", text(f"{kind}: {error}"))


def unpack_error(message: Failed) -> errors.KvstrataError:
    kind = getattr(errors, message.kind, errors.StorageError)
    if not (isinstance(kind, type) and issubclass(kind, errors.KvstrataError)):
        kind = errors.StorageError
    if issubclass(kind, errors.UserError):
        where = errors.Where(key=message.key or None)
        return kind(message.text, remedy=message.remedy, where=where)
    if issubclass(kind, errors.CapacityError):
        kind = errors.StorageError
    return kind(message.text)
