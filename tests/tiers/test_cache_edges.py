"""Edges of moving pages: evictions in the middle of things, windows, rows, no-store."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstrata.boundary import Backup, PoolCapacity, StatusReport
from kvstrata.handles import CacheExtentRef, Extents, PageRun, StagingMode, Tier
from kvstrata.tiers import (
    CacheControl,
    Deadlines,
    KeyChain,
    L3State,
    RequestState,
    TreeCore,
    policy_class,
)

PAGE = 4
NAMESPACE = bytes(range(32))


def pages(*names: int) -> list[int]:
    return [name * PAGE + i for name in names for i in range(PAGE)]


def extents(tier: Tier, first: int, count: int, generation: int) -> Extents:
    return (CacheExtentRef(1, generation, tier, "kv", (PageRun(first, count),)),)


def test_pages_keep_their_places_when_their_backup_makes_room() -> None:
    """L2 is so short that backing up the first pages of a run evicts host copies of its last:
    every key still maps to its own L1 page, and no page is lost."""
    tree = TreeCore(policy_class("eviction", "lru")(), 10**6)
    write = policy_class("write", "write_through")()
    cache = CacheControl(tree, write, StagingMode.CACHE, has_l3=True)
    room = (PoolCapacity(Tier.L1, "kv", 64, 64, 0), PoolCapacity(Tier.L2, "kv", 16, 1, 0, 0, 2, 8))
    cache.handle(StatusReport(capacity=room, costs=()))
    chain = KeyChain(NAMESPACE, PAGE, np.arange(PAGE * 10, dtype=np.int32).tobytes())
    tree.insert(chain.run(0, 2))
    [node] = tree.insert(chain.run(2, 7))
    tree.set_resident(node, Tier.L2, extents(Tier.L2, 0, 5, 5))
    tree.set_l3(node, L3State.STORED)
    cache.insert_ready(chain.run(0, 0), chain.run(0, 7), extents(Tier.L1, 100, 7, 9))
    cache.make_room()
    places = {}
    for found in tree.find(NAMESPACE, chain.keys):
        at = found.first_page_index
        for extent in found.l1:
            for run in extent.page_runs:
                for page in range(run.first_page, run.first_page + run.page_count):
                    places[at] = page
                    at += 1
    assert places == {i: 100 + i for i in range(7)}
    assert any(isinstance(action, Backup) for action in cache.outbox)
    tree.check_integrity()


def test_host_copies_may_go_while_a_request_waits(make_small: Any) -> None:
    """A READY request whose pages are in L1 loses their host copies: it runs all the same."""
    small = make_small(chunk_tokens=2 * PAGE, max_batch=1)
    small.ask(pages(1, 2, 3, 4))
    small.runner.gate.shut()
    before = small.scheduler.calls["execute_batch"]
    for name in (50, 51):
        small.submit(pages(name))
    small.step_until(lambda: small.scheduler.calls["execute_batch"] == before + 2)
    request_id = small.submit([*pages(1, 2, 3, 4), 7])
    request = small.scheduler._requests[request_id]
    small.step_until(lambda: request.state is RequestState.READY)
    cache = small.scheduler.cache
    victims = cache.tree.evict(Tier.L2, 99)
    assert victims, "locked pages that are in L1 may leave L2"
    cache.outbox.extend(cache.free(extents) for _, extents in victims)
    small.runner.gate.open()
    small.run()
    assert small.results[request_id].page_hits == 4
    small.check_no_leak()


def test_a_hit_larger_than_what_a_backend_may_hold(make_small: Any) -> None:
    """The runtime says how much one prefetch may ask for; a larger hit streams into L1."""
    small = make_small(backend_cap=0.25)
    names = range(1, 13)
    small.ask(pages(*names))
    for tier in (Tier.L1, Tier.L2):
        small.drop_tier(tier)
    assert small.runtime.core.staging.load_window < len(names)
    assert small.hits(small.ask([*pages(*names), 1])) == (0, 0, 12)
    small.check_no_leak()


def test_fewer_rows_than_a_batch_could_have(make_small: Any) -> None:
    small = make_small(max_rows=2, max_batch=8)
    for name in range(8):
        small.submit(pages(name), max_new_tokens=3)
    small.run()
    assert len(small.results) == 8
    small.check_no_leak()


def test_a_request_that_stores_nothing_keeps_nobody_waiting(make_small: Any) -> None:
    small = make_small(max_batch=1)
    small.runner.gate.shut()
    small.submit(pages(1, 2), store=False)
    small.submit(pages(1, 2))
    small.step_until(lambda: small.scheduler.calls["execute_batch"] == 2)
    small.runner.gate.open()
    small.run()
    assert [r.page_hits for r in small.results.values()] == [0, 0]
    small.check_no_leak()


def test_a_hung_backend_does_not_keep_l2_from_being_used(make_small: Any) -> None:
    """Pages that a hung store holds come back nobody knows when: others are evicted instead."""
    small = make_small(l2=16, deadlines=Deadlines(0.2, 5, 5))
    small.ask(pages(*range(1, 9)))
    small.backend.write_gate.shut()
    for name in (20, 30, 40):
        small.submit(pages(*range(name, name + 6)))
        small.step_until(lambda: not small.scheduler.waiting)
    small.step_until(lambda: small.scheduler.cache.counters["evicted_l2"] > 0)
    small.backend.write_gate.open()
    small.run()
    small.check_no_leak()
