"""Several copies of a page under keys of their own: written, read with fail-over, repaired."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from kvstrata.backends.base import Buffer, ObjectId
from kvstrata.backends.mooncake.client import Client
from kvstrata.backends.mooncake.codes import Cause, cause_of
from kvstrata.backends.mooncake.link import Link, View
from kvstrata.backends.mooncake.memory import Span
from kvstrata.backends.mooncake.names import by_segment, key_of, parse_key, ranked
from kvstrata.backends.mooncake.transfer import Transfers, scratch
from kvstrata.errors import KvstrataError, StorageError

logger = logging.getLogger(__name__)

MOST_QUEUED = 65_536
"""Pages that wait for a repair; of more, the oldest are found again by the next sweep."""
_BATCH = 16
_SWEEP_BATCH = 128


class Counts:
    """Events since `open`, by name. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, by: int = 1) -> None:
        if by:
            with self._lock:
                self._counts[name] += by

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


class Placement:
    """Which segments a put prefers."""

    def __init__(self, preferred: Sequence[str], replicas: int) -> None:
        self._preferred = tuple(preferred)
        self.replicas = replicas

    def segments(self, view: View) -> list[str]:
        """Those that may be used and answer."""
        names = [s.name for s in view.live]
        if self._preferred:
            return [name for name in names if name in self._preferred] or names
        return names

    def groups(
        self, view: View, names: Sequence[tuple[int, ObjectId]], copy: int
    ) -> dict[tuple[str, ...], list[int]]:
        """Pages (by index) by the segments that their copy prefers."""
        if self.replicas == 1 and not view.dead:
            return {self._preferred: [i for i, _ in names]} if names else {}
        segments = self.segments(view)
        if not segments:  # all are dead, or the master has not said: it knows best
            return {(): [i for i, _ in names]} if copy == 0 and names else {}
        groups = by_segment(names, copy, segments)
        return {(segment,): indices for segment, indices in groups.items()}


class Copies:
    """Reads and writes pages with all their copies. Any thread."""

    def __init__(self, transfers: Transfers, placement: Placement, counts: Counts) -> None:
        self._transfers = transfers
        self._placement = placement
        self._counts = counts

    @property
    def replicas(self) -> int:
        return self._placement.replicas

    def keys(self, name: ObjectId) -> list[str]:
        return [key_of(name, copy) for copy in range(self.replicas)]

    def count(self, client: Client, names: Sequence[ObjectId]) -> list[int]:
        """How many copies each page has."""
        if not names:
            return []
        found = client.exists([key_of(n, copy) for copy in range(self.replicas) for n in names])
        return [sum(found[i :: len(names)]) for i in range(len(names))]

    def put(
        self, client: Client, view: View, names: Sequence[ObjectId], spans: Sequence[Span]
    ) -> list[list[int]]:
        """A code for each copy of each page that has a segment to go to."""
        codes: list[list[int]] = [[] for _ in names]
        numbered = list(enumerate(names))
        for copy in range(self.replicas):
            for segments, indices in self._placement.groups(view, numbered, copy).items():
                keys = [key_of(names[i], copy) for i in indices]
                part = [spans[i] for i in indices]
                found = self._transfers.put(client, keys, part, segments)
                for i, code in zip(indices, found, strict=True):
                    codes[i].append(code)
        return codes

    def apart(self, client: Client, names: Sequence[ObjectId]) -> list[int]:
        """On how many segments the copies of each page really lie."""
        keys = [key for name in names for key in self.keys(name)]
        places = client.places(keys) if keys else {}
        return [len({places[k][0] for k in self.keys(n) if k in places}) for n in names]

    def get(
        self,
        client: Client,
        view: View,
        names: Sequence[ObjectId],
        spans: Sequence[Span],
        lists: Sequence[Sequence[Buffer]],
    ) -> tuple[list[int], list[ObjectId]]:
        """A number of bytes or a code each, from whichever copy can be read; and the pages of
        which one could not."""
        orders = self._orders(client, view, names)
        codes = [0] * len(names)
        pending = list(range(len(names)))
        damaged: list[ObjectId] = []
        for attempt in range(self.replicas):
            copies = [orders[i][attempt] for i in pending]
            keys = [key_of(names[i], copy) for i, copy in zip(pending, copies, strict=True)]
            part, buffers = [spans[i] for i in pending], [lists[i] for i in pending]
            found = self._transfers.get(client, keys, part, buffers)
            if attempt == 0 and min(found) >= 0 and not any(copies):
                return found, damaged
            failed = []
            for i, code in zip(pending, found, strict=True):
                if code >= 0:
                    codes[i] = code
                    if attempt or orders[i][0]:
                        self._counts.add("failovers")
                        damaged.append(names[i])
                    continue
                cause = cause_of(code)
                self._counts.add(f"get_{cause.value}")
                if attempt == 0 or cause is not Cause.ABSENT:
                    codes[i] = code  # what is worse than absent is what is told
                failed.append(i)
            pending = failed
            if not pending:
                break
        return codes, damaged

    def remove(self, client: Client, names: Sequence[ObjectId]) -> list[bool]:
        """True where a copy was there. Raises `StorageError` when the master is away."""
        keys = [key for name in names for key in self.keys(name)]
        found = client.remove(keys) if keys else []
        for code in found:
            if code < 0 and cause_of(code) is Cause.MASTER_AWAY:
                raise StorageError(f"pages cannot be removed: {code}")
        step = self.replicas
        return [any(c == 0 for c in found[i : i + step]) for i in range(0, len(found), step)]

    def _orders(self, client: Client, view: View, names: Sequence[ObjectId]) -> list[Sequence[int]]:
        """In which order the copies of each page are tried: those on dead segments last."""
        plain: Sequence[int] = range(self.replicas)
        if self.replicas == 1 or not view.dead:
            return [plain] * len(names)
        places = client.places([key for name in names for key in self.keys(name)])

        def is_bad(name: ObjectId, copy: int) -> bool:
            place = places.get(key_of(name, copy))
            return place is None or place[0] in view.dead

        return [sorted(plain, key=lambda copy: is_bad(name, copy)) for name in names]


