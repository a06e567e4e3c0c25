"""The catalog that tools keep of a store: what it says when SQLite refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.errors import StorageBusyError, StorageError, StorageFullError
from kvstrata.tools.catalog import Catalog


def test_what_failed_is_said(tmp_path: Path) -> None:
    path = str(tmp_path / "catalog")
    with Catalog(path), pytest.raises(StorageBusyError, match="catalog"):
        Catalog(path)
    with Catalog(path) as catalog, pytest.raises(StorageError, match="no such table"):
        catalog.rows("SELECT * FROM nowhere")


def test_a_transaction_is_all_or_nothing(tmp_path: Path) -> None:
    with Catalog(str(tmp_path / "catalog")) as catalog:
        catalog.put(phase="scan")

        def fails() -> None:
            with catalog.transaction() as connection:
                connection.execute("DELETE FROM meta")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fails()
        assert catalog.get("phase") == "scan"


def test_a_full_disk_is_a_storage_error() -> None:
    """A catalog that cannot grow: what SQLite says has its place in the tree of errors."""
    with Catalog() as catalog:
        catalog.rows("PRAGMA max_page_count=1")
        with pytest.raises(StorageFullError, match="TMPDIR"):
            catalog.put(**{f"{i}": "x" * 4000 for i in range(1000)})
