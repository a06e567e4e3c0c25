"""A thousand aborts at random moments."""

from __future__ import annotations

import random
from collections.abc import Callable

from kvstrata.boundary import BatchPlan, RowPlan
from kvstrata.errors import CapacityError
from kvstrata.gpu_runtime import LocalGPURuntime
from kvstrata.gpu_runtime.testing import Rig
from kvstrata.handles import Tier

Bench = Callable[..., Rig]


def test_a_thousand_aborts_leave_nothing(bench: Bench, seed: int) -> None:
    """B086: whatever is aborted, whenever: free pages are what they were at the start."""
    rig = bench(pages=24, host_pages=8)
    numbers = random.Random(seed)
    stored = rig.prompt(16)
    rig.in_l3(stored)
    copies = rig.in_l2(rig.prompt(8, 1))
    rig.driver.ended.clear()
    rig.driver.done.clear()
    for _ in range(1000):
        kind = numbers.randrange(4)
        if kind == 0:
            action = rig.driver.prefetch(stored.keys(), numbers.choice([Tier.L1, Tier.L2]))
            rig.driver.apply(action)
            if numbers.random() < 0.5:
                rig.driver.poll(0)
            rig.driver.cancel(action.action_id)
        elif kind == 1:
            action = rig.driver.backup(rig.prompt(8, 1).keys(), copies, Tier.L3)
            rig.driver.apply(action)
            rig.driver.cancel(action.action_id)
        else:
            prompt = rig.prompt(8, 1).more([1, 2, 3])
            restore = copies if kind == 2 else ()
            start = 8 if restore else 0
            try:
                prepared = rig.driver.prepare(
                    BatchPlan(
                        open=(prompt.open(3),),
                        rows=(RowPlan(row=0, restore=restore, start=start, count=11 - start),),
                    )
                )
            except CapacityError:
                rig.driver.wait_idle()
                continue
            if numbers.random() < 0.5:
                rig.driver.cancel(*prepared.opened)
            rig.driver.execute(prepared)
            rig.release(*prepared.opened)
        if numbers.random() < 0.1:
            rig.driver.wait_idle()
            claimed = [e for e in rig.driver.ended.values() if getattr(e, "extents", ())]
            rows = [row for done in rig.driver.done.values() for row in done.rows if row.extents]
            rig.driver.ended.clear()
            rig.driver.done.clear()
            rig.free(*(e.extents for e in (*claimed, *rows)))  # type: ignore[union-attr]
    rig.driver.wait_idle()
    ends = (*rig.driver.ended.values(), *(r for d in rig.driver.done.values() for r in d.rows))
    rig.free(*(e.extents for e in ends if getattr(e, "extents", ())))  # type: ignore[union-attr]
    rig.expect_free(l2=6)
    assert isinstance(rig.runtime, LocalGPURuntime)
    assert rig.runtime.core.staging.lent("bench") == 0
    assert len(rig.runtime.batches.rows) == 0
