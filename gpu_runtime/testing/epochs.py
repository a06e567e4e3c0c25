"""Conformance: the weights change while everything is under way."""

from __future__ import annotations

import dataclasses

from kvstrata.boundary import (
    ActionFailed,
    Backup,
    BatchPlan,
    EpochBegan,
    Prefetch,
    PrefetchReady,
    RowPlan,
    RowStatus,
)
from kvstrata.errors import StaleHandleError
from kvstrata.gpu_runtime.testing.driver import Prompt, equal, of_type, raises, require
from kvstrata.gpu_runtime.testing.rig import MakeRuntime, Rig, RuntimeSuite
from kvstrata.handles import Extents, StagingMode, Tier, page_count


def renamed(prompt: Prompt) -> Prompt:
    """The same tokens under the namespace of another epoch."""
    return dataclasses.replace(prompt, namespace=bytes(range(100, 132)))


class EpochTests(RuntimeSuite):
    def test_a_change_runs_behind_the_batches_before_it(self, make_runtime: MakeRuntime) -> None:
        """What was executed ends with the old weights; what comes later has the new ones."""
        with self.bench(make_runtime) as rig:
            gate = rig.runner.pause()
            batch, handle = rig.start(rig.prompt(9))
            gate.wait_for_one()
            change = rig.driver.new_epoch(7, b"w7")
            rig.driver.apply(change)
            behind, fresh = rig.start(renamed(rig.prompt(9)))
            equal(rig.runner.weights, [], "weights while the batch before runs")
            rig.driver.poll()
            require(change.action_id not in rig.driver.ended, "the change was told too early")
            gate.open()
            event = of_type(rig.driver.wait_action(change.action_id), EpochBegan)
            equal((event.epoch, rig.runner.weights), (7, [b"w7"]), "the change")
            old, new = rig.only_row(batch), rig.only_row(behind)
            equal((old.status, new.status), (RowStatus.OK, RowStatus.OK), "both rows")
            self._is_old(rig, rig.prompt(9), old.extents)
            rig.verify(renamed(rig.prompt(9)), new.extents)
            rig.release(handle, fresh)
            rig.free(old.extents, new.extents)
            rig.expect_free()

    def _is_old(self, rig: Rig, prompt: Prompt, extents: Extents) -> None:
        """Extents of an older epoch can be freed, and nothing else."""
        tier = extents[0].tier
        count = page_count(extents)
        field = "attach" if tier is Tier.L1 else "restore"
        for taken in (prompt, renamed(prompt)):
            plan = RowPlan(row=0, start=len(prompt) - 1, count=1, **{field: extents})
            message = BatchPlan(open=(taken.open(),), rows=(plan,))
            raises(StaleHandleError, lambda m=message: rig.driver.prepare(m), "a row")  # type: ignore[misc]
            actions = [rig.driver.backup(taken.keys(0, count), extents, Tier.L3)]
            if tier is Tier.L2:
                actions.append(rig.driver.restore(extents))  # type: ignore[arg-type]
            for action in actions:
                event = of_type(rig.driver.do(action), ActionFailed)
                equal(event.cause, "stale", f"cause of the end of {action}")

    def test_rows_of_an_older_epoch_end(self, make_runtime: MakeRuntime) -> None:
        """Whether they were prepared before, or are planned afterwards."""
        with self.bench(make_runtime) as rig:
            batch, handle = rig.start(rig.prompt(9), 8)
            first = rig.only_row(batch)
            decode = BatchPlan(rows=(RowPlan(row=handle),), steps=2)
            prepared = rig.driver.prepare(decode)
            rig.driver.apply(rig.driver.new_epoch(1))
            batches = [rig.driver.execute(prepared), rig.driver.run(decode)[0]]
            steps = rig.runner.steps
            for each in batches:
                row = rig.only_row(each)
                ended = (row.status, row.finished, row.sampled, row.extents)
                equal(ended, (RowStatus.ABORTED, True, b"", ()), "a row of the older epoch")
            equal(rig.runner.steps, steps, "steps that ran")
            rig.release(handle)
            rig.free(first.extents)
            rig.expect_free()

    def test_pages_of_both_tiers_are_old(self, make_runtime: MakeRuntime) -> None:
        with self.bench(make_runtime) as rig:
            prompt = rig.prompt(8)
            in_l1 = rig.make_pages(prompt)
            in_l2 = rig.store(prompt, in_l1, Tier.L2).extents
            of_type(rig.driver.do(rig.driver.new_epoch(1)), EpochBegan)
            self._is_old(rig, prompt, in_l1)
            self._is_old(rig, prompt, in_l2)
            rig.free(in_l1, in_l2)
            rig.expect_free()
            fresh = rig.make_pages(prompt)  # the same page numbers, used again
            rig.verify(prompt, fresh)
            copies = rig.store(prompt, fresh, Tier.L2).extents
            equal(page_count(copies), 2, "pages of the new epoch are copied")
            rig.free(fresh, copies)
            rig.expect_free()

    def test_what_is_under_way_brings_old_pages_or_none(self, make_runtime: MakeRuntime) -> None:
        """Backups, prefetches and restores that cross the change, running or waiting."""
        for mode in (StagingMode.CACHE, StagingMode.BUFFER_ONLY):
            with self.bench(make_runtime, pages=40, host_pages=12, mode=mode) as rig:
                cached = mode is StagingMode.CACHE
                stored, fresh = rig.prompt(16), rig.prompt(16, 1)
                rig.in_l3(stored)
                in_l2 = rig.in_l2(rig.prompt(8, 2)) if cached else ()
                pages = rig.make_pages(fresh)
                rig.backend.reads.shut()
                rig.backend.writes.shut()
                target = Tier.L2 if cached else Tier.L1
                actions: list[Prefetch | Backup] = [
                    *(rig.driver.prefetch(stored.keys(), target) for _ in range(3)),
                    rig.driver.backup(fresh.keys(), pages, Tier.L2 if cached else Tier.L3),
                    rig.driver.backup(fresh.keys(), pages, Tier.L3),
                ]
                more = [rig.driver.restore(in_l2)] if cached else []
                rig.driver.apply(*actions, *more)
                change = rig.driver.new_epoch(1)
                rig.driver.apply(change)
                rig.backend.open_all()
                rig.driver.wait_idle()
                require(change.action_id in rig.driver.ended, "the change did not end")
                held = [pages, in_l2]
                for action in (*actions, *more):
                    brought = getattr(rig.driver.ended[action.action_id], "extents", ())
                    if brought:
                        first = stored if isinstance(action, Prefetch) else fresh
                        self._is_old(rig, first, brought)
                        held.append(brought)
                rig.free(*held)
                rig.expect_free()
                equal(rig.fetch(stored, target).n_valid, 4, "afterwards all works")

    def test_loads_that_wait_end(self, make_runtime: MakeRuntime) -> None:
        """For host pages: they would get theirs later, and those would pass for new ones."""
        with self.bench(make_runtime, host_pages=8) as rig:
            stored = rig.prompt(16)
            rig.in_l3(stored)
            mine = rig.in_l2(rig.prompt(20, 1))
            load = rig.driver.prefetch(stored.keys(), Tier.L2)
            rig.driver.apply(load)
            rig.driver.apply(rig.driver.new_epoch(1))
            rig.free(mine)
            event = of_type(rig.driver.wait_action(load.action_id), PrefetchReady)
            equal((event.n_valid, event.cause), (0, "cancelled"), "its end")
            rig.expect_free()

    def test_frees_and_new_requests_share_the_message(self, make_runtime: MakeRuntime) -> None:
        """One message: let go of the old, change, begin the new."""
        with self.bench(make_runtime, pages=6) as rig:
            old = rig.make_pages(rig.prompt(16))
            prompt = renamed(rig.prompt(20))
            change = rig.driver.new_epoch(1)
            batch, (handle,) = rig.driver.run(
                BatchPlan(
                    frees=(rig.driver.free(old),),
                    actions=(change,),
                    open=(prompt.open(),),
                    rows=(RowPlan(row=0, count=20),),
                )
            )
            row = rig.only_row(batch)
            equal(row.status, RowStatus.OK, "a row of the new epoch")
            of_type(rig.driver.wait_action(change.action_id), EpochBegan)
            rig.verify(prompt, row.extents)
            rig.release(handle)
            rig.free(row.extents)
            rig.expect_free()

    def test_rows_fail_while_the_weights_are_unknown(self, make_runtime: MakeRuntime) -> None:
        with self.bench(make_runtime) as rig:
            rig.runner.fail_weights = True
            event = of_type(rig.driver.do(rig.driver.new_epoch(1)), ActionFailed)
            equal(event.cause, "runner", "cause")
            row = rig.ask(rig.prompt(9))
            equal((row.status, row.extents), (RowStatus.ABORTED, ()), "a row")
            require("planted" in row.error, f"it does not say why: {row.error!r}")
            rig.release(row.handle)
            of_type(rig.driver.do(rig.driver.new_epoch(2)), EpochBegan)
            rig.free(rig.make_pages(rig.prompt(9)))
            rig.expect_free()

    def test_a_change_that_close_overtakes_has_its_end(self, make_runtime: MakeRuntime) -> None:
        with self.bench(make_runtime) as rig:
            gate = rig.runner.pause()
            rig.start(rig.prompt(9))
            gate.wait_for_one()
            change = rig.driver.new_epoch(1)
            rig.driver.apply(change)
            gate.open()
            rig.runtime.close(10)
            rig.driver.wait_action(change.action_id)
