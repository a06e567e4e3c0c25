"""What a migration has done so far, so that the same command goes on after a kill at any moment.

The journal is the catalog of the source's pages with a state each. It claims less than was done,
never more: a page is WRITING before it is handed out and DONE after its write has returned, so
after a kill only pages in WRITING are in doubt, and the destination says of them what it has.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstrata.errors import InputError, StorageBusyError, StorageError, Where
from kvstrata.tools.catalog import Catalog, Page, State

_FORMAT = "1"


@dataclass(frozen=True, slots=True)
class Selection:
    """Which pages are asked for. The pages that they hang on come with them."""

    namespaces: tuple[bytes, ...] = ()
    """Fingerprints, or their beginnings; empty: all."""
    newer_than_s: float | None = None
    """Used within so many seconds before the migration began."""
    older_than_s: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one page."""

    id: int
    state: State
    nbytes: int = 0
    is_copied: bool = False
    fault: str | None = None
    message: str = ""


class Journal(Catalog):
    """See the module's docstring. `path` "" is one that nobody resumes."""

    def __init__(self, path: str, identity: str) -> None:
        place = Where(Path(path)) if path else Where()
        try:
            if path:
                Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
            super().__init__(path)
        except StorageBusyError as error:
            raise InputError(
                "another migration is using this journal",
                remedy="wait for it, or give --journal another file",
                where=place,
            ) from error
        except OSError as error:
            raise InputError(
                f"the journal cannot be made: {error.strerror}",
                remedy="give --journal a file that you may write",
                where=place,
            ) from error
        except StorageError as error:
            if isinstance(error.__cause__, sqlite3.DatabaseError):
                raise InputError(
                    f"the journal cannot be used: {error.__cause__}",
                    remedy="give --journal another file, or remove this one to begin anew",
                    where=place,
                ) from error
            raise
        known = self.get("identity")
        if known is not None and known != _digest(identity):
            self.close()
            raise InputError(
                "this is the journal of another migration",
                remedy="give --journal another file, or remove this one to begin anew",
                where=place,
            )
        self.is_resumed = self.phase in ("persist", "delete", "done") or (
            self.phase == "copy" and self._has_begun()
        )
        if self.phase == "done":
            self._reopen()
        if not self.is_resumed:
            with self.transaction() as connection:
                connection.execute("DELETE FROM pages")
                connection.execute("DELETE FROM meta")
            self.put(identity=_digest(identity), format=_FORMAT, phase="scan")

    @property
    def phase(self) -> str:
        """scan, copy, persist, delete, done; "" before the first."""
        return self.get("phase") or ""

    def enter(self, phase: str) -> None:
        self.put(phase=phase)

    def _reopen(self) -> None:
        """It was done, and killed before it could say so: look for what came since."""
        kept = (State.DONE, State.SAFE, State.DELETED)
        with self.transaction() as connection:
            connection.execute("DELETE FROM pages WHERE state NOT IN (?, ?, ?)", kept)
            connection.execute("UPDATE pages SET parent_id=NULL, place=NULL")
            connection.execute("UPDATE meta SET value='scan' WHERE name='phase'")

    def _has_begun(self) -> bool:
        """Something was handed out. Before that a fresh scan knows more."""
        return bool(self.count("(copied=1 OR state=?)", (State.WRITING,))[0])

    # ── what is to be copied, and in which order ─────────────────────────────────────────────────

    def select(self, selection: Selection, now_s: float) -> None:
        """Mark what is asked for and what that hangs on; put all of it in order."""
        newest = now_s - (selection.older_than_s or 0.0) if selection.older_than_s else 1e18
        oldest = now_s - selection.newer_than_s if selection.newer_than_s is not None else -1e18
        with self.transaction() as connection:
            connection.execute(
                "UPDATE pages SET selected=1 WHERE used>=? AND used<?", (oldest, newest)
            )
            connection.execute(
                "WITH RECURSIVE up(id) AS (SELECT parent_id FROM pages WHERE selected=1 "
                "UNION SELECT p.parent_id FROM pages p JOIN up ON p.id=up.id) "
                "UPDATE pages SET selected=2 WHERE selected=0 AND id IN (SELECT id FROM up)"
            )
            connection.execute(
                "UPDATE pages SET fault='corrupt', message='its depth does not follow its parent' "
                "WHERE fault IS NULL AND parent IS NOT NULL AND parent_id IS NULL AND EXISTS "
                "(SELECT 1 FROM pages p WHERE p.ns=pages.ns AND p.key=pages.parent)"
            )
            connection.execute(
                "UPDATE pages SET state=? WHERE selected>0 AND fault IS NOT NULL", (State.FAILED,)
            )
            self._order(connection)

    def _order(self, connection: sqlite3.Connection) -> None:
        """Chains by when they were last used, the longest ago first, so that a destination that
        must evict keeps what was used last; within a chain, parents first: what a page is ordered
        by is the least of all pages below it, so no parent comes after its child."""
        connection.execute("UPDATE pages SET rank=used WHERE selected>0")
        query = "SELECT DISTINCT depth FROM pages WHERE selected>0 AND parent_id IS NOT NULL"
        depths = [depth for (depth,) in connection.execute(query)]
        for depth in sorted(depths, reverse=True):
            connection.execute(
                "UPDATE pages SET rank=min(rank, c.least) FROM (SELECT parent_id, min(rank) least "
                "FROM pages WHERE depth=? AND selected>0 AND parent_id IS NOT NULL "
                "GROUP BY parent_id) c WHERE pages.id=c.parent_id",
                (depth,),
            )
        connection.execute(
            "UPDATE pages SET place=o.n FROM (SELECT id, row_number() OVER "
            "(ORDER BY rank, depth, id) n FROM pages WHERE selected>0) o WHERE o.id=pages.id"
        )

    def retry(self) -> None:
        """What failed before gets another chance."""
        again = (State.FAILED, State.CUT)
        with self.transaction() as connection:
            connection.execute(
                "UPDATE pages SET state=0, fault=NULL, message='' WHERE state IN (?, ?) "
                "AND nbytes>0 AND (parent IS NULL OR parent_id IS NOT NULL OR state=?)",
                (*again, State.CUT),
            )

    # ── copying ──────────────────────────────────────────────────────────────────────────────────

    def take(self, after: int, most: int, most_bytes: int) -> tuple[list[Page], int]:
        """The next pages to copy, which are WRITING from now on, and the place of the last."""
        rows = self.rows(
            "SELECT id, place, nbytes FROM pages WHERE place>? AND state IN (?, ?) "
            "ORDER BY place LIMIT ?",
            (after, State.PENDING, State.WRITING, most),
        )
        ids: list[int] = []
        room = most_bytes
        for id_, place, nbytes in rows:
            if ids and nbytes > room:
                break
            ids.append(id_)
            room -= nbytes
            after = place
        marks = ",".join("?" * len(ids))
        pages = self.pages(f"id IN ({marks}) ORDER BY place", ids)
        if pages:
            with self.transaction() as connection:
                query = f"UPDATE pages SET state=? WHERE id IN ({marks})"
                connection.execute(query, (State.WRITING, *ids))
        return pages, after

    def record(self, results: Iterable[Result], seconds: float | None = None) -> None:
        """Note what became of pages, and how long it took so far over all runs."""
        rows = [(r.state, r.is_copied, r.fault, r.message, r.id) for r in results]
        query = "UPDATE pages SET state=?, copied=?, fault=?, message=? WHERE id=?"
        with self.transaction() as connection:
            connection.executemany(query, rows)
            if seconds is not None:
                values = ("seconds", str(seconds))
                connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", values)

    def set_state(self, pages: Sequence[Page], state: State) -> None:
        with self.transaction() as connection:
            query = "UPDATE pages SET state=? WHERE id=?"
            connection.executemany(query, [(state, page.id) for page in pages])

    def each(self, states: Sequence[State], most: int, work: Callable[[list[Page]], None]) -> None:
        """`work` on all selected pages in these states, parents first, in groups."""
        after, marks = 0, ",".join("?" * len(states))
        while True:
            where = f"place>? AND state IN ({marks}) ORDER BY place LIMIT ?"
            pages = self.pages(where, (after, *states, most))
            if not pages:
                return
            query = "SELECT place FROM pages WHERE id=?"
            after = self.number(query, (pages[-1].id,))
            work(pages)

    def without_parent(self, after: int, most: int) -> list[Page]:
        """Pages that were cut and whose parent no scan has found, by `id`."""
        return self.pages(
            "id>? AND selected>0 AND state=? AND parent_id IS NULL ORDER BY id LIMIT ?",
            (after, State.CUT, most),
        )

    # ── removing ─────────────────────────────────────────────────────────────────────────────────

    def removable(self, most: int) -> list[Page]:
        """Pages that are safe at the destination and that nothing at the source hangs on; none of
        them is the parent of another."""
        gone = (State.DELETED, State.VANISHED)
        return self.pages(
            "selected=1 AND state=? AND NOT EXISTS (SELECT 1 FROM pages c WHERE "
            "c.parent_id=pages.id AND c.state NOT IN (?, ?)) ORDER BY depth DESC, id LIMIT ?",
            (State.SAFE, *gone, most),
        )

    # ── sums ─────────────────────────────────────────────────────────────────────────────────────

    def count(self, where: str = "1", values: Sequence[object] = ()) -> tuple[int, int]:
        """Selected pages that fulfil a condition, and their bytes."""
        query = f"SELECT count(*), coalesce(sum(nbytes), 0) FROM pages WHERE selected>0 AND {where}"
        ((pages, nbytes),) = self.rows(query, values)
        return pages, nbytes


def _digest(identity: str) -> str:
    """Options may hold secrets."""
    return hashlib.sha256(identity.encode()).hexdigest()
