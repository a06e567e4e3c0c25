"""The page path: publication in both ways, system calls that fail or do less than asked."""

from __future__ import annotations

import errno
import gc
import os
import threading
from typing import Any

import pytest

from kvstrata.backends import ReadRequest, WriteRequest
from kvstrata.boundary import Outcome
from kvstrata.errors import ConfigError

LOADED, STORED, EXISTS = Outcome.LOADED, Outcome.STORED, Outcome.EXISTS
MISSING, CORRUPT, FULL = Outcome.MISSING, Outcome.CORRUPT, Outcome.FULL
PARENT_MISSING = Outcome.PARENT_MISSING


def outcomes(results: Any) -> list[Outcome]:
    return [result.outcome for result in results]


# ── publication ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("durability", ["none", "data", "full"])
def test_data_before_name(disk, make_pages, faulty, durability) -> None:
    """B004: the bytes are written, and with "data" on the device, before the name is there; with
    "full" the name is on the device before the result is given."""
    backend, pages = disk.open(faulty, durability=durability), make_pages()
    backend.write(pages.writes(0, 1))
    faulty.log.clear()
    assert outcomes(backend.write(pages.writes(1, 2))) == [STORED]
    calls = [name for name, _ in faulty.log if name in ("pwritev", "fdatasync", "link", "fsync")]
    while calls.count("link") > 1:
        calls.remove("link")  # the first one found no folder
    synced = {"none": [], "data": ["fdatasync"], "full": ["fdatasync"]}[durability]
    assert calls[: 2 + len(synced)] == ["pwritev", *synced, "link"]
    folders = calls[2 + len(synced) :]
    assert folders == (["fsync"] * 3 if durability == "full" else [])


def test_data_that_power_loss_took(disk, make_pages, start_worker) -> None:
    """B004: a name whose bytes never reached the device is a counted miss, never a hit."""
    jobs, pages = start_worker(disk.backend()), make_pages()
    jobs.store(pages.stores(0, 3)).result()
    path = disk.path(pages.name(1))
    path.write_bytes(bytes(path.stat().st_size))
    assert jobs.load(pages.loads(0, 3)).outcomes() == [LOADED, CORRUPT, LOADED]
    assert not path.exists()
    assert jobs.store(pages.stores(1, 2)).outcomes() == [STORED]


def test_calls_that_do_less(disk, make_pages, faulty, no_tmpfile) -> None:
    """Short reads and writes are continued, also in the middle of a buffer, and lists longer than
    the system takes."""
    faulty.most_bytes = 1000
    backend, pages = disk.open(faulty), make_pages()
    assert outcomes(backend.write(pages.writes(0, 2))) == [STORED] * 2
    reads = pages.reads(0, 2)
    assert outcomes(backend.read(reads)) == [LOADED] * 2
    for i, read in enumerate(reads):
        assert read.buffers[0][4096:] == pages.data(i)
    parts = tuple(memoryview(b"ab") for _ in range(5000))
    many = WriteRequest(pages.name(7), None, 0, parts)
    assert outcomes(backend.write([many])) == [STORED]
    into = tuple(memoryview(bytearray(3)) for _ in range(4000))
    result = backend.read([ReadRequest(pages.name(7), into)])[0]
    assert (result.outcome, result.nbytes) == (LOADED, 10000)
    assert b"".join(into)[:10000] == b"ab" * 5000


def test_no_way_to_publish(disk, no_tmpfile) -> None:
    """B028: the probe does it, not only opens: a file system without hard links is refused."""

    class NoLinks:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def link(self, *args: Any, **options: Any) -> None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    with pytest.raises(ConfigError, match=r"ENOTSUP|EOPNOTSUPP") as caught:
        disk.open(NoLinks())
    assert "hard links" in caught.value.remedy
    assert disk.orphans() == []


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    ("call", "code", "outcome"),
    [
        ("open", errno.EMFILE, Outcome.OVERLOADED),
        ("open", errno.EROFS, Outcome.ACCESS),
        ("pwritev", errno.EIO, Outcome.ERROR),
        ("pwritev", errno.ENOSPC, FULL),
        ("pwritev", errno.EDQUOT, FULL),
        ("link", errno.EACCES, Outcome.ACCESS),
        ("link", errno.ESTALE, Outcome.UNAVAILABLE),
    ],
)
def test_writes_that_fail(disk, make_pages, faulty, no_tmpfile, named, call, code, outcome):
    """B028: errno and path are in the message; what comes after it in the chain is not stored;
    nothing is left; room that was reserved is free again."""
    if named:
        faulty.fail["open"] = []
    backend, pages = disk.open(faulty), make_pages()
    if named:
        backend.files.anonymous = False
    backend.write(pages.writes(0, 2))
    faulty.fail[call] = [code]
    results = backend.write(pages.writes(2, 5))
    assert outcomes(results) == [outcome, PARENT_MISSING, PARENT_MISSING]
    assert errno.errorcode[code] in results[0].message
    assert pages.name(2).key.hex() in results[0].message
    assert backend.exists(pages.names(0, 5)) == [True, True, False, False, False]
    assert backend.usage().used_bytes == disk.used_bytes()
    backend.check_integrity()
    assert outcomes(backend.write(pages.writes(2, 5))) == [STORED] * 3
    assert [path for path in disk.orphans() if path.suffix == ".tmp"] == []


