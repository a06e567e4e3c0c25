"""Where errors of the operating system and of SQLite become errors of this package."""

from __future__ import annotations

import errno
import os
import sqlite3

from kvstrata.errors import (
    ConfigError,
    PermanentStorageError,
    StorageAccessError,
    StorageBusyError,
    StorageError,
    StorageFullError,
    StorageTimeoutError,
    StorageUnavailableError,
    Where,
)

_BY_ERRNO: dict[int, type[StorageError]] = {
    errno.ENOSPC: StorageFullError,
    errno.EDQUOT: StorageFullError,
    errno.EACCES: StorageAccessError,
    errno.EPERM: StorageAccessError,
    errno.EROFS: StorageAccessError,
    errno.ETIMEDOUT: StorageTimeoutError,
    errno.ESTALE: StorageUnavailableError,
    errno.ENOTCONN: StorageUnavailableError,
    errno.EHOSTDOWN: StorageUnavailableError,
    errno.EHOSTUNREACH: StorageUnavailableError,
    errno.ENETDOWN: StorageUnavailableError,
    errno.ENETUNREACH: StorageUnavailableError,
    errno.ENODEV: StorageUnavailableError,
    errno.ENXIO: StorageUnavailableError,
    errno.EBUSY: StorageBusyError,
    errno.EAGAIN: StorageBusyError,
    errno.EMFILE: StorageBusyError,
    errno.ENFILE: StorageBusyError,
    errno.ENOMEM: StorageBusyError,
}

_REMEDIES: dict[int, str] = {
    errno.ENOTDIR: "name a folder, not something below a file",
    errno.EEXIST: "name a folder; something else has this name",
    errno.EACCES: "choose a folder that this user may write to",
    errno.EPERM: "choose a folder that this user may write to",
    errno.EROFS: "choose a folder on a file system that is mounted read-write",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ELOOP: "choose a path without circular links",
    errno.ENOENT: "choose a path whose parts can be made",
    errno.ENOSPC: "make room on that file system, or choose another",
    errno.EDQUOT: "raise the quota, or choose another file system",
    errno.EOPNOTSUPP: "choose a file system with hard links",
}

_BY_SQLITE: dict[int, type[StorageError]] = {
    sqlite3.SQLITE_BUSY: StorageBusyError,
    sqlite3.SQLITE_LOCKED: StorageBusyError,
    sqlite3.SQLITE_FULL: StorageFullError,
    sqlite3.SQLITE_READONLY: StorageAccessError,
    sqlite3.SQLITE_PERM: StorageAccessError,
    sqlite3.SQLITE_CANTOPEN: StorageAccessError,
    sqlite3.SQLITE_IOERR: PermanentStorageError,
}

_DAMAGE = frozenset(
    (
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_CONSTRAINT,  # a row is in the table, and its index does not know it
        sqlite3.SQLITE_MISMATCH,
    )
)


def describe(error: OSError, path: str) -> str:
    """ "ENOSPC: No space left on device: objects/…" """
    code = error.errno or 0
    return f"{errno.errorcode.get(code, code)}: {os.strerror(code)}: {path}"


def storage_error(error: OSError, path: str) -> StorageError:
    """`error` as an error of this package, with its name and the path."""
    return _BY_ERRNO.get(error.errno or 0, StorageError)(describe(error, path))


def config_error(error: OSError, path: str) -> ConfigError | StorageError:
    """`error` while a root is opened: what a person can mend, or a store that is away."""
    code = error.errno or 0
    remedy = _REMEDIES.get(code)
    if remedy is None:
        return storage_error(error, path)
    return ConfigError(
        f"the folder cannot be used: {describe(error, path)}",
        remedy=remedy,
        where=Where(key="path"),
    )


class IndexDamage(sqlite3.DatabaseError):
    """SQLite sees nothing wrong, but what it read is not what this program wrote."""


def is_damage(error: sqlite3.Error) -> bool:
    """The file of the index is not what was written."""
    if isinstance(error, IndexDamage) or _primary_code(error) in _DAMAGE:
        return True
    return isinstance(error, sqlite3.OperationalError) and str(error).startswith("no such ")


def index_error(error: sqlite3.Error, path: str) -> StorageError:
    kind = _BY_SQLITE.get(_primary_code(error), StorageError)
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    return kind(f"{name}: {error}: {path}")


def _primary_code(error: sqlite3.Error) -> int:
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF
