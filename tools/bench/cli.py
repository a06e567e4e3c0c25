"""`kvstrata bench`: one command a part."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvstrata.errors import InputError, Where
from kvstrata.tools.bench.control import ControlReport, run
from kvstrata.tools.cli_output import check_output, write_json
from kvstrata.units import parse_size

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown")


JsonOption = Annotated[
    Path | None, typer.Option(help="Write the figures there, too.", callback=check_output)
]


@app.callback()
def _bench() -> None:
    """Measure parts of kvstrata."""


@app.command()
def control(
    trace: Annotated[Path, typer.Option(help="Requests, in Mooncake's JSONL format.")],
    requests: Annotated[int, typer.Option(help="How many of them.")] = 2000,
    page_tokens: Annotated[int, typer.Option(help="Tokens a page.")] = 64,
    json: JsonOption = None,
) -> None:
    """What a request costs in the control plane: digests, prefix match, insert."""
    report = run(trace, requests, page_tokens)
    Console().print(_table(report))
    _write(report, json)


@app.command()
def transfer(
    size: Annotated[str, typer.Option(help="How much a copy moves.")] = "1GiB",
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each, in turns.")] = 5,
    only: Annotated[str, typer.Option(help="Geometries with this in their names.")] = "",
    lmcache: Annotated[
        Path | None, typer.Option(help="Folder with LMCache's c_ops, if it is not installed.")
    ] = None,
    huge_pages: Annotated[
        bool, typer.Option("--huge-pages", help="Host pages in reserved pages of 2 MiB.")
    ] = False,
    json: JsonOption = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw them there, as SVG or PNG.", callback=check_output)
    ] = None,
) -> None:
    """Copies between GPU and host: beside their limit, the peers' kernels, and a model."""
    from kvstrata.tools.bench import transfer as bench  # torch is slow to import
    from kvstrata.tools.bench import transfer_table

    console = Console()
    nbytes = _size(size, "--size")
    say = Console(stderr=True).print
    report = bench.run(
        nbytes,
        repeats,
        only=only,
        lmcache=lmcache,
        huge_pages=huge_pages,
        note=say,
        save=lambda report: _write(report, json),
    )
    for table in transfer_table.tables(report):
        console.print(table)
    _write(report, json)
    if plot is not None:
        transfer_table.plot(report, plot)


@app.command()
def storage(
    backend: Annotated[str, typer.Option(help="Which one: mooncake.")] = "mooncake",
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each way, in turns.")] = 12,
    size: Annotated[
        str, typer.Option(help="Payload of a round and page size: several jobs of 128 MiB.")
    ] = "512MiB",
    json: JsonOption = None,
) -> None:
    """A storage backend behind its worker, beside the raw client, on a store of its own."""
    from kvstrata.tools.bench import storage as bench
    from kvstrata.tools.bench import storage_table

    nbytes = _size(size, "--size")
    report = bench.run(backend, rounds, nbytes)
    for table in storage_table.tables(report):
        Console().print(table)
    _write(report, json)


@app.command()
def worker(
    page_size: Annotated[str, typer.Option(help="Payload of a page.")] = "64KiB",
    batches: Annotated[int, typer.Option(min=1, help="For the overhead.")] = 100,
    rounds: Annotated[int, typer.Option(min=4, help="Loads beside each neighbour.")] = 2000,
    json: JsonOption = None,
) -> None:
    """What a storage worker adds to a page, and what bad neighbours cost a healthy one."""
    from kvstrata.tools.bench import worker as bench

    page_bytes = _size(page_size, "--page-size")
    report = bench.run(page_bytes, batches, rounds)
    for table in bench.tables(report):
        Console().print(table)
    _write(report, json)


def _size(text: str, option: str) -> int:
    try:
        return parse_size(text)
    except ValueError as exc:
        raise InputError(str(exc), remedy="give a size", where=Where(key=option)) from exc


def _write(report: object, json: Path | None) -> None:
    if json is not None:
        write_json(report, json)


def _table(report: ControlReport) -> Table:
    tokens = f"{report.prompt_tokens:,} tokens"
    title = f"{report.requests:,} requests, {tokens}, {report.page_tokens} tokens a page"
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    ns = report.ns_per_token
    table.add_row("digest", f"{ns.digest:.2f} ns/token")
    table.add_row("match", f"{ns.match:.2f} ns/token")
    table.add_row("insert", f"{ns.insert:.2f} ns/token")
    table.add_row("all three", f"{ns.total:.2f} ns/token", end_section=True)
    table.add_row("p50", f"{report.p50_ms:.3f} ms/request")
    table.add_row("p99", f"{report.p99_ms:.3f} ms/request")
    table.add_row("longest", f"{report.max_ms:.3f} ms", end_section=True)
    table.add_row("pages that hit", f"{report.page_hits:,} of {report.full_pages:,}")
    table.add_row("pages, nodes in the tree", f"{report.tree_pages:,}, {report.tree_nodes:,}")
    table.add_row("memory", f"{report.tree_bytes_per_page:.1f} bytes/page")
    return table
