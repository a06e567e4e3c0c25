"""`LocalGPURuntime`: the runtime in the control's own process."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from kvstrata.backends import HostRegion, StorageWorker, WorkerStats
from kvstrata.boundary import (
    Action,
    BatchPlan,
    BatchTicket,
    Event,
    PreparedBatchHandle,
    Wake,
)
from kvstrata.errors import ClosedError, ConfigError, StorageBusyError, Where
from kvstrata.gpu_runtime.base import START_FAILED_CLOSE_S, STRANDED, Device, ModelRunner
from kvstrata.gpu_runtime.batches import BatchEngine
from kvstrata.gpu_runtime.core import RuntimeCore, RuntimeSettings
from kvstrata.gpu_runtime.cpu import CpuDevice
from kvstrata.gpu_runtime.epochs import Epochs
from kvstrata.gpu_runtime.moves import Moves
from kvstrata.gpu_runtime.timeline import PathTotals, Timeline
from kvstrata.handles import RequestRuntimeHandle
from kvstrata.staging import Pages

logger = logging.getLogger(__name__)


class LocalGPURuntime:
    """`RuntimeInterface` on a device of this process (see there for the contract).

    Makes and owns the device, the pools and staging; takes over `worker`, which it starts and
    closes. `runtime_id` is drawn if it is not given: what belongs to another runtime, or to one
    that was closed, is stale. `stamp_source` and `page_order` let a test hand out hostile ids.
    Raises ConfigError for sizes that cannot work and what the worker's backend raises; nothing is
    left running then.
    """

    def __init__(
        self,
        settings: RuntimeSettings,
        runner: ModelRunner,
        worker: StorageWorker | None = None,
        *,
        make_device: Callable[[Timeline], Device] = CpuDevice,
        runtime_id: int | None = None,
        stamp_source: Iterator[int] | None = None,
        page_order: Callable[[int], Pages] | None = None,
    ) -> None:
        self._timeline = Timeline()
        self._device = make_device(self._timeline)
        with ExitStack() as undo:
            undo.callback(self._device.close, START_FAILED_CLOSE_S)
            self._core = RuntimeCore(
                settings,
                self._device,
                self._timeline,
                worker,
                runtime_id=secrets.randbits(63) if runtime_id is None else runtime_id,
                stamp_source=stamp_source,
                page_order=page_order,
            )
            undo.callback(self._core.staging.close)
            self._moves = Moves(self._core)
            self._batches = BatchEngine(self._core, self._moves.copies, runner)
            self._epochs = Epochs(self._core, self._batches, self._moves)
            if worker is not None:
                worker.start(regions=self._regions())
            undo.pop_all()
        self._core.expiries.append(self._refuse_stuck)
        self._attachments = 1
        self._detached = False

    def prepare_batch(self, plan: BatchPlan) -> PreparedBatchHandle:
        actions = (*plan.frees, *plan.actions)
        with self._core.lock:
            self._check_open()
            self._moves.check(actions)
            return self._batches.prepare(plan, lambda: self._epochs.start(actions))

    def execute_batch(self, batch: PreparedBatchHandle) -> BatchTicket:
        with self._core.lock:
            self._check_open()
            return self._batches.execute(batch)

    def apply(self, actions: Sequence[Action]) -> None:
        with self._core.lock:
            self._check_open()
            self._moves.check(actions)
            self._epochs.start(actions)

    def cancel(self, what: RequestRuntimeHandle | int) -> None:
        with self._core.lock:
            if isinstance(what, RequestRuntimeHandle):
                self._batches.abort(what)
            else:
                self._moves.cancel(what)

    def poll(self, timeout_s: float, wake: Wake = Wake.ANY) -> list[Event]:
        return self._core.take_events(timeout_s, wake)

    def close(self, deadline_s: float) -> None:
        """Idempotent. Storage jobs and device work that are stuck are left behind, on daemon
        threads; the page tables are not used again."""
        end = time.monotonic() + deadline_s
        with self._core.lock:
            if self._core.closed:
                return
            self._core.closed = True
            self._batches.abort_all()
            self._moves.stop("closed")
        if self._core.worker is not None:
            self._core.worker.close(max(0.0, deadline_s / 2))
        if not self._device.close(max(0.0, end - time.monotonic())):
            logger.error("device work was still running after %s s", deadline_s)
            STRANDED.append((self._core.staging.region, self._core.pools))
        with self._core.lock:
            self._core.staging.close()
            self._batches.end_all()
            self._core.end_actions("closed")

    # ── storage, while serving; any thread ───────────────────────────────────────────────────────

    def attached_storage(self) -> StorageWorker | None:
        """The worker that L3 is asked through now; None while there is none."""
        with self._core.lock:
            return None if self._detached else self._core.worker

    def detach_storage(self, deadline_s: float, *, force: bool = False) -> bool:
        """Go on without the backend, which is closed within `deadline_s` in all.

        At once, what is asked of L3 is a miss. What is under way, and stores that wait, get half of
        the time; with `force`, what waits is given up at once. True if all came to its end. Host
        pages that a stuck call still uses stay apart until it returns. Idempotent.
        """
        with self._core.lock:
            worker = self._core.worker
            if worker is None or self._detached:
                return True
            self._detached = True
            self._core.storage.attach(None, "detached")
        end = time.monotonic() + deadline_s
        drained = not force and worker.drain(deadline_s / 2)
        worker.close(max(0.0, end - time.monotonic()))
        self._core.events.nudge()
        return drained

    def attach_storage(self, worker: StorageWorker) -> None:
        """Take over `worker`, which is not started yet, as L3.

        Raises what its backend's `open` raises, `StorageBusyError` while another one is attached,
        ConfigError for a runtime that was made without L3.
        """
        core = self._core
        with core.lock:
            self._check_open()
            if core.worker is None:
                raise ConfigError(
                    "this runtime was made without L3",
                    remedy="name a backend in [l3] from the beginning",
                    where=Where(key="l3.backend"),
                )
            if not self._detached:
                raise StorageBusyError(f"detach {core.worker.name!r} first")
        core.storage.listen(worker)
        worker.start(regions=self._regions())
        with core.lock:
            is_late = core.closed or not self._detached
            if not is_late:
                self._attachments += 1
                core.worker, self._detached = worker, False
                core.backend_name = f"{worker.name}#{self._attachments}"
                core.storage.attach(worker)
        if is_late:
            worker.close(START_FAILED_CLOSE_S)
            raise ClosedError("the runtime was closed, or got another backend, meanwhile")
        core.events.nudge()

    def _refuse_stuck(self, _: float) -> float:
        """What asks for more of a backend that hangs with its whole share is not kept waiting."""
        if self._core.worker is not None:
            self._core.staging.refuse_stuck(self._core.backend_name)
        return math.inf

    def _regions(self) -> tuple[HostRegion, ...]:
        region = self._core.staging.region
        return (HostRegion(region.fd, region.array.ctypes.data, region.nbytes),)

    def _check_open(self) -> None:
        self._core.check_fault()
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
        self._moves.copies.queues.check_integrity()
        if self._core.worker is not None:
            self._core.worker.check_integrity()
