"""Abilities that a backend may have beside the contract: small Protocols that tools look for.

A backend without one still works with every tool; what the tool does then stands in each docstring.
Threads and buffers are as in `StorageBackend`: any thread between `open` and `close`, may block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvstrata.backends.base import ObjectId, PageResult, ReadRequest


@dataclass(frozen=True, slots=True)
class Finding:
    """Something in a store that is not as it should be."""

    kind: str
    """One word or two, the same for all findings of a kind."""
    place: str
    """The file, key or part of the store."""
    message: str
    remedy: str


@runtime_checkable
class SupportsPeek(Protocol):
    """Reads that leave no trace: what is looked at does not count as used. Without it, tools read,
    and what they read is the last to be evicted."""

    def peek(self, requests: Sequence[ReadRequest]) -> list[PageResult]:
        """As `StorageBackend.read`, but recency stays."""
        ...


@runtime_checkable
class SupportsPersist(Protocol):
    """Frames can be made to outlive a power loss. Without it, nothing that was copied here may be
    removed elsewhere."""

    def persist(self, objects: Sequence[ObjectId]) -> list[bool]:
        """True where the frame, and its name, are on the device now; False where there is none.

        Raises `StorageError` when the device refuses."""
        ...


@runtime_checkable
class SupportsAudit(Protocol):
    """A look behind the frames: what only the backend can know to be wrong. Without it, tools
    check the frames alone."""

    def audit(self) -> Iterator[Finding]:
        """Compare what is stored with the backend's own books. Changes nothing. What other
        processes write or evict meanwhile is no finding."""
        ...
