"""What all parts of the runtime share: one lock, the page tables, staging, events, open actions."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvstrata.backends import HealthState, ObjectId, StorageWorker
from kvstrata.boundary import (
    ActionFailed,
    Event,
    Evicted,
    Freed,
    PathCost,
    PoolCapacity,
    RuntimeEvent,
    StatusReport,
    TierDegraded,
    Wake,
)
from kvstrata.errors import IntegrityError, PlanError, StaleHandleError
from kvstrata.gpu_runtime.base import Device
from kvstrata.gpu_runtime.pools import ComponentPool, ComponentSpec
from kvstrata.gpu_runtime.timeline import Timeline
from kvstrata.handles import Extents, StagingMode, Tier, by_pool
from kvstrata.staging import Pages, PageTable, PinnedHostBufferPool, StagingSettings
from kvstrata.staging.pages import stamps
from kvstrata.tiers.namespace import component_fingerprint

MAX_NAMESPACES = 4096
"""Namespaces whose evictions are reported to control; more is a matter of hints lost."""

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


@dataclass(eq=False, slots=True)
class _PendingFree:
    action_id: int
    waits: list[tuple[PageTable, Pages, int]]


class RuntimeCore:
    """State shared by batches and moves. Everything but `poll` happens under `lock`.

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
        self.lock = threading.RLock()
        source = stamp_source or stamps()
        self.stamp_source = source

        def order(n: int) -> Pages | None:
            return page_order(n) if page_order else None

        self.pools = {
            spec.name: ComponentPool(
                spec, settings.pages, settings.page_tokens, device.torch_device
            )
            for spec in settings.components
        }
        self.tables = {
            name: PageTable(
                runtime_id,
                Tier.L1,
                name,
                settings.pages,
                stamp_source=source,
                order=order(settings.pages),
            )
            for name in self.pools
        }
        self.staging = PinnedHostBufferPool(
            runtime_id,
            {name: pool.page_bytes for name, pool in self.pools.items()},
            settings.staging,
            stamp_source=source,
        )
        self.backend_name = worker.name if worker else ""
        self._namespaces: dict[bytes, dict[str, bytes]] = {}
        self._base_namespaces: dict[bytes, bytes] = {}
        self._health = HealthState.OK
        if worker is not None:
            worker.on_evicted = self._evicted
        self.closed = False
        self.on_device_pages: Callable[[], None] = _nothing
        self._events: deque[RuntimeEvent] = deque()
        self._wake = threading.Condition()
        self._waiting_for: tuple[type[RuntimeEvent], ...] = (RuntimeEvent,)
        self._nudged = False
        self._open_actions: set[int] = set()
        self._frees: list[_PendingFree] = []
        self.prefill_tokens = 0
        self.prefill_s = 0.0

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def emit(self, event: RuntimeEvent) -> None:
        """Queue an event for `poll`. Any thread."""
        with self._wake:
            self._events.append(event)
            if isinstance(event, self._waiting_for):
                self._wake.notify()

    def nudge(self) -> None:
        """End the wait of `poll`: staging lacks pages that only control can free."""
        with self._wake:
            self._nudged = True
            self._wake.notify()

    def open_action(self, action_id: int) -> None:
        if action_id in self._open_actions:
            raise PlanError(f"action id {action_id} is in use")
        self._open_actions.add(action_id)

    def end_action(self, action_id: int, event: RuntimeEvent) -> None:
        """Emit the terminal event of an action. Exactly once a started action."""
        if action_id not in self._open_actions:
            raise IntegrityError(f"second terminal event of action {action_id}: {event}")
        self._open_actions.remove(action_id)
        self.emit(event)

    def is_open(self, action_id: int) -> bool:
        return action_id in self._open_actions

    def fail_open_actions(self, cause: str) -> None:
        for action_id in sorted(self._open_actions):
            self.end_action(action_id, ActionFailed(action_id=action_id, cause=cause))

    def take_events(self, timeout_s: float, wake: Wake) -> list[Event]:
        """What `poll` returns; one caller at a time."""
        kinds = wake.kinds
        self._note_health()
        with self._wake:
            self._waiting_for = kinds
            self._wake.wait_for(
                lambda: self._nudged or any(isinstance(event, kinds) for event in self._events),
                timeout_s,
            )
            self._nudged = False
            events: list[Event] = list(self._events)  # type: ignore[arg-type]
            self._events.clear()
        with self.lock:
            events.append(self._status())
        return events

    def _status(self) -> StatusReport:
        capacity = [
            PoolCapacity(Tier.L1, name, table.total, table.free, table.freeing)
            for name, table in self.tables.items()
        ]
        waiting, reserve = self.staging.waiting, self.staging.reserve_pages
        capacity += [
            PoolCapacity(Tier.L2, name, table.total, table.free, table.freeing, waiting, reserve)
            for name, table in self.staging.tables.items()
        ]
        loads, writes = self.staging.queued
        queued = {"l3_read": loads, "l3_write": writes}
        totals = self.timeline.totals()
        costs = [
            PathCost(path, t.nbytes, t.busy_s, queued.get(path, 0))
            for path, t in totals.items()
            if path != "compute"
        ]
        speed = self.prefill_tokens / self.prefill_s if self.prefill_s > 0 else 0.0
        return StatusReport(
            capacity=tuple(capacity), costs=tuple(costs), prefill_tokens_per_s=speed
        )

    # ── storage ──────────────────────────────────────────────────────────────────────────────────

    def component_namespace(self, namespace: bytes, component: str) -> bytes:
        """The namespace in which the frames of a component lie; remembered for `Evicted`."""
        known = self._namespaces.get(namespace)
        if known is None:
            if len(self._namespaces) >= MAX_NAMESPACES:  # the one used first is forgotten
                for old in self._namespaces.pop(next(iter(self._namespaces))).values():
                    del self._base_namespaces[old]
            known = {name: component_fingerprint(namespace, name) for name in self.pools}
            self._namespaces[namespace] = known
            self._base_namespaces.update(dict.fromkeys(known.values(), namespace))
        return known[component]

    def _evicted(self, objects: Sequence[ObjectId]) -> None:
        """The backend evicted frames; a page that lost one component is lost. Any thread."""
        keys: dict[bytes, dict[bytes, None]] = {}
        with self.lock:
            for obj in objects:
                base = self._base_namespaces.get(obj.namespace)
                if base is not None:  # else of another server on the same root
                    keys.setdefault(base, {})[obj.key] = None
        for base, found in keys.items():
            self.emit(Evicted(namespace=base, keys=b"".join(found)))

    def _note_health(self) -> None:
        """Emit TierDegraded when the worker's condition has changed."""
        if self.worker is None:
            return
        health = self.worker.condition()
        if health.state is not self._health:
            self._health = health.state
            event = TierDegraded(
                tier=Tier.L3,
                backend=self.backend_name,
                health=health.state.value,
                message=health.message,
            )
            self.emit(event)

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

    def claim(self, tier: Tier, pages: PageSet) -> Extents:
        """Extents of READY pages, claimed for control."""
        if page_set_count(pages) == 0:
            return ()
        out: list[Extents] = [self.table(tier, name).claim(p) for name, p in pages.items()]
        return tuple(extent for extents in out for extent in extents)

    def release_l1(self, pages: PageSet) -> None:
        for name, p in pages.items():
            self.tables[name].release(p)
        self.settle_frees()

    def free(self, action_id: int, extents: Extents) -> None:
        """Take control's claim off `extents`; `Freed` follows when the last page is free."""
        self.open_action(action_id)
        try:
            tier, pages = self.resolve(extents)
        except StaleHandleError as exc:
            self.end_action(
                action_id, ActionFailed(action_id=action_id, cause="stale", message=str(exc))
            )
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
                self.end_action(pending.action_id, Freed(action_id=pending.action_id))
        self._frees = still

    def check_integrity(self) -> None:
        with self.lock:
            for table in self.tables.values():
                table.check_integrity()
            self.staging.check_integrity()
            for pending in self._frees:
                if not self.is_open(pending.action_id):
                    raise IntegrityError(f"free {pending.action_id} waits without being open")

    def now(self) -> float:
        return time.monotonic()


def _nothing() -> None:
    return