# ── reading ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_reads_that_fail_once(disk, make_pages, start_worker, faulty, code) -> None:
    """B001: the thread lives, and nothing is lost by it. (A page that fails twice in a row is
    deleted.)"""
    jobs, pages = start_worker(disk.backend(faulty)), make_pages()
    jobs.store(pages.stores(0, 3)).result()
    faulty.fail["preadv"] = [code]
    assert jobs.load(pages.loads(0, 3)).outcomes() == [LOADED] * 3
    assert jobs.load(pages.loads(0, 3)).outcomes() == [LOADED] * 3


@pytest.mark.parametrize("left", [0, 100, 4096, 6000])
def test_truncated_files(disk, make_pages, start_worker, left) -> None:
    """B001: to any length, nothing too: a counted miss, deleted, stored anew."""
    jobs, pages = start_worker(disk.backend()), make_pages()
    jobs.store(pages.stores(0, 3)).result()
    os.truncate(disk.path(pages.name(1)), left)
    assert jobs.load(pages.loads(0, 3)).outcomes() == [LOADED, CORRUPT, LOADED]
    assert jobs.store(pages.stores(0, 3)).outcomes() == [EXISTS, STORED, EXISTS]
    assert jobs.load(pages.loads(0, 3)).outcomes() == [LOADED] * 3


def test_swapped_and_flipped_files(disk, make_pages, start_worker) -> None:
    """B002: right names, right lengths, wrong bytes."""
    backend = disk.backend()
    jobs, pages = start_worker(backend), make_pages()
    jobs.store(pages.stores(0, 5)).result()
    one, two, three = (disk.path(pages.name(i)) for i in (1, 2, 3))
    data = one.read_bytes(), two.read_bytes()
    one.write_bytes(data[1])
    two.write_bytes(data[0])
    flipped = bytearray(three.read_bytes())
    flipped[9000] ^= 1
    three.write_bytes(flipped)
    expected = [LOADED, CORRUPT, CORRUPT, CORRUPT, LOADED]
    assert jobs.load(pages.loads(0, 5)).outcomes() == expected
    assert jobs.worker.stats().pages["load"] == {LOADED: 2, CORRUPT: 3}
    assert jobs.lookup(pages.names(0, 5)).count() == 1
    assert jobs.store(pages.stores(0, 5)).outcomes() == [EXISTS, STORED, STORED, STORED, EXISTS]
    assert jobs.load(pages.loads(0, 5)).outcomes() == [LOADED] * 5
    assert jobs.worker.flush(20)
    backend.check_integrity()


def test_things_that_are_no_files(disk, make_pages) -> None:
    """B003: a FIFO, a folder, a link in place of a frame neither hold a read nor divert it."""
    backend, pages = disk.open(), make_pages()
    backend.write(pages.writes(0, 4))
    for i in range(1, 4):
        disk.path(pages.name(i)).unlink()
    os.mkfifo(disk.path(pages.name(1)))
    disk.path(pages.name(2)).mkdir()
    disk.path(pages.name(3)).symlink_to(disk.path(pages.name(0)))
    results = backend.read(pages.reads(0, 4))
    assert outcomes(results) == [LOADED] + [Outcome.ERROR] * 3
    assert [result.message.split(":")[0] for result in results[1:]] == ["ESPIPE", "EISDIR", "ELOOP"]


