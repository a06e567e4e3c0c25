"""`kvstrata bench worker`: it measures; and the gates that hold on any machine."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.backends import BackendContext, PageIO, StorageBackend, StorageWorker, WorkerSettings
from kvstrata.backends.filesystem import FilesystemBackend, FilesystemOptions
from kvstrata.backends.memory import MemoryBackend, MemoryOptions
from kvstrata.backends.process import ProcessBackend
from kvstrata.tools.bench.worker import Memory
from kvstrata.tools.cli import main

PAGES = 64


def test_it_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    args = ["bench", "worker", "--batches", "3", "--rounds", "40", "--json", str(out)]
    assert main(args) == 0
    report = json.loads(out.read_text())
    assert [o["isolation"] for o in report["overheads"]] == ["thread", "process"]
    assert len(report["neighbours"]) == 3
    assert "overhead" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["memory", "filesystem", "filesystem in a process"])
@pytest.mark.parametrize("jobs", [PAGES, 1])
def test_a_spinning_main_thread_starves_nobody(tmp_path: Path, kind: str, jobs: int) -> None:
    """B077: 64 pending writes end within two seconds although Python code never lets go of the
    interpreter lock by itself. What other processes take of the machine does not count."""
    makes: dict[str, Callable[[], StorageBackend]] = {
        "memory": lambda: MemoryBackend(MemoryOptions()),
        "filesystem": lambda: FilesystemBackend(FilesystemOptions(path=str(tmp_path))),
        "filesystem in a process": lambda: ProcessBackend(
            FilesystemBackend, FilesystemOptions(path=str(tmp_path))
        ),
    }
    backend = makes[kind]()
    worker = StorageWorker("spun", backend, WorkerSettings(), BackendContext("spun"))
    memory = Memory(PAGES, 65536)
    worker.start(regions=(memory.region,))
    stored, lock = [0], threading.Lock()

    def done(result: object) -> None:
        pages = getattr(result, "pages")  # noqa: B009
        with lock:
            stored[0] += sum(page.outcome.is_stored for page in pages)

    step = PAGES // jobs
    pages: list[PageIO] = memory.pages(0, PAGES)
    processes = ["self", *([str(backend.pid)] if isinstance(backend, ProcessBackend) else [])]
    try:
        held_up_s = _held_up_s(processes)
        with _served_at_once():
            begun = time.perf_counter()
            for at in range(0, PAGES, step):
                worker.store(pages[at : at + step], 30.0, done, lambda: None)
            while stored[0] < PAGES:
                assert time.perf_counter() - begun < 30
            took_s = time.perf_counter() - begun
        assert took_s - (_held_up_s(processes) - held_up_s) < 2.0
    finally:
        worker.close(5.0)


def _held_up_s(processes: list[str]) -> float:
    """How long their threads, but for this one, have waited for a processor that others had."""
    own = str(threading.get_native_id())
    return sum(
        int((task / "schedstat").read_text().split()[1]) / 1e9
        for process in processes
        for task in Path(f"/proc/{process}/task").iterdir()
        if task.name != own
    )


@contextlib.contextmanager
def _served_at_once() -> Iterator[None]:
    """This thread runs as soon as it can, as on a machine that does nothing else: so it has the
    interpreter lock back before a storage thread returns from a system call. That is the worst
    case, 12 s with turns of 5 ms. Where it is not allowed, it happens by chance."""
    allowed = False
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        allowed = True
    try:
        yield
    finally:
        if allowed:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
