"""Transfers beside compute: they do overlap, and order holds where bytes depend on it."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvstrata.boundary import BackedUp, BatchPlan, RowPlan, RowStatus
from kvstrata.gpu_runtime import LocalGPURuntime
from kvstrata.gpu_runtime.core import RuntimeCore
from kvstrata.gpu_runtime.testing import Gate, Rig
from kvstrata.handles import StagingMode, Tier

Bench = Callable[..., Rig]
WAIT_S = 20.0


def core_of(rig: Rig) -> RuntimeCore:
    assert isinstance(rig.runtime, LocalGPURuntime)
    return rig.runtime.core


def test_the_h2d_of_the_next_batch_starts_and_ends_while_one_computes(bench: Bench) -> None:
    """Overlap is real: batch N stands still in its compute while N+1 gets its pages."""
    rig = bench()
    prompt = rig.prompt(24)
    copies = rig.in_l2(prompt)
    h2d = core_of(rig).device.h2d
    gate = rig.runner.pause()
    running, _ = rig.start(rig.prompt(5, 1))
    gate.wait_for_one()
    before = core_of(rig).timeline.totals().get("h2d")
    assert before is None

    prepared = rig.driver.prepare(
        BatchPlan(
            open=(prompt.more([1]).open(),),
            rows=(RowPlan(row=0, restore=copies, start=24, count=1),),
        )
    )
    assert h2d.record().wait(WAIT_S), "the copy has ended"
    moved = core_of(rig).timeline.totals()["h2d"]
    assert moved.nbytes == 6 * core_of(rig).pools["kv"].page_bytes
    rig.driver.poll()
    assert running in rig.driver.running, "and batch N computes still"

    following = rig.driver.execute(prepared)
    gate.open()
    assert rig.only_row(running).status is RowStatus.OK
    assert rig.only_row(following).status is RowStatus.OK
    assert rig.driver.verified == 6
    assert isinstance(rig.runtime, LocalGPURuntime)
    assert rig.runtime.hidden_share() is not None
    assert rig.runtime.hidden_share() > 0.0  # type: ignore[operator]


def test_stores_and_loads_go_on_while_one_batch_computes(bench: Bench) -> None:
    """D2H, both directions of storage and H2D; and all of their time counts as hidden."""
    rig = bench(mode=StagingMode.BUFFER_ONLY, host_pages=8)
    prompt = rig.prompt(24)
    pages = rig.make_pages(prompt)
    gate = rig.runner.pause()
    running, _ = rig.start(rig.prompt(5, 1))
    gate.wait_for_one()
    assert rig.store(prompt, pages).n == 6
    rig.free(pages)
    ready = rig.fetch(prompt, Tier.L1)
    assert ready.n_valid == 6
    assert running in rig.driver.running
    gate.open()
    rig.only_row(running)
    assert isinstance(rig.runtime, LocalGPURuntime)
    assert rig.runtime.hidden_share() == 1.0
    assert {"compute", "h2d", "d2h"} <= rig.runtime.transfers().keys()
    rig.verify(prompt, ready.extents)


def test_a_batch_waits_for_its_own_pages(bench: Bench) -> None:
    """A missing wait would compare pages that have not arrived."""
    rig = bench()
    prompt = rig.prompt(24)
    copies = rig.in_l2(prompt)
    gate = Gate(shut=True)
    core_of(rig).device.h2d.enqueue(gate.pass_through)
    batch, _ = rig.start(prompt.more([1]), restore=copies)
    free, _ = rig.start(rig.prompt(5, 1))
    gate.wait_for_one()
    rig.driver.poll(0.02)
    assert {batch, free} == rig.driver.running, "a batch and all behind it wait for KV_READY"
    assert rig.runner.steps == 1, "that of the prompt, before"
    gate.open()
    assert rig.only_row(batch).status is RowStatus.OK
    assert rig.only_row(free).status is RowStatus.OK
    assert (rig.driver.verified, rig.driver.mismatched) == (6, 0)


def test_calls_return_while_everything_stands_still(bench: Bench) -> None:
    """No call waits for a device or for storage."""
    rig = bench()
    prompt = rig.prompt(8)
    pages = rig.make_pages(prompt)
    gates = [Gate(shut=True) for _ in range(2)]
    core_of(rig).device.h2d.enqueue(gates[0].pass_through)
    core_of(rig).device.d2h.enqueue(gates[1].pass_through)
    gates.append(rig.runner.pause())
    for gate in (rig.backend.reads, rig.backend.writes, rig.backend.asks):
        gate.shut()
        gates.append(gate)
    start = time.monotonic()
    batch, handle = rig.start(rig.prompt(5, 1), 4)
    decode, _ = rig.driver.run(BatchPlan(rows=(RowPlan(row=handle),), steps=2))
    rig.driver.apply(
        rig.driver.backup(prompt.keys(), pages, Tier.L2),
        rig.driver.backup(prompt.keys(), pages, Tier.L3),
        rig.driver.prefetch(rig.prompt(8, 3).keys(), Tier.L2),
        rig.driver.prefetch(rig.prompt(8, 3).keys(), Tier.L1),
        rig.driver.lookup(prompt.keys()),
    )
    rig.driver.cancel(handle)
    rig.driver.poll(0)
    assert time.monotonic() - start < WAIT_S, "a gate keeps shut three times as long"
    for gate in gates:
        gate.open()
    rig.driver.wait_idle()
    assert {batch, decode} <= rig.driver.done.keys()


def test_a_page_is_not_used_again_while_a_batch_still_reads_it(bench: Bench) -> None:
    """B053: H2D must not write what an earlier compute reads."""
    rig = bench(pages=8)
    shared, other = rig.prompt(16), rig.prompt(16, 1)
    others = rig.in_l2(other)
    pages = rig.make_pages(shared)
    for _ in range(20):
        gate = rig.runner.pause()
        batch, handle = rig.start(shared.more([1]), attach=pages)
        gate.wait_for_one()
        free, restore = rig.driver.free(pages), rig.driver.restore(others)
        rig.driver.apply(free, restore)  # there is room for it only when `pages` are free
        rig.driver.wait_action(restore.action_id)
        rig.release(handle)
        gate.open()
        rig.only_row(batch)
        assert (rig.driver.verified, rig.driver.mismatched) == (4, 0)
        rig.driver.wait_action(free.action_id)
        rig.driver.verified = 0
        pages = rig.make_pages(shared)
    rig.free(pages)


def test_a_backup_sees_what_was_computed(bench: Bench) -> None:
    """B052: D2H is asked for the moment a batch ends, a hundred times; every byte is right."""
    rig = bench(host_pages=8, mode=StagingMode.BUFFER_ONLY)
    for i in range(100):
        prompt = rig.prompt(9, i)
        row = rig.ask(prompt)
        backup = rig.driver.backup(prompt.keys(), row.extents, Tier.L3)
        free = rig.driver.free(row.extents)
        rig.driver.prepare(BatchPlan(release=(row.handle,), frees=(free,), actions=(backup,)))
        if i % 10 == 9:
            rig.driver.wait_idle()
    ends = [e for e in rig.driver.ended.values() if isinstance(e, BackedUp)]
    assert [e.n for e in ends] == [2] * 100
    rig.expect_free()
    for i in range(0, 100, 7):
        ready = rig.fetch(rig.prompt(9, i), Tier.L1)
        rig.verify(rig.prompt(9, i), ready.extents)
        rig.free(ready.extents)
