"""How pages get room and rows: the steps of a write, each within one transaction of the index."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from kvstrata.backends.base import ObjectId
from kvstrata.backends.filesystem.ledger import Ledger, Name
from kvstrata.backends.filesystem.oserrors import IndexDamage, describe
from kvstrata.boundary import Outcome

logger = logging.getLogger(__name__)


class FrameStore(Protocol):
    """What the index asks of the files."""

    def exists(self, name: ObjectId) -> bool: ...

    def cost_on_disk(self, name: ObjectId) -> int | None:
        """None: it is not there."""
        ...

    def unlink(self, name: ObjectId) -> bool:
        """True if it was there. Raises OSError if it cannot be removed."""
        ...


class NewPage(NamedTuple):
    """A page that wants room, or was found on disk."""

    object: ObjectId
    parent: ObjectId | None
    depth: int
    cost: int


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """A page in the manifest of a batch."""

    namespace: bytes
    key: bytes
    parent: bytes | None
    depth: int
    cost: int

    @classmethod
    def of(cls, page: NewPage) -> Entry:
        parent = None if page.parent is None else page.parent.key
        return cls(page.object.namespace, page.object.key, parent, page.depth, page.cost)

    @property
    def object(self) -> ObjectId:
        return ObjectId(self.namespace, self.key)


Announced = tuple[bytes, bytes]
"""Namespace and key of a frame: a third of the time that `ObjectId` takes in a set."""

encode_manifest = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Entry]).decode


def decode_manifest(manifest: bytes) -> list[Entry]:
    try:
        return _decode(manifest)
    except (msgspec.MsgspecError, TypeError) as error:
        raise IndexDamage(f"the manifest of a batch: {error}") from error


class Missing(NamedTuple):
    """Bytes that have to go, or (from `evict`) that went."""

    bound: int
    """Of the sum that `max_bytes` bounds."""
    disk: int
    """Of the room on the file system: a frame whose file had vanished before gives none."""


@dataclass(slots=True)
class Limits:
    """What a reservation has to keep."""

    max_bytes: int = 0
    """0: none."""
    free_bytes: Callable[[], int] | None = None
    """What may still be written on the file system, reservations not deducted. None: any."""
    extra_bytes: int = 0
    """Evict at least so much: the disk was full although the sums said otherwise."""

    def missing(self, ledger: Ledger, need: int) -> Missing:
        """By how much `need` bytes do not fit (0 or less: they do)."""
        bound = ledger.used + ledger.inflight + need - self.max_bytes if self.max_bytes else 0
        disk = 0 if self.free_bytes is None else ledger.inflight + need - self.free_bytes()
        return Missing(bound, disk)


@dataclass(slots=True)
class Reservation:
    """Room for pages that may be written now, until it is settled."""

    outcomes: list[Outcome]
    """One a page: STORED (it may be written), EXISTS, PARENT_MISSING, FULL."""
    evicted: list[ObjectId] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    """The pages that may be written, in order."""
    generation: int = 0
    batch: int = 0
    """0: nothing is reserved."""
    removals: int = 0


def rows_of(ledger: Ledger, names: Sequence[ObjectId]) -> list[Name]:
    """The names of their rows, which `ledger.find` knows from now on."""
    ids = ledger.namespace_ids(name.namespace for name in names)
    rows = [(ids[name.namespace], name.key) for name in names]
    ledger.load(rows)
    return rows


# ── reserve ──────────────────────────────────────────────────────────────────────────────────────


def judge(
    ledger: Ledger, files: FrameStore, pages: Sequence[NewPage], outcomes: list[Outcome]
) -> tuple[list[NewPage], set[int]]:
    """The pages that may be written if there is room, and the rows that must stay for it.

    Fills `outcomes`. A page whose parent is neither on disk nor in this batch is refused.
    """
    own = rows_of(ledger, [page.object for page in pages])
    parents = [page.parent for page in pages if page.parent is not None]
    parent_rows = dict(zip(parents, rows_of(ledger, parents), strict=True))
    new: list[NewPage] = []
    kept: set[int] = set()
    judged: dict[ObjectId, Outcome] = {}
    for page, name in zip(pages, own, strict=True):
        outcome, parent = Outcome.STORED, page.parent
        if _is_there(ledger, files, page.object, name, look=not ledger.complete):
            outcome = Outcome.EXISTS
            kept.update(_row_ids(ledger, name))
        elif parent is not None:
            before = judged.get(parent)
            if before is None:
                parent_row = parent_rows[parent]
                there = _is_there(ledger, files, parent, parent_row, look=True)
                before = judged[parent] = Outcome.EXISTS if there else Outcome.MISSING
                kept.update(_row_ids(ledger, parent_row))
            if not before.is_stored:
                outcome = Outcome.PARENT_MISSING
        if outcome is Outcome.STORED:
            new.append(page)
        judged[page.object] = outcome
        outcomes.append(outcome)
    return new, kept


def cut(pages: Sequence[NewPage], outcomes: list[Outcome], room: int) -> list[NewPage]:
    """The first of the pages that may be written and fit into `room`; the others do not."""
    taken: list[NewPage] = []
    refused: set[ObjectId] = set()
    for i, page in enumerate(pages):
        if outcomes[i] is Outcome.STORED:
            if page.parent in refused:
                outcomes[i] = Outcome.PARENT_MISSING
            elif refused or page.cost > room:
                outcomes[i] = Outcome.FULL
            else:
                room -= page.cost
                taken.append(page)
                continue
            refused.add(page.object)
    return taken


def take(ledger: Ledger, owner: str, new: Sequence[NewPage], reservation: Reservation) -> None:
    """Reserve the room, and keep the parents from being evicted meanwhile."""
    reservation.entries = [Entry.of(page) for page in new]
    reservation.batch = ledger.new_id()
    cost = sum(page.cost for page in new)
    ledger.inflight += cost
    ledger.connection.execute(
        "INSERT INTO batches(id, owner, cost, manifest) VALUES (?, ?, ?, ?)",
        (reservation.batch, owner, cost, encode_manifest(reservation.entries)),
    )
    for name, depth in _outer_parents(ledger, reservation.entries).items():
        row = ledger.find(name) or ledger.add(name, None, depth)
        row.pins += 1
        ledger.changed(row)
    reservation.removals = ledger.removals


def evict(
    ledger: Ledger, files: FrameStore, need: Missing, kept: set[int]
) -> tuple[list[ObjectId], Missing]:
    """Remove leaves, the least recently used first, until `need` is met or none are left; which,
    and what that freed.

    What a batch announces stays until it is settled, also where another one has stored it: the
    next page of the batch may be on its way to become its child, of which no row tells yet. While
    not all frames have their rows, nothing goes: what looks like a leaf may have children.
    """
    gone: list[ObjectId] = []
    fingerprints: dict[int, bytes] = {}
    coming: set[Announced] | None = None
    bound = disk = 0
    for row in ledger.leaves() if ledger.complete else ():
        if bound >= need.bound and disk >= need.disk:
            break
        if row.id in kept:
            continue
        coming = announced(ledger) if coming is None else coming
        namespace = fingerprints.get(row.ns)
        if namespace is None:
            namespace = fingerprints[row.ns] = ledger.fingerprint(row.ns)
        if (namespace, row.key) in coming:
            continue
        name = ObjectId(namespace, row.key)
        try:
            was_there = files.unlink(name)
        except OSError as error:
            logger.warning("a frame cannot be evicted: %s", describe(error, name.name))
            continue
        ledger.unlinked.append(name)
        bound += row.cost
        disk += row.cost if was_there else 0
        ledger.vanish(row)
        gone.append(name)
    return gone, Missing(bound, disk)


# ── settle ───────────────────────────────────────────────────────────────────────────────────────


def end_batch(
    ledger: Ledger,
    files: FrameStore,
    reservation: Reservation,
    stored: Sequence[bool],
    generation: int,
) -> None:
    """Give the stored entries their rows; the reservation is gone. Twice is as good as once."""
    entries = reservation.entries
    same = reservation.generation == generation
    if same:
        query = "DELETE FROM batches WHERE id=? RETURNING cost"
        found = ledger.connection.execute(query, (reservation.batch,)).fetchall()
        if not found:
            return
        ledger.inflight -= found[0][0]
    there = [entry for entry, is_stored in zip(entries, stored, strict=True) if is_stored]
    if not same or reservation.removals != ledger.removals:
        there = [entry for entry in there if files.exists(entry.object)]
    first = ledger.next_stamp(len(there) or 1)
    enter(ledger, there, range(first, first + len(there)))
    if same:
        outer = _outer_parents(ledger, entries)
        ledger.load(outer)
        for name in outer:
            row = ledger.find(name)
            if row is None:
                raise IndexDamage("a pinned row is gone")
            row.pins -= 1
            ledger.changed(row)
            ledger.prune(row)


def enter(ledger: Ledger, entries: Sequence[Entry], used: Iterable[int]) -> None:
    """Frames that are on disk get rows, and are linked to their parents'."""
    own = rows_of(ledger, [entry.object for entry in entries])
    ledger.load(
        (ns, entry.parent)
        for (ns, _), entry in zip(own, entries, strict=True)
        if entry.parent is not None and ledger.find((ns, entry.parent)) is None
    )
    for name, entry, stamp in zip(own, entries, used, strict=True):
        row, parent = ledger.find(name), None
        if entry.parent not in (None, entry.key):
            parent_name = (name[0], entry.parent)
            parent = ledger.find(parent_name) or ledger.add(parent_name, None, entry.depth - 1)
            if parent.depth != entry.depth - 1:  # a forged header must not close a circle
                parent = None
        if row is None:
            row = ledger.add(name, parent, entry.depth)
        elif row.parent is None and parent is not None:
            ledger.set_parent(row, parent)
        ledger.appear(row, entry.cost, max(row.used, stamp) if row.present else stamp)


