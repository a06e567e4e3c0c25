"""The name of an admin socket: one process at a time has it, and a dead one's is taken over."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from contextlib import ExitStack, suppress

from kvstrata.errors import ConfigError, Where

MODE = 0o600
BACKLOG = 8
_TRIES = 16
"""To lock a file that others, which end at the same moment, remove."""


class AdminSocket:
    """A listening socket at `path`, for this user only, and the lock beside it, `path.lock`.

    Whoever holds the lock has the name: the system drops it with the process, however that ends, so
    a socket without a holder is stale and is replaced. `close` leaves neither file behind.

    Raises ConfigError when another process has it, or the path cannot be used.
    """

    def __init__(self, path: str, where: Where) -> None:
        self.path = os.path.abspath(path)
        self._where = where
        with ExitStack() as undo:
            try:
                os.makedirs(os.path.dirname(self.path), exist_ok=True)
                self._lock = self._take_lock()
                undo.callback(self._drop_lock)
                self._clear(path)
                self.channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                undo.callback(self.channel.close)
                os.fchmod(self.channel.fileno(), MODE)  # before it has a name
                self.channel.bind(path)  # as it was given: a relative one may be shorter
                self._identity = _identity(self.path)
                self.channel.listen(BACKLOG)
                self.channel.setblocking(False)
            except OSError as error:
                raise ConfigError(
                    f"no socket can be made at {path}: {error.strerror or error}",
                    remedy="give a path in a folder that you may write, on a local file system",
                    where=where,
                ) from error
            undo.pop_all()

    def close(self) -> None:
        """Idempotent."""
        if self._lock < 0:
            return
        with suppress(OSError):
            if _identity(self.path) == self._identity:  # and not what somebody put in its place
                os.unlink(self.path)
        self.channel.close()
        self._drop_lock()

    def check_integrity(self) -> None:
        """Raise AssertionError unless it is closed, or has its name, its mode and its lock."""
        if self._lock < 0:
            assert self.channel.fileno() < 0
            return
        assert _identity(self.path) == self._identity
        assert stat.S_IMODE(os.stat(self.path).st_mode) == MODE
        assert _identity(self._lock_path) == _identity(self._lock)

    @property
    def _lock_path(self) -> str:
        return f"{self.path}.lock"

    def _take_lock(self) -> int:
        for _ in range(_TRIES):
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, MODE)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _identity(self._lock_path) == _identity(fd):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                    return fd
            except BlockingIOError:
                owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
                os.close(fd)
                raise self._taken(f"process {owner or 'unknown'}") from None
            except FileNotFoundError:
                pass  # its holder has just removed it
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
        raise self._taken("another process")

    def _drop_lock(self) -> None:
        with suppress(OSError):
            os.unlink(self._lock_path)  # while it is held: nobody else has it as theirs
        os.close(self._lock)
        self._lock = -1

    def _clear(self, path: str) -> None:
        """Remove what a dead process left. Raises ConfigError for what is no such thing."""
        try:
            mode = os.lstat(self.path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise ConfigError(
                f"{path} is there, and is no socket",
                remedy="give the path of a file that is not there, or remove it",
                where=self._where,
            )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            if probe.connect_ex(path) in (
                0,
                errno.EAGAIN,
            ):  # its lock was removed, or it is not ours
                raise self._taken("another process")
        os.unlink(self.path)

    def _taken(self, who: str) -> ConfigError:
        return ConfigError(
            f"{who} listens at {self.path}",
            remedy="end it first, or give each process a socket of its own",
            where=self._where,
        )


def _identity(file: str | int) -> tuple[int, int]:
    found = os.lstat(file) if isinstance(file, str) else os.fstat(file)
    return found.st_dev, found.st_ino
