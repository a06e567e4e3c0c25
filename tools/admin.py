"""What an operator and a process that serves say to each other, and the asking side of it.

A local socket (`[admin] socket`), one request a connection, one answer. A message is its length
(4 bytes, little-endian) and that many bytes of msgpack. `admin_server` answers.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from pathlib import Path
from typing import NoReturn

import msgspec

from kvstrata import errors
from kvstrata.errors import (
    InputError,
    StorageAccessError,
    StorageError,
    StorageTimeoutError,
    StorageUnavailableError,
    UserError,
    Where,
)

MAX_REQUEST_BYTES = 4096
MAX_ANSWER_BYTES = 1 << 20
CONNECT_DEADLINE_S = 5.0
MAX_TEXT = 2000
"""Characters of an error's message."""

_LENGTH = struct.Struct("<I")


# ── requests ─────────────────────────────────────────────────────────────────────────────────────


class AskStatus(msgspec.Struct, frozen=True, tag=True):
    """→ `Status`."""


class Detach(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Serve without L3 from now on → `Detached`. What is under way, and stores that wait, get
    `drain_s`; closing the backend takes as long again at the most. 0: what waits is given up at
    once, and calls that run get `FORCED_CLOSE_S`."""

    drain_s: float


class Attach(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Serve with this backend of the process's configuration as L3 → `Attached`."""

    backend: str


Request = AskStatus | Detach | Attach


# ── answers ──────────────────────────────────────────────────────────────────────────────────────


class BackendStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The backend that is attached, or was last. Counters are since it was attached; their keys are
    operations (lookup, load, store, drop), and outcomes below."""

    name: str
    plugin: str
    attached: bool
    health: str
    """ok | degraded | open (not used for now); "detached"."""
    message: str
    queued_pages: dict[str, int]
    running_jobs: int
    waiting_for_room: int
    pages: dict[str, dict[str, int]]
    calls: dict[str, int]
    retries: dict[str, int]
    bytes_moved: dict[str, int]
    queue_s: dict[str, float]
    io_s: dict[str, float]
    check_s: dict[str, float]
    copy_s: dict[str, float]
    late_pages: int
    corrupt_deleted: int
    breaker_opened: int
    kills: int
    abandoned_threads: int
    used_bytes: int | None
    """None: it could not say in time."""
    limit_bytes: int | None
    objects: int | None


class Status(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What a process serves from."""

    pid: int
    version: str
    config: str
    uptime_s: float
    backends: list[str]
    """Names that can be attached."""
    l3: BackendStatus | None
    """None: this process was started without L3."""


class Detached(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """`backend` is closed."""

    backend: str
    """ "" : none was attached."""
    complete: bool
    """False: some of what waited was given up, or a call was stuck."""
    waiting_pages: int
    """Pages that waited for their store when it began. Those that were given up are computed again
    when they are needed."""
    stuck_threads: int
    """Calls of the backend that had not returned; what they use stays apart until they do."""
    seconds: float


class Attached(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """`backend` is L3 now."""

    backend: str
    seconds: float


class Refused(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The request had no effect: an error of `kvstrata.errors` by its name, and its parts."""

    error: str
    message: str
    remedy: str = ""
    file: str | None = None
    line: int | None = None
    key: str | None = None

    @classmethod
    def of(cls, error: Exception) -> Refused:
        name = type(error).__name__
        if not isinstance(error, UserError):
            return cls(error=name, message=str(error)[:MAX_TEXT])
        place = error.where
        return cls(
            error=name,
            message=error.message[:MAX_TEXT],
            remedy=error.remedy[:MAX_TEXT],
            file=str(place.file) if place.file else None,
            line=place.line,
            key=place.key,
        )

    def throw(self) -> NoReturn:
        """Raise it again: an error that a person can mend, or a StorageError."""
        kind = getattr(errors, self.error, None)
        if isinstance(kind, type) and issubclass(kind, UserError):
            where = Where(Path(self.file) if self.file else None, self.line, self.key)
            raise kind(self.message, remedy=self.remedy, where=where)
        if isinstance(kind, type) and issubclass(kind, StorageError):
            raise kind(self.message)
        raise StorageError(f"the process answered {self.error}: {self.message}")


Answer = Status | Detached | Attached | Refused

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_answers = msgspec.msgpack.Decoder(Answer)


# ── messages on a socket ─────────────────────────────────────────────────────────────────────────


def send(channel: socket.socket, message: Request | Answer, end: float) -> None:
    """Raises StorageTimeoutError at `end` (monotonic), OSError when the other side is gone."""
    data = _encoder.encode(message)
    channel.settimeout(_left_s(end))
    try:
        channel.sendall(_LENGTH.pack(len(data)) + data)
    except TimeoutError as error:
        raise StorageTimeoutError("the other side takes no bytes") from error


def receive_request(channel: socket.socket, end: float) -> Request:
    """Raises InputError for bytes that are no request, StorageTimeoutError at `end`."""
    try:
        return _requests.decode(_receive(channel, MAX_REQUEST_BYTES, end))
    except msgspec.DecodeError as error:
        raise _no_message(str(error)) from error


def receive_answer(channel: socket.socket, end: float) -> Answer:
    """As `receive_request`."""
    try:
        return _answers.decode(_receive(channel, MAX_ANSWER_BYTES, end))
    except msgspec.DecodeError as error:
        raise _no_message(str(error)) from error


def _receive(channel: socket.socket, most: int, end: float) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size, end))
    if length > most:
        raise _no_message(f"{length} bytes; {most} are the most")
    return _exactly(channel, length, end)


def _exactly(channel: socket.socket, nbytes: int, end: float) -> bytes:
    data = b""
    while len(data) < nbytes:
        channel.settimeout(_left_s(end))
        try:
            part = channel.recv(nbytes - len(data))
        except TimeoutError as error:
            raise StorageTimeoutError("no whole message came in time") from error
        if not part:
            raise _no_message(f"it ended after {len(data)} of {nbytes} bytes")
        data += part
    return data


def _left_s(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise StorageTimeoutError("no whole message came in time")
    return left


def _no_message(reason: str) -> InputError:
    return InputError(
        f"this is no message of the admin socket: {reason[:MAX_TEXT]}",
        remedy="ask with `kvstrata backends`, of the same version as the process",
    )


# ── asking ───────────────────────────────────────────────────────────────────────────────────────


def ask(path: str, request: Request, deadline_s: float, where: Where) -> Answer:
    """The answer of the process that listens at `path`; `where` is the setting that says so.

    Raises what the process answered (`Refused.throw`), StorageUnavailableError when nothing
    listens, StorageAccessError when it is another user's, StorageTimeoutError after `deadline_s`,
    StorageError when the process ended meanwhile. After a request was sent it may take effect
    whatever is raised.
    """
    place = f"{path} ({where})"
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as channel:
        _connect(channel, path, place)
        end = time.monotonic() + deadline_s
        try:
            send(channel, request, end)
            answer = receive_answer(channel, end)
        except StorageTimeoutError as error:
            raise StorageTimeoutError(
                f"{place}: process {_peer(channel)} gave no answer in {deadline_s:g} s; it is busy "
                "with an earlier command, or stopped: ask again"
            ) from error
        except (OSError, InputError) as error:
            raise StorageError(f"{place}: the process ended without an answer: {error}") from error
    if isinstance(answer, Refused):
        answer.throw()
    return answer


def _connect(channel: socket.socket, path: str, place: str) -> None:
    channel.settimeout(CONNECT_DEADLINE_S)
    try:
        channel.connect(path)
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise StorageUnavailableError(
            f"{place}: nothing that serves listens here; start it with this configuration, from "
            "this working directory if the path is relative"
        ) from error
    except PermissionError as error:
        raise StorageAccessError(
            f"{place}: permission denied; ask as the user that runs the process"
        ) from error
    except (TimeoutError, BlockingIOError) as error:
        raise StorageTimeoutError(
            f"{place}: the process does not take connections; it is busy with an earlier command, "
            "or stopped: ask again"
        ) from error
    except OSError as error:
        raise StorageUnavailableError(f"{place}: {error.strerror or error}") from error


def _peer(channel: socket.socket) -> int:
    """The process that listens; 0 where the system does not say."""
    try:
        data = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError:
        return 0
    pid: int = struct.unpack("3i", data)[0]
    return pid
