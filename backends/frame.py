"""The frame: what one page looks like in any storage. A 4 KiB header, then the payload.

A frame explains itself: an index can be rebuilt from frames alone. All integers are little-endian.

    offset  bytes  field
    ------  -----  ---------------------------------------------------------------
         0      8  magic "KVSTRATA"
         8      2  format version (1)
        10      2  kind of the payload checksum (1: XXH3-64, seed 0)
        12      2  codec of the payload (0: none, the stored bytes are the page)
        14      2  zero
        16     32  namespace fingerprint
        48     32  page key
        80     32  key of the parent page (zeros at depth 0)
       112      8  depth: index of the page in its chain
       120      8  logical length: bytes of the page
       128      8  stored length: bytes of payload behind the header
       136      8  checksum of the stored payload
       144   3944  zero
      4088      8  XXH3-64 of bytes 0 … 4087

The kind of the checksum is a field so that a host and a device can agree on one that both compute.
Nothing in a frame is ever interpreted but these fixed fields: whatever a payload holds, it is only
bytes.
"""

from __future__ import annotations

import struct

import msgspec
import xxhash

from kvstrata.backends.base import Buffer, ObjectId
from kvstrata.boundary import KEY_BYTES
from kvstrata.errors import CorruptFrameError

HEADER_BYTES = 4096
MAGIC = b"KVSTRATA"
FORMAT_VERSION = 1
"""Part of the namespace, so that programs with different formats share no frame."""
CODEC_NONE = 0
CHECKSUM_XXH3_64 = 1

NO_PARENT = bytes(KEY_BYTES)

_FIELDS = struct.Struct("<8sHHHH32s32s32sQQQQ")
_CHECK = struct.Struct("<Q")
_CHECK_AT = HEADER_BYTES - _CHECK.size
_PADDING = bytes(_CHECK_AT - _FIELDS.size)

payload_checksum = xxhash.xxh3_64_intdigest
"""`CHECKSUM_XXH3_64` of a buffer."""


class ForeignFrameError(CorruptFrameError):
    """A frame of another format, which another version of this program may well read: to this one
    it is as good as not there, and it is not removed."""


class FrameHeader(msgspec.Struct, frozen=True):
    """The fields of a header whose own checksum was right."""

    namespace: bytes
    key: bytes
    parent_key: bytes
    """Zeros at depth 0."""
    depth: int
    codec: int
    logical_bytes: int
    stored_bytes: int
    checksum_kind: int
    checksum: int

    @property
    def object(self) -> ObjectId:
        return ObjectId(self.namespace, self.key)

    @property
    def parent(self) -> ObjectId | None:
        return None if self.depth == 0 else ObjectId(self.namespace, self.parent_key)


def encode_header(
    buffer: Buffer,
    object: ObjectId,  # noqa: A002 (the field's name everywhere else)
    parent: ObjectId | None,
    depth: int,
    payload: Buffer,
) -> None:
    """Fill the 4 KiB `buffer` with the header of `payload`; reads the whole payload once.

    The payload is stored as it is (`CODEC_NONE`).
    """
    nbytes = payload.nbytes
    _FIELDS.pack_into(
        buffer,
        0,
        MAGIC,
        FORMAT_VERSION,
        CHECKSUM_XXH3_64,
        CODEC_NONE,
        0,
        object.namespace,
        object.key,
        NO_PARENT if parent is None else parent.key,
        depth,
        nbytes,
        nbytes,
        payload_checksum(payload),
    )
    buffer[_FIELDS.size : _CHECK_AT] = _PADDING
    _CHECK.pack_into(buffer, _CHECK_AT, payload_checksum(buffer[:_CHECK_AT]))


def parse_header(buffer: Buffer) -> FrameHeader:
    """The header in the first 4 KiB of `buffer`.

    Raises `CorruptFrameError` with the reason: too short, not a frame, a wrong header checksum;
    `ForeignFrameError` for another format version, an unknown codec or checksum.
    """
    if buffer.nbytes < HEADER_BYTES:
        raise CorruptFrameError(f"only {buffer.nbytes} of {HEADER_BYTES} header bytes are there")
    (
        magic,
        version,
        checksum_kind,
        codec,
        _,
        namespace,
        key,
        parent_key,
        depth,
        logical_bytes,
        stored_bytes,
        checksum,
    ) = _FIELDS.unpack_from(buffer, 0)
    if magic != MAGIC:
        raise CorruptFrameError(f"not a frame: it begins with {magic!r}")
    if version != FORMAT_VERSION:
        raise ForeignFrameError(f"format version {version}; this program reads {FORMAT_VERSION}")
    if _CHECK.unpack_from(buffer, _CHECK_AT)[0] != payload_checksum(buffer[:_CHECK_AT]):
        raise CorruptFrameError("the header's checksum is wrong")
    if checksum_kind != CHECKSUM_XXH3_64:
        raise ForeignFrameError(f"checksum kind {checksum_kind} is unknown")
    if codec != CODEC_NONE:
        raise ForeignFrameError(f"codec {codec} is unknown")
    return FrameHeader(
        namespace,
        key,
        parent_key,
        depth,
        codec,
        logical_bytes,
        stored_bytes,
        checksum_kind,
        checksum,
    )


def verify(header: FrameHeader, expected: ObjectId, payload: Buffer) -> None:
    """Raises `CorruptFrameError` unless `payload` is the page `expected`; reads all of it once."""
    if header.namespace != expected.namespace:
        raise CorruptFrameError(f"a frame of namespace {header.namespace.hex()[:16]}… lies here")
    if header.key != expected.key:
        raise CorruptFrameError(f"the frame of page {header.key.hex()[:16]}… lies here")
    if header.stored_bytes != payload.nbytes or header.logical_bytes != payload.nbytes:
        raise CorruptFrameError(
            f"the frame holds {header.stored_bytes} bytes of payload, {payload.nbytes} expected"
        )
    if payload_checksum(payload) != header.checksum:
        raise CorruptFrameError("the payload's checksum is wrong")
