"""What `kvstrata bench storage` measured, as tables."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from kvstrata.tools.bench.storage import Spread, StorageReport
from kvstrata.units import format_size


def tables(report: StorageReport) -> Iterator[Table]:
    for size in report.sizes:
        title = (
            f"{report.backend}: {size.pages} pages of {format_size(size.page_bytes)}, "
            f"{size.batch_pages} a call, median of {report.rounds} rounds (least to most)"
        )
        table = Table("", "put, GB/s", "of raw", "get, GB/s", "of raw", title=title)
        for path in size.paths:
            table.add_row(
                path.name,
                _text(path.put_gb_per_s),
                f"{path.put_of_raw:.2f}",
                _text(path.get_gb_per_s),
                f"{path.get_of_raw:.2f}",
            )
        yield table


def _text(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.least:.2f} to {spread.most:.2f})"
