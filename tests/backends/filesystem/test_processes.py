"""Several processes on one root, and processes that die on it."""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvstrata.backends import BackendContext, ObjectId, WriteRequest
from kvstrata.boundary import Outcome
from kvstrata.errors import ClosedError

LOADED, STORED, EXISTS = Outcome.LOADED, Outcome.STORED, Outcome.EXISTS
MISSING = Outcome.MISSING
FRAME = 4096 + 8192


def outcomes(results: list[Any]) -> list[Outcome]:
    return [result.outcome for result in results]


def check_agrees(disk: Any, backend: Any) -> None:
    """The index and the disk say the same; nothing is left over."""
    backend.check_integrity()
    assert backend.usage().used_bytes == disk.used_bytes()
    assert backend.usage().objects == len(disk.frames())
    assert [path for path in disk.orphans() if path.suffix == ".tmp"] == []
    assert len(list((disk.root / "owners").iterdir())) == len(
        [opened for opened in disk.opened if opened._files is not None]
    )


# ── at once ──────────────────────────────────────────────────────────────────────────────────────


def test_eight_construct_at_once(disk, start_child) -> None:
    """B009: on a folder that is not there, several levels deep."""
    root = disk.root / "a" / "b"
    children = [start_child("construct", root=str(root)) for _ in range(8)]
    assert [child.line() for child in children] == ["ready"] * 8
    for child in children:
        child.go()
    assert [child.result() for child in children] == ["stored"] * 8
    disk.root = root
    backend = disk.open()
    assert backend.usage().objects == 8
    check_agrees(disk, backend)


@pytest.mark.parametrize("named", [False, True])
def test_one_key_for_all(disk, make_pages, start_child, no_tmpfile, named) -> None:
    """B008: four processes and sixteen threads write the same keys: one wins each, nobody fails,
    the frame is whole, nothing temporary is left."""
    rounds = 20
    children = [
        start_child(
            "same_keys", root=str(disk.root), rank=rank, rounds=rounds, own=False, named=named
        )
        for rank in range(4)
    ]
    assert [child.line() for child in children] == ["ready"] * 4
    backend = disk.open(no_tmpfile if named else os)
    pages = make_pages()

    def write(thread: int) -> list[Outcome]:
        found = []
        for i in range(rounds):
            header, _ = pages.writes(i, i + 1)[0].buffers
            payload = memoryview(bytes([100 + thread]) * 8192)
            request = WriteRequest(pages.name(i), None, 0, (header, payload))
            found += outcomes(backend.write([request]))
        return found

    with ThreadPoolExecutor(16) as pool:
        futures = [pool.submit(write, thread) for thread in range(16)]
        for child in children:
            child.go()
        found = [outcome.value for future in futures for outcome in future.result()]
    counts = [child.result() for child in children]
    stored = found.count("stored") + sum(count.get("stored", 0) for count in counts)
    assert stored == rounds
    assert set(found) | {key for count in counts for key in count} == {"stored", "exists"}
    reads = pages.reads(0, rounds)
    assert outcomes(backend.read(reads)) == [LOADED] * rounds
    for read in reads:
        payload = bytes(read.buffers[0][4096:])
        assert payload == payload[:1] * 8192, "a mixture of two writers"
    check_agrees(disk, backend)


def test_each_rank_reads_its_own(disk, start_child) -> None:
    """B007: the same page of several ranks, other bytes in each: the rank is in the namespace."""
    children = [
        start_child("same_keys", root=str(disk.root), rank=rank, rounds=100, own=True)
        for rank in range(3)
    ]
    assert [child.line() for child in children] == ["ready"] * 3
    for child in children:
        child.go()
    assert [child.result() for child in children] == [{"stored": 100, "own bytes": 100}] * 3


