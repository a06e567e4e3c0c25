"""What names a physical thing on the far side of the boundary: tiers, handles, page runs, extents.

All values are frozen msgspec structs: cheap to encode for another process, without an address, a
tensor or a stream in them. Ids are the runtime's; nobody else does arithmetic on them.
"""

from __future__ import annotations

import enum

import msgspec


class Tier(enum.IntEnum):
    """Where the bytes of a page are."""

    L1 = 1
    """Device memory."""
    L2 = 2
    """Pinned host memory."""
    L3 = 3
    """Storage, behind a backend."""


class StagingMode(enum.Enum):
    """What host memory is for."""

    CACHE = "cache"
    """L2 is a tier of its own: pages stay."""
    BUFFER_ONLY = "buffer_only"
    """Host memory is a window between L1 and L3; nothing stays in it."""


class RequestRuntimeHandle(msgspec.Struct, frozen=True, array_like=True):
    """A request's row in the runtime. `generation` differs each time a slot is used again."""

    runtime_id: int
    slot_id: int
    generation: int


class PageRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Pages `first_page … first_page + page_count - 1` of one pool."""

    first_page: int
    page_count: int


class CacheExtentRef(msgspec.Struct, frozen=True, array_like=True):
    """Pages of one pool in one tier, in the order of the positions they hold.

    The runtime allocates an extent with one `generation` and keeps that number as the stamp of
    each page; an extent whose generation is not the stamp of all its pages is stale. A slice of an
    extent is an extent.
    """

    runtime_id: int
    generation: int
    tier: Tier
    pool: str
    page_runs: tuple[PageRun, ...]

    @property
    def page_count(self) -> int:
        return sum(run.page_count for run in self.page_runs)

    def slice(self, start: int, stop: int) -> CacheExtentRef:
        """The pages `start … stop - 1` of this extent."""
        runs: list[PageRun] = []
        at = 0
        for run in self.page_runs:
            end = at + run.page_count
            if end > start:
                if at >= start and end <= stop:
                    runs.append(run)
                else:
                    first = max(start - at, 0)
                    runs.append(PageRun(run.first_page + first, min(stop, end) - at - first))
                if end >= stop:
                    break
            at = end
        return CacheExtentRef(self.runtime_id, self.generation, self.tier, self.pool, tuple(runs))


Extents = tuple[CacheExtentRef, ...]
"""Consecutive pages of a prefix: the extents of each pool in order of position, and every pool
holds the same number of pages. The pools may be interleaved; `by_pool` sorts them apart."""


def by_pool(extents: Extents) -> dict[str, list[CacheExtentRef]]:
    """Group by pool; the order within a pool is kept."""
    groups: dict[str, list[CacheExtentRef]] = {}
    for extent in extents:
        groups.setdefault(extent.pool, []).append(extent)
    return groups


def page_count(extents: Extents) -> int:
    """How many pages of the prefix `extents` cover (the least over the pools)."""
    if not extents:
        return 0
    return min(sum(e.page_count for e in group) for group in by_pool(extents).values())


def slice_extents(extents: Extents, start: int, stop: int) -> Extents:
    """Pages `start … stop - 1` of the prefix that `extents` cover, in every pool."""
    out: list[CacheExtentRef] = []
    for group in by_pool(extents).values():
        at = 0
        for extent in group:
            count = extent.page_count
            first, last = max(start - at, 0), min(stop - at, count)
            if first < last:
                whole = first == 0 and last == count
                out.append(extent if whole else extent.slice(first, last))
            at += count
    return tuple(out)
