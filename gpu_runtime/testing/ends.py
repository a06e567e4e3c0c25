"""Conformance: waiting, deadlines, storage that hangs, and the end."""

from __future__ import annotations

import threading
import time

from kvstrata.boundary import (
    Action,
    ActionFailed,
    BackedUp,
    BatchDone,
    BatchPlan,
    Evicted,
    Located,
    PrefetchReady,
    RowPlan,
    RowStatus,
    StatusReport,
    TierDegraded,
    Wake,
)
from kvstrata.errors import ClosedError
from kvstrata.gpu_runtime.testing.driver import equal, of_type, raises, require
from kvstrata.gpu_runtime.testing.rig import CLOSE_S, MakeRuntime, Rig, RuntimeSuite
from kvstrata.handles import StagingMode, Tier

SOON_S = 0.05
"""A deadline that passes while a gate is shut."""

HUNG = ("timeout", "unavailable")
"""Causes behind a backend that hangs: the deadline came, or its whole share of host pages was stuck
before."""


class EndTests(RuntimeSuite):
    # ── poll ─────────────────────────────────────────────────────────────────────────────────────

    def test_poll_wakes_for_what_was_named(self, make_runtime: MakeRuntime) -> None:
        """And returns at the time limit, with what came meanwhile."""
        with self.bench(make_runtime) as rig:
            driver, prompt = rig.driver, rig.prompt(8)
            pages = rig.make_pages(prompt)
            equal([type(e) for e in driver.poll(0)], [StatusReport], "when nothing came")
            free = driver.free(pages)
            driver.apply(free)  # `Freed` wakes neither LOADS nor BATCH
            kinds = [type(e).__name__ for e in driver.poll(SOON_S, Wake.LOADS)]
            equal(kinds, ["Freed", "StatusReport"], "at the time limit")
            lookup = driver.lookup(prompt.keys())
            driver.apply(lookup)
            while lookup.action_id not in driver.ended:
                of_type(driver.poll(CLOSE_S, Wake.LOADS)[0], Located)
            gate = rig.runner.pause()
            batch, _ = rig.start(rig.prompt(5, 1))
            gate.wait_for_one()
            driver.apply(driver.lookup(prompt.keys()))
            opener = threading.Timer(2 * SOON_S, gate.open)
            opener.start()
            events = driver.poll(CLOSE_S, Wake.BATCH)
            require(any(isinstance(e, BatchDone) for e in events), f"BATCH woke for {events}")
            require(any(isinstance(e, Located) for e in events), "what came before is returned")
            require(batch in driver.done, "the batch")
            opener.join()

    def test_poll_returns_when_only_control_can_make_room(self, make_runtime: MakeRuntime) -> None:
        """Host pages that are control's: a load waits for them, and so would control."""
        with self.bench(make_runtime, host_pages=8) as rig:
            stored = rig.prompt(16)
            rig.in_l3(stored)
            mine = rig.in_l2(rig.prompt(20, 1))
            load = rig.driver.prefetch(stored.keys(), Tier.L2)
            rig.driver.apply(load)
            start_s = time.monotonic()
            rig.driver.poll(CLOSE_S, Wake.LOADS)
            require(time.monotonic() - start_s < CLOSE_S / 2, "poll slept until its time limit")
            assert rig.driver.status is not None
            short = [c.waiting for c in rig.driver.status.capacity if c.tier is Tier.L2]
            require(min(short) > 0, "the report does not say what is lacking")
            rig.free(mine)
            equal(of_type(rig.driver.wait_action(load.action_id), PrefetchReady).n_valid, 4, "n")

    def test_reports_say_what_is_free_and_what_moved(self, make_runtime: MakeRuntime) -> None:
        with self.bench(make_runtime, pages=20, host_pages=12) as rig:
            prompt = rig.prompt(24)
            rig.in_l3(prompt)
            rig.fetch(prompt, Tier.L2)
            rig.driver.poll()
            status = rig.driver.status
            assert status is not None
            pools = {(c.tier, c.pool): (c.total, c.free, c.freeing) for c in status.capacity}
            wanted = {(Tier.L1, c.name): (20, 20, 0) for c in self.components}
            wanted |= {(Tier.L2, c.name): (12, 6, 0) for c in self.components}
            equal(pools, wanted, "capacity")
            moved = {cost.path: cost.bytes for cost in status.costs}
            nbytes = 6 * sum(c.page_bytes(self.page_tokens) for c in self.components)
            for path in ("d2h", "l3_write", "l3_read"):
                equal(moved.get(path), nbytes, f"bytes moved by {path}")
            require(status.prefill_tokens_per_s > 0, "no prefill speed")

    def test_evictions_are_told(self, make_runtime: MakeRuntime) -> None:
        frame = sum(4096 + c.page_bytes(self.page_tokens) for c in self.components)
        with self.bench(make_runtime, max_bytes=4 * frame) as rig:
            first, second = rig.prompt(16), rig.prompt(16, 1)
            rig.in_l3(first)
            rig.in_l3(second)
            rig.driver.poll()
            events = [e for e in rig.driver.unasked if isinstance(e, Evicted)]
            gone = {e.keys[i : i + 32] for e in events for i in range(0, len(e.keys), 32)}
            equal({e.namespace for e in events}, {first.namespace}, "namespace")
            equal(gone, {first.keys().key(i) for i in range(4)}, "evicted keys")

    # ── storage that hangs ───────────────────────────────────────────────────────────────────────

    def test_a_load_that_hangs_is_a_miss_and_its_pages_are_kept_away(
        self, make_runtime: MakeRuntime
    ) -> None:
        """B003, B057, B062: until the late completion nobody gets them; then they are free."""
        for target, mode in ((Tier.L2, StagingMode.CACHE), (Tier.L1, StagingMode.BUFFER_ONLY)):
            with self.bench(make_runtime, host_pages=8, mode=mode) as rig:
                prompt = rig.prompt(16)
                rig.in_l3(prompt)
                rig.backend.reads.shut()
                ready = rig.fetch(prompt, target, deadline_s=SOON_S)
                equal((ready.n_valid, ready.cause), (0, "timeout"), "a late prefetch")
                rig.backend.reads.wait_for_one()
                total, free, freeing = rig.driver.pages(Tier.L2)
                require(freeing > 0, "no page is in quarantine")
                equal(free + freeing, total, "pages")
                self._use_the_rest(rig)
                degraded = [e for e in rig.driver.unasked if isinstance(e, TierDegraded)]
                require(degraded, "the tier is not called degraded")
                rig.backend.reads.open()
                rig.driver.wait_status(lambda s: all(c.freeing == 0 for c in s.capacity))
                rig.expect_free()
                equal(rig.fetch(prompt, target).n_valid, 4, "afterwards")

    def _use_the_rest(self, rig: Rig) -> None:
        """What hangs holds up nothing that needs no storage, and not for ever what does."""
        other = rig.prompt(4, 7)
        pages = rig.make_pages(other)
        more = rig.fetch(rig.prompt(64), Tier.L1, deadline_s=SOON_S)
        equal(more.n_valid, 0, "a prefetch behind it")
        require(more.cause in HUNG, f"its cause is {more.cause}")
        if rig.settings.mode is StagingMode.CACHE:
            copies = rig.store(other, pages, Tier.L2).extents
            rig.verify(other, pages)
            rig.free(copies)
        rig.free(pages)

    def test_a_store_that_hangs_ends_at_its_deadline(self, make_runtime: MakeRuntime) -> None:
        """From L1 through the window, and from L2, whose pages stay held; more wait behind it."""
        for tier, mode in ((Tier.L1, StagingMode.BUFFER_ONLY), (Tier.L2, StagingMode.CACHE)):
            with self.bench(make_runtime, host_pages=8, mode=mode) as rig:
                prompts = [rig.prompt(8, i) for i in range(4)]
                sources = [rig.make_pages(p) for p in prompts]
                if tier is Tier.L2:
                    sources = [
                        rig.store(p, e, tier).extents
                        for p, e in zip(prompts[:2], sources[:2], strict=True)
                    ]
                rig.backend.writes.shut()
                actions = [
                    rig.driver.backup(p.keys(), e, Tier.L3, deadline_s=SOON_S)
                    for p, e in zip(prompts, sources, strict=False)
                ]
                rig.driver.apply(*actions)
                for action in actions:
                    event = of_type(rig.driver.wait_action(action.action_id), BackedUp)
                    equal(event.n, 0, f"{action}")
                    require(event.cause in HUNG, f"the cause is {event.cause}")
                free = rig.driver.free(sources[0])
                rig.driver.apply(free)
                if tier is Tier.L2:
                    rig.driver.poll()
                    require(free.action_id in rig.driver.open, "a page is free that is being read")
                rig.backend.writes.open()
                rig.driver.wait_action(free.action_id)
                rig.free(*sources[1:])
                rig.driver.wait_status(lambda s: all(c.freeing == 0 for c in s.capacity))
                rig.check()

    def test_a_store_that_waits_its_turn_behind_a_slow_one_ends_at_its_deadline(
        self, make_runtime: MakeRuntime
    ) -> None:
        with self.bench(make_runtime, host_pages=4, mode=StagingMode.BUFFER_ONLY) as rig:
            slow, quick = rig.prompt(40), rig.prompt(8, 1)
            sources = [rig.make_pages(p) for p in (slow, quick)]
            rig.backend.writes.shut()
            first = rig.driver.backup(slow.keys(), sources[0], Tier.L3)
            second = rig.driver.backup(quick.keys(), sources[1], Tier.L3, deadline_s=SOON_S)
            rig.driver.apply(first, second)
            event = of_type(rig.driver.wait_action(second.action_id), BackedUp)
            equal((event.n, event.cause), (0, "timeout"), "the second")
            rig.free(sources[1])
            require(first.action_id in rig.driver.open, "the first has time")
            rig.backend.writes.open()
            equal(of_type(rig.driver.wait_action(first.action_id), BackedUp).n, 10, "the first")

    # ── the end ──────────────────────────────────────────────────────────────────────────────────

    def test_close_ends_everything(self, make_runtime: MakeRuntime) -> None:
        """Running, prepared and queued; stuck in the backend, in the runner, waiting for room."""
        with self.bench(make_runtime, pages=40) as rig:
            driver, stored = rig.driver, rig.prompt(16)
            rig.in_l3(stored)
            pages = [rig.make_pages(rig.prompt(8, i)) for i in range(1, 5)]
            in_use = rig.make_pages(rig.prompt(9, 8))
            for gate in (rig.backend.reads, rig.backend.writes, rig.backend.asks):
                gate.shut()
            pause = rig.runner.pause()
            used = rig.prompt(9, 8)
            batches = [rig.start(used, attach=in_use)[0], rig.start(rig.prompt(5, 10))[0]]
            pause.wait_for_one()
            driver.prepare(BatchPlan(open=(stored.open(),), rows=(RowPlan(row=0, count=16),)))
            driver.apply(driver.prefetch(stored.keys(), Tier.L1))
            rig.backend.reads.wait_for_one()
            stores: list[Action] = [
                driver.backup(rig.prompt(8, i).keys(), e, Tier.L3) for i, e in enumerate(pages, 1)
            ]
            driver.apply(*stores)
            rig.backend.writes.wait_for_one()
            loads = [driver.prefetch(stored.keys(), t) for t in (Tier.L1, Tier.L2, Tier.L1)]
            rest: list[Action] = [
                driver.lookup(stored.keys()),
                driver.free(pages[0]),
                driver.drop(stored.keys()),
            ]
            driver.apply(*loads, *rest, driver.free(in_use))
            rig.runtime.close(4 * SOON_S)
            events = driver.poll(0)
            require(not driver.open, f"without an end: {driver.open}")
            require(not driver.running, f"without an end: {driver.running}")
            for batch in batches:
                equal(rig.only_row(batch).status, RowStatus.ABORTED, "a batch that was stuck")
            ends = [e for e in events if isinstance(e, PrefetchReady | BackedUp | ActionFailed)]
            require(len(ends) >= 8, f"ends of loads and stores: {ends}")
            self._is_closed(rig)
            rig.backend.open_all()  # what was stuck comes back, and harms nobody
            pause.open()

    def _is_closed(self, rig: Rig) -> None:
        runtime = rig.runtime
        raises(ClosedError, lambda: runtime.apply([]), "apply after close")
        raises(ClosedError, lambda: runtime.prepare_batch(BatchPlan()), "prepare after close")
        runtime.cancel(1)
        runtime.close(1.0)
        equal([type(e) for e in runtime.poll(0)], [StatusReport], "a poll after the last event")

    def test_close_of_an_idle_runtime(self, make_runtime: MakeRuntime) -> None:
        with self.bench(make_runtime) as rig:
            rig.ask(rig.prompt(9))
            rig.runtime.close(CLOSE_S)
            self._is_closed(rig)
