"""Starts replays fast: imports everything once, then forks a process for each order.

An order is a line of JSON on stdin, the answer a line on stdout. `{"args": […], …}` starts
`kvstrata ARGS` in a process of its own, `{"wait": PID}` says how it ended. The process is real: it
has its own descriptors, threads and files. What a test plants in it is one of the functions
`plant_…`, called before the command.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import io
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvstrata.backends.filesystem import FilesystemBackend
from kvstrata.handles import Tier
from kvstrata.staging.pages import PageState
from kvstrata.tools import cli, replay
from kvstrata.tools.engine import Engine


def serve() -> None:
    # What the command imports only when it is called is imported before the first fork.
    local = Path(__file__).resolve().parents[2] / "configs/local.toml"
    with contextlib.redirect_stderr(io.StringIO()):
        assert cli.main(["replay", "--config", str(local), "--trace", "none.jsonl"]) == 2
    gc.collect()
    gc.freeze()  # children share what they do not write to
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            _, status, usage = os.wait4(order["wait"], 0)
            answer = {"code": os.waitstatus_to_exitcode(status), "rss": usage.ru_maxrss}
        else:
            pid = os.fork()
            if pid == 0:
                start(order)
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)


def start(order: dict[str, Any]) -> None:
    """Become the command of `order`. Does not return."""
    sys.stdin.close()
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for fd, path, how in ((0, "/dev/null", os.O_RDONLY), (1, order["out"], flags),
                          (2, order["err"], flags)):  # fmt: skip
        opened = os.open(path, how, 0o600)
        os.dup2(opened, fd)
        os.close(opened)
    os.chdir(order["folder"])
    os.environ.update(order["env"])
    if order["plant"].get("os", {}).get("kill_at"):  # what it covers would be lost with it
        sys.settrace(None)
        threading.settrace(None)
    for name, options in order["plant"].items():
        globals()[f"plant_{name}"](**options)
    code = 1
    try:
        code = cli.main(order["args"])
    except BaseException:  # noqa: BLE001 (it is printed, as the interpreter does)
        traceback.print_exc()
    finally:
        # As the interpreter ends, but for the modules of torch: to take them down takes a second.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# ── what tests plant ─────────────────────────────────────────────────────────────────────────────


class Os:
    """The module `os` as the file-system backend sees it.

    `named`: without `O_TMPFILE`. `kill_at`: the process kills itself before (or, with "…ed", after)
    the `kill_on`-th call of that name; "half" is in the middle of a write.
    `room_bytes`: the disk is full when so much was written. `hang_on`: that write never returns.
    `signals`: what the process gets after its n-th link, by n.
    """

    def __init__(
        self,
        named: bool = False,
        kill_at: str = "",
        kill_on: int = 1,
        room_bytes: int = -1,
        hang_on: int = 0,
        signals: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._named = named
        self._kill_at = kill_at
        self._left = kill_on
        self._room_bytes = room_bytes
        self._until_hang = hang_on
        self._signals = dict(signals)
        self._links = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, flags: int, *args: Any, **options: Any) -> int:
        if self._named and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return os.open(path, flags, *args, **options)

    def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
        if self._room_bytes >= 0:
            self._room_bytes -= sum(buffer.nbytes for buffer in buffers)
            if self._room_bytes < 0:
                self._room_bytes = 0
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._until_hang -= 1
        if self._until_hang == 0:
            threading.Event().wait()
        if self._kill_at == "half" and self._left == 1:
            half = memoryview(b"".join(buffers))
            os.pwritev(fd, [half[: len(half) // 2]], offset)
        self._maybe_kill("half")
        done = os.pwritev(fd, buffers, offset)
        self._maybe_kill("written")
        return done

    def link(self, *args: Any, **options: Any) -> None:
        self._maybe_kill("link")
        os.link(*args, **options)
        self._maybe_kill("linked")
        self._links += 1
        if self._links in self._signals:
            os.kill(os.getpid(), self._signals[self._links])

    def unlink(self, *args: Any, **options: Any) -> None:
        self._maybe_kill("unlink")
        os.unlink(*args, **options)

    def _maybe_kill(self, where: str) -> None:
        if where == self._kill_at:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def plant_os(**options: Any) -> None:
    """Backends opened from now on see this `os`."""
    FilesystemBackend.__init__.__defaults__ = (Os(**options),)


def plant_user(uid: int) -> None:
    """Go on as another user. What the command needs was imported before."""
    os.setgroups([])
    coverage = sys.modules.get("coverage")
    measured = coverage.Coverage.current() if coverage else None
    if measured:  # that user cannot write its data file: what ran so far is saved now
        measured.stop()
        measured.save()
        measured._auto_save = False
    os.setgid(uid)
    os.setuid(uid)


def plant_plugins(folder: str) -> None:
    """Distributions in `folder` are installed."""
    sys.path.insert(0, folder)


def plant_says_that_it_opens() -> None:
    """The file `opens` is there when the backend is being opened."""
    opened = FilesystemBackend.open

    def open_backend(self: FilesystemBackend, context: Any) -> None:
        Path("opens").touch()
        opened(self, context)

    FilesystemBackend.open = open_backend  # type: ignore[method-assign]


def plant_flip(tier: str, after: int) -> None:
    """When `after` requests have ended, flip a bit in the pages of L1 or of L2."""
    opened = replay.open_engine

    def open_engine(*args: Any, **options: Any) -> Engine:
        engine = opened(*args, **options)
        step, ended = engine.scheduler.step, [0]

        def flipping(timeout_s: float) -> Any:
            results = step(timeout_s)
            before, ended[0] = ended[0], ended[0] + len(results)
            if before < after <= ended[0]:
                flip(engine, Tier[tier])
            return results

        engine.scheduler.step = flipping  # type: ignore[method-assign]
        return engine

    replay.open_engine = open_engine


def flip(engine: Engine, tier: Tier) -> None:
    """Flip a bit in the first byte of every page that nobody is moving.

    Pages that a store is reading are left alone: a bit that flips behind the checksum makes a frame
    corrupt, which is a miss later, and not what is looked for here.
    """
    core = engine.runtime.core
    assert core.worker is not None
    assert core.worker.flush(20), "stores do not end"
    with core.lock:
        for name, pool in core.pools.items():
            table = core.table(tier, name)
            pages = np.flatnonzero(table._state == PageState.READY)
            if tier is Tier.L1:
                pool.data[0, pages, 0] ^= 1
            else:
                core.staging.array(name)[pages, 0] ^= 1


if __name__ == "__main__":
    serve()
