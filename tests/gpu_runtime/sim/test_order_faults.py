"""Faults of order that others had in public, one by one: at every turn, slow, late, or in a row."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvstrata.backends import PageResult, WriteRequest
from kvstrata.boundary import BackedUp, BatchPlan, Event, Outcome, RowPlan, RowResult
from kvstrata.errors import CapacityError, StaleHandleError
from kvstrata.gpu_runtime import LocalGPURuntime, OracleRunner, RuntimeSettings
from kvstrata.gpu_runtime.testing import Driver, Prompt
from kvstrata.gpu_runtime.testing.simulated import KV, NAMESPACE, PAGE, SimBench, sim_bench
from kvstrata.gpu_runtime.turns import rest
from kvstrata.handles import CacheExtentRef, Extents, Tier
from kvstrata.staging import PageState, StagingSettings
from kvstrata.staging.pages import runs_of_pages

BOTH = pytest.mark.parametrize("mode", ["cache", "buffer_only"])
FOREVER_S = 300.0


class Hands:
    """Control by hand; what it waits for is brought about by turns."""

    def __init__(self, bench: SimBench) -> None:
        self.bench, self.driver = bench, Driver(bench.runtime)

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(20_000):
            if condition():
                return
            if not self.bench.turns.run(1):
                self.bench.turns.skip()
            self.driver.poll()
        raise AssertionError(f"never came true: {self.driver.open}, {self.driver.running}")

    def end_of(self, action_id: int) -> Event:
        self.until(lambda: action_id in self.driver.ended)
        return self.driver.ended[action_id]

    def compute(self, *prompts: Prompt, attach: Extents = ()) -> tuple[RowResult, ...]:
        """One batch that computes whole prompts, in rows that go again."""
        known = sum(e.page_count for e in attach if e.pool == "kv") * PAGE
        rows = tuple(
            RowPlan(row=i, attach=attach, start=known, count=len(prompt) - known)
            for i, prompt in enumerate(prompts)
        )
        opened = tuple(prompt.open() for prompt in prompts)
        batch, handles = self.driver.run(BatchPlan(open=opened, rows=rows))
        self.until(lambda: batch in self.driver.done)
        self.driver.prepare(BatchPlan(release=handles))
        return self.driver.done[batch].rows

    def free(self, *extents: Extents) -> None:
        for action_id in self.driver.apply(*[self.driver.free(e) for e in extents]):
            self.end_of(action_id)


def prompt_of(pages: int, name: int = 1, tail: int = 0) -> Prompt:
    tokens = [100 * name + i for i in range(pages * PAGE + tail)]
    return Prompt(np.array(tokens, np.int32), PAGE, NAMESPACE)


@BOTH
def test_abort_at_every_turn(mode: str, scheduled: Any) -> None:
    """B058: a request whose pages come from below is aborted after each number of turns. No page
    has a name without its bytes, and nothing that was held for it stays."""
    prompt = prompt_of(4).tokens.tolist()
    for turns in range(0, 72, 2):
        with sim_bench(turns, mode, "calm") as bench:
            control = scheduled(bench)
            control.abort_rate = control.evict_rate = 0.0
            control.submit(prompt, 1)
            control.run()
            for tier in (Tier.L1, Tier.L2) if turns % 4 else (Tier.L1,):
                control.evict(tier, 99)
            victim = control.submit([*prompt, 7], 3)
            for _ in range(turns):
                for result in control.scheduler.step(0.0):
                    control.results[result.request_id] = result
                bench.turns.run(1)
            control.abort(victim)
            control.submit([*prompt, 9], 2)
            control.go(requests=0)


def test_a_copy_that_stands_still_holds_up_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """B055: compute never waits for a D2H, so nothing that is enqueued behind one can hang on it;
    in two runtimes at a time."""
    with sim_bench(1, "cache", "calm") as first, sim_bench(2, "cache", "calm") as second:
        for bench in (first, second):
            hands = Hands(bench)
            prompt = prompt_of(2)
            (row,) = hands.compute(prompt)
            for pool in bench.core.pools.values():
                gather = pool.gather
                monkeypatch.setattr(
                    pool, "gather", lambda *a, real=gather: (rest(FOREVER_S), real(*a))
                )
            action = hands.driver.backup(prompt.keys(), row.extents, Tier.L2)
            hands.driver.apply(action)
            for name in (2, 3):
                (other,) = hands.compute(prompt_of(1, name))
                hands.free(other.extents)
            assert action.action_id not in hands.driver.ended
            event = hands.end_of(action.action_id)
            assert isinstance(event, BackedUp)
            bench.check_pages(prompt.keys().keys, Tier.L2, event.extents)
            hands.free(row.extents, event.extents)


def test_a_page_is_shared_by_two_producers_never() -> None:
    """B056, B059: while a load fills pages they have no name, a made-up one is refused, and they
    are not handed out; what two requests compute at once is two copies, and both are right."""
    with sim_bench(3, "buffer_only", "calm") as bench:
        hands, prompt = Hands(bench), prompt_of(3)
        (row,) = hands.compute(prompt)
        action = hands.driver.backup(prompt.keys(), row.extents, Tier.L3)
        hands.driver.apply(action)
        hands.end_of(action.action_id)
        hands.free(row.extents)
        load = hands.driver.prefetch(prompt.keys(), Tier.L1)
        hands.driver.apply(load)
        made_up = []
        for name, table in bench.core.tables.items():
            pages = np.flatnonzero(table._state == PageState.LOADING)
            assert len(pages) == 3
            stamp = int(table._stamp[pages[0]])
            runs = runs_of_pages(pages)
            made_up.append(CacheExtentRef(bench.core.runtime_id, stamp, Tier.L1, name, runs))
        for bad in (
            hands.driver.backup(prompt.keys(), tuple(made_up), Tier.L3),
            hands.driver.free(tuple(made_up)),
        ):
            hands.driver.apply(bad)
            assert getattr(hands.end_of(bad.action_id), "cause", "") == "stale"
        free = bench.core.tables["kv"].free
        with pytest.raises(CapacityError):
            hands.compute(prompt_of(free + 1, name=5))
        twin = hands.compute(prompt, prompt)
        extents = (hands.end_of(load.action_id).extents, *(row.extents for row in twin))  # type: ignore[union-attr]
        for each in extents:
            bench.check_pages(prompt.keys().keys, Tier.L1, each)
        hands.free(*extents)
        bench.check_rest()


def test_what_belongs_to_a_runtime_that_is_gone_is_stale() -> None:
    """B060: backups are queued when the pools go; the next runtime refuses the old names."""
    old = []
    with sim_bench(4, "cache", "calm", runtime_id=7) as bench:
        hands, prompt = Hands(bench), prompt_of(3)
        (row,) = hands.compute(prompt)
        backup = hands.driver.backup(prompt.keys(), row.extents, Tier.L2)
        hands.driver.apply(backup)
        bench.runtime.close(100)
        hands.driver.poll()
        assert backup.action_id in hands.driver.ended
        old.append((row.handle, row.extents))
    with sim_bench(4, "cache", "calm", runtime_id=8) as bench:
        hands = Hands(bench)
        (row,) = hands.compute(prompt)
        for handle, extents in old:
            same = [
                (a.generation, a.page_runs) == (b.generation, b.page_runs)
                for a, b in zip(extents, row.extents, strict=True)
            ]
            assert all(same), "equal but for the runtime"
            with pytest.raises(StaleHandleError):
                hands.driver.prepare(BatchPlan(rows=(RowPlan(row=handle),)))
            with pytest.raises(StaleHandleError):
                hands.compute(prompt_of(4), attach=extents)
            stale = hands.driver.backup(prompt.keys(), extents, Tier.L3)
            hands.driver.apply(stale)
            assert getattr(hands.end_of(stale.action_id), "cause", "") == "stale"
        hands.free(row.extents)


def test_two_runtimes_have_two_names() -> None:
    """B060: also those that were not told one."""
    names = set()
    for _ in range(3):
        settings = RuntimeSettings((KV,), 4, PAGE, 1, 64, StagingSettings(total_bytes=8 * 4096))
        runtime = LocalGPURuntime(settings, OracleRunner())
        names.add(runtime.core.runtime_id)
        runtime.close(5)
    assert len(names) == 3


def test_what_a_late_copy_needs_stays_alive() -> None:
    """B061: page lists and index tensors live until the copy has run, whoever else forgot them."""
    with sim_bench(6, "cache", "calm") as bench:
        core, ended = bench.core, []
        pages = {name: table.reserve(3) for name, table in core.tables.items()}
        slots = {name: table.reserve(3) for name, table in core.staging.tables.items()}
        want = {name: (p.copy(), slots[name].copy()) for name, p in pages.items()}
        for name, (numbers, _) in want.items():
            core.pools[name].data[:, numbers] = 9
        bench.runtime._moves.copies.d2h(dict(pages), dict(slots), ended.append)
        del pages, slots
        gc.collect()
        junk = [np.full(3, 1 << 40, np.int64) for _ in range(500)]
        assert bench.turns.run_until(lambda: bool(ended), FOREVER_S)
        assert ended == [""]
        assert len(junk) == 500
        for name, (numbers, targets) in want.items():
            size = core.pools[name].page_bytes
            assert (core.staging.array(name)[targets][:, :size] == 9).all()
            core.release_l1({name: numbers})
        core.staging.give_back({name: targets for name, (_, targets) in want.items()})


def test_the_second_of_three_cannot_be_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """B064: the first and the third are, to their last full page, and all three are accounted
    for; lengths that are no multiple of a page."""
    with sim_bench(8, "buffer_only", "calm") as bench:
        hands = Hands(bench)
        prompts = [prompt_of(2, 1, tail=1), prompt_of(2, 2, tail=3), prompt_of(3, 3, tail=2)]
        refused = {prompts[1].keys().key(i) for i in range(2)}
        write = bench.backend.write

        def refuse(requests: Sequence[WriteRequest]) -> list[PageResult]:
            if requests[0].object.key in refused:
                return [PageResult(Outcome.ACCESS)] * len(requests)
            return write(requests)

        monkeypatch.setattr(bench.backend, "write", refuse)
        rows = hands.compute(*prompts)
        backups = [
            hands.driver.backup(prompt.keys(), row.extents, Tier.L3)
            for prompt, row in zip(prompts, rows, strict=True)
        ]
        hands.driver.apply(*backups, *(hands.driver.free(row.extents) for row in rows))
        events = [hands.end_of(backup.action_id) for backup in backups]
        assert [getattr(event, "n", None) for event in events] == [2, 0, 3]
        assert [getattr(event, "cause", None) for event in events] == ["", "access", ""]
        hands.until(lambda: not hands.driver.open)
        for prompt in (prompts[0], prompts[2]):
            bench.check_stored(prompt.keys())
        bench.check_rest()
        for table in bench.core.tables.values():
            assert table.free == table.total
