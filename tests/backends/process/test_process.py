"""Backends in a process of their own: the contract holds, and what kills it costs misses only."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.backends import BackendContext, StorageBackend
from kvstrata.backends.filesystem import FilesystemBackend, FilesystemOptions
from kvstrata.backends.frame import HEADER_BYTES
from kvstrata.backends.memory import MemoryBackend, MemoryOptions
from kvstrata.backends.phases import take_copy
from kvstrata.backends.process import ProcessBackend, ProcessSettings
from kvstrata.backends.regions import HeaderRegion
from kvstrata.backends.testing import BackendTests
from kvstrata.backends.testing.faults import FaultyBackend, FaultyOptions
from kvstrata.boundary import Outcome
from kvstrata.errors import (
    ConfigError,
    StorageError,
    StorageTimeoutError,
    StorageUnavailableError,
)

WAIT_S = 20.0
Open = Callable[..., ProcessBackend]


class TestMemoryInAProcess(BackendTests):
    @pytest.fixture
    def make_backend(self) -> Callable[[], StorageBackend]:
        return lambda: ProcessBackend(MemoryBackend, MemoryOptions())


class TestFilesystemInAProcess(BackendTests):
    @pytest.fixture
    def make_backend(self, tmp_path: Path) -> Callable[[], StorageBackend]:
        options = FilesystemOptions(path=str(tmp_path))
        return lambda: ProcessBackend(FilesystemBackend, options)


@pytest.fixture
def open_faulty(tmp_path: Path) -> Iterator[Open]:
    """A process with faults that happen once; frames outlive it."""
    opened: list[ProcessBackend] = []

    def make(settings: ProcessSettings | None = None, **faults: dict[str, float]) -> ProcessBackend:
        for name in ("frames", "once"):
            (tmp_path / name).mkdir(exist_ok=True)
        options = FaultyOptions(
            faults=faults, path=str(tmp_path / "frames"), once=str(tmp_path / "once")
        )
        backend = ProcessBackend(FaultyBackend, options, settings)
        opened.append(backend)
        backend.open(BackendContext("faulty"))
        return backend

    yield make
    for backend in opened:
        backend.close(5.0)


def _fds() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_payloads_in_a_region_are_not_copied(make_pages) -> None:
    pages = make_pages()
    region = HeaderRegion("test", 1, 64)
    buffers = region.buffers(0)
    backend = ProcessBackend(MemoryBackend, MemoryOptions())
    backend.open(BackendContext("x", regions=(region.region,)))
    try:
        take_copy()
        frame = b"".join(pages.writes(0, 1)[0].buffers)
        for i, buffer in enumerate(buffers[:3]):
            buffer[:] = frame[i * HEADER_BYTES : (i + 1) * HEADER_BYTES]
        write = pages.writes(0, 1)[0]
        write = type(write)(write.object, None, 0, tuple(buffers[:3]))
        assert backend.write([write])[0].outcome is Outcome.STORED
        read = pages.reads(0, 1)[0]
        read = type(read)(read.object, tuple(buffers[10:13]))
        assert backend.read([read])[0].nbytes == len(frame)
        assert b"".join(buffers[10:13]) == frame
        assert take_copy() < 1e-4
        assert backend.read(pages.reads(0, 1))[0].nbytes == len(frame)
        assert take_copy() > 0
    finally:
        backend.close(5.0)
        del buffer, buffers, read, write
        region.close()


@pytest.mark.parametrize("kind", ["segfault", "exit", "kill"])
def test_a_death_costs_the_call_only(open_faulty: Open, make_pages, kind: str) -> None:
    pages = make_pages()
    backend = open_faulty(read={kind: 1.0})
    assert [r.outcome for r in backend.write(pages.writes(0, 4))] == [Outcome.STORED] * 4
    first = backend.pid
    with pytest.raises(StorageUnavailableError, match=r"SIGSEGV|exit code 3|SIGKILL"):
        backend.read(pages.reads(0, 4))
    assert not Path(f"/proc/{first}").exists()  # reaped before the call returned
    assert backend.wait_up(WAIT_S)
    assert backend.pid != first
    assert [r.outcome for r in backend.read(pages.reads(0, 4))] == [Outcome.LOADED] * 4
    assert backend.restarts == 1


@pytest.mark.parametrize("kind", ["hang", "gil"])
def test_what_hangs_can_be_killed(open_faulty: Open, make_pages, kind: str) -> None:
    pages = make_pages()
    backend = open_faulty(read={kind: 1.0})
    failed: list[BaseException] = []
    began = threading.Event()

    def read() -> None:
        began.set()
        try:
            backend.read(pages.reads(0, 4))
        except StorageError as error:
            failed.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert began.wait(WAIT_S)
    while thread.is_alive():  # a kill may come before the call, which hangs after the restart then
        backend.kill("a test has waited long enough")
        thread.join(0.2)
    assert backend.wait_up(WAIT_S)
    assert len(failed) <= 1
    assert all("waited long enough" in str(e) for e in failed)
    assert backend.usage().objects == 0


def test_a_leak_of_its_own_is_bounded(open_faulty: Open) -> None:
    backend = open_faulty(ProcessSettings(memory_bytes=2**27), usage={"leak": 1.0})
    once = Path(backend.options.once)  # type: ignore[attr-defined]
    first = backend.pid
    for _ in range(3):
        (once / "usage-leak").unlink(missing_ok=True)
        try:
            backend.usage()
        except StorageUnavailableError:
            break
    fd = os.pidfd_open(first) if first and Path(f"/proc/{first}").exists() else -1
    if fd >= 0:
        assert select.select([fd], [], [], WAIT_S)[0]
        os.close(fd)
    assert backend.wait_up(WAIT_S)


def test_open_tells_what_is_wrong(open_faulty: Open, tmp_path: Path) -> None:
    backend = ProcessBackend(FilesystemBackend, FilesystemOptions(path="/dev/null/x"))
    with pytest.raises(ConfigError) as caught:
        backend.open(BackendContext("x"))
    assert caught.value.where.key == "path"
    assert caught.value.remedy
    with pytest.raises(StorageUnavailableError, match="SIGSEGV"):
        open_faulty(open={"segfault": 1.0})
    with pytest.raises(StorageTimeoutError, match="not open after"):
        open_faulty(ProcessSettings(open_deadline_s=0.5), open={"gil": 1.0})
    with pytest.raises(StorageError, match="No module"):
        ProcessBackend(_Gone, MemoryOptions()).open(BackendContext("x"))


def test_restarts_take_ever_longer(open_faulty: Open, tmp_path: Path) -> None:
    """A backend that cannot be opened again is tried again, and calls fail at once meanwhile."""
    settings = ProcessSettings(restart_delay_s=0.01, restart_delay_max_s=0.02)
    backend = open_faulty(settings)
    frames = tmp_path / "frames"
    frames.rename(tmp_path / "away")
    frames.write_text("in the way")
    backend.kill("a test")
    with contextlib.suppress(StorageUnavailableError):
        while True:
            backend.usage()
    frames.unlink()
    (tmp_path / "away").rename(frames)
    assert backend.wait_up(WAIT_S)
    assert backend.usage().objects == 0


def test_nothing_is_left(open_faulty: Open, make_pages) -> None:
    """Descriptors, threads, processes and memory, after deaths, errors and `close`."""
    before, threads = _fds(), threading.active_count()
    backend = open_faulty(read={"kill": 1.0}, write={"segfault": 1.0}, exists={"raise": 1.0})
    pages = make_pages()
    for call in (
        lambda: backend.exists(pages.names(0, 1)),
        lambda: backend.write(pages.writes(0, 1)),
        lambda: backend.read(pages.reads(0, 1)),
    ):
        with pytest.raises(StorageError):
            call()
        assert backend.wait_up(WAIT_S)
    scan = backend.scan()
    assert list(scan) == []
    pid = backend.pid
    backend.close(5.0)
    assert not Path(f"/proc/{pid}").exists()
    assert _fds() <= before
    assert threading.active_count() == threads
    backend.close(5.0)


def test_close_of_what_hangs_ends_in_time(open_faulty: Open) -> None:
    """`close` waits no longer than it was told; a process that did not end is killed meanwhile,
    and reaped as soon as the machine gets round to it."""
    backend = open_faulty(close={"gil": 1.0})
    assert backend.pid is not None
    child, supervisor = os.pidfd_open(backend.pid), backend._supervisor._thread
    begun = time.monotonic()
    backend.close(0.5)
    assert time.monotonic() - begun < WAIT_S / 2
    ended, _, _ = select.select([child], [], [], WAIT_S)
    os.close(child)
    assert ended, "it was not killed"
    assert supervisor is not None
    supervisor.join(WAIT_S)
    assert not supervisor.is_alive(), "it was not reaped"


@pytest.mark.parametrize("kind", ["", "gil"])
def test_it_does_not_outlive_its_parent(tmp_path: Path, kind: str) -> None:
    """Also when it holds its interpreter lock and can look at nothing."""
    code = f"""
import sys, threading
from kvstrata.backends import BackendContext
from kvstrata.backends.process import ProcessBackend
from kvstrata.backends.testing.faults import FaultyBackend, FaultyOptions
faults = {{"usage": {{"gil": 1.0}}}} if {kind!r} else {{}}
backend = ProcessBackend(FaultyBackend, FaultyOptions(faults=faults))
backend.open(BackendContext("x"))
threading.Thread(target=backend.usage, daemon=True).start()
print(backend.pid, flush=True)
sys.stdin.read()
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
        ended, _, _ = select.select([child], [], [], WAIT_S)
        os.close(child)
        assert ended


class _Gone(MemoryBackend):
    """Nobody can import it by this name."""


_Gone.__module__ = "kvstrata_no_such_module"
