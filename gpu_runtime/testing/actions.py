"""Conformance: actions, and the one terminal event that each of them gets."""

from __future__ import annotations

from kvstrata.boundary import (
    Action,
    ActionFailed,
    Dropped,
    KeyRun,
    Located,
    PrefetchReady,
    Restored,
)
from kvstrata.errors import PlanError
from kvstrata.gpu_runtime.testing.driver import equal, of_type, raises
from kvstrata.gpu_runtime.testing.rig import MakeRuntime, RuntimeSuite
from kvstrata.handles import StagingMode, Tier, page_count, slice_extents

CACHE, BUFFER_ONLY = StagingMode.CACHE, StagingMode.BUFFER_ONLY


class ActionTests(RuntimeSuite):
    # ── the way there and back ───────────────────────────────────────────────────────────────────

    def test_pages_go_down_and_come_back(self, make_runtime: MakeRuntime) -> None:
        """L1 → L2 → L3 → L2 → L1, every byte compared at the end."""
        with self.bench(make_runtime) as rig:
            prompt = rig.prompt(24)
            l1 = rig.make_pages(prompt)
            l2 = rig.store(prompt, l1, Tier.L2).extents
            equal(page_count(l2), 6, "pages in L2")
            rig.free(l1)
            equal(rig.store(prompt, l2).n, 6, "pages stored from L2")
            rig.free(l2)
            rig.expect_free()
            ready = rig.fetch(prompt, Tier.L2)
            equal((ready.n_valid, ready.cause), (6, ""), "prefetched to L2")
            restored = of_type(rig.driver.do(rig.driver.restore(ready.extents)), Restored)
            equal((restored.n, restored.cause), (6, ""), "restored")
            rig.free(ready.extents)
            rig.verify(prompt, restored.extents)
            rig.free(restored.extents)
            rig.expect_free()

    def test_pages_go_through_the_window(self, make_runtime: MakeRuntime) -> None:
        """L1 → L3 → L1 in buffer_only: far more pages than the window, and it never keeps one."""
        with self.bench(make_runtime, pages=48, host_pages=4, mode=BUFFER_ONLY) as rig:
            prompt = rig.prompt(160)
            l1 = rig.make_pages(prompt)
            equal(rig.store(prompt, l1).n, 40, "pages stored")
            rig.free(l1)
            rig.expect_free()
            ready = rig.fetch(prompt, Tier.L1)
            equal((ready.n_valid, page_count(ready.extents)), (40, 40), "pages that came back")
            rig.expect_free(l1=8)
            rig.verify(prompt, ready.extents)

    def test_lookup_and_drop(self, make_runtime: MakeRuntime) -> None:
        with self.bench(make_runtime) as rig:
            prompt = rig.prompt(24)
            driver = rig.driver
            empty = KeyRun(prompt.namespace, prompt.keys().parent, 0, b"")

            def located(keys: KeyRun) -> int:
                return of_type(driver.do(driver.lookup(keys)), Located).n

            equal((located(prompt.keys()), located(empty)), (0, 0), "in an empty store")
            rig.store(prompt, slice_extents(rig.make_pages(prompt), 0, 4))
            equal(located(prompt.keys()), 4, "leading pages in L3")
            equal(located(prompt.keys(2)), 2, "pages 2 and 3")
            gone = of_type(driver.do(driver.drop(prompt.keys(2))), Dropped)
            equal((gone.n, located(prompt.keys())), (2, 2), "after dropping all from page 2")
            equal(of_type(driver.do(driver.drop(empty)), Dropped).n, 0, "nothing dropped")
            rig.expect_free(l1=26)  # to look something up holds nothing

    def test_a_prefetch_ends_at_the_first_page_that_is_not_there(
        self, make_runtime: MakeRuntime
    ) -> None:
        with self.bench(make_runtime, pages=48, host_pages=24) as rig:
            prompt = rig.prompt(72)
            rig.in_l3(prompt)
            key = prompt.keys().key
            for lost, corrupt, n, cause in (
                (key(0), b"", 0, "missing"),
                (key(11), b"", 11, "missing"),
                (key(17), key(3), 3, "corrupt"),
            ):
                for target in (Tier.L1, Tier.L2):
                    rig.backend.lose, rig.backend.corrupt = {lost}, {corrupt}
                    ready = rig.fetch(prompt, target)
                    equal((ready.n_valid, ready.cause), (n, cause), f"prefetch to {target.name}")
                    equal(page_count(ready.extents), n, "its extents")
                    rig.backend.lose, rig.backend.corrupt = set(), set()
                    if n:
                        rig.free(ready.extents)
                    rig.expect_free()
                    if corrupt:  # a corrupt frame is deleted: store it anew
                        rig.in_l3(prompt)

    def test_a_backup_ends_at_the_first_page_that_is_refused(
        self, make_runtime: MakeRuntime
    ) -> None:
        """Nothing is stored under a page that is not: the prefix stays closed."""
        with self.bench(make_runtime, pages=48, host_pages=26) as rig:
            for i, tier in enumerate((Tier.L1, Tier.L2)):
                prompt = rig.prompt(72, i)
                source = rig.make_pages(prompt)
                if tier is Tier.L2:
                    source = rig.store(prompt, source, Tier.L2).extents
                rig.backend.refuse = {prompt.keys().key(5)}
                event = rig.store(prompt, source)
                equal((event.n, event.cause), (5, "access"), f"backup from {tier.name}")
                rig.backend.refuse = set()
                found = of_type(rig.driver.do(rig.driver.lookup(prompt.keys(6))), Located)
                equal(found.n, 0, "pages stored below it")
                equal(rig.store(prompt, source).n, 18, "the next try")
                rig.free(source)
                ready = rig.fetch(prompt, Tier.L2)
                equal(ready.n_valid, 18, "what comes back")
                rig.free(ready.extents)

    # ── failure of one kind each ─────────────────────────────────────────────────────────────────

    def test_every_action_fails_with_its_cause(self, make_runtime: MakeRuntime) -> None:
        """Stale extents never raise in `apply`, and take nothing with them."""
        with self.bench(make_runtime) as rig:
            driver, prompt = rig.driver, rig.prompt(8)
            gone = rig.make_pages(prompt)
            rig.free(gone)
            live = rig.make_pages(prompt)
            in_l2 = rig.store(prompt, live, Tier.L2).extents
            keys = prompt.keys()
            for action, cause in (
                (driver.free(gone), "stale"),
                (driver.free(()), "stale"),
                (driver.restore(gone), "stale"),
                (driver.restore(live), "stale"),
                (driver.backup(keys, gone, Tier.L3), "stale"),
                (driver.backup(keys.slice(0, 1), live, Tier.L3), "stale"),
                (driver.backup(keys, live, Tier.L1), "path"),
                (driver.backup(keys, in_l2, Tier.L2), "path"),
                (driver.prefetch(keys, Tier.L3), "path"),
                (driver.prefetch(keys.slice(0, 0), Tier.L2), "path"),
            ):
                event = of_type(driver.do(action), ActionFailed)
                equal(event.cause, cause, f"cause of the end of {action}")
            freed = driver.apply(driver.free(live), driver.free(live))
            ends = [driver.wait_action(action_id) for action_id in freed]
            equal(sum(isinstance(e, ActionFailed) for e in ends), 1, "a claim is given up once")
            rig.free(in_l2)
            rig.expect_free()

    def test_buffer_only_keeps_nothing_in_l2(self, make_runtime: MakeRuntime) -> None:
        with self.bench(make_runtime, mode=BUFFER_ONLY) as rig:
            driver, prompt = rig.driver, rig.prompt(8)
            pages = rig.make_pages(prompt)
            for action in (
                driver.prefetch(prompt.keys(), Tier.L2),
                driver.backup(prompt.keys(), pages, Tier.L2),
            ):
                equal(of_type(driver.do(action), ActionFailed).cause, "path", "cause")

    def test_without_storage(self, make_runtime: MakeRuntime) -> None:
        with self.bench(make_runtime, with_l3=False) as rig:
            driver, prompt = rig.driver, rig.prompt(8)
            pages = rig.make_pages(prompt)
            for action in (
                driver.prefetch(prompt.keys(), Tier.L1),
                driver.backup(prompt.keys(), pages, Tier.L3),
            ):
                equal(of_type(driver.do(action), ActionFailed).cause, "no_backend", "cause")
            equal(of_type(driver.do(driver.lookup(prompt.keys())), Located).n, 0, "located")
            equal(of_type(driver.do(driver.drop(prompt.keys())), Dropped).n, 0, "dropped")
            equal(rig.store(prompt, pages, Tier.L2).n, 2, "L2 works without it")

    def test_torn_keys_are_refused(self, make_runtime: MakeRuntime) -> None:
        with self.bench(make_runtime) as rig:
            good = rig.prompt(8).keys()
            parent, name = good.parent, good.namespace
            for keys in (
                KeyRun(name, parent, 0, good.keys[:-1]),
                KeyRun(name[:-1], parent, 0, good.keys),
                KeyRun(name, b"", 0, good.keys),
                KeyRun(name, parent, -1, good.keys),
            ):
                actions: tuple[Action, ...] = (
                    rig.driver.lookup(rig.prompt(8).keys()),
                    rig.driver.lookup(keys),
                )
                raises(PlanError, lambda a=actions: rig.driver.apply(*a), f"{keys}")  # type: ignore[misc]
            rig.driver.poll()

    def test_capacity_is_said_at_once(self, make_runtime: MakeRuntime) -> None:
        """When even what is being freed does not suffice, only control can help."""
        with self.bench(make_runtime, pages=10, host_pages=8) as rig:
            driver, stored = rig.driver, rig.prompt(24)
            rig.in_l3(stored)
            in_l2 = rig.in_l2(rig.prompt(16, 2))
            pages = rig.make_pages(rig.prompt(28, 1))
            ready = rig.fetch(stored, Tier.L1)
            equal((ready.n_valid, ready.cause, ready.extents), (0, "capacity", ()), "prefetch")
            restored = of_type(driver.do(driver.restore(in_l2)), Restored)
            equal((restored.n, restored.cause, restored.extents), (0, "capacity", ()), "restore")
            event = rig.store(rig.prompt(28, 1), pages, Tier.L2)
            equal((event.n, event.cause, event.extents), (0, "capacity", ()), "backup")
            large = rig.driver.prefetch(rig.prompt(100).keys(), Tier.L2)
            equal(getattr(driver.do(large), "cause", ""), "capacity", "a prefetch larger than L2")
            rig.expect_free(l1=3, l2=4)

    def test_a_prefetch_waits_for_pages_that_are_being_freed(
        self, make_runtime: MakeRuntime
    ) -> None:
        with self.bench(make_runtime, pages=10) as rig:
            stored = rig.prompt(24)
            rig.in_l3(stored)
            pages = rig.make_pages(rig.prompt(36, 1))
            rig.backend.writes.shut()
            rig.backend.reads.shut()
            backups = [
                rig.driver.backup(rig.prompt(36, 1).keys(a, a + 3), part, Tier.L3)
                for a in (0, 3, 6)
                for part in (slice_extents(pages, a, a + 3),)
            ]
            prefetch = rig.driver.prefetch(stored.keys(), Tier.L1)
            rig.driver.apply(*backups, rig.driver.free(pages), prefetch)
            rig.backend.writes.open()
            rig.backend.reads.wait_for_one()  # it goes on although control does not poll
            rig.backend.reads.open()
            rig.driver.wait_idle()
            event = rig.driver.ended[prefetch.action_id]
            equal(getattr(event, "n_valid", None), 6, "pages that came when there was room")

    def test_stores_from_both_tiers_and_loads_never_wait_in_a_circle(
        self, make_runtime: MakeRuntime
    ) -> None:
        """A load waits for L2 pages that are free once they were stored, behind a store from L1
        that needs pages of the window."""
        with self.bench(make_runtime, host_pages=8) as rig:
            stored, small = rig.prompt(20, 1), rig.prompt(8, 2)
            rig.in_l3(stored)
            rig.in_l3(small)
            first, second = rig.prompt(24, 3), rig.prompt(20, 4)
            from_l1, from_l2 = rig.make_pages(first), rig.in_l2(second)
            rest = rig.fetch(small, Tier.L2).extents  # one page of eight is left
            rig.backend.writes.shut()
            stores = [
                rig.driver.backup(first.keys(), from_l1, Tier.L3),
                rig.driver.backup(second.keys(), from_l2, Tier.L3),
            ]
            load = rig.driver.prefetch(stored.keys(), Tier.L2)
            rig.driver.apply(*stores, rig.driver.free(from_l2), load)
            rig.backend.writes.open()
            rig.driver.wait_idle()
            ends = [rig.driver.ended[action.action_id] for action in stores]
            equal([getattr(e, "n", 0) for e in ends], [6, 5], "pages stored")
            ready = of_type(rig.driver.ended[load.action_id], PrefetchReady)
            equal((ready.n_valid, ready.cause), (5, ""), "pages loaded")
            rig.free(from_l1, rest, ready.extents)
            rig.expect_free()
