"""Parts of the runtime by themselves: events, rows, queues of many."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstrata.boundary import (
    BackedUp,
    Freed,
    Located,
    PrefetchReady,
    Restored,
    StatusReport,
    Wake,
)
from kvstrata.errors import CapacityError, IntegrityError, PlanError, StaleHandleError
from kvstrata.gpu_runtime import LocalGPURuntime
from kvstrata.gpu_runtime.copy_queue import CopyPriority
from kvstrata.gpu_runtime.events import EventQueue, OpenActions
from kvstrata.gpu_runtime.move import Move
from kvstrata.gpu_runtime.rows import RowTable
from kvstrata.gpu_runtime.testing import Prompt, Rig
from kvstrata.handles import Extents, RequestRuntimeHandle, StagingMode, Tier, slice_extents

Bench = Callable[..., Rig]
WAIT_S = 20.0


# ── events ───────────────────────────────────────────────────────────────────────────────────────


def test_an_event_wakes_who_waits_for_its_kind() -> None:
    queue = EventQueue()
    woken = threading.Event()

    def wait() -> None:
        assert queue.wait(Wake.LOADS, WAIT_S)
        woken.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    queue.emit(Freed(action_id=1))
    assert not woken.wait(0.02)
    queue.emit(Located(action_id=2, n=1))
    assert woken.wait(WAIT_S)
    waiter.join(WAIT_S)
    assert [type(e) for e in queue.take()] == [Freed, Located], "oldest first"
    assert not queue.wait(Wake.ANY, 0.0)


def test_a_nudge_ends_one_wait() -> None:
    queue = EventQueue()
    queue.nudge()
    assert queue.wait(Wake.BATCH, 0.0)
    assert queue.take() == []
    assert not queue.wait(Wake.BATCH, 0.0)


def test_every_action_ends_once() -> None:
    queue = EventQueue()
    actions = OpenActions(queue)
    actions.start(1)
    actions.start(2)
    assert 1 in actions
    actions.end(1, Freed(action_id=1))
    for action_id in (1, 3):
        with pytest.raises(IntegrityError, match="second terminal event"):
            actions.end(action_id, Freed(action_id=action_id))
    actions.fail_all("closed")
    assert 2 not in actions
    assert [e.action_id for e in queue.take()] == [1, 2]  # type: ignore[attr-defined]


def test_pages_are_named_by_who_enqueued_their_copy(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by control, and once: hundreds of scattered pages take a tenth of a millisecond."""
    rig = bench()
    assert isinstance(rig.runtime, LocalGPURuntime)
    prompt = rig.prompt(16)
    pages, core, names = rig.make_pages(prompt), rig.runtime.core, list[str]()
    extents_of = core.extents_of

    def note(*args: Any) -> Extents:
        names.append(threading.current_thread().name)
        return extents_of(*args)

    monkeypatch.setattr(core, "extents_of", note)
    backup = rig.driver.backup(prompt.keys(), pages, Tier.L2)
    rig.driver.apply(backup)
    told = rig.driver.wait_action(backup.action_id)
    assert isinstance(told, BackedUp)
    restore = rig.driver.restore(told.extents)
    rig.driver.apply(restore)
    assert isinstance(rig.driver.wait_action(restore.action_id), Restored)
    assert names == ["kvstrata-d2h", "kvstrata-h2d"]


def test_a_move_ends_once(bench: Bench) -> None:
    rig = bench()
    assert isinstance(rig.runtime, LocalGPURuntime)
    core = rig.runtime.core
    move = Move(core, None, 10**6)  # type: ignore[arg-type]
    core.actions.start(10**6)
    move.end(Restored(action_id=10**6, n=0))
    with pytest.raises(IntegrityError, match="ended twice"):
        move.end(Restored(action_id=10**6, n=0))
    core.events.take()


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def rows() -> RowTable:
    return RowTable(1, 2, ("kv", "index"))


def test_a_slot_that_is_used_again_has_another_handle(rows: RowTable) -> None:
    opened = Prompt.random(4, 4, 0).open()
    first, second = rows.open(opened), rows.open(opened)
    with pytest.raises(CapacityError) as caught:
        rows.check_room(1)
    assert (caught.value.free, caught.value.freeing) == (0, 0)
    first.released = True
    with pytest.raises(CapacityError) as caught:
        rows.check_room(1)
    assert caught.value.freeing == 1
    rows.remove(first)
    third = rows.open(opened)
    assert third.handle.slot_id == first.handle.slot_id
    assert third.handle != first.handle
    for handle in (first.handle, RequestRuntimeHandle(1, 9, 1)):
        with pytest.raises(StaleHandleError):
            rows.get(handle)
    assert rows.get(second.handle) is second
    assert len(rows) == 2
    rows.check_integrity()


