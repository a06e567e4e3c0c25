"""`kvstrata bench transfer`: what it says without a GPU, and how it shows figures."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console

from kvstrata.errors import InputError
from kvstrata.tools import cli
from kvstrata.tools.bench.transfer import Cost, Loop, Rate, TransferReport, loss_percent
from kvstrata.tools.bench.transfer_beside import between
from kvstrata.tools.bench.transfer_table import plot, tables
from kvstrata.tools.bench.transfer_wall import _rate

REPORT = TransferReport(
    device="a GPU",
    torch="2.13",
    nbytes=1 << 30,
    repeats=3,
    rates=[
        Rate("8B", "contiguous", "D2H", 55.0, 1.0, 0.1),
        Rate("8B", "kvstrata", "D2H", 54.4, 0.989, 1.9),
    ],
    costs=[Cost("8B", "kvstrata", "D2H", "decode-like", 1.05, 1.0, (0.9, 1.2))],
    wall=[Rate("8B", "RuntimeInterface", "D2H", 52.0, 0.945, 0.0)],
    loops=[Loop("a graph a step", "kvstrata, D2H", 1.25, 2.5, 2.1, 41.0)],
    first_group_share={"first group": 0.0625},
    verified={"8B D2H": True, "8B H2D": False},
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(run: Any) -> None:
    done = run("bench", "transfer")
    assert done.returncode == 2
    assert "needs an NVIDIA GPU" in done.stderr
    assert "doctor" in done.stderr


def test_bad_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for argument, text in (("--size=much", "--size"), ("--only=GPT-9", "Llama-3-8B")):
        assert cli.main(["bench", "transfer", argument]) == 2
        assert text in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "transfer", option, str(tmp_path / "none" / "x.svg")]) == 2
    assert "there is no directory" in capsys.readouterr().err


def test_what_transfers_cost_is_of_the_time_alone() -> None:
    """Work of 0.1 s beside 4 GiB that cost it 1.25 ms each takes 0.105 s: 5 % longer."""
    assert loss_percent(1.25, 4 / 0.105) == pytest.approx(5.0)
    assert loss_percent(-0.01, 50.0) == pytest.approx(-0.05, abs=1e-3)


def test_work_that_changes_its_speed_is_measured_again() -> None:
    """Alone, beside, alone: until both runs alone are alike, and not for ever."""
    speeds = iter([10.0, 10.1, 10.5, 10.5, 11.0, 12.0, 13.0, 14.0])
    numbers = itertools.count(1)
    found = list(between(lambda: next(speeds), dict.fromkeys("abc", lambda: next(numbers))))
    assert [(key, number) for key, _, number in found] == [("a", 1), ("b", 3), ("c", 7)]
    assert [alone for _, alone, _ in found] == pytest.approx([10.05, 10.5, 13.5])


def test_the_rate_beside_a_loop_counts_parts_of_calls() -> None:
    """Calls of two seconds and 100 bytes each: 50 a second, wherever the loop begins and ends."""
    ends = [(2.0 * n, 100 * n) for n in range(1, 9)]
    for started, ended in ((2.0, 4.0), (2.5, 3.0), (3.1, 14.9), (2.0, 16.0)):
        assert _rate(ends, started, ended) == pytest.approx(50.0)


def test_tables_show_every_figure() -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    for table in tables(REPORT):
        console.print(table)
    text = console.export_text()
    for figure in (
        "0.989",
        "x1.050",
        "0.945",
        "2.50 %",
        "2.10 %",
        "0.0625",
        "1 of 2 right",
        "54.4",
    ):
        assert figure in text
    assert msgspec.json.decode(msgspec.json.encode(REPORT), type=TransferReport) == REPORT


def test_a_plot_is_drawn_or_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    try:
        plot(REPORT, path)
    except InputError as error:
        assert "matplotlib" in str(error)  # noqa: PT017 - either is right, by what is installed
        return
    assert path.read_text(encoding="utf-8").lstrip().startswith("<?xml")
