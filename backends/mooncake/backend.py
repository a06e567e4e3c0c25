"""The `mooncake` backend: frames in a Mooncake Store."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from kvstrata.backends.base import (
    BackendContext,
    Health,
    Isolation,
    ObjectId,
    PageResult,
    ReadRequest,
    StorageBackend,
    StoredObject,
    Usage,
    WriteRequest,
    plain_result,
)
from kvstrata.backends.mooncake.admin import Admin
from kvstrata.backends.mooncake.client import Client, apply_environment, transport
from kvstrata.backends.mooncake.codes import Cause, cause_of, failed_page
from kvstrata.backends.mooncake.copies import Copies, Counts, Placement, Repair
from kvstrata.backends.mooncake.link import Link, View
from kvstrata.backends.mooncake.names import parse_key
from kvstrata.backends.mooncake.options import MooncakeOptions
from kvstrata.backends.mooncake.requirements import load_client
from kvstrata.backends.mooncake.transfer import Pace, Transfers
from kvstrata.boundary import Outcome
from kvstrata.errors import ClosedError, StorageError
from kvstrata.units import parse_size

SUSPECT_S = 15.0
"""A page that no copy could give is as good as absent for so long: by then the master has noticed
that the segment is gone, or the network is back."""
_MOST_SUSPECTS = 65_536
_SCAN_BATCH = 256
_TOLD = {
    "failovers": "pages read from another copy",
    "stored_short_of_copies": "pages stored with fewer copies than asked for",
    "repaired": "copies made anew",
    "repairs_failed": "copies that could not be made anew",
}
"""Counts that are a part of the health's message, because they cross to another process so."""

_EXISTS = PageResult(Outcome.EXISTS)


