"""The index within one transaction: the sums, and the rows it has touched.

Rows are loaded in bulk, changed as objects, and written by `flush` with few statements: each call
into SQLite gives up the interpreter lock, which costs more than the statement when threads compete
for it.
"""

from __future__ import annotations

import heapq
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvstrata.backends.base import ObjectId
from kvstrata.backends.filesystem.oserrors import IndexDamage

Name = tuple[int, bytes]
"""A row's name: id of the namespace, page key."""

_COLUMNS = "id, ns, key, parent, children, pins, depth, cost, used, present"
_META = "used, objects, inflight, next_id, stamp, removals, complete"
_LEAVES = f"SELECT {_COLUMNS} FROM frames WHERE present=1 AND children=0 AND pins=0 ORDER BY used"
_UPDATE = (
    "UPDATE frames SET parent=?, children=?, pins=?, depth=?, cost=?, used=?, present=? WHERE id=?"
)


class Row:
    """One row of `frames`."""

    __slots__ = (
        "children",
        "cost",
        "depth",
        "id",
        "key",
        "ns",
        "parent",
        "pins",
        "present",
        "used",
    )

    def __init__(self, values: Sequence[Any]) -> None:
        self.id: int
        self.ns: int
        self.key: bytes
        self.parent: int | None
        self.children: int
        self.pins: int
        self.depth: int
        self.cost: int
        self.used: int
        self.present: int
        (
            self.id,
            self.ns,
            self.key,
            self.parent,
            self.children,
            self.pins,
            self.depth,
            self.cost,
            self.used,
            self.present,
        ) = values


