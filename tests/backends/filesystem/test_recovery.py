"""The index is worth a rebuild at most: lost, damaged, or wrong about the disk, it heals."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import threading
import time
from typing import Any

import pytest

from kvstrata.backends import HealthState
from kvstrata.backends.filesystem import files, index, reconcile
from kvstrata.backends.filesystem.owners import boot_id
from kvstrata.boundary import Outcome
from kvstrata.errors import StorageBusyError

LOADED, STORED, EXISTS = Outcome.LOADED, Outcome.STORED, Outcome.EXISTS
MISSING, FULL, PARENT_MISSING = Outcome.MISSING, Outcome.FULL, Outcome.PARENT_MISSING
FRAME = 4096 + 8192


def outcomes(results: list[Any]) -> list[Outcome]:
    return [result.outcome for result in results]


def check_agrees(disk: Any, backend: Any) -> None:
    backend.check_integrity()
    assert backend.usage().used_bytes == disk.used_bytes()
    assert backend.usage().objects == len(disk.frames())


def test_work_goes_on_during_a_rebuild(disk, make_pages) -> None:
    """`open` does not wait for the scan; lookups and loads ask the disk; stores without a bound
    work, with one they wait; health says so."""
    backend = disk.open()
    for c in "abcdef":
        backend.write(make_pages(chain=c).writes(0, 8))
    backend.close(5)
    for path in disk.root.glob("index-v1-*"):
        path.unlink()
    scanning = threading.Event()
    real = disk.backend()
    hold = threading.Event()

    class Held:
        """The module `os`; listing a folder of frames waits."""

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def open(self, path: str, flags: int, *args: Any, **options: Any) -> int:
            if threading.current_thread().name == "kvstrata-scan":
                scanning.set()
                assert hold.wait(20)
            return os.open(path, flags, *args, **options)

    assert real is not None
    free, bounded = disk.open(Held(), wait=False), disk.open(Held(), False, max_bytes="1GiB")
    assert scanning.wait(20)
    pages, new = make_pages(chain="c"), make_pages(chain="new")
    for backend in (free, bounded):
        assert backend.exists(pages.names(0, 9)) == [True] * 8 + [False]
        assert outcomes(backend.read(pages.reads(0, 9))) == [LOADED] * 8 + [MISSING]
        assert backend.health().state is HealthState.DEGRADED
    assert outcomes(free.write(pages.writes(7, 10))) == [EXISTS, STORED, STORED]
    assert outcomes(bounded.write(new.writes(0, 2))) == [FULL, PARENT_MISSING]
    hold.set()
    assert free.wait_for_scan(20)
    assert bounded.wait_for_scan(20)
    assert outcomes(bounded.write(new.writes(0, 2))) == [STORED] * 2
    assert bounded.health().state is HealthState.OK
    check_agrees(disk, bounded)


def test_power_loss(disk, make_pages) -> None:
    """B004: the machine stopped while the index was in use, which is never synced: it is not
    trusted, but rebuilt. A process that died alone costs no rebuild."""
    backend, pages = disk.open(), make_pages()
    backend.write(pages.writes(0, 4))
    backend.close(5)
    for boot, generation in ((b"another boot", 2), (boot_id(), 2), (b"", 2)):
        dead = disk.root / "owners" / "dead"
        dead.mkdir()
        (dead / "lock").write_bytes(boot)
        backend = disk.open()
        assert backend.index.generation == generation
        assert backend.usage().objects == 4
        assert not dead.exists()
        check_agrees(disk, backend)
        backend.close(5)


def test_a_folder_that_cannot_be_listed(disk, make_pages, faulty) -> None:
    """The scan goes on with the others."""
    backend, pages = disk.open(), make_pages()
    backend.write(pages.writes(0, 6))
    backend.close(5)
    for path in disk.root.glob("index-v1-*"):
        path.unlink()
    folder = str(disk.path(pages.name(3)).parent.relative_to(disk.root))

    class Unlisted:
        """The module `os`; one folder is closed to this user."""

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def open(self, path: str, *args: Any, **options: Any) -> int:
            if path == folder:
                raise PermissionError(13, "Permission denied")
            return os.open(path, *args, **options)

    backend = disk.open(Unlisted(), max_bytes="1GiB")
    assert backend.usage().objects == 5
    assert outcomes(backend.write(pages.writes(6, 7))) == [STORED]
    backend.check_integrity()


def test_a_busy_database(disk, make_pages, monkeypatch) -> None:
    """Another process holds the index: a store that cannot reserve is refused, one that cannot
    settle is good all the same and is made up for; loads do not care."""
    monkeypatch.setattr("kvstrata.backends.filesystem.database._BUSY_WAIT_S", 0.05)
    backend, pages = disk.open(), make_pages()
    backend.write(pages.writes(0, 2))
    [path] = disk.root.glob("index-v1-*.sqlite")
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    publish = backend.files.publish

    def lock_then_publish(*args: Any) -> Outcome:
        if not other.in_transaction:
            other.execute("BEGIN IMMEDIATE")
        return publish(*args)

    backend.files.publish = lock_then_publish
    assert outcomes(backend.write(pages.writes(2, 4))) == [STORED] * 2
    assert outcomes(backend.read(pages.reads(0, 4))) == [LOADED] * 4
    with pytest.raises(Exception, match="SQLITE_BUSY"):
        backend.write(pages.writes(4, 5))
    other.execute("ROLLBACK")
    other.close()
    backend.files.publish = publish
    check_agrees(disk, backend)
    assert outcomes(backend.write(pages.writes(4, 5))) == [STORED]


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (index.StoreIndex, "set_complete"),
        (index.StoreIndex, "reconcile"),
        (files.FrameFiles, "shard"),
        (files.FrameFiles, "read"),
        (reconcile, "try_lock"),
    ],
)
@pytest.mark.parametrize(
    "error",
    [
        StorageBusyError("SQLITE_BUSY: database is locked"),
        OSError(errno.EMFILE, "Too many open files"),
        KeyError("a bug"),
    ],
)
def test_a_scan_that_fails(disk, make_pages, monkeypatch, where, name, error) -> None:
    """It is repeated until one does not fail: without a complete index nothing may be stored under
    a limit."""
    monkeypatch.setattr(reconcile, "_RETRY_S", 0.001)
    backend, pages = disk.open(), make_pages()
    backend.write(pages.writes(0, 2))
    backend.close(5)
    for path in disk.root.glob("index-v1-*"):
        path.unlink()
    failures, real = [error] * 3, getattr(where, name)

    def called(*args: Any) -> Any:
        if failures and threading.current_thread().name == "kvstrata-scan":
            raise failures.pop()
        return real(*args)

    monkeypatch.setattr(where, name, called)
    backend = disk.open(max_bytes=4 * FRAME)
    assert not failures
    assert backend.health().state is HealthState.OK
    assert outcomes(backend.write(pages.writes(2, 3))) == [STORED]
    check_agrees(disk, backend)


def test_close_does_not_wait_for_the_next_scan(disk, monkeypatch) -> None:
    def fail(*_: Any) -> None:
        failed.set()
        raise StorageBusyError("for ever")

    failed = threading.Event()
    monkeypatch.setattr(reconcile, "_RETRY_S", 1000.0)
    monkeypatch.setattr(index.StoreIndex, "set_complete", fail)
    backend = disk.open(wait=False)
    assert failed.wait(20)
    started = time.monotonic()
    backend.close(20)
    assert time.monotonic() - started < 10
    assert backend._reconciler is None


# ── changes from outside ─────────────────────────────────────────────────────────────────────────


def test_files_removed_from_outside(disk, make_pages) -> None:
    """B011, B051: `exists` asks the disk; a load that finds nothing heals the index; the page is
    stored anew, and a page is not stored under a parent that has gone."""
    backend, pages = disk.open(), make_pages()
    backend.write(pages.writes(0, 6))
    disk.path(pages.name(2)).unlink()
    disk.path(pages.name(5)).unlink()
    assert backend.exists(pages.names(0, 6)) == [True, True, False, True, True, False]
    assert outcomes(backend.read(pages.reads(0, 6)))[2] is MISSING
    backend.index.flush()
    check_agrees(disk, backend)
    assert outcomes(backend.write(pages.writes(5, 7))) == [STORED] * 2
    disk.path(pages.name(6)).unlink()
    assert outcomes(backend.write(pages.writes(7, 8))) == [PARENT_MISSING]
    assert outcomes(backend.write(pages.writes(0, 8))) == [
        EXISTS, EXISTS, STORED, EXISTS, EXISTS, EXISTS, STORED, STORED,
    ]  # fmt: skip
    check_agrees(disk, backend)


def test_a_folder_removed_from_outside(disk, make_pages) -> None:
    """`rm -r` of everything under a running backend."""
    backend, pages = disk.open(), make_pages()
    backend.write(pages.writes(0, 4))
    shutil.rmtree(disk.root / "objects")
    assert backend.exists(pages.names(0, 4)) == [False] * 4
    assert outcomes(backend.write(pages.writes(0, 4))) == [STORED] * 4
    check_agrees(disk, backend)


def test_files_that_came_from_outside(disk, make_pages, tmp_path, make_disk) -> None:
    """A root that is copied frame by frame into another is found by the next start; so are frames
    that were removed, and what changed its length."""
    source, pages = make_disk(tmp_path / "source"), make_pages()
    other = source.open()
    other.write(pages.writes(0, 6))
    other.close(5)
    backend, own = disk.open(), make_pages(chain="own")
    backend.write(own.writes(0, 4))
    backend.close(5)
    for path in source.frames():
        target = disk.root / path.relative_to(source.root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    disk.path(own.name(3)).unlink()
    os.truncate(disk.path(own.name(2)), 100)
    backend = disk.open()
    check_agrees(disk, backend)
    assert backend.usage().objects == 9
    assert outcomes(backend.write(pages.writes(5, 8))) == [EXISTS, STORED, STORED]
    backend.close(5)
    backend = disk.open(max_bytes=5 * FRAME)
    there = backend.exists(pages.names(0, 8))
    assert there == sorted(there, reverse=True)
    check_agrees(disk, backend)


def test_strange_files_are_left_alone(disk, make_pages) -> None:
    """What does not have the name of a frame is neither counted nor touched; what has, and is
    none, takes room, is evicted in its turn, and is a corrupt page for who loads it."""
    backend, pages = disk.open(), make_pages()
    backend.write(pages.writes(0, 2))
    backend.close(5)
    folder = disk.path(pages.name(0)).parent
    (folder / "notes.txt").write_text("mine")
    (disk.root / "objects" / "readme").write_text("mine")
    (disk.root / "owners" / "file").write_text("mine")
    disk.path(pages.name(7)).parent.mkdir(exist_ok=True)
    disk.path(pages.name(7)).write_bytes(b"junk")
    os.utime(disk.path(pages.name(7)), (1, 1))
    backend = disk.open()
    backend.check_integrity()
    assert backend.usage().objects == 3
    backend.close(5)
    backend = disk.open(max_bytes=2 * FRAME)
    assert backend.exists(pages.names(0, 2)) == [True] * 2
    assert (folder / "notes.txt").read_text() == "mine"
    assert (disk.root / "objects" / "readme").read_text() == "mine"
    assert backend.usage().objects == 2
    assert disk.evicted == [pages.name(7)]


def test_forged_parents(disk, make_pages) -> None:
    """Headers that name each other as parents do not make frames that can never be evicted."""
    from kvstrata.backends.frame import HEADER_BYTES, encode_header

    pages = make_pages()
    for i, parent in ((0, 1), (1, 0), (2, 2)):
        header = memoryview(bytearray(HEADER_BYTES))
        encode_header(header, pages.name(i), pages.name(parent), 5, memoryview(b"x"))
        path = disk.path(pages.name(i))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(header) + b"x")
    backend = disk.open(max_bytes=3 * FRAME)
    check_agrees(disk, backend)
    assert backend.usage().objects == 3
    assert outcomes(backend.write(make_pages(chain="b").writes(0, 3))) == [STORED] * 3
    assert backend.exists(pages.names(0, 3)) == [False] * 3
    check_agrees(disk, backend)


def test_deleted_in_the_middle(disk, make_pages) -> None:
    """A corrupt page is deleted: what builds on it stays, keeps its place, and the page itself is
    stored anew between them."""
    backend, pages = disk.open(), make_pages()
    backend.write(pages.writes(0, 5))
    assert backend.delete([pages.name(2)]) == [True]
    check_agrees(disk, backend)
    assert outcomes(backend.write(pages.writes(2, 3))) == [STORED]
    backend.close(5)
    backend = disk.open(max_bytes=3 * FRAME)
    assert backend.exists(pages.names(0, 5)) == [True] * 3 + [False] * 2
    check_agrees(disk, backend)
