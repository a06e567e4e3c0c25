"""Processes that answer nonsense, half of something, too much, or leave others behind."""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvstrata.backends import BackendContext
from kvstrata.backends.policies import ProcessSettings
from kvstrata.backends.process import ProcessBackend, wire
from kvstrata.boundary import Outcome
from kvstrata.errors import KvstrataError, StorageError, StorageUnavailableError

WAIT_S = 20.0
PLUGIN = """
import array, os, socket, struct, sys, threading, time
from pathlib import Path
import msgspec
from kvstrata.backends import ObjectId, PageResult
from kvstrata.backends.memory import MemoryBackend
from kvstrata.boundary import Outcome
from kvstrata.errors import StorageError


class Options(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    how: str = ""
    max_bytes: int = 0
    once: str = ""


def sockets():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
        except OSError:
            pass
    return sorted(found)


def say(data):
    for fd in sockets():
        os.write(fd, data)


class Hostile(MemoryBackend):
    Options = Options

    def open(self, context):
        super().open(context)
        with open(self.options.once + ".opens", "a") as file:
            file.write(f"{time.monotonic()}\\n")
        if self.options.how.startswith("open"):
            if os.path.exists(self.options.once):
                {"open exit": lambda: os._exit(3), "open half": self._half,
                 "open nonsense": lambda: say(b"\\x01\\0\\0\\0\\0\\x07")}[self.options.how]()
            Path(self.options.once).touch()
        self.context = context

    def _half(self):
        say(struct.pack("<IB", 1000, 0) + b"abc")
        time.sleep(1000)

    def exists(self, objects):
        how, self_fd = self.options.how, None
        if how == "objects":
            return [object() for _ in objects]
        if how == "surrogates":
            raise StorageError("no file \\udcff")
        if how == "more":
            return [True] * (len(objects) + 7)
        if how and hasattr(self, "_" + how) and not os.path.exists(self.options.once):
            Path(self.options.once).touch()
            getattr(self, "_" + how)()
        return super().exists(objects)

    def read(self, requests):
        if self.options.how == "surrogates":
            return [PageResult(Outcome.ERROR, 0, "no file \\udcff") for _ in requests]
        if self.options.how == "objects":
            return [PageResult(Outcome.LOADED, object()) for _ in requests]
        if self.options.how == "contradicts" and not os.path.exists(self.options.once):
            Path(self.options.once).touch()
            body = msgspec.msgpack.encode(["Results", [Outcome.LOADED], [1, 2], {}])
            say(struct.pack("<IB", len(body), 0) + body)
            time.sleep(1000)
        return super().read(requests)

    def usage(self):
        return 17 if self.options.how == "objects" else super().usage()

    def _garbage(self):
        say(b"\\xff\\xfe garbage" * 3)
        time.sleep(1000)

    def _undecodable(self):
        say(struct.pack("<IB", 4, 0) + b"\\xc1\\xc1\\xc1\\xc1")
        time.sleep(1000)

    def _huge(self):
        say(struct.pack("<IB", 2**32 - 1, 0))
        time.sleep(1000)

    def _close(self):
        for fd in sockets():
            os.close(fd)
        time.sleep(1000)

    def _wrong(self):
        say(struct.pack("<IB", 6, 0) + msgspec.msgpack.encode(["Done"]))
        time.sleep(1000)

    def _descriptors(self):
        for fd in sockets():
            link = socket.socket(fileno=os.dup(fd))
            body = msgspec.msgpack.encode(["Flags", [True]])
            socket.send_fds(link, [struct.pack("<IB", len(body), 3)], [0, 0, 0])
            link.sendall(body)
        time.sleep(1000)

    def _fork(self):
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(4)

    def _daemon(self):
        if os.fork() == 0:
            os.setsid()
            Path(self.options.once + ".pid").write_text(str(os.getpid()))
            time.sleep(1000)
        while not os.path.exists(self.options.once + ".pid"):
            time.sleep(0.01)
        os._exit(4)

    def _evicting_leak(self):
        def evict():
            while True:
                self.context.on_evicted([ObjectId(bytes(32), bytes(32))])
                time.sleep(0.01)

        threading.Thread(target=evict, daemon=True).start()
        self.leaked = b"x" * 2**27
"""


