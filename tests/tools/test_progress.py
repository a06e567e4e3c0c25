"""The progress of tools, on a terminal and elsewhere; durations and sizes as options."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvstrata.errors import InputError
from kvstrata.tools.cli_options import duration_s, size_bytes
from kvstrata.tools.cli_progress import page_progress
from kvstrata.tools.replay_control import LINE_EVERY_S


def test_lines_now_and_then() -> None:
    now, out = 0.0, io.StringIO()
    with page_progress(Console(file=out, width=200), lambda: now) as on_progress:
        on_progress("scan", 10, 0, 0)
        assert out.getvalue() == ""
        now = LINE_EVERY_S
        on_progress("copy", 1234, 5000, 1 << 20)
        on_progress("copy", 1235, 5000, 1 << 20)
    assert out.getvalue() == "copy: 1,234 of 5,000 pages, 1.0 MiB, 30 s\n"


def test_a_bar_on_a_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True)
    with page_progress(console) as on_progress:
        on_progress("scan", 10, 0, 0)
        on_progress("copy", 1000, 5000, 1 << 20)
    assert "copy" in out.getvalue()
    assert "1000/5000" in out.getvalue()
    assert "1.0 MiB" in out.getvalue()


def test_durations() -> None:
    assert duration_s(None, "--x") is None
    assert [duration_s(text, "--x") for text in ("90s", "1.5h", "2w")] == [90, 5400, 1_209_600]
    for text in ("", "7", "d", "-1d", "1y", "1d2h"):
        with pytest.raises(InputError, match="not a duration"):
            duration_s(text, "--x")


def test_sizes() -> None:
    assert (size_bytes(None, "--x"), size_bytes("2KiB", "--x")) == (0, 2048)
    for text in ("0", "fast", "-1"):
        with pytest.raises(InputError):
            size_bytes(text, "--x")
