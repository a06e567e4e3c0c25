"""How much memory this process may still take: the machine's and its control groups' limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can be allocated now without swapping or hitting a control group's limit.

    The least of `MemAvailable` and, for each control group from the process's own up to its
    mount's root (version 1 and 2), its limit less its use; page cache that the kernel can drop
    counts as free. None where none of these files can be read. `root` stands for `/` in tests.
    Does a few small reads; never raises for what the files hold.
    """
    rooms = [room for room in _rooms(root) if room is not None]
    return max(min(rooms), 0) if rooms else None


def free_huge_bytes(root: Path = Path("/")) -> int:
    """Bytes in reserved huge pages of 2 MiB that nobody has taken; 0 where that cannot be told."""
    folder = root / "sys/kernel/mm/hugepages/hugepages-2048kB"
    free, promised = (_number_in(folder / name) for name in ("free_hugepages", "resv_hugepages"))
    return max(0, (free or 0) - (promised or 0)) * (2 << 20)


def _rooms(root: Path) -> Iterator[int | None]:
    yield _mem_available(root / "proc/meminfo")
    for mount, mounted_group, is_v2 in _mounts(root):
        for group in _groups(root, is_v2):
            for folder in _folders(root / mount.relative_to("/"), mounted_group, group):
                yield _room_v2(folder) if is_v2 else _room_v1(folder)


def _mem_available(path: Path) -> int | None:
    for line in _lines(path):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            kib = _number(rest.removesuffix("kB"))
            return None if kib is None else kib * 1024
    return None


def _mounts(root: Path) -> Iterator[tuple[PurePosixPath, PurePosixPath, bool]]:
    """Mount point, the group that is mounted there, and whether it is version 2."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        is_v2 = kind[0] == "cgroup2"
        if is_v2 or (kind[0] == "cgroup" and "memory" in kind[2].split(",")):
            mount = PurePosixPath(fields[4])
            if mount.is_absolute() and ".." not in mount.parts:
                yield mount, PurePosixPath(fields[3]), is_v2


def _groups(root: Path, is_v2: bool) -> Iterator[PurePosixPath]:
    for line in _lines(root / "proc/self/cgroup"):
        fields = line.split(":", 2)
        if len(fields) == 3:
            controllers = fields[1].split(",")
            if (is_v2 and fields[0] == "0") or (not is_v2 and "memory" in controllers):
                yield PurePosixPath(fields[2])


def _folders(mount: Path, mounted: PurePosixPath, group: PurePosixPath) -> Iterator[Path]:
    """The group's folder and those above it, up to the mount point."""
    inside = group.relative_to(mounted) if group.is_relative_to(mounted) else PurePosixPath()
    if ".." in inside.parts:
        inside = PurePosixPath()
    for part in (inside, *inside.parents):
        yield mount / part


def _room_v2(folder: Path) -> int | None:
    limit, used = _number_in(folder / "memory.max"), _number_in(folder / "memory.current")
    if limit is None or used is None:
        return None
    return limit - used + _stat(folder, "inactive_file")


def _room_v1(folder: Path) -> int | None:
    limit = _number_in(folder / "memory.limit_in_bytes")
    used = _number_in(folder / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    return limit - used + _stat(folder, "total_inactive_file")


def _stat(folder: Path, key: str) -> int:
    for line in _lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name == key:
            return _number(value) or 0
    return 0


def _number_in(path: Path) -> int | None:
    lines = _lines(path)
    return _number(lines[0]) if lines else None


def _number(text: str) -> int | None:
    """None for "max" and for anything else that is no number."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 24 else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
