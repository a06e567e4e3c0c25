"""Who is alive on a root: one folder a process, with a lock that ends with the process.

    <root>/lock             held while a process opens, closes or replaces the index
    <root>/owners/<id>/     one opened backend: `lock` (held by flock), temporary files

A flock tells a paused process from a dead one, survives no crash, and needs no clock. What a dead
owner left (temporary files, reservations in the index) is removed by the next one that opens.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import uuid
import weakref
from collections.abc import Iterator

from kvstrata.backends.filesystem.files import make_folder
from kvstrata.errors import StorageBusyError

OWNERS = "owners"
LOCK_WAIT_S = 30.0


def _open_lock(path: str, root_fd: int) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=root_fd)
    if os.fstat(fd).st_mode & 0o777 != 0o600:
        with contextlib.suppress(PermissionError):
            os.fchmod(fd, 0o600)
    return fd


def try_lock(path: str, root_fd: int) -> int | None:
    """A descriptor that holds the lock file `path` until it is closed, or None if another does."""
    fd = _open_lock(path, root_fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def root_lock(root_fd: int) -> Iterator[None]:
    """Hold `<root>/lock`. Raises `StorageBusyError` when another process does not let go of it."""
    end, pause_s = time.monotonic() + LOCK_WAIT_S, 0.001
    while (fd := try_lock("lock", root_fd)) is None:
        if time.monotonic() > end:
            raise StorageBusyError(f"another process has held the root's lock for {LOCK_WAIT_S} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    try:
        yield
    finally:
        os.close(fd)


class Owner:
    """This process on one root, from construction to `close`. Both need the root's lock held."""

    def __init__(self, root_fd: int) -> None:
        self.name = uuid.uuid4().hex
        self.folder = f"{OWNERS}/{self.name}"
        self._root_fd = root_fd
        for folder in (OWNERS, self.folder):
            make_folder(folder, root_fd)
        fd = try_lock(f"{self.folder}/lock", root_fd)
        assert fd is not None, "the name is fresh"
        self._lock_fd = fd
        os.write(fd, boot_id())
        _living.add(self)

    def close(self) -> None:
        if self._lock_fd >= 0:
            remove_owner(self.name, self._root_fd)
            self.abandon()

    def abandon(self) -> None:
        """Let go of the lock and leave the folder to others (in a forked child: to the parent)."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def boot_id() -> bytes:
    """Differs each time the machine starts; empty where there is no such thing."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return file.read().strip()
    except OSError:
        return b""


def dead_owners(root_fd: int) -> dict[str, bool]:
    """Owners whose process is gone, and whether the machine it ran on has been started since, or
    is another one. Needs the root's lock (an owner that is just being made would look dead)."""
    dead = {}
    fd = os.open(OWNERS, os.O_RDONLY | os.O_DIRECTORY, dir_fd=root_fd)
    try:
        names = os.listdir(fd)
    finally:
        os.close(fd)
    for name in names:
        try:
            lock = try_lock(f"{OWNERS}/{name}/lock", root_fd)
        except NotADirectoryError:
            continue
        if lock is not None:
            dead[name] = os.pread(lock, 64, 0) not in (b"", boot_id())
            os.close(lock)
    return dead


def remove_owner(name: str, root_fd: int) -> None:
    """Remove the folder of an owner and its temporary files."""
    folder = f"{OWNERS}/{name}"
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY, dir_fd=root_fd)
    try:
        for entry in os.listdir(fd):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(folder, dir_fd=root_fd)


_living: weakref.WeakSet[Owner] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for owner in list(_living):
        owner.abandon()


os.register_at_fork(after_in_child=_leave_to_parent)
