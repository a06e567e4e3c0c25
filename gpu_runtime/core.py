"""What all parts of the runtime share: one lock, the page tables, staging, events, open actions."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import numpy as np

from kvstrata.backends import StorageWorker
from kvstrata.boundary import (
    ActionFailed,
    Event,
    Freed,
    Wake,
)
from kvstrata.errors import ConfigError, IntegrityError, StaleHandleError, Where
from kvstrata.gpu_runtime.base import Device
from kvstrata.gpu_runtime.events import EventQueue, OpenActions
from kvstrata.gpu_runtime.pools import ComponentPool, ComponentSpec
from kvstrata.gpu_runtime.report import report
from kvstrata.gpu_runtime.storage_events import StorageEvents
from kvstrata.gpu_runtime.timeline import Timeline
from kvstrata.handles import Extents, StagingMode, Tier, by_pool
from kvstrata.staging import Pages, PageTable, PinnedHostBufferPool, StagingSettings
from kvstrata.staging.pages import stamps

logger = logging.getLogger(__name__)

MAX_NAP_S = 0.25
"""A poll that waits looks this often whether a deadline has passed or storage has changed."""

STORE_SHARE = 1 / 16
"""Of the host pages of cache mode, this is kept for stores from L1 to L3."""

PageSet = dict[str, Pages]
"""Pages by component, the same number in each, in the order of the prefix."""


def page_set_count(pages: Mapping[str, Pages]) -> int:
    return min((len(p) for p in pages.values()), default=0)


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """Sizes of one runtime. `pages` are device pages of every component pool."""

    components: tuple[ComponentSpec, ...]
    pages: int
    page_tokens: int
    max_requests: int
    max_context_tokens: int
    staging: StagingSettings
    mode: StagingMode = StagingMode.CACHE

    def __post_init__(self) -> None:
        for key in ("pages", "page_tokens", "max_requests", "max_context_tokens"):
            if getattr(self, key) < 1:
                raise ConfigError(
                    f"{key} is {getattr(self, key)}",
                    where=Where(key=f"pools.{key}"),
                    remedy="it must be at least 1",
                )


@dataclass(eq=False, slots=True)
class _PendingFree:
    action_id: int
    waits: list[tuple[PageTable, Pages, int]]


class RuntimeCore:
    """State shared by batches and moves. Everything happens under `lock`, but `poll`, and
    `extents_of` of pages that a copy holds.

    The lock is re-entrant: a worker may call back in the same call when it refuses a job. Nothing
    waits for a device, a backend or another thread while holding it.
    """

    def __init__(
        self,
        settings: RuntimeSettings,
        device: Device,
        timeline: Timeline,
        worker: StorageWorker | None,
        *,
        runtime_id: int = 1,
        stamp_source: Iterator[int] | None = None,
        page_order: Callable[[int], Pages] | None = None,
    ) -> None:
        self.settings, self.device, self.timeline, self.worker = settings, device, timeline, worker
        self.runtime_id = runtime_id
        self.backend_name = worker.name if worker else ""
        self.lock = threading.RLock()
        self.events = EventQueue()
        self.actions = OpenActions(self.events)
        self.closed = False
        self.fault: BaseException | None = None
        """What a callback raised: a bug. Every later call of control raises it."""
        self.on_device_pages: Callable[[], None] = _nothing
        """Called when device pages became free."""
        self.expiries: list[Callable[[float], float]] = []
        """Called by `poll` with the time: end what has waited too long, return the next time."""
        self._frees: list[_PendingFree] = []
        self.prefill_tokens = 0
        self.prefill_s = 0.0

        source = stamp_source or stamps()
        self.pools = _make_pools(settings, device)
        self.tables = {
            name: PageTable(
                runtime_id,
                Tier.L1,
                name,
                settings.pages,
                stamp_source=source,
                order=page_order(settings.pages) if page_order else None,
            )
            for name in self.pools
        }
        self.staging = PinnedHostBufferPool(
            runtime_id,
            {name: pool.page_bytes for name, pool in self.pools.items()},
            settings.staging,
            stamp_source=source,
            order=page_order,
            store_share=STORE_SHARE if settings.mode is StagingMode.CACHE and worker else 0.0,
        )
        address, chunks, chunk_pages = self.staging.pin_chunks()
        try:
            device.pin(address, chunks)
            for name, pool in self.pools.items():
                pool.host_chunk_pages = chunk_pages[name]
                device.prepare(pool)
        except BaseException:
            self.staging.close()
            raise
        self.expiries.append(self.staging.expire)
        self.storage = StorageEvents(self.events, worker, tuple(self.pools))

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def callback(self) -> Iterator[None]:
        """The lock, for a callback of a device or a worker.

        What it raises would end a thread of theirs, and control would wait for an event that never
        comes; so control's next call raises it.
        """
        with self.lock:
            try:
                yield
            except BaseException as exc:
                logger.exception("a callback of the runtime raised")
                self.fault = self.fault or exc
                self.events.nudge()

    def check_fault(self) -> None:
        fault = self.fault or self.device.fault
        if fault is not None:
            raise IntegrityError(f"the runtime is broken: {fault!r}") from fault

    def take_events(self, timeout_s: float, wake: Wake) -> list[Event]:
        """What `poll` returns; one caller at a time."""
        end_s = self.now() + timeout_s
        while True:
            self.storage.note_health()
            now_s = self.now()
            with self.lock:
                alarm_s = min(expire(now_s) for expire in self.expiries)
            nap_s = min(end_s - now_s, alarm_s - now_s, MAX_NAP_S)
            if self.events.wait(wake, nap_s) or self.now() >= end_s:
                break
        self.check_fault()
        events = cast(list[Event], self.events.take())
        with self.lock:
            events.append(report(self))
        return events

    # ── extents ──────────────────────────────────────────────────────────────────────────────────

    def table(self, tier: Tier, component: str) -> PageTable:
        tables = self.tables if tier is Tier.L1 else self.staging.tables
        if tier not in (Tier.L1, Tier.L2) or component not in tables:
            raise StaleHandleError(f"no pool {component!r} in {tier.name}")
        return tables[component]

    def resolve(self, extents: Extents, tier: Tier | None = None) -> tuple[Tier, PageSet]:
        """The pages that extents name, checked: one tier, all components, equal counts, no page
        twice, every stamp right. Raises StaleHandleError."""
        groups = by_pool(extents)
        tiers = {e.tier for e in extents}
        if len(tiers) != 1 or (tier is not None and tiers != {tier}):
            raise StaleHandleError(f"extents of {sorted(tiers)} where {tier} is needed")
        found = tiers.pop()
        if set(groups) != set(self.pools):
            raise StaleHandleError(f"extents of {sorted(groups)}, not of {sorted(self.pools)}")
        pages = {}
        for name in self.pools:
            table = self.table(found, name)
            parts = [table.pages_of(extent) for extent in groups[name]]
            pages[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
            if len(parts) > 1 and len(np.unique(pages[name])) != len(pages[name]):
                raise StaleHandleError(f"extents name a page of {name!r} twice")
        if len({len(p) for p in pages.values()}) != 1:
            raise StaleHandleError("extents of unequal length in the component pools")
        return found, pages

    def extents_of(self, tier: Tier, pages: PageSet) -> Extents:
        """What pages that are not FREE are called, in every pool."""
        return tuple(e for name, p in pages.items() for e in self.table(tier, name).extents_of(p))

    def claim(self, tier: Tier, pages: PageSet, named: Extents = ()) -> Extents:
        """Extents of READY pages, claimed for control. `named`: what `extents_of` has said, if
        it was asked while the pages were filled."""
        for name, p in pages.items():
            self.table(tier, name).claim(p)
        return named or self.extents_of(tier, pages)

    def release_l1(self, pages: PageSet) -> None:
        for name, p in pages.items():
            self.tables[name].release(p)
        self.settle_frees()

    def free(self, action_id: int, extents: Extents) -> None:
        """Take control's claim off `extents`; `Freed` follows when the last page is free."""
        try:
            tier, pages = self.resolve(extents)
        except StaleHandleError as exc:
            event = ActionFailed(action_id=action_id, cause="stale", message=str(exc))
            self.actions.end(action_id, event)
            return
        waits = []
        for name, p in pages.items():
            table = self.table(tier, name)
            for generation in {e.generation for e in extents if e.pool == name}:
                waits.append((table, p, generation))
            table.unclaim(p)
        self._frees.append(_PendingFree(action_id, waits))
        if tier is Tier.L2:
            self.staging.pump()
        self.settle_frees()

    def settle_frees(self) -> None:
        """Device or host pages became free: emit `Freed` for the frees that this ended, and let
        those go on that wait for device pages."""
        self.on_device_pages()
        if not self._frees:
            return
        still = []
        for pending in self._frees:
            pending.waits = [w for w in pending.waits if not w[0].is_free(w[1], w[2])]
            if pending.waits:
                still.append(pending)
            else:
                self.actions.end(pending.action_id, Freed(action_id=pending.action_id))
        self._frees = still

    def end_actions(self, cause: str) -> None:
        """At shutdown: every action that is still open fails."""
        self._frees.clear()
        self.actions.fail_all(cause)

    def check_integrity(self) -> None:
        self.check_fault()
        with self.lock:
            for table in self.tables.values():
                table.check_integrity()
            self.staging.check_integrity()
            for pending in self._frees:
                if pending.action_id not in self.actions:
                    raise IntegrityError(f"free {pending.action_id} waits without being open")
                if all(table.is_free(p, generation) for table, p, generation in pending.waits):
                    raise IntegrityError(f"free {pending.action_id} has ended without its event")

    def now(self) -> float:
        return time.monotonic()


def _make_pools(settings: RuntimeSettings, device: Device) -> dict[str, ComponentPool]:
    names = [spec.name for spec in settings.components]
    if not names or len(set(names)) != len(names):
        raise ConfigError(
            f"component pools {names}",
            where=Where(key="pools.components"),
            remedy="name at least one, and each only once",
        )
    return {
        spec.name: ComponentPool(spec, settings.pages, settings.page_tokens, device.torch_device)
        for spec in settings.components
    }


def _nothing() -> None:
    return
