"""Conformance: actions that are cancelled, whatever they are doing."""

from __future__ import annotations

from kvstrata.boundary import Action, BackedUp, Backup, Drop, Free, Lookup, Prefetch, PrefetchReady
from kvstrata.gpu_runtime.testing.driver import WAIT_S, equal, of_type, require
from kvstrata.gpu_runtime.testing.rig import MakeRuntime, Rig, RuntimeSuite
from kvstrata.handles import Extents, StagingMode, Tier, page_count, slice_extents

BUFFER_ONLY = StagingMode.BUFFER_ONLY


class CancelTests(RuntimeSuite):
    def test_what_is_cancelled_ends_once(self, make_runtime: MakeRuntime) -> None:
        """Whatever it was doing, and whatever waited behind it goes on."""
        with self.bench(make_runtime, pages=40, host_pages=8, mode=BUFFER_ONLY) as rig:
            stored, fresh = rig.prompt(64), rig.prompt(64, 1)
            rig.in_l3(stored)
            pages = rig.make_pages(fresh)
            rig.backend.writes.shut()
            rig.backend.reads.shut()
            rig.backend.asks.shut()
            actions = self._some_of_each(rig, pages)
            rig.driver.apply(*actions)
            for action in actions:
                rig.driver.cancel(action.action_id)
                rig.driver.cancel(action.action_id)
            rig.driver.cancel(10**9)
            rig.backend.open_all()
            rig.driver.wait_idle()
            rig.check()
            for action in actions:
                end = rig.driver.ended[action.action_id]
                whole = getattr(end, "n_valid", getattr(end, "n", 0)) in (8, 16)
                cause = getattr(end, "cause", "")
                if isinstance(action, Prefetch | Backup):
                    equal(cause, "" if whole else "cancelled", f"the end of {action}")
                if page_count(getattr(end, "extents", ())):
                    rig.free(end.extents)  # type: ignore[union-attr]
            rig.expect_free()
            equal(rig.fetch(stored, Tier.L1).n_valid, 16, "afterwards all works")

    def _some_of_each(self, rig: Rig, pages: Extents) -> list[Action]:
        driver, stored, fresh = rig.driver, rig.prompt(64), rig.prompt(64, 1)
        halves = [slice_extents(pages, a, a + 8) for a in (0, 8)]
        out: list[Action] = [
            driver.backup(fresh.keys(0, 8), halves[0], Tier.L3),
            driver.backup(fresh.keys(8, 16), halves[1], Tier.L3),
            driver.prefetch(stored.keys(), Tier.L1),
            driver.prefetch(stored.keys(0, 8), Tier.L1),
            driver.lookup(stored.keys()),
            driver.drop(rig.prompt(8, 9).keys()),
            driver.free(pages),
        ]
        kinds = {type(action) for action in out}
        require(kinds >= {Backup, Prefetch, Lookup, Drop, Free}, "a kind is missing")
        return out

    def test_a_backup_that_waits_for_its_turn_can_be_cancelled(
        self, make_runtime: MakeRuntime
    ) -> None:
        with self.bench(make_runtime, host_pages=4, mode=BUFFER_ONLY) as rig:
            prompts = [rig.prompt(8, i) for i in range(6)]
            pages = [rig.make_pages(p) for p in prompts]
            rig.backend.writes.shut()
            backups = [
                rig.driver.backup(p.keys(), e, Tier.L3) for p, e in zip(prompts, pages, strict=True)
            ]
            rig.driver.apply(*backups)
            rig.driver.cancel(backups[4].action_id)
            event = of_type(rig.driver.wait_action(backups[4].action_id), BackedUp)
            equal((event.n, event.cause), (0, "cancelled"), "the cancelled one, at once")
            rig.free(pages[4])
            rig.backend.writes.open()
            rig.driver.wait_idle()
            ends = [rig.driver.ended[b.action_id] for b in backups]
            equal([getattr(e, "n", 0) for e in ends], [2, 2, 2, 2, 0, 2], "pages stored")

    def test_prefetches_that_wait_for_device_pages(self, make_runtime: MakeRuntime) -> None:
        """One is cancelled, one is late, one gets them; first come, first served."""
        with self.bench(make_runtime, pages=10, host_pages=4, mode=BUFFER_ONLY) as rig:
            stored = rig.prompt(24)
            rig.in_l3(stored)
            pages = rig.make_pages(rig.prompt(36, 1))
            rig.backend.writes.shut()
            backup = rig.driver.backup(rig.prompt(36, 1).keys(), pages, Tier.L3)
            loads = [
                rig.driver.prefetch(stored.keys(), Tier.L1, deadline_s)
                for deadline_s in (WAIT_S, 0.02, WAIT_S, WAIT_S)
            ]
            rig.driver.apply(backup, rig.driver.free(pages), *loads)
            rig.driver.cancel(loads[2].action_id)
            for load, cause in ((loads[2], "cancelled"), (loads[1], "timeout")):
                event = of_type(rig.driver.wait_action(load.action_id), PrefetchReady)
                equal((event.n_valid, event.cause), (0, cause), "one that waited")
            rig.backend.writes.open()
            event = of_type(rig.driver.wait_action(loads[0].action_id), PrefetchReady)
            equal((event.n_valid, event.cause), (6, ""), "the first")
            last = of_type(rig.driver.wait_action(loads[3].action_id), PrefetchReady)
            equal((last.n_valid, last.cause), (0, "capacity"), "no room beside the first")
            rig.free(event.extents)
            rig.expect_free()
