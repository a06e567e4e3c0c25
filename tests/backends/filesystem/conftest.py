"""Roots as the file system shows them, and processes of their own."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstrata.backends import BackendContext, ObjectId
from kvstrata.backends.filesystem import FilesystemBackend, FilesystemOptions
from kvstrata.backends.filesystem.files import object_path

WAIT_S = 20.0


class NoTmpfile:
    """The module `os` on a file system without `O_TMPFILE`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return os.open(path, flags, *args, **options)


class Faulty:
    """The module `os`, with a call that fails, or is watched."""

    def __init__(self) -> None:
        self.log: list[tuple[str, object]] = []
        self.fail: dict[str, list[int]] = {}
        """Errnos that the next calls of a name fail with."""
        self.most_bytes = 1 << 30
        """What one read or write moves at most."""

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name == "path" or not callable(real):
            return real

        def call(*args: Any, **options: Any) -> Any:
            self.log.append((name, args[:2]))
            errors = self.fail.get(name)
            if errors:
                code = errors.pop(0)
                raise OSError(code, os.strerror(code))
            if name in ("pwritev", "preadv"):
                fd, buffers, offset = args
                return real(fd, clip(buffers, self.most_bytes), offset)
            return real(*args, **options)

        return call


def clip(buffers: Any, most: int) -> list[memoryview]:
    clipped = []
    for buffer in buffers:
        clipped.append(buffer[:most])
        most -= clipped[-1].nbytes
        if most == 0:
            break
    return clipped


class Disk:
    """A root of the filesystem backend, as the file system shows it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def backend(self, sys: Any = os, **options: Any) -> FilesystemBackend:
        """A backend that is not open: a worker opens it."""
        options.setdefault("min_free_bytes", 0)
        return FilesystemBackend(FilesystemOptions(path=str(self.root), **options), sys)

    def open(self, sys: Any = os, wait: bool = True, **options: Any) -> FilesystemBackend:
        """A backend that is open, and whose first scan is over. The fixture closes it."""
        backend = self.backend(sys, **options)
        self.opened.append(backend)
        backend.open(self.context)
        assert not wait or backend.wait_for_scan(WAIT_S)
        return backend

    @property
    def context(self) -> BackendContext:
        return BackendContext("disk", on_evicted=self.evicted.extend)

    opened: list[FilesystemBackend]
    evicted: list[ObjectId]

    def frames(self) -> list[Path]:
        return [path for path in self.root.glob("objects/*/*/*") if path.is_file()]

    def path(self, name: ObjectId) -> Path:
        return self.root / object_path(name)

    def used_bytes(self) -> int:
        """What the frames take, in blocks, as `du` counts."""
        total = 0
        for path in self.frames():
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_blocks * 512
        return total

    def orphans(self) -> list[Path]:
        """Whatever belongs to no frame, no living owner and no index."""
        known, frames = {"lock", "scan.lock"}, set(self.frames())
        return [
            path
            for path in self.root.rglob("*")
            if path.is_file()
            and path not in frames
            and path.name not in known
            and not path.name.startswith("index-v1-")
        ]


@pytest.fixture
def make_disk() -> Iterator[Callable[[Path], Disk]]:
    disks: list[Disk] = []

    def make(root: Path) -> Disk:
        disk = Disk(root)
        disk.opened, disk.evicted = [], []
        disks.append(disk)
        return disk

    yield make
    for disk in disks:
        for backend in disk.opened:
            backend.close(5)


@pytest.fixture
def disk(tmp_path: Path, make_disk: Callable[[Path], Disk]) -> Disk:
    return make_disk(tmp_path / "root")


@pytest.fixture
def no_tmpfile() -> NoTmpfile:
    return NoTmpfile()


class Child:
    """`children.py` in a process of its own."""

    def __init__(self, command: str, prefix: Sequence[str] = (), **options: Any) -> None:
        here = Path(__file__).resolve()
        environment = {**os.environ, "PYTHONPATH": str(here.parents[3] / "src")}
        if command == "store_for_ever":  # it is killed: what it covers is lost with it
            environment.pop("COVERAGE_PROCESS_CONFIG", None)
        self.process = subprocess.Popen(
            [
                *prefix,
                sys.executable,
                str(here.parent / "children.py"),
                command,
                json.dumps(options),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def line(self) -> str:
        """The next line it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        """Let it pass the next `wait_for_parent`."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def result(self) -> Any:
        """What it printed last; it has ended well."""
        out, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == 0
        return json.loads(out.strip().splitlines()[-1])


@pytest.fixture
def start_child() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(command: str, prefix: Sequence[str] = (), **options: Any) -> Child:
        children.append(Child(command, prefix, **options))
        return children[-1]

    yield start
    for child in children:
        child.process.kill()
        child.process.communicate()


@pytest.fixture
def faulty() -> Faulty:
    return Faulty()
