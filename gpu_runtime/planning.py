"""Checks a plan against the tables: all of it, before anything at all takes effect."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstrata.boundary import BatchPlan, Free, RowPlan
from kvstrata.errors import PlanError, StaleHandleError
from kvstrata.gpu_runtime.core import PageSet, RuntimeCore, page_set_count
from kvstrata.gpu_runtime.rows import Row, RowTable, check_open, empty_pages
from kvstrata.handles import Extents, RequestRuntimeHandle, Tier


@dataclass(eq=False, slots=True)
class CheckedRow:
    """A row plan, and what it needs; nothing was taken yet."""

    plan: RowPlan
    attach: PageSet
    restore: PageSet
    row: Row | None
    """None: a request that this plan opens."""
    end: int
    """Where its KV ends after the batch."""
    need: int
    """Device pages that it takes, in every pool."""
    private_copy: bool
    """It computes the last token of a wholly cached prompt, into a copy of the last page."""


@dataclass(eq=False, slots=True)
class CheckedPlan:
    plan: BatchPlan
    releases: list[Row] = field(default_factory=list)
    rows: list[CheckedRow] = field(default_factory=list)

    @property
    def need(self) -> int:
        return sum(row.need for row in self.rows)


class OldPages:
    """Stamps of the pages of older epochs, whose extents can be freed and nothing else."""

    def __init__(self) -> None:
        self._stamps: set[int] = set()

    def begin_epoch(self, core: RuntimeCore) -> None:
        """All pages that are in use now are old."""
        tables = (*core.tables.values(), *core.staging.tables.values())
        self._stamps = set().union(*(table.stamps_in_use() for table in tables))

    def __contains__(self, extents: Extents) -> bool:
        return any(extent.generation in self._stamps for extent in extents)


class Planner:
    """Under the runtime's lock; changes nothing."""

    def __init__(self, core: RuntimeCore, rows: RowTable, old: OldPages) -> None:
        self._core, self._rows, self._old = core, rows, old
        self._page_tokens = core.settings.page_tokens

    def check(self, plan: BatchPlan) -> CheckedPlan:
        """Raises PlanError for a contradiction, StaleHandleError for what is not the runtime's."""
        if plan.steps < 1:
            raise PlanError(f"a batch of {plan.steps} steps")
        _only_once("released or run", (*plan.release, *(r.row for r in plan.rows)))
        checked = CheckedPlan(plan, [self._rows.get(handle) for handle in plan.release])
        for opened in plan.open:
            check_open(opened, self._core.settings.max_context_tokens)
        checked.rows = [self._check_row(plan, row) for row in plan.rows]
        self._check_frees(plan, checked.rows)
        return checked

    def _check_row(self, plan: BatchPlan, row_plan: RowPlan) -> CheckedRow:
        if isinstance(row_plan.row, RequestRuntimeHandle):
            return self._check_known(row_plan, self._rows.get(row_plan.row), plan.steps)
        if not 0 <= row_plan.row < len(plan.open):
            raise PlanError(f"row {row_plan.row} is not one of the opened requests")
        prompt = len(plan.open[row_plan.row].tokens) // 4
        return self._check_opened(row_plan, prompt)

    def _check_known(self, plan: RowPlan, row: Row, steps: int) -> CheckedRow:
        if plan.attach or plan.restore:
            raise PlanError("pages are attached when a request is opened, not later")
        known, prompt = row.planned_kv, row.prompt_tokens
        if plan.count:
            end = _chunk_end(plan, known, prompt)
        elif known < prompt:
            raise PlanError(f"decode at {known}, before the prompt of {prompt} is computed")
        else:
            end = min(known + steps, row.max_kv)
        none = empty_pages(self._core.pools)
        need = max(0, self._pages(end) - row.page_count)
        return CheckedRow(plan, none, none, row, end, need, False)

    def _check_opened(self, plan: RowPlan, prompt: int) -> CheckedRow:
        attach = self._resolve(plan.attach, Tier.L1)
        restore = self._resolve(plan.restore, Tier.L2)
        restored = page_set_count(restore)
        cached = page_set_count(attach) + restored
        known = cached * self._page_tokens
        copy = known == prompt == plan.start + 1 and plan.count == 1
        if not plan.count:
            raise PlanError("a request that is opened has nothing to decode from")
        end = _chunk_end(plan, known - 1 if copy else known, prompt)
        need = self._pages(end) - cached + restored + int(copy)
        return CheckedRow(plan, attach, restore, None, end, need, copy)

    def _check_frees(self, plan: BatchPlan, rows: list[CheckedRow]) -> None:
        """A plan must not attach or restore what it frees."""
        used: dict[tuple[Tier, str], set[int]] = {}
        for row in rows:
            for tier, held in ((Tier.L1, row.attach), (Tier.L2, row.restore)):
                for name, pages in held.items():
                    used.setdefault((tier, name), set()).update(pages.tolist())
        for free in plan.frees:
            self._core.resolve(free.extents)
        for free in (*plan.frees, *(a for a in plan.actions if isinstance(a, Free))):
            try:
                tier, freed = self._core.resolve(free.extents)
            except StaleHandleError:
                continue  # as an action of the plan it fails by itself
            for name, pages in freed.items():
                if any(page in used.get((tier, name), ()) for page in pages.tolist()):
                    raise PlanError("a plan frees pages that one of its rows attaches or restores")

    def _resolve(self, extents: Extents, tier: Tier) -> PageSet:
        if not extents:
            return empty_pages(self._core.pools)
        if extents in self._old:
            raise StaleHandleError(f"extents of an older epoch: {extents}")
        return self._core.resolve(extents, tier)[1]

    def _pages(self, positions: int) -> int:
        return -(-positions // self._page_tokens)


def _chunk_end(plan: RowPlan, known: int, prompt: int) -> int:
    end = plan.start + plan.count
    if plan.count < 0 or plan.start != known:
        raise PlanError(f"row computes {plan.count} from {plan.start}, its KV ends at {known}")
    if end > prompt:
        raise PlanError(f"a chunk to {end} leaves a prompt of {prompt}")
    return end


def _only_once(what: str, names: Iterable[RequestRuntimeHandle | int]) -> None:
    seen: set[RequestRuntimeHandle | int] = set()
    for name in names:
        if name in seen:
            raise PlanError(f"{name} is {what} twice in one plan")
        seen.add(name)
