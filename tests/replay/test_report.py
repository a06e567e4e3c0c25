"""What a replay prints: the table, the JSON, and the lines on the way."""

from __future__ import annotations

import io
import json
from typing import Any

import msgspec
import pytest
from rich.console import Console

from kvstrata.tools.replay_control import LINE_EVERY_S, progress
from kvstrata.tools.replay_report import ReplayReport, print_report

FIELDS = {
    "requests", "prompt_tokens", "full_pages", "page_hits", "duplicates_in_flight", "hit_tokens",
    "computed_tokens", "pages_verified", "pages_mismatched", "storage", "calls_per_batch",
    "seconds",
}  # fmt: skip


def test_json_on_stdout(kvstrata: Any, store: Any, small: Any) -> None:
    """`--json -`: stdout is for programs, the table goes to stderr."""
    done = kvstrata.start(
        "replay", "--config", "../c.toml", "--set", "pools.pages=48", "--json", "-"
    ).wait()
    assert done.code == 2, "there is no such config"
    done = kvstrata.replay("local", small, store, "--json", "-").wait()
    assert done.code == 0
    report = json.loads(done.out)
    assert report.keys() >= FIELDS
    assert report["run"]["trace_requests"] == report["requests"] == 60
    assert report["run"]["complete"] is True
    assert "pages verified" in done.err


@pytest.fixture
def report(kvstrata: Any, store: Any, small: Any) -> ReplayReport:
    """The report of a replay."""
    values = kvstrata.replay("local", small, store).wait().ok()
    return msgspec.convert(values, ReplayReport)


def show(report: ReplayReport) -> str:
    out = io.StringIO()
    print_report(report, Console(file=out, width=120))
    return out.getvalue()


def test_table(report: ReplayReport) -> None:
    text = show(report)
    assert "60 requests in" in text
    assert "of 1.0 GiB" in text
    assert "failed" not in text
    assert msgspec.json.decode(msgspec.json.encode(report), type=ReplayReport) == report


def test_table_of_what_went_wrong(report: ReplayReport) -> None:
    """Errors are shown as they are: what looks like markup is none."""
    assert report.storage is not None
    text = show(
        msgspec.structs.replace(
            report,
            failed_requests=3,
            errors=["ValueError: [/red] [bold]x"],
            storage=msgspec.structs.replace(
                report.storage, used_bytes=None, objects=None, corrupt_deleted=7
            ),
            run=msgspec.structs.replace(report.run, complete=False),
        )
    )
    assert "stopped early: 60 were asked for" in text
    assert "error: ValueError: [/red] [bold]x" in text
    for name, value in (("failed requests", "3"), ("corrupt frames", "7"), ("used", "unknown")):
        [line] = [line for line in text.splitlines() if name in line]
        assert value in line


def test_progress_in_a_file_is_a_line_now_and_then() -> None:
    now, out = [100.0], io.StringIO()
    with progress(Console(file=out, width=120), clock=lambda: now[0]) as on_result:
        assert on_result is not None
        for i in range(1, 1001):
            now[0] += LINE_EVERY_S / 480  # exact in binary
            on_result(i, 1000, 7 * i)
    assert out.getvalue().splitlines() == [
        "480 of 1,000 requests, 3,360 page hits, 30 s",
        "960 of 1,000 requests, 6,720 page hits, 60 s",
    ]


def test_progress_on_a_terminal() -> None:
    out = io.StringIO()
    with progress(Console(file=out, width=120, force_terminal=True)) as on_result:
        assert on_result is not None
        on_result(3, 1000, 21)
    assert "3/1000" in out.getvalue()
    assert "21 page hits" in out.getvalue()
