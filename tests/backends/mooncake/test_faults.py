"""Masters and stores that are away, hang, die and come back: misses, never a hang or a crash."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

from kvstrata.backends import BackendContext
from kvstrata.backends.base import HealthState
from kvstrata.backends.frame import HEADER_BYTES
from kvstrata.backends.mooncake.names import key_of
from kvstrata.boundary import Outcome
from kvstrata.errors import ConfigError, StorageError, StorageUnavailableError

PAGE = 65536
FAST_S = 2.0
"""What four calls may take when the master is known to be away; to ask it takes a second each."""
SOON_S = 8.0
"""For what takes two seconds at most on a machine that does nothing else."""


def _outcomes(results) -> set[Outcome]:
    return {result.outcome for result in results}


def _is(backend, state: HealthState):
    return lambda: backend.health().state is state


def test_the_master_is_down_at_the_start_and_comes_later(site, make_pages, until) -> None:
    pages = make_pages(PAGE, chain="late")
    start = time.monotonic()
    backend = site.open()
    assert time.monotonic() - start < SOON_S
    assert backend.health().state is HealthState.OPEN
    start = time.monotonic()
    for call in (
        lambda: backend.write(pages.writes(0, 4)),
        lambda: backend.read(pages.reads(0, 4)),
        lambda: backend.exists(pages.names(0, 4)),
        lambda: backend.delete(pages.names(0, 4)),
    ):
        with pytest.raises(StorageUnavailableError, match="does not answer"):
            call()
    assert time.monotonic() - start < FAST_S
    site.start(1)
    assert until(_is(backend, HealthState.OK)) < SOON_S
    assert _outcomes(backend.write(pages.writes(0, 4))) == {Outcome.STORED}
    assert _outcomes(backend.read(pages.reads(0, 4))) == {Outcome.LOADED}


def test_the_master_is_killed_and_comes_back_empty(site, start_worker, make_pages, until) -> None:
    cluster = site.start(1)
    backend, pages = site.make(), make_pages(PAGE, chain="back")
    jobs = start_worker(backend)
    assert set(jobs.store(pages.stores(0, 8)).outcomes()) == {Outcome.STORED}
    cluster.kill_master()
    start = time.monotonic()
    loads = [jobs.load(pages.loads(0, 8), deadline_s=2.0) for _ in range(2)]
    assert {o for load in loads for o in load.outcomes()} <= {Outcome.UNAVAILABLE, Outcome.TIMEOUT}
    assert time.monotonic() - start < SOON_S, "no load hangs past its deadline"
    assert until(_is(backend, HealthState.OPEN)) < SOON_S
    assert jobs.lookup(pages.names(0, 8)).count() == 0

    cluster.start_master()
    until(_is(backend, HealthState.OK))
    assert jobs.lookup(pages.names(0, 8)).count() == 0, "it kept nothing"
    until(
        lambda: set(jobs.store(pages.stores(8, 9)).outcomes()) <= {Outcome.STORED, Outcome.EXISTS}
    )
    assert jobs.load(pages.loads(8, 9)).outcomes() == [Outcome.LOADED]


def test_the_master_comes_back_with_its_metadata(
    site, make_pages, until, tmp_path, monkeypatch
) -> None:
    """A snapshot keeps objects whose lease has not ended: those that were asked for lately."""
    monkeypatch.setenv("MOONCAKE_SNAPSHOT_LOCAL_PATH", str(tmp_path))
    flags = (
        "-enable_snapshot=true", "-enable_snapshot_restore=true", "-snapshot_interval_seconds=1",
        "-snapshot_object_store_type=local", "-client_ttl=10",
    )  # fmt: skip
    cluster = site.start(1, *flags, lease_s=60.0)
    backend, pages = site.open(), make_pages(PAGE, chain="metadata")
    backend.write(pages.writes(0, 8))
    assert backend.exists(pages.names(0, 8)) == [True] * 8
    until(lambda: list(tmp_path.rglob("latest.txt")))
    cluster.kill_master()
    until(_is(backend, HealthState.OPEN))
    cluster.start_master()
    until(_is(backend, HealthState.OK))
    reads = pages.reads(0, 8)
    until(lambda: _outcomes(backend.read(reads)) == {Outcome.LOADED})
    assert all(r.buffers[0][HEADER_BYTES:] == pages.data(i) for i, r in enumerate(reads))


def test_a_master_that_hangs(site, make_pages, until) -> None:
    """It accepts connections and answers nothing: calls end by the timeout, health is true, and
    nobody connects to it, which would hold the interpreter."""
    cluster = site.start(1, "-client_ttl=10")  # it does not blame the store for its own absence
    backend, pages = site.open(), make_pages(PAGE, chain="hang")
    backend.write(pages.writes(0, 4))
    os.kill(cluster.master.pid, signal.SIGSTOP)
    start = time.monotonic()
    with contextlib.suppress(StorageError):
        backend.read(pages.reads(0, 4))
    assert time.monotonic() - start < SOON_S
    assert until(_is(backend, HealthState.OPEN)) < SOON_S
    start = time.monotonic()
    second = site.open()
    assert time.monotonic() - start < SOON_S
    assert second.health().state is HealthState.OPEN
    os.kill(cluster.master.pid, signal.SIGCONT)
    until(_is(backend, HealthState.OK))
    until(_is(second, HealthState.OK))
    assert _outcomes(second.read(pages.reads(0, 4))) == {Outcome.LOADED}


def test_a_store_is_killed_and_its_pages_are_stored_anew(site, make_pages, until) -> None:
    cluster = site.start(2)
    backend, pages = site.open(), make_pages(PAGE, chain="lost")
    backend.write(pages.writes(0, 64))
    dead = cluster.kill_store(0)
    results = backend.read(pages.reads(0, 64))
    assert _outcomes(results) == {Outcome.LOADED, Outcome.UNAVAILABLE}
    lost = [i for i, r in enumerate(results) if r.outcome is not Outcome.LOADED]
    assert backend.counts.snapshot()["get_segment_lost"] == len(lost)
    assert all("segment_lost" in results[i].message for i in lost)
    found = backend.exists(pages.names(0, 64))
    assert [i for i in range(64) if not found[i]] == lost, "what cannot be read does not exist"
    assert until(_is(backend, HealthState.DEGRADED)) < SOON_S
    again = backend.write([pages.writes(i, i + 1)[0] for i in lost])
    assert _outcomes(again) == {Outcome.STORED}, "on the segments that are left"
    assert _outcomes(backend.read(pages.reads(0, 64))) == {Outcome.LOADED}
    until(lambda: dead not in [s.name for s in backend.link.view.segments])
    until(_is(backend, HealthState.OK))
    backend.check_integrity()


def test_all_stores_are_gone(site, make_pages, until) -> None:
    cluster = site.start(1)
    backend, pages = site.open(), make_pages(PAGE, chain="none")
    backend.write(pages.writes(0, 4))
    cluster.kill_store(0)
    assert _outcomes(backend.read(pages.reads(0, 4))) == {Outcome.UNAVAILABLE}
    results = backend.write(pages.writes(4, 8))
    assert not any(r.outcome.is_stored for r in results)
    until(lambda: not backend.link.view.segments)
    assert backend.health().state is HealthState.DEGRADED
    results = backend.write(pages.writes(8, 12))
    assert _outcomes(results) <= {Outcome.FULL, Outcome.PARENT_MISSING}
    cluster.start_stores(1)
    until(_is(backend, HealthState.OK))
    assert _outcomes(backend.write(pages.writes(8, 12))) == {Outcome.STORED}


def test_a_full_segment(site, start_worker, make_pages, until) -> None:
    """FULL at once; a store that may wait gets room, because the master evicts by itself."""
    site.start(1, segment_bytes="16MiB", lease_s=0.5)
    backend, pages = site.make(), make_pages(1 << 20, chain="full")
    jobs = start_worker(backend)
    outcomes = jobs.store(pages.stores(0, 40), deadline_s=15.0).outcomes()
    assert outcomes == [Outcome.STORED] * 40
    counts = backend.counts.snapshot()
    assert counts["put_no_space"] > 0
    there = backend.exists(pages.names(0, 40))
    assert 0 < sum(there) < 17
    loads = jobs.load(pages.loads(0, 40)).outcomes()
    assert set(loads) == {Outcome.LOADED, Outcome.MISSING}


def test_no_page_is_stored_behind_one_that_was_not(site, make_pages) -> None:
    site.start(1, segment_bytes="16MiB")
    backend, pages = site.open(), make_pages(1 << 20, chain="chain")
    found = [r.outcome for r in backend.write(pages.writes(0, 30))]
    stored = found.index(Outcome.FULL)
    assert found == [Outcome.STORED] * stored + [Outcome.FULL] + [Outcome.PARENT_MISSING] * (
        30 - stored - 1
    ) or set(found[stored:]) <= {Outcome.FULL, Outcome.PARENT_MISSING}
    assert backend.exists(pages.names(0, 30)) == [True] * stored + [False] * (30 - stored)


def test_a_page_is_evicted_between_exists_and_read(shared, start_worker, make_pages) -> None:
    backend, pages = shared.make(), make_pages(PAGE, chain="evicted")
    jobs = start_worker(backend)
    jobs.store(pages.stores(0, 4)).outcomes()
    assert jobs.lookup(pages.names(0, 4)).count() == 4
    with backend.link.use() as client:
        client.remove([key_of(pages.name(2))])
    found = jobs.load(pages.loads(0, 4)).outcomes()
    assert found == [Outcome.LOADED] * 2 + [Outcome.MISSING, Outcome.LOADED]
    assert jobs.drop(pages.names(0, 4)).count() == 3


def test_a_client_that_does_not_recover_is_replaced(site, make_pages, until, monkeypatch) -> None:
    """And closed, also in a process that is its backend's alone: it lives on."""
    left: list[object] = []
    monkeypatch.setattr("kvstrata.backends.mooncake.client._leak", left.append)
    site.start(1)
    monkeypatch.setattr("kvstrata.backends.mooncake.link.REBUILD_S", 0.2)
    monkeypatch.setattr("kvstrata.backends.mooncake.link.PROBE_S", 0.05)
    backend, pages = site.open(), make_pages(PAGE, chain="anew")
    backend.write(pages.writes(0, 2))

    def broken(keys: list[str]) -> list[bool]:
        raise StorageUnavailableError("broken for ever")

    old = backend.link._current.client
    old.exists, old._is_alone = broken, True
    until(lambda: backend.link.connections == 2)
    until(lambda: old._store is None)
    assert not left
    until(_is(backend, HealthState.OK))
    assert _outcomes(backend.read(pages.reads(0, 2))) == {Outcome.LOADED}
    backend.check_integrity()


