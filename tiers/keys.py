"""Page keys: chained SHA-256 digests of token ids, under a namespace.

One function makes them for the tree, for storage and for whoever checks bytes; it depends on
nothing but its arguments, so the keys are the same in every process.

    root key      = SHA-256("kvstrata/root/1" ‖ fingerprint of the namespace)
    key of page i = SHA-256("kvstrata/page/1" ‖ key of page i-1, or the root key ‖ its tokens)

Tokens are int32, little-endian; a key covers a full page. Every key holds the one before it and
the first one the namespace, so equal keys mean equal namespace, position and tokens.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from typing import TYPE_CHECKING

from kvstrata.boundary import KEY_BYTES, KeyRun
from kvstrata.errors import InputError, IntegrityError, Where

if TYPE_CHECKING:
    from typing_extensions import Buffer

TOKEN_BYTES = 4
_ROOT_TAG = b"kvstrata/root/1\0"
_PAGE_TAG = b"kvstrata/page/1\0"
_PART_TAG = b"kvstrata/part/1\0"

_CHUNK_BYTES = 1984
"""hashlib gives the GIL away for updates from 2048 bytes on, to hash for about a microsecond; with
another busy thread it takes 5 ms to get it back. Longer pages are hashed in pieces of this size."""

_FORMATS = {"B", "b", "c", "<i", "<l"} | ({"i", "@i", "=i"} if sys.byteorder == "little" else set())


def token_view(tokens: Buffer) -> memoryview:
    """A flat byte view of int32 tokens: `bytes`, `array('i')`, a NumPy int32 array, …

    Lends the caller's memory; nothing is copied. Raises `InputError` for any other element type
    (int64 above all), for gaps or more than one dimension, and for a torn last token.
    """
    view = memoryview(tokens)
    if view.format not in _FORMATS or view.itemsize not in (1, TOKEN_BYTES):
        raise _bad_tokens(f"elements are {view.format!r} of {view.itemsize} bytes")
    if view.ndim != 1 or not view.c_contiguous:
        raise _bad_tokens(f"{view.ndim} dimensions, strides {view.strides}")
    if view.nbytes % TOKEN_BYTES:
        raise _bad_tokens(f"{view.nbytes} bytes are not a whole number of tokens")
    return view.cast("B") if view.format != "B" else view


def _bad_tokens(message: str) -> InputError:
    remedy = "give a contiguous, little-endian int32 buffer"
    return InputError(message, remedy=remedy, where=Where(key="tokens"))


def root_key(namespace: bytes) -> bytes:
    """The parent of the first page of every chain in the namespace with this fingerprint."""
    assert len(namespace) == KEY_BYTES, "not a namespace fingerprint"
    return hashlib.sha256(_ROOT_TAG + namespace).digest()


def page_keys(
    namespace: bytes, tokens: Buffer, page_tokens: int, parent: bytes | None = None
) -> bytes:
    """The concatenated keys of the full pages of `tokens`; tokens that fill no page are left out.

    `namespace` is a fingerprint. `parent` is the key of the page before the first token; None at
    the beginning of a prompt.
    """
    if page_tokens < 1:
        raise InputError(
            f"a page of {page_tokens} tokens",
            remedy="it must be at least 1",
            where=Where(key="page_tokens"),
        )
    key = root_key(namespace) if parent is None else parent
    assert len(key) == KEY_BYTES, "not a page key"
    view = token_view(tokens)
    page_bytes = page_tokens * TOKEN_BYTES
    view = view[: len(view) - len(view) % page_bytes]
    keys: list[bytes] = []
    start = hashlib.sha256(_PAGE_TAG).copy  # a copy is cheaper than a new hash object
    if page_bytes <= _CHUNK_BYTES:
        for (page,) in struct.iter_unpack(f"{page_bytes}s", view):
            digest = start()
            digest.update(key + page)
            key = digest.digest()
            keys.append(key)
        return b"".join(keys)
    whole, rest = divmod(page_bytes, _CHUNK_BYTES)
    for chunks in struct.iter_unpack(f"{_CHUNK_BYTES}s" * whole + f"{rest}s", view):
        digest = start()
        digest.update(key)
        for chunk in chunks:
            digest.update(chunk)
        key = digest.digest()
        keys.append(key)
    return b"".join(keys)


def partial_key(parent: bytes, tokens: Buffer) -> bytes:
    """The key of a page that is not full (yet): never equal to the key of any full page."""
    assert len(parent) == KEY_BYTES, "not a page key"
    return hashlib.sha256(b"".join((_PART_TAG, parent, token_view(tokens)))).digest()


class KeyChain:
    """The keys of one request, each computed once, while its tokens come in.

    Not thread-safe. Holds a copy of the tokens of the last, incomplete page and no others.
    """

    __slots__ = ("_tail", "keys", "namespace", "page_tokens", "root")

    def __init__(self, namespace: bytes, page_tokens: int, tokens: Buffer = b"") -> None:
        self.namespace = namespace
        self.page_tokens = page_tokens
        self.root = root_key(namespace)
        self.keys = b""
        """The keys of all full pages, concatenated."""
        self._tail = b""
        self.extend(tokens)

    def extend(self, tokens: Buffer) -> int:
        """Append tokens; returns how many pages became full."""
        view = token_view(tokens)
        data: bytes | memoryview = self._tail + view if self._tail else view
        keys = page_keys(self.namespace, data, self.page_tokens, self.last_key)
        if keys:
            self.keys += keys
        count = len(keys) // KEY_BYTES
        self._tail = bytes(data[count * self.page_tokens * TOKEN_BYTES :])
        return count

    @property
    def page_count(self) -> int:
        return len(self.keys) // KEY_BYTES

    @property
    def token_count(self) -> int:
        return self.page_count * self.page_tokens + len(self._tail) // TOKEN_BYTES

    @property
    def last_key(self) -> bytes:
        """The key that the next page has as its parent."""
        return self.keys[-KEY_BYTES:] or self.root

    def run(self, start: int = 0, stop: int | None = None) -> KeyRun:
        """The full pages `start … stop - 1` (to the last one)."""
        whole = KeyRun(self.namespace, self.root, 0, self.keys)
        stop = self.page_count if stop is None else stop
        if not 0 <= start <= stop <= self.page_count:
            raise IndexError(f"pages {start} … {stop} of {self.page_count}")
        return whole if (start, stop) == (0, self.page_count) else whole.slice(start, stop)

    def partial_key(self) -> bytes | None:
        """The key of the incomplete last page; None when there is none."""
        return partial_key(self.last_key, self._tail) if self._tail else None

    def check_integrity(self) -> None:
        """Raises `IntegrityError` unless keys are whole and the tail is shorter than a page."""
        tail = len(self._tail)
        if len(self.keys) % KEY_BYTES or tail % TOKEN_BYTES:
            raise IntegrityError(f"torn: {len(self.keys)} bytes of keys, a tail of {tail}")
        if tail >= self.page_tokens * TOKEN_BYTES:
            raise IntegrityError(f"a tail of {tail} bytes holds a full page")
