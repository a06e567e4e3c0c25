"""A master and stores on this machine, for development, tests and benchmarks."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

import msgspec

from kvstrata.backends.mooncake.admin import Admin, answers
from kvstrata.backends.mooncake.options import MooncakeOptions, parse_address
from kvstrata.backends.mooncake.requirements import client_folder, load_client
from kvstrata.errors import ConfigError, StorageError, StorageUnavailableError, Where

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.02
_LOG_TAIL = 2000
_STOP_S = 5.0

_libc = ctypes.CDLL(None, use_errno=True)


class LocalCluster:
    """Processes that end with this one, however it ends (start it from the main thread: the kernel
    ties them to the thread that starts them). One thread uses it."""

    def __init__(
        self,
        options: MooncakeOptions,
        stores: int,
        master_flags: Sequence[str] = (),
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """`should_stop`: asked while it starts; then it gives up without an error.

        Raises `ConfigError` for a master that cannot be on this machine, or without its HTTP
        server, which tells when the stores are there."""
        load_client()
        if options.admin_address is None:
            raise ConfigError(
                "admin is none, and a local master is asked over HTTP whether it is ready",
                remedy='set admin to HOST:PORT, or leave it at ""',
                where=Where(key="admin"),
            )
        self._options = options
        self._host, self._port = parse_address(options.master, "master")
        self._admin_host, self._admin_port = parse_address(options.admin_address, "admin")
        self._admin = Admin(options.admin_address, 1.0)
        self._flags = tuple(master_flags)
        self._wanted = stores
        self._should_stop = should_stop
        self._folder = tempfile.TemporaryDirectory(prefix="kvstrata-mooncake-")
        self.master: subprocess.Popen[bytes] | None = None
        self.stores: list[subprocess.Popen[bytes]] = []
        self.names: list[str] = []
        """Segments, as the master calls them; one a store, in order."""
        self._titles: list[str] = []
        """Of the stores; a log each."""
        self._numbers = itertools.count()

    # ── life ─────────────────────────────────────────────────────────────────────────────────────

    def start(self, deadline_s: float = 20.0) -> None:
        """Start everything and wait until it works. Raises `StorageError` with the log of whoever
        does not come up; then nothing is left running."""
        try:
            self.start_master(deadline_s)
            self.start_stores(self._wanted, deadline_s)
        except BaseException:
            self.stop()
            raise

    def start_master(self, deadline_s: float = 20.0) -> None:
        if answers(self._options.master, 0.5):
            raise ConfigError(
                f"somebody listens at {self._options.master} already",
                remedy="stop that master, or choose another port",
                where=Where(key="master"),
            )
        folder = client_folder()
        assert folder is not None
        libraries = [str(p) for p in folder.parent.glob("mooncake_transfer_engine*.libs")]
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": ":".join([*libraries, str(folder)]),
            "GLOG_minloglevel": "0",  # its log says why it does not come up
        }
        command = [
            str(folder / "mooncake_master"),
            f"-rpc_address={self._host}",
            f"-rpc_port={self._port}",
            f"-metrics_host={self._admin_host}",
            f"-metrics_port={self._admin_port}",
            f"-default_kv_lease_ttl={int(self._options.lease_s * 1000)}",
            "-logtostderr=true",
            *self._metadata_flags(),
            *self._flags,
        ]
        self.master = self._spawn(command, "master", environment)
        self._wait(self.master, "master", self._is_serving, deadline_s)

    def start_stores(self, count: int, deadline_s: float = 20.0) -> None:
        """All at once: most of it is waiting. When one fails, all of these are gone."""
        options = msgspec.structs.replace(self._options, role="store", client_http_port=0)
        command = [
            sys.executable,
            "-m",
            "kvstrata.backends.mooncake.store_process",
            msgspec.json.encode(options).decode(),
        ]
        started: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for _ in range(count):
                title = f"store-{next(self._numbers)}"
                started[title] = self._spawn(command, title, dict(os.environ))
            for title, store in started.items():
                self._wait(store, title, partial(self._has_joined, title), deadline_s)
        except BaseException:
            for store in started.values():
                _kill(store)
            raise
        self._titles += started
        self.stores += started.values()
        self.names += map(self._name, started)

    def stop(self, deadline_s: float = _STOP_S) -> None:
        """SIGTERM for the master, and SIGKILL at the deadline. The stores are killed at once: what
        they hold is lost without the master, and to take leave of it takes two seconds.
        Idempotent."""
        for store in self.stores:
            store.kill()
        if self.master is not None and self.master.poll() is None:
            self.master.send_signal(signal.SIGCONT)
            self.master.terminate()
        running = [p for p in (*self.stores, self.master) if p is not None]
        end = time.monotonic() + deadline_s
        for process in running:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        self.stores, self.names, self._titles, self.master = [], [], [], None
        self._folder.cleanup()

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # ── while it runs ────────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Raises `StorageUnavailableError` when one of the processes has ended by itself."""
        titles = [*self._titles, "master"]
        for title, process in zip(titles, (*self.stores, self.master), strict=True):
            if process is not None and process.poll() is not None:
                raise StorageUnavailableError(
                    f"the {title} has ended with {process.returncode}: {self._log(title)}"
                )

    def kill_master(self) -> None:
        assert self.master is not None
        _kill(self.master)
        self.master = None

    def kill_store(self, index: int) -> str:
        """SIGKILL; the name of its segment."""
        _kill(self.stores.pop(index))
        del self._titles[index]
        return self.names.pop(index)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _metadata_flags(self) -> list[str]:
        scheme, found, rest = self._options.metadata.partition("://")
        if not found or scheme != "http":
            return []
        host, port = parse_address(rest.partition("/")[0], "metadata")
        return [
            "-enable_http_metadata_server=true",
            f"-http_metadata_server_host={host}",
            f"-http_metadata_server_port={port}",
        ]

    def _spawn(
        self, command: Sequence[str], title: str, environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        parent = os.getpid()

        def tie() -> None:
            """In the child: end when the parent does, by whatever signal."""
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        with self._log_path(title).open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for this process, which ends them in order
                preexec_fn=tie,  # noqa: PLW1509 (it takes no lock)
            )

    def _wait(
        self,
        process: subprocess.Popen[bytes],
        title: str,
        is_ready: Callable[[], bool],
        deadline_s: float,
    ) -> None:
        end = time.monotonic() + deadline_s
        while not (is_ready() or self._should_stop()):
            if process.poll() is not None:
                raise StorageError(
                    f"the {title} has ended with {process.returncode}: {self._log(title)}"
                )
            if time.monotonic() > end:
                raise StorageError(
                    f"the {title} is not ready after {deadline_s:g} s: {self._log(title)}"
                )
            time.sleep(_POLL_S)

    def _is_serving(self) -> bool:
        try:
            return answers(self._options.master, 0.5) and self._admin.is_serving()
        except StorageError:
            return False

    def _has_joined(self, title: str) -> bool:
        """Whether a store has said its name, and the master counts with it."""
        name = self._name(title)
        return bool(name) and name in self._segments()

    def _name(self, title: str) -> str:
        """Of a store's segment; "" before it is ready."""
        with contextlib.suppress(OSError):
            log = self._log_path(title).read_text(errors="replace")
            if said := re.search(r"^ready (\S+) ", log, re.MULTILINE):
                return said[1]
        return ""

    def _segments(self) -> list[str]:
        try:
            return [segment.name for segment in self._admin.segments()]
        except StorageError:
            return []

    def _log_path(self, title: str) -> Path:
        return Path(self._folder.name) / f"{title}.log"

    def _log(self, title: str) -> str:
        try:
            return self._log_path(title).read_text(errors="replace")[-_LOG_TAIL:].strip()
        except OSError:
            return "no log"


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
