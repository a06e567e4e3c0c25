"""Reads every frame of a store and says what is wrong: bytes, chains, the backend's own books.

A server may read, write and evict meanwhile: what seems wrong is looked at again in the end, and
what has gone since is no fault.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvstrata.backends import ObjectId, StorageBackend, StoredObject
from kvstrata.backends.abilities import SupportsAudit
from kvstrata.backends.frame import HEADER_BYTES, parse_header
from kvstrata.boundary import Outcome
from kvstrata.errors import CorruptFrameError
from kvstrata.tools.catalog import FOREIGN, Catalog, orphans, scan
from kvstrata.tools.crew import Crew
from kvstrata.tools.frames import (
    ALIGN_BYTES,
    MAX_FRAME_BYTES,
    Checked,
    FrameBuffer,
    batches,
    read_frames,
)
from kvstrata.tools.replay_control import Interruption

OnProgress = Callable[[str, int, int, int], None]

BATCH_BYTES = 16 << 20
_GROUP = 256


class Kind(enum.StrEnum):
    """What is wrong with a frame. The backend's findings have kinds of their own."""

    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"
    FOREIGN = FOREIGN
    SIZE = "size"
    DEPTH = "depth"
    ORPHAN = "orphan"
    UNREACHABLE = "unreachable"


