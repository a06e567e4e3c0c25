"""What holds between any two transactions of the index."""

from __future__ import annotations

from collections import Counter

from kvstrata.backends.filesystem.booking import decode_manifest
from kvstrata.backends.filesystem.ledger import Ledger, Row, all_rows


def check_ledger(ledger: Ledger) -> None:
    """Raises AssertionError unless sums, counts and links agree. Reads the whole index."""
    ledger.flush()
    rows = {row.id: row for row in all_rows(ledger.connection)}
    present = [row for row in rows.values() if row.present]
    assert ledger.used == sum(row.cost for row in present)
    assert ledger.objects == len(present)
    children = Counter(row.parent for row in rows.values() if row.parent is not None)
    by_name = {(row.ns, row.key): row for row in rows.values()}
    pins = _pins(ledger, by_name)
    for row in rows.values():
        assert row.children == children.get(row.id, 0), "children are counted wrong"
        assert row.pins == pins.get(row.id, 0), "pins are counted wrong"
        assert row.present or row.children or row.pins, "a row for nothing"
        assert row.present or row.cost == 0
        if row.parent is not None:
            assert rows[row.parent].depth == row.depth - 1
            assert rows[row.parent].ns == row.ns
    costs = ledger.connection.execute("SELECT coalesce(sum(cost), 0) FROM batches").fetchone()
    assert ledger.inflight == costs[0]


def _pins(ledger: Ledger, by_name: dict[tuple[int, bytes], Row]) -> Counter[int]:
    """How many batches need each row as a parent."""
    pins: Counter[int] = Counter()
    for (manifest,) in ledger.connection.execute("SELECT manifest FROM batches").fetchall():
        entries = decode_manifest(manifest)
        ids = ledger.namespace_ids(entry.namespace for entry in entries)
        own = {(entry.namespace, entry.key) for entry in entries}
        outer = {
            (ids[entry.namespace], entry.parent)
            for entry in entries
            if entry.parent is not None and (entry.namespace, entry.parent) not in own
        }
        pins.update(by_name[name].id for name in outer)
    return pins
