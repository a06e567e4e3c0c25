"""Read request traces in Mooncake's JSONL format, a line a request.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …]}

`timestamp` is in milliseconds. A hash id names a block of 512 prompt tokens together with all
before it: equal ids are equal prefixes. The tokens themselves are not in a trace; the ids stand
for them (`block_tokens_of`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from kvstrata.errors import InputError, Where

BLOCK_TOKENS = 512
"""Prompt tokens that one hash id stands for."""

MAX_HASH_ID = 2**31 // BLOCK_TOKENS - 1
"""Tokens are int32: the last token of block `id` is `id * 512 + 511`."""

MAX_LINE_BYTES = 16 * 2**20
_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    timestamp_ms: float
    """When it came, since the start of the trace."""
    input_length: int
    """Tokens of the prompt, at least 1."""
    output_length: int
    """Tokens that were generated."""
    hash_ids: tuple[int, ...]
    """Block ids, at least one for each begun block of the prompt."""
    line: int
    """Its line in the file, from 1."""

    def prompt(self) -> bytes:
        """The prompt's tokens: int32, little-endian."""
        return block_tokens_of(self.hash_ids, self.input_length)


def shipped_trace() -> Path:
    """The small trace that the package ships (60 requests of multi-turn conversations)."""
    return Path(__file__).parent / "data" / "small.jsonl"


def block_tokens_of(ids: Sequence[int], input_length: int) -> bytes:
    """The first `input_length` tokens of the blocks `ids`, as little-endian int32.

    Token j of block `id` is `id * 512 + j`, so equal blocks have equal tokens and different blocks
    share none. `ids` must cover `input_length` and lie in 0 … `MAX_HASH_ID`.
    """
    assert 0 <= input_length <= len(ids) * BLOCK_TOKENS, "the ids do not cover the prompt"
    starts = np.asarray(ids, dtype=np.int64) * BLOCK_TOKENS
    tokens = (starts[:, None] + np.arange(BLOCK_TOKENS)).astype("<i4")
    return tokens.reshape(-1)[:input_length].tobytes()


def read_trace(path: Path | str, limit: int | None = None) -> Iterator[TraceRequest]:
    """The requests of `path` in order, the first `limit` of them (None: all).

    Reads as it is iterated and holds one line at a time. Raises InputError, naming the file and
    the line: at the call for a path that cannot be opened or a limit below 1, later for a line
    that is not a request and for a trace without one.
    """
    path = Path(path)
    if limit is not None and limit < 1:
        raise InputError(
            f"{limit} requests cannot be replayed", remedy="ask for at least 1", where=Where(path)
        )
    _open(path).close()
    return _requests(path, limit)


def _requests(path: Path, limit: int | None) -> Iterator[TraceRequest]:
    count = 0
    with _open(path) as file:
        number = 0
        while limit is None or count < limit:
            line = file.readline(MAX_LINE_BYTES + 1)
            number += 1
            if not line:
                break
            if len(line) > MAX_LINE_BYTES:
                raise InputError(
                    f"the line is longer than {MAX_LINE_BYTES} bytes",
                    remedy="give a JSONL file: one request a line",
                    where=Where(path, number),
                )
            if line.isspace():
                continue
            yield _parse(line, Where(path, number))
            count += 1
    if count == 0:
        raise InputError(
            "the trace holds no request",
            remedy="give a JSONL file with one request a line",
            where=Where(path),
        )


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError:
        message, remedy = "there is no such file", "check the path of the trace"
    except IsADirectoryError:
        message, remedy = "this is a directory", "name a JSONL file"
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else str(exc)
        message, remedy = f"cannot be read: {reason}", "name a JSONL file that you may read"
    raise InputError(message, remedy=remedy, where=Where(path))


def _parse(line: bytes, where: Where) -> TraceRequest:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InputError(
            f"not JSON: {exc}", remedy="each line must be one JSON object", where=where
        ) from None
    if not isinstance(value, dict):
        raise _wrong(where, None, f"a JSON {type(value).__name__}, not an object")
    for name in _FIELDS:
        if name not in value:
            raise _wrong(where, name, "the field is missing")
    timestamp = value["timestamp"]
    if isinstance(timestamp, bool) or not isinstance(timestamp, (int, float)) or timestamp < 0:
        raise _wrong(where, "timestamp", f"{_short(timestamp)} is not a time in ms, 0 or more")
    input_length = _length(value, "input_length", 1, where)
    output_length = _length(value, "output_length", 0, where)
    return TraceRequest(
        timestamp_ms=float(timestamp),
        input_length=input_length,
        output_length=output_length,
        hash_ids=_hash_ids(value["hash_ids"], input_length, where),
        line=where.line or 0,
    )


def _length(value: dict[str, Any], name: str, least: int, where: Where) -> int:
    length = value[name]
    if not isinstance(length, int) or isinstance(length, bool):
        raise _wrong(where, name, f"{_short(length)} is not a whole number")
    if not least <= length <= _MAX_TOKENS:
        raise _wrong(where, name, f"{_short(length)} is not in {least} … {_MAX_TOKENS}")
    return length


def _hash_ids(ids: Any, input_length: int, where: Where) -> tuple[int, ...]:
    if not isinstance(ids, list):
        raise _wrong(where, "hash_ids", f"{_short(ids)} is not a list")
    for i, hash_id in enumerate(ids):
        if type(hash_id) is not int:
            raise _wrong(where, f"hash_ids[{i}]", f"{_short(hash_id)} is not a whole number")
        if not 0 <= hash_id <= MAX_HASH_ID:
            raise _wrong(
                where,
                f"hash_ids[{i}]",
                f"{_short(hash_id)} is not in 0 … {MAX_HASH_ID} (tokens are int32)",
            )
    need = -(-input_length // BLOCK_TOKENS)
    if len(ids) < need:
        raise _wrong(
            where,
            "hash_ids",
            f"{len(ids)} ids do not cover {input_length} tokens: "
            f"{need} blocks of {BLOCK_TOKENS} are needed",
        )
    return tuple(ids)


def _wrong(where: Where, field: str | None, message: str) -> InputError:
    return InputError(
        message,
        remedy=f"a request has the fields {', '.join(_FIELDS)}, as in Mooncake's traces",
        where=Where(where.file, where.line, field),
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "…"
