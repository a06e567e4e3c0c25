"""Room: bounds that hold at every moment, eviction in the right order, full disks."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from kvstrata.backends import BackendContext
from kvstrata.backends.filesystem import FilesystemBackend, FilesystemOptions
from kvstrata.backends.filesystem import ledger as ledger_module
from kvstrata.backends.filesystem.booking import Limits
from kvstrata.backends.memory import MemoryBackend, MemoryOptions
from kvstrata.boundary import Outcome
from kvstrata.errors import StorageFullError

LOADED, STORED, EXISTS = Outcome.LOADED, Outcome.STORED, Outcome.EXISTS
MISSING, FULL, PARENT_MISSING = Outcome.MISSING, Outcome.FULL, Outcome.PARENT_MISSING

FRAME = 4096 + 8192
"""What a frame of `Pages` takes on disk."""


def outcomes(results: list[Any]) -> list[Outcome]:
    return [result.outcome for result in results]


# ── max_bytes ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["memory", "filesystem"])
def test_never_above_the_bound(tmp_path: Path, make_pages, make_disk, kind) -> None:
    """B038: a bound of ten pages and a hundred written: at no time above it, work in flight
    included; what was evicted is gone from the index and from the disk, and is told."""
    evicted: list[Any] = []
    disk, usages, on_disk = make_disk(tmp_path), list[int](), list[int]()

    class Watching:
        """The module `os`; looks at the disk whenever a frame has got its name."""

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def link(self, *args: Any, **options: Any) -> None:
            os.link(*args, **options)
            on_disk.append(disk.used_bytes())

    if kind == "memory":
        backend: Any = MemoryBackend(MemoryOptions(max_bytes=10 * FRAME))
    else:
        options = FilesystemOptions(path=str(tmp_path), max_bytes=10 * FRAME, min_free_bytes=0)
        backend = FilesystemBackend(options, Watching())
    backend.open(BackendContext("x", on_evicted=evicted.extend))
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            usages.append(backend.usage().used_bytes)

    watcher = threading.Thread(target=watch)
    watcher.start()
    written = []
    for chain in range(20):
        pages = make_pages(chain=str(chain))
        assert outcomes(backend.write(pages.writes(0, 5))) == [STORED] * 5
        written += pages.names(0, 5)
        usages.append(backend.usage().used_bytes)
    stop.set()
    watcher.join(20)
    assert 5 * FRAME <= max(usages) <= 10 * FRAME
    assert kind == "memory" or 5 * FRAME <= max(on_disk) <= 10 * FRAME
    assert len(evicted) == len(set(evicted)) == 90
    there = backend.exists(written)
    assert [name for name, is_there in zip(written, there, strict=True) if not is_there] == [
        name for name in written if name in set(evicted)
    ]
    assert sum(there) == 10
    assert backend.usage().objects == 10
    backend.check_integrity()
    backend.close(5)


def test_least_recently_used_leaves_first(disk, make_pages) -> None:
    """Children before parents; the chain that was read last stays."""
    backend = disk.open(max_bytes=9 * FRAME)
    chains = [make_pages(chain=c) for c in "abc"]
    for chain in chains:
        backend.write(chain.writes(0, 3))
    assert outcomes(backend.read(chains[0].reads(0, 3))) == [LOADED] * 3
    assert outcomes(backend.write(make_pages(chain="d").writes(0, 2))) == [STORED] * 2
    assert disk.evicted == [chains[1].name(2), chains[1].name(1)]
    assert outcomes(backend.write(make_pages(chain="e").writes(0, 2))) == [STORED] * 2
    assert disk.evicted[2:] == [chains[1].name(0), chains[2].name(2)]


def test_a_page_that_exists_counts_as_used(disk, make_pages) -> None:
    backend = disk.open(max_bytes=2 * FRAME)
    one, two, three = (make_pages(chain=c) for c in "abc")
    backend.write(one.writes(0, 1))
    backend.write(two.writes(0, 1))
    assert outcomes(backend.write(one.writes(0, 1))) == [EXISTS]
    backend.write(three.writes(0, 1))
    assert disk.evicted == [two.name(0)]


def test_a_batch_does_not_evict_itself(disk, make_pages) -> None:
    """Neither its own pages nor the parents it builds on; what does not fit is FULL, and what
    builds on that is not stored."""
    backend, pages = disk.open(max_bytes=5 * FRAME), make_pages()
    assert outcomes(backend.write(pages.writes(0, 3))) == [STORED] * 3
    results = backend.write(pages.writes(2, 8))
    assert outcomes(results) == [EXISTS, STORED, STORED, FULL, PARENT_MISSING, PARENT_MISSING]
    assert "max_bytes" in results[3].message
    assert disk.evicted == []
    assert backend.exists(pages.names(0, 8)) == [True] * 5 + [False] * 3


def test_two_batches_with_the_same_pages(disk, make_pages) -> None:
    """What another batch has stored first is not evicted from under the page that comes next."""
    pages, others = make_pages(), make_pages(chain="other")
    first = disk.open(max_bytes=10 * FRAME)
    meanwhile: list[list[Outcome]] = []

    class Interrupted:
        """The module `os`; the other process writes before the first and the last page."""

        links = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def link(self, *args: Any, **options: Any) -> None:
            self.links += 1
            if self.links == 2:  # 1: the probe of `open`
                meanwhile.append(outcomes(first.write(pages.writes(0, 3))))
                first.write(make_pages(chain="newer").writes(0, 1))
            elif self.links == 5:
                meanwhile.append(outcomes(first.write(others.writes(0, 4))))
            os.link(*args, **options)

    second = disk.open(Interrupted(), max_bytes=10 * FRAME)
    assert outcomes(second.write(pages.writes(0, 4))) == [EXISTS] * 3 + [STORED]
    assert meanwhile == [[STORED] * 3, [STORED] * 3 + [FULL]]
    assert first.exists(pages.names(0, 4)) == [True] * 4
    newer = make_pages(chain="newer").name(0)
    assert disk.evicted == [newer], "what is announced is older, and does not end the search"
    assert outcomes(first.write(make_pages(chain="third").writes(0, 6))) == [STORED] * 6
    assert disk.evicted[1:] == [others.name(2), others.name(1), others.name(0)]
    first.check_integrity()


def test_an_index_that_is_lost_while_a_batch_is_written(disk, make_pages) -> None:
    """It knows of no batch, so the parents of the next pages may be gone: they are not stored."""
    pages, others = make_pages(), make_pages(chain="other")
    first = disk.open(max_bytes=8 * FRAME)

    class Interrupted:
        """The module `os`; the index is lost, rebuilt and the store filled after two pages."""

        links = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def link(self, *args: Any, **options: Any) -> None:
            os.link(*args, **options)
            self.links += 1
            if self.links == 3:  # 1: the probe of `open`
                for path in disk.root.glob("index-v1-*"):
                    path.unlink()
                assert first.usage()
                assert first.wait_for_scan(20)
                assert outcomes(first.write(others.writes(0, 8))) == [STORED] * 8

    second = disk.open(Interrupted(), max_bytes=8 * FRAME)
    results = second.write(pages.writes(0, 4))
    assert outcomes(results) == [STORED, STORED, Outcome.OVERLOADED, PARENT_MISSING]
    assert "index was lost" in results[2].message
    assert disk.evicted == [pages.name(1), pages.name(0)]
    assert disk.used_bytes() == first.usage().used_bytes == 8 * FRAME
    second.check_integrity()


def test_nothing_is_evicted_while_the_index_is_rebuilt(disk, make_pages, monkeypatch) -> None:
    """What looks like a leaf may have children that were not scanned yet."""
    backend, pages = disk.open(min_free_bytes="1MiB"), make_pages()
    assert outcomes(backend.write(pages.writes(0, 3))) == [STORED] * 3
    monkeypatch.setattr(backend, "_free_bytes", lambda: 0)
    backend.index._run(lambda ledger: setattr(ledger, "complete", 0))
    assert backend.write(make_pages(chain="other").writes(0, 1))[0].outcome is FULL
    assert backend.index.trim(Limits(FRAME), 1 << 30) == []
    assert backend.exists(pages.names(0, 3)) == [True] * 3
    backend.index._run(lambda ledger: setattr(ledger, "complete", 1))
    assert backend.index.trim(Limits(FRAME), 1 << 30) == [pages.name(2), pages.name(1)]


def test_an_eviction_whose_transaction_fails(disk, make_pages, monkeypatch) -> None:
    """Its rows come back, the frames do not: the next one knows."""
    backend = disk.open(max_bytes=2 * FRAME)
    for c in "ab":
        backend.write(make_pages(chain=c).writes(0, 1))
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL
    monkeypatch.setattr(ledger_module.Ledger, "flush", MagicMock(side_effect=full))
    with pytest.raises(StorageFullError):
        backend.write(make_pages(chain="c").writes(0, 1))
    monkeypatch.undo()
    assert disk.used_bytes() == backend.usage().used_bytes == FRAME


def test_clock_that_jumps(disk, make_pages, monkeypatch) -> None:
    """Set back by a day, the clock does not make the newest frame the oldest."""
    backend = disk.open(max_bytes=2 * FRAME)
    one, two, three = (make_pages(chain=c) for c in "abc")
    backend.write(one.writes(0, 1))
    real = time.time_ns
    monkeypatch.setattr(ledger_module.time, "time_ns", lambda: real() - 86400 * 10**9)
    backend.write(two.writes(0, 1))
    backend.write(three.writes(0, 1))
    assert disk.evicted == [one.name(0)]


def test_blocking_stores_make_their_way(disk, make_pages, start_worker) -> None:
    """A tenth of the room that is needed, `on_full = "block"`: no failure, never above it."""
    backend = disk.backend(max_bytes=20 * FRAME, threads=3)
    jobs = start_worker(backend)
    stores = [jobs.store(make_pages(chain=str(i)).stores(0, 10)) for i in range(20)]
    most = 0
    while not all(store.is_done for store in stores):
        most = max(most, backend.usage().used_bytes)
    assert all(store.outcomes() == [STORED] * 10 for store in stores)
    assert most <= 20 * FRAME
    assert jobs.worker.flush(20)
    backend.check_integrity()
    assert backend.usage().used_bytes == disk.used_bytes()


def test_a_job_larger_than_the_store(disk, make_pages, start_worker, clock) -> None:
    """What fits is stored, then it waits, then it gives up: it does not evict its own chain."""
    backend = disk.backend(max_bytes=6 * FRAME, batch_pages=4)
    jobs, pages = start_worker(backend, clock=clock), make_pages()
    store = jobs.store(pages.stores(0, 9), deadline_s=10)
    while not jobs.worker.stats().waiting_for_room_now:
        assert jobs.lookup([pages.name(8)]).count() == 0
    clock.advance(11)
    assert store.outcomes() == [STORED] * 6 + [FULL] + [PARENT_MISSING] * 2


# ── what is there already ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("lost", [False, True])
def test_a_folder_that_is_too_full(disk, make_pages, lost) -> None:
    """B039: twice the limit from an earlier run: trimmed soon after the start, children first, the
    index lost or not; and `open` does not wait for it."""
    backend = disk.open()
    for c in "abcdefghij":
        backend.write(make_pages(chain=c).writes(0, 8))
    backend.close(5)
    if lost:
        for path in disk.root.glob("index-v1-*"):
            path.unlink()
    assert disk.used_bytes() == 80 * FRAME
    backend = disk.open(max_bytes=40 * FRAME)
    assert disk.used_bytes() == backend.usage().used_bytes <= 40 * FRAME
    assert len(disk.evicted) == 40
    backend.check_integrity()
    for c in "abcdefghij":
        there = backend.exists(make_pages(chain=c).names(0, 8))
        assert there == sorted(there, reverse=True), "a child without its parent"


def test_order_of_eviction_survives(disk, make_pages) -> None:
    """B040, B094: usage and the order of use are there after a restart; without the index the
    order is that of the files' times."""
    backend = disk.open(max_bytes=4 * FRAME)
    chains = [make_pages(chain=c) for c in "abcd"]
    for i, chain in enumerate(chains):
        backend.write(chain.writes(0, 1))
        os.utime(disk.path(chain.name(0)), (1000 - i, 1000 - i))
    backend.read(chains[0].reads(0, 1))
    backend.close(5)
    backend = disk.open(max_bytes=4 * FRAME)
    assert backend.usage().used_bytes == 4 * FRAME
    backend.write(make_pages(chain="e").writes(0, 1))
    assert disk.evicted == [chains[1].name(0)]
    backend.close(5)
    for path in disk.root.glob("index-v1-*"):
        path.unlink()
    backend = disk.open(max_bytes=4 * FRAME)
    backend.write(make_pages(chain="f").writes(0, 1))
    assert disk.evicted[1:] == [chains[3].name(0)]


