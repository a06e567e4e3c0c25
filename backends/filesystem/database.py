"""The SQLite file of the index: its generations, its transactions, its damage.

The index is derived from the frames, so it is never worth more than a rebuild. A database that is
damaged, or whose file vanished, is not repaired: the next *generation* (`index-v1-<n>.sqlite`) is
made, empty, and every process on the root moves to it before its next transaction. SQLite removes
its `-wal` file by name when the last connection closes; a name that is never used twice keeps a
process that still holds the old file from removing what belongs to the new one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from kvstrata.backends.filesystem.oserrors import index_error, is_damage, storage_error
from kvstrata.backends.filesystem.owners import root_lock, try_lock
from kvstrata.errors import ClosedError, StorageFullError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_NAME = re.compile(r"index-v1-(\d+)\.sqlite")
_BUSY_WAIT_S = 10.0

SCHEMA = """
CREATE TABLE meta(
  id INTEGER PRIMARY KEY,
  used INTEGER NOT NULL,       -- cost of all frames that are present
  objects INTEGER NOT NULL,    -- how many they are
  inflight INTEGER NOT NULL,   -- cost of all batches
  next_id INTEGER NOT NULL,    -- of the next row of frames
  stamp INTEGER NOT NULL,      -- the last `used` given out
  removals INTEGER NOT NULL,   -- how often frames went otherwise than by eviction
  complete INTEGER NOT NULL    -- 1: every frame on disk has its row
);
CREATE TABLE namespaces(id INTEGER PRIMARY KEY, fingerprint BLOB NOT NULL UNIQUE);
CREATE TABLE frames(
  id INTEGER PRIMARY KEY,
  ns INTEGER NOT NULL,
  key BLOB NOT NULL,
  parent INTEGER,              -- id of the parent's row; NULL: depth 0, or not known
  children INTEGER NOT NULL,   -- how many rows have this one as parent
  pins INTEGER NOT NULL,       -- how many batches have pages whose parent this is
  depth INTEGER NOT NULL,
  cost INTEGER NOT NULL,
  used INTEGER NOT NULL,       -- when last used: microseconds, made to grow
  present INTEGER NOT NULL,    -- 0: the frame is gone; the row stays while children or pins need it
  UNIQUE(ns, key)
);
CREATE INDEX leaves ON frames(used) WHERE present=1 AND children=0 AND pins=0;
CREATE TABLE batches(          -- reservations: frames that are being published
  id INTEGER PRIMARY KEY,
  owner TEXT NOT NULL,
  cost INTEGER NOT NULL,
  manifest BLOB NOT NULL
);
"""


class Database:
    """One connection, one transaction at a time. Thread-safe; unusable after a fork.

    Two locks, always in this order: the one of this object, then the root's. Whoever holds the
    root's has it from `hold_root`, so that a transaction within, which may find damage and need
    it too, does not wait for its own thread.

    `is_empty` says whether a new generation is complete as it is: there are no frames on disk.
    `on_replaced` is called when it moved to another generation; it does not block.
    """

    def __init__(
        self,
        root: str,
        root_fd: int,
        is_empty: Callable[[], bool],
        on_replaced: Callable[[], None],
    ) -> None:
        self.generation = 0
        self._root = root
        self._root_fd = root_fd
        self._is_empty = is_empty
        self._on_replaced = on_replaced
        self._lock = threading.RLock()
        self._root_held = False
        self._pid = os.getpid()
        self._closed = False
        self._connection: sqlite3.Connection | None = None
        self._inode = 0

    @property
    def path(self) -> str:
        return os.path.join(self._root, _file_name(self.generation))

    @contextlib.contextmanager
    def hold_root(self) -> Iterator[None]:
        """Hold the root's lock (and this object's); within it, again is no wait.

        Raises `StorageBusyError` when another process does not let go of it.
        """
        with self._lock:
            if self._root_held:
                yield
                return
            with root_lock(self._root_fd):
                self._root_held = True
                try:
                    yield
                finally:
                    self._root_held = False

    @contextlib.contextmanager
    def try_hold_root(self) -> Iterator[bool]:
        """As `hold_root`, but False at once when another process holds the root's lock."""
        with self._lock:
            if self._root_held:
                yield True
                return
            lock = try_lock("lock", self._root_fd)
            if lock is None:
                yield False
                return
            self._root_held = True
            try:
                yield True
            finally:
                self._root_held = False
                os.close(lock)

    def open(self) -> None:
        """Connect to the current generation, or make one."""
        with self.hold_root():
            try:
                self._move_to(max(self._generations(), default=1))
            except sqlite3.Error as error:
                raise index_error(error, self.path) from error

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._disconnect()

    def renew(self) -> None:
        """Begin a new generation: this one cannot be trusted."""
        with self.hold_root():
            try:
                self._replace()
            except sqlite3.Error as error:
                raise index_error(error, self.path) from error

    def run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """`work` in one immediate transaction. It may be run twice: after damage is found.

        Raises `StorageError` for what SQLite or the system raises, `ClosedError` after `close` or
        in a fork.
        """
        with self._lock:
            try:
                try:
                    return _transact(self._current(), work)
                except sqlite3.Error as error:
                    if not is_damage(error):
                        raise
                    logger.warning("the index %s is damaged (%s); rebuilding", self.path, error)
                with self.hold_root():
                    self._replace()
                return _transact(self._current(), work)
            except sqlite3.Error as error:
                translated = index_error(error, self.path)
                if isinstance(translated, StorageFullError):
                    self._shrink()
                raise translated from error
            except OSError as error:  # of the lock, of a new generation, or of a frame
                raise storage_error(error, error.filename or self._root) from error

    def _shrink(self) -> None:
        """The disk is full: give back what the log of the database takes."""
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    # ── generations ──────────────────────────────────────────────────────────────────────────────

    def _current(self) -> sqlite3.Connection:
        """The connection to the newest generation. If it cannot be had now, the next call tries
        again."""
        if self._closed or self._pid != os.getpid():
            raise ClosedError("the index is closed, or was opened by the parent of this process")
        if self._connection is None or not self.is_newest(self.generation):
            with self.hold_root():
                self._replace()  # or move to what another process has made
        assert self._connection is not None, "connected, or it has raised"
        return self._connection

    def is_newest(self, generation: int) -> bool:
        """Whether `generation` is that of this connection, and no other process has made one since.
        Any thread."""
        if generation != self.generation or os.access(
            _file_name(self.generation + 1), os.F_OK, dir_fd=self._root_fd
        ):
            return False
        try:
            found = os.stat(_file_name(self.generation), dir_fd=self._root_fd)
        except FileNotFoundError:
            return False
        return found.st_ino == self._inode

    def _replace(self) -> None:
        """Move to a generation after the one that is damaged or lost. Needs the root's lock."""
        newest = max(self._generations(), default=0)
        self._move_to(newest if newest > self.generation else self.generation + 1)

    def _move_to(self, generation: int) -> None:
        """Connect to `generation`, or to the one after all that are there if it is damaged."""
        try:
            self._connect(generation)
        except sqlite3.Error as error:
            if not is_damage(error):
                raise
            logger.warning("generation %d of the index is damaged (%s)", generation, error)
            self._connect(max(self._generations(), default=generation) + 1)

    def _connect(self, generation: int) -> None:
        """Leave the connection there is, if any, when the new one works, not before."""
        name = _file_name(generation)
        inode = self._create(name)
        connection = sqlite3.connect(
            os.path.join(self._root, name),
            timeout=_BUSY_WAIT_S,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=512,
        )
        try:
            _configure(connection)
            tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if not tables:
                complete = int(self._is_empty())
                values = f"INSERT INTO meta VALUES (1, 0, 0, 0, 1, 0, 0, {complete});"
                connection.executescript(f"BEGIN IMMEDIATE;{SCHEMA}{values}COMMIT;")
        except BaseException:
            connection.close()
            raise
        self._disconnect()
        is_first, self.generation = self.generation == 0, generation
        self._connection, self._inode = connection, inode
        if not is_first:
            self._on_replaced()
        with contextlib.suppress(OSError):  # who comes next tries again
            for old in self._generations():
                if old < generation:
                    self._remove(old)

    def _create(self, name: str) -> int:
        """Make the file, for its owner only; SQLite gives its other files the same mode. Its inode.

        An existing file is not even opened: closing it would drop the locks that SQLite holds on
        it for other connections of this process.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with contextlib.suppress(FileExistsError):
            fd = os.open(name, flags, 0o600, dir_fd=self._root_fd)
            try:
                os.fchmod(fd, 0o600)  # whatever the umask
            finally:
                os.close(fd)
        return os.stat(name, dir_fd=self._root_fd).st_ino

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and self._pid == os.getpid():
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _generations(self) -> list[int]:
        return [int(m[1]) for name in os.listdir(self._root) if (m := _NAME.fullmatch(name))]

    def _remove(self, generation: int) -> None:
        name = _file_name(generation)
        for suffix in ("", "-wal", "-shm", "-journal"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name + suffix, dir_fd=self._root_fd)


def _file_name(generation: int) -> str:
    return f"index-v1-{generation}.sqlite"


def _configure(connection: sqlite3.Connection) -> None:
    """No wait for the device: a power loss at worst costs a rebuild."""
    try:
        connection.execute("PRAGMA journal_mode=WAL").fetchone()
    except sqlite3.OperationalError:  # no shared memory on this file system
        connection.execute("PRAGMA journal_mode=TRUNCATE").fetchone()
    for pragma in (
        "synchronous=OFF",
        "secure_delete=OFF",
        "wal_autocheckpoint=256",
        "cache_size=-16384",
        "temp_store=MEMORY",
    ):
        connection.execute(f"PRAGMA {pragma}").fetchone()


def _transact(connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], _T]) -> _T:
    connection.execute("BEGIN IMMEDIATE")
    try:
        result = work(connection)
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise
    return result