class MooncakeBackend(StorageBackend):
    """A master that is away is no error at `open`: pages are misses until it is there.

    "Exists" is a hint here more than elsewhere: the master counts with a segment for seconds after
    it is gone. So a page that could not be read does not exist, and may be stored anew.
    """

    isolation = Isolation.PROCESS  # the library holds the interpreter in setup and close
    Options = MooncakeOptions

    def __init__(self, options: MooncakeOptions) -> None:
        super().__init__(options)
        self._settings = options
        self.counts = Counts()
        self._placement = Placement(options.preferred_segments, options.replicas)
        self._transfers: Transfers | None = None
        self._copies: Copies | None = None
        self._link: Link | None = None
        self._repair: Repair | None = None
        self._lock = threading.Lock()
        self._writing: set[ObjectId] = set()
        self._suspects: dict[ObjectId, float] = {}
        """Until when each is as good as absent; the oldest first."""

    @property
    def concurrency(self) -> int:
        return self._settings.threads

    @property
    def max_batch(self) -> int:
        return self._settings.batch_pages

    @property
    def link(self) -> Link:
        if self._link is None:
            raise ClosedError("the backend is not open")
        return self._link

    # ── life ─────────────────────────────────────────────────────────────────────────────────────

    def open(self, context: BackendContext) -> None:
        assert self._link is None, "open once"
        settings = self._settings
        protocol = transport(settings)
        apply_environment(settings.client_environment())
        load_client()
        pace = Pace(settings.lease_s, parse_size(settings.call_bytes))
        transfers = Transfers(context.regions, pace, is_contiguous=protocol == "tcp")
        copies = Copies(transfers, self._placement, self.counts)
        link = Link(settings, protocol, self._registered, self._segments_changed)
        self._transfers, self._copies = transfers, copies
        if settings.replicas > 1:
            self._repair = Repair(link, copies, transfers, self._placement, self.counts)
        try:
            link.start(context.name)
        except BaseException:
            link.close(0.0)
            self._transfers = self._copies = self._repair = None
            transfers.close()
            raise
        self._link = link
        if self._repair is not None:
            self._repair.start(context.name)

    def close(self, deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        link, self._link = self._link, None
        if link is None:
            return
        repair, self._repair = self._repair, None
        is_quiet = repair is None or repair.stop(deadline_s / 2)
        is_quiet = link.close(max(0.0, end - time.monotonic())) and is_quiet
        if is_quiet and self._transfers is not None:
            self._transfers.close()
        self._transfers = self._copies = None

    # ── frames ───────────────────────────────────────────────────────────────────────────────────

    def exists(self, objects: Sequence[ObjectId]) -> list[bool]:
        if not objects:
            return []
        with self.link.use() as client:
            found = self._all_copies.count(client, objects)
        return [n > 0 and not self._is_suspect(o) for n, o in zip(found, objects, strict=True)]

    def read(self, requests: Sequence[ReadRequest]) -> list[PageResult]:
        if not requests:
            return []
        link, transfers = self.link, self._all_transfers
        names, lists = [r.object for r in requests], [r.buffers for r in requests]
        with link.use() as client, transfers.spans(client, lists) as spans:
            codes, damaged = self._all_copies.get(client, link.view, names, spans, lists)
        if damaged and self._repair is not None:
            self._repair.add(damaged)
        if min(codes) < 0:
            bad = [(n, c) for n, c in zip(names, codes, strict=True) if c < 0]
            self._suspect([n for n, c in bad if cause_of(c) is Cause.SEGMENT_LOST])
        return [
            plain_result(Outcome.LOADED, code) if code >= 0 else failed_page(code) for code in codes
        ]

    def write(self, requests: Sequence[WriteRequest]) -> list[PageResult]:
        if not requests:
            return []
        link, copies = self.link, self._all_copies
        mine = self._claim(requests)
        try:
            with link.use() as client:
                return self._write(client, link.view, copies, requests, mine)
        finally:
            with self._lock:
                self._writing -= set(mine)

    def delete(self, objects: Sequence[ObjectId]) -> list[bool]:
        with self.link.use() as client:
            gone = self._all_copies.remove(client, objects)
        with self._lock:
            for name in objects:
                self._suspects.pop(name, None)
        return gone

    def scan(self, namespace: bytes | None = None) -> Iterator[StoredObject]:
        link, copies = self.link, self._all_copies
        names: dict[ObjectId, None] = {}
        for key in self._admin(link).all_keys():
            parsed = parse_key(key)
            if parsed is not None and namespace in (None, parsed[0].namespace):
                names[parsed[0]] = None
        found = list(names)
        for first in range(0, len(found), _SCAN_BATCH):
            part = found[first : first + _SCAN_BATCH]
            with link.use() as client:
                places = client.places([key for name in part for key in copies.keys(name)])
            for name in part:
                sizes = [places[key][1] for key in copies.keys(name) if key in places]
                if sizes:
                    yield StoredObject(name, sum(sizes), last_used_s=0.0)

    def usage(self) -> Usage:
        """Of the whole store, other programs' objects included."""
        admin = self._admin(self.link)
        segments = admin.segments()
        objects = -(-admin.key_count() // self._settings.replicas)
        used = sum(s.used_bytes for s in segments)
        return Usage(used, sum(s.total_bytes for s in segments), objects)

    def health(self) -> Health:
        """Of master and segments, and what became of copies since `open`."""
        health, counts = self.link.health(), self.counts.snapshot()
        told = [f"{counts[name]} {words}" for name, words in _TOLD.items() if name in counts]
        if not told:
            return health
        return Health(health.state, "; ".join([health.message, *told] if health.message else told))

    def wait_repaired(self, deadline_s: float) -> bool:
        """True when no page is known to be short of copies."""
        return self._repair is None or self._repair.wait_idle(deadline_s)

    def check_integrity(self) -> None:
        with self._lock:
            assert len(self._suspects) <= _MOST_SUSPECTS
        if self._link is not None:
            self._link.check_integrity()
        if self._transfers is not None:
            self._transfers.check_integrity()
        if self._repair is not None:
            self._repair.check_integrity()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    @property
    def _all_copies(self) -> Copies:
        if self._copies is None:
            raise ClosedError("the backend is not open")
        return self._copies

    @property
    def _all_transfers(self) -> Transfers:
        if self._transfers is None:
            raise ClosedError("the backend is not open")
        return self._transfers

    def _admin(self, link: Link) -> Admin:
        if link.admin is None:
            raise StorageError(
                'the backend has admin = "none": only the master\'s HTTP server knows'
            )
        return link.admin

    def _registered(self, client: Client) -> None:
        self._all_transfers.register(client)

    def _segments_changed(self, view: View) -> None:
        if self._repair is not None:
            self._repair.sweep()

    def _claim(self, requests: Sequence[WriteRequest]) -> dict[ObjectId, int]:
        """The pages, and the index of each, that nobody else in this process writes now."""
        mine: dict[ObjectId, int] = {}
        for i, request in enumerate(requests):
            mine.setdefault(request.object, i)
        names = set(mine)  # sets among themselves compute no hash again
        with self._lock:
            for name in names & self._writing:
                del mine[name]
            self._writing |= names
        return mine

    def _write(
        self,
        client: Client,
        view: View,
        copies: Copies,
        requests: Sequence[WriteRequest],
        mine: Mapping[ObjectId, int],
    ) -> list[PageResult]:
        results = [_EXISTS] * len(requests)
        names = list(mine)
        if self._suspects:  # they lie where nobody can read them
            copies.remove(client, [name for name in names if self._is_suspect(name)])
        there = copies.count(client, names)
        new = [name for name, n in zip(names, there, strict=True) if n == 0]
        short = [name for name, n in zip(names, there, strict=True) if 0 < n < copies.replicas]
        written = [requests[mine[name]].buffers for name in new]
        transfers = self._all_transfers
        with transfers.spans(client, written) as spans:
            for span in spans:
                span.load()
            found = copies.put(client, view, new, spans)
            sizes = [span.nbytes for span in spans]
        stored: list[ObjectId] = []
        for name, codes, nbytes in zip(new, found, sizes, strict=True):
            result = results[mine[name]] = self._result(codes, nbytes)
            if result.outcome is Outcome.STORED:
                stored.append(name)
        self._note_stored(client, copies, view, stored, short)
        if len(stored) < len(new):
            return self._close_chains(client, copies, requests, results)
        return results

    def _result(self, codes: Sequence[int], nbytes: int) -> PageResult:
        """Of a page whose copies were written with `codes`: one is enough."""
        for code in codes:
            if code < 0:
                self.counts.add(f"put_{cause_of(code).value}")
        if 0 in codes:
            return plain_result(Outcome.STORED, nbytes)
        if not codes:
            return PageResult(Outcome.UNAVAILABLE, 0, "the store has no segment")
        return failed_page(codes[0])

    def _note_stored(
        self,
        client: Client,
        copies: Copies,
        view: View,
        stored: Sequence[ObjectId],
        short: Sequence[ObjectId],
    ) -> None:
        with self._lock:
            for name in stored:
                self._suspects.pop(name, None)
        if self._repair is None:
            return
        achieved = copies.apart(client, stored)
        missing = [o for o, n in zip(stored, achieved, strict=True) if n < copies.replicas]
        self.counts.add("stored_with_all_copies", len(stored) - len(missing))
        self.counts.add("stored_short_of_copies", len(missing))
        if len(self._placement.segments(view)) >= copies.replicas:
            self._repair.add([*missing, *short])

    def _close_chains(
        self,
        client: Client,
        copies: Copies,
        requests: Sequence[WriteRequest],
        results: list[PageResult],
    ) -> list[PageResult]:
        """What came to be stored behind a page that was not is removed."""
        lost: set[ObjectId] = set()
        orphans: list[ObjectId] = []
        for i, request in enumerate(requests):
            if results[i].outcome is Outcome.STORED and request.parent in lost:
                orphans.append(request.object)
                results[i] = PageResult(Outcome.PARENT_MISSING)
            if not results[i].outcome.is_stored:
                lost.add(request.object)
        if orphans:
            copies.remove(client, orphans)
        return results

    def _suspect(self, names: Sequence[ObjectId]) -> None:
        if not names:
            return
        end = time.monotonic() + SUSPECT_S
        with self._lock:
            for name in names:
                self._suspects.pop(name, None)
                self._suspects[name] = end
            while len(self._suspects) > _MOST_SUSPECTS:
                del self._suspects[next(iter(self._suspects))]

    def _is_suspect(self, name: ObjectId) -> bool:
        end = self._suspects.get(name) if self._suspects else None
        if end is None:
            return False
        if time.monotonic() < end:
            return True
        with self._lock:
            self._suspects.pop(name, None)
        return False
