"""The report at the end of every poll: what is free, and what moving costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.boundary import PathCost, PoolCapacity, StatusReport
from kvstrata.handles import Tier

if TYPE_CHECKING:
    from kvstrata.gpu_runtime.core import RuntimeCore


def report(core: RuntimeCore) -> StatusReport:
    """Under the runtime's lock."""
    staging = core.staging
    capacity = [
        PoolCapacity(Tier.L1, name, table.total, table.free, table.freeing)
        for name, table in core.tables.items()
    ]
    waiting, reserve, window = staging.waiting, staging.reserve, staging.load_window
    capacity += [
        PoolCapacity(
            Tier.L2,
            name,
            table.total,
            table.free,
            table.freeing,
            waiting=waiting,
            reserve=reserve,
            window=window,
            stuck=table.stuck,
        )
        for name, table in staging.tables.items()
    ]
    costs = [
        PathCost(path, t.nbytes, t.busy_s, 0)
        for path, t in core.timeline.totals().items()
        if path != "compute"
    ]
    if core.worker is not None:
        stats = core.worker.stats()
        paths = zip(("l3_read", "l3_write"), ("load", "store"), staging.queued, strict=True)
        costs += [
            PathCost(path, stats.bytes_moved.get(op, 0), stats.io_s.get(op, 0.0), queued)
            for path, op, queued in paths
        ]
    speed = core.prefill_tokens / core.prefill_s if core.prefill_s > 0 else 0.0
    return StatusReport(capacity=tuple(capacity), costs=tuple(costs), prefill_tokens_per_s=speed)
