"""The staging pool: geometry, settings, sharing, and the ways in which pages come back late."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstrata.errors import ConfigError, IntegrityError, KvstrataError
from kvstrata.staging import (
    ALIGNMENT,
    PinnedHostBufferPool,
    SlotKind,
    SlotRequest,
    Slots,
    StagingSettings,
    aligned,
    base,
)

MakePool = Callable[..., PinnedHostBufferPool]
PAGE_BYTES = {"kv": 5000, "index": 96}


class Wish:
    """A request that notes what became of it."""

    def __init__(self, kind: SlotKind, count: int, backend: str | None = None, **more: Any) -> None:
        self.slots: Slots | None = None
        self.cause = ""
        self.request = SlotRequest(kind, count, self._granted, self._refused, backend, **more)

    def _granted(self, slots: Slots) -> None:
        assert self.slots is None
        assert not self.cause
        self.slots = slots

    def _refused(self, cause: str) -> None:
        assert self.slots is None
        assert not self.cause
        self.cause = cause

    @property
    def waits(self) -> bool:
        return self.slots is None and not self.cause


def ask(
    target: PinnedHostBufferPool,
    kind: SlotKind,
    count: int,
    backend: str | None = None,
    **more: Any,
) -> Wish:
    wish = Wish(kind, count, backend, **more)
    target.request(wish.request)
    return wish


def load(target: PinnedHostBufferPool, count: int, backend: str | None = None) -> Wish:
    return ask(target, SlotKind.LOAD, count, backend)


def write(target: PinnedHostBufferPool, count: int, backend: str | None = None) -> Wish:
    return ask(target, SlotKind.WRITE, count, backend)


def give_back(target: PinnedHostBufferPool, wish: Wish) -> None:
    slots, wish.slots = wish.slots, None
    assert slots is not None
    if wish.request.backend:
        target.end_lend(wish.request.backend, wish.request.count)
    target.give_back(slots)


# ── memory ───────────────────────────────────────────────────────────────────────────────────────


def test_pages_are_aligned_apart_and_as_large_as_they_should(make_pool: MakePool) -> None:
    target = make_pool(6)
    assert [aligned(n) for n in (1, 4096, 4097)] == [4096, 4096, 8192]
    base = target.region.array.ctypes.data
    taken: set[int] = set()
    for name, nbytes in PAGE_BYTES.items():
        array = target.array(name)
        assert array.shape == (6, aligned(nbytes))
        for page in range(6):
            payload = target.payload(name, page)
            assert (payload.nbytes, payload.format, payload.readonly) == (nbytes, "B", False)
            address = np.frombuffer(payload, np.uint8).ctypes.data
            assert address % ALIGNMENT == 0
            span = set(range(address - base, address - base + nbytes))
            assert not span & taken
            taken |= span
            payload[:] = bytes([page + 1]) * nbytes
            assert (array[page, :nbytes] == page + 1).all()
            assert (array[page, nbytes:] == 0).all(), "the padding is nobody's"


def test_order_and_stamps_are_what_the_caller_wants() -> None:
    target = PinnedHostBufferPool(
        1,
        PAGE_BYTES,
        StagingSettings(5 * 12288),
        stamp_source=iter([40, 30, 20]),
        order=lambda n: np.arange(n)[::-1],
    )
    slots = load(target, 2).slots
    assert slots is not None
    assert {name: pages.tolist() for name, pages in slots.items()} == {
        "kv": [4, 3],
        "index": [4, 3],
    }
    target.close()


# ── settings ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"total_bytes": 0}, "staging.bytes"),
        ({"total_bytes": -(2**40)}, "staging.bytes"),
        ({"total_bytes": 4 * 12288 - 1}, "staging.bytes"),
        ({"total_bytes": 2**62}, "staging.bytes"),
        ({"load_reserve": 1.0}, "staging.load_reserve"),
        ({"load_reserve": -0.1}, "staging.load_reserve"),
        ({"load_reserve": float("nan")}, "staging.load_reserve"),
        ({"backend_cap": 0.0}, "staging.backend_cap"),
        ({"backend_cap": 1.5}, "staging.backend_cap"),
    ],
    ids=str,
)
def test_impossible_settings_are_config_errors(settings: dict[str, Any], key: str) -> None:
    """Before anything is allocated, with the place and a remedy."""
    with pytest.raises(ConfigError) as caught:
        PinnedHostBufferPool(1, PAGE_BYTES, StagingSettings(**{"total_bytes": 2**20, **settings}))
    assert caught.value.where.key == key
    assert caught.value.remedy


def test_more_than_the_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "available_memory_bytes", lambda: 100_000)
    with pytest.raises(ConfigError, match="100000 bytes of memory are available"):
        PinnedHostBufferPool(1, PAGE_BYTES, StagingSettings(100_001))
    monkeypatch.setattr(base, "available_memory_bytes", lambda: None)  # unknown: let it try
    PinnedHostBufferPool(1, PAGE_BYTES, StagingSettings(100_001)).close()


@pytest.mark.parametrize("load_reserve", [0.0, 0.01, 0.5, 0.99, 0.9999999999999999])
@pytest.mark.parametrize("backend_cap", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("pages", [4, 5, 40])
def test_whatever_the_shares_everything_can_be_granted(
    make_pool: MakePool, pages: int, load_reserve: float, backend_cap: float
) -> None:
    """A request that the windows allow is granted when the pool is empty: no share is zero."""
    target = make_pool(pages, load_reserve=load_reserve, backend_cap=backend_cap)
    assert 1 <= target.write_window <= target.load_window <= pages
    for kind, count, backend in (
        (SlotKind.LOAD, target.load_window, "a"),
        (SlotKind.WRITE, target.write_window, "a"),
        (SlotKind.LOAD, pages, None),
        (SlotKind.WRITE, pages - target.reserve_pages, None),
    ):
        wish = ask(target, kind, count, backend)
        assert wish.slots is not None
        give_back(target, wish)
    assert load(target, pages + 1).cause == "capacity"
    assert load(target, target.load_window + 1, "a").cause == "capacity"
    assert write(target, target.write_window + 1, "a").cause == "capacity"


# ── who goes first ───────────────────────────────────────────────────────────────────────────────


def test_a_load_overtakes_writes_and_finds_its_reserve(make_pool: MakePool) -> None:
    target = make_pool(12)  # 3 of them for loads only
    first = write(target, 6)
    waiting = write(target, 4)
    assert first.slots is not None
    assert waiting.waits, "it would leave 2"
    assert load(target, 3).slots is not None
    later = load(target, 4)
    assert later.waits
    give_back(target, first)
    assert later.slots is not None
    assert waiting.waits
    give_back(target, later)
    assert waiting.slots is not None


def test_a_small_write_does_not_take_what_a_large_load_waits_for(make_pool: MakePool) -> None:
    target = make_pool(12)
    held = load(target, 6)
    large, small = load(target, 7), write(target, 1)
    assert large.waits
    assert small.waits, "it would fit"
    give_back(target, held)
    assert large.slots is not None
    assert small.slots is not None


def test_a_load_of_a_backend_finds_a_share_that_writes_leave(make_pool: MakePool) -> None:
    target = make_pool(12)  # a backend may have 9, its writes 6
    assert write(target, 6, "a").slots is not None
    assert write(target, 1, "a").waits
    assert load(target, 3, "a").slots is not None
    assert load(target, 1, "a").waits
    assert target.lent("a") == target.cap_pages == 9


def test_a_backend_at_its_cap_holds_up_nobody_else(make_pool: MakePool) -> None:
    """B057, B062: it hangs, all it was lent is quarantined; the rest of the pool goes on."""
    target = make_pool(12)
    hung = load(target, 9, "hung")
    assert hung.slots is not None
    for name, pages in hung.slots.items():
        target.tables[name].begin_load(pages)
        target.tables[name].quarantine(pages)
    more = [load(target, 2, "hung"), ask(target, SlotKind.WRITE, 2, "hung", pages_needed=False)]
    assert all(wish.waits for wish in more)
    assert (target.freeing, min(t.stuck for t in target.tables.values())) == (0, 9)
    other, local = load(target, 2, "other"), load(target, 1)
    assert other.slots is not None
    assert local.slots is not None
    give_back(target, other)
    give_back(target, local)
    assert target.free == 3, "what hangs stays away"
    target.check_integrity()
    give_back(target, hung)  # the late completion
    assert target.free + 2 == 12
    assert not any(wish.waits for wish in more)


def test_a_backend_that_hangs_with_its_whole_share_is_not_waited_for(make_pool: MakePool) -> None:
    target = make_pool(12)
    hung, more = load(target, 9, "hung"), load(target, 2, "hung")
    assert target.refuse_stuck("hung") == 0, "nothing is late"
    for name, pages in (hung.slots or {}).items():
        target.tables[name].begin_load(pages)
        target.tables[name].quarantine(pages)
    assert (target.refuse_stuck("hung"), target.refuse_stuck("hung")) == (1, 0)
    assert more.cause == "unavailable"
    give_back(target, hung)
    assert target.free == 12


def test_a_store_has_pages_that_nothing_else_takes() -> None:
    """Else it could wait for a page that is freed only when a store behind it has read it."""
    target = PinnedHostBufferPool(1, PAGE_BYTES, StagingSettings(16 * 12288), store_share=1 / 8)
    assert (target.store_pages, target.store_window, target.load_window) == (2, 2, 12)
    stay = [load(target, 12), load(target, 2)]
    assert all(wish.slots is not None for wish in stay)
    assert load(target, 1).waits, "two are left, for stores"
    first, second = write(target, 2, "a"), write(target, 1, "a")
    assert first.slots is not None
    assert second.waits
    target.check_integrity()
    give_back(target, first)
    assert second.slots is not None
    give_back(target, second)
    assert target.free == 2
    give_back(target, stay[1])
    assert target.free == 3, "one is granted to the load that waits"
    target.close()


def test_a_lend_needs_no_pages(make_pool: MakePool) -> None:
    target = make_pool(4)
    held = load(target, 4)
    lend = ask(target, SlotKind.WRITE, 1, "a", pages_needed=False)
    assert held.slots is not None
    assert lend.slots == {}
    assert target.lent("a") == 1


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_full_pool_never_spins_and_never_waits_for_ever(make_pool: MakePool) -> None:
    """B044: all pages pinned; the next request ends with a cause when its time has come."""
    target = make_pool(4)
    pinned = [load(target, 1) for _ in range(4)]
    start = time.process_time()
    late = ask(target, SlotKind.LOAD, 1, end_s=10.0)
    assert target.expire(9.0) == 10.0
    assert late.waits
    assert target.waiting == 1
    assert target.expire(10.0) == float("inf")
    assert late.cause == "timeout"
    assert target.waiting == 0
    assert time.process_time() - start < 1.0
    for wish in pinned:
        give_back(target, wish)
    assert target.free == 4


def test_what_was_refused_took_nothing(make_pool: MakePool) -> None:
    """B045: no page may pass for backed up when there was no room for it."""
    target = make_pool(4)
    load(target, 4)
    before = {name: table.counts() for name, table in target.tables.items()}
    refused = write(target, 4)
    waiting = write(target, 1, "a")
    target.cancel(waiting.request)
    assert (refused.cause, waiting.cause) == ("capacity", "cancelled")
    assert (refused.slots, waiting.slots) == (None, None)
    assert {name: table.counts() for name, table in target.tables.items()} == before
    assert target.lent("a") == 0
    target.cancel(waiting.request)  # again: nothing happens


def test_cancelling_the_head_lets_the_next_one_go(make_pool: MakePool) -> None:
    target = make_pool(4)
    held = load(target, 2)
    head, behind = load(target, 3), load(target, 2)
    assert behind.waits, "in order within a kind"
    target.cancel(head.request)
    assert behind.slots is not None
    give_back(target, held)


def test_close_refuses_what_waits_and_what_comes(make_pool: MakePool) -> None:
    target = make_pool(4)
    held = load(target, 4)
    waiting = [load(target, 1), write(target, 1), load(target, 1, "a")]
    target.stop("closed")
    assert [wish.cause for wish in waiting] == ["closed"] * 3
    assert load(target, 1).cause == "closed"
    give_back(target, held)
    target.check_integrity()
    target.close()
    target.close()
    assert target.region.fd == -1


def test_a_page_is_given_back_once(make_pool: MakePool) -> None:
    """B092: a second, late acknowledgement frees nothing twice."""
    target = make_pool(4)
    wish = load(target, 2, "a")
    slots = wish.slots
    assert slots is not None
    give_back(target, wish)
    with pytest.raises(IntegrityError):
        target.give_back(slots)
    with pytest.raises(IntegrityError):
        target.end_lend("a", 1)
    assert (target.free, target.lent("a")) == (4, 0)
    target.check_integrity()


def test_callbacks_may_ask_and_give_back(make_pool: MakePool) -> None:
    """A grant that gives its pages back at once and asks anew: a loop, not a recursion."""
    target = make_pool(4)
    rounds: list[int] = []

    def granted(slots: Slots) -> None:
        rounds.append(1)
        target.give_back(slots)
        if len(rounds) < 5000:
            target.request(SlotRequest(SlotKind.LOAD, 4, granted, pytest.fail))

    target.request(SlotRequest(SlotKind.LOAD, 4, granted, pytest.fail))
    assert (len(rounds), target.free) == (5000, 4)


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (lambda p: p._lent.update(a=99), "lent beyond the cap"),
        (lambda p: p._waiting.add(Wish(SlotKind.LOAD, 1).request), "could be granted"),
        (lambda p: p._waiting.add(Wish(SlotKind.WRITE, 1).request), "could be granted"),
        (lambda p: p.tables["kv"]._state.fill(4), "free list"),
        (lambda p: setattr(p, "store_pages", 5), "5 pages are kept for stores, 4 free"),
    ],
)
def test_check_integrity_finds(
    make_pool: MakePool, breakage: Callable[[PinnedHostBufferPool], None], message: str
) -> None:
    target = make_pool(4)
    target.check_integrity()
    breakage(target)
    with pytest.raises(IntegrityError, match=message):
        target.check_integrity()


def test_requests_that_wait_in_a_stopped_pool_are_found(make_pool: MakePool) -> None:
    target = make_pool(4)
    load(target, 4)
    target.stop("closed")
    target._waiting.add(Wish(SlotKind.LOAD, 1).request)
    with pytest.raises(KvstrataError, match="has stopped"):
        target.check_integrity()