class Repair:
    """Makes lost copies anew, on a thread of its own: pages that a read or a write found short of
    copies, and all pages after a segment came or went."""

    def __init__(
        self, link: Link, copies: Copies, transfers: Transfers, placement: Placement, counts: Counts
    ) -> None:
        self._link = link
        self._copies = copies
        self._transfers = transfers
        self._placement = placement
        self._counts = counts
        self._wake = threading.Condition()
        self._queue: dict[ObjectId, None] = {}
        self._sweep = self._is_stopped = self._is_working = False
        self._thread: threading.Thread | None = None

    def start(self, name: str) -> None:
        target, title = self._work, f"kvstrata-{name}-repair"
        self._thread = threading.Thread(target=target, name=title, daemon=True)
        self._thread.start()

    def stop(self, deadline_s: float) -> bool:
        with self._wake:
            self._is_stopped = True
            self._wake.notify_all()
        if self._thread is None:
            return True
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def add(self, names: Iterable[ObjectId]) -> None:
        """Pages that may be short of copies."""
        with self._wake:
            for name in names:
                self._queue[name] = None
            while len(self._queue) > MOST_QUEUED:
                del self._queue[next(iter(self._queue))]
            self._wake.notify_all()

    def sweep(self) -> None:
        """Look at every page of the store."""
        with self._wake:
            self._sweep = True
            self._wake.notify_all()

    def wait_idle(self, deadline_s: float) -> bool:
        """True when nothing is left to repair."""
        with self._wake:
            return self._wake.wait_for(
                lambda: not (self._queue or self._sweep or self._is_working), deadline_s
            )

    def check_integrity(self) -> None:
        with self._wake:
            assert len(self._queue) <= MOST_QUEUED

    # ── the thread ───────────────────────────────────────────────────────────────────────────────

    def _work(self) -> None:
        while True:
            with self._wake:
                self._is_working = False
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._queue or self._sweep or self._is_stopped)
                if self._is_stopped:
                    return
                sweep, self._sweep = self._sweep, False
                names = list(self._queue)[:_BATCH]
                for name in names:
                    del self._queue[name]
                self._is_working = True
            try:
                if sweep:
                    self._repair_all()
                self._repair(names)
            except KvstrataError as error:  # the next change of segments brings a sweep
                self._counts.add("repairs_failed", len(names))
                logger.info("copies cannot be repaired now: %s", error)
            except Exception:
                logger.exception("repair of copies failed")

    def _repair_all(self) -> None:
        if self._link.admin is None or len(self._placement.segments(self._link.view)) < 2:
            return
        names: dict[ObjectId, None] = {}
        for key in self._link.admin.all_keys():
            parsed = parse_key(key)
            if parsed is not None and parsed[1] < self._copies.replicas:
                names[parsed[0]] = None
        self._counts.add("sweeps")
        found = list(names)
        for first in range(0, len(found), _SWEEP_BATCH):
            if self._is_stopped or self._sweep:
                return  # the end, or the segments have changed again: from the beginning
            self._repair(found[first : first + _SWEEP_BATCH])

    def _repair(self, names: Sequence[ObjectId]) -> None:
        if not names:
            return
        view = self._link.view
        segments = self._placement.segments(view)
        endpoints = {s.name: s.endpoint for s in view.live}
        wanted = min(self._copies.replicas, len(segments))
        with self._link.use() as client:
            places = client.places([key for name in names for key in self._copies.keys(name)])
            for name in names:
                good: dict[int, tuple[str, int]] = {}
                for copy in range(self._copies.replicas):
                    place = places.get(key_of(name, copy))
                    taken = {endpoint for endpoint, _ in good.values()}
                    if place is not None and place[0] not in view.dead and place[0] not in taken:
                        good[copy] = place
                free = [
                    s
                    for s in ranked(name, segments)
                    if endpoints[s] not in {endpoint for endpoint, _ in good.values()}
                ]
                if good and len(good) < wanted:
                    self._copy(client, name, good, free)

    def _copy(
        self, client: Client, name: ObjectId, good: dict[int, tuple[str, int]], free: list[str]
    ) -> None:
        """From a good copy to every other key of the page."""
        source, (_, size) = next(iter(good.items()))
        with scratch(client, size) as memory:
            span = Span([memory.address], [size])
            if self._transfers.get(client, [key_of(name, source)], [span], [()]) != [size]:
                self._counts.add("repairs_failed")
                return
            others = [copy for copy in range(self._copies.replicas) if copy not in good]
            for copy, segment in zip(others, free, strict=False):
                key = key_of(name, copy)
                client.remove([key])  # it lies on a dead segment, or beside another copy
                code = self._transfers.put(client, [key], [span], [segment])[0]
                if client.size(key_of(name, source)) < 0:
                    client.remove([key])  # deleted meanwhile: it shall not come back
                    continue
                self._counts.add("repaired" if code == 0 else "repairs_failed")
