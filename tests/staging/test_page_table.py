"""`PageTable` against a brute-force model that keeps a record a page, step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstrata.errors import CapacityError, IntegrityError, StaleHandleError
from kvstrata.handles import CacheExtentRef, PageRun, Tier
from kvstrata.staging import PageState, PageTable

TOTAL = 9
FILLING = {PageState.RESERVED, PageState.LOADING, PageState.COMPUTING}
READABLE = {PageState.READY, PageState.BACKING_UP}


def array(pages: list[int]) -> np.ndarray:
    return np.array(pages, np.int64)


@dataclass
class Page:
    state: PageState = PageState.FREE
    stamp: int = 0
    holds: int = 0
    backups: int = 0
    claimed: bool = False
    stranded: bool = False

    def settle(self) -> None:
        if not self.holds and not self.claimed:
            self.state, self.stamp = PageState.FREE, 0


ALLOWED: dict[str, Callable[[Page], bool]] = {
    "begin_load": lambda p: p.state is PageState.RESERVED,
    "begin_compute": lambda p: p.state is PageState.RESERVED,
    "ready": lambda p: p.state in FILLING,
    "hold": lambda p: p.state in READABLE,
    "release": lambda p: p.holds > p.backups,
    "begin_backup": lambda p: p.state in READABLE,
    "end_backup": lambda p: p.backups > 0,
    "strand": lambda p: p.backups > 0,
    "claim": lambda p: p.state in READABLE and not p.claimed,
    "unclaim": lambda p: p.claimed,
    "quarantine": lambda p: p.state in FILLING,
}
"""Which pages may take which step; for others it must raise, and change nothing."""


@dataclass
class Model:
    pages: list[Page] = field(default_factory=lambda: [Page() for _ in range(TOTAL)])

    def where(self, test: Callable[[Page], bool]) -> list[int]:
        return [i for i, page in enumerate(self.pages) if test(page)]

    def count(self, *states: PageState) -> int:
        return len(self.where(lambda p: p.state in states))

    def freeing(self, tier: Tier) -> int:
        """Those that nobody but transfers keeps: in L1, rows hold pages too."""
        going = (PageState.FREEING, PageState.QUARANTINED)
        waits = self.where(lambda p: p.state in going)
        if tier is Tier.L1:
            waits = [i for i in waits if self.pages[i].holds == self.pages[i].backups]
        return len(waits)

    def apply(self, name: str, pages: list[int]) -> None:
        for i in pages:
            getattr(self, f"_{name}")(self.pages[i])

    def _begin_load(self, page: Page) -> None:
        page.state = PageState.LOADING

    def _begin_compute(self, page: Page) -> None:
        page.state = PageState.COMPUTING

    def _ready(self, page: Page) -> None:
        page.state = PageState.READY

    def _hold(self, page: Page) -> None:
        page.holds += 1

    def _release(self, page: Page) -> None:
        page.holds -= 1
        page.settle()

    def _begin_backup(self, page: Page) -> None:
        page.holds += 1
        page.backups += 1
        page.state = PageState.BACKING_UP

    def _strand(self, page: Page) -> None:
        page.stranded = True

    def _end_backup(self, page: Page) -> None:
        page.backups -= 1
        page.stranded = page.stranded and page.backups > 0  # another one may hang
        if not page.backups and page.state is PageState.BACKING_UP:
            page.state = PageState.READY
        self._release(page)

    def _claim(self, page: Page) -> None:
        page.claimed = True

    def _unclaim(self, page: Page) -> None:
        page.claimed = False
        if page.holds:
            page.state = PageState.FREEING
        page.settle()

    def _quarantine(self, page: Page) -> None:
        page.state = PageState.QUARANTINED


class PageTableMachine(RuleBasedStateMachine):
    tier = Tier.L1

    def __init__(self) -> None:
        super().__init__()
        order = np.random.default_rng(3).permutation(TOTAL)
        self.stamps = iter([7, 3, 2**63 + 11, *range(100, 10_000)])
        self.table = PageTable(5, self.tier, "kv", TOTAL, stamp_source=self.stamps, order=order)
        self.model = Model()
        self.extents: list[tuple[CacheExtentRef, list[int], int]] = []
        """Every extent that was ever handed out, with its pages and their stamp."""

    @rule(count=st.integers(0, TOTAL))
    def reserve(self, count: int) -> None:
        free = self.model.count(PageState.FREE)
        if count > free:
            with pytest.raises(CapacityError) as caught:
                self.table.reserve(count)
            assert (caught.value.need, caught.value.free) == (count, free)
            assert caught.value.freeing == self.model.freeing(self.tier)
            return
        pages = self.table.reserve(count).tolist()
        assert len(set(pages)) == count
        stamps = {int(self.table._stamp[i]) for i in pages}
        assert len(stamps) == min(count, 1), "one stamp for all"
        for i in pages:
            assert self.model.pages[i] == Page(), "a page that was not free"
            self.model.pages[i] = Page(PageState.RESERVED, stamps.copy().pop(), holds=1)

    @precondition(lambda self: self.model.count(PageState.FREE) >= 3)
    @rule(claim=st.booleans())
    def make_ready(self, claim: bool) -> None:
        """A short way to pages that can do something."""
        before = self.model.where(lambda p: p.state is PageState.FREE)
        self.reserve(3)
        pages = [i for i in before if self.model.pages[i].state is PageState.RESERVED]
        for name in ("begin_load", "ready", *(["claim"] if claim else [])):
            self._take_step(name, pages)

    @precondition(lambda self: self.model.count(PageState.FREE) < TOTAL)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        names = [name for name, test in ALLOWED.items() if self.model.where(test)]
        name = data.draw(st.sampled_from(names))
        able = self.model.where(ALLOWED[name])
        pages = data.draw(st.lists(st.sampled_from(able), min_size=1, max_size=4, unique=True))
        self._take_step(name, pages)

    def _take_step(self, name: str, pages: list[int]) -> None:
        getattr(self.table, name)(array(pages))
        self.model.apply(name, pages)
        if name == "claim":
            extents = self.table.extents_of(array(pages))
            named = [i for e in extents for i in self.pages_in(e)]
            assert named == pages, "in the order that was asked for"
            for extent in extents:
                mine = self.pages_in(extent)
                stamps = {self.model.pages[i].stamp for i in mine}
                assert stamps == {extent.generation}
                assert (extent.runtime_id, extent.tier, extent.pool) == (5, self.tier, "kv")
                self.extents.append((extent, mine, extent.generation))

    @rule(data=st.data(), name=st.sampled_from(sorted(ALLOWED)))
    def refused(self, data: st.DataObject, name: str) -> None:
        """One page that may not take the step spoils it for all; nothing has changed."""
        allowed = ALLOWED[name]
        if name == "ready":  # a fill that was given up stays as it is
            silent = {PageState.FREEING, PageState.QUARANTINED}
            bad = self.model.where(lambda p: p.state not in FILLING | silent)
        elif name == "release":  # the table does not know whose hold it is
            bad = self.model.where(lambda p: p.holds == 0)
        elif name == "strand":  # checked by nobody: it changes no state
            return
        else:
            bad = self.model.where(lambda p: not allowed(p))
        if not bad:
            return
        good = self.model.where(allowed)
        pages = [data.draw(st.sampled_from(bad)), *good[:2]]
        with pytest.raises(IntegrityError):
            getattr(self.table, name)(array(pages))

    @precondition(lambda self: self.model.count(PageState.FREEING, PageState.QUARANTINED) > 0)
    @rule()
    def late_ready(self) -> None:
        given_up = self.model.where(lambda p: p.state in (PageState.FREEING, PageState.QUARANTINED))
        self.table.ready(array(given_up))

    @staticmethod
    def pages_in(extent: CacheExtentRef) -> list[int]:
        return [r.first_page + i for r in extent.page_runs for i in range(r.page_count)]

    @invariant()
    def same_as_model(self) -> None:
        table, pages = self.table, self.model.pages
        table.check_integrity()
        assert table._state.tolist() == [p.state for p in pages]
        assert table._holds.tolist() == [p.holds for p in pages]
        assert table._backups.tolist() == [p.backups for p in pages]
        assert table._stamp.tolist() == [p.stamp for p in pages]
        assert table._claimed.tolist() == [p.claimed for p in pages]
        assert table.free == self.model.count(PageState.FREE)
        assert table.freeing == self.model.freeing(self.tier)
        assert table.stuck == len(
            self.model.where(
                lambda p: (
                    p.state is PageState.QUARANTINED
                    or (p.state is PageState.FREEING and p.stranded)
                )
            )
        )
        states = Counter(p.state.name.lower() for p in pages)
        assert table.counts() == {s.name.lower(): states[s.name.lower()] for s in PageState}

    @invariant()
    def extents_resolve_exactly_while_claimed(self) -> None:
        for extent, pages, stamp in self.extents:
            live = [self.model.pages[i].claimed for i in pages]
            live = [
                a and self.model.pages[i].stamp == stamp for a, i in zip(live, pages, strict=True)
            ]
            free = not any(self.model.pages[i].stamp == stamp for i in pages)
            assert self.table.is_free(array(pages), stamp) == free
            if all(live):
                assert self.table.pages_of(extent).tolist() == pages
            else:
                with pytest.raises(StaleHandleError):
                    self.table.pages_of(extent)


class HostPageTableMachine(PageTableMachine):
    tier = Tier.L2


TestPageTable = PageTableMachine.TestCase
TestHostPageTable = HostPageTableMachine.TestCase
TestHostPageTable.pytestmark = [pytest.mark.no_cover]  # the other one goes through the same lines
TestPageTable.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestHostPageTable.settings = TestPageTable.settings


# ── extents ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def claimed() -> tuple[PageTable, CacheExtentRef]:
    """A table of 8 pages, of which 2 … 5 are claimed as one extent."""
    table = PageTable(1, Tier.L2, "kv", 8)
    table.reserve(2)
    pages = table.reserve(4)
    table.ready(pages)
    (extent,) = table.extents_of(pages)
    table.claim(pages)
    table.release(pages)
    return table, extent


def test_slices_of_an_extent_are_extents(claimed: tuple[PageTable, CacheExtentRef]) -> None:
    table, extent = claimed
    assert table.pages_of(extent.slice(1, 3)).tolist() == [3, 4]
    table.unclaim(table.pages_of(extent.slice(0, 1)))
    with pytest.raises(StaleHandleError, match="freed or used again"):
        table.pages_of(extent)
    assert table.pages_of(extent.slice(1, 4)).tolist() == [3, 4, 5]


@pytest.mark.parametrize(
    "change",
    [
        {"runtime_id": 2},
        {"tier": Tier.L1},
        {"pool": "other"},
        {"generation": 0},
        {"generation": -1},
        {"generation": 2**64 + 2},
        {"page_runs": ()},
        {"page_runs": (PageRun(-1, 2),)},
        {"page_runs": (PageRun(2, 0),)},
        {"page_runs": (PageRun(2, -1), PageRun(2, 4))},
        {"page_runs": (PageRun(5, 4),)},
        {"page_runs": (PageRun(2, 2), PageRun(3, 1))},
        {"page_runs": (PageRun(2, 2**62),)},
        {"page_runs": (PageRun(0, 8), PageRun(0, 8))},
        {"page_runs": (PageRun(0, 1),)},
    ],
    ids=str,
)
def test_hostile_extents_are_stale(
    claimed: tuple[PageTable, CacheExtentRef], change: dict[str, object]
) -> None:
    """Also those that would make us allocate terabytes, were they expanded first."""
    table, extent = claimed
    fields = {name: getattr(extent, name) for name in extent.__struct_fields__}
    with pytest.raises(StaleHandleError):
        table.pages_of(CacheExtentRef(**{**fields, **change}))
    table.check_integrity()


def test_a_page_used_again_has_another_stamp(claimed: tuple[PageTable, CacheExtentRef]) -> None:
    table, extent = claimed
    table.unclaim(table.pages_of(extent))
    pages = table.reserve(6)
    table.ready(pages)
    table.claim(pages)
    again = table.extents_of(pages)
    with pytest.raises(StaleHandleError):
        table.pages_of(extent)
    assert {e.generation for e in again} != {extent.generation}
    assert table.is_free(np.arange(2, 6), extent.generation)


def test_extents_of_pages_reserved_apart_have_their_own_generations() -> None:
    table = PageTable(1, Tier.L1, "kv", 8)
    first, second = table.reserve(2), table.reserve(3)
    both = np.concatenate((second[:1], first, second[1:]))
    table.ready(both)
    table.claim(both)
    extents = table.extents_of(both)
    assert [e.page_count for e in extents] == [1, 2, 2]
    assert extents[0].generation == extents[2].generation != extents[1].generation
    assert np.concatenate([table.pages_of(e) for e in extents]).tolist() == both.tolist()
    assert table.readable(both)


# ── quarantine: B057, B062, B092 ─────────────────────────────────────────────────────────────────


def test_a_quarantined_page_is_free_only_after_its_late_completion() -> None:
    table = PageTable(1, Tier.L2, "kv", 4)
    late = table.reserve(3)
    table.begin_load(late)
    table.quarantine(late)
    assert (table.free, table.freeing) == (1, 3)
    with pytest.raises(CapacityError) as caught:
        table.reserve(2)
    assert caught.value.freeing == 3
    table.ready(late)  # what comes late does not make the page readable
    assert not table.readable(late)
    with pytest.raises(IntegrityError):
        table.claim(late)
    table.release(late)
    assert (table.free, table.freeing) == (4, 0)
    with pytest.raises(IntegrityError, match="release without a hold"):
        table.release(late)  # a second late completion frees nothing twice
    table.check_integrity()


# ── the check itself can fail ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (lambda t: t._free_stack.__setitem__(0, t._free_stack[1]), "repeats a page"),
        (lambda t: t._state.__setitem__(7, PageState.READY), "free list and states differ"),
        (lambda t: t._holds.__setitem__(7, 1), "FREE and idle differ"),
        (lambda t: t._stamp.__setitem__(7, 3), "a FREE page has a stamp"),
        (lambda t: t._stamp.__setitem__(2, 0), "a FREE page has a stamp"),
        (lambda t: t._holds.__setitem__(2, -1), "negative holds"),
        (lambda t: t._backups.__setitem__(2, 1), "more backups than holds"),
        (lambda t: t._state.__setitem__(2, PageState.BACKING_UP), "BACKING_UP and backups"),
        (lambda t: t._state.__setitem__(2, PageState.LOADING), "not readable has a claim"),
        (lambda t: t._state.__setitem__(2, PageState.FREEING), "pages that leave"),
        (lambda t: t._stranded.__setitem__(2, True), "stranded without a backup"),
    ],
)
def test_check_integrity_finds(
    claimed: tuple[PageTable, CacheExtentRef], breakage: Callable[[PageTable], None], message: str
) -> None:
    table, _ = claimed
    table.check_integrity()
    breakage(table)
    with pytest.raises(IntegrityError, match=message):
        table.check_integrity()
