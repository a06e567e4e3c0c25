"""Batches: reserve and start copies (prepare), enqueue (execute), hand results over (finish)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvstrata.boundary import (
    BatchDone,
    BatchPlan,
    BatchTicket,
    PreparedBatchHandle,
    RowPlan,
    RowResult,
    RowStatus,
)
from kvstrata.errors import PlanError, StaleHandleError
from kvstrata.gpu_runtime.base import Event, ForwardContext, ForwardRow, ModelRunner
from kvstrata.gpu_runtime.core import PageSet, RuntimeCore, page_set_count
from kvstrata.gpu_runtime.req_to_token import ReqToToken
from kvstrata.gpu_runtime.rows import Row, RowTable, check_open, empty_pages
from kvstrata.gpu_runtime.transfers import Copies, part_of
from kvstrata.handles import Extents, RequestRuntimeHandle, Tier


@dataclass(eq=False, slots=True)
class _Step:
    """One row's part of one batch. `plan` is what was asked, the rest what came of it."""

    row: Row
    start: int
    count: int
    """0: decode."""
    new_pages: PageSet = field(default_factory=dict)
    stop_index: int = 0
    """Page index behind the last page of this part."""
    restore: PageSet = field(default_factory=dict)
    restore_error: str = ""
    opened: bool = False
    private_copy: bool = False
    sampled: list[int] = field(default_factory=list)
    status: RowStatus = RowStatus.OK


@dataclass(eq=False, slots=True)
class _Checked:
    """A row plan that was checked against the tables; nothing was taken yet."""

    plan: RowPlan
    attach: PageSet
    restore: PageSet
    row: Row | None
    need: int
    end: int
    start: int
    private_copy: bool


@dataclass(eq=False, slots=True)
class Batch:
    batch_id: int
    steps: int
    parts: list[_Step]
    waits: list[Event] = field(default_factory=list)
    executed: bool = False
    ended: bool = False
    compute_s: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)
    error: str = ""


