"""The contract, and that the installed plugin is found by its name."""

from collections.abc import Callable
from pathlib import Path

import pytest
from kvstrata_dirstore import DirStore, DirStoreOptions

from kvstrata.backends import StorageBackend, build_options, load_plugin
from kvstrata.backends.testing import BackendTests


class TestDirStore(BackendTests):
    @pytest.fixture
    def make_backend(self, tmp_path: Path) -> Callable[[], StorageBackend]:
        return lambda: DirStore(DirStoreOptions(path=str(tmp_path)))


def test_found_by_name() -> None:
    plugin = load_plugin("dirstore")
    assert plugin is DirStore
    assert build_options(plugin, {"path": "x"}) == DirStoreOptions(path="x")
