"""The frames of a store as a tool has found them: one row a page, in SQLite, so that memory stays
bounded however many there are.

Pages are linked to their parents (`link`) where the depths agree; a link goes up one step, so
there are no circles, whatever a damaged header says.
"""

from __future__ import annotations

import enum
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple, Self

from kvstrata.backends import ObjectId, StorageBackend, StoredObject
from kvstrata.backends.frame import HEADER_BYTES
from kvstrata.boundary import KEY_BYTES, Outcome
from kvstrata.errors import StorageBusyError, StorageError, StorageFullError
from kvstrata.tools.frames import Checked, FrameBuffer, batches, read_headers

SCHEMA = """
CREATE TABLE IF NOT EXISTS pages(
  id INTEGER PRIMARY KEY,
  ns BLOB NOT NULL,
  key BLOB NOT NULL,
  parent BLOB,                         -- key of the parent; NULL: depth 0, or not known
  depth INTEGER NOT NULL,              -- -1: not known
  nbytes INTEGER NOT NULL,             -- of the frame, header included; 0: not known
  cost INTEGER NOT NULL,               -- in the unit of the backend
  used REAL NOT NULL,                  -- when last used, seconds since the epoch
  fault TEXT,                          -- an Outcome; NULL: the frame is well
  message TEXT NOT NULL DEFAULT '',
  parent_id INTEGER,                   -- row of the parent
  selected INTEGER NOT NULL DEFAULT 0, -- 1: by the filters, 2: because a selected one needs it
  state INTEGER NOT NULL DEFAULT 0,
  copied INTEGER NOT NULL DEFAULT 0,   -- 1: written by this migration, not there before
  rank REAL,                           -- the least `used` of the page and all below it
  place INTEGER,                       -- in the order of copying
  UNIQUE(ns, key)
);
CREATE INDEX IF NOT EXISTS by_parent ON pages(parent_id);
CREATE INDEX IF NOT EXISTS by_depth ON pages(depth);
CREATE INDEX IF NOT EXISTS by_place ON pages(place);
CREATE TABLE IF NOT EXISTS meta(name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class State(enum.IntEnum):
    """How far a page is on its way."""

    PENDING = 0
    WRITING = 1
    """Handed out; after a kill nobody knows whether it was written."""
    DONE = 2
    """At the destination."""
    SAFE = 3
    """At the destination, verified and on the device."""
    DELETED = 4
    """And no longer at the source."""
    VANISHED = 5
    """It went from the source before it could be copied."""
    FAILED = 6
    CUT = 7
    """Not copied, because its parent is not at the destination."""
    EVICTED = 8
    """Copied, and evicted from the destination since."""


class Page(NamedTuple):
    """A row, as far as copying needs it."""

    id: int
    object: ObjectId
    parent: ObjectId | None
    depth: int
    nbytes: int
    state: State
    copied: bool


_PAGE = "id, ns, key, parent, depth, nbytes, state, copied"


def page_of(row: Sequence[Any]) -> Page:
    id_, ns, key, parent, depth, nbytes, state, copied = row
    above = None if parent is None else ObjectId(ns, parent)
    return Page(id_, ObjectId(ns, key), above, depth, nbytes, State(state), bool(copied))


class Catalog:
    """One SQLite file (`path` "" is a temporary one that vanishes), used by one thread.

    Raises `StorageError` for what SQLite raises, `StorageBusyError` when another process has it.
    """

    def __init__(self, path: str = "") -> None:
        self.path = path
        with self._translated():
            self.connection = sqlite3.connect(path, isolation_level=None, timeout=0.5)
            try:
                for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=NORMAL"):
                    self.connection.execute(f"PRAGMA {pragma}").fetchall()
                self.connection.executescript(f"BEGIN IMMEDIATE;{SCHEMA}COMMIT;")
            except BaseException:
                self.connection.close()
                raise

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ── SQL ──────────────────────────────────────────────────────────────────────────────────────

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._translated():
            return self.connection.execute(query, values).fetchall()

    def pages(self, where: str, values: Sequence[Any] = ()) -> list[Page]:
        """Pages by a condition, an order and a LIMIT."""
        return [page_of(r) for r in self.rows(f"SELECT {_PAGE} FROM pages WHERE {where}", values)]

    def number(self, query: str, values: Sequence[Any] = ()) -> int:
        """The one number that `query` gives; 0 for NULL."""
        return int(self.rows(query, values)[0][0] or 0)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing of what is done with the connection."""
        with self._translated():
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                yield self.connection
                self.connection.execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
                raise

    def get(self, name: str) -> str | None:
        found = self.rows("SELECT value FROM meta WHERE name=?", (name,))
        return found[0][0] if found else None

    def put(self, **values: str) -> None:
        with self.transaction() as connection:
            connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            code = int(getattr(error, "sqlite_errorcode", 0)) & 0xFF
            kinds: dict[int, type[StorageError]] = {
                sqlite3.SQLITE_BUSY: StorageBusyError,
                sqlite3.SQLITE_FULL: StorageFullError,
            }
            place = self.path or "the temporary catalog (see TMPDIR)"
            raise kinds.get(code, StorageError)(f"{error}: {place}") from error

    # ── filling ──────────────────────────────────────────────────────────────────────────────────

    def add(self, found: Sequence[StoredObject], looks: Sequence[Checked]) -> None:
        """Enter what was found and looked at; what is gone again is left out."""
        rows = []
        for stored, look in zip(found, looks, strict=True):
            header, name = look.header, stored.object
            if look.outcome is Outcome.MISSING:
                continue
            parent, depth, nbytes, fault = None, -1, 0, look.outcome.value
            if header is not None:
                parent = None if header.parent is None else header.parent_key
                depth, nbytes, fault = header.depth, HEADER_BYTES + header.stored_bytes, None
            elif look.is_foreign:
                fault = FOREIGN
            depth = min(depth, 2**62)
            rows.append(
                (name.namespace, name.key, parent, depth, nbytes, stored.nbytes,
                 stored.last_used_s, fault, look.message)
            )  # fmt: skip
        columns = "ns, key, parent, depth, nbytes, cost, used, fault, message"
        query = f"INSERT OR IGNORE INTO pages({columns}) VALUES (?,?,?,?,?,?,?,?,?)"
        with self.transaction() as connection:
            connection.executemany(query, rows)

    def link(self, backend: StorageBackend) -> None:
        """Link pages to parents. Parents that a scan has missed, because both were written while
        it ran, are asked for by name."""
        buffer = FrameBuffer(HEADER_BYTES * backend.max_batch)
        while True:
            with self.transaction() as connection:
                connection.execute(
                    "UPDATE pages SET parent_id = (SELECT p.id FROM pages p WHERE p.ns = pages.ns "
                    "AND p.key = pages.parent AND (p.depth = pages.depth - 1 OR p.depth < 0)) "
                    "WHERE parent IS NOT NULL AND parent_id IS NULL"
                )
            missing = self.rows(
                "SELECT DISTINCT c.ns, c.parent FROM pages c WHERE c.parent IS NOT NULL AND NOT "
                "EXISTS (SELECT 1 FROM pages p WHERE p.ns = c.ns AND p.key = c.parent)"
            )
            names = [ObjectId(ns, key) for ns, key in missing]
            if not self._add_by_name(backend, names, buffer):
                return

    def _add_by_name(
        self, backend: StorageBackend, names: Sequence[ObjectId], buffer: FrameBuffer
    ) -> int:
        """How many of them are there."""
        added, now = 0, time.time()
        for at in range(0, len(names), backend.max_batch):
            part = names[at : at + backend.max_batch]
            looks = read_headers(backend, part, buffer.cut([HEADER_BYTES] * len(part)))
            found = [
                StoredObject(name, _cost(look), now) for name, look in zip(part, looks, strict=True)
            ]
            self.add(found, looks)
            added += sum(look.outcome is not Outcome.MISSING for look in looks)
        return added