class BatchEngine:
    """Prepares and executes batches. Public methods run under the runtime's lock, `_run` on the
    compute stream without it."""

    def __init__(self, core: RuntimeCore, copies: Copies, runner: ModelRunner) -> None:
        self.core, self.copies, self.runner = core, copies, runner
        settings = core.settings
        self.page_tokens = settings.page_tokens
        self.rows = RowTable(core.runtime_id, settings.max_requests, core.pools)
        self.req_to_token = ReqToToken(
            tuple(core.pools),
            settings.max_requests,
            settings.max_context_tokens,
            settings.page_tokens,
            core.device.torch_device,
        )
        self.context = ForwardContext(core.pools, self.req_to_token, settings.page_tokens)
        self.batches: dict[int, Batch] = {}
        self._next_batch = 1

    # ── prepare ──────────────────────────────────────────────────────────────────────────────────

    def prepare(self, plan: BatchPlan, before_rows: Callable[[], None]) -> PreparedBatchHandle:
        """`before_rows` applies the plan's frees and actions, after all was checked."""
        releases = [self.rows.get(handle) for handle in plan.release]
        for opened in plan.open:
            check_open(opened, self.core.settings.max_context_tokens)
        checked = [self._check_row(plan, row) for row in plan.rows]
        self._check_frees(plan, checked)
        for row in releases:
            self.release(row)
        before_rows()
        self._check_capacity(len(plan.open), sum(c.need for c in checked))

        opened_rows = [self.rows.open(o) for o in plan.open]
        batch = Batch(self._next_batch, max(plan.steps, 1), [])
        self._next_batch += 1
        for check in checked:
            index = check.plan.row
            known = check.row if not isinstance(index, int) else opened_rows[index]
            assert known is not None, "a handle was checked to have a row"
            batch.parts.append(self._admit(known, check, batch))
        if batch.parts:
            self.batches[batch.batch_id] = batch
        handles = tuple(row.handle for row in opened_rows)
        return PreparedBatchHandle(self.core.runtime_id, batch.batch_id, handles)

    def _check_row(self, plan: BatchPlan, row_plan: RowPlan) -> _Checked:
        attach = self._resolve(row_plan.attach, Tier.L1)
        restore = self._resolve(row_plan.restore, Tier.L2)
        cached = page_set_count(attach) + page_set_count(restore)
        if isinstance(row_plan.row, RequestRuntimeHandle):
            row: Row | None = self.rows.get(row_plan.row)
            assert row is not None
            known, have, max_kv = row.planned_kv, row.page_count, row.max_kv
            prompt = row.prompt_tokens
            if cached:
                raise PlanError("pages are attached when a request is opened, not later")
        else:
            if not 0 <= row_plan.row < len(plan.open):
                raise PlanError(f"row {row_plan.row} is not one of the opened requests")
            row, opened = None, plan.open[row_plan.row]
            prompt = len(opened.tokens) // 4
            known, have = cached * self.page_tokens, cached
            max_kv = prompt + opened.max_new_tokens - 1
        copy = row is None and row_plan.count == 1 and known == prompt == row_plan.start + 1
        self._check_span(row_plan, known - 1 if copy else known, prompt)
        if row_plan.count:
            end = row_plan.start + row_plan.count
        else:
            end = min(known + max(plan.steps, 1), max_kv)
        new = max(0, -(-end // self.page_tokens) - have)
        need = new + page_set_count(restore) + int(copy)
        return _Checked(row_plan, attach, restore, row, need, end, row_plan.start, copy)

    def _check_span(self, plan: RowPlan, start: int, prompt: int) -> None:
        if plan.count < 0 or (plan.count and plan.start != start):
            raise PlanError(f"row computes from {plan.start}, its KV ends at {start}")
        if plan.count and plan.start + plan.count > prompt:
            raise PlanError(f"a chunk to {plan.start + plan.count} leaves a prompt of {prompt}")
        if not plan.count and start < prompt:
            raise PlanError(f"decode at {start}, before the prompt of {prompt} is computed")

    def _check_frees(self, plan: BatchPlan, checked: list[_Checked]) -> None:
        """A plan must not attach or restore what it frees."""
        for free in plan.frees:
            tier, freed = self.core.resolve(free.extents)
            for check in checked:
                used = check.attach if tier is Tier.L1 else check.restore
                if any(np.isin(used[name], pages).any() for name, pages in freed.items()):
                    raise PlanError("a plan frees pages that one of its rows attaches or restores")

    def _resolve(self, extents: Extents, tier: Tier) -> PageSet:
        if not extents:
            return empty_pages(self.core.pools)
        return self.core.resolve(extents, tier)[1]

    def _check_capacity(self, rows: int, pages: int) -> None:
        self.rows.check_room(rows)
        for table in self.core.tables.values():
            table.check_room(pages)

    def _admit(self, row: Row, check: _Checked, batch: Batch) -> _Step:
        """Take the pages of one row and start its restores. Capacity was checked."""
        core = self.core
        step = _Step(row, check.start, check.plan.count, opened=check.row is None)
        step.private_copy = check.private_copy
        n_attach, n_restore = page_set_count(check.attach), page_set_count(check.restore)
        if n_attach:
            for name, pages in check.attach.items():
                core.tables[name].hold(pages)
            row.append_pages(check.attach)
            row.held.append(check.attach)
        if n_restore:
            self._start_restore(step, check.restore, batch)
        new = check.need - n_restore
        if new:
            step.new_pages = {name: t.reserve(new) for name, t in core.tables.items()}
            for name, pages in step.new_pages.items():
                core.tables[name].begin_compute(pages)
            row.held.append(step.new_pages)
        if step.opened:
            row.attached_pages, row.handed_pages = n_attach + n_restore, n_attach
            row.kv_len = min(row.attached_pages * self.page_tokens, check.start)
        if check.private_copy:
            row.replace_last(step.new_pages)
        elif new:
            row.append_pages(step.new_pages)
        step.stop_index = row.page_count
        row.planned_kv = check.end
        row.batches += 1
        return step

    def _start_restore(self, step: _Step, source: PageSet, batch: Batch) -> None:
        core, row = self.core, step.row
        count = page_set_count(source)
        target = {name: table.reserve(count) for name, table in core.tables.items()}
        for name in core.pools:
            core.staging.tables[name].hold(source[name])
            core.tables[name].begin_load(target[name])
        row.append_pages(target)
        row.held.append(target)
        step.restore = target

        def done(error: str) -> None:
            step.restore_error = error
            if not error:
                for name, pages in target.items():
                    core.tables[name].ready(pages)
            core.staging.give_back(source)
            core.settle_frees()

        batch.waits.append(self.copies.h2d(source, target, done))

    # ── execute ──────────────────────────────────────────────────────────────────────────────────

    def execute(self, prepared: PreparedBatchHandle) -> BatchTicket:
        batch = self.batches.get(prepared.batch_id)
        if prepared.runtime_id != self.core.runtime_id or batch is None or batch.executed:
            raise StaleHandleError(f"not a prepared batch: {prepared}")
        batch.executed = True
        compute = self.core.device.compute
        for event in batch.waits:
            compute.wait_event(event)  # KV_READY: the restored pages are in place
        compute.enqueue(lambda: self._run(batch))
        event = compute.record()
        event.on_complete(lambda: self._finish(batch))
        return BatchTicket(self.core.runtime_id, batch.batch_id)

    def _run(self, batch: Batch) -> None:
        """On the compute stream: set the rows up, then forward steps until all rows are done."""
        started = time.monotonic()
        for part in batch.parts:
            self._set_up(part)
        prefilled = 0
        try:
            for index in range(batch.steps):
                parts = [p for p in batch.parts if self._active(p, index)]
                if not parts:
                    break
                rows = [self._forward_row(p, index) for p in parts]
                result = self.runner.forward(rows, self.context)
                for name, value in result.counters.items():
                    batch.counters[name] = batch.counters.get(name, 0) + value
                for part, row, token in zip(parts, rows, result.sampled, strict=True):
                    self._advance(part, row, int(token))
                prefilled += sum(p.count for p in parts)
        except Exception as exc:  # noqa: BLE001 - a runner's fault ends its batch, not the runtime
            batch.error = f"{type(exc).__name__}: {exc}"
            for part in batch.parts:
                part.status = RowStatus.ABORTED
                part.row.aborted = True
        batch.compute_s = time.monotonic() - started
        self.core.prefill_tokens += prefilled
        self.core.prefill_s += batch.compute_s if prefilled else 0.0

    def _set_up(self, part: _Step) -> None:
        row = part.row
        if row.aborted:
            part.status = RowStatus.ABORTED
        elif row.finished:
            part.status = RowStatus.MASKED
        elif part.restore_error:
            part.status = RowStatus.NEEDS_RECOMPUTE
        if part.status is not RowStatus.OK:
            return
        if part.private_copy:
            for name, pool in self.core.pools.items():
                source = int(row.hand[name][part.stop_index - 1])
                pool.copy_page(source, int(part.new_pages[name][0]))
        first = 0 if part.opened else part.stop_index - page_set_count(part.new_pages)
        for name, pages in row.pages.items():
            part_pages = pages[first : part.stop_index]
            self.req_to_token.set_pages(name, row.handle.slot_id, first, part_pages)

    def _active(self, part: _Step, index: int) -> bool:
        if part.status is not RowStatus.OK or part.row.finished:
            return False
        if part.row.aborted:
            part.status = RowStatus.ABORTED
            return False
        return index == 0 or part.count == 0

    def _forward_row(self, part: _Step, index: int) -> ForwardRow:
        row = part.row
        start, count = (part.start, part.count) if part.count else (row.kv_len, 1)
        return ForwardRow(
            slot=row.handle.slot_id,
            namespace=row.namespace,
            tokens=row.tokens[: row.n_tokens],
            start=start,
            count=count,
            attached_pages=row.attached_pages,
            first_in_batch=index == 0,
            samples=start + count == row.n_tokens,
            payload=row.payload,
        )

    def _advance(self, part: _Step, forward: ForwardRow, token: int) -> None:
        row = part.row
        row.kv_len = forward.start + forward.count
        if not forward.samples:
            return
        row.tokens[row.n_tokens] = token
        row.n_tokens += 1
        part.sampled.append(token)
        made = row.n_tokens - row.prompt_tokens
        if made >= row.max_new_tokens or token in row.stop_tokens:
            row.finished = True

    # ── finish ───────────────────────────────────────────────────────────────────────────────────

    def _finish(self, batch: Batch) -> None:
        with self.core.lock:
            if batch.ended:
                return
            batch.ended = True
            self.batches.pop(batch.batch_id, None)
            results = tuple(self._result(part) for part in batch.parts)
            self.core.emit(
                BatchDone(
                    batch_id=batch.batch_id,
                    rows=results,
                    compute_s=batch.compute_s,
                    counters=batch.counters,
                    error=batch.error,
                )
            )
            self.core.settle_frees()

    def _result(self, part: _Step) -> RowResult:
        row = part.row
        row.batches -= 1
        first = row.handed_pages
        extents: Extents = ()
        n_valid = row.kv_len // self.page_tokens
        if part.status is RowStatus.OK:
            extents = self._hand_over(row)
        elif part.status is RowStatus.NEEDS_RECOMPUTE:
            row.finished = True
            n_valid = row.attached_pages - page_set_count(part.restore)
        result = RowResult(
            handle=row.handle,
            status=part.status,
            first_page_index=first,
            extents=extents,
            sampled=np.asarray(part.sampled, np.int32).tobytes(),
            finished=row.finished or row.aborted,
            n_valid_pages=n_valid,
        )
        if row.released and row.batches == 0:
            self._drop_row(row)
        return result

    def _hand_over(self, row: Row) -> Extents:
        """Full pages that control has no claim on yet, as extents that it owns from now on."""
        full = max(row.kv_len // self.page_tokens, row.attached_pages)
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
        for pages in row.held:
            self.core.release_l1(pages)
        row.held.clear()
        self.rows.remove(row)

    def abort(self, handle: RequestRuntimeHandle) -> None:
        try:
            self.rows.get(handle).aborted = True
        except StaleHandleError:
            return

    def end_all(self) -> None:
        """At shutdown: every batch that did not end gets its event."""
        for batch in list(self.batches.values()):
            for part in batch.parts:
                part.row.aborted = True
                part.status = RowStatus.ABORTED
            self._finish(batch)
