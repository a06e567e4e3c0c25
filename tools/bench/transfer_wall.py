"""Transfers through `RuntimeInterface`, by the wall clock, and a decode loop beside them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvstrata.boundary import (
    BackedUp,
    Backup,
    BatchDone,
    BatchPlan,
    Free,
    Freed,
    KeyRun,
    OpenRow,
    Restore,
    Restored,
    RowPlan,
)
from kvstrata.errors import IntegrityError
from kvstrata.gpu_runtime import (
    ForwardContext,
    ForwardResult,
    ForwardRow,
    LocalGPURuntime,
    RuntimeSettings,
)
from kvstrata.gpu_runtime.cuda import CudaDevice
from kvstrata.handles import Extents, Tier
from kvstrata.staging import StagingSettings, aligned
from kvstrata.tools.bench.transfer_methods import Geometry

WAIT_S = 30.0
DEADLINE_S = 60.0


class Blank:
    """A ModelRunner that computes nothing: the pages keep what is in them."""

    def forward(self, rows: Sequence[ForwardRow], context: ForwardContext) -> ForwardResult:
        del context
        return ForwardResult([[0] if row.samples else [] for row in rows])


class Wall:
    """One runtime with room for two sets of `count` pages a tier; a set moves as one action."""

    def __init__(
        self, geometry: Geometry, nbytes: int, seed: int, *, huge_pages: bool = False
    ) -> None:
        self.spec, self.page_tokens = geometry.spec, geometry.page_tokens
        self.page_bytes = self.spec.page_bytes(self.page_tokens)
        self.count = max(2, nbytes // self.page_bytes)
        self.nbytes = self.count * self.page_bytes
        rng = np.random.default_rng(seed)
        settings = RuntimeSettings(
            components=(self.spec,),
            pages=4 * self.count,
            page_tokens=self.page_tokens,
            max_requests=8,
            max_context_tokens=(self.count + 1) * self.page_tokens,
            staging=StagingSettings(
                total_bytes=4 * self.count * aligned(self.page_bytes), huge_pages=huge_pages
            ),
        )
        self.runtime = LocalGPURuntime(
            settings,
            Blank(),
            make_device=CudaDevice,
            page_order=lambda n: rng.permutation(n).astype(np.int64),
        )
        self._next = 0

    def close(self) -> None:
        self.runtime.close(DEADLINE_S)

    # ── what moves ───────────────────────────────────────────────────────────────────────────────

    def pages(self) -> Extents:
        """READY pages in L1, scattered."""
        tokens = np.zeros(self.count * self.page_tokens, np.int32)
        plan = BatchPlan(
            open=(OpenRow(tokens=tokens.tobytes(), namespace=bytes(32), max_new_tokens=1),),
            rows=(RowPlan(row=0, start=0, count=len(tokens)),),
        )
        batch = self.runtime.prepare_batch(plan)
        self.runtime.execute_batch(batch)
        (done,) = self._wait(BatchDone, 1)
        self.runtime.prepare_batch(BatchPlan(release=batch.opened))
        extents: Extents = done.rows[0].extents
        return extents

    def backup(self, source: Extents) -> Backup:
        keys = KeyRun(bytes(32), bytes(32), 0, bytes(32 * self.count))
        return Backup(
            action_id=self._number(), keys=keys, source=source, target=Tier.L2, deadline_s=WAIT_S
        )

    def restore(self, source: Extents) -> Restore:
        return Restore(action_id=self._number(), source=source)

    def free(self, *extents: Extents) -> None:
        self.runtime.apply([Free(action_id=self._number(), extents=e) for e in extents])
        self._wait(Freed, len(extents))

    def out(self, pages: Extents) -> float:
        """Seconds until a backup to L2 was told; its pages are freed again."""
        started = time.perf_counter()
        self.runtime.apply([self.backup(pages)])
        (event,) = self._wait(BackedUp, 1)
        took = time.perf_counter() - started
        self._all(event.n)
        self.free(event.extents)
        return took

    def back(self, pages: Extents) -> float:
        """Seconds until a restore of L2 pages was told; its pages are freed again."""
        started = time.perf_counter()
        self.runtime.apply([self.restore(pages)])
        (event,) = self._wait(Restored, 1)
        took = time.perf_counter() - started
        self._all(event.n)
        self.free(event.extents)
        return took

    def both(self, in_l1: Extents, in_l2: Extents) -> float:
        started = time.perf_counter()
        self.runtime.apply([self.backup(in_l1), self.restore(in_l2)])
        first, second = self._wait((BackedUp, Restored), 2)
        took = time.perf_counter() - started
        self._all(first.n)
        self._all(second.n)
        self.free(first.extents, second.extents)
        return took

    def to_l2(self, pages: Extents) -> Extents:
        self.runtime.apply([self.backup(pages)])
        (event,) = self._wait(BackedUp, 1)
        self._all(event.n)
        extents: Extents = event.extents
        return extents

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _all(self, n: int) -> None:
        if n != self.count:
            raise IntegrityError(f"{n} of {self.count} pages were moved")

    def _wait(self, kind: type | tuple[type, ...], count: int) -> list:  # type: ignore[type-arg]
        found: list = []  # type: ignore[type-arg]
        end = time.monotonic() + WAIT_S
        while len(found) < count:
            found += [e for e in self.runtime.poll(1.0) if isinstance(e, kind)]
            if time.monotonic() > end:
                raise IntegrityError(f"no {kind} within {WAIT_S} s")
        return found


# ── beside a loop of Python ──────────────────────────────────────────────────────────────────────


def loop_beside(loop: Callable[[], float], again: Callable[[], int]) -> tuple[float, float]:
    """What the loop takes while another thread calls `again`, which moves and says how much; and
    GiB/s of that."""
    moves, stop = threading.Event(), threading.Event()
    ends: list[tuple[float, int]] = []
    """When each call ended, and what all have moved until then."""
    failures: list[BaseException] = []

    def keep_moving() -> None:
        moved = 0
        try:
            while not stop.is_set():
                moved += again()
                ends.append((time.perf_counter(), moved))
                moves.set()
        except BaseException as exc:  # noqa: BLE001 - raised where it is waited for
            failures.append(exc)
            moves.set()

    thread = threading.Thread(target=keep_moving, name="bench-transfers")
    thread.start()
    try:
        moves.wait()
        started = time.perf_counter()
        beside = loop()
        ended = time.perf_counter()
    finally:
        stop.set()
        thread.join()  # the call that was under way has ended, too: its part is counted
    if failures:
        raise failures[0]
    return beside, _rate(ends, started, ended) / (1 << 30)


def _rate(ends: Sequence[tuple[float, int]], started: float, ended: float) -> float:
    """Bytes a second between two times; of calls that lie across one of them, their part."""
    times, moved = np.asarray(ends, np.float64).T
    first, last = np.interp([started, ended], times, moved)
    return float((last - first) / (ended - started))