# ── the file system's own room ───────────────────────────────────────────────────────────────────


def test_min_free_bytes(disk, make_pages, monkeypatch) -> None:
    """Frames are evicted to keep so much free; reservations in flight count."""
    backend = disk.open(min_free_bytes="1MiB")
    free = [(1 << 20) + 3 * FRAME]
    monkeypatch.setattr(backend, "_free_bytes", lambda: free[0] - (1 << 20) - disk.used_bytes())
    pages = make_pages()
    assert outcomes(backend.write(pages.writes(0, 3))) == [STORED] * 3
    assert outcomes(backend.write(make_pages(chain="b").writes(0, 1))) == [STORED]
    assert disk.evicted == [pages.name(2)]
    free[0] = 0
    assert outcomes(backend.write(make_pages(chain="c").writes(0, 1))) == [FULL]


def test_more_free_than_there_is(disk, make_pages) -> None:
    """An impossible bound is FULL with a message that says which, not a crash."""
    backend = disk.open(min_free_bytes="4000TiB")
    result = backend.write(make_pages().writes(0, 1))[0]
    assert result.outcome is FULL
    assert "min_free_bytes" in result.message


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Any]:
    """Mounts that end with the test."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / f"mount{len(mounted)}"
        place.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=True)
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.root
@pytest.mark.parametrize("options", ["size=2m", "size=64m,nr_inodes=500"])
def test_a_full_disk(small_tmpfs, make_disk, make_pages, start_worker, options) -> None:
    """B038: blocks or inodes run out for real, with no bound set: FULL, then frames are evicted,
    and the store goes on; no wrong byte, no orphan."""
    disk = make_disk(small_tmpfs(options) / "root")
    backend = disk.backend()
    jobs = start_worker(backend, full_poll_s=0.01, context=disk.context)
    for i in range(100):
        stored = jobs.store(make_pages(chain=str(i)).stores(0, 4), deadline_s=20).outcomes()
        assert set(stored) <= {STORED}, i
    loads = make_pages(chain="99").loads(0, 4)
    assert jobs.load(loads).outcomes() == [LOADED] * 4
    assert disk.evicted
    assert jobs.worker.flush(20)
    backend.check_integrity()
    assert backend.usage().used_bytes == disk.used_bytes()
    assert [path for path in disk.orphans() if path.suffix == ".tmp"] == []


@pytest.mark.root
def test_a_disk_full_of_other_things(small_tmpfs, make_disk, make_pages, start_worker) -> None:
    """Nothing of ours to evict: FULL, with the errno; it works again when there is room."""
    place = small_tmpfs("size=1m")
    disk = make_disk(place / "root")
    jobs = start_worker(disk.backend(), on_full="drop")
    free = os.statvfs(place)
    (place / "other").write_bytes(bytes(free.f_bavail * free.f_frsize))
    result = jobs.store(make_pages().stores(0, 2)).result()
    assert outcomes(list(result.pages)) == [FULL, PARENT_MISSING]
    (place / "other").unlink()
    assert jobs.store(make_pages().stores(0, 2)).outcomes() == [STORED] * 2


@pytest.mark.root
def test_overlay(small_tmpfs, make_disk, make_pages, start_worker) -> None:
    """B027: overlayfs, as in a container."""
    base = small_tmpfs("size=8m")
    for name in ("lower", "upper", "work", "merged"):
        (base / name).mkdir()
    options = f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work"
    made = subprocess.run(
        ["mount", "-t", "overlay", "-o", options, "overlay", base / "merged"], check=False
    )
    root = base / ("merged" if made.returncode == 0 else "lower") / "root"
    disk, pages = make_disk(root), make_pages()
    try:
        jobs = start_worker(disk.backend(max_bytes=8 * FRAME))
        for c in "abc":
            chain = make_pages(chain=c)
            assert jobs.store(chain.stores(0, 4)).outcomes() == [STORED] * 4
            assert jobs.load(chain.loads(0, 4)).outcomes() == [LOADED] * 4
        jobs.worker.close(5)
    finally:
        if made.returncode == 0:
            subprocess.run(["umount", "-l", base / "merged"], check=True)
    assert pages.page_bytes