def test_one_bound_for_all(disk, start_child) -> None:
    """B038: four processes fill one root far beyond its bound: never above it, no failure."""
    limit = 100 * FRAME
    children = [
        start_child("fill", root=str(disk.root), rank=rank, pages=160, fs={"max_bytes": limit})
        for rank in range(4)
    ]
    assert [child.line() for child in children] == ["ready"] * 4
    for child in children:
        child.go()
    results = [child.result() for child in children]
    assert max(result["most"] for result in results) <= limit
    assert sum(result["outcomes"]["stored"] for result in results) > 400
    assert {key for result in results for key in result["outcomes"]} <= {
        "stored", "full", "parent_missing",
    }  # fmt: skip
    backend = disk.open(max_bytes=limit)
    check_agrees(disk, backend)
    assert disk.used_bytes() > limit // 2


def test_a_reader_beside_an_evicting_writer(disk, make_pages, start_child) -> None:
    """B042, B051: another process evicts what this one is reading: whole frames or misses."""
    backend = disk.open(max_bytes=40 * FRAME)
    child = start_child(
        "fill", root=str(disk.root), rank=7, pages=320, fs={"max_bytes": 40 * FRAME}
    )
    assert child.line() == "ready"
    child.go()
    pages = make_pages(chain="7")
    found = set[Outcome]()
    ended = False
    while not ended:
        ended = child.process.poll() is not None
        reads = pages.reads(0, 320)
        for i, (read, result) in enumerate(zip(reads, backend.read(reads), strict=True)):
            found.add(result.outcome)
            if result.outcome is LOADED:
                assert bytes(read.buffers[0][4096:]) == pages.data(i)
    assert found == {LOADED, MISSING}
    backend.index.flush()
    check_agrees(disk, backend)


def test_fork(disk, make_pages) -> None:
    """A forked child reads, and is refused when it writes; the parent's lock and index are not
    harmed by it."""
    backend, pages = disk.open(), make_pages()
    backend.write(pages.writes(0, 2))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            read = outcomes(backend.read(pages.reads(0, 2))) == [LOADED] * 2
            try:
                backend.write(pages.writes(2, 3))
            except ClosedError:
                code = 0 if read else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert outcomes(backend.write(pages.writes(2, 3))) == [STORED]
    other = disk.open()
    assert other.usage().objects == 3
    check_agrees(disk, other)


# ── the end of others ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("named", [False, True])
def test_killed_between_write_and_name(disk, make_pages, start_child, named) -> None:
    """B006: what the dead writer left is removed by the next one that starts; a writer that is
    only paused keeps its files and its room."""
    stop = {"root": str(disk.root), "named": named, "pause_at": "link", "pause_on": 3}
    dead = start_child("write_chain", chain="dead", stop=5, **stop)
    paused = start_child("write_chain", chain="paused", stop=5, **stop)
    assert dead.line() == "paused"
    assert paused.line() == "paused"
    dead.kill()
    temporary = [path for path in disk.orphans() if path.suffix == ".tmp"]
    assert len(temporary) == (2 if named else 0)
    backend = disk.open()
    left = [path for path in disk.orphans() if path.suffix == ".tmp"]
    assert len(left) == (1 if named else 0)
    assert backend.exists(make_pages(chain="dead").names(0, 5)) == [True] * 2 + [False] * 3
    usage = backend.usage()
    assert usage.used_bytes == (2 + 5) * FRAME  # what the dead one published; all of the paused one
    assert disk.used_bytes() == 4 * FRAME
    paused.go()
    assert paused.result() == ["stored"] * 5
    assert backend.usage().used_bytes == 7 * FRAME
    check_agrees(disk, backend)


def test_killed_between_name_and_settlement(disk, make_pages, start_child) -> None:
    """B040, B094: a frame that has its name is found by the next start, with its room."""
    child = start_child("write_chain", root=str(disk.root), stop=5, pause_at="linked", pause_on=4)
    assert child.line() == "paused"
    other = disk.open()
    assert other.usage().used_bytes == 5 * FRAME
    assert other.usage().objects == 0
    child.kill()
    backend, pages = disk.open(), make_pages()
    assert backend.exists(pages.names(0, 5)) == [True] * 4 + [False]
    assert outcomes(backend.write(pages.writes(0, 6))) == [EXISTS] * 4 + [STORED] * 2
    check_agrees(disk, backend)
    other.check_integrity()