FOREIGN = "foreign"
"""The fault of a frame that another version of this program may be able to read."""


def _cost(look: Checked) -> int:
    return HEADER_BYTES + look.header.stored_bytes if look.header is not None else 0


def orphans(backend: StorageBackend, pages: Sequence[Page]) -> list[Page]:
    """Those that are there and whose parent is not; pages without a parent are none.

    A server that stores and evicts meanwhile makes none: a page counts that is seen between two
    looks which both miss its parent.
    """
    found: list[Page] = []
    for at in range(0, len(pages), backend.max_batch):
        part = list(pages[at : at + backend.max_batch])
        part = _without_parent(backend, part)
        there = backend.exists([page.object for page in part])
        part = [page for page, is_there in zip(part, there, strict=True) if is_there]
        found += _without_parent(backend, part)
    return found


def _without_parent(backend: StorageBackend, pages: Sequence[Page]) -> list[Page]:
    asked = [(page, page.parent) for page in pages if page.parent is not None]
    there = backend.exists([parent for _, parent in asked])
    return [page for (page, _), is_there in zip(asked, there, strict=True) if not is_there]


def scan_headers(
    catalog: Catalog,
    backend: StorageBackend,
    namespaces: Sequence[bytes] = (),
    on_batch: Callable[[int], None] = lambda count: None,
) -> None:
    """Enter every frame of the store by its header, and link them. `namespaces`: only of those
    whose fingerprints begin so.

    `on_batch` hears how many more there are; what it raises ends the scan.
    """
    buffer = FrameBuffer(HEADER_BYTES * backend.max_batch)
    for group in batches(scan(backend, namespaces), backend.max_batch):
        pieces = buffer.cut([HEADER_BYTES] * len(group))
        catalog.add(group, read_headers(backend, [found.object for found in group], pieces))
        on_batch(len(group))
    catalog.link(backend)


def scan(backend: StorageBackend, namespaces: Sequence[bytes]) -> Iterator[StoredObject]:
    """All objects, or those of namespaces that begin so."""
    if namespaces and all(len(n) == KEY_BYTES for n in namespaces):
        for namespace in dict.fromkeys(namespaces):
            yield from backend.scan(namespace)
        return
    for found in backend.scan():
        if not namespaces or found.object.namespace.startswith(tuple(namespaces)):
            yield found
