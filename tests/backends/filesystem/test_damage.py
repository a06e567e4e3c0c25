"""Whatever happens to the file of the index, it is rebuilt from the frames, and nothing waits."""

from __future__ import annotations

import errno
import os
import sqlite3
from typing import Any

import pytest

from kvstrata.backends.filesystem import booking, index, owners
from kvstrata.backends.filesystem import database as database_module
from kvstrata.backends.filesystem.owners import boot_id
from kvstrata.boundary import Outcome
from kvstrata.errors import StorageError

LOADED, STORED, EXISTS = Outcome.LOADED, Outcome.STORED, Outcome.EXISTS
MISSING, FULL, PARENT_MISSING = Outcome.MISSING, Outcome.FULL, Outcome.PARENT_MISSING
FRAME = 4096 + 8192


def outcomes(results: list[Any]) -> list[Outcome]:
    return [result.outcome for result in results]


def check_agrees(disk: Any, backend: Any) -> None:
    backend.check_integrity()
    assert backend.usage().used_bytes == disk.used_bytes()
    assert backend.usage().objects == len(disk.frames())


def database(disk: Any) -> Any:
    [path] = disk.root.glob("index-v1-*.sqlite")
    return path


def garble(path: Any) -> None:
    with path.open("r+b") as file:
        file.write(b"garbage!" * 512)


