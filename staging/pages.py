"""The one class that knows page states: `PageTable`, used for device pools and for host staging.

    FREE → RESERVED → LOADING | COMPUTING → READY ⇄ BACKING_UP → FREEING | QUARANTINED → FREE

A page that is not FREE is kept alive by holds (rows and transfers that use it now) and by control's
claim (an extent that control was given and has not freed). Without either it is FREE again; with
holds alone, after control freed it, it is FREEING. QUARANTINED is a page whose operation was given
up (timed out, cancelled) while something may still write into it: its hold is returned only by the
late completion.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvstrata.errors import CapacityError, IntegrityError, StaleHandleError
from kvstrata.handles import CacheExtentRef, Extents, PageRun, Tier

Pages = npt.NDArray[np.int64]
"""Page numbers of one pool, one dimension, int64."""


class PageState(enum.IntEnum):
    FREE = 0
    RESERVED = 1
    LOADING = 2
    COMPUTING = 3
    READY = 4
    BACKING_UP = 5
    FREEING = 6
    QUARANTINED = 7


_FILLING = (PageState.RESERVED, PageState.LOADING, PageState.COMPUTING)
_READABLE = (PageState.READY, PageState.BACKING_UP)


def stamps() -> Iterator[int]:
    """Generation numbers: 1, 2, 3 … A runtime may use any source that never repeats."""
    return itertools.count(1)


class PageTable:
    """States, stamps, holds and claims of the pages of one pool in one tier.

    Not locked: the runtime calls it under its own lock; `extents_of` also without, of pages that
    somebody holds, whose stamps stay. All page lists are int64 arrays without
    repeats. `order` is the order in which pages are handed out at first (a test permutes it).
    """

    def __init__(
        self,
        runtime_id: int,
        tier: Tier,
        pool: str,
        total: int,
        *,
        stamp_source: Iterator[int] | None = None,
        order: Pages | None = None,
    ) -> None:
        self.runtime_id, self.tier, self.pool, self.total = runtime_id, tier, pool, total
        self._stamps = stamp_source or stamps()
        self._state = np.zeros(total, np.uint8)
        self._stamp = np.zeros(total, np.uint64)
        self._holds = np.zeros(total, np.int32)
        self._backups = np.zeros(total, np.int32)
        self._claimed = np.zeros(total, np.bool_)
        self._stranded = np.zeros(total, np.bool_)
        self._place = np.zeros(total, np.int64)
        """Scratch of `_repeats`."""
        self._leaving: set[int] = set()
        """Pages that are FREEING or QUARANTINED: few, so that a report need not look at all."""
        first = np.arange(total, dtype=np.int64) if order is None else order.astype(np.int64)
        self._free_stack = first[::-1].copy()
        self._free = total
        self.on_free: Callable[[Pages], None] | None = None
        """Hears of pages that became FREE: a test spoils them."""

    # ── taking and filling ───────────────────────────────────────────────────────────────────────

    @property
    def free(self) -> int:
        return self._free

    @property
    def freeing(self) -> int:
        """Pages that become free by themselves, when transfers end.

        Not those that a request's row still uses: they wait for control, so control must not wait
        for them.
        """
        if not self._leaving:
            return 0
        pages = self._leaving_pages()
        if self.tier is Tier.L1:
            pages = pages[self._holds[pages] == self._backups[pages]]
        return len(pages)

    @property
    def stuck(self) -> int:
        """Those of `freeing` that a backend holds beyond its deadline: nobody knows until when."""
        if not self._leaving:
            return 0
        pages = self._leaving_pages()
        late = (self._state[pages] == PageState.QUARANTINED) | self._stranded[pages]
        return int(np.count_nonzero(late))

    def _leaving_pages(self) -> Pages:
        return np.fromiter(self._leaving, np.int64, len(self._leaving))

    def reserve(self, count: int) -> Pages:
        """Take `count` pages, all or none: RESERVED, one hold each, one new stamp for all."""
        self.check_room(count)
        pages = self._free_stack[self._free - count : self._free][::-1].copy()
        self._free -= count
        self._state[pages] = PageState.RESERVED
        self._stamp[pages] = next(self._stamps)
        self._holds[pages] = 1
        return pages

    def check_room(self, count: int) -> None:
        """Raise CapacityError unless `count` pages are free."""
        if count > self._free:
            raise CapacityError(
                f"{self.tier.name} pool {self.pool!r}",
                need=count,
                free=self._free,
                freeing=self.freeing,
            )

    def begin_load(self, pages: Pages) -> None:
        self._move(pages, (PageState.RESERVED,), PageState.LOADING)

    def begin_compute(self, pages: Pages) -> None:
        self._move(pages, (PageState.RESERVED,), PageState.COMPUTING)

    def ready(self, pages: Pages) -> None:
        """The last byte is there. A page that was given up meanwhile stays as it is."""
        filling = pages[_is_in(self._state[pages], _FILLING)]
        if len(filling) != len(pages):
            self._expect(pages, (*_FILLING, PageState.FREEING, PageState.QUARANTINED))
        self._state[filling] = PageState.READY

    # ── holds and claims ─────────────────────────────────────────────────────────────────────────

    def hold(self, pages: Pages) -> None:
        """One more user of readable pages."""
        self._expect(pages, _READABLE)
        self._holds[pages] += 1

    def release(self, pages: Pages) -> None:
        """One user less; pages that nobody holds or claims become FREE."""
        left = self._holds[pages] - 1
        if (left < 0).any():
            raise IntegrityError(f"{self}: release without a hold: {pages[:8]}")
        self._holds[pages] = left
        self._settle(pages)

    def begin_backup(self, pages: Pages) -> None:
        """Hold READY pages for a copy out of them."""
        self.hold(pages)
        self._backups[pages] += 1
        self._state[pages] = PageState.BACKING_UP

    def end_backup(self, pages: Pages) -> None:
        left = self._backups[pages] - 1
        if (left < 0).any():
            raise IntegrityError(f"{self}: end_backup without begin_backup: {pages[:8]}")
        self._backups[pages] = left
        # Another backup of the page may be the one that hangs: then it is stuck as before.
        over = pages[left == 0]
        self._stranded[over] = False
        self._state[over[self._state[over] == PageState.BACKING_UP]] = PageState.READY
        self.release(pages)

    def strand(self, pages: Pages) -> None:
        """The backup of these pages has outlived its deadline; `end_backup` still has to come."""
        self._stranded[pages] = True

    def quarantine(self, pages: Pages) -> None:
        """Give up a fill whose writer may still be at work; its `release` frees the pages."""
        self._move(pages, _FILLING, PageState.QUARANTINED)
        self._leaving.update(pages.tolist())

    def claim(self, pages: Pages) -> None:
        """Hand READY pages to control, which calls them by `extents_of`."""
        self._expect(pages, _READABLE)
        if self._claimed[pages].any():
            raise IntegrityError(f"{self}: claimed twice: {pages[:8]}")
        self._claimed[pages] = True

    def unclaim(self, pages: Pages) -> None:
        """Control gave its claim up; pages in use become FREEING, others FREE."""
        if not self._claimed[pages].all():
            raise IntegrityError(f"{self}: freed twice: {pages[:8]}")
        self._claimed[pages] = False
        used = pages[self._holds[pages] > 0]
        self._state[used] = PageState.FREEING
        self._leaving.update(used.tolist())
        self._settle(pages)

    def is_free(self, pages: Pages, generation: int) -> bool:
        """Whether all of `pages`, stamped `generation`, were freed (used again counts as freed)."""
        return not (self._stamp[pages] == generation).any()

    def extents_of(self, pages: Pages) -> Extents:
        """What pages that are not FREE are called, until they are: extents with one generation
        each."""
        out: list[CacheExtentRef] = []
        marks = self._stamp[pages]
        borders = (np.flatnonzero(marks[1:] != marks[:-1]) + 1).tolist()
        for start, end in pairwise([0, *borders, len(pages)]) if len(pages) else ():
            part = pages[start:end]
            generation = int(self._stamp[part[0]])
            runs = runs_of_pages(part)
            out.append(CacheExtentRef(self.runtime_id, generation, self.tier, self.pool, runs))
        return tuple(out)

    def stamps_in_use(self) -> set[int]:
        """Stamps of all pages that are not FREE."""
        return set(self._stamp[self._state != PageState.FREE].tolist())

    def pages_of(self, extent: CacheExtentRef) -> Pages:
        """The pages of an extent that control holds. Raises StaleHandleError for any other."""
        mine = (self.runtime_id, self.tier, self.pool)
        first, count = _columns(extent.page_runs)
        # Checked before the runs are expanded: a broken peer must not make us allocate.
        named = (extent.runtime_id, extent.tier, extent.pool)
        if named != mine or not _lies_in(first, count, self.total):
            raise StaleHandleError(f"{self}: not an extent of this pool: {extent}")
        pages = _expanded(first, count)
        if len(extent.page_runs) > 1 and self._repeats(pages):
            raise StaleHandleError(f"{self}: names a page twice: {extent}")
        if not (self._claimed[pages] & (self._stamp[pages] == extent.generation)).all():
            raise StaleHandleError(f"{self}: stale extent, freed or used again: {extent}")
        return pages

    def _repeats(self, pages: Pages) -> bool:
        """Whether a page is named twice; a fifth of the time that sorting takes."""
        places = np.arange(len(pages))
        self._place[pages] = places
        return bool((self._place[pages] != places).any())

    def readable(self, pages: Pages) -> bool:
        return bool(_is_in(self._state[pages], _READABLE).all())

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _settle(self, pages: Pages) -> None:
        gone = pages[(self._holds[pages] == 0) & ~self._claimed[pages]]
        if not len(gone):
            return
        self._state[gone] = PageState.FREE
        self._stamp[gone] = 0
        if self._leaving:
            self._leaving.difference_update(gone.tolist())
        self._free_stack[self._free : self._free + len(gone)] = gone[::-1]
        self._free += len(gone)
        if self.on_free is not None:
            self.on_free(gone)

    def _move(self, pages: Pages, allowed: tuple[PageState, ...], to: PageState) -> None:
        self._expect(pages, allowed)
        self._state[pages] = to

    def _expect(self, pages: Pages, allowed: tuple[PageState, ...]) -> None:
        ok = _is_in(self._state[pages], allowed)
        if not ok.all():
            bad = int(pages[~ok][0])
            state = PageState(int(self._state[bad])).name
            names = "|".join(s.name for s in allowed)
            raise IntegrityError(f"{self}: page {bad} is {state}, not {names}")

    def counts(self) -> dict[str, int]:
        """Pages by state, for reports and tests."""
        found = np.bincount(self._state, minlength=len(PageState))
        return {state.name.lower(): int(found[state]) for state in PageState}

    def check_integrity(self) -> None:
        """Raise IntegrityError when any invariant of the table is broken."""
        state, holds, backups, claimed = self._state, self._holds, self._backups, self._claimed
        free_pages = self._free_stack[: self._free]
        is_free = state == PageState.FREE
        idle = (holds == 0) & ~claimed
        readable = _is_in(state, _READABLE)
        checks = {
            "free list repeats a page": len(np.unique(free_pages)) == self._free,
            "free list and states differ": bool(is_free[free_pages].all())
            and int(is_free.sum()) == self._free,
            "FREE and idle differ": bool((is_free == idle).all()),
            "a FREE page has a stamp": bool(((self._stamp == 0) == is_free).all()),
            "negative holds": bool((holds >= 0).all() and (backups >= 0).all()),
            "more backups than holds": bool((backups <= holds).all()),
            "BACKING_UP and backups differ": bool(
                ((state == PageState.BACKING_UP) == (backups > 0))[readable].all()
            ),
            "pages that leave": set(np.flatnonzero(state >= PageState.FREEING).tolist())
            == self._leaving,
            "a page is stranded without a backup": not self._stranded[backups == 0].any(),
            "a page that is not readable has a claim or a backup": not claimed[~readable].any()
            and not backups[~readable & (state != PageState.FREEING)].any(),
        }
        broken = [name for name, holds in checks.items() if not holds]
        if broken:
            raise IntegrityError(f"{self}: {', '.join(broken)}")

    def __repr__(self) -> str:
        return f"PageTable({self.tier.name} {self.pool!r}, {self._free}/{self.total} free)"


def _is_in(states: npt.NDArray[np.uint8], allowed: tuple[PageState, ...]) -> npt.NDArray[np.bool_]:
    """`np.isin` of few values, in a fraction of its time."""
    return _table_of(allowed)[states]


@lru_cache
def _table_of(allowed: tuple[PageState, ...]) -> npt.NDArray[np.bool_]:
    """For each state, whether it is one of them."""
    return np.isin(np.arange(len(PageState)), allowed)


def pages_of_runs(runs: tuple[PageRun, ...]) -> Pages:
    return _expanded(*_columns(runs))


def _columns(runs: tuple[PageRun, ...]) -> tuple[Pages, Pages]:
    """First pages and page counts. Beyond 64 bits they become the largest number there is."""
    try:
        # Lists: half of the time that attrgetter takes.
        first = np.fromiter([run.first_page for run in runs], np.int64, len(runs))
        return first, np.fromiter([run.page_count for run in runs], np.int64, len(runs))
    except OverflowError:
        beyond = np.full(len(runs), 1 << 62)
        return beyond, beyond


def _lies_in(first: Pages, count: Pages, total: int) -> bool:
    """Whether there are runs, all of them in a pool of `total` pages, and no more pages than it."""
    if not len(first) or first.min() < 0 or count.min() < 1:
        return False
    if first.max() >= total or count.max() > total:  # before anything is added that may overflow
        return False
    return bool((first + count).max() <= total and count.sum() <= total)


def _expanded(first: Pages, count: Pages) -> Pages:
    total = int(count.sum())
    if total == len(first):  # single pages
        return first
    return np.arange(total, dtype=np.int64) + np.repeat(first - np.cumsum(count) + count, count)


def runs_of_pages(pages: Pages) -> tuple[PageRun, ...]:
    """The shortest list of runs that names `pages` in their order."""
    first = np.concatenate(([0], np.flatnonzero(np.diff(pages) != 1) + 1))
    count = np.diff(np.append(first, len(pages)))
    return tuple(map(PageRun, pages[first].tolist(), count.tolist()))
