"""The whole runtime under random control and random faults, checked at every step.

Threads decide when things end, so a run is not repeated to the letter by its seed; what it does
and asks for is.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvstrata.boundary import (
    BackedUp,
    BatchPlan,
    Event,
    Located,
    OpenRow,
    PrefetchReady,
    PreparedBatchHandle,
    Restored,
    RowPlan,
    RowResult,
    RowStatus,
)
from kvstrata.errors import CapacityError
from kvstrata.gpu_runtime.testing import Prompt, Rig
from kvstrata.handles import (
    Extents,
    RequestRuntimeHandle,
    StagingMode,
    Tier,
    page_count,
    slice_extents,
)

Bench = Callable[..., Rig]
Plant = Callable[[Rig, random.Random], Callable[[int], None]]
SIZE = 4
SHORT_S, LONG_S = 0.01, 60.0


@dataclass(eq=False)
class Held:
    """Pages `start …` of `prompt` that control owns in a tier."""

    prompt: Prompt
    start: int
    extents: Extents
    tier: Tier

    @property
    def stop(self) -> int:
        return self.start + page_count(self.extents)


@dataclass(eq=False)
class Request:
    tokens: list[int]
    prompt: int
    max_new: int
    planned: int = 0
    handle: RequestRuntimeHandle | None = None
    ended: bool = False

    @property
    def max_kv(self) -> int:
        return self.prompt + self.max_new - 1


@dataclass(eq=False)
class Control:
    """Does what a control may do, in no sensible order."""

    rig: Rig
    numbers: random.Random
    held: list[Held] = field(default_factory=list)
    requests: dict[RequestRuntimeHandle, Request] = field(default_factory=dict)
    prepared: list[tuple[PreparedBatchHandle, list[Request]]] = field(default_factory=list)
    batches: dict[int, list[Request]] = field(default_factory=dict)
    wanted: dict[int, Callable[[Event], None]] = field(default_factory=dict)
    """What to do with the end of an action."""

    @property
    def keeps(self) -> Tier:
        """Where a backup may go besides L3."""
        cached = self.rig.settings.mode is StagingMode.CACHE
        return Tier.L2 if cached or self.numbers.random() < 0.05 else Tier.L3

    # ── content ──────────────────────────────────────────────────────────────────────────────────

    def new_prompt(self) -> Prompt:
        """Few pages to choose from, so that prefixes are shared."""
        pages = self.numbers.choices(range(2), k=self.numbers.randint(0, 5))
        tokens = [100 * page + i for page in pages for i in range(SIZE)]
        tokens += [7] * self.numbers.randint(0, SIZE - 1)
        return Prompt(np.array(tokens or [1], np.int32), SIZE)

    def continues(self, prompt: Prompt, at: int, tier: Tier) -> list[Held]:
        """What is held of a prompt's pages from page `at` on."""
        return [
            held
            for held in self.held
            if held.tier is tier
            and held.start <= at < min(held.stop, prompt.full_pages)
            and np.array_equal(
                held.prompt.tokens[: (at + 1) * SIZE], prompt.tokens[: (at + 1) * SIZE]
            )
        ]

    def cover(self, prompt: Prompt, at: int, tier: Tier) -> tuple[Extents, int]:
        """Extents of a prompt's pages from `at` on, and where they end."""
        found: Extents = ()
        while options := self.continues(prompt, at, tier):
            held = self.numbers.choice(options)
            stop = at + 1
            while stop < min(held.stop, prompt.full_pages) and np.array_equal(
                held.prompt.tokens[: (stop + 1) * SIZE], prompt.tokens[: (stop + 1) * SIZE]
            ):
                stop += 1
            if self.numbers.random() < 0.2:
                stop = self.numbers.randint(at + 1, stop)
            found += slice_extents(held.extents, at - held.start, stop - held.start)
            at = stop
            if self.numbers.random() < 0.2:
                break
        return found, at

    # ── batches ──────────────────────────────────────────────────────────────────────────────────

    def batch(self) -> None:
        opened: list[tuple[Request, OpenRow]] = []
        rows: list[RowPlan] = []
        members: list[tuple[Request, int]] = []
        steps = self.numbers.randint(1, 4)
        for request in self.numbers.sample(sorted_requests(self.requests), k=2):
            plan, end = self.go_on(request, steps)
            if plan is not None:
                rows.append(plan)
                members.append((request, end))
        for _ in range(self.numbers.randint(0, 2)):
            prompt = self.new_prompt()
            request = Request(prompt.tokens.tolist(), len(prompt), self.numbers.randint(1, 6))
            plan, end = self.first(request, prompt, len(opened))
            opened.append((request, prompt.open(request.max_new, (self.numbers.randrange(2**31),))))
            rows.append(plan)
            members.append((request, end))
        release = [h for h, r in self.requests.items() if r.ended and self.numbers.random() < 0.5]
        try:
            prepared = self.rig.driver.prepare(
                BatchPlan(
                    release=tuple(release),
                    open=tuple(row for _, row in opened),
                    rows=tuple(rows),
                    steps=steps,
                )
            )
        except CapacityError:
            self.forget(release)
            return
        self.forget(release)
        for (request, _), handle in zip(opened, prepared.opened, strict=True):
            request.handle = handle
            self.requests[handle] = request
        for request, end in members:
            request.planned = end
        if rows:
            self.prepared.append((prepared, [request for request, _ in members]))

    def go_on(self, request: Request, steps: int) -> tuple[RowPlan | None, int]:
        if request.ended or request.handle is None or request.planned >= request.max_kv:
            return None, 0
        if request.planned < request.prompt:
            count = self.numbers.randint(1, request.prompt - request.planned)
            plan = RowPlan(row=request.handle, start=request.planned, count=count)
            return plan, request.planned + count
        return RowPlan(row=request.handle), min(request.planned + steps, request.max_kv)

    def first(self, request: Request, prompt: Prompt, index: int) -> tuple[RowPlan, int]:
        attach, at = self.cover(prompt, 0, Tier.L1)
        restore, at = self.cover(prompt, at, Tier.L2)
        start = min(at * SIZE, len(prompt) - 1)
        count = 1 if at * SIZE == len(prompt) else self.numbers.randint(1, len(prompt) - start)
        plan = RowPlan(row=index, attach=attach, restore=restore, start=start, count=count)
        return plan, start + count

    def execute(self) -> None:
        if self.prepared:
            prepared, requests = self.prepared.pop(0)
            self.batches[self.rig.driver.execute(prepared)] = requests

    def forget(self, handles: list[RequestRuntimeHandle]) -> None:
        for handle in handles:
            del self.requests[handle]

    def release(self) -> None:
        able = [h for h, r in self.requests.items() if r.handle]
        if able:
            handle = self.numbers.choice(able)
            self.rig.release(handle)
            self.forget([handle])

    def cancel_request(self) -> None:
        if self.requests:
            self.rig.driver.cancel(self.numbers.choice(sorted_requests(self.requests)[2:]).handle)  # type: ignore[arg-type]

    # ── actions ──────────────────────────────────────────────────────────────────────────────────

    def act(self) -> None:
        driver, numbers = self.rig.driver, self.numbers
        deadline_s = numbers.choice([SHORT_S, LONG_S, LONG_S])
        kind = numbers.choice(
            ["backup", "backup", "backup", "free", "prefetch", "prefetch", "rest"]
        )
        if kind in ("backup", "free") and not self.held:
            kind = "prefetch"
        if kind == "backup":
            held = numbers.choice(self.held)
            target = numbers.choice([self.keeps, Tier.L3])
            keys = held.prompt.keys(held.start, held.stop)
            action: Any = driver.backup(keys, held.extents, target, deadline_s)
            self.wanted[action.action_id] = lambda e: self.backed_up(e, held, target)
        elif kind == "free":
            held = self.held.pop(numbers.randrange(len(self.held)))
            cut = numbers.randint(0, page_count(held.extents))
            parts = [
                slice_extents(held.extents, 0, cut),
                slice_extents(held.extents, cut, held.stop),
            ]
            frees = [driver.free(part) for part in parts if part]
            for free in frees:
                self.wanted[free.action_id] = lambda e: None
            driver.apply(*frees)
            return
        elif kind == "prefetch":
            prompt = self.new_prompt()
            target = Tier.L1 if self.keeps is Tier.L3 else numbers.choice([Tier.L1, Tier.L2])
            action = driver.prefetch(prompt.keys(), target, deadline_s)
            self.wanted[action.action_id] = lambda e: self.came(e, prompt, target)
        else:
            action = self.rest(deadline_s)
        driver.apply(action)
        if numbers.random() < 0.3:
            driver.cancel(action.action_id)

    def rest(self, deadline_s: float) -> Any:
        driver, prompt = self.rig.driver, self.new_prompt()
        in_l2 = [held for held in self.held if held.tier is Tier.L2]
        kind = self.numbers.choice(["lookup", "drop", "restore", "restore"])
        if kind == "restore" and in_l2:
            held = self.numbers.choice(in_l2)
            action: Any = driver.restore(held.extents)
            self.wanted[action.action_id] = lambda e: self.restored(e, held)
        elif kind == "drop":
            action = driver.drop(prompt.keys(), deadline_s)
            self.wanted[action.action_id] = lambda e: None
        else:
            action = driver.lookup(prompt.keys(), deadline_s)
            self.wanted[action.action_id] = lambda e: self.located(e, prompt)
        return action

    def backed_up(self, event: Event, held: Held, target: Tier) -> None:
        if isinstance(event, BackedUp):
            count = held.stop - held.start
            assert 0 <= event.n <= count
            assert (event.cause == "") == (event.n == count)
            assert page_count(event.extents) == (event.n if target is Tier.L2 else 0)
            if event.extents:
                self.held.append(Held(held.prompt, held.start, event.extents, Tier.L2))

    def came(self, event: Event, prompt: Prompt, target: Tier) -> None:
        if isinstance(event, PrefetchReady):
            assert page_count(event.extents) == event.n_valid <= prompt.full_pages
            assert (event.cause == "") == (event.n_valid == prompt.full_pages)
            if event.extents:
                self.held.append(Held(prompt, 0, event.extents, target))

    def restored(self, event: Event, held: Held) -> None:
        if isinstance(event, Restored):
            assert event.n in (0, held.stop - held.start)
            if event.extents:
                self.held.append(Held(held.prompt, held.start, event.extents, Tier.L1))

    def located(self, event: Event, prompt: Prompt) -> None:
        if isinstance(event, Located):
            assert 0 <= event.n <= prompt.full_pages

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def poll(self, timeout_s: float = 0.0) -> None:
        driver = self.rig.driver
        driver.poll(timeout_s)
        for action_id in [a for a in self.wanted if a in driver.ended]:
            self.wanted.pop(action_id)(driver.ended.pop(action_id))
        for batch in [b for b in self.batches if b in driver.done]:
            for request, row in zip(self.batches.pop(batch), driver.done[batch].rows, strict=True):
                self.row_done(request, row)
        assert driver.mismatched == 0

    def row_done(self, request: Request, row: RowResult) -> None:
        request.tokens += np.frombuffer(row.sampled, np.int32).tolist()
        request.ended |= row.finished
        assert row.handle == request.handle
        assert row.finished or row.status is RowStatus.OK
        if row.extents:
            assert row.status is RowStatus.OK
            prompt = Prompt(np.array(request.tokens, np.int32), SIZE)
            held = Held(prompt, row.first_page_index, row.extents, Tier.L1)
            assert held.stop <= prompt.full_pages, "a page that is not full"
            self.held.append(held)

    def end(self) -> None:
        """All comes back: then every page is free, and nothing waited for its deadline."""
        start_s = time.monotonic()
        self.rig.backend.open_all()
        while self.prepared:
            self.execute()
        self.rig.release(*self.requests)
        while self.rig.driver.open or self.rig.driver.running or self.held:
            for held in self.held:  # what waits for pages gets them
                self.rig.driver.apply(free := self.rig.driver.free(held.extents))
                self.wanted[free.action_id] = lambda e: None
            self.held.clear()
            self.poll(1.0)
        assert not self.wanted
        self.rig.expect_free()
        assert time.monotonic() - start_s < LONG_S / 2, "wedged until a deadline"


