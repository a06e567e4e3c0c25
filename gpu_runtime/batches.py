"""Batches: reserve and start copies (prepare), enqueue (execute), hand results over (finish)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from kvstrata.boundary import (
    BatchDone,
    BatchPlan,
    BatchTicket,
    PreparedBatchHandle,
    RowResult,
    RowStatus,
)
from kvstrata.errors import PlanError, StaleHandleError
from kvstrata.gpu_runtime.base import ModelRunner
from kvstrata.gpu_runtime.compute import Batch, Compute, Part
from kvstrata.gpu_runtime.copy_queue import CopyPriority
from kvstrata.gpu_runtime.core import PageSet, RuntimeCore, page_set_count
from kvstrata.gpu_runtime.planning import CheckedRow, OldPages, Planner
from kvstrata.gpu_runtime.rows import Row, RowTable
from kvstrata.gpu_runtime.transfers import Copies, part_of
from kvstrata.handles import Extents, RequestRuntimeHandle, Tier


class BatchEngine:
    """Prepares and executes batches. Under the runtime's lock."""

    def __init__(self, core: RuntimeCore, copies: Copies, runner: ModelRunner) -> None:
        self.core, self.copies = core, copies
        self.page_tokens = core.settings.page_tokens
        self.rows = RowTable(core.runtime_id, core.settings.max_requests, core.pools)
        self.compute = Compute(core, runner)
        self.old_pages = OldPages()
        self._planner = Planner(core, self.rows, self.old_pages)
        self._next_batch = 1
        self._prepared: deque[Batch] = deque()
        """Not executed yet, in the order of their preparation."""
        self._batches: dict[int, Batch] = {}
        """All that owe a BatchDone."""

    # ── prepare ──────────────────────────────────────────────────────────────────────────────────

    def prepare(self, plan: BatchPlan, before_rows: Callable[[], None]) -> PreparedBatchHandle:
        """`before_rows` applies the plan's frees and actions, after all was checked."""
        checked = self._planner.check(plan)
        for row in checked.releases:
            self.release(row)
        before_rows()
        self.rows.check_room(len(plan.open))
        for table in self.core.tables.values():
            table.check_room(checked.need)

        opened = [self.rows.open(o) for o in plan.open]
        batch = Batch(self._next_batch, plan.steps)
        self._next_batch += 1
        for check in checked.rows:
            index = check.plan.row
            known = opened[index] if isinstance(index, int) else check.row
            assert known is not None, "a handle was checked to have a row"
            batch.parts.append(self._admit(known, check, batch))
        if batch.parts:
            self._batches[batch.batch_id] = batch
            self._prepared.append(batch)
        handles = tuple(row.handle for row in opened)
        return PreparedBatchHandle(self.core.runtime_id, batch.batch_id, handles)

    def _admit(self, row: Row, check: CheckedRow, batch: Batch) -> Part:
        """Take the pages of one row and start its restores. Capacity was checked."""
        core = self.core
        part = Part(row, check.plan.start, check.plan.count, opened=check.row is None)
        part.end = check.end
        part.private_copy = check.private_copy
        n_attach, n_restore = page_set_count(check.attach), page_set_count(check.restore)
        if n_attach:
            for name, pages in check.attach.items():
                core.tables[name].hold(pages)
            row.append_pages(check.attach)
            row.held.append(check.attach)
        if n_restore:
            self._start_restore(part, check.restore, batch)
        new = check.need - n_restore
        if new:
            part.new_pages = {name: t.reserve(new) for name, t in core.tables.items()}
            for name, pages in part.new_pages.items():
                core.tables[name].begin_compute(pages)
            row.held.append(part.new_pages)
        if part.opened:
            row.attached_pages, row.handed_pages = n_attach + n_restore, n_attach
            row.kv_len = min(row.attached_pages * self.page_tokens, part.start)
        if check.private_copy:
            row.replace_last(part.new_pages)
        elif new:
            row.append_pages(part.new_pages)
        part.stop_index = row.page_count
        row.planned_kv = check.end
        row.batches += 1
        return part

    def _start_restore(self, part: Part, source: PageSet, batch: Batch) -> None:
        core, row = self.core, part.row
        count = page_set_count(source)
        target = {name: table.reserve(count) for name, table in core.tables.items()}
        for name in core.pools:
            core.staging.tables[name].hold(source[name])
            core.tables[name].begin_load(target[name])
        row.append_pages(target)
        row.held.append(target)
        part.restore = target

        def done(error: str) -> None:
            if not error:
                for name, pages in target.items():
                    core.tables[name].ready(pages)
            core.staging.give_back(source)
            core.settle_frees()

        part.copy = self.copies.h2d(source, target, done, CopyPriority.RESTORE)
        batch.waits.append(part.copy.event)

    # ── execute ──────────────────────────────────────────────────────────────────────────────────

    def execute(self, prepared: PreparedBatchHandle) -> BatchTicket:
        batch = next((b for b in self._prepared if b.batch_id == prepared.batch_id), None)
        if prepared.runtime_id != self.core.runtime_id or batch is None:
            raise StaleHandleError(f"not a prepared batch: {prepared}")
        if batch is not self._prepared[0]:
            raise PlanError(f"batch {self._prepared[0].batch_id} was prepared before {prepared}")
        self._prepared.popleft()
        compute = self.core.device.compute
        for event in batch.waits:
            compute.wait_event(event)  # KV_READY: the restored pages are in place
        compute.enqueue(lambda: self.compute.run(batch))
        compute.record().on_complete(lambda: self._computed(batch))
        return BatchTicket(self.core.runtime_id, batch.batch_id)

    # ── finish ───────────────────────────────────────────────────────────────────────────────────

    def _computed(self, batch: Batch) -> None:
        """On a thread of the device; later batches may run already, or even have run."""
        with self.core.callback():
            if not batch.ended:
                self._finish(batch)

    def _finish(self, batch: Batch) -> None:
        batch.ended = True
        del self._batches[batch.batch_id]
        results = tuple(self._result(part) for part in batch.parts)
        self.core.events.emit(
            BatchDone(
                batch_id=batch.batch_id,
                rows=results,
                compute_s=batch.compute_s,
                counters=batch.counters,
                error=batch.error,
            )
        )
        self.core.settle_frees()

    def _result(self, part: Part) -> RowResult:
        row = part.row
        row.batches -= 1
        first = row.handed_pages
        extents: Extents = ()
        n_valid = part.kv_len // self.page_tokens
        if part.status is RowStatus.OK:
            extents = self._hand_over(row, part.kv_len)
        elif part.status is RowStatus.NEEDS_RECOMPUTE:
            n_valid = row.attached_pages - page_set_count(part.restore)
        result = RowResult(
            handle=row.handle,
            status=part.status,
            first_page_index=first,
            extents=extents,
            sampled=np.asarray(part.sampled, np.int32).tobytes(),
            finished=part.finished,
            n_valid_pages=n_valid,
            error=part.error,
        )
        if row.released and row.batches == 0:
            self._drop_row(row)
        return result

    def _hand_over(self, row: Row, kv_len: int) -> Extents:
        """Full pages up to `kv_len` that control has no claim on yet, as extents that it owns."""
        full = max(kv_len // self.page_tokens, row.attached_pages)
        for name, pages in row.hand.items():
            self.core.tables[name].ready(pages[max(row.handed_pages, row.attached_pages) : full])
        given = part_of(row.hand, row.handed_pages, full)
        row.handed_pages = max(row.handed_pages, full)
        return self.core.claim(Tier.L1, given)

    # ── end ──────────────────────────────────────────────────────────────────────────────────────

    def release(self, row: Row) -> None:
        """Control is done with a request; its pages go when the last batch that names it ended."""
        row.released = True
        row.aborted = row.aborted or not row.finished
        if row.batches == 0:
            self._drop_row(row)

    def _drop_row(self, row: Row) -> None:
        self.rows.remove(row)
        for pages in row.held:
            self.core.release_l1(pages)
        row.held.clear()

    def abort(self, handle: RequestRuntimeHandle) -> None:
        try:
            self.rows.get(handle).aborted = True
        except StaleHandleError:
            return

    def abort_all(self) -> None:
        for row in self.rows.all():
            row.aborted = True

    def end_all(self) -> None:
        """At shutdown: every batch that did not end gets its event."""
        for batch in list(self._batches.values()):
            for part in batch.parts:
                part.status, part.finished = RowStatus.ABORTED, True
                part.row.released = False  # a copy that is stuck may still write its pages
            self._finish(batch)
