"""Conformance: what a plan does, and in which order."""

from __future__ import annotations

from kvstrata.boundary import (
    BackedUp,
    BatchPlan,
    Freed,
    PreparedBatchHandle,
    RowPlan,
    RowStatus,
)
from kvstrata.errors import PlanError, StaleHandleError
from kvstrata.gpu_runtime.testing.driver import equal, of_type, raises, require
from kvstrata.gpu_runtime.testing.rig import MakeRuntime, RuntimeSuite, sampled
from kvstrata.handles import Tier, page_count, slice_extents


class PlanTests(RuntimeSuite):
    # ── prefill and decode ───────────────────────────────────────────────────────────────────────

    def test_a_prompt_is_computed_and_its_full_pages_are_handed_over(
        self, make_runtime: MakeRuntime
    ) -> None:
        with self.bench(make_runtime) as rig:
            prompt = rig.prompt(10)
            row = rig.ask(prompt)
            equal((row.status, row.finished), (RowStatus.OK, True), "end of the row")
            equal(row.first_page_index, 0, "first page")
            equal(page_count(row.extents), 2, "full pages; the partial one is never handed over")
            equal(len(row.sampled), 4, "bytes of one sampled token")
            rig.release(row.handle)
            rig.expect_free(l1=30)
            rig.verify(prompt, row.extents)
            rig.free(row.extents)
            rig.expect_free()

    def test_chunks_hand_over_each_page_once(self, make_runtime: MakeRuntime) -> None:
        with self.bench(make_runtime) as rig:
            prompt = rig.prompt(14)
            whole = rig.ask(prompt)
            batch, (handle,) = rig.driver.run(
                BatchPlan(open=(prompt.open(),), rows=(RowPlan(row=0, start=0, count=3),))
            )
            results = [rig.only_row(batch)]
            for start, count in ((3, 6), (9, 5)):
                step = RowPlan(row=handle, start=start, count=count)
                batch, _ = rig.driver.run(BatchPlan(rows=(step,)))
                results.append(rig.only_row(batch))
            equal([page_count(r.extents) for r in results], [0, 2, 1], "pages of the chunks")
            equal([r.first_page_index for r in results], [0, 0, 2], "first pages")
            equal([r.n_valid_pages for r in results], [0, 2, 3], "valid pages")
            equal([len(r.sampled) for r in results], [0, 0, 4], "only the end samples")
            equal(results[-1].sampled, whole.sampled, "the token does not depend on chunks")
            rig.verify(prompt, results[1].extents + results[2].extents)

    def test_decode_steps_and_stop_tokens(self, make_runtime: MakeRuntime) -> None:
        with self.bench(make_runtime) as rig:
            prompt = rig.prompt(6)
            batch, handle = rig.start(prompt, max_new_tokens=8)
            tokens = sampled(rig.driver.wait_batch(batch))
            plan = BatchPlan(rows=(RowPlan(row=handle),), steps=3)
            second, third = rig.driver.run(plan)[0], rig.driver.run(plan)[0]
            for each, count in ((second, 3), (third, 3)):
                row = rig.only_row(each)
                equal((row.finished, len(row.sampled)), (False, 4 * count), "decode steps")
                tokens += sampled(rig.driver.wait_batch(each))
            last, _ = rig.driver.run(BatchPlan(rows=(RowPlan(row=handle),), steps=5))
            tokens += sampled(rig.driver.wait_batch(last))
            equal(rig.only_row(last).finished, True, "max_new_tokens ends a request")
            equal(len(tokens), 8, "tokens in all")
            rig.release(handle)
            opened = prompt.open(8, stop_tokens=(tokens[4], 77))
            batch, (handle,) = rig.driver.run(
                BatchPlan(open=(opened,), rows=(RowPlan(row=0, count=6),))
            )
            rig.driver.wait_batch(batch)
            batch, _ = rig.driver.run(BatchPlan(rows=(RowPlan(row=handle),), steps=7))
            row = rig.only_row(batch)
            equal(row.finished, True, "a stop token ends a request")
            equal(sampled(rig.driver.wait_batch(batch)), tokens[1:5], "tokens up to the stop")

    def test_a_decode_takes_pages_for_what_it_can_make_only(
        self, make_runtime: MakeRuntime
    ) -> None:
        """However many steps the batch has for others."""
        with self.bench(make_runtime, pages=3) as rig:
            batch, handle = rig.start(rig.prompt(8), 4)
            rig.only_row(batch)
            batch, _ = rig.driver.run(BatchPlan(rows=(RowPlan(row=handle),), steps=64))
            row = rig.only_row(batch)
            equal((row.status, row.finished, len(row.sampled)), (RowStatus.OK, True, 12), "end")

    def test_many_rows_share_a_batch(self, make_runtime: MakeRuntime) -> None:
        with self.bench(make_runtime) as rig:
            prompts = [rig.prompt(5 + i, i) for i in range(4)]
            batch, handles = rig.driver.run(
                BatchPlan(
                    open=tuple(p.open() for p in prompts),
                    rows=tuple(RowPlan(row=i, count=len(prompts[i])) for i in (2, 0, 3, 1)),
                )
            )
            rows = rig.driver.wait_batch(batch).rows
            equal([r.handle for r in rows], [handles[i] for i in (2, 0, 3, 1)], "rows as planned")
            equal(len(set(handles)), 4, "handles differ")
            alone = [rig.ask(p).sampled for p in prompts]
            equal([r.sampled for r in rows], [alone[i] for i in (2, 0, 3, 1)], "tokens")

    # ── attach and restore ───────────────────────────────────────────────────────────────────────

    def test_attached_and_restored_pages_hold_what_was_computed(
        self, make_runtime: MakeRuntime
    ) -> None:
        with self.bench(make_runtime) as rig:
            prompt = rig.prompt(21)
            pages = rig.make_pages(prompt)
            copies = rig.store(prompt, pages, Tier.L2).extents
            tail = slice_extents(copies, 2, 5)
            row = rig.ask(prompt, attach=slice_extents(pages, 0, 2), restore=tail)
            equal(rig.driver.verified, 5, "pages compared")
            equal((row.first_page_index, page_count(row.extents)), (2, 3), "handed: the restored")
            equal(row.sampled, rig.ask(prompt).sampled, "the token of a computed prompt")
            rig.free(copies)  # a copy of its own was made of them
            rig.verify(prompt, slice_extents(pages, 0, 2) + row.extents)

    def test_one_page_serves_many_rows_and_outlives_its_free(
        self, make_runtime: MakeRuntime
    ) -> None:
        with self.bench(make_runtime) as rig:
            prompt = rig.prompt(9)
            pages = rig.make_pages(prompt)
            copies = rig.store(prompt, pages, Tier.L2).extents
            gate = rig.runner.pause()
            batch, handles = rig.driver.run(
                BatchPlan(
                    open=(prompt.open(), prompt.open(), prompt.open()),
                    rows=(
                        RowPlan(row=0, attach=pages, start=8, count=1),
                        RowPlan(row=1, attach=pages, start=8, count=1),
                        RowPlan(row=2, restore=copies, start=8, count=1),
                    ),
                )
            )
            gate.wait_for_one()
            frees = rig.driver.apply(rig.driver.free(pages), rig.driver.free(copies))
            rig.driver.poll()
            require(frees[0] not in rig.driver.ended, "a page is free that a row reads")
            gate.open()
            rows = rig.driver.wait_batch(batch).rows
            equal(rig.driver.verified, 6, "pages compared")
            rig.release(*handles)
            for free in frees:
                of_type(rig.driver.wait_action(free), Freed)
            rig.free(*(row.extents for row in rows))
            rig.expect_free()

    def test_the_last_page_of_a_wholly_cached_prompt_is_copied_first(
        self, make_runtime: MakeRuntime
    ) -> None:
        """A shared page is never written; what is decoded goes into pages of the row's own."""
        with self.bench(make_runtime) as rig:
            prompt = rig.prompt(12)
            pages = rig.make_pages(prompt)
            copies = rig.store(prompt, pages, Tier.L2).extents
            fresh = rig.ask(prompt, 3).sampled
            for row_pages in ({"attach": pages}, {"restore": copies}):
                batch, handle = rig.start(prompt, 6, **row_pages)
                row = rig.only_row(batch)
                equal(row.sampled, fresh, "the token of a computed prompt")
                restored = 3 if "restore" in row_pages else 0
                equal(page_count(row.extents), restored, "pages handed over")
                batch, _ = rig.driver.run(BatchPlan(rows=(RowPlan(row=handle),), steps=5))
                more = rig.only_row(batch)
                equal((more.first_page_index, page_count(more.extents)), (3, 1), "decoded page")
                rig.release(handle)
                rig.verify(prompt, row.extents or pages)
                rig.free(row.extents, more.extents)
            rig.verify(prompt, pages)

    # ── order ────────────────────────────────────────────────────────────────────────────────────

    def test_a_backup_holds_what_the_same_message_frees(self, make_runtime: MakeRuntime) -> None:
        with self.bench(make_runtime) as rig:
            prompt = rig.prompt(24)
            pages = rig.make_pages(prompt)
            rig.backend.writes.shut()
            free = rig.driver.free(pages)
            backup = rig.driver.backup(prompt.keys(), pages, Tier.L3)
            plan = BatchPlan(frees=(free,), actions=(backup,))
            rig.driver.prepare(plan)
            rig.backend.writes.open()
            equal(of_type(rig.driver.wait_action(backup.action_id), BackedUp).n, 6, "stored")
            of_type(rig.driver.wait_action(free.action_id), Freed)
            rig.expect_free()
            equal(rig.fetch(prompt, Tier.L2).n_valid, 6, "pages that come back")

    def test_a_batch_takes_what_it_frees(self, make_runtime: MakeRuntime) -> None:
        """Releases and frees come before the rows of the same plan."""
        with self.bench(make_runtime, pages=8, max_requests=1) as rig:
            row = rig.ask(rig.prompt(32))
            free, prompt = rig.driver.free(row.extents), rig.prompt(30, 1)
            batch, _ = rig.driver.run(
                BatchPlan(
                    release=(row.handle,),
                    frees=(free,),
                    open=(prompt.open(),),
                    rows=(RowPlan(row=0, count=30),),
                )
            )
            equal(rig.only_row(batch).status, RowStatus.OK, "status")
            of_type(rig.driver.wait_action(free.action_id), Freed)

    def test_batches_are_executed_once_and_in_order(self, make_runtime: MakeRuntime) -> None:
        with self.bench(make_runtime) as rig:
            driver = rig.driver
            plans = [
                BatchPlan(open=(rig.prompt(6, i).open(),), rows=(RowPlan(row=0, count=6),))
                for i in range(3)
            ]
            first, second, third = (driver.prepare(plan) for plan in plans)
            raises(PlanError, lambda: driver.execute(second), "out of order")
            foreign = PreparedBatchHandle(first.runtime_id + 1, first.batch_id, first.opened)
            raises(StaleHandleError, lambda: driver.execute(foreign), "another runtime's")
            batches = [driver.execute(p) for p in (first, second, third)]
            raises(StaleHandleError, lambda: driver.execute(first), "twice")
            for batch in batches:
                equal(rig.only_row(batch).status, RowStatus.OK, "status")
            equal(list(driver.done), batches, "they end in order")
            empty = driver.prepare(BatchPlan())
            raises(StaleHandleError, lambda: driver.execute(empty), "nothing to execute")