def sorted_requests(requests: dict[RequestRuntimeHandle, Request]) -> list[Request]:
    """Two that never run, so that a sample of two is always there; then all others."""
    return [Request([], 0, 0, ended=True), Request([], 0, 0, ended=True), *requests.values()]


@pytest.mark.parametrize("mode", StagingMode)
@pytest.mark.parametrize("two_pools", [False, True])
@pytest.mark.parametrize("with_faults", [False, True])
def test_random_control(
    bench: Bench,
    seed: int,
    plant: Plant,
    mode: StagingMode,
    two_pools: bool,
    with_faults: bool,
) -> None:
    rig = bench(
        two_pools=two_pools, pages=28, host_pages=10, mode=mode, max_requests=6, max_bytes=300_000
    )
    numbers = random.Random(f"{seed} {mode} {two_pools} {with_faults}")
    control = Control(rig, numbers)
    more_faults = plant(rig, numbers) if with_faults else lambda step: None
    moves = [control.batch] * 4 + [control.execute] * 4 + [control.act] * 4
    moves += [control.release if numbers.random() < 0.5 else control.cancel_request]
    for step in range(700):
        more_faults(step)
        numbers.choice(moves)()
        if numbers.random() < 0.6:
            control.poll()
        rig.check()
        if len(control.held) > 8:  # else nothing fits any more
            rig.driver.apply(free := rig.driver.free(control.held.pop(0).extents))
            control.wanted[free.action_id] = lambda e: None
    control.end()
    done = rig.driver.done.values()
    assert any(row.status is RowStatus.OK for batch in done for row in batch.rows)
    if not with_faults:
        assert rig.driver.verified > 0
