"""What the file systems under the configured roots can do: found out by doing it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import tempfile
from collections.abc import Iterator

from kvstrata.backends.filesystem.options import FilesystemOptions
from kvstrata.configs import Config
from kvstrata.errors import KvstrataError
from kvstrata.tools.doctor import Check, Machine, Status
from kvstrata.tools.stores import open_store, wait_until_counted
from kvstrata.units import format_size, parse_size

BLOCK = 4096


def check_stores(machine: Machine, config: Config) -> Iterator[Check]:
    """Every file-system backend of the configuration."""
    seen: dict[str, str] = {}
    for name, backend in config.backends.items():
        options, area = backend.options, f"backend {name}"
        if not isinstance(options, FilesystemOptions):
            yield Check(area, "plugin", Status.OK, f"{backend.plugin} can be imported")
            continue
        path = os.path.realpath(options.path)
        if path in seen:
            text = f"{path} is also the root of {seen[path]}"
            yield Check(area, "root", Status.WARN, text, "give each backend a root of its own")
        seen.setdefault(path, name)
        yield from check_root(machine, config, name, options)


def check_root(
    machine: Machine, config: Config, name: str, options: FilesystemOptions
) -> Iterator[Check]:
    """One root: permissions, what its file system can do, and room."""
    area, folder = f"backend {name}", os.path.abspath(options.path)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    is_there = folder == os.path.abspath(options.path)
    if not os.path.isdir(folder):
        text = f"{folder} is not a folder"
        yield Check(area, "root", Status.FAIL, text, "choose another path")
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        text = f"{folder} cannot be written to"
        yield Check(area, "root", Status.FAIL, text, "chown or chmod it, or choose another path")
        return
    kind = file_system_of(machine, folder)
    text = f"{options.path} ({kind})" + ("" if is_there else ", not made yet")
    mode = stat.S_IMODE(os.stat(folder).st_mode)
    if is_there and mode & 0o077:
        text += f", mode {mode:o}: others may enter"
        yield Check(area, "root", Status.WARN, text, f"chmod 700 {options.path}")
    else:
        yield Check(area, "root", Status.OK, text)
    for check in (_direct, _publish, _lock):
        try:
            yield check(area, folder, kind)
        except OSError as error:
            text = f"{errno.errorcode.get(error.errno or 0, '?')}: {error.strerror}"
            yield Check(area, check.__name__.strip("_"), Status.FAIL, text, "choose another path")
    yield from _room(config, name, options, folder, is_there)


def file_system_of(machine: Machine, folder: str) -> str:
    """The type of the file system, by the longest mount point above `folder`."""
    best, kind = "", "unknown"
    for line in machine.text("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if len(fields) < 5 or not tail:
            continue
        mount = fields[4].replace("\\040", " ")
        inside = folder == mount or folder.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, tail[0]
    return kind


def _direct(area: str, folder: str, kind: str) -> Check:
    """O_DIRECT by a real aligned write and read: some file systems open and then refuse."""
    step = "open"
    fd, path = tempfile.mkstemp(prefix=".kvstrata-doctor-", dir=folder)
    os.close(fd)
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        try:
            with mmap.mmap(-1, BLOCK) as page, mmap.mmap(-1, BLOCK) as again:
                page.write(b"kvstrata" * (BLOCK // 8))
                step = "write"
                os.pwrite(fd, page, 0)
                step = "read"
                is_same = os.preadv(fd, [again], 0) == BLOCK and again[:] == page[:]
        finally:
            os.close(fd)
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "?")
        text = f"{kind} refuses it: {step} gives {name}; I/O goes through the page cache"
        remedy = "nothing to do, or put the root on ext4 or XFS"
        return Check(area, "O_DIRECT", Status.INFO, text, remedy)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
    if not is_same:
        text = "what was read is not what was written"
        return Check(area, "O_DIRECT", Status.FAIL, text, "do not use this file system")
    return Check(area, "O_DIRECT", Status.OK, f"aligned writes and reads of {BLOCK} work")


def _publish(area: str, folder: str, kind: str) -> Check:
    """How frames get their names: `O_TMPFILE` and `linkat`, or a temporary name and `link`."""
    target = os.path.join(folder, f".kvstrata-doctor-link-{os.getpid()}")
    try:
        try:
            fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600)
            try:
                _link(f"/proc/self/fd/{fd}", target)
            finally:
                os.close(fd)
            return Check(area, "publish", Status.OK, "O_TMPFILE and linkat work")
        except OSError:
            fd, path = tempfile.mkstemp(prefix=".kvstrata-doctor-", dir=folder)
            os.close(fd)
            try:
                _link(path, target)
            except OSError as error:
                text = f"{kind} has no hard links ({errno.errorcode.get(error.errno or 0)})"
                return Check(area, "publish", Status.FAIL, text, "choose ext4, XFS or tmpfs")
            finally:
                os.unlink(path)
            text = f"{kind} has no O_TMPFILE: frames are published from temporary names"
            return Check(area, "publish", Status.INFO, text, "nothing to do")
    finally:
        with contextlib.suppress(OSError):
            os.unlink(target)


def _link(source: str, target: str) -> None:
    """`linkat`: `os.link` calls it only with a descriptor of a folder."""
    fd = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.link(source, target, src_dir_fd=fd, dst_dir_fd=fd, follow_symlinks=True)
    finally:
        os.close(fd)


def _lock(area: str, folder: str, kind: str) -> Check:
    """flock tells the living from the dead; SQLite needs locks as well."""
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            text = f"{kind} has no locks ({errno.errorcode.get(error.errno or 0)})"
            return Check(area, "locks", Status.FAIL, text, "mount it with locks, or choose another")
    return Check(area, "locks", Status.OK, "flock and fcntl locks work")


def _room(
    config: Config, name: str, options: FilesystemOptions, folder: str, is_there: bool
) -> Iterator[Check]:
    area, disk = f"backend {name}", os.statvfs(folder)
    free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    most, least = parse_size(options.max_bytes), parse_size(options.min_free_bytes)
    used = 0
    if is_there and os.path.isdir(os.path.join(folder, "objects")):
        try:
            with open_store(config, name, writes=False) as store:
                wait_until_counted(store)
                used = store.usage().used_bytes
        except KvstrataError as error:
            yield Check(area, "index", Status.FAIL, str(error), "kvstrata verify says more")
    text = f"{format_size(free)} of {format_size(total)} free, frames take {format_size(used)}"
    text += f", at most {format_size(most)}" if most else ", no max_bytes"
    status, remedy = Status.OK, ""
    if free + used <= least:
        status, remedy = Status.FAIL, f"less than min_free_bytes ({format_size(least)}): make room"
    elif free < least:
        status, remedy = Status.WARN, "frames are evicted to keep min_free_bytes: make room"
    elif most and most - used > free - least:
        status = Status.WARN
        remedy = f"max_bytes will not be reached: lower it to {format_size(used + free - least)}"
    yield Check(area, "room", status, text, remedy)
    frame = BLOCK + max((c.page_bytes for c in config.components), default=0)
    frames = min(most or total, used + free) // frame
    if disk.f_files and disk.f_favail < frames - used // frame:
        text = f"{disk.f_favail:,} files can be made, {frames:,} frames fit by size"
        remedy = "larger pages, a lower max_bytes, or a file system with more inodes"
        yield Check(area, "inodes", Status.WARN, text, remedy)
