"""Deadlines, late calls, and the end: one result a job, and buffers come back exactly once."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstrata.backends import PageIO, ReadRequest
from kvstrata.boundary import Outcome

LOADED, STORED, TIMEOUT = Outcome.LOADED, Outcome.STORED, Outcome.TIMEOUT
CANCELLED = Outcome.CANCELLED


def test_hung_backend(start_worker, scripted, make_pages, make_gate, clock) -> None:
    """B003, B062, B073: every call hangs. Each job is reported at its deadline; what is in the
    backend keeps its buffers until the call returns, what waits gives them back at once."""
    gate, pages = make_gate(), make_pages()
    jobs = start_worker(scripted, clock=clock)
    jobs.store(pages.stores(0, 8)).result()
    scripted.hooks["read"] = gate
    running = [jobs.load(pages.loads(0, 8), deadline_s=5) for _ in range(2)]
    gate.wait_entered(2)
    waiting = [jobs.load(pages.loads(0, 8), deadline_s=5) for _ in range(10)]
    lookup = jobs.lookup([pages.name(0)], deadline_s=5)
    store = jobs.store(make_pages(chain="x").stores(0, 2), deadline_s=5)
    clock.advance(4.9)
    assert not any(job.is_done for job in [*running, *waiting, lookup, store])
    clock.advance(0.2)
    assert all(job.outcomes() == [TIMEOUT] * 8 for job in running + waiting)
    assert lookup.count() == 0
    assert store.outcomes() == [TIMEOUT] * 2
    for job in waiting:
        job.wait_released()
    assert [job.releases for job in running] == [0, 0]
    jobs.worker.check_integrity()
    gate.open()
    for job in running:
        job.wait_released()
    assert jobs.worker.flush(20)
    stats = jobs.worker.stats()
    assert stats.late_pages == 8  # the first chunk of each
    assert stats.pages["load"] == {TIMEOUT: 12 * 8}
    scripted.hooks.clear()
    assert jobs.load(pages.loads(0, 8)).outcomes() == [LOADED] * 8


def test_late_bytes_touch_nobody_else(start_worker, scripted, make_pages, make_gate, clock) -> None:
    """B003, B057, B062: a buffer is not free before `released`, so a late read cannot write into
    it when it belongs to somebody else."""
    gate, pages = make_gate(), make_pages()
    jobs = start_worker(scripted, clock=clock)
    jobs.store(pages.stores(0, 1)).result()
    scripted.hooks["read"] = gate
    buffer = bytearray(pages.page_bytes)
    job = jobs.load([pages.io(0, buffer)], deadline_s=1)
    gate.wait_entered()
    clock.advance(2)
    assert job.outcomes() == [TIMEOUT]
    assert job.releases == 0
    gate.open()
    job.wait_released()
    assert jobs.worker.flush(20)
    buffer[:] = b"\x55" * len(buffer)
    scripted.hooks.clear()
    assert jobs.load(pages.loads(0, 1)).outcomes() == [LOADED]
    assert buffer == b"\x55" * len(buffer)


def test_chunks_that_came_in_time_count(
    start_worker, scripted, make_pages, make_gate, clock
) -> None:
    gate, pages = make_gate(), make_pages()
    jobs = start_worker(scripted, clock=clock)
    jobs.store(pages.stores(0, 12)).result()

    def hold_second(requests: Sequence[ReadRequest]) -> None:
        if requests[0].object == pages.name(4):
            gate()

    scripted.hooks["read"] = hold_second
    loads = pages.loads(0, 12)
    job = jobs.load(loads, deadline_s=1)
    gate.wait_entered()
    clock.advance(2)
    assert job.outcomes() == [LOADED] * 4 + [TIMEOUT] * 8
    assert [bytes(page.payload) for page in loads[:4]] == [pages.data(i) for i in range(4)]
    gate.open()
    job.wait_released()
    assert len(scripted.names("read")) == 2  # the third chunk is never tried


def test_children_of_a_store_that_timed_out(
    start_worker, scripted, make_pages, make_gate, clock
) -> None:
    """They do not wait for a call that may never return."""
    gate, pages = make_gate(), make_pages()
    scripted.hooks["write"] = gate
    scripted.threads = 3
    jobs = start_worker(scripted, clock=clock)
    first = jobs.store(pages.stores(0, 2), deadline_s=1)
    gate.wait_entered()
    child = jobs.store(pages.stores(2, 4), deadline_s=100)
    clock.advance(2)
    assert first.outcomes() == [TIMEOUT] * 2
    assert child.outcomes() == [Outcome.PARENT_MISSING] * 2
    child.wait_released()
    assert first.releases == 0
    gate.open()
    first.wait_released()
    assert jobs.worker.flush(20)
    assert jobs.store(pages.stores(0, 4)).outcomes() == [Outcome.EXISTS] * 2 + [STORED] * 2


def test_deadline_that_has_passed(start_worker, scripted, make_pages) -> None:
    jobs, pages = start_worker(scripted), make_pages()
    for deadline_s in (0.0, -1.0):
        assert jobs.load(pages.loads(0, 1), deadline_s).outcomes() == [TIMEOUT]
    assert jobs.lookup([pages.name(0)], 0.0).count() == 0
    assert not scripted.calls
    assert jobs.load(pages.loads(0, 1), float("inf")).outcomes() == [Outcome.MISSING]


def test_flush(start_worker, scripted, make_pages, make_gate) -> None:
    """B117: not idle while anything is queued, running, or not yet told."""
    gate, pages = make_gate(), make_pages()
    scripted.hooks["write"] = gate
    jobs = start_worker(scripted)
    assert jobs.worker.flush(0)
    jobs.store(pages.stores(0, 1))
    assert not jobs.worker.flush(0)
    gate.wait_entered()
    assert not jobs.worker.flush(0.01)
    gate.open()
    assert jobs.worker.flush(20)
    told = make_gate()
    jobs.worker.lookup([pages.name(0)], 10, told)
    told.wait_entered()
    assert not jobs.worker.flush(0.01)
    told.open()
    assert jobs.worker.flush(20)


# ── close ────────────────────────────────────────────────────────────────────────────────────────


def test_close_ends_every_job(start_worker, scripted, make_pages, make_gate) -> None:
    """B079: what waits is cancelled, what runs is waited for, then nothing runs any more."""
    gate, pages = make_gate(), make_pages()
    scripted.hooks["write"] = gate
    before = threading.active_count()
    jobs = start_worker(scripted)
    running = jobs.store(pages.stores(0, 8))
    gate.wait_entered()
    waiting = [
        jobs.store(pages.stores(8, 9)),
        *[jobs.store(make_pages(chain=str(i)).stores(0, 1)) for i in range(5)],
    ]
    closing = threading.Thread(target=jobs.worker.close, args=(20,))
    closing.start()
    assert all(set(job.outcomes()) == {CANCELLED} for job in waiting)
    gate.open()
    closing.join(20)
    assert running.outcomes() == [STORED] * 4 + [CANCELLED] * 4
    assert scripted.close_calls == 1
    assert threading.active_count() == before
    late = jobs.load(pages.loads(0, 2))
    assert late.outcomes() == [Outcome.UNAVAILABLE] * 2, "control must not ask again at once"
    assert jobs.worker.stats().abandoned_threads == 0
    jobs.worker.close(1)
    assert scripted.close_calls == 1


@pytest.mark.parametrize("where", ["read", "close"])
def test_close_with_a_stuck_backend(start_worker, scripted, make_pages, caplog, where) -> None:
    """B003, B078: `close` keeps its total budget, says what is stuck, and the buffers still come
    back once when the call returns some day."""
    gate, pages = scripted.hold(where), make_pages()
    scripted.threads = 4
    jobs = start_worker(scripted)
    running = [jobs.load(pages.loads(0, 4)) for _ in range(4 if where == "read" else 0)]
    if running:
        gate.wait_entered(4)
    waiting = [jobs.load(pages.loads(0, 4)) for _ in range(4 if running else 0)]
    start = time.monotonic()
    jobs.worker.close(0.3)
    assert time.monotonic() - start < 10.0, "it waits until the call gives up, after 20 s"
    assert all(job.outcomes() == [CANCELLED] * 4 for job in running + waiting)
    assert [job.releases for job in running + waiting] == [0] * len(running) + [1] * len(waiting)
    assert jobs.worker.stats().abandoned_threads == (4 if running else 1)
    assert "stuck in the backend" in caplog.text
    jobs.worker.check_integrity()
    gate.open()
    for job in running:
        job.wait_released()


EXITS = {
    "return": "pass",
    "exception": "raise RuntimeError('x')",
    "sys.exit": "sys.exit(0)",
    "sigterm": "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
    "sigint": "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "os._exit": "os._exit(0)",
}

EXIT_SCRIPT = """
import os, signal, sys, time, threading
from kvstrata.backends import *
from kvstrata.backends.filesystem import FilesystemBackend, FilesystemOptions