REMEDIES = {
    Kind.CORRUPT: "--repair deletes it; it is stored again when it is computed again",
    Kind.UNREADABLE: "check owner and mode of the file, and the device; --repair deletes it",
    Kind.FOREIGN: "leave it to the version that wrote it, or delete it by hand",
    Kind.SIZE: "--repair deletes it; no load can use it",
    Kind.DEPTH: "--repair deletes it and what hangs on it",
    Kind.ORPHAN: "it is of use again when its parent is stored again; --repair deletes it",
    Kind.UNREACHABLE: "as the page that it hangs on",
}


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong."""

    kind: str
    place: str
    """The file, or the key, or a part of the store."""
    message: str
    remedy: str


@dataclass(slots=True)
class Verification:
    """One look at an open store. `run` once, from one thread; results are in the fields then."""

    backend: StorageBackend
    place_of: Callable[[ObjectId], str]
    page_bytes: dict[bytes, int]
    """Payload of a page by namespace, where it is known."""
    namespaces: Sequence[bytes]
    stop: Interruption
    on_progress: OnProgress
    threads: int = 2
    take: Callable[[int], None] = lambda nbytes: None
    """Called with the bytes of each batch before it is read: a rate limit."""
    frames: int = 0
    nbytes: int = 0
    vanished: int = 0
    deleted: int = 0
    complete: bool = False

    def run(self, catalog: Catalog, *, repair: bool, keep_orphans: bool) -> list[Problem]:
        """Read, check, and with `repair` delete what no load can use. All problems, the deleted
        ones too."""
        self._read(catalog)
        if self.stop.finish.is_set():
            return self._problems(catalog)
        catalog.link(self.backend)
        self._check_sizes(catalog)
        self._check_chains(catalog)
        problems = self._problems(catalog)
        if isinstance(self.backend, SupportsAudit):
            problems += [
                Problem(f.kind, f.place, f.message, f.remedy) for f in self.backend.audit()
            ]
        if repair:
            self._repair(catalog, keep_orphans)
        self.complete = True
        return problems

    # ── reading ──────────────────────────────────────────────────────────────────────────────────

    def _read(self, catalog: Catalog) -> None:
        groups = batches(scan(self.backend, self.namespaces), self.backend.max_batch, BATCH_BYTES)

        def until_stopped() -> Any:
            for group in groups:
                if self.stop.finish.is_set():
                    return
                yield group

        is_over = self.stop.leave.is_set
        with Crew(self.threads, BATCH_BYTES, self._read_group) as crew:
            for group, looks in crew.run(until_stopped(), is_over):
                catalog.add(group, looks)
                there = [look for look in looks if look.outcome is not Outcome.MISSING]
                self.frames += len(there)
                self.vanished += len(looks) - len(there)
                self.nbytes += sum(found.nbytes for found in group)
                self.on_progress("verify", self.frames, 0, self.nbytes)

    def _read_group(
        self, group: list[StoredObject], buffer: FrameBuffer
    ) -> tuple[list[StoredObject], list[Checked]]:
        self.take(sum(found.nbytes for found in group))
        pieces = buffer.cut([max(f.nbytes, HEADER_BYTES) + ALIGN_BYTES for f in group])
        looks = read_frames(self.backend, [found.object for found in group], pieces)
        for i, (found, look, piece) in enumerate(zip(group, looks, pieces, strict=True)):
            if look.outcome is Outcome.CORRUPT and (need := _claimed(piece)) > piece.nbytes:
                looks[i] = self._read_larger(found.object, need)
        return group, looks

    def _read_larger(self, name: ObjectId, need: int) -> Checked:
        """The backend counts less than the frame has (it may compress)."""
        (look,) = read_frames(self.backend, [name], FrameBuffer(need).cut([need]))
        return look

    # ── chains ───────────────────────────────────────────────────────────────────────────────────

    def _check_sizes(self, catalog: Catalog) -> None:
        with catalog.transaction() as connection:
            for namespace, nbytes in self.page_bytes.items():
                connection.execute(
                    "UPDATE pages SET fault=?, message='a payload of ' || (nbytes - ?) || ' bytes, "
                    "where a page has ' || ? WHERE ns=? AND fault IS NULL AND nbytes<>?",
                    (Kind.SIZE, HEADER_BYTES, nbytes, namespace, HEADER_BYTES + nbytes),
                )

    def _check_chains(self, catalog: Catalog) -> None:
        loose = "fault IS NULL AND parent IS NOT NULL AND parent_id IS NULL"
        known = "EXISTS (SELECT 1 FROM pages p WHERE p.ns=pages.ns AND p.key=pages.parent)"
        with catalog.transaction() as connection:
            connection.execute(
                f"UPDATE pages SET fault=?, message='depth ' || depth || ' does not follow its "
                f"parent' WHERE {loose} AND {known}",
                (Kind.DEPTH,),
            )
        after = 0
        while True:
            some = catalog.pages(f"id>? AND {loose} ORDER BY id LIMIT ?", (after, _GROUP))
            if not some:
                break
            after = some[-1].id
            rows = [
                (Kind.ORPHAN, f"its parent {page.parent.key.hex()[:16]}… is not there", page.id)
                for page in orphans(self.backend, some)
                if page.parent is not None
            ]
            with catalog.transaction() as connection:
                connection.executemany("UPDATE pages SET fault=?, message=? WHERE id=?", rows)
        with catalog.transaction() as connection:
            connection.execute(
                "WITH RECURSIVE below(id) AS (SELECT c.id FROM pages c JOIN pages p ON "
                "c.parent_id=p.id WHERE p.fault IS NOT NULL UNION SELECT c.id FROM pages c JOIN "
                "below ON c.parent_id=below.id) UPDATE pages SET fault=?, message='a page that it "
                "hangs on is of no use' WHERE fault IS NULL AND id IN (SELECT id FROM below)",
                (Kind.UNREACHABLE,),
            )

    def _problems(self, catalog: Catalog) -> list[Problem]:
        rows = catalog.rows(
            "SELECT ns, key, fault, message FROM pages WHERE fault IS NOT NULL "
            "ORDER BY fault=?, id",
            (Kind.UNREACHABLE,),
        )
        problems = []
        for ns, key, fault, message in rows:
            kind = _kind(fault)
            place = self.place_of(ObjectId(ns, key))
            problems.append(Problem(kind, place, message or "it cannot be read", REMEDIES[kind]))
        return problems

    # ── repair ───────────────────────────────────────────────────────────────────────────────────

    def _repair(self, catalog: Catalog, keep_orphans: bool) -> None:
        """Delete what is still of no use, and what hangs on it, children first."""
        self._doom(catalog, keep_orphans)
        with catalog.transaction() as connection:
            if not keep_orphans:
                connection.execute(
                    "WITH RECURSIVE below(id) AS (SELECT id FROM pages WHERE selected=1 UNION "
                    "SELECT c.id FROM pages c JOIN below ON c.parent_id=below.id) "
                    "UPDATE pages SET selected=1 WHERE id IN (SELECT id FROM below)"
                )
        most = self.backend.max_batch
        while not self.stop.finish.is_set():
            some = catalog.pages("selected=1 ORDER BY depth DESC, id LIMIT ?", (most,))
            if not some:
                return
            names = [page.object for page in some]
            self.deleted += sum(self.backend.delete(names))
            with catalog.transaction() as connection:
                ids = [(page.id,) for page in some]
                connection.executemany("UPDATE pages SET selected=0 WHERE id=?", ids)
            self.on_progress("repair", self.deleted, 0, 0)

    def _doom(self, catalog: Catalog, keep_orphans: bool) -> None:
        """Mark what was wrong and still is: a server may have replaced it by now."""
        roots = [Kind.SIZE, Kind.DEPTH, *([] if keep_orphans else [Kind.ORPHAN])]
        marks = ",".join("?" * len(roots))
        kept = (Kind.FOREIGN, Kind.UNREACHABLE, Kind.ORPHAN, Kind.SIZE, Kind.DEPTH)
        with catalog.transaction() as connection:
            connection.execute(f"UPDATE pages SET selected=1 WHERE fault IN ({marks})", roots)
        after = 0
        while True:
            some = catalog.rows(
                "SELECT id, ns, key, cost FROM pages WHERE id>? AND fault IS NOT NULL AND fault "
                "NOT IN (?, ?, ?, ?, ?) ORDER BY id LIMIT ?",
                (after, *kept, self.backend.max_batch),
            )
            if not some:
                return
            after = some[-1][0]
            group = [StoredObject(ObjectId(ns, key), cost, 0.0) for _, ns, key, cost in some]
            _, looks = self._read_group(group, FrameBuffer(0))
            bad = [
                (row[0],)
                for row, look in zip(some, looks, strict=True)
                if look.outcome not in (Outcome.LOADED, Outcome.MISSING) and not look.is_foreign
            ]
            with catalog.transaction() as connection:
                connection.executemany("UPDATE pages SET selected=1 WHERE id=?", bad)


def _kind(fault: str) -> Kind:
    try:
        return Kind(fault)
    except ValueError:  # an Outcome: what the backend said of the read
        return Kind.UNREADABLE


def _claimed(piece: memoryview) -> int:
    """How long the frame is by its own header, and a bit; 0 if that says nothing."""
    try:
        need = HEADER_BYTES + parse_header(piece[:HEADER_BYTES]).stored_bytes
    except CorruptFrameError:
        return 0
    return need + ALIGN_BYTES if need <= MAX_FRAME_BYTES else 0


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `kvstrata verify --json` writes."""

    backend: str
    complete: bool
    frames: int
    bytes: int
    vanished: int
    """Went while they were looked at (eviction); no fault."""
    counts: dict[str, int]
    """Problems by kind."""
    problems: list[Problem]
    deleted: int
    """By `--repair`."""
    seconds: float


def build_report(
    name: str, look: Verification, problems: list[Problem], began: float
) -> VerifyReport:
    counts: dict[str, int] = {}
    for problem in problems:
        counts[problem.kind] = counts.get(problem.kind, 0) + 1
    return VerifyReport(
        backend=name,
        complete=look.complete,
        frames=look.frames,
        bytes=look.nbytes,
        vanished=look.vanished,
        counts=counts,
        problems=problems,
        deleted=look.deleted,
        seconds=round(time.monotonic() - began, 3),
    )
