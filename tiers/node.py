"""A node of the prefix tree: a run of pages that are all in the same tiers."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvstrata.boundary import KEY_BYTES
from kvstrata.errors import IntegrityError
from kvstrata.handles import Extents, Tier, by_pool

PRUNED = -1
"""`Node.locks` of a node that is not in the tree any more."""


class L3State(enum.IntEnum):
    """What control believes about a page in L3."""

    NONE = 0
    QUEUED = 1
    """A backup to L3 is under way."""
    STORED = 2
    COPYING = 3
    """It is on its way to L2, and not in the queue for L3 yet."""

    @property
    def is_on_its_way(self) -> bool:
        return self in (L3State.QUEUED, L3State.COPYING)

    @property
    def closes_prefix(self) -> bool:
        """May a page below be stored?"""
        return self in (L3State.QUEUED, L3State.STORED)


class Node:
    """Consecutive pages of one prefix with one residency. Changed by `TreeCore` only.

    The root of a namespace stands for "page -1": its one key is the root key of the chain, and it
    is never resident. There is no object a page: 32 bytes of key, and what the extents take.
    """

    __slots__ = (
        "children",
        "first_page_index",
        "keys",
        "l1",
        "l1_children",
        "l2",
        "l2_children",
        "l3",
        "last_used",
        "locks",
        "namespace",
        "parent",
        "queued",
    )

    def __init__(
        self, parent: Node | None, namespace: bytes, keys: bytes, first_page_index: int
    ) -> None:
        self.parent = parent
        self.namespace = namespace
        self.keys = keys
        self.first_page_index = first_page_index
        self.children: dict[bytes, Node] | None = None
        """By first key; None when there are none, to save memory."""
        self.locks = 0
        """Locks on this node and on all below it."""
        self.last_used = 0
        """Tick of the tree's clock."""
        self.l1: Extents = ()
        self.l2: Extents = ()
        self.l3 = L3State.NONE
        self.l1_children = 0
        """How many children are resident in L1."""
        self.l2_children = 0
        self.queued = 0
        """Bit `1 << tier` is set while the candidate queue of that tier holds this node."""

    @property
    def page_count(self) -> int:
        return len(self.keys) // KEY_BYTES

    @property
    def last_page_index(self) -> int:
        return self.first_page_index + len(self.keys) // KEY_BYTES - 1

    @property
    def first_key(self) -> bytes:
        return self.keys[:KEY_BYTES]

    @property
    def last_key(self) -> bytes:
        return self.keys[-KEY_BYTES:]

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def is_resident(self) -> bool:
        """In any tier; in L3 as far as control knows."""
        return bool(self.l1 or self.l2 or self.l3)

    def extents(self, tier: Tier) -> Extents:
        """Where the pages are in L1 or L2; () if they are not."""
        return self.l1 if tier is Tier.L1 else self.l2

    def may_leave(self, tier: Tier) -> bool:
        """May the pages be evicted from `tier` now? Never before those of a child.

        A lock keeps pages in the best tier they are in: those that are in L1 may leave L2 all the
        same, or requests that hold L1 could starve the backups that make room in it. From L3
        "evicted" means forgotten: a stored leaf that is nowhere else.
        """
        if self.parent is None or (self.locks and not (tier is Tier.L2 and self.l1)):
            return False
        if tier is Tier.L1:
            return bool(self.l1) and not self.l1_children
        if tier is Tier.L2:
            return bool(self.l2) and not self.l2_children
        stored_only = self.l3 is L3State.STORED and not self.l1 and not self.l2
        return stored_only and not self.children

    def common_bytes(self, keys: bytes, start: int) -> int:
        """How many bytes of keys this node and `keys[start:]` share, of which the first page is
        known to be equal. Keys are chained, so a bisection finds the place where they part."""
        own = self.keys
        if keys.startswith(own, start):
            return len(own)
        low, high = 1, min(len(own), len(keys) - start) // KEY_BYTES
        while low < high:
            middle = (low + high + 1) // 2
            at = (middle - 1) * KEY_BYTES
            if keys.startswith(own[at : at + KEY_BYTES], start + at):
                low = middle
            else:
                high = middle - 1
        return low * KEY_BYTES

    def __repr__(self) -> str:
        tiers = [name for name, there in (("L1", self.l1), ("L2", self.l2)) if there]
        where = "+".join([*tiers, *([self.l3.name] if self.l3 else [])]) or "nowhere"
        state = "pruned" if self.locks == PRUNED else f"locks={self.locks}"
        return f"<Node {self.first_page_index}+{self.page_count} {where} {state}>"


@dataclass(frozen=True, slots=True)
class Match:
    """The longest resident prefix of some keys."""

    path: list[Node]
    """From the first page on, in order; the last node ends where the match ends."""
    page_count: int


def check_covers(extents: Extents, pages: int) -> None:
    """Raises `IntegrityError` unless every pool of `extents` holds exactly `pages` pages."""
    if len(extents) == 1:  # the usual case, without a dictionary
        counts = {extents[0].pool: extents[0].page_count}
    else:
        counts = {k: sum(e.page_count for e in group) for k, group in by_pool(extents).items()}
    if not counts or any(count != pages for count in counts.values()):
        raise IntegrityError(f"extents of {counts or 'no'} pages for a node of {pages}")