class Slow(FilesystemBackend):
    def read(self, requests):
        entered.set()
        time.sleep(60)

entered = threading.Event()
worker = StorageWorker("w", Slow(FilesystemOptions(path=sys.argv[1])), WorkerSettings(),
                       BackendContext("w"))
worker.start()
name = ObjectId(bytes(32), bytes(32))
page = [PageIO(name, None, 0, memoryview(bytearray(8192)))]
stored = threading.Event()
worker.store(page, 60, print, stored.set)
stored.wait(20)
worker.load(page, 60, print, lambda: None)
entered.wait(20)
print("ready", flush=True)
"""


@pytest.mark.parametrize("how", EXITS)
def test_the_process_ends(tmp_path: Path, how: str) -> None:
    """B079: whatever way a process ends, with a call stuck in the backend and no `close`."""
    script = EXIT_SCRIPT + EXITS[how]
    command = [sys.executable, "-c", script, str(tmp_path / "root")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=_environment()
    ) as process:
        assert process.stdout is not None
        try:
            told = ""
            while "ready" not in told:
                line = process.stdout.readline()
                assert line, told
                told += line
            process.wait(30)  # what is stuck would take twice as long
        finally:
            process.kill()
    left = list((tmp_path / "root").rglob("*.tmp"))
    assert left == []


def _environment() -> dict[str, str]:
    source = Path(__file__).resolve().parents[2] / "src"
    return {**os.environ, "PYTHONPATH": str(source)}


# ── other threads ────────────────────────────────────────────────────────────────────────────────


def test_a_busy_interpreter(start_worker, scripted, make_pages) -> None:
    """B077: the main thread spins in pure Python; 64 stores end all the same, in time."""
    scripted.batch = 16
    jobs, pages = start_worker(scripted), make_pages(65536)
    stores = [jobs.store(make_pages(65536, chain=str(i)).stores(0, 1)) for i in range(64)]
    end = time.monotonic() + 20.0
    while time.monotonic() < end and not all(job.is_done for job in stores):
        sum(range(1000))
    assert all(job.is_done for job in stores)
    assert pages.page_bytes == 65536


def test_many_threads_and_deadlines(start_worker, scripted, make_pages, clock, seed) -> None:
    """B063, B092: deadlines that race with calls: each job is reported and released once, and a
    page that is LOADED holds its bytes."""
    rng = random.Random(seed)
    scripted.threads = 4
    jobs, pages = start_worker(scripted, clock=clock), make_pages(512)
    jobs.store(pages.stores(0, 16)).result()
    submitted: list[tuple[object, list[PageIO]]] = []
    for _ in range(1000):
        first = rng.randrange(12)
        loads = pages.loads(first, first + rng.randrange(1, 5))
        submitted.append((jobs.load(loads, deadline_s=rng.choice([0.001, 0.5, 2])), loads))
        if rng.random() < 0.3:
            clock.advance(rng.choice([0.0005, 0.3, 1]))
    clock.advance(10)
    assert jobs.worker.flush(20) or jobs.worker.flush(20)
    for job, loads in submitted:
        job.wait_released()
        for page, outcome in zip(loads, job.outcomes(), strict=True):
            assert outcome in (LOADED, TIMEOUT)
            if outcome is LOADED:
                assert page.payload == pages.data(page.depth)
