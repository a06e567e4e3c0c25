"""Keys of pages and their copies, and which segment a copy belongs on."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence

import xxhash

from kvstrata.backends.base import ObjectId

PREFIX = "kvstrata1"
_KEY = re.compile(rf"{PREFIX}/([0-9a-f]{{64}})/([0-9a-f]{{64}})(?:/([1-9]))?")


def key_of(name: ObjectId, copy: int = 0) -> str:
    """The key of a copy. The first has the plain name, so `replicas` can change at any time."""
    plain = _prefix(name.namespace) + name.key.hex()
    return f"{plain}/{copy}" if copy else plain


@functools.lru_cache(maxsize=64)
def _prefix(namespace: bytes) -> str:
    """Of all pages of a namespace; a process knows few."""
    return f"{PREFIX}/{namespace.hex()}/"


def parse_key(key: str) -> tuple[ObjectId, int] | None:
    """The page and the copy of a key; None for the key of another program."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    name = ObjectId(bytes.fromhex(match[1]), bytes.fromhex(match[2]))
    return name, int(match[3] or 0)


def ranked(name: ObjectId, segments: Sequence[str]) -> list[str]:
    """`segments` in this page's order of preference: the same everywhere, evenly spread, and
    hardly changed when one comes or goes."""
    seed = int.from_bytes(name.key[:8], "little")
    return sorted(segments, key=lambda s: xxhash.xxh3_64_intdigest(s.encode(), seed), reverse=True)


def by_segment(
    names: Iterable[tuple[int, ObjectId]], copy: int, segments: Sequence[str]
) -> dict[str, list[int]]:
    """Which pages (by index) put copy `copy` on which segment. One that has no segment of its own
    (there are fewer than copies) is in none."""
    groups: dict[str, list[int]] = {}
    if copy < len(segments):
        for i, name in names:
            groups.setdefault(ranked(name, segments)[copy], []).append(i)
    return groups
