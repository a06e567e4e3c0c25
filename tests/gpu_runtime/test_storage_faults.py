"""Storage that is late, fails half-way, or differs from pool to pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstrata.backends import ObjectId, StorageWorker, WorkerSettings
from kvstrata.boundary import Evicted, PrefetchReady, Restored, TierDegraded, Wake
from kvstrata.gpu_runtime import LocalGPURuntime
from kvstrata.gpu_runtime.core import MAX_NAP_S, RuntimeCore
from kvstrata.gpu_runtime.storage_events import MAX_NAMESPACES
from kvstrata.gpu_runtime.testing import Gate, Rig
from kvstrata.handles import StagingMode, Tier, page_count
from kvstrata.staging import PageState
from kvstrata.tiers.namespace import component_fingerprint

Bench = Callable[..., Rig]
SOON_S = 0.05


def core_of(rig: Rig) -> RuntimeCore:
    assert isinstance(rig.runtime, LocalGPURuntime)
    return rig.runtime.core


# ── what control hears of it ─────────────────────────────────────────────────────────────────────


def test_control_hears_within_two_seconds_of_storage_that_hangs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it asks nothing of it, and sleeps in one `poll`. (The two seconds are those of the
    settings: what a busy machine takes beside them is not storage's.)"""
    settings = WorkerSettings()
    probes = settings.breaker
    assert probes.probe_s + probes.probe_deadline_s + MAX_NAP_S < 2.0
    monkeypatch.setattr("kvstrata.gpu_runtime.testing.rig.PATIENT", settings)
    rig = bench()
    rig.backend.asks.shut()
    begin = time.monotonic()
    events = rig.runtime.poll(20.0, Wake.BATCH)
    assert [e.health for e in events if isinstance(e, TierDegraded)] == ["degraded"]
    assert time.monotonic() - begin < 10.0, "it slept to the end of its poll"
    rig.backend.asks.open()


@pytest.mark.parametrize("two_pools", [False, True])
def test_storage_that_answers_never_passes_for_stuck(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, two_pools: bool
) -> None:
    """Control looks between any two callbacks: a store that has just ended holds nothing beyond its
    deadline, and nobody who waits behind it is refused."""
    rig = bench(two_pools, host_pages=8)
    core, whole, looks = core_of(rig), StorageWorker._deliver, []

    def one_by_one(worker: StorageWorker, notices: list[Any]) -> None:
        for notice in notices:
            whole(worker, [notice])
            with core.lock:
                looks.append(max(table.stuck for table in core.staging.tables.values()))
                core.expiries[-1](core.now())

    stored, small = rig.prompt(20, 1), rig.prompt(8, 2)
    first, second = rig.prompt(24, 3), rig.prompt(20, 4)
    rig.in_l3(stored)
    rig.in_l3(small)
    from_l1, from_l2 = rig.make_pages(first), rig.in_l2(second)
    rest = rig.fetch(small, Tier.L2).extents  # one page of eight is left
    monkeypatch.setattr(StorageWorker, "_deliver", one_by_one)
    rig.backend.writes.shut()
    load = rig.driver.prefetch(stored.keys(), Tier.L2)
    rig.driver.apply(
        rig.driver.backup(first.keys(), from_l1, Tier.L3),
        rig.driver.backup(second.keys(), from_l2, Tier.L3),
        rig.driver.free(from_l2),
        load,
    )
    rig.backend.writes.open()
    rig.driver.wait_idle()
    ready = rig.driver.ended[load.action_id]
    assert isinstance(ready, PrefetchReady)
    assert (ready.n_valid, ready.cause) == (5, "")
    assert looks
    assert max(looks) == 0
    rig.free(from_l1, rest, ready.extents)


# ── storage that is late ─────────────────────────────────────────────────────────────────────────


def test_a_late_read_writes_into_nobodys_page(bench: Bench) -> None:
    """B057, B062: all other staging is taken and filled with a pattern while a read hangs."""
    rig = bench(host_pages=8)
    prompt = rig.prompt(16)
    rig.in_l3(prompt)
    staging, core = core_of(rig).staging, core_of(rig)
    rig.backend.reads.shut()
    assert rig.fetch(prompt, Tier.L2, deadline_s=SOON_S).cause == "timeout"
    rig.backend.reads.wait_for_one()
    table = staging.tables["kv"]
    assert table.counts()["quarantined"] == 4
    late = np.flatnonzero(table._state == PageState.QUARANTINED)
    with core.lock:
        others = table.reserve(table.free)
        for page in others.tolist():
            staging.payload("kv", page)[:] = b"\x5a" * staging.page_bytes["kv"]
    assert not set(others.tolist()) & set(late.tolist())
    assert table.free == 0
    rig.backend.reads.open()
    rig.driver.wait_status(lambda s: all(c.freeing == 0 for c in s.capacity))
    with core.lock:
        assert table.free == 4
        for page in others.tolist():
            assert bytes(staging.payload("kv", page)) == b"\x5a" * staging.page_bytes["kv"]
        table.release(others)
    rig.expect_free()
    assert staging.lent("bench") == 0