@pytest.mark.parametrize(
    "breakage",
    [
        lambda rows, row: rows._free.append(row.handle.slot_id),
        lambda rows, row: rows._free.clear(),
        lambda rows, row: row.pages.update(kv=np.arange(3)),
        lambda rows, row: setattr(row, "kv_len", 5),
        lambda rows, row: setattr(row, "n_tokens", 99),
        lambda rows, row: setattr(row, "handle", RequestRuntimeHandle(1, 0, 1)),
    ],
)
def test_broken_rows_are_found(
    rows: RowTable, breakage: Callable[[RowTable, object], None]
) -> None:
    rows.open(Prompt.random(4, 4, 0).open())
    row = rows.open(Prompt.random(4, 4, 1).open())
    rows.remove(rows.all()[0])
    rows.check_integrity()
    breakage(rows, row)
    with pytest.raises(IntegrityError):
        rows.check_integrity()


# ── many at once ─────────────────────────────────────────────────────────────────────────────────

MANY = 1500
"""More than the interpreter's stack is deep. So many are not traced by coverage."""


def single_pages(rig: Rig, prompt: Prompt) -> list[Extents]:
    pages = rig.make_pages(prompt)
    return [slice_extents(pages, i, i + 1) for i in range(prompt.full_pages)]


@pytest.mark.no_cover
@pytest.mark.parametrize("end", ["normally", "late", "closed", "cancelled"])
def test_a_long_queue_of_stores_ends_in_a_loop(bench: Bench, end: str) -> None:
    """One after the other, however it ends: the stack does not grow with the queue."""
    rig = bench(
        pages=MANY, host_pages=8, mode=StagingMode.BUFFER_ONLY, max_context_tokens=4 * MANY + 1
    )
    prompt = rig.prompt(4 * MANY)
    pages = single_pages(rig, prompt)
    rig.backend.writes.shut()
    deadline_s = 0.05 if end == "late" else WAIT_S
    stores = [
        rig.driver.backup(prompt.keys().slice(i, i + 1), page, Tier.L3, deadline_s)
        for i, page in enumerate(pages)
    ]
    rig.driver.apply(*stores)
    if end == "cancelled":
        for store in reversed(stores):
            rig.driver.cancel(store.action_id)
    if end == "closed":
        rig.runtime.close(1.0)
    if end in ("normally", "cancelled"):
        rig.backend.writes.open()
    rig.driver.wait_idle()
    events = [rig.driver.ended[store.action_id] for store in stores]
    assert all(isinstance(event, BackedUp) for event in events)
    stored = sum(event.n for event in events if isinstance(event, BackedUp))
    assert stored == MANY if end == "normally" else stored < 20
    rig.backend.writes.open()


@pytest.mark.no_cover
def test_a_long_queue_of_loads_ends_in_a_loop(bench: Bench) -> None:
    rig = bench(host_pages=8)
    prompt = rig.prompt(16)
    rig.in_l3(prompt)
    rig.backend.reads.shut()
    loads = [rig.driver.prefetch(prompt.keys(), Tier.L2, 0.05) for _ in range(MANY)]
    rig.driver.apply(*loads)
    rig.driver.wait_idle()
    for load in loads:
        event = rig.driver.ended[load.action_id]
        assert isinstance(event, PrefetchReady)
        assert event.n_valid == 0
        assert event.cause in ("timeout", "unavailable")  # the hung backend has its whole share
    rig.backend.reads.open()
    rig.expect_free()


# ── ids ──────────────────────────────────────────────────────────────────────────────────────────


def test_what_a_batch_waits_for_goes_first(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, seen = bench(), list[CopyPriority]()
    assert isinstance(rig.runtime, LocalGPURuntime)
    queues = rig.runtime._batches.copies.queues
    real = queues.add

    def add(copies: Any, priority: CopyPriority, *args: Any, **more: Any) -> Any:
        seen.append(priority)
        return real(copies, priority, *args, **more)

    monkeypatch.setattr(queues, "add", add)
    prompt = rig.prompt(12)
    copies = rig.in_l2(prompt)
    assert isinstance(rig.driver.do(rig.driver.restore(copies)), Restored)
    rig.ask(prompt.more([7]), restore=copies)
    assert seen == [CopyPriority.WRITE_BACK, CopyPriority.PREFETCH, CopyPriority.RESTORE]


def test_a_message_with_an_id_twice_does_nothing(bench: Bench) -> None:
    rig = bench()
    action = rig.driver.lookup(rig.prompt(8).keys())
    with pytest.raises(PlanError):
        rig.driver.apply(action, action)
    assert [type(event) for event in rig.driver.poll(0.02)] == [StatusReport]
