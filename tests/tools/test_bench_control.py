"""`kvstrata bench control` counts what it says it counts. Its times are no test."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from kvstrata.errors import InputError
from kvstrata.tools.bench import ControlReport, app, run
from kvstrata.tools.trace import BLOCK_TOKENS, read_trace, shipped_trace


def hits_by_hand(requests: int, page_tokens: int) -> tuple[int, int]:
    """(hits, pages): the longest known prefix, block by block."""
    known: set[tuple[int, ...]] = set()
    hits = pages = 0
    for request in read_trace(shipped_trace(), requests):
        blocks = [request.hash_ids[: i + 1] for i in range(request.input_length // BLOCK_TOKENS)]
        pages += request.input_length // page_tokens
        whole = 0
        while whole < len(blocks) and blocks[whole] in known:
            whole += 1
        hits += whole * BLOCK_TOKENS // page_tokens
        known.update(blocks)
    return hits, pages


@pytest.mark.parametrize("requests", [1, 20])
def test_counts(requests: int) -> None:
    report = run(shipped_trace(), requests, BLOCK_TOKENS)
    assert (report.page_hits, report.full_pages) == hits_by_hand(requests, BLOCK_TOKENS)
    assert report.requests == requests
    assert report.tree_pages == report.full_pages - report.page_hits
    assert 32 < report.tree_bytes_per_page < 4000
    parts = report.ns_per_token
    assert parts.total == pytest.approx(parts.digest + parts.match + parts.insert)
    assert 0 < report.p50_ms <= report.p99_ms <= report.max_ms


def test_command_writes_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "control.json"
    args = ["control", "--trace", str(shipped_trace()), "--requests", "5", "--json", str(out)]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0
    assert "ns/token" in result.output
    report = msgspec.json.decode(out.read_bytes(), type=ControlReport)
    assert report.requests == 5
    assert report.page_tokens == 64


@pytest.mark.parametrize(("requests", "page_tokens"), [(0, 64), (-1, 64), (5, 0)])
def test_bad_arguments(requests: int, page_tokens: int) -> None:
    with pytest.raises(InputError):
        run(shipped_trace(), requests, page_tokens)


def test_figures_that_cannot_be_written(tmp_path: Path) -> None:
    args = ["control", "--trace", str(shipped_trace()), "--requests", "1", "--json", str(tmp_path)]
    result = CliRunner().invoke(app, args)
    assert isinstance(result.exception, InputError)