def test_a_late_write_reads_what_it_was_given(bench: Bench) -> None:
    """The window's pages stay away from others until a slow store has read them."""
    rig = bench(host_pages=8, mode=StagingMode.BUFFER_ONLY)
    prompt = rig.prompt(8)
    pages = rig.make_pages(prompt)
    rig.backend.writes.shut()
    event = rig.driver.do(rig.driver.backup(prompt.keys(), pages, Tier.L3, deadline_s=SOON_S))
    assert getattr(event, "cause", "") == "timeout"
    rig.free(pages)
    for i in range(1, 6):  # L1 and the window are used again and again
        rig.free(rig.make_pages(rig.prompt(8, i)))
    assert core_of(rig).staging.tables["kv"].counts()["quarantined"] == 2
    rig.backend.writes.open()
    rig.driver.wait_status(lambda s: all(c.freeing == 0 for c in s.capacity))
    ready = rig.fetch(prompt, Tier.L1)
    if ready.n_valid:  # it did arrive, late: then with the right bytes
        rig.verify(prompt, ready.extents)
        rig.free(ready.extents)
    rig.expect_free()


def test_a_prefetch_keeps_what_came_before_its_deadline(bench: Bench) -> None:
    """Two storage calls: the first in time, the second late. The first part counts."""
    rig = bench(pages=40, host_pages=24)
    prompt = rig.prompt(64)
    rig.in_l3(prompt)
    calls: list[int] = []
    whole = rig.backend.reads.pass_through

    def second_waits() -> None:
        calls.append(1)
        if len(calls) == 2:
            rig.backend.reads.shut()
        whole()

    rig.backend.reads.pass_through = second_waits  # type: ignore[method-assign]
    ready = rig.fetch(prompt, Tier.L2, deadline_s=4 * SOON_S)
    assert (ready.n_valid, ready.cause) == (8, "timeout")
    rig.backend.reads.open()
    rig.driver.wait_status(lambda s: all(c.freeing == 0 for c in s.capacity))
    rig.expect_free(l2=16)
    restored = rig.driver.do(rig.driver.restore(ready.extents))
    assert isinstance(restored, Restored)
    rig.verify(prompt, restored.extents)


