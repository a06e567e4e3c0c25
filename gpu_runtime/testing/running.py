"""Conformance: batches while others run, aborts at every step, runners that fail."""

from __future__ import annotations

import msgspec

from kvstrata.boundary import BatchPlan, RowPlan, RowStatus
from kvstrata.errors import StaleHandleError
from kvstrata.gpu_runtime.testing.driver import equal, raises, require
from kvstrata.gpu_runtime.testing.rig import MakeRuntime, Rig, RuntimeSuite, sampled
from kvstrata.handles import Tier, page_count


class RunningTests(RuntimeSuite):
    def test_the_next_batch_is_prepared_and_enqueued_while_one_runs(
        self, make_runtime: MakeRuntime
    ) -> None:
        """Before its tokens are known; a row that ends in between is masked."""
        with self.bench(make_runtime) as rig:
            gate = rig.runner.pause()
            short, long = rig.prompt(5, 1), rig.prompt(6, 2)
            first, (a, b) = rig.driver.run(
                BatchPlan(
                    open=(short.open(1), long.open(5)),
                    rows=(RowPlan(row=0, count=5), RowPlan(row=1, count=6)),
                )
            )
            gate.wait_for_one()
            decode = BatchPlan(rows=(RowPlan(row=a), RowPlan(row=b)), steps=2)
            second, third = rig.driver.run(decode)[0], rig.driver.run(decode)[0]
            rig.driver.poll()
            require(not rig.driver.done, "a batch ended behind a shut gate")
            gate.open()
            rows = rig.driver.wait_batch(first).rows
            equal([r.finished for r in rows], [True, False], "who finished")
            for batch in (second, third):
                masked, runs = rig.driver.wait_batch(batch).rows
                equal((masked.status, masked.sampled), (RowStatus.MASKED, b""), "a finished row")
                equal((runs.status, len(runs.sampled)), (RowStatus.OK, 8), "a running row")
            equal(rig.driver.done[third].rows[1].finished, True, "the end")

    def test_a_request_may_be_released_while_its_batches_run(
        self, make_runtime: MakeRuntime
    ) -> None:
        """Its pages and its row come back when the last batch that names it has ended."""
        with self.bench(make_runtime, max_requests=1) as rig:
            gate = rig.runner.pause()
            first, handle = rig.start(rig.prompt(10), 9)
            gate.wait_for_one()
            second, _ = rig.driver.run(BatchPlan(rows=(RowPlan(row=handle),), steps=4))
            rig.release(handle)
            raises(StaleHandleError, lambda: rig.release(handle), "released twice")
            decode = BatchPlan(rows=(RowPlan(row=handle),))
            raises(StaleHandleError, lambda: rig.driver.prepare(decode), "a row of its own")
            _, free, freeing = rig.driver.pages(Tier.L1)
            require(free + freeing < 32, "pages are free that a batch still writes")
            gate.open()
            rows = [rig.only_row(first), rig.only_row(second)]
            equal(rows[1].status, RowStatus.ABORTED, "what was not begun is not done")
            rig.free(*(row.extents for row in rows))
            rig.expect_free()
            equal(rig.ask(rig.prompt(4)).status, RowStatus.OK, "the row is free again")

    def test_abort_at_every_step(self, make_runtime: MakeRuntime) -> None:
        """Also between prepare and execute. No page is lost, and none is handed over unfinished."""
        with self.bench(make_runtime) as rig:
            prompt = rig.prompt(6)
            whole = rig.ask(prompt, 7)
            rig.release(whole.handle)
            rig.free(whole.extents)
            for step in range(8):
                self._abort_at(rig, step)
                rig.expect_free()

    def _abort_at(self, rig: Rig, step: int) -> None:
        driver, first = rig.driver, rig.runner.steps
        gate = rig.runner.pause(first + step) if step < 7 else None
        plan = BatchPlan(open=(rig.prompt(6).open(7),), rows=(RowPlan(row=0, count=6),))
        prepared = driver.prepare(plan)
        (handle,) = prepared.opened
        if step == 7:
            driver.cancel(handle)
        batches = [driver.execute(prepared)]
        batches.append(driver.run(BatchPlan(rows=(RowPlan(row=handle),), steps=6))[0])
        if gate is not None:
            gate.wait_for_one()
            driver.cancel(handle)
            gate.open()
        prefill, decode = (driver.wait_batch(batch).rows[0] for batch in batches)
        want_prefill = RowStatus.ABORTED if step == 7 else RowStatus.OK
        equal(prefill.status, want_prefill, f"prefill, aborted at step {step}")
        # An abort while the last step runs comes too late.
        want_decode = RowStatus.OK if step == 6 else RowStatus.ABORTED
        equal(decode.status, want_decode, f"decode, aborted at step {step}")
        made = step if 1 <= step <= 6 else 0
        equal(len(decode.sampled), 4 * made, f"tokens decoded before step {step}")
        equal(decode.finished, True, "an aborted request has ended")
        rig.release(handle)
        rig.free(prefill.extents, decode.extents)

    def test_a_runner_that_raises_ends_its_batch_only(self, make_runtime: MakeRuntime) -> None:
        """Also one that wants to exit: its rows are ABORTED, the error is told, others go on."""
        with self.bench(make_runtime) as rig:
            for error in (ValueError("a fault of the test"), SystemExit("an exit")):
                gate = rig.runner.pause()
                rig.runner.fail_at[rig.runner.steps] = error
                bad, handle = rig.start(rig.prompt(9), 5)
                gate.wait_for_one()
                behind, _ = rig.driver.run(BatchPlan(rows=(RowPlan(row=handle),), steps=2))
                other, _ = rig.start(rig.prompt(5, 2))
                gate.open()
                done = rig.driver.wait_batch(bad)
                require(str(error) in done.error, f"the error is not told: {done.error!r}")
                equal(done.rows[0].status, RowStatus.ABORTED, "its row")
                equal(done.rows[0].extents, (), "pages of unknown content")
                equal(rig.only_row(behind).status, RowStatus.ABORTED, "a batch behind it")
                row = rig.only_row(other)
                equal((row.status, rig.driver.done[other].error), (RowStatus.OK, ""), "another's")
                rig.release(handle, row.handle)
                rig.free(row.extents)
                rig.expect_free()

    def test_a_row_that_the_runner_refuses_ends_alone(self, make_runtime: MakeRuntime) -> None:
        with self.bench(make_runtime) as rig:
            rig.runner.refuse = {b"bad"}
            good = rig.prompt(9).open(3)
            bad = msgspec.structs.replace(good, payload=b"bad")
            batch, (first, second) = rig.driver.run(
                BatchPlan(open=(bad, good), rows=(RowPlan(row=0, count=9), RowPlan(row=1, count=9)))
            )
            decode = BatchPlan(rows=(RowPlan(row=first), RowPlan(row=second)), steps=2)
            behind, _ = rig.driver.run(decode)
            lost, other = rig.driver.wait_batch(batch).rows
            equal((lost.status, lost.error), (RowStatus.ABORTED, "refused by the test"), "refused")
            equal((lost.finished, lost.extents), (True, ()), "refused")
            equal((other.status, other.error), (RowStatus.OK, ""), "the other one")
            equal(rig.driver.done[batch].error, "", "the batch did not fail")
            lost, more = rig.driver.wait_batch(behind).rows
            equal((lost.status, more.status), (RowStatus.ABORTED, RowStatus.OK), "behind it")
            rig.release(first, second)
            rig.free(other.extents, more.extents)
            rig.expect_free()

    def test_no_page_leaks_whenever_it_is_aborted(self, make_runtime: MakeRuntime) -> None:
        """Restores in flight included: B086, B058."""
        with self.bench(make_runtime) as rig:
            prompt = rig.prompt(17)
            copies = rig.in_l2(prompt)
            for when in range(4):
                gate = rig.runner.pause() if when == 2 else None
                prepared = rig.driver.prepare(
                    BatchPlan(
                        open=(prompt.open(4),),
                        rows=(RowPlan(row=0, restore=copies, start=16, count=1),),
                    )
                )
                (handle,) = prepared.opened
                if when == 0:
                    rig.driver.cancel(handle)
                batch = rig.driver.execute(prepared)
                if when == 1:
                    rig.driver.cancel(handle)
                if gate is not None:
                    gate.wait_for_one()
                    rig.release(handle)
                    gate.open()
                row = rig.only_row(batch)
                if when == 3:
                    rig.driver.cancel(handle)
                if gate is None:
                    rig.release(handle)
                require(
                    row.status is RowStatus.OK or not row.extents,
                    "an aborted row hands pages over",
                )
                equal(page_count(row.extents), 4 if row.status is RowStatus.OK else 0, "pages")
                rig.free(row.extents)
                rig.expect_free(l2=12)
            rig.free(copies)
            rig.expect_free()

    def test_tokens_do_not_depend_on_how_batches_are_cut(self, make_runtime: MakeRuntime) -> None:
        with self.bench(make_runtime) as rig:
            found = []
            for steps in (1, 2, 7):
                batch, handle = rig.start(rig.prompt(9), 8)
                tokens = sampled(rig.driver.wait_batch(batch))
                while len(tokens) < 8:
                    batch, _ = rig.driver.run(BatchPlan(rows=(RowPlan(row=handle),), steps=steps))
                    tokens += sampled(rig.driver.wait_batch(batch))
                found.append(tokens)
                rig.release(handle)
            equal(found, [found[0]] * 3, "tokens with 1, 2 and 7 steps a batch")
