"""`PinnedHostBufferPool` against a model on plain numbers: who is granted what, and when."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstrata.handles import Extents
from kvstrata.staging import PinnedHostBufferPool, SlotKind, SlotRequest, Slots, StagingSettings

PAGES = 12
PAGE_BYTES = {"kv": 5000, "index": 96}
STRIDE = 8192 + 4096
RESERVE, CAP = 3, 9
WRITE_CAP = CAP - RESERVE

COUNTS = st.sampled_from([1, 1, 2, 2, 3, 4, 5, 6, 7, 9, 11, 13])
BACKENDS = st.sampled_from([None, "a", "a", "b"])
PATIENCE = st.sampled_from([math.inf, math.inf, 1.0, 5.0])


@dataclass(eq=False)
class Asked:
    """A request, and what became of it."""

    number: int
    kind: SlotKind
    count: int
    backend: str | None
    pages_needed: bool
    end_s: float
    slots: Slots | None = None
    outcome: str = ""
    request: SlotRequest = field(init=False)

    @property
    def cap(self) -> int:
        return CAP if self.kind is SlotKind.LOAD else WRITE_CAP

    @property
    def is_store(self) -> bool:
        return self.kind is SlotKind.WRITE and self.backend is not None

    def most(self, for_stores: int) -> int:
        pages = PAGES if self.is_store else PAGES - for_stores
        pages -= RESERVE if self.kind is SlotKind.WRITE else 0
        return pages if self.backend is None else min(self.cap, pages)


class Model:
    """The rules of the queue, told once more: numbers only."""

    def __init__(self, for_stores: int) -> None:
        self.free = PAGES
        self.for_stores = for_stores
        self.in_store = 0
        self.lent = {"a": 0, "b": 0}
        self.queue: list[Asked] = []
        self.log: list[tuple[str, int]] = []

    def ask(self, asked: Asked) -> None:
        if asked.count > asked.most(self.for_stores):
            self.log.append(("capacity", asked.number))
        else:
            self.queue.append(asked)
            self.settle()

    def leave(self, asked: list[Asked], cause: str) -> None:
        for one in asked:
            self.queue.remove(one)
            self.log.append((cause, one.number))
        self.settle()

    def settle(self) -> None:
        while (one := self.best()) is not None:
            self.queue.remove(one)
            self.log.append(("granted", one.number))
            self.free -= one.count if one.pages_needed else 0
            self.in_store += one.count if one.is_store and one.pages_needed else 0
            if one.backend:
                self.lent[one.backend] += one.count

    @property
    def kept(self) -> int:
        """Pages that all but stores leave alone now."""
        return max(0, self.for_stores - self.in_store)

    def best(self) -> Asked | None:
        loads = [r for r in self.queue if r.kind is SlotKind.LOAD and r.pages_needed]
        lends = [r for r in self.queue if not r.pages_needed]
        writes = [r for r in self.queue if r.kind is SlotKind.WRITE and r.pages_needed]
        waits_for_share: set[str] = set()
        load_waits_for_pages = False
        for queue in (loads, lends, writes):
            if queue is writes:
                own = [r for r in writes if r.is_store and r.count <= self.kept]
                if own and self.has_share(own[0], waits_for_share):
                    return own[0]
                if load_waits_for_pages:
                    return None
            for one in queue:
                if not self.has_share(one, waits_for_share):
                    continue
                keep = RESERVE if queue is writes else 0
                keep += 0 if one.is_store else self.kept
                if not one.pages_needed or self.free >= one.count + keep:
                    return one
                load_waits_for_pages = queue is loads
                break
        return None

    def has_share(self, one: Asked, waits_for_share: set[str]) -> bool:
        if one.backend and self.lent[one.backend] + one.count > one.cap:
            waits_for_share.add(one.backend)
        return one.backend not in waits_for_share

    @property
    def waiting(self) -> int:
        loads = [r.count for r in self.queue if r.kind is SlotKind.LOAD and r.pages_needed]
        writes = [r.count for r in self.queue if r.kind is SlotKind.WRITE and r.pages_needed]
        first = writes[0] + RESERVE if writes else 0
        need = sum(loads) + first
        return max(0, need + self.kept - self.free) if need else 0


class PoolMachine(RuleBasedStateMachine):
    store_share = 0.0

    def __init__(self) -> None:
        super().__init__()
        # The components number their pages in other orders, as they do after some use.
        orders = iter([np.arange(PAGES), np.arange(PAGES)[::-1]])
        self.pool = PinnedHostBufferPool(
            1,
            PAGE_BYTES,
            StagingSettings(PAGES * STRIDE),
            order=lambda n: next(orders),
            store_share=self.store_share,
        )
        assert (self.pool.pages, self.pool.reserve_pages, self.pool.cap_pages) == (
            PAGES,
            RESERVE,
            CAP,
        )
        self.model = Model(self.pool.store_pages)
        self.log: list[tuple[str, int]] = []
        self.asked: list[Asked] = []
        self.kept: list[dict[str, Extents]] = []
        self.now_s = 0.0

    def teardown(self) -> None:
        """Everything comes back: then nothing may wait any more, and all memory is free."""
        self.return_all()
        assert not self.model.queue, "wedged"
        assert all(one.outcome for one in self.asked)
        assert self.pool.free == PAGES
        assert self.pool.queued == (0, 0)
        self.pool.close()

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    @rule(count=COUNTS, backend=BACKENDS, patience_s=PATIENCE)
    def ask_load(self, count: int, backend: str | None, patience_s: float) -> None:
        self.ask(SlotKind.LOAD, count, backend, patience_s)

    @rule(count=COUNTS, backend=BACKENDS, patience_s=PATIENCE)
    def ask_write(self, count: int, backend: str | None, patience_s: float) -> None:
        self.ask(SlotKind.WRITE, count, backend, patience_s)

    @rule(count=COUNTS, backend=st.sampled_from(["a", "b"]), patience_s=PATIENCE)
    def ask_lend(self, count: int, backend: str, patience_s: float) -> None:
        self.ask(SlotKind.WRITE, count, backend, patience_s, pages_needed=False)

    def ask(
        self,
        kind: SlotKind,
        count: int,
        backend: str | None,
        patience_s: float,
        *,
        pages_needed: bool = True,
    ) -> None:
        one = Asked(len(self.asked), kind, count, backend, pages_needed, self.now_s + patience_s)

        def granted(slots: Slots) -> None:
            assert not one.outcome
            one.outcome, one.slots = "granted", slots
            self.log.append(("granted", one.number))
            wanted = dict.fromkeys(PAGE_BYTES, one.count) if one.pages_needed else {}
            assert {name: len(pages) for name, pages in slots.items()} == wanted
            if kind is SlotKind.WRITE and not one.is_store:
                assert self.pool.free >= RESERVE, "a write took from the loads' share"

        def refused(cause: str) -> None:
            assert not one.outcome
            one.outcome = cause
            self.log.append((cause, one.number))

        one.request = SlotRequest(
            kind, count, granted, refused, backend, pages_needed, end_s=one.end_s
        )
        self.asked.append(one)
        self.pool.request(one.request)
        self.model.ask(one)

    @property
    def granted(self) -> list[Asked]:
        return [one for one in self.asked if one.slots is not None]

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), lend_first=st.booleans(), quarantine=st.booleans())
    def give_back(self, data: st.DataObject, lend_first: bool, quarantine: bool) -> None:
        self._return(data.draw(st.sampled_from(self.granted)), lend_first, quarantine)

    def _return(self, one: Asked, lend_first: bool, quarantine: bool) -> None:
        slots, one.slots = one.slots, None
        assert slots is not None
        if quarantine:  # given up first: nothing becomes free until it is given back
            for name, pages in slots.items():
                self.pool.tables[name].quarantine(pages)
            self.pool.pump()
        steps = [lambda: self._end_lend(one), lambda: self._give_pages(one, slots)]
        for step in steps if lend_first else reversed(steps):
            step()

    def _end_lend(self, one: Asked) -> None:
        if one.backend:
            self.pool.end_lend(one.backend, one.count)
            self.model.lent[one.backend] -= one.count
            self.model.settle()

    def _give_pages(self, one: Asked, slots: Slots) -> None:
        self.pool.give_back(slots)
        self.model.free += one.count if one.pages_needed else 0
        self.model.in_store -= one.count if one.is_store and one.pages_needed else 0
        self.model.settle()

    @precondition(lambda self: any(one.slots and not one.is_store for one in self.asked))
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        """Pages become control's, and stay when their use has ended; those of stores do not."""
        able = [one for one in self.granted if one.slots and not one.is_store]
        one = data.draw(st.sampled_from(able))
        slots, one.slots = one.slots, None
        assert slots is not None
        tables = self.pool.tables
        names = {n: tables[n].extents_of(p) for n, p in slots.items()}
        for name, pages in slots.items():
            tables[name].ready(pages)
            tables[name].claim(pages)
            assert tables[name].extents_of(pages) == names[name]
        self.kept.append(names)
        self.pool.give_back(slots)
        self._end_lend(one)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def free_kept(self, data: st.DataObject) -> None:
        extents = self.kept.pop(data.draw(st.integers(0, len(self.kept) - 1)))
        count = 0
        for name, parts in extents.items():
            table = self.pool.tables[name]
            for extent in parts:
                table.unclaim(table.pages_of(extent))
            count = sum(extent.page_count for extent in parts)
        self.pool.pump()
        self.model.free += count
        self.model.settle()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.asked))
        self.pool.cancel(one.request)
        if one in self.model.queue:
            self.model.leave([one], "cancelled")

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0]))
    def expire(self, seconds: float) -> None:
        self.now_s += seconds
        following = self.pool.expire(self.now_s)
        late = [one for one in self.model.queue if one.end_s <= self.now_s]
        if late:
            lanes = {
                (SlotKind.LOAD, True): 0,
                (SlotKind.WRITE, False): 1,
                (SlotKind.WRITE, True): 2,
            }
            late.sort(key=lambda one: lanes[one.kind, one.pages_needed])
            self.model.leave(late, "timeout")
        assert following == min((r.end_s for r in self.model.queue), default=math.inf)

    def return_all(self) -> None:
        while self.granted or self.kept:
            for one in self.granted:
                self._return(one, lend_first=True, quarantine=False)
            while self.kept:
                extents = self.kept.pop()
                for name, parts in extents.items():
                    table = self.pool.tables[name]
                    for extent in parts:
                        table.unclaim(table.pages_of(extent))
                self.model.free += sum(e.page_count for e in extents["kv"])
                self.pool.pump()
                self.model.settle()

    # ── what holds at every moment ───────────────────────────────────────────────────────────────

    @invariant()
    def as_the_model_says(self) -> None:
        self.pool.check_integrity()
        assert self.log == self.model.log
        assert self.pool.free == self.model.free
        assert {b: self.pool.lent(b) for b in "ab"} == self.model.lent
        assert self.pool.waiting == self.model.waiting
        assert sum(self.pool.queued) == len(self.model.queue)

    @invariant()
    def nobody_has_a_page_twice(self) -> None:
        for name in PAGE_BYTES:
            held = [p for one in self.granted for p in one.slots.get(name, ())]
            assert len(set(held)) == len(held)


class PoolWithStoresMachine(PoolMachine):
    """Two pages are kept for stores."""

    store_share = 0.2


TestPool = PoolMachine.TestCase
TestPoolWithStores = PoolWithStoresMachine.TestCase
TestPool.pytestmark = [pytest.mark.no_cover]  # the other one goes through the same lines
TestPool.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestPoolWithStores.settings = TestPool.settings