def spoil_pages(path: Any, first: int, filler: bytes) -> None:
    """Other bytes in place of all pages of 4 KiB from `first` (counted from 0) on."""
    pages = path.stat().st_size // 4096
    assert pages > first
    with path.open("r+b") as file:
        file.seek(4096 * first)
        file.write(filler * ((pages - first) * 4096 // len(filler)))


def run_sql(path: Any, sql: str) -> None:
    connection = sqlite3.connect(path)
    connection.executescript(sql)
    connection.close()


DAMAGE = {
    "removed": lambda path: [p.unlink() for p in path.parent.glob("index-v1-*")],
    "emptied": lambda path: path.write_bytes(b""),
    "another file": lambda path: path.write_bytes(b"#!/bin/sh\n" * 1000),
    "first page": garble,
}
DAMAGE_WHILE_CLOSED = {
    **DAMAGE,
    "pages behind the first": lambda path: spoil_pages(path, 1, b"garbage!"),
    "zeros behind the first": lambda path: spoil_pages(path, 1, bytes(8)),
    "cut": lambda path: os.truncate(path, 4096),
    "cut within a page": lambda path: os.truncate(path, 3 * 4096 + 77),
    "no sums": lambda path: run_sql(path, "DELETE FROM meta"),
    "no table": lambda path: run_sql(path, "DROP TABLE batches"),
}


# ── the database ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("damage", DAMAGE_WHILE_CLOSED)
def test_damaged_while_closed(disk, make_pages, monkeypatch, damage) -> None:
    """B094, B095: rebuilt from the frames alone, parents and depths too."""
    monkeypatch.setattr(owners, "LOCK_WAIT_S", 0.0)  # nobody else holds the lock
    backend = disk.open()
    chains = [make_pages(chain=c) for c in "abc"]
    for chain in chains:
        backend.write(chain.writes(0, 4))
    backend.close(5)
    DAMAGE_WHILE_CLOSED[damage](database(disk))
    backend = disk.open()
    check_agrees(disk, backend)
    assert backend.usage().objects == 12
    backend.close(5)
    backend = disk.open(max_bytes=6 * FRAME)
    assert backend.usage().objects == 6
    for chain in chains:
        there = backend.exists(chain.names(0, 4))
        assert there == sorted(there, reverse=True), "a child without its parent"
    check_agrees(disk, backend)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_while_in_use(disk, make_pages, damage) -> None:
    """By two backends at once: both move to the same new index, nothing fails but for room that is
    not known yet, and both agree with the disk in the end."""
    one, two, pages = disk.open(), disk.open(), make_pages()
    assert outcomes(one.write(pages.writes(0, 4))) == [STORED] * 4
    one.index.flush()
    path = database(disk)
    DAMAGE[damage](path)
    wal = path.with_name(path.name + "-wal")
    if wal.exists():
        os.truncate(wal, 0)
    for i, backend in enumerate((one, two, one, two)):
        found = outcomes(backend.write(pages.writes(4 + i, 5 + i)))
        assert found == [STORED]
    assert one.wait_for_scan(20)
    assert two.wait_for_scan(20)
    assert one.index.generation == two.index.generation > 1
    check_agrees(disk, one)
    check_agrees(disk, two)
    assert one.usage().objects == 8


@pytest.mark.parametrize("damage", ["garbage", "manifest", "pin"])
def test_damage_met_under_the_lock_of_the_root(disk, make_pages, monkeypatch, damage) -> None:
    """What finds the damage is the burial of a dead process, at the start and for a store that
    finds no room. Neither waits for the lock that it holds itself."""
    monkeypatch.setattr(owners, "LOCK_WAIT_S", 0.0)
    backend, pages = disk.open(max_bytes=4 * FRAME), make_pages()
    backend.write(pages.writes(0, 4))
    before = backend.index.generation
    (disk.root / "owners" / "dead").mkdir()
    (disk.root / "owners" / "dead" / "lock").write_bytes(boot_id())
    backend.index.flush()
    path = database(disk)
    if damage == "garbage":
        backend.close(5)
        spoil_pages(path, 1, b"garbage!")
        backend = disk.open(max_bytes=4 * FRAME)
    else:
        bad = b"garbage" if damage == "manifest" else forged_manifest(pages)
        connection = sqlite3.connect(path)
        connection.execute("INSERT INTO batches VALUES (99, 'dead', 0, ?)", (bad,))
        connection.commit()
        connection.close()
        with backend._database.try_hold_root() as is_held:
            assert is_held
        assert backend._bury_dead_now(backend.files, backend.index)
    assert backend.index.generation == before + 1
    assert backend.wait_for_scan(20)
    assert not (disk.root / "owners" / "dead").exists()
    assert backend.usage().objects == 4
    check_agrees(disk, backend)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["_create", "_configure"])
def test_a_new_generation_that_fails_once(disk, make_pages, monkeypatch, code, call) -> None:
    """A store fails with the reason; reads are good meanwhile; the next store finds all well."""
    backend, pages = disk.open(), make_pages()
    backend.write(pages.writes(0, 2))
    failures = [code] * 2
    monkeypatch.setattr(index, "MAX_TOUCHED", 1)  # every read flushes

    def fails(real: Any) -> Any:
        def called(*args: Any) -> Any:
            if failures:
                if call == "_create":
                    raise OSError(failures.pop(), "no")
                failures.pop()
                raise sqlite3.OperationalError("unable to open database file")
            return real(*args)

        return called

    holder = database_module.Database if call == "_create" else database_module
    monkeypatch.setattr(holder, call, fails(getattr(holder, call)))
    DAMAGE["removed"](database(disk))
    with pytest.raises(StorageError):
        backend.write(pages.writes(2, 3))
    assert outcomes(backend.read(pages.reads(0, 2))) == [LOADED] * 2
    assert not failures
    assert outcomes(backend.write(pages.writes(2, 3))) == [STORED]
    assert backend.wait_for_scan(20)
    check_agrees(disk, backend)


def test_the_newest_generation_is_damaged_too(disk, make_pages) -> None:
    """Another process made it, and it is damaged before this one moves to it."""
    backend, pages = disk.open(), make_pages()
    backend.write(pages.writes(0, 2))
    (disk.root / "index-v1-2.sqlite").write_bytes(b"#!/bin/sh\n" * 1000)
    assert outcomes(backend.write(pages.writes(2, 3))) == [STORED]
    assert backend.index.generation == 3
    assert backend.wait_for_scan(20)
    check_agrees(disk, backend)


def forged_manifest(pages: Any) -> bytes:
    """Of a batch whose parent has no row."""
    name, parent = pages.name(9), pages.name(8)
    entry = booking.Entry.of(booking.NewPage(name, parent, 9, 4096))
    return booking.encode_manifest([entry])