@pytest.mark.parametrize("bound", [0, 100 * FRAME])
@pytest.mark.parametrize("named", [False, True])
def test_killed_at_any_moment(disk, make_pages, start_child, start_worker, seed, named, bound):
    """Ten times SIGKILL while pages are published: no wrong byte, no orphan, usage is what the
    disk holds, the bound holds, the next run goes on where this one ended."""
    rng = random.Random(seed)
    chains: list[str] = []
    for life in range(10):
        child = start_child(
            "store_for_ever",
            root=str(disk.root),
            seed=f"{seed}",
            first=life * 1000,
            named=named,
            fs={"max_bytes": bound},
        )
        assert child.line() == "ready"
        whole = rng.randrange(1, 5)
        for _ in range(whole):
            assert child.line() == "stored"
        end = time.perf_counter() + rng.random() * 0.005
        while time.perf_counter() < end:
            pass
        child.kill()
        chains += [f"{seed}-{life * 1000 + i}" for i in range(whole + 40)]
    backend = disk.open(max_bytes=bound)
    check_agrees(disk, backend)
    assert not bound or disk.used_bytes() <= bound
    backend.close(5)
    jobs = start_worker(disk.backend(max_bytes=bound))
    loaded = 0
    for chain in chains:
        pages = make_pages(chain=chain)
        loads = pages.loads(0, 40)
        found = jobs.load(loads).outcomes()
        assert set(found) <= {LOADED, MISSING}
        assert found == sorted(found, key=lambda outcome: outcome is MISSING), "a gap in a chain"
        for page in loads[: found.count(LOADED)]:
            assert page.payload == pages.data(page.depth)
        loaded += found.count(LOADED)
    assert loaded >= 60
    pages = make_pages(chain=chains[0])
    stored = jobs.store(pages.stores(0, 40)).outcomes()
    assert set(stored) <= {STORED, EXISTS}


def test_a_survivor_sees_what_the_dead_left(disk, make_pages, start_child) -> None:
    """Room that a dead process had reserved does not make the living ones full for ever."""
    limit = 8 * FRAME
    backend = disk.open(max_bytes=limit)
    child = start_child(
        "write_chain",
        root=str(disk.root),
        stop=8,
        chain="dead",
        pause_at="link",
        pause_on=3,
        fs={"max_bytes": limit},
    )
    assert child.line() == "paused"
    pages = make_pages(chain="mine")
    assert outcomes(backend.write(pages.writes(0, 2)))[0] is Outcome.FULL
    child.kill()
    assert outcomes(backend.write(pages.writes(0, 2))) == [STORED] * 2
    backend.index.check_integrity()
    assert backend.usage().used_bytes == disk.used_bytes()


# ── restarts ─────────────────────────────────────────────────────────────────────────────────────


def test_another_namespace_finds_nothing(disk, make_pages) -> None:
    """B012, B014, B094: after a restart everything hits with the same identity, nothing with
    another."""
    backend = disk.open()
    backend.write(make_pages(namespace=b"bf16").writes(0, 5))
    backend.close(5)
    backend = disk.open()
    assert backend.exists(make_pages(namespace=b"bf16").names(0, 5)) == [True] * 5
    assert backend.exists(make_pages(namespace=b"fp8").names(0, 5)) == [False] * 5
    assert outcomes(backend.read(make_pages(namespace=b"fp8").reads(0, 1))) == [MISSING]


def test_close_twice_and_reopen(disk, make_pages) -> None:
    backend = disk.open()
    backend.write(make_pages().writes(0, 2))
    backend.close(5)
    backend.close(5)
    assert list((disk.root / "owners").iterdir()) == []
    with pytest.raises(ClosedError):
        backend.write(make_pages().writes(2, 3))
    check_agrees(disk, disk.open())


def test_roots_of_other_backends(tmp_path: Path, make_disk, make_pages) -> None:
    """Two roots, one process: nothing is shared."""
    one, two = make_disk(tmp_path / "1"), make_disk(tmp_path / "2")
    a, b = one.open(), two.open()
    a.write(make_pages().writes(0, 2))
    assert b.exists(make_pages().names(0, 2)) == [False, False]
    assert isinstance(make_pages().name(0), ObjectId)
    assert BackendContext("x").on_evicted is None
