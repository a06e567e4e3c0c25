"""Migrations that are killed or interrupted, as processes: the same command goes on."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstrata.backends import ObjectId

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0

# Runs the command, and kills itself at the Nth call of a function.
DOOMED = """
import importlib, os, signal, sys
from kvstrata.tools.cli import main
module, cls, method, count, when = sys.argv[1].split(":")
owner = getattr(importlib.import_module(module), cls)
original, left = getattr(owner, method), int(count)
def doomed(*args, **kwargs):
    global left
    left -= 1
    if left == 0 and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = original(*args, **kwargs)
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return result
setattr(owner, method, doomed)
sys.exit(main(sys.argv[2:]))
"""
FILES = "kvstrata.backends.filesystem.files:FrameFiles"
JOURNAL = "kvstrata.tools.migrate_journal:Journal"
BACKEND = "kvstrata.backends.filesystem.backend:FilesystemBackend"


def _command(two: Any, *args: str) -> list[str]:
    return ["migrate", "--config", str(two.config), "--from", "a", "--to", "b",
            "--json", str(two.folder / "report.json"), *args]  # fmt: skip


def _start(two: Any, args: Sequence[str], *first: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *(first or ("-m", "kvstrata.tools.cli")), *args], cwd=two.folder,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip


def _finish(two: Any, *args: str) -> dict[str, Any]:
    with _start(two, _command(two, *args)) as process:
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, errors.decode()
    return json.loads((two.folder / "report.json").read_bytes())


def _stored(two: Any) -> int:
    return sum(1 for _ in (two.root("b") / "objects").glob("*/*/*"))


def _until(process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> bool:
    """True when `condition` holds, False when the process has ended before."""
    fd = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        for _ in range(int(WAIT_S * 500)):
            if condition():
                return True
            if poll.poll(2):
                return False
        raise AssertionError("nothing happened")
    finally:
        os.close(fd)


@pytest.mark.parametrize("move", [False, True])
def test_killed_five_times_at_random(two: Any, seed: int, move: bool) -> None:
    """Nothing is lost or doubled, and the destination is whole at every moment."""
    pages = len(two.fill("a", chains=40, longest=12).requests)
    before = two.frames("a")
    rng = random.Random(seed)
    options = ["--threads", "2", *(["--move"] if move else [])]
    kills = 0
    for share in sorted(rng.uniform(0.02, 0.9) for _ in range(5)):
        with _start(two, _command(two, *options, "--rate", "1200KiB")) as process:
            goal = int(share * pages)
            if _until(process, lambda goal=goal: _stored(two) >= goal):  # type: ignore[misc]
                process.kill()
                kills += 1
            process.communicate()
        two.assert_closed("b")
    assert kills == 5
    report = _finish(two, *options)
    assert report["resumed"]
    assert (report["pages"], report["copied"], report["existed"]) == (pages, pages, 0)
    assert two.frames("b") == before
    assert two.frames("a") == ({} if move else before)
    with two.opened("b") as backend:
        assert backend.wait_for_scan(30)
        assert backend.usage().objects == pages
        backend.check_integrity()


@pytest.mark.parametrize(
    "where",
    [
        f"{JOURNAL}:select:1:before",
        f"{JOURNAL}:select:1:after",
        f"{JOURNAL}:take:3:after",
        f"{FILES}:publish:9:before",
        f"{FILES}:publish:9:after",
        f"{BACKEND}:write:3:after",
        f"{JOURNAL}:record:2:before",
        f"{JOURNAL}:record:2:after",
        f"{BACKEND}:persist:2:before",
        f"{BACKEND}:persist:2:after",
        f"{JOURNAL}:removable:1:before",
        f"{BACKEND}:delete:1:after",
        f"{FILES}:unlink:13:after",
        f"{BACKEND}:delete:4:after",
    ],
)
def test_killed_at_every_step(two: Any, where: str) -> None:
    pages = len(two.fill("a", chains=8, longest=8).requests)
    before = two.frames("a")
    with _start(two, _command(two, "--move"), "-c", DOOMED, where) as process:
        process.communicate(timeout=WAIT_S)
    assert process.returncode == -signal.SIGKILL
    two.assert_closed("a")
    two.assert_closed("b")
    merged = {**two.frames("a"), **two.frames("b")}
    assert merged == before, "every page is in one of the two"
    report = _finish(two, "--move")
    assert two.frames("b") == before
    assert two.frames("a") == {}
    if report["resumed"]:
        assert (report["copied"], report["deleted"]) == (pages, pages)


def test_interrupted_it_says_how_to_go_on(two: Any) -> None:
    pages = len(two.fill("a", chains=20, longest=12).requests)
    with _start(two, _command(two, "--rate", "300KiB", "--threads", "1")) as process:
        assert _until(process, lambda: _stored(two) > 0)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, errors.decode()
    text = " ".join(errors.decode().split())
    assert "the same command goes on from here (journal var/migrate-a-b.journal)" in text
    assert "Traceback" not in text
    report = json.loads((two.folder / "report.json").read_bytes())
    assert not report["complete"]
    assert report["copied"] == _stored(two) < pages
    two.assert_closed("b")
    again = _finish(two)
    assert (again["copied"], again["existed"]) == (pages, 0)


def test_what_a_killed_one_leaves_is_cleared(two: Any) -> None:
    """No owners, reservations or temporary files stay behind."""
    two.fill("a", chains=4, longest=4)
    where = f"{FILES}:publish:3:before"
    with _start(two, _command(two), "-c", DOOMED, where) as process:
        process.communicate(timeout=WAIT_S)
    assert process.returncode == -signal.SIGKILL
    _finish(two)
    for name in "ab":
        assert list((two.root(name) / "owners").iterdir()) == []
        assert [path.name for path in two.root(name).glob("*/*.tmp")] == []
        with two.opened(name) as backend:
            assert backend.index.usage().inflight_bytes == 0


@pytest.mark.parametrize("move", [False, True])
def test_killed_when_all_was_done(two: Any, make_frame: Any, move: bool) -> None:
    """The report was never seen: the next run gives it, and takes what has come since."""
    tree = two.fill("a", chains=4, longest=4)
    options = ["--move"] if move else []
    where = "kvstrata.tools.cli_migrate:_Command:run:1:after"
    with _start(two, _command(two, *options), "-c", DOOMED, where) as process:
        process.communicate(timeout=WAIT_S)
    assert process.returncode == -signal.SIGKILL
    two.store("a", [make_frame(ObjectId(two.namespace, b"\x05" * 32), None, 0, b"n" * 512)])
    report = _finish(two, *options)
    pages = len(tree.requests) + 1
    assert (report["pages"], report["copied"], report["existed"]) == (pages, pages, 0)
    assert report["deleted"] == (pages if move else 0)
    assert len(two.frames("b")) == pages


def test_a_page_of_a_dead_run_is_not_counted_twice(two: Any) -> None:
    """Killed between the write and the note of it: the next run finds the page and counts it as
    its own, once."""
    tree = two.fill("a", chains=1, longest=3)
    where = f"{JOURNAL}:record:1:before"
    with _start(two, _command(two), "-c", DOOMED, where) as process:
        process.communicate(timeout=WAIT_S)
    names: list[ObjectId] = [request.object for request in tree.requests]
    assert all(two.path("b", name).exists() for name in names)
    report = _finish(two)
    assert (report["copied"], report["existed"]) == (len(names), 0)
