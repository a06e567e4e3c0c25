"""Faults below the boundary: copies that fail, bugs in callbacks, what cannot be built."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from kvstrata.backends import BackendContext, StorageWorker, WorkerSettings
from kvstrata.boundary import BatchPlan, Restored, RowPlan, RowStatus, StatusReport
from kvstrata.errors import ConfigError, IntegrityError, StorageUnavailableError
from kvstrata.gpu_runtime import (
    ComponentSpec,
    CpuDevice,
    Event,
    LocalGPURuntime,
    RuntimeSettings,
    local,
)
from kvstrata.gpu_runtime.core import RuntimeCore
from kvstrata.gpu_runtime.cpu import CpuEvent, CpuStream
from kvstrata.gpu_runtime.testing import Driver, FaultyBackend, Gate, GatedRunner, Prompt, Rig
from kvstrata.handles import StagingMode, Tier, slice_extents
from kvstrata.staging import StagingSettings

Bench = Callable[..., Rig]
SOON_S = 0.05


def core_of(rig: Rig) -> RuntimeCore:
    assert isinstance(rig.runtime, LocalGPURuntime)
    return rig.runtime.core


SETTINGS: Mapping[str, Any] = {
    "components": (ComponentSpec("kv", 1, 1, 8, "uint8"),),
    "pages": 8,
    "page_tokens": 4,
    "max_requests": 2,
    "max_context_tokens": 64,
    "staging": StagingSettings(64 * 4096),
}
TWICE = (ComponentSpec("kv", 1, 1, 8, "uint8"), ComponentSpec("kv", 1, 1, 4, "uint8"))


def plain_runtime(**change: Any) -> tuple[LocalGPURuntime, FaultyBackend]:
    backend = FaultyBackend()
    worker = StorageWorker("disk", backend, WorkerSettings(), BackendContext("disk"))
    settings = RuntimeSettings(**{**SETTINGS, **change})
    return LocalGPURuntime(settings, GatedRunner(), worker), backend


def traces() -> tuple[set[str], int]:
    """Threads of ours and open descriptors, once nothing is left to be collected."""
    gc.collect()
    names = {t.name for t in threading.enumerate() if t.name.startswith("kvstrata-")}
    return names, len(os.listdir("/proc/self/fd"))


class BrokenCopy:
    """Lets a pool's copies fail for as long as it is told to."""

    def __init__(self, rig: Rig, pool: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails = 1
        whole = getattr(core_of(rig).pools[pool], way)

        def copy(*args: Any) -> None:
            if self.fails:
                self.fails -= 1
                raise RuntimeError("the copy failed")
            whole(*args)

        monkeypatch.setattr(core_of(rig).pools[pool], way, copy)


# ── copies that fail ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("pool", ["kv", "index"])
def test_a_failed_h2d_costs_only_its_row_a_recompute(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, pool: str
) -> None:
    rig = bench(two_pools=True)
    bad, good = rig.prompt(16, 1), rig.prompt(16, 2)
    in_l1 = slice_extents(rig.make_pages(bad), 0, 1)
    bad_l2, good_l2 = rig.in_l2(rig.prompt(16, 1)), rig.in_l2(good)
    BrokenCopy(rig, pool, "scatter", monkeypatch)
    batch, (first, second, third) = rig.driver.run(
        BatchPlan(
            open=(bad.open(4), good.more([1]).open(4), rig.prompt(5, 3).open(4)),
            rows=(
                RowPlan(
                    row=0, attach=in_l1, restore=slice_extents(bad_l2, 1, 4), start=15, count=1
                ),
                RowPlan(row=1, restore=good_l2, start=16, count=1),
                RowPlan(row=2, start=0, count=5),
            ),
        )
    )
    behind, _ = rig.driver.run(BatchPlan(rows=(RowPlan(row=first), RowPlan(row=second))))
    lost, *others = rig.driver.wait_batch(batch).rows
    assert (lost.status, lost.n_valid_pages, lost.extents) == (RowStatus.NEEDS_RECOMPUTE, 1, ())
    assert lost.finished
    assert [row.status for row in others] == [RowStatus.OK, RowStatus.OK]
    masked, runs = rig.driver.wait_batch(behind).rows
    assert (masked.status, runs.status) == (RowStatus.MASKED, RowStatus.OK)
    rig.release(first, second, third)
    rig.free(bad_l2, good_l2, in_l1, *(row.extents for row in (*others, runs)))
    rig.driver.wait_idle()
    rig.check()
    row = rig.ask(bad)  # its tokens are there from 0: it is computed again
    assert row.status is RowStatus.OK


def test_failed_copies_of_actions_are_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore, prefetch through the window, backup to L2 and to L3: cause, and no page lost."""
    rig = bench()
    prompt = rig.prompt(16)
    rig.in_l3(prompt)
    in_l2 = rig.in_l2(rig.prompt(8, 1))
    h2d = BrokenCopy(rig, "kv", "scatter", monkeypatch)
    restored = rig.driver.do(rig.driver.restore(in_l2))
    assert isinstance(restored, Restored)
    assert (restored.n, restored.extents) == (0, ())
    assert "the copy failed" in restored.cause
    h2d.fails = 1
    ready = rig.fetch(prompt, Tier.L1)
    assert ready.n_valid == 0
    assert "the copy failed" in ready.cause
    rig.free(in_l2)
    rig.expect_free()
    for target in (Tier.L2, Tier.L3):
        pages = rig.make_pages(rig.prompt(24, 2))
        BrokenCopy(rig, "kv", "gather", monkeypatch)
        event = rig.store(rig.prompt(24, 2), pages, target)
        assert event.n == 0
        assert "the copy failed" in event.cause
        rig.free(pages)
        rig.expect_free()
    assert rig.fetch(prompt, Tier.L1).n_valid == 4, "afterwards all works"


# ── bugs are not swallowed ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("where", ["device", "worker"])
def test_what_a_callback_raises_reaches_control(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Instead of an event that never comes. The threads live on, so that close works."""
    runtime, _ = plain_runtime()
    core, driver = runtime.core, Driver(runtime)
    prompt = Prompt.random(8, 4, seed=0)

    def broken(*args: object) -> None:
        raise IntegrityError("a bug of the test")

    monkeypatch.setattr(core, "settle_frees" if where == "device" else "claim", broken)
    if where == "device":
        driver.run(BatchPlan(open=(prompt.open(),), rows=(RowPlan(row=0, count=8),)))
    else:
        driver.apply(driver.prefetch(prompt.keys(), Tier.L2))
    with pytest.raises(IntegrityError, match="a bug of the test"):
        driver.wait_status(lambda status: False)
    for call in (
        lambda: runtime.apply([]),
        lambda: runtime.prepare_batch(BatchPlan()),
        lambda: runtime.poll(0),
        core.check_integrity,
    ):
        with pytest.raises(IntegrityError):
            call()
    monkeypatch.undo()
    runtime.close(10.0)
    assert not traces()[0]


# ── close, with the worst timing ────────────────────────────────────────────────────────────────


def test_what_comes_back_after_close_harms_nobody() -> None:
    """A store hangs, control has freed its pages, the runtime is closed: then the store returns."""
    runtime, backend = plain_runtime(pages=16)
    driver = Driver(runtime)
    prompt = Prompt.random(8, 4, seed=0)
    batch, _ = driver.run(BatchPlan(open=(prompt.open(),), rows=(RowPlan(row=0, count=8),)))
    pages = driver.wait_batch(batch).rows[0].extents
    copies = driver.do(driver.backup(prompt.keys(), pages, Tier.L2)).extents  # type: ignore[union-attr]
    backend.writes.shut()
    store = driver.backup(prompt.keys(), copies, Tier.L3)
    driver.apply(store, driver.free(copies))
    backend.writes.wait_for_one()
    runtime.close(0.1)
    driver.poll()
    assert not driver.open
    backend.writes.open()
    for thread in threading.enumerate():
        if thread.name.startswith("kvstrata-"):
            thread.join(20.0)
    runtime.check_integrity()
    assert [type(event) for event in runtime.poll(0)] == [StatusReport]


def test_a_copy_that_comes_back_after_close_starts_nothing() -> None:
    """A D2H hangs, the runtime is closed: what close has ended can still be heard, also when the
    copy has come back, whose pages cannot be stored any more."""
    runtime, _ = plain_runtime(
        pages=16, staging=StagingSettings(8 * 4096), mode=StagingMode.BUFFER_ONLY
    )
    driver, gate = Driver(runtime), Gate(shut=True)
    prompt = Prompt.random(16, 4, seed=0)
    batch, _ = driver.run(BatchPlan(open=(prompt.open(),), rows=(RowPlan(row=0, count=16),)))
    pages = driver.wait_batch(batch).rows[0].extents
    runtime.core.device.d2h.enqueue(gate.pass_through)
    gate.wait_for_one()
    driver.apply(driver.backup(prompt.keys(), pages, Tier.L3))
    runtime.close(0.1)
    gate.open()
    for thread in threading.enumerate():
        if thread.name.startswith("kvstrata-"):
            thread.join(20.0)
    driver.poll()
    assert not driver.open
    assert runtime.core.fault is None


def test_nothing_is_started_while_it_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy ends when its stream takes no more work: the next part must not be copied."""
    runtime, _ = plain_runtime(
        pages=16, staging=StagingSettings(8 * 4096), mode=StagingMode.BUFFER_ONLY
    )  # chunks of 2
    driver, stream = Driver(runtime), runtime.core.device.d2h
    prompt = Prompt.random(16, 4, seed=0)
    batch, _ = driver.run(BatchPlan(open=(prompt.open(),), rows=(RowPlan(row=0, count=16),)))
    pages = driver.wait_batch(batch).rows[0].extents
    gate = Gate(shut=True)
    stream.enqueue(gate.pass_through)
    gate.wait_for_one()
    stores = [driver.backup(prompt.keys(), pages, Tier.L3) for _ in range(2)]
    driver.apply(*stores)
    whole = stream.close  # type: ignore[attr-defined]

    def close(deadline_s: float) -> bool:
        assert isinstance(stream, CpuStream)
        with stream._putting:
            stream._closing = True
        gate.open()
        return bool(whole(deadline_s))

    monkeypatch.setattr(stream, "close", close)
    runtime.close(10.0)
    driver.poll()
    assert not driver.open
    assert runtime.core.fault is None
    assert runtime.core.device.fault is None


# ── a runtime that cannot be built leaves nothing behind ─────────────────────────────────────────


@pytest.mark.parametrize(
    "change",
    [
        {"pages": 0},
        {"page_tokens": 0},
        {"max_requests": -1},
        {"max_context_tokens": 0},
        {"components": ()},
        {"components": TWICE},
        {"components": (ComponentSpec("kv", 1, 1, 8, "uint8", kind="mamba"),)},
        {"staging": StagingSettings(4096)},
    ],
    ids=str,
)
def test_impossible_sizes_are_config_errors_and_nothing_runs(change: dict[str, Any]) -> None:
    before = traces()
    with pytest.raises(ConfigError):
        plain_runtime(**change)
    assert traces() == before


def test_a_backend_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    before = traces()

    def away(backend: FaultyBackend, context: BackendContext) -> None:
        raise StorageUnavailableError("the store is away")

    monkeypatch.setattr(FaultyBackend, "open", away)
    with pytest.raises(StorageUnavailableError):
        plain_runtime()
    assert traces() == before


def test_a_device_that_refuses_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    before = traces()

    def refuse(device: CpuDevice, address: int, chunk_bytes: object) -> None:
        raise ConfigError("chunk 1 of 2 was refused", remedy="use less")

    monkeypatch.setattr(CpuDevice, "pin", refuse)
    with pytest.raises(ConfigError, match="was refused"):
        plain_runtime()
    assert traces() == before


def test_a_device_that_cannot_prepare_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    before = traces()

    def refuse(device: CpuDevice, memory: object) -> None:
        raise ConfigError("a page is larger than a chunk", remedy="use less")

    monkeypatch.setattr(CpuDevice, "prepare", refuse)
    with pytest.raises(ConfigError, match="larger than a chunk"):
        plain_runtime()
    assert traces() == before


def test_a_batch_waits_for_what_the_constructor_has_enqueued() -> None:
    """ReqToToken and the model's weights are made on a stream that is none of ours."""

    class Fenced(CpuDevice):
        fenced = CpuEvent()

        def fence(self) -> Event:
            return self.fenced

    worker = StorageWorker("disk", FaultyBackend(), WorkerSettings(), BackendContext("disk"))
    runner = GatedRunner()
    runtime = LocalGPURuntime(RuntimeSettings(**SETTINGS), runner, worker, make_device=Fenced)
    driver, prompt = Driver(runtime), Prompt.random(8, 4, seed=0)
    batch, _ = driver.run(BatchPlan(open=(prompt.open(),), rows=(RowPlan(row=0, count=8),)))
    assert not runtime.core.device.compute.record().wait(SOON_S)
    assert runner.steps == 0
    Fenced.fenced.complete()
    assert driver.wait_batch(batch).rows[0].status is RowStatus.OK
    runtime.close(10.0)


def test_what_a_device_does_not_let_go_of_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host and device pages of a runtime that nobody holds any more: a copy may still write."""
    runtime, _ = plain_runtime()
    data = weakref.ref(runtime.core.pools["kv"].data)
    region = weakref.ref(runtime.core.staging.region)
    monkeypatch.setattr(local, "STRANDED", [])
    close = CpuDevice.close
    monkeypatch.setattr(CpuDevice, "close", lambda *args: close(*args) and False)
    runtime.close(10.0)
    del runtime
    gc.collect()
    assert data() is not None
    assert region() is not None
    monkeypatch.undo()
    gc.collect()
    assert data() is None


def test_device_work_that_raises_breaks_the_runtime_loudly() -> None:
    """Nothing behind it completes; control is told instead of waiting for ever."""
    runtime, _ = plain_runtime()
    driver, prompt = Driver(runtime), Prompt.random(8, 4, seed=0)

    def broken() -> None:
        raise MemoryError("a fault of the test")

    def go() -> None:
        driver.run(BatchPlan(open=(prompt.open(),), rows=(RowPlan(row=0, count=8),)))
        driver.wait_idle()

    runtime.core.device.compute.enqueue(broken)
    try:
        with pytest.raises(IntegrityError, match="a fault of the test"):
            go()  # it is told at once, or by `poll`
    finally:
        runtime.close(10.0)
    assert not traces()[0]


def test_runtimes_come_and_go_without_a_trace() -> None:
    """B090, B079: no thread and no descriptor stays."""
    before = traces()
    for _ in range(20):
        plain_runtime()[0].close(10.0)
    assert traces() == before
