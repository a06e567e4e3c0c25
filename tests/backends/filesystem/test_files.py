"""Files: names, modes, publication in both ways, system calls that fail or do less than asked."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstrata.backends import BackendContext, StorageBackend
from kvstrata.backends.filesystem import FilesystemBackend, FilesystemOptions
from kvstrata.backends.testing import BackendTests
from kvstrata.boundary import Outcome
from kvstrata.errors import ConfigError

LOADED, STORED, EXISTS = Outcome.LOADED, Outcome.STORED, Outcome.EXISTS
MISSING, CORRUPT, FULL = Outcome.MISSING, Outcome.CORRUPT, Outcome.FULL
PARENT_MISSING = Outcome.PARENT_MISSING


def outcomes(results: list[Any]) -> list[Outcome]:
    return [result.outcome for result in results]


class TestWithoutTmpfile(BackendTests):
    """B027: file systems without `O_TMPFILE` keep the same contract."""

    @pytest.fixture
    def make_backend(self, tmp_path: Path, no_tmpfile: Any) -> Callable[[], StorageBackend]:
        return lambda: FilesystemBackend(FilesystemOptions(path=str(tmp_path)), no_tmpfile)


# ── names and modes ──────────────────────────────────────────────────────────────────────────────


def test_names(disk, make_pages) -> None:
    """B025: a name has 64 characters, whatever the namespace is called; nothing else is made."""
    backend = disk.open()
    long = "/models/" + "x" * 200 + "\0\n" + "salt" * 32
    pages = make_pages(namespace=long.encode())
    assert outcomes(backend.write(pages.writes(0, 4))) == [STORED] * 4
    for path in disk.frames():
        assert all(len(part) <= 64 for part in path.relative_to(disk.root).parts)
        assert set(path.name) <= set("0123456789abcdef")
    assert disk.path(pages.name(0)) in disk.frames()
    assert {path.name for path in disk.root.iterdir()} == {
        "objects", "owners", "lock", "scan.lock",
        *(p.name for p in disk.root.glob("index-v1-1.sqlite*")),
    }  # fmt: skip


def test_a_deep_root(tmp_path: Path, make_disk, make_pages) -> None:
    """B025: the frames are reached from the root's descriptor, so its depth costs them nothing."""
    disk = make_disk(tmp_path / ("m" * (200 - len(str(tmp_path)))) / ("d" * 240))
    assert len(str(disk.root)) > 440
    backend, pages = disk.open(), make_pages()
    assert outcomes(backend.write(pages.writes(0, 2))) == [STORED] * 2


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277, 0o777])
def test_modes(disk, make_pages, no_tmpfile, umask) -> None:
    """B033: 0700 and 0600 under any umask, in both ways of publication."""
    old = os.umask(umask)
    try:
        for system in (os, no_tmpfile):
            pages = make_pages(chain=repr(system))
            backend = disk.open(system)
            assert outcomes(backend.write(pages.writes(0, 3))) == [STORED] * 3
    finally:
        os.umask(old)
    for path in [disk.root, *disk.root.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_roots_that_cannot_be(tmp_path: Path, monkeypatch) -> None:
    """Refused at `open`, with the key and a remedy, and nothing is left open."""
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "gone").mkdir()
    bad = {
        "file": "EEXIST|ENOTDIR",
        "file/below": "ENOTDIR",
        "loop/x": "ELOOP",
        "n" * 300: "ENAMETOOLONG",
        "/proc/nothing": "ENOENT|EACCES|EPERM",
        "/sys/nothing": "EPERM|EACCES|ENOENT|EROFS",
        "\udcff" * 3 + "/" + "x/" * 3000: "ENAMETOOLONG",
    }
    before = len(os.listdir("/proc/self/fd"))
    for path, reason in bad.items():
        backend = FilesystemBackend(FilesystemOptions(path=str(tmp_path / path)))
        with pytest.raises(ConfigError, match=reason) as caught:
            backend.open(BackendContext("x"))
        assert caught.value.where.key == "path"
        assert caught.value.remedy
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigError, match="ENOENT"):
        FilesystemBackend(FilesystemOptions(path="relative")).open(BackendContext("x"))
    assert len(os.listdir("/proc/self/fd")) == before


def test_relative_path(tmp_path: Path, monkeypatch, make_pages) -> None:
    """Relative to the working directory at `open`; a later chdir changes nothing."""
    monkeypatch.chdir(tmp_path)
    backend = FilesystemBackend(FilesystemOptions(path="var/store", min_free_bytes=0))
    backend.open(BackendContext("x"))
    monkeypatch.chdir("/")
    assert outcomes(backend.write(make_pages().writes(0, 2))) == [STORED] * 2
    backend.close(5)
    assert len(list((tmp_path / "var/store").glob("objects/*/*/*"))) == 2


def test_a_bound_below_one_page(tmp_path: Path) -> None:
    options = FilesystemOptions(path=str(tmp_path), max_bytes="32KiB")
    with pytest.raises(ConfigError, match=r"one page takes 36\.0 KiB") as caught:
        FilesystemBackend(options).open(BackendContext("x", {"kv": 32768}))
    assert caught.value.where.key == "max_bytes"


@pytest.mark.root
def test_unwritable_root(tmp_path: Path, start_child) -> None:
    """Of somebody else: a config error, not a traceback later."""
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent.stat().st_mode & 0o005 != 0o005 and parent != Path("/"):
            parent.chmod(0o755)
    (tmp_path / "theirs").mkdir(mode=0o755)
    result = start_child("open_as", root=str(tmp_path / "theirs"), uid=65534).result()
    assert result[0] == "ConfigError"
    assert "EACCES" in result[1]