def test_a_store_of_its_own_process(site, make_pages) -> None:
    """role = "store": the server's process gives memory too."""
    site.start(0)
    backend, pages = site.open(role="store", segment_bytes="32MiB"), make_pages(PAGE, chain="own")
    assert _outcomes(backend.write(pages.writes(0, 8))) == {Outcome.STORED}
    other = site.open()
    assert _outcomes(other.read(pages.reads(0, 8))) == {Outcome.LOADED}
    assert backend.usage().limit_bytes == 32 << 20


def test_without_the_http_server(site, make_pages, until) -> None:
    cluster = site.start(1)
    backend, pages = site.open(admin="none"), make_pages(PAGE, chain="blind")
    assert _outcomes(backend.write(pages.writes(0, 4))) == {Outcome.STORED}
    assert _outcomes(backend.read(pages.reads(0, 4))) == {Outcome.LOADED}
    for ask in (backend.usage, lambda: list(backend.scan())):
        with pytest.raises(StorageError, match="admin"):
            ask()
    cluster.kill_master()
    assert until(_is(backend, HealthState.OPEN)) < SOON_S


def test_rdma_without_a_device(shared, monkeypatch) -> None:
    monkeypatch.setattr("kvstrata.backends.mooncake.client.rdma_devices", list)
    backend = shared.make(protocol="rdma")
    with pytest.raises(ConfigError, match="no RDMA device on this machine"):
        backend.open(BackendContext("tested"))
    fallen = shared.open(protocol="rdma", tcp_fallback=True)
    assert fallen.health().state is HealthState.OK
    assert "no RDMA device" in fallen.health().message
