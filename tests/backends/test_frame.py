"""The frame: every wrong bit is noticed, and nothing in it is ever interpreted."""

from __future__ import annotations

import pickle
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.backends import ObjectId
from kvstrata.backends.frame import (
    HEADER_BYTES,
    FrameHeader,
    encode_header,
    parse_header,
    payload_checksum,
    verify,
)
from kvstrata.errors import CorruptFrameError

NAME = ObjectId(b"n" * 32, b"k" * 32)
PARENT = ObjectId(b"n" * 32, b"p" * 32)
PAYLOAD = bytes(range(256)) * 16


def frame(payload: bytes = PAYLOAD, name: ObjectId = NAME, depth: int = 7) -> memoryview:
    header = memoryview(bytearray(b"\xaa" * HEADER_BYTES))
    encode_header(header, name, PARENT if depth else None, depth, memoryview(payload))
    return header


def check(header: memoryview, payload: bytes, name: ObjectId = NAME) -> FrameHeader:
    parsed = parse_header(header)
    verify(parsed, name, memoryview(payload))
    return parsed


@given(st.binary(max_size=300), st.integers(0, 2**63), st.binary(min_size=32, max_size=32))
def test_round_trip(payload: bytes, depth: int, key: bytes) -> None:
    name = ObjectId(b"n" * 32, key)
    header = memoryview(bytearray(HEADER_BYTES))
    encode_header(header, name, PARENT if depth else None, depth, memoryview(payload))
    parsed = check(header, payload, name)
    assert parsed.object == name
    assert parsed.depth == depth
    assert parsed.parent == (PARENT if depth else None)
    assert parsed.logical_bytes == parsed.stored_bytes == len(payload)


def test_layout_is_the_documented_one() -> None:
    """Another program can read a frame by the table in the docstring."""
    header = bytes(frame())
    assert header[:8] == b"KVSTRATA"
    assert struct.unpack_from("<HHHH", header, 8) == (1, 1, 0, 0)
    assert header[16:48] == NAME.namespace
    assert header[48:80] == NAME.key
    assert header[80:112] == PARENT.key
    assert struct.unpack_from("<QQQQ", header, 112) == (
        7,
        len(PAYLOAD),
        len(PAYLOAD),
        payload_checksum(PAYLOAD),
    )
    assert header[144:4088] == bytes(3944)
    assert struct.unpack_from("<Q", header, 4088)[0] == payload_checksum(header[:4088])


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_any_flipped_bit_of_the_header(bit: int) -> None:
    """B002: right length, wrong bytes. The padding counts too."""
    header = frame()
    header[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptFrameError):
        check(header, PAYLOAD)


@given(st.integers(0, len(PAYLOAD) * 8 - 1))
def test_any_flipped_bit_of_the_payload(bit: int) -> None:
    """B002"""
    payload = bytearray(PAYLOAD)
    payload[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptFrameError, match="payload's checksum"):
        check(frame(), bytes(payload))


def test_reasons() -> None:
    """B002, B012, B014, B015: another page, another namespace, another length of page."""
    with pytest.raises(CorruptFrameError, match="frame of page"):
        check(frame(), PAYLOAD, ObjectId(NAME.namespace, b"o" * 32))
    with pytest.raises(CorruptFrameError, match="namespace"):
        check(frame(), PAYLOAD, ObjectId(b"o" * 32, NAME.key))
    with pytest.raises(CorruptFrameError, match="4096 bytes of payload, 8192 expected"):
        check(frame(), PAYLOAD * 2)
    with pytest.raises(CorruptFrameError, match="only 100 of 4096"):
        parse_header(frame()[:100])
    with pytest.raises(CorruptFrameError, match="not a frame"):
        parse_header(memoryview(bytes(HEADER_BYTES)))


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [(8, 2, "format version 2"), (10, 9, "checksum kind 9"), (12, 3, "codec 3")],
)
def test_what_a_later_version_may_write(offset: int, value: int, reason: str) -> None:
    """A whole frame with a field this program does not know is refused, not guessed at."""
    header = frame()
    struct.pack_into("<H", header, offset, value)
    struct.pack_into("<Q", header, HEADER_BYTES - 8, payload_checksum(header[:-8]))
    with pytest.raises(CorruptFrameError, match=reason):
        check(header, PAYLOAD)


class Bomb:
    """Whoever unpickles it ends the process."""

    def __reduce__(self) -> tuple[object, tuple[int]]:
        import os

        return os._exit, (66,)


def test_pickle_bomb_is_only_bytes() -> None:
    """B033: in a payload it comes back as it is, in place of a header it is no frame."""
    bomb = pickle.dumps(Bomb())
    assert check(frame(bomb), bomb).stored_bytes == len(bomb)
    with pytest.raises(CorruptFrameError, match="not a frame"):
        parse_header(memoryview(bomb.ljust(HEADER_BYTES, b".")))
