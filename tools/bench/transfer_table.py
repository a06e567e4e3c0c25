"""Tables and a plot of `kvstrata bench transfer`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from kvstrata.errors import InputError, Where
from kvstrata.tools.bench.transfer import TransferReport


def tables(report: TransferReport) -> Iterator[Table]:
    gib = report.nbytes / (1 << 30)
    title = (
        f"{report.device}, {gib:g} GiB of scattered pages, GPU time, medians of {report.repeats}"
        + (", huge pages" if report.huge_pages else "")
    )
    table = Table("geometry", "method", "way", "GB/s", "of the limit", "host ms/GiB", title=title)
    for rate in report.rates:
        figures = (f"{rate.gb_per_s:.1f}", f"{rate.share:.3f}", f"{rate.host_ms_per_gib:.2f}")
        table.add_row(rate.geometry, rate.method, rate.way, *figures)
    yield table
    title = "a model beside a sustained transfer, GPU time"
    columns = ("geometry", "method", "way", "work", "factor", "extra ms/GiB", "quartiles")
    table = Table(*columns, title=title)
    for cost in report.costs:
        low, high = cost.quartiles
        figures = (
            f"x{cost.factor:.3f}",
            f"{cost.extra_ms_per_gib:.2f}",
            f"{low:.2f} to {high:.2f}",
        )
        table.add_row(cost.geometry, cost.method, cost.way, cost.work, *figures)
    yield table
    table = Table(
        "what", "way", "GB/s", "of the limit", title="through RuntimeInterface, wall time"
    )
    for rate in report.wall:
        table.add_row(rate.geometry, rate.way, f"{rate.gb_per_s:.1f}", f"{rate.share:.3f}")
    yield table
    title = "a decode loop of Python, wall time"
    table = Table("loop", "ms a step", "beside", "loss", "GPU's part", "GiB/s", title=title)
    for loop in report.loops:
        losses = (f"{loop.loss_percent:.2f} %", f"{loop.gpu_percent:.2f} %")
        table.add_row(
            loop.loop, f"{loop.alone_ms:.2f}", loop.transfers, *losses, f"{loop.gib_per_s:.1f}"
        )
    yield table
    table = Table("what", "figure", title="and")
    for name, share in report.first_group_share.items():
        table.add_row(f"restore of 32K tokens in 16 layer groups: {name}", f"{share:.4f}")
    good = sum(report.verified.values())
    table.add_row("copies compared byte by byte", f"{good} of {len(report.verified)} right")
    yield table


def plot(report: TransferReport, path: Path) -> None:
    """Rate against what it costs the model, a point a method: the better, the further up and left.

    Needs matplotlib. Raises InputError where it is missing or the file cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise InputError(
            "a plot needs matplotlib",
            remedy="pip install matplotlib, or leave --plot out",
            where=Where(key="--plot"),
        ) from exc
    figure: Any = Figure(figsize=(10, 4.5), layout="constrained")
    for axis, way in zip(figure.subplots(1, 2, sharey=True), ("D2H", "H2D"), strict=True):
        rates = {(r.geometry, r.method): r.share for r in report.rates if r.way == way}
        for work, mark in (("compute-bound", "o"), ("decode-like", "s")):
            for cost in report.costs:
                if (cost.way, cost.work) == (way, work):
                    share = rates[cost.geometry, cost.method]
                    extra = max(cost.extra_ms_per_gib, 0.02)
                    color = f"C{sorted({c.method for c in report.costs}).index(cost.method)}"
                    axis.scatter(extra, share, marker=mark, color=color, label=cost.method)
        axis.set(xscale="log", xlabel="extra time of the model, ms a GiB moved", title=way)
        axis.grid(alpha=0.3)
        handles, labels = axis.get_legend_handles_labels()
        seen = dict(zip(labels, handles, strict=True))
        axis.legend(seen.values(), seen.keys())
    figure.supylabel("share of one contiguous copy (circles: compute-bound, squares: decode)")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as exc:
        raise InputError(
            f"cannot write the plot: {exc}",
            remedy="give a path that can be written, ending in .svg or .png",
            where=Where(path),
        ) from exc
