"""Every backend of this package keeps the contract that plugin authors are held to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata.backends import StorageBackend
from kvstrata.backends.filesystem import FilesystemBackend, FilesystemOptions
from kvstrata.backends.memory import MemoryBackend, MemoryOptions
from kvstrata.backends.testing import BackendTests, run_conformance


class TestMemory(BackendTests):
    @pytest.fixture
    def make_backend(self) -> Callable[[], StorageBackend]:
        return lambda: MemoryBackend(MemoryOptions())


class TestMemoryBounded(BackendTests):
    @pytest.fixture
    def make_backend(self) -> Callable[[], StorageBackend]:
        return lambda: MemoryBackend(MemoryOptions(max_bytes="64MiB"))


class TestFilesystem(BackendTests):
    @pytest.fixture
    def make_backend(self, tmp_path: Path) -> Callable[[], StorageBackend]:
        return lambda: FilesystemBackend(FilesystemOptions(path=str(tmp_path)))


class TestFilesystemBounded(BackendTests):
    @pytest.fixture
    def make_backend(self, tmp_path: Path) -> Callable[[], StorageBackend]:
        return lambda: FilesystemBackend(
            FilesystemOptions(path=str(tmp_path), max_bytes="64MiB", durability="full")
        )


def test_without_pytest() -> None:
    results = run_conformance(lambda: MemoryBackend(MemoryOptions()))
    assert len(results) >= 18
    assert all(result.passed for result in results), results
