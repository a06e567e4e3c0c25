"""Frames as files: safe names, atomic publication, scattered reads.

    <root>/objects/<namespace, 64 hex digits>/<first 2 of the key>/<key, 64 hex digits>

A file gets its name by `linkat`, which never overwrites, when its bytes are complete. With
`O_TMPFILE` it has no name before, so a writer that is killed leaves nothing. File systems without
that get a temporary name in the folder of the living process (`owners.py`), which whoever comes
next removes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from kvstrata.backends.base import Buffer, ObjectId
from kvstrata.backends.filesystem.options import Durability
from kvstrata.boundary import KEY_BYTES, Outcome

OBJECTS = "objects"
_NAME_DIGITS = 2 * KEY_BYTES
_HEX = frozenset("0123456789abcdef")
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""A FIFO, a device or a link in place of a frame must not hold or divert a read."""
_IOV_MAX = os.sysconf("SC_IOV_MAX")


class FoundFile(NamedTuple):
    """A file with the name of a frame."""

    key: bytes
    nbytes: int
    modified_us: int


def make_folder(path: str, root_fd: int) -> None:
    """A folder for its owner only, whatever the umask; there may be one already."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700, dir_fd=root_fd)
        os.chmod(path, 0o700, dir_fd=root_fd)


def object_path(name: ObjectId) -> str:
    """Where the frame lies, relative to the root."""
    key = name.key.hex()
    return f"{OBJECTS}/{name.namespace.hex()}/{key[:2]}/{key}"


class FrameFiles:
    """The files below one root. Thread-safe: it keeps no state but the root's descriptor.

    Raises `OSError` as it comes; the backend translates. `sys` stands for the module `os` (tests
    watch the order of calls, and make them fail).
    """

    def __init__(self, root: str, durability: Durability = "none", sys: Any = os) -> None:
        self.root = root
        self.anonymous = True
        """Publish by `O_TMPFILE`; `probe` decides."""
        self._sys = sys
        self._durability = durability
        self._scratch = OBJECTS
        self._numbers = itertools.count()
        self._chmod = False
        if not sys.path.isdir(root):
            with contextlib.suppress(FileExistsError):
                sys.makedirs(sys.path.dirname(root))
            with contextlib.suppress(FileExistsError):
                sys.mkdir(root, 0o700)
                sys.chmod(root, 0o700)
        self.root_fd: int = sys.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            make_folder(OBJECTS, self.root_fd)
            self.block_bytes = os.fstatvfs(self.root_fd).f_frsize
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self.root_fd >= 0:
            os.close(self.root_fd)
            self.root_fd = -1

    def cost(self, nbytes: int) -> int:
        """The blocks that a file of `nbytes` takes, in bytes."""
        return -(-nbytes // self.block_bytes) * self.block_bytes

    def probe(self, scratch: str) -> None:
        """Find out by doing it how files can be published. `scratch` is a folder of this process.

        Raises `OSError` if no way works: no hard links, or no permission.
        """
        self._scratch = scratch
        target = f"{scratch}/probe"
        data = (memoryview(b"probe"),)
        try:
            self._publish(target, data)
        except OSError:
            self.anonymous = False
            self._publish(target, data)
        mode = stat.S_IMODE(os.stat(target, dir_fd=self.root_fd).st_mode)
        self._chmod = mode != 0o600  # a umask that takes bits from the owner
        self._sys.unlink(target, dir_fd=self.root_fd)

    # ── frames ───────────────────────────────────────────────────────────────────────────────────

    def publish(self, name: ObjectId, buffers: Sequence[Buffer]) -> Outcome:
        """STORED, when the file was complete before it got its name, or EXISTS."""
        return self._publish(object_path(name), buffers)

    def sync_names(self, names: Iterable[ObjectId]) -> None:
        """With durability "full": the names of published frames are on the device."""
        if self._durability == "full":
            self._sync_folders(names)

    def persist(self, names: Sequence[ObjectId]) -> list[bool]:
        """Frames that are there already, and their names, are on the device; True where one is."""
        found = []
        for name in names:
            try:
                fd = self._sys.open(object_path(name), _READ, dir_fd=self.root_fd)
            except (FileNotFoundError, NotADirectoryError):
                found.append(False)
                continue
            try:
                self._sys.fsync(fd)
            finally:
                self._sys.close(fd)
            found.append(True)
        self._sync_folders(name for name, is_there in zip(names, found, strict=True) if is_there)
        return found

    def _sync_folders(self, names: Iterable[ObjectId]) -> None:
        folders = {os.path.dirname(object_path(name)) for name in names}
        folders |= {os.path.dirname(folder) for folder in folders} | {OBJECTS}
        for folder in sorted(folders, reverse=True):
            fd = self._sys.open(folder, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.root_fd)
            try:
                self._sys.fsync(fd)
            finally:
                self._sys.close(fd)

    def read(self, name: ObjectId, buffers: Sequence[Buffer]) -> int:
        """Fill `buffers`; how many bytes were there (fewer for a short file)."""
        sys = self._sys
        fd = sys.open(object_path(name), _READ, dir_fd=self.root_fd)
        try:
            want = sum(b.nbytes for b in buffers)
            done: int = sys.preadv(fd, buffers[:_IOV_MAX], 0)
            while 0 < done < want:
                more = sys.preadv(fd, _rest(buffers, done), done)
                if not more:
                    break
                done += more
            return done
        finally:
            sys.close(fd)

    def exists(self, name: ObjectId) -> bool:
        return os.access(object_path(name), os.F_OK, dir_fd=self.root_fd)

    def cost_on_disk(self, name: ObjectId) -> int | None:
        """What the frame takes, or None if it is not there."""
        try:
            return self.cost(os.stat(object_path(name), dir_fd=self.root_fd).st_size)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def unlink(self, name: ObjectId) -> bool:
        """True if the frame was there and is gone."""
        try:
            self._sys.unlink(object_path(name), dir_fd=self.root_fd)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    # ── what is there ────────────────────────────────────────────────────────────────────────────

    def namespaces(self) -> list[bytes]:
        """Fingerprints of the namespaces that have a folder."""
        return [bytes.fromhex(name) for name in self._list(OBJECTS) if _is_hex(name, _NAME_DIGITS)]

    def shards(self, namespace: bytes) -> list[int]:
        """The first bytes of keys for which there is a folder."""
        folder = f"{OBJECTS}/{namespace.hex()}"
        return sorted(int(name, 16) for name in self._list(folder) if _is_hex(name, 2))

    def shard(self, namespace: bytes, first_byte: int) -> Iterator[FoundFile]:
        """Frames whose key begins with `first_byte`. What is no regular file with the name of a
        key is left alone."""
        shard = f"{first_byte:02x}"
        folder = f"{OBJECTS}/{namespace.hex()}/{shard}"
        for name in self._list(folder):
            if name.startswith(shard) and _is_hex(name, _NAME_DIGITS):
                try:
                    found = os.stat(f"{folder}/{name}", dir_fd=self.root_fd, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(found.st_mode):
                    yield FoundFile(bytes.fromhex(name), found.st_size, found.st_mtime_ns // 1000)

    def strays(self) -> Iterator[tuple[str, str]]:
        """What no scan counts as a frame: path below the root, and why. Others may be removing or
        adding it."""
        for name in self._list(OBJECTS):
            path = f"{OBJECTS}/{name}"
            if not (_is_hex(name, _NAME_DIGITS) and self._is_kind(path, stat.S_ISDIR)):
                yield path, "not the folder of a namespace"
                continue
            for shard in self._list(path):
                folder = f"{path}/{shard}"
                if not (_is_hex(shard, 2) and self._is_kind(folder, stat.S_ISDIR)):
                    yield folder, "not a folder of frames"
                    continue
                for key in self._list(folder):
                    file = f"{folder}/{key}"
                    if not _is_hex(key, _NAME_DIGITS):
                        yield file, "not the name of a frame"
                    elif not key.startswith(shard):
                        yield file, "a frame's name in the wrong folder"
                    elif not self._is_kind(file, stat.S_ISREG):
                        yield file, "not a regular file"

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _is_kind(self, path: str, kind: Callable[[int], bool]) -> bool:
        """Also of what has just gone."""
        try:
            return kind(os.stat(path, dir_fd=self.root_fd, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            return True

    def _publish(self, path: str, buffers: Sequence[Buffer]) -> Outcome:
        sys, scratch = self._sys, ""
        if self.anonymous:
            flags = os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC
            fd = sys.open(self._scratch, flags, 0o600, dir_fd=self.root_fd)
            source = f"/proc/self/fd/{fd}"
        else:
            source = scratch = f"{self._scratch}/{next(self._numbers)}.tmp"
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
            fd = sys.open(source, flags, 0o600, dir_fd=self.root_fd)
        try:
            if self._chmod:
                sys.fchmod(fd, 0o600)
            want = sum(b.nbytes for b in buffers)
            done = sys.pwritev(fd, buffers[:_IOV_MAX], 0)
            while done < want:
                done += sys.pwritev(fd, _rest(buffers, done), done)
            if self._durability != "none":
                sys.fdatasync(fd)
            self._link(source, path)
        except FileExistsError:
            return Outcome.EXISTS
        finally:
            sys.close(fd)
            if scratch:
                sys.unlink(scratch, dir_fd=self.root_fd)
        return Outcome.STORED

    def _link(self, source: str, path: str) -> None:
        for first in (True, False):
            try:
                self._sys.link(
                    source,
                    path,
                    src_dir_fd=self.root_fd,
                    dst_dir_fd=self.root_fd,
                    follow_symlinks=self.anonymous,
                )
            except FileNotFoundError:
                if not first:
                    raise
                folder = os.path.dirname(path)
                for missing in (OBJECTS, os.path.dirname(folder), folder):
                    make_folder(missing, self.root_fd)
            else:
                return

    def _list(self, folder: str) -> list[str]:
        try:
            fd = self._sys.open(folder, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.root_fd)
        except (FileNotFoundError, NotADirectoryError):
            return []
        try:
            return os.listdir(fd)
        finally:
            self._sys.close(fd)


def _is_hex(name: str, digits: int) -> bool:
    return len(name) == digits and _HEX.issuperset(name)


def _rest(buffers: Sequence[Buffer], done: int) -> list[Buffer]:
    """What follows the first `done` bytes, as many buffers as one call takes."""
    rest: list[Buffer] = []
    for buffer in buffers:
        if done >= buffer.nbytes:
            done -= buffer.nbytes
        else:
            rest.append(buffer[done:] if done else buffer)
            done = 0
            if len(rest) == _IOV_MAX:
                break
    return rest
