"""Traces: reading, refusing, the shipped one."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstrata.configs import load_config
from kvstrata.errors import InputError
from kvstrata.tools.small_trace import CONVERSATIONS, TURNS, small_trace
from kvstrata.tools.trace import (
    BLOCK_TOKENS,
    MAX_HASH_ID,
    TraceRequest,
    block_tokens_of,
    read_trace,
    shipped_trace,
)

GOOD = {"timestamp": 3, "input_length": 513, "output_length": 7, "hash_ids": [4, 9]}

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write lines (texts, bytes, or values as JSON) to a file."""

    def run(*lines: object) -> Path:
        path = tmp_path / "t.jsonl"
        raw = [
            line if isinstance(line, bytes) else
            line.encode() if isinstance(line, str) else json.dumps(line).encode()
            for line in lines
        ]  # fmt: skip
        path.write_bytes(b"".join(line + b"\n" for line in raw))
        return path

    return run


def test_a_request(write: Write) -> None:
    path = write("", GOOD, "  ", {**GOOD, "timestamp": 1.5, "more": None})
    first, second = read_trace(path)
    assert first == TraceRequest(3.0, 513, 7, (4, 9), 2)
    assert (second.timestamp_ms, second.line) == (1.5, 4)


def test_limit(write: Write) -> None:
    path = write(GOOD, GOOD, "not json")
    assert len(list(read_trace(path, 2))) == 2
    assert len(list(read_trace(str(write(GOOD)), 5))) == 1
    for limit in (0, -3):
        with pytest.raises(InputError, match=f"{limit} requests"):
            read_trace(path, limit)


def test_tokens_of_blocks() -> None:
    tokens = struct.unpack("<513i", block_tokens_of([2, 0], 513))
    assert tokens[:512] == tuple(range(1024, 1536))
    assert tokens[512] == 0
    assert block_tokens_of([], 0) == b""
    last = struct.unpack("<512i", block_tokens_of([MAX_HASH_ID], 512))
    assert last[-1] == 2**31 - 1
    assert TraceRequest(0, 3, 1, (1,), 1).prompt() == struct.pack("<3i", 512, 513, 514)


def _with(**fields: Any) -> dict[str, Any]:
    return {**GOOD, **fields}


def _without(name: str) -> dict[str, Any]:
    return {k: v for k, v in GOOD.items() if k != name}


@pytest.mark.parametrize(
    ("line", "field", "message"),
    [
        ("not json", None, "not JSON"),
        ('{"timestamp": 1', None, "not JSON"),
        (b"\xff\xfe", None, "not JSON"),
        ("[" * 100_000, None, "not JSON"),
        ("[1]", None, "a JSON list, not an object"),
        ("null", None, "not an object"),
        *[(_without(name), name, "missing") for name in GOOD],
        (_with(timestamp="1"), "timestamp", "'1' is not a time"),
        (_with(timestamp=-1), "timestamp", "-1 is not a time"),
        (_with(timestamp=True), "timestamp", "True is not a time"),
        (_with(input_length=1.5), "input_length", "1.5 is not a whole number"),
        (_with(input_length=True), "input_length", "not a whole number"),
        (_with(input_length=0), "input_length", "0 is not in 1"),
        (_with(input_length=2**31), "input_length", "is not in 1"),
        (_with(output_length=-1), "output_length", "-1 is not in 0"),
        (_with(output_length=None), "output_length", "None is not a whole number"),
        (_with(hash_ids="46"), "hash_ids", "'46' is not a list"),
        (_with(hash_ids=[4, "9"]), "hash_ids[1]", "'9' is not a whole number"),
        (_with(hash_ids=[4, 9.0]), "hash_ids[1]", "9.0 is not a whole number"),
        (_with(hash_ids=[True, 9]), "hash_ids[0]", "True is not a whole number"),
        (_with(hash_ids=[-1, 9]), "hash_ids[0]", "-1 is not in 0"),
        (_with(hash_ids=[4, MAX_HASH_ID + 1]), "hash_ids[1]", "int32"),
        (_with(hash_ids=[4, 10**60]), "hash_ids[1]", "is not in 0"),
        (_with(hash_ids=[4]), "hash_ids", "1 ids do not cover 513 tokens: 2 blocks"),
        (_with(hash_ids=[]), "hash_ids", "0 ids do not cover"),
    ],
)
def test_a_line_that_is_no_request(
    write: Write, line: object, field: str | None, message: str
) -> None:
    path = write(GOOD, line, GOOD)
    requests = read_trace(path)
    assert next(requests).input_length == 513
    with pytest.raises(InputError) as caught:
        next(requests)
    error = caught.value
    assert (error.where.file, error.where.line, error.where.key) == (path, 2, field)
    assert message in str(error)
    assert error.remedy
    assert len(str(error)) < 500


def test_files_that_are_no_trace(tmp_path: Path, write: Write) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="directory"):
        read_trace(tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        read_trace("a\0b")
    for path in (write(), write("", " ")):
        with pytest.raises(InputError, match="holds no request"):
            list(read_trace(path))
    with pytest.raises(InputError, match="longer than"):
        list(read_trace("/dev/zero"))


# ── the shipped trace ────────────────────────────────────────────────────────────────────────────


def test_shipped_trace_is_what_the_script_makes() -> None:
    assert shipped_trace().read_text() == small_trace()
    assert small_trace(1) != small_trace()
    assert small_trace(1) == small_trace(1)


def test_shipped_trace_has_hits_and_exceeds_the_small_tiers(root: Path) -> None:
    requests = list(read_trace(shipped_trace()))
    assert len(requests) == CONVERSATIONS * TURNS
    seen: set[int] = set()
    hits = 0
    for request in requests:
        ids = request.hash_ids[: request.input_length // BLOCK_TOKENS]
        hits += next((i for i, h in enumerate(ids) if h not in seen), len(ids))
        seen.update(ids)
    assert hits == 402
    local = load_config(root / "configs/local.toml")
    assert len(seen) > local.pools.pages + local.staging_pages, "L1 and L2 must not hold it"
    longest = max(r.input_length + r.output_length for r in requests)
    assert longest <= local.pools.max_context_tokens


def test_equal_ids_are_equal_prefixes() -> None:
    """A block's id names the block and all before it."""
    before: dict[int, tuple[int, ...]] = {}
    for request in read_trace(shipped_trace()):
        for i, hash_id in enumerate(request.hash_ids):
            prefix = request.hash_ids[:i]
            assert before.setdefault(hash_id, prefix) == prefix