class Ledger:
    """See the module's docstring. Lives as long as its transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        meta: tuple[int, ...] = _the_row(connection.execute(f"SELECT {_META} FROM meta"))
        (
            self.used,
            self.objects,
            self.inflight,
            self._next_id,
            self.stamp,
            self.removals,
            self.complete,
        ) = meta
        self._meta = meta
        self._by_name: dict[Name, Row] = {}
        self._by_id: dict[int, Row] = {}
        self._new: dict[int, Row] = {}
        self._dirty: dict[int, Row] = {}
        self._removed: set[int] = set()
        self.unlinked: list[ObjectId] = []
        """Frames whose files went, which a transaction that fails does not bring back."""
        self._heap: list[tuple[int, int]] = []

    # ── names ────────────────────────────────────────────────────────────────────────────────────

    def namespace_ids(self, fingerprints: Iterable[bytes]) -> dict[bytes, int]:
        """Their ids; new ones are added."""
        ids = {}
        for fingerprint in set(fingerprints):
            query = "SELECT id FROM namespaces WHERE fingerprint=?"
            row = self.connection.execute(query, (fingerprint,)).fetchone()
            if row is None:
                add = "INSERT INTO namespaces(fingerprint) VALUES (?)"
                ids[fingerprint] = self.connection.execute(add, (fingerprint,)).lastrowid or 0
            else:
                ids[fingerprint] = row[0]
        return ids

    def fingerprint(self, ns: int) -> bytes:
        query = "SELECT fingerprint FROM namespaces WHERE id=?"
        fingerprint: bytes = _the_row(self.connection.execute(query, (ns,)))[0]
        return fingerprint

    # ── rows ─────────────────────────────────────────────────────────────────────────────────────

    def load(self, names: Iterable[Name]) -> None:
        """Make rows of these names known to `find`."""
        by_ns: dict[int, list[bytes]] = {}
        for ns, key in names:
            by_ns.setdefault(ns, []).append(key)
        for ns, keys in by_ns.items():
            for at in range(0, len(keys), 1024):
                part = keys[at : at + 1024]
                marks = ",".join("?" * len(part))
                query = f"SELECT {_COLUMNS} FROM frames WHERE ns=? AND key IN ({marks})"
                for values in self.connection.execute(query, (ns, *part)).fetchall():
                    self._know(values)

    def find(self, name: Name) -> Row | None:
        """The row of a name that was loaded or added."""
        return self._by_name.get(name)

    def parent_of(self, row: Row) -> Row | None:
        if row.parent is None:
            return None
        parent = self._by_id.get(row.parent)
        if parent is None:
            query = f"SELECT {_COLUMNS} FROM frames WHERE id=?"
            parent = self._know(_the_row(self.connection.execute(query, (row.parent,))))
        return parent

    def add(self, name: Name, parent: Row | None, depth: int) -> Row:
        """A new row, not present yet. `name` has been loaded and has none."""
        row = Row((self.new_id(), *name, None, 0, 0, depth, 0, self.stamp, 0))
        self._by_name[name] = self._by_id[row.id] = self._new[row.id] = row
        if parent is not None:
            self.set_parent(row, parent)
        return row

    def set_parent(self, row: Row, parent: Row) -> None:
        row.parent = parent.id
        parent.children += 1
        self.changed(row)
        self.changed(parent)

    def changed(self, row: Row) -> None:
        self._dirty[row.id] = row

    def appear(self, row: Row, cost: int, used: int) -> None:
        """The frame is there and costs `cost`."""
        self.used += cost - row.cost
        self.objects += not row.present
        row.cost, row.used, row.present = cost, used, 1
        self.changed(row)

    def vanish(self, row: Row) -> None:
        """The frame is gone; its row too, unless something needs it."""
        self.used -= row.cost
        self.objects -= row.present
        row.cost = row.present = 0
        self.changed(row)
        self.prune(row)

    def prune(self, row: Row) -> None:
        """Remove `row` if it is for nothing, then its parent, and so on. A present row that has
        become a leaf on the way is seen by `leaves`."""
        at: Row | None = row
        while at is not None and not (at.children or at.pins):
            if at.present:
                heapq.heappush(self._heap, (at.used, at.id))
                return
            parent = self.parent_of(at)
            del self._by_name[at.ns, at.key], self._by_id[at.id]
            self._dirty.pop(at.id, None)
            if self._new.pop(at.id, None) is None:
                self._removed.add(at.id)
            if parent is not None:
                parent.children -= 1
                self.changed(parent)
            at = parent

    def touch(self, names: Iterable[ObjectId]) -> None:
        """These frames were used, in this order. Before any row is loaded."""
        assert not self._by_id, "loaded rows would be stale"
        listed = list(names)
        ids = self.namespace_ids(name.namespace for name in listed)
        stamp = self.next_stamp(len(listed))
        for at in range(0, len(listed), 256):
            part = listed[at : at + 256]
            marks = ",".join(["(?,?,?)"] * len(part))
            values: list[object] = []
            for i, name in enumerate(part, start=stamp + at):
                values += (ids[name.namespace], name.key, i)
            self.connection.execute(
                f"WITH touched(ns, key, used) AS (VALUES {marks}) "
                "UPDATE frames SET used=touched.used FROM touched "
                "WHERE frames.ns=touched.ns AND frames.key=touched.key AND frames.present=1",
                values,
            )

    def new_id(self) -> int:
        """A number that was never used in this generation."""
        self._next_id += 1
        return self._next_id - 1

    def next_stamp(self, count: int = 1) -> int:
        """The first of `count` stamps in a row, all above any given out before."""
        first = max(time.time_ns() // 1000, self.stamp + 1)
        self.stamp = first + count - 1
        return first

    def flush(self) -> None:
        """Write what has changed. The last thing in a transaction, and before a query whose answer
        depends on it."""
        connection = self.connection
        rows = list(self._new.values())
        for at in range(0, len(rows), 64):
            part = rows[at : at + 64]
            marks = ",".join(["(?,?,?,?,?,?,?,?,?,?)"] * len(part))
            values: list[object] = []
            for r in part:
                values += (r.id, r.ns, r.key, r.parent, r.children, r.pins, r.depth)
                values += (r.cost, r.used, r.present)
            connection.execute(f"INSERT INTO frames({_COLUMNS}) VALUES {marks}", values)
        changed = [
            (r.parent, r.children, r.pins, r.depth, r.cost, r.used, r.present, r.id)
            for r in self._dirty.values()
            if r.id not in self._new
        ]
        if changed:
            connection.executemany(_UPDATE, changed)
        if self._removed:
            ids = [(i,) for i in self._removed]
            connection.executemany("DELETE FROM frames WHERE id=?", ids)
        meta = (
            self.used,
            self.objects,
            self.inflight,
            self._next_id,
            self.stamp,
            self.removals,
            self.complete,
        )
        if meta != self._meta:
            columns = ", ".join(f"{column}=?" for column in _META.split(", "))
            connection.execute(f"UPDATE meta SET {columns}", meta)
        self._new, self._dirty, self._removed, self._meta = {}, {}, set(), meta

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _know(self, values: tuple[int, ...]) -> Row:
        row = self._by_id.get(values[0])
        if row is None:
            row = Row(values)
            self._by_name[row.ns, row.key] = self._by_id[row.id] = row
        return row

    def leaves(self) -> Iterator[Row]:
        """Present leaves, the least recently used first, as they are now: rows changed in this
        transaction count with their change, and a parent whose last child went meanwhile is a
        leaf like any other."""
        self._heap = [(row.used, row.id) for row in self._by_id.values() if self._is_leaf(row)]
        heapq.heapify(self._heap)
        cursor = self.connection.execute(_LEAVES)
        stored = self._stored_leaf(cursor)
        while stored is not None or self._heap:
            if self._heap and (stored is None or self._heap[0] < (stored.used, stored.id)):
                row = self._by_id.get(heapq.heappop(self._heap)[1])
                if row is not None and self._is_leaf(row):
                    yield row
            elif stored is not None:
                row = stored
                stored = self._stored_leaf(cursor)
                yield row

    def _stored_leaf(self, cursor: sqlite3.Cursor) -> Row | None:
        """The next leaf of the database that this transaction has not touched."""
        for values in cursor:
            if values[0] not in self._by_id and values[0] not in self._removed:
                return self._know(values)
        return None

    @staticmethod
    def _is_leaf(row: Row) -> bool:
        return bool(row.present) and not (row.children or row.pins)


def _the_row(cursor: sqlite3.Cursor) -> Any:
    """The first row of what this program has always written."""
    row = cursor.fetchone()
    if row is None:
        raise IndexDamage("a row that other rows need is not there")
    return row


def all_rows(connection: sqlite3.Connection) -> list[Row]:
    """Every row there is."""
    return [Row(values) for values in connection.execute(f"SELECT {_COLUMNS} FROM frames")]