def test_a_store_goes_no_further_than_what_failed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The D2H of a chunk is under way when the chunk before it is refused: it is not stored."""
    rig = bench(mode=StagingMode.BUFFER_ONLY, host_pages=8)  # chunks of 2
    prompt = rig.prompt(24)
    pages = rig.make_pages(prompt)
    gate, copies = Gate(shut=True), []
    pool = core_of(rig).pools["kv"]
    whole = pool.gather

    def second_waits(*args: Any) -> None:
        copies.append(1)
        if len(copies) == 2:
            gate.pass_through()
        whole(*args)

    monkeypatch.setattr(pool, "gather", second_waits)
    rig.backend.refuse = {prompt.keys().key(1)}
    store = rig.driver.backup(prompt.keys(), pages, Tier.L3)
    rig.driver.apply(store)
    gate.wait_for_one()
    assert rig.worker is not None
    assert rig.worker.flush(20.0)
    gate.open()
    event = rig.driver.wait_action(store.action_id)
    assert (getattr(event, "n", None), getattr(event, "cause", "")) == (1, "access")
    assert rig.worker.stats().calls["store"] == 1
    rig.free(pages)
    rig.expect_free()


def test_a_prefetch_goes_no_further_than_what_is_missing(bench: Bench) -> None:
    rig = bench(pages=48, host_pages=8, mode=StagingMode.BUFFER_ONLY)  # chunks of 3
    prompt = rig.prompt(160)
    rig.in_l3(prompt)
    rig.backend.lose = {prompt.keys().key(1)}
    before = rig.backend.read_calls
    assert rig.fetch(prompt, Tier.L1).n_valid == 1
    assert rig.backend.read_calls - before <= 3, "two are under way at once"
    rig.expect_free(l1=47)


def test_a_prefetch_that_is_cancelled_goes_no_further(bench: Bench) -> None:
    rig = bench(pages=48, host_pages=8, mode=StagingMode.BUFFER_ONLY)
    prompt = rig.prompt(160)
    rig.in_l3(prompt)
    rig.backend.reads.shut()
    load = rig.driver.prefetch(prompt.keys(), Tier.L1)
    rig.driver.apply(load)
    rig.backend.reads.wait_for_one()
    rig.backend.reads.wait_for_one()
    rig.driver.cancel(load.action_id)
    rig.backend.reads.open()
    event = rig.driver.wait_action(load.action_id)
    assert isinstance(event, PrefetchReady)
    assert (event.n_valid, event.cause) == (6, "cancelled"), "what was under way counts"
    rig.verify(prompt, event.extents)


def test_a_load_gets_what_a_store_from_l2_leaves(bench: Bench) -> None:
    """Control has freed the pages; they become free when the last of them was stored."""
    rig = bench(host_pages=8)
    stored, held, other = rig.prompt(24), rig.prompt(20, 1), rig.prompt(4, 2)
    rig.in_l3(stored)
    rig.in_l3(other)
    pages = rig.in_l2(held)
    assert rig.fetch(other, Tier.L2).n_valid == 1
    rig.backend.writes.shut()
    store = rig.driver.backup(held.keys(), pages, Tier.L3)
    load = rig.driver.prefetch(stored.keys(), Tier.L2, deadline_s=20.0)  # needs all the rest
    rig.driver.apply(store, rig.driver.free(pages), load)
    rig.backend.writes.open()
    ready = rig.driver.wait_action(load.action_id)
    assert isinstance(ready, PrefetchReady)
    assert ready.n_valid == 6


# ── two pools that disagree: B101 ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("target", [Tier.L1, Tier.L2])
@pytest.mark.parametrize("pool", ["kv", "index"])
@pytest.mark.parametrize("page", [0, 5, 9])
def test_what_is_published_is_what_every_pool_has(
    bench: Bench, target: Tier, pool: str, page: int
) -> None:
    """One component fails at page k: k pages are READY, in both pools, and all bytes are right."""
    rig = bench(two_pools=True, pages=40, host_pages=24)
    prompt = rig.prompt(48)
    rig.in_l3(prompt)
    keys = prompt.keys()
    name = ObjectId(component_fingerprint(keys.namespace, pool), keys.key(page))
    rig.backend.lose = {name}
    ready = rig.fetch(prompt, target)
    assert (ready.n_valid, ready.cause) == (page, "missing")
    assert page_count(ready.extents) == page
    if page == 0:
        rig.expect_free()
        return
    assert {e.pool for e in ready.extents} == {"kv", "index"}
    pages = ready.extents
    if target is Tier.L2:
        restored = rig.driver.do(rig.driver.restore(pages))
        assert isinstance(restored, Restored)
        rig.free(pages)
        pages = restored.extents
    rig.verify(prompt, pages)
    rig.free(pages)
    rig.expect_free()


@pytest.mark.parametrize("pool", ["kv", "index"])
def test_what_is_stored_is_what_every_pool_stored(bench: Bench, pool: str) -> None:
    rig = bench(two_pools=True, pages=40)
    prompt = rig.prompt(48)
    pages = rig.make_pages(prompt)
    name = component_fingerprint(prompt.namespace, pool)
    rig.backend.refuse = {ObjectId(name, prompt.keys().key(7))}
    event = rig.store(prompt, pages)
    assert (event.n, event.cause) == (7, "access")
    located = rig.driver.do(rig.driver.lookup(prompt.keys()))
    assert getattr(located, "n", None) == 7, "the least of the components"


def test_a_page_that_lost_one_component_is_told_as_evicted_once(bench: Bench) -> None:
    rig = bench(two_pools=True)
    prompt = rig.prompt(8)
    rig.in_l3(prompt)
    keys = prompt.keys()
    objects = [
        ObjectId(component_fingerprint(keys.namespace, pool), keys.key(i))
        for pool in ("kv", "index")
        for i in range(2)
    ]
    foreign = ObjectId(bytes(32), keys.key(0))
    assert rig.worker is not None
    assert rig.worker.on_evicted is not None
    rig.worker.on_evicted([*objects[:2], objects[2], foreign])
    rig.driver.poll()
    (event,) = [e for e in rig.driver.unasked if isinstance(e, Evicted)]
    assert (event.namespace, event.keys) == (keys.namespace, keys.keys)


def test_namespaces_are_remembered_up_to_a_bound(bench: Bench) -> None:
    storage = core_of(bench()).storage
    for i in range(MAX_NAMESPACES + 10):
        storage.component_namespace(i.to_bytes(32, "big"), "kv")
    assert len(storage._namespaces) == len(storage._base) == MAX_NAMESPACES
