"""`LocalGPURuntime`: the runtime in the control's own process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from kvstrata.backends import StorageWorker, WorkerStats
from kvstrata.boundary import (
    Action,
    Backup,
    BatchPlan,
    BatchTicket,
    Event,
    Free,
    PreparedBatchHandle,
    Wake,
)
from kvstrata.errors import ClosedError
from kvstrata.gpu_runtime.base import Device, ModelRunner
from kvstrata.gpu_runtime.batches import BatchEngine
from kvstrata.gpu_runtime.core import RuntimeCore, RuntimeSettings
from kvstrata.gpu_runtime.cpu import CpuDevice
from kvstrata.gpu_runtime.moves import Moves
from kvstrata.gpu_runtime.timeline import PathTotals, Timeline
from kvstrata.handles import RequestRuntimeHandle
from kvstrata.staging import Pages


class LocalGPURuntime:
    """`RuntimeInterface` on a device of this process (see there for the contract).

    Owns the device, the pools and staging; takes over `worker`, which it starts and closes.
    `stamp_source` and `page_order` let a test hand out hostile ids.
    """

    def __init__(
        self,
        settings: RuntimeSettings,
        runner: ModelRunner,
        worker: StorageWorker | None = None,
        *,
        device: Device | None = None,
        runtime_id: int = 1,
        stamp_source: Iterator[int] | None = None,
        page_order: Callable[[int], Pages] | None = None,
    ) -> None:
        if worker is not None:
            worker.start()
        self._timeline = Timeline()
        self._device = device or CpuDevice(self._timeline)
        self._core = RuntimeCore(
            settings,
            self._device,
            self._timeline,
            worker,
            runtime_id=runtime_id,
            stamp_source=stamp_source,
            page_order=page_order,
        )
        self._moves = Moves(self._core)
        self._batches = BatchEngine(self._core, self._moves.copies, runner)

    def prepare_batch(self, plan: BatchPlan) -> PreparedBatchHandle:
        with self._core.lock:
            self._check_open()
            return self._batches.prepare(plan, lambda: self._apply((*plan.frees, *plan.actions)))

    def execute_batch(self, batch: PreparedBatchHandle) -> BatchTicket:
        with self._core.lock:
            self._check_open()
            return self._batches.execute(batch)

    def apply(self, actions: Sequence[Action]) -> None:
        with self._core.lock:
            self._check_open()
            self._apply(actions)

    def _apply(self, actions: Sequence[Action]) -> None:
        """Backups hold their source before a free of the same message takes it away, and frees
        make room before what follows asks for it."""
        for action in sorted(actions, key=_turn):
            self._moves.start(action)

    def cancel(self, what: RequestRuntimeHandle | int) -> None:
        with self._core.lock:
            if isinstance(what, RequestRuntimeHandle):
                self._batches.abort(what)
            else:
                self._moves.cancel(what)

    def poll(self, timeout_s: float, wake: Wake = Wake.ANY) -> list[Event]:
        return self._core.take_events(timeout_s, wake)

    def close(self, deadline_s: float) -> None:
        """Idempotent. Storage jobs that are stuck are left behind as daemon threads."""
        end = time.monotonic() + deadline_s
        with self._core.lock:
            if self._core.closed:
                return
            self._core.closed = True
            for row in self._batches.rows.all():
                row.aborted = True
        if self._core.worker is not None:
            self._core.worker.close(max(0.0, deadline_s / 2))
        self._device.close(max(0.0, end - time.monotonic()))
        with self._core.lock:
            self._core.staging.close()
            self._batches.end_all()
            self._core.fail_open_actions("closed")

    def _check_open(self) -> None:
        if self._core.closed:
            raise ClosedError("the runtime is closed")

    # ── for reports and tests; not part of the boundary ──────────────────────────────────────────

    @property
    def core(self) -> RuntimeCore:
        return self._core

    @property
    def batches(self) -> BatchEngine:
        return self._batches

    def transfers(self) -> dict[str, PathTotals]:
        """What each stream did, by name."""
        return self._timeline.totals()

    def hidden_share(self) -> float | None:
        """Share of transfer time that compute has hidden."""
        return self._timeline.hidden_share()

    def storage_stats(self) -> WorkerStats | None:
        return self._core.worker.stats() if self._core.worker else None

    def check_integrity(self) -> None:
        """Raise IntegrityError when an invariant of tables, rows, staging or worker is broken."""
        self._core.check_integrity()
        with self._core.lock:
            self._batches.rows.check_integrity()
        if self._core.worker is not None:
            self._core.worker.check_integrity()


def _turn(action: Action) -> int:
    return 0 if isinstance(action, Backup) else 1 if isinstance(action, Free) else 2