@pytest.mark.root
def test_files_without_permission(disk, make_pages, start_child) -> None:
    """B031: mode 000, as an ordinary user: the load is a counted miss, and the frame is removed, if
    its folder lets it."""
    disk.root.mkdir(mode=0o700)
    for parent in disk.root.parents:
        if parent.stat().st_mode & 0o001 == 0:
            parent.chmod(parent.stat().st_mode | 0o055)
    os.chown(disk.root, 65534, 65534)
    pages = make_pages()
    one, folder = disk.path(pages.name(1)), disk.path(pages.name(2)).parent
    result = start_child(
        "read_pages",
        root=str(disk.root),
        uid=65534,
        stop=4,
        write=True,
        chmod=[[str(one), 0], [str(folder), 0]],
    ).result()
    expected = ["access" if disk.path(pages.name(i)).parent in (one, folder) or i == 1 else "loaded"
                for i in range(4)]  # fmt: skip
    assert [outcome for outcome, _ in result] == expected
    assert "EACCES" in result[1][1]
    assert not one.exists() or folder == one.parent


def test_eviction_between_check_and_read(disk, make_pages, start_worker) -> None:
    """B042: the frame goes after the lookup, in another thread: a miss, and the buffer is back."""
    backend, pages = disk.backend(), make_pages()
    jobs = start_worker(backend)
    jobs.store(pages.stores(0, 3)).result()
    read = backend.read

    def evict_first(requests: Any) -> Any:
        other = threading.Thread(target=backend.delete, args=([pages.name(2)],))
        other.start()
        other.join(20)
        return read(requests)

    backend.read = evict_first
    assert jobs.lookup(pages.names(0, 3)).count() == 3
    load = jobs.load(pages.loads(0, 3))
    assert load.outcomes() == [LOADED, LOADED, MISSING]
    load.wait_released()


def test_descriptors(disk, make_pages, faulty, start_worker) -> None:
    """B090: a thousand batches, some of which fail: not one descriptor more."""
    backend = disk.backend(faulty, max_bytes="1MiB")
    jobs, pages = start_worker(backend), make_pages(1024)
    assert backend.wait_for_scan(20)
    jobs.store(pages.stores(0, 4)).result()
    jobs.load(pages.loads(0, 6)).result()
    assert jobs.worker.flush(20)
    gc.collect()  # what earlier tests have left
    before = len(os.listdir("/proc/self/fd"))
    for i in range(500):
        chain = make_pages(1024, chain=str(i))
        if i % 5 == 0:
            faulty.fail["pwritev"] = [errno.EIO]
            faulty.fail["preadv"] = [errno.EIO]
            faulty.fail["link"] = [errno.EACCES]
        jobs.store(chain.stores(0, 3))
        jobs.load(chain.loads(0, 4))
        assert jobs.worker.flush(20)
    assert len(os.listdir("/proc/self/fd")) == before
    backend.check_integrity()
    assert backend.usage().used_bytes == disk.used_bytes() <= 1 << 20


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_an_unreadable_frame_heals(disk, make_pages, start_worker, faulty, code) -> None:
    """A frame that the device or its mode does not let this process read is removed and stored
    anew."""
    jobs, pages = start_worker(disk.backend(faulty)), make_pages()
    jobs.store(pages.stores(0, 2)).result()
    faulty.fail["preadv"] = [code] * 2
    failed = jobs.load(pages.loads(1, 2)).result()
    assert outcomes(failed.pages) == [Outcome.ERROR if code == errno.EIO else Outcome.ACCESS]
    assert errno.errorcode[code] in failed.pages[0].message
    assert jobs.lookup(pages.names(0, 2)).count() == 1
    assert jobs.store(pages.stores(0, 2)).outcomes() == [Outcome.EXISTS, Outcome.STORED]
    assert jobs.load(pages.loads(0, 2)).outcomes() == [Outcome.LOADED] * 2


def test_a_folder_in_place_of_a_frame(disk, make_pages, start_worker) -> None:
    """It is not ours to remove; the page is computed, and not taken for stored."""
    jobs, pages = start_worker(disk.backend()), make_pages()
    jobs.store(pages.stores(0, 1)).result()
    path = disk.path(pages.name(1))
    path.mkdir(parents=True)
    (path / "mine").write_text("x")
    for _ in range(2):
        assert jobs.load(pages.loads(0, 2)).outcomes() == [Outcome.LOADED, Outcome.ERROR]
        assert jobs.lookup(pages.names(0, 2)).count() == 1
        found = jobs.store(pages.stores(0, 2)).outcomes()
        assert found == [Outcome.EXISTS, Outcome.ERROR]
    assert (path / "mine").exists()
    path.joinpath("mine").unlink()
    path.rmdir()
    assert jobs.store(pages.stores(0, 2)).outcomes() == [Outcome.EXISTS, Outcome.STORED]