def drop_vanished(ledger: Ledger, files: FrameStore, names: Sequence[ObjectId]) -> int:
    """Frames that are not on disk any more lose their rows; how many did."""
    dropped = 0
    if names:
        ledger.removals += 1
        for name, row_name in zip(names, rows_of(ledger, names), strict=True):
            row = ledger.find(row_name)
            if row is not None and row.present and not files.exists(name):
                ledger.vanish(row)
                dropped += 1
    return dropped


def announced(ledger: Ledger) -> set[Announced]:
    """Frames that some process is publishing now."""
    manifests = ledger.connection.execute("SELECT manifest FROM batches").fetchall()
    return {(e.namespace, e.key) for (manifest,) in manifests for e in decode_manifest(manifest)}


# ── inside ───────────────────────────────────────────────────────────────────────────────────────


def _is_there(
    ledger: Ledger, files: FrameStore, name: ObjectId, row_name: Name, look: bool
) -> bool:
    """Whether the frame is on disk. One without a row is looked for only if `look` is set; a row
    whose file has vanished is mended."""
    row = ledger.find(row_name)
    believed = row is not None and bool(row.present)
    if not (believed or look):
        return False
    there = files.exists(name)
    if row is not None and believed and not there:
        ledger.removals += 1
        ledger.vanish(row)
    return there


def _row_ids(ledger: Ledger, name: Name) -> list[int]:
    row = ledger.find(name)
    return [] if row is None else [row.id]


def _outer_parents(ledger: Ledger, entries: Sequence[Entry]) -> dict[Name, int]:
    """Parents that are not entries themselves, by the names of their rows, with their depth."""
    ids = ledger.namespace_ids(entry.namespace for entry in entries)
    own = {(entry.namespace, entry.key) for entry in entries}
    return {
        (ids[entry.namespace], entry.parent): entry.depth - 1
        for entry in entries
        if entry.parent is not None and (entry.namespace, entry.parent) not in own
    }