@pytest.fixture
def open_hostile(tmp_path: Path, monkeypatch: Any) -> Iterator[Callable[..., ProcessBackend]]:
    """The fault happens in the first call of `exists`, or the second `open`."""
    (tmp_path / "kvstrata_hostile.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("kvstrata_hostile", None)
    import kvstrata_hostile  # type: ignore[import-not-found]

    opened: list[ProcessBackend] = []

    def make(how: str, **settings: Any) -> ProcessBackend:
        options = kvstrata_hostile.Options(how=how, once=str(tmp_path / "once"))
        settings = {"restart_delay_s": 0.01, **settings}
        backend = ProcessBackend(kvstrata_hostile.Hostile, options, ProcessSettings(**settings))
        opened.append(backend)
        backend.open(BackendContext("hostile", on_evicted=lambda _: None))
        return backend

    yield make
    for backend in opened:
        backend.close(2.0)
    sys.modules.pop("kvstrata_hostile", None)


def in_time(call: Callable[[], Any], most_s: float = 5.0) -> Any:
    """What it returns, or the error it raises. It must do one of them soon."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except KvstrataError as error:
            found.append(error)
        except BaseException as error:  # noqa: BLE001
            found.append(AssertionError(repr(error)))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(most_s)
    assert found, "it neither returns nor raises"
    return found[0]


def test_answers_that_cannot_be_said(open_hostile, make_pages) -> None:
    """The thread in the process ended without an answer, and its call was waited for."""
    pages = make_pages()
    backend = open_hostile("objects")
    pid = backend.pid
    assert in_time(lambda: backend.exists(pages.names(0, 2))) == [True, True]
    answer = in_time(lambda: backend.read(pages.reads(0, 2)))
    assert isinstance(answer, StorageError)
    assert "object" in str(answer)
    assert isinstance(in_time(backend.usage), StorageError)
    assert backend.pid == pid  # nothing had to be killed
    assert len(in_time(lambda: backend.write(pages.writes(0, 2)))) == 2


def test_texts_that_are_not_unicode(open_hostile, make_pages) -> None:
    """As in the names of files."""
    pages = make_pages()
    backend = open_hostile("surrogates")
    answer = in_time(lambda: backend.exists(pages.names(0, 1)))
    assert isinstance(answer, StorageError)
    assert "no file" in str(answer)
    (result,) = in_time(lambda: backend.read(pages.reads(0, 1)))
    assert "no file" in result.message


@pytest.mark.parametrize("how", ["garbage", "undecodable", "huge", "close", "wrong", "fork"])
def test_nonsense_costs_the_call(open_hostile, make_pages, how: str) -> None:
    """And the process: who talks nonsense may write anywhere."""
    pages = make_pages()
    backend = open_hostile(how)
    pid = backend.pid
    answer = in_time(lambda: backend.exists(pages.names(0, 1)))
    assert isinstance(answer, StorageUnavailableError)
    assert not Path(f"/proc/{pid}").exists()
    assert backend.wait_up(WAIT_S)
    assert in_time(lambda: backend.exists(pages.names(0, 1))) == [False]


def test_results_that_contradict_themselves(open_hostile, make_pages) -> None:
    """They can be decoded, and are nonsense all the same."""
    pages = make_pages()
    backend = open_hostile("contradicts")
    pid = backend.pid
    answer = in_time(lambda: backend.read(pages.reads(0, 2)))
    assert isinstance(answer, StorageUnavailableError)
    assert "different numbers" in str(answer)
    assert not Path(f"/proc/{pid}").exists()
    assert backend.wait_up(WAIT_S)
    results = in_time(lambda: backend.read(pages.reads(0, 2)))
    assert [r.outcome for r in results] == [Outcome.MISSING] * 2


def test_descriptors_that_come_with_an_answer(open_hostile, make_pages) -> None:
    pages = make_pages()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    backend = open_hostile("descriptors")
    in_time(lambda: backend.exists(pages.names(0, 1)))
    backend.kill("a test")
    backend.close(5.0)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("body", "sent"), [(b"", 9), (b"\x93\x01", 9), (b"\xc1", 1), (b"", 2**32 - 1), (b"", None)]
)
def test_descriptors_of_what_is_no_message(body: bytes, sent: int | None) -> None:
    """Half a message, what cannot be decoded, one that is too long, half a head."""
    before = len(os.listdir("/proc/self/fd"))
    ours, theirs = socket.socketpair()
    head = struct.pack("<IB", sent or 0, 3) if sent is not None else b"\0\0"
    socket.send_fds(theirs, [head], [0, 0, 0])
    theirs.sendall(body)
    theirs.close()
    with pytest.raises((EOFError, ValueError)):
        wire.Channel(ours).receive(wire.answers)
    ours.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_fork_of_the_server_closes_nothing(open_hostile, make_pages) -> None:
    """A copy of the server that comes to `close`, as in a `finally`, has no say."""
    backend = open_hostile("")
    pid = backend.pid
    copy = os.fork()
    if copy == 0:
        try:
            backend.kill("a copy")
            backend.close(0.1)
        finally:
            os._exit(0)
    assert os.waitpid(copy, 0)[1] == 0
    assert in_time(lambda: backend.exists(make_pages().names(0, 1))) == [False]
    assert backend.pid == pid
    begin = os.times()
    threading.Event().wait(0.3)
    spent = os.times()
    assert spent.user + spent.system - begin.user - begin.system < 0.2  # nobody spins


def test_a_daemon_that_keeps_the_sockets_open(open_hostile, make_pages, tmp_path: Path) -> None:
    """The death is seen all the same."""
    pages = make_pages()
    backend = open_hostile("daemon")
    try:
        answer = in_time(lambda: backend.exists(pages.names(0, 1)))
        assert isinstance(answer, StorageUnavailableError)
        assert backend.wait_up(WAIT_S)
    finally:
        os.kill(int((tmp_path / "once.pid").read_text()), signal.SIGKILL)


def test_a_leak_beside_evictions(open_hostile, make_pages) -> None:
    """What it tells of evictions, all the time, keeps nobody from looking at its memory."""
    backend = open_hostile("evicting_leak", memory_bytes=2**26)
    fd = os.pidfd_open(backend.pid)
    in_time(lambda: backend.exists(make_pages().names(0, 1)))
    assert select.select([fd], [], [], 5.0)[0], "it was not killed"
    os.close(fd)
    assert backend.wait_up(WAIT_S)


@pytest.mark.parametrize("how", ["open half", "open nonsense", "open exit"])
def test_restarts_that_fail(open_hostile, how: str, tmp_path: Path) -> None:
    """A restart that is answered with half a message, or by nobody, is given up; what comes then
    takes ever longer."""
    backend = open_hostile(how, open_deadline_s=0.5, restart_delay_s=0.05)
    opens, tick = tmp_path / "once.opens", threading.Event()

    def times() -> list[float]:
        return [float(line) for line in opens.read_text().split()]

    begin = time.monotonic()
    backend.kill("a test")
    while len(times()) < 4:  # the first was a good one
        assert time.monotonic() - begin < 2 * WAIT_S, "it is not tried again"
        tick.wait(0.01)
    (tmp_path / "once").unlink()
    assert backend.wait_up(WAIT_S)
    assert in_time(backend.usage).objects == 0
    waits = [later - sooner for sooner, later in pairwise(times()[1:])]
    assert all(wait >= 0.05 * 2**n for n, wait in enumerate(waits, 1)), waits
