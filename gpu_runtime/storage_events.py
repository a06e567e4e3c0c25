"""What storage says unasked: evictions and its condition, as events for control."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvstrata.backends import Health, HealthState, ObjectId, StorageWorker
from kvstrata.boundary import Evicted, TierDegraded
from kvstrata.gpu_runtime.events import EventQueue
from kvstrata.handles import Tier
from kvstrata.tiers.namespace import component_fingerprint

MAX_NAMESPACES = 4096
"""Namespaces whose evictions are reported to control; more is a matter of hints lost."""


class StorageEvents:
    """Turns a worker's reports into `Evicted` and `TierDegraded`. Any thread, own lock."""

    def __init__(
        self, events: EventQueue, worker: StorageWorker | None, components: Sequence[str]
    ) -> None:
        self._events, self._worker, self._components = events, worker, tuple(components)
        self._lock = threading.Lock()
        self._namespaces: dict[bytes, dict[str, bytes]] = {}
        self._base: dict[bytes, bytes] = {}
        self._health = HealthState.OK
        self._message = ""
        self._name = worker.name if worker is not None else ""
        if worker is not None:
            worker.on_evicted = self._evicted

    def listen(self, worker: StorageWorker) -> None:
        """Hear of the evictions of a worker that is about to be started, and attached."""
        worker.on_evicted = self._evicted

    def attach(self, worker: StorageWorker | None, message: str = "") -> None:
        """From now on it is `worker` whose condition counts; None: there is none, and `message`
        says why."""
        with self._lock:
            self._worker, self._message = worker, message

    def component_namespace(self, namespace: bytes, component: str) -> bytes:
        """The namespace in which the frames of a component lie; remembered for `Evicted`."""
        with self._lock:
            known = self._namespaces.get(namespace)
            if known is None:
                if len(self._namespaces) >= MAX_NAMESPACES:  # the one used first is forgotten
                    for old in self._namespaces.pop(next(iter(self._namespaces))).values():
                        del self._base[old]
                known = {name: component_fingerprint(namespace, name) for name in self._components}
                self._namespaces[namespace] = known
                self._base.update(dict.fromkeys(known.values(), namespace))
            return known[component]

    def _evicted(self, objects: Sequence[ObjectId]) -> None:
        """The backend evicted frames; a page that lost one component is lost."""
        keys: dict[bytes, dict[bytes, None]] = {}
        with self._lock:
            for obj in objects:
                base = self._base.get(obj.namespace)
                if base is not None:  # else of another server on the same root
                    keys.setdefault(base, {})[obj.key] = None
        for base, found in keys.items():
            self._events.emit(Evicted(namespace=base, keys=b"".join(found)))

    def note_health(self) -> None:
        """Emit TierDegraded when the worker's condition has changed. Control's thread."""
        with self._lock:
            worker, message = self._worker, self._message
        if worker is not None:
            health, self._name = worker.condition(), worker.name
        elif message:
            health = Health(HealthState.OPEN, message)
        else:
            return
        if health.state is self._health:
            return
        self._health = health.state
        self._events.emit(
            TierDegraded(
                tier=Tier.L3,
                backend=self._name,
                health=health.state.value,
                message=health.message,
            )
        )
