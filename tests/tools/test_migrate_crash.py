"""Migrations that are killed or interrupted, as processes: the same command goes on."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import random
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstrata.backends import ObjectId
from kvstrata.tools import cli, cli_migrate  # noqa: F401 (imported once, before all forks)

WAIT_S = 60.0
# Later Pythons warn of it: a child runs one command with threads of its own, and ends by os._exit.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

FILES = "kvstrata.backends.filesystem.files:FrameFiles"
JOURNAL = "kvstrata.tools.migrate_journal:Journal"
BACKEND = "kvstrata.backends.filesystem.backend:FilesystemBackend"


def _command(two: Any, *args: str) -> list[str]:
    return ["migrate", "--config", str(two.config), "--from", "a", "--to", "b",
            "--json", str(two.folder / "report.json"), *args]  # fmt: skip


class Child:
    """The command in a forked process. `doom`: it kills itself at the Nth call of a function,
    `module:class:method:N:before` or `…:after`."""

    def __init__(self, two: Any, args: Sequence[str], doom: str = "") -> None:
        self._errors = two.folder / "errors.txt"
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                code = _become(two.folder, args, doom, self._errors)
            finally:
                os._exit(code)
        self._fd = os.pidfd_open(self.pid)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def ends_within(self, seconds: float) -> bool:
        return bool(self._poll.poll(seconds * 1000))

    def send(self, signum: int) -> None:
        signal.pidfd_send_signal(self._fd, signum)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`, which holds before the process ends."""
        for _ in range(int(WAIT_S * 500)):
            if condition():
                return
            assert not self.ends_within(0.002), self._errors.read_text()
        raise AssertionError("nothing happened")

    def wait(self) -> tuple[int, str]:
        """The exit code (negative: the signal that killed it) and what it said on stderr."""
        in_time = self.ends_within(WAIT_S)
        if not in_time:
            self.send(signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self._fd)
        assert in_time, "it does not end"
        return os.waitstatus_to_exitcode(status), self._errors.read_text()


def _become(folder: Path, args: Sequence[str], doom: str, errors: Path) -> int:
    sys.settrace(None)  # what coverage finds here is lost, by SIGKILL or os._exit
    threading.settrace(None)
    os.chdir(folder)
    os.environ["COLUMNS"] = "200"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = open(errors, "w", buffering=1)  # noqa: SIM115
    if doom:
        _plant(*doom.split(":"))
    code = cli.main(args)
    sys.stderr.flush()
    return code


def _plant(module: str, cls: str, method: str, count: str, when: str) -> None:
    owner = getattr(importlib.import_module(module), cls)
    original, calls = getattr(owner, method), itertools.count(1)

    def doomed(*args: Any, **kwargs: Any) -> Any:
        is_last = next(calls) == int(count)
        if is_last and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, method, doomed)


def _die(two: Any, args: Sequence[str], doom: str) -> None:
    assert Child(two, args, doom).wait()[0] == -signal.SIGKILL


def _finish(two: Any, *args: str) -> dict[str, Any]:
    code, errors = Child(two, _command(two, *args)).wait()
    assert code == 0, errors
    return json.loads((two.folder / "report.json").read_bytes())


def _stored(two: Any) -> int:
    return sum(1 for _ in (two.root("b") / "objects").glob("*/*/*"))


@pytest.mark.parametrize("move", [False, True])
def test_killed_five_times_at_random(two: Any, seed: int, move: bool) -> None:
    """Nothing is lost or doubled, and the destination is whole at every moment."""
    pages = len(two.fill("a", chains=25, longest=12).requests)
    before = two.frames("a")
    rng = random.Random(seed)
    options = ["--threads", "2", *(["--move"] if move else [])]
    kills = 0
    for share in sorted(rng.uniform(0.02, 0.75) for _ in range(5)):
        child, goal = Child(two, _command(two, *options, "--rate", "100KiB")), int(share * pages)
        child.until(lambda goal=goal: _stored(two) >= goal)  # type: ignore[misc]
        child.send(signal.SIGKILL)
        kills += child.wait()[0] == -signal.SIGKILL
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
    _die(two, _command(two, "--move"), where)
    two.assert_closed("a")
    two.assert_closed("b")
    merged = {**two.frames("a"), **two.frames("b")}
    assert merged == before, "every page is in one of the two"
    report = _finish(two, "--move")
    assert two.frames("b") == before
    assert two.frames("a") == {}
    if report["resumed"]:
        assert (report["copied"], report["deleted"]) == (pages, pages)


@pytest.mark.parametrize(("signum", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_it_says_how_to_go_on(two: Any, signum: int, expected: int) -> None:
    pages = len(two.fill("a", chains=20, longest=12).requests)
    child = Child(two, _command(two, "--rate", "100KiB", "--threads", "1"))
    child.until(lambda: _stored(two) > 0)
    child.send(signum)
    code, errors = child.wait()
    assert code == expected, errors
    text = " ".join(errors.split())
    assert "the same command goes on from here (journal var/migrate-a-b.journal)" in text
    assert "Traceback" not in text
    report = json.loads((two.folder / "report.json").read_bytes())
    assert not report["complete"]
    assert report["copied"] <= _stored(two) < pages
    two.assert_closed("b")
    again = _finish(two)
    assert (again["copied"], again["existed"]) == (pages, 0)


def test_what_a_killed_one_leaves_is_cleared(two: Any) -> None:
    """No owners, reservations or temporary files stay behind."""
    two.fill("a", chains=4, longest=4)
    where = f"{FILES}:publish:3:before"
    _die(two, _command(two), where)
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
    _die(two, _command(two, *options), where)
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
    _die(two, _command(two), where)
    names: list[ObjectId] = [request.object for request in tree.requests]
    assert all(two.path("b", name).exists() for name in names)
    report = _finish(two)
    assert (report["copied"], report["existed"]) == (len(names), 0)
