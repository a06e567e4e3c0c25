"""Which frames are on disk, what they cost, and who may write how much: one bound for all
processes on a root.

A write is two transactions around the publication of its files:

    reserve   room for all new pages of a batch is taken, or made by eviction; a row of `batches`
              says so, whoever dies now
    settle    the published pages get their rows, the reservation ends

`usage` counts both, so it is never below what the disk holds. Eviction unlinks inside its
transaction: a crash in between leaves rows without a file, never files without a row, and those
are found by the next scan, read or write.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from kvstrata.backends.base import ObjectId
from kvstrata.backends.filesystem import booking
from kvstrata.backends.filesystem.booking import (
    Entry,
    FrameStore,
    Limits,
    Missing,
    NewPage,
    Reservation,
)
from kvstrata.backends.filesystem.database import Database
from kvstrata.backends.filesystem.integrity import check_ledger
from kvstrata.backends.filesystem.ledger import Ledger
from kvstrata.backends.filesystem.oserrors import describe
from kvstrata.boundary import KEY_BYTES, Outcome

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

MAX_TOUCHED = 4096
"""So many reads are remembered before they are written to the index."""


class FoundFrame(NamedTuple):
    """A file that a scan found without a row, or with a wrong cost in it."""

    page: NewPage
    modified_us: int


class Mended(NamedTuple):
    """What the index and the disk disagreed about."""

    entered: int
    """Frames without a row, or with a wrong cost in it."""
    dropped: int
    """Rows without a file."""


class IndexRow(NamedTuple):
    """What the index believes of a frame that is there."""

    cost: int
    used_us: int


class IndexUsage(NamedTuple):
    used_bytes: int
    """Frames that are there and reservations."""
    inflight_bytes: int
    objects: int


class StoreIndex:
    """The index of one root. Thread-safe. All but `touch` are one short transaction, which waits
    for those of other threads and processes, and raises `StorageError` if it cannot be made."""

    def __init__(self, database: Database, owner: str, files: FrameStore) -> None:
        self._database = database
        self._owner = owner
        self._files = files
        self._lock = threading.Lock()
        self._touched: dict[ObjectId, None] = {}
        """Frames read since the last transaction, in the order of their last read."""
        self._vanished: dict[ObjectId, None] = {}
        """Frames that a read did not find."""
        self._debts: dict[tuple[int, int], tuple[Reservation, list[bool]]] = {}
        """Settlements to be made, by generation and batch. One that fails is made good by the
        next transaction."""

    # ── writing ──────────────────────────────────────────────────────────────────────────────────

    def reserve(self, pages: Sequence[NewPage], limits: Limits) -> Reservation:
        """Take room for those of `pages` that are new and whose parents are there.

        If not all fit, the first ones that do are taken. Neither the pages, nor parents of them,
        are evicted for it.
        """

        def work(ledger: Ledger) -> Reservation:
            reservation = Reservation([], generation=self._database.generation)
            new, kept = booking.judge(ledger, self._files, pages, reservation.outcomes)
            if not new:
                return reservation
            need = sum(page.cost for page in new)
            missing = max(self._make_room(ledger, limits, need, kept, reservation.evicted))
            if limits.max_bytes and not ledger.complete:
                missing = need  # how much is on disk is not known yet
            if missing > 0:
                new = booking.cut(pages, reservation.outcomes, need - missing)
            if new:
                booking.take(ledger, self._owner, new, reservation)
            return reservation

        reservation = self._run(work)
        self.touch(
            page.object
            for page, outcome in zip(pages, reservation.outcomes, strict=True)
            if outcome is Outcome.EXISTS
        )
        return reservation

    def settle(self, reservation: Reservation, stored: Sequence[bool]) -> None:
        """The reservation ends; the entries that are `stored` are on disk now.

        If it fails (`StorageError`), the next transaction makes it good.
        """
        if reservation.batch:
            debt = (reservation.generation, reservation.batch)
            with self._lock:
                self._debts[debt] = (reservation, list(stored))
            self.flush()

    def delete(self, names: Sequence[ObjectId]) -> list[bool]:
        """Remove frames and their files; True where there was one."""

        def work(ledger: Ledger) -> list[bool]:
            ledger.removals += 1
            deleted = []
            for name, row_name in zip(names, booking.rows_of(ledger, names), strict=True):
                row = ledger.find(row_name)
                try:
                    deleted.append(self._files.unlink(name))
                except OSError as error:
                    logger.warning("a frame cannot be deleted: %s", describe(error, name.name))
                    deleted.append(False)
                else:
                    ledger.unlinked.append(name)
                    if row is not None and row.present:
                        ledger.vanish(row)
            return deleted

        return self._run(work)

    def trim(self, limits: Limits, most_bytes: int) -> list[ObjectId]:
        """Evict what is over the limits, about `most_bytes` a call; empty when nothing is."""

        def work(ledger: Ledger) -> list[ObjectId]:
            missing = limits.missing(ledger, 0)
            need = Missing(min(missing.bound, most_bytes), min(missing.disk, most_bytes))
            return booking.evict(ledger, self._files, need, set())[0]

        return self._run(work)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────

    def touch(self, read: Iterable[ObjectId], vanished: Iterable[ObjectId] = ()) -> None:
        """Note what was used, and what was not found. Written with the next transaction."""
        with self._lock:
            for name in read:
                self._touched.pop(name, None)
                self._touched[name] = None
            for name in vanished:
                if len(self._vanished) < MAX_TOUCHED:
                    self._vanished[name] = None
            full = len(self._touched) >= MAX_TOUCHED
        if full:
            self.flush()

    def flush(self) -> None:
        """Write what `touch` and settlements have left."""
        self._run(lambda ledger: None)

    def is_current(self, reservation: Reservation) -> bool:
        """Whether the index still knows of it: one that was lost since knows of no batch, so that
        parents may be evicted. No transaction."""
        return self._database.is_newest(reservation.generation)

    def usage(self) -> IndexUsage:
        return self._run(lambda it: IndexUsage(it.used + it.inflight, it.inflight, it.objects))

    # ── recovery ─────────────────────────────────────────────────────────────────────────────────

    @property
    def generation(self) -> int:
        """Grows when the index was lost and has to be rebuilt."""
        return self._database.generation

    def is_complete(self) -> bool:
        """Every frame on disk has its row, as far as this program can know."""
        return self._run(lambda ledger: bool(ledger.complete))

    def set_complete(self, generation: int) -> None:
        """All frames were looked at, and entered into this generation."""

        def work(ledger: Ledger) -> None:
            if self._database.generation == generation:
                ledger.complete = 1

        self._run(work)

    def recover(self, owner: str) -> None:
        """End the reservations of an owner that is dead: what it published is there."""

        def work(ledger: Ledger) -> None:
            query = "SELECT id, manifest FROM batches WHERE owner=?"
            generation = self._database.generation
            for batch, manifest in ledger.connection.execute(query, (owner,)).fetchall():
                entries = booking.decode_manifest(manifest)
                costs = [self._files.cost_on_disk(entry.object) for entry in entries]
                entries = [
                    msgspec.structs.replace(entry, cost=cost or 0)
                    for entry, cost in zip(entries, costs, strict=True)
                ]
                stored = [cost is not None for cost in costs]
                left = Reservation([], [], entries, generation, batch, ledger.removals)
                booking.end_batch(ledger, self._files, left, stored, generation)

        self._run(work)

    def owners(self) -> set[str]:
        """Owners that have reservations."""

        def work(ledger: Ledger) -> set[str]:
            rows = ledger.connection.execute("SELECT DISTINCT owner FROM batches").fetchall()
            return {owner for (owner,) in rows}

        return self._run(work)

    def namespaces(self) -> list[bytes]:
        def work(ledger: Ledger) -> list[bytes]:
            rows = ledger.connection.execute("SELECT fingerprint FROM namespaces").fetchall()
            return [fingerprint for (fingerprint,) in rows]

        return self._run(work)

    def shards(self, namespace: bytes) -> list[int]:
        """The first bytes of the keys that have a row."""

        def work(ledger: Ledger) -> list[int]:
            ns = ledger.namespace_ids([namespace])[namespace]
            query = "SELECT DISTINCT substr(key, 1, 1) FROM frames WHERE ns=?"
            return [first[0] for (first,) in ledger.connection.execute(query, (ns,)).fetchall()]

        return self._run(work)

    def shard(self, namespace: bytes, first_byte: int) -> dict[bytes, IndexRow]:
        """The frames that the index believes to be there, of keys that begin so."""

        def work(ledger: Ledger) -> dict[bytes, IndexRow]:
            ns = ledger.namespace_ids([namespace])[namespace]
            first = bytes([first_byte])
            query = (
                "SELECT key, cost, used FROM frames "
                "WHERE ns=? AND key BETWEEN ? AND ? AND present=1"
            )
            values = (ns, first, first + b"\xff" * KEY_BYTES)
            rows = ledger.connection.execute(query, values).fetchall()
            return {key: IndexRow(cost, used) for key, cost, used in rows}

        return self._run(work)

    def reconcile(self, found: Sequence[FoundFrame], vanished: Sequence[ObjectId]) -> Mended:
        """Believe the disk: frames that have no row, or a wrong cost, and rows without a file.

        Each is looked at again: all that this program does to files happens in transactions, or
        is announced in `batches`.
        """

        def work(ledger: Ledger) -> Mended:
            coming = booking.announced(ledger) if found else set()
            there = [
                frame
                for frame in found
                if _named(frame.page.object) not in coming and self._files.exists(frame.page.object)
            ]
            entries = [Entry.of(frame.page) for frame in there]
            names = booking.rows_of(ledger, [entry.object for entry in entries])
            rows = [ledger.find(name) for name in names]  # some may have come meanwhile
            entered = sum(
                row is None or not row.present or row.cost != entry.cost
                for row, entry in zip(rows, entries, strict=True)
            )
            booking.enter(ledger, entries, [frame.modified_us for frame in there])
            return Mended(entered, booking.drop_vanished(ledger, self._files, vanished))

        return self._run(work)

    def unknown(self, names: Sequence[ObjectId]) -> list[ObjectId]:
        """Those that are on disk, have no row, and are not just being written."""

        def work(ledger: Ledger) -> list[ObjectId]:
            coming = booking.announced(ledger)
            rows = [ledger.find(row_name) for row_name in booking.rows_of(ledger, names)]
            return [
                name
                for name, row in zip(names, rows, strict=True)
                if not (row is not None and row.present)
                and _named(name) not in coming
                and self._files.exists(name)
            ]

        return self._run(work)

    def check_integrity(self) -> None:
        """Raises AssertionError unless sums, counts and links of the whole index agree."""
        self._run(check_ledger)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _make_room(
        self,
        ledger: Ledger,
        limits: Limits,
        need: int,
        kept: set[int],
        evicted: list[ObjectId],
    ) -> Missing:
        """Evict what it takes to have room for `need` bytes; what is missing still."""
        missing = limits.missing(ledger, need)
        goal = Missing(missing.bound, max(missing.disk, limits.extra_bytes))
        if max(goal) <= 0:
            return missing
        gone, freed = booking.evict(ledger, self._files, goal, kept)
        evicted += gone
        return Missing(missing.bound - freed.bound, missing.disk - freed.disk)

    def _run(self, work: Callable[[Ledger], _T]) -> _T:
        """`work` in a transaction, behind all that was left to be written."""
        settled: list[tuple[int, int]] = []
        gone: list[ObjectId] = []
        """What no row may be left of, whether this ends well or not."""

        def whole(connection: sqlite3.Connection) -> _T:
            with self._lock:
                touched, self._touched = self._touched, {}
                vanished, self._vanished = self._vanished, {}
                debts = dict(self._debts)
            ledger = Ledger(connection)
            gone.extend(vanished)
            ledger.unlinked = gone
            if touched:
                ledger.touch(touched)
            for debt, (reservation, stored) in debts.items():
                generation = self._database.generation
                booking.end_batch(ledger, self._files, reservation, stored, generation)
                settled.append(debt)
            booking.drop_vanished(ledger, self._files, list(vanished))
            result = work(ledger)
            ledger.flush()
            return result

        try:
            result = self._database.run(whole)
        except BaseException:
            self.touch((), gone)
            raise
        if settled:
            with self._lock:
                for debt in settled:
                    self._debts.pop(debt, None)
        return result


def _named(name: ObjectId) -> booking.Announced:
    return name.namespace, name.key
