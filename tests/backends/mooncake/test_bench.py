"""`kvstrata bench storage` moves what it says. Its times are no test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from kvstrata.errors import InputError
from kvstrata.tools.bench import app
from kvstrata.tools.bench.storage import StorageReport, run

SOURCE = Path(__file__).resolve().parents[3] / "src"


def test_every_way_is_measured(tmp_path) -> None:
    """In a process of its own: it makes itself a network, and the library's threads stay there."""
    out = tmp_path / "storage.json"
    command = [sys.executable, "-m", "kvstrata.tools.cli", "bench", "storage"]
    done = subprocess.run(
        [*command, "--rounds", "1", "--size", "2MiB", "--json", str(out)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "raw frames" in done.stdout
    report = msgspec.json.decode(out.read_bytes(), type=StorageReport)
    assert [(s.page_bytes, s.pages) for s in report.sizes] == [(2 << 20, 1), (64 << 10, 32)]
    for size in report.sizes:
        assert [path.name for path in size.paths] == ["raw", "raw frames", "thread", "process"]
        assert (size.paths[0].put_of_raw, size.paths[0].get_of_raw) == (1.0, 1.0)
        for path in size.paths:
            put = path.put_gb_per_s
            assert 0 < put.least <= put.median <= put.most
            assert path.get_of_raw > 0


def test_wrong_arguments() -> None:
    with pytest.raises(InputError, match="no benchmark of 'tape'"):
        run("tape", 1, 1 << 20)
    result = CliRunner().invoke(app, ["storage", "--size", "much"])
    assert isinstance(result.exception, InputError)
