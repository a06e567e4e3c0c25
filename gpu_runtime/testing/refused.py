"""Conformance: plans that are refused before anything took effect, and those that do not fit."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.boundary import Action, ActionFailed, BatchPlan, Freed, OpenRow, RowPlan
from kvstrata.errors import CapacityError, KvstrataError, PlanError, StaleHandleError
from kvstrata.gpu_runtime.testing.driver import equal, of_type, raises, require
from kvstrata.gpu_runtime.testing.rig import MakeRuntime, Rig, RuntimeSuite
from kvstrata.handles import CacheExtentRef, Extents, RequestRuntimeHandle, Tier


@dataclass(frozen=True, slots=True)
class _Scene:
    """Live things that bad plans misuse."""

    rig: Rig
    handle: RequestRuntimeHandle
    partial: RequestRuntimeHandle
    """Computed 3 tokens of its prompt of 8."""
    done: RequestRuntimeHandle
    l1: Extents
    l2: Extents
    freed: Extents

    def plan(self, *rows: RowPlan, **more: object) -> BatchPlan:
        more.setdefault("open", (self.rig.prompt(10, 1).open(),))
        return BatchPlan(rows=rows, **more)  # type: ignore[arg-type]


class RefusalTests(RuntimeSuite):
    def _scene(self, rig: Rig) -> _Scene:
        _, handle = rig.start(rig.prompt(8, 50), 4)
        plan = BatchPlan(open=(rig.prompt(8).open(),), rows=(RowPlan(row=0, count=3),))
        _, (partial,) = rig.driver.run(plan)
        done = rig.ask(rig.prompt(5, 51)).handle
        rig.release(done)
        l1 = rig.make_pages(rig.prompt(10, 1))
        l2 = rig.store(rig.prompt(10, 1), l1, Tier.L2).extents
        freed = rig.make_pages(rig.prompt(8, 52))
        rig.free(freed)
        rig.driver.wait_idle()
        return _Scene(rig, handle, partial, done, l1, l2, freed)

    def _nothing_happens(self, scene: _Scene, plan: BatchPlan, kind: type[KvstrataError]) -> None:
        """The plan is refused; its good parts (a release, a free, an action) did not happen."""
        driver = scene.rig.driver
        before = driver.pages(Tier.L1), driver.pages(Tier.L2)
        good: tuple[Action, ...] = (driver.lookup(scene.rig.prompt(8).keys()), *plan.actions)
        release = plan.release or (scene.handle,)
        if any(row.row == scene.handle for row in plan.rows):
            release = plan.release
        plan = BatchPlan(
            release=release,
            frees=plan.frees,
            actions=good,
            open=plan.open,
            rows=plan.rows,
            steps=plan.steps,
        )
        raises(kind, lambda: driver.prepare(plan), f"{plan}")
        driver.poll()
        equal((driver.pages(Tier.L1), driver.pages(Tier.L2)), before, f"pages after {plan}")
        require(not driver.open, "an action of a refused plan was started")

    def test_stale_handles_and_extents_are_refused(self, make_runtime: MakeRuntime) -> None:
        with self.bench(make_runtime) as rig:
            scene = self._scene(rig)
            live = scene.handle
            other = RequestRuntimeHandle(live.runtime_id + 1, live.slot_id, live.generation)
            old = RequestRuntimeHandle(live.runtime_id, live.slot_id, live.generation + 1)
            far = RequestRuntimeHandle(live.runtime_id, 10_000, live.generation)
            for bad in (other, old, far, scene.done):
                decode = BatchPlan(rows=(RowPlan(row=bad),))
                self._nothing_happens(scene, decode, StaleHandleError)
                self._nothing_happens(scene, BatchPlan(release=(bad,)), StaleHandleError)
            for extents in (scene.freed, *_twisted(scene.l1), scene.l2):
                plan = scene.plan(RowPlan(row=0, attach=extents, start=8, count=2))
                self._nothing_happens(scene, plan, StaleHandleError)
            for extents in (scene.freed, *_twisted(scene.l2), scene.l1):
                plan = scene.plan(RowPlan(row=0, restore=extents, start=8, count=2))
                self._nothing_happens(scene, plan, StaleHandleError)
            for extents in (scene.freed, *_twisted(scene.l1), ()):
                plan = BatchPlan(frees=(rig.driver.free(extents),))
                self._nothing_happens(scene, plan, StaleHandleError)
            rig.verify(rig.prompt(10, 1), scene.l1)

    def test_plans_that_contradict_themselves_are_refused(self, make_runtime: MakeRuntime) -> None:
        with self.bench(make_runtime) as rig:
            scene = self._scene(rig)
            driver, handle = rig.driver, scene.handle
            prompt = rig.prompt(10, 1)
            chunk = RowPlan(row=0, attach=scene.l1, start=8, count=2)
            twice = driver.lookup(prompt.keys())
            torn = OpenRow(tokens=b"12345", namespace=prompt.namespace, max_new_tokens=1)
            for plan in (
                scene.plan(RowPlan(row=1, count=10)),
                scene.plan(RowPlan(row=-1, count=10)),
                scene.plan(RowPlan(row=0, start=1, count=9)),
                scene.plan(RowPlan(row=0, count=11)),
                scene.plan(RowPlan(row=0, count=-1)),
                scene.plan(RowPlan(row=0)),  # nothing to decode from
                scene.plan(RowPlan(row=0, attach=scene.l1, start=7, count=3)),
                scene.plan(RowPlan(row=0, attach=scene.l1, start=0, count=10)),
                scene.plan(RowPlan(row=0, count=5), RowPlan(row=0, start=5, count=5)),
                scene.plan(chunk, frees=(driver.free(scene.l1),)),
                scene.plan(chunk, actions=(driver.free(scene.l1),)),
                scene.plan(
                    RowPlan(row=0, restore=scene.l2, start=8, count=2),
                    frees=(driver.free(scene.l2),),
                ),
                scene.plan(open=(torn,)),
                scene.plan(open=(OpenRow(tokens=b"", namespace=b"n" * 32, max_new_tokens=1),)),
                scene.plan(open=(OpenRow(tokens=b"1234", namespace=b"n", max_new_tokens=1),)),
                scene.plan(open=(prompt.open(0),)),
                scene.plan(open=(prompt.open(1000),)),
                BatchPlan(rows=(RowPlan(row=handle), RowPlan(row=handle))),
                BatchPlan(rows=(RowPlan(row=handle),), steps=0),
                BatchPlan(rows=(RowPlan(row=handle, start=0, count=1),)),
                BatchPlan(rows=(RowPlan(row=handle, attach=scene.l1),)),
                BatchPlan(rows=(RowPlan(row=handle),), release=(handle,)),
                BatchPlan(rows=(RowPlan(row=scene.partial),)),
                BatchPlan(rows=(RowPlan(row=scene.partial, start=3, count=6),)),
                BatchPlan(release=(handle, handle)),
                BatchPlan(actions=(twice, twice)),
            ):
                self._nothing_happens(scene, plan, PlanError)
            rig.verify(prompt, scene.l1)

    def test_a_stale_free_among_the_actions_fails_by_itself(
        self, make_runtime: MakeRuntime
    ) -> None:
        with self.bench(make_runtime) as rig:
            scene = self._scene(rig)
            bad, good = rig.driver.free(scene.freed), rig.driver.free(scene.l1)
            rig.driver.prepare(BatchPlan(actions=(bad, good)))
            event = of_type(rig.driver.wait_action(bad.action_id), ActionFailed)
            equal(event.cause, "stale", "cause")
            of_type(rig.driver.wait_action(good.action_id), Freed)
            rig.driver.cancel(scene.done)  # and cancelling what is gone does nothing

    def test_an_id_is_used_by_one_action_at_a_time(self, make_runtime: MakeRuntime) -> None:
        with self.bench(make_runtime) as rig:
            rig.backend.asks.shut()
            action = rig.driver.lookup(rig.prompt(8).keys())
            rig.driver.apply(action)
            raises(PlanError, lambda: rig.runtime.apply([action]), "an id in use")
            rig.backend.asks.open()
            rig.driver.wait_action(action.action_id)

    def test_what_does_not_fit_leaves_nothing(self, make_runtime: MakeRuntime) -> None:
        """CapacityError: no row, no page; but releases, frees and actions did take effect."""
        with self.bench(make_runtime, pages=8, max_requests=2) as rig:
            driver = rig.driver
            pages = rig.make_pages(rig.prompt(12, 1))
            _, gone = rig.start(rig.prompt(4, 2), 1)
            driver.wait_idle()
            lookup, free = driver.lookup(rig.prompt(8).keys()), driver.free(pages)
            prompt = rig.prompt(36)
            large = BatchPlan(
                release=(gone,),
                frees=(free,),
                actions=(lookup,),
                open=(prompt.open(),),
                rows=(RowPlan(row=0, count=36),),
            )
            error = raises(CapacityError, lambda: driver.prepare(large), "9 pages of 8")
            assert isinstance(error, CapacityError)
            equal((error.need, error.free), (9, 7), "need and free")
            driver.wait_action(lookup.action_id)
            driver.wait_action(free.action_id)
            raises(StaleHandleError, lambda: rig.release(gone), "the release took effect")
            rows = BatchPlan(open=tuple(rig.prompt(4, i).open() for i in range(3)))
            raises(CapacityError, lambda: driver.prepare(rows), "3 rows of 2")
            rig.expect_free(l1=7)  # the page that `gone` made is a claim of ours
            fits = [driver.prepare(BatchPlan(open=(p.open(),))).opened[0] for p in (prompt, prompt)]
            rig.release(*fits)


def _twisted(extents: Extents) -> list[Extents]:
    """Extents that are almost right."""
    first, rest = extents[0], extents[1:]
    out: list[Extents] = [
        (first, *extents),  # a page twice
        (first.slice(0, first.page_count - 1), *rest) if rest else (),
        rest,
    ]
    for field, value in (
        ("runtime_id", first.runtime_id + 1),
        ("generation", first.generation + 1),
        ("pool", "no such pool"),
        ("tier", Tier.L3),
    ):
        names = first.__struct_fields__
        fields = {name: getattr(first, name) for name in names} | {field: value}
        out.append((CacheExtentRef(**fields), *rest))
    return [e for e in out if e]
