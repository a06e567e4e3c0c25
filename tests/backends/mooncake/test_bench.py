"""`kvstrata bench storage` moves what it says. Its times are no test."""

from __future__ import annotations

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvstrata.errors import InputError
from kvstrata.tools.bench import app
from kvstrata.tools.bench.storage import run
from kvstrata.tools.bench.storage_table import tables


def test_every_way_is_measured() -> None:
    report = run("mooncake", 1, 1 << 20, page_bytes=(1 << 16,))
    (size,) = report.sizes
    assert (size.page_bytes, size.pages) == (1 << 16, 16)
    assert [path.name for path in size.paths] == ["raw", "raw frames", "thread", "process"]
    assert (size.paths[0].put_of_raw, size.paths[0].get_of_raw) == (1.0, 1.0)
    for path in size.paths:
        assert 0 < path.put_gb_per_s.least <= path.put_gb_per_s.median <= path.put_gb_per_s.most
        assert path.get_of_raw > 0
    for table in tables(report):
        Console().print(table)


def test_wrong_arguments() -> None:
    with pytest.raises(InputError, match="no benchmark of 'tape'"):
        run("tape", 1, 1 << 20)
    result = CliRunner().invoke(app, ["storage", "--size", "much"])
    assert isinstance(result.exception, InputError)
