"""Frames that are there, cannot be read, and cannot be removed either."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from kvstrata.backends.base import ObjectId, PageResult
from kvstrata.boundary import Outcome

MOST = 65536
"""So many are remembered; of more, the ones found first are forgotten, and found again."""


class Unreadable:
    """What a worker knows better than its backend's `exists`. Any thread, own lock.

    A frame that no load can use must not pass for stored: its page would be computed again each
    time, and never stored. So lookups say no, and a store that finds it says why it is not stored.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._found: dict[ObjectId, tuple[PageResult, bool]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add(self, name: ObjectId, result: PageResult, is_ours: bool) -> None:
        """`result`: what a store of it is answered. `is_ours`: it may be removed."""
        with self._lock:
            self._found.pop(name, None)
            while len(self._found) >= self._most:
                del self._found[next(iter(self._found))]
            self._found[name] = (result, is_ours)

    def discard(self, names: Iterable[ObjectId]) -> None:
        """They are gone, or could be read or stored after all."""
        if self._found:
            with self._lock:
                for name in names:
                    self._found.pop(name, None)

    def get(self, name: ObjectId) -> PageResult | None:
        """Why it is not stored, though it exists."""
        found = self._found.get(name) if self._found else None
        return None if found is None else found[0]

    def removable(self, names: Iterable[ObjectId]) -> list[ObjectId]:
        """Those of `names` that are known and may be removed, if that works by now."""
        if not self._found:
            return []
        with self._lock:
            return [name for name in names if self._found.get(name, (None, False))[1]]

    def without(self, names: Sequence[ObjectId], found: Sequence[bool]) -> list[bool]:
        """`found`, the backend's answer for `names`, less what cannot be read."""
        if not self._found:
            return list(found)
        with self._lock:
            return [
                is_there and name not in self._found
                for name, is_there in zip(names, found, strict=True)
            ]

    def check_integrity(self) -> None:
        with self._lock:
            assert len(self._found) <= self._most
            assert not any(
                r.outcome.is_stored or r.outcome is Outcome.LOADED for r, _ in self._found.values()
            )
