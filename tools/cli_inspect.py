"""`kvstrata inspect`: what is in a store."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstrata.backends import ObjectId
from kvstrata.configs import Config, load_config
from kvstrata.errors import InputError, Where
from kvstrata.tools.catalog import Catalog
from kvstrata.tools.cli_options import JsonOption, NamespaceOption, SetOption, namespaces_of
from kvstrata.tools.cli_output import table_console, write_json
from kvstrata.tools.cli_progress import page_progress
from kvstrata.tools.inspect_store import (
    Bucket,
    FrameReport,
    InspectReport,
    NamespaceShape,
    decode_frame,
    find_frame,
    inspect_store,
    read_file,
    read_frame,
)
from kvstrata.tools.stores import backend_config, namespace_names, open_store, wait_until_counted
from kvstrata.units import format_size

BAR_WIDTH = 10
NARROW_BAR_WIDTH = 6
WIDE_COLUMNS = 100
"""Of a terminal on which the wide bars of three columns fit."""


def inspect(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="A backend of the configuration; default: L3."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Configuration file (TOML).")
    ] = None,
    frame: Annotated[
        str | None,
        typer.Option(
            "--frame", help="Decode one frame: a file, or the beginning of its key in hex."
        ),
    ] = None,
    namespace: NamespaceOption = None,
    json: JsonOption = None,
    set_: SetOption = None,
) -> None:
    """Show what a backend holds: namespaces, sizes, ages and the shape of the tree; or one frame.

    Reads headers only, changes nothing, and runs beside a server. A frame that is a file needs no
    --config. Exit code 1 when the one frame is not what it should be; 2: wrong use.
    """
    settings = None if config is None else load_config(config, set_ or ())
    if frame is not None and Path(frame).is_file():
        report = decode_frame(read_file(Path(frame)), frame, _name_of(Path(frame)), settings)
        _show_frame(report, json)
        return
    if settings is None and frame is not None:
        raise InputError(
            f"there is no file {frame}",
            remedy="give a file; or --config FILE, and the beginning of a key",
            where=Where(key="--frame"),
        )
    if settings is None:
        raise InputError(
            "there is nothing to inspect",
            remedy="give --config FILE and a backend, or --frame FILE",
            where=Where(key="--config"),
        )
    name = name or settings.l3.backend
    backend_config(settings, name, "NAME")
    if frame is not None:
        with open_store(settings, name, writes=False) as backend:
            found = find_frame(backend, frame)
            report = decode_frame(read_frame(backend, found), found.name, found, settings)
        _show_frame(report, json)
        return
    _show_store(settings, name, namespaces_of(settings, namespace), json)


def _name_of(path: Path) -> ObjectId | None:
    """The page that a file should hold by its place, if it lies where frames lie."""
    try:
        key, ns = bytes.fromhex(path.name), bytes.fromhex(path.absolute().parents[1].name)
    except (ValueError, IndexError):
        return None
    return ObjectId(ns, key) if len(key) == len(ns) == 32 else None


def _show_store(
    settings: Config, name: str, prefixes: tuple[bytes, ...], json: Path | None
) -> None:
    began, done = time.monotonic(), 0
    with (
        page_progress(Console(stderr=True)) as on_progress,
        Catalog() as catalog,
        open_store(settings, name, writes=False) as backend,
    ):

        def on_batch(count: int) -> None:
            nonlocal done
            done += count
            on_progress("scan", done, 0, 0)

        shapes = inspect_store(backend, catalog, namespace_names(settings), prefixes, on_batch)
        wait_until_counted(backend)
        usage, health = backend.usage(), backend.health()
    report = InspectReport(
        backend=name,
        plugin=settings.backends[name].plugin,
        health=f"{health.state.value} {health.message}".strip(),
        used_bytes=usage.used_bytes,
        limit_bytes=usage.limit_bytes,
        objects=usage.objects,
        namespaces=shapes,
        seconds=round(time.monotonic() - began, 3),
    )
    _print_store(report, table_console(json))
    if json is not None:
        write_json(report, json)


def _print_store(report: InspectReport, console: Console) -> None:
    head = Table("", "", title=f"{report.backend} ({report.plugin})", show_header=False)
    limit = f" of {format_size(report.limit_bytes)}" if report.limit_bytes else ""
    head.add_row("used", f"{format_size(report.used_bytes)}{limit}, {report.objects:,} frames")
    head.add_row("health", Text(report.health))
    head.add_row("namespaces", f"{len(report.namespaces):,}")
    console.print(head)
    for shape in report.namespaces:
        console.print(_shape_table(shape))
        table = Table("last used", "depth", "children of a page")
        width = BAR_WIDTH if console.width >= WIDE_COLUMNS else NARROW_BAR_WIDTH
        table.add_row(*(_bars(b, width) for b in (shape.ages, shape.depths, shape.children)))
        console.print(table)


def _shape_table(shape: NamespaceShape) -> Table:
    title = f"{shape.name or 'not of this configuration'}"
    table = Table("", "", title=title, show_header=False)
    table.columns[1].overflow = "fold"
    sizes = ", ".join(format_size(size) for size in shape.page_bytes)
    table.add_row("namespace", shape.namespace)
    table.add_row("pages", f"{shape.pages:,} of {sizes or 'unknown size'}")
    table.add_row("frames", f"{format_size(shape.bytes)}, taking {format_size(shape.cost_bytes)}")
    if shape.newest_use_s is not None and shape.oldest_use_s is not None:
        used = f"{_age(shape.newest_use_s)} to {_age(shape.oldest_use_s)} ago"
    else:
        used = "the backend does not know"
    table.add_row("last used", used)
    table.add_row("first pages", f"{shape.chains:,}")
    table.add_row("last pages", f"{shape.leaves:,}")
    table.add_row("branching", f"{shape.branching:,} pages with more than one child")
    table.add_row("longest chain", f"{shape.longest:,} pages")
    for name, count in (("orphans", shape.orphans), ("unusable headers", shape.faulty)):
        if count:
            table.add_row(name, f"{count:,}: see kvstrata verify", style="red")
    return table


def _bars(buckets: list[Bucket], width: int) -> str:
    most = max((bucket.pages for bucket in buckets), default=1)
    label = max((len(bucket.label) for bucket in buckets), default=0)
    digits = max((len(f"{bucket.pages:,}") for bucket in buckets), default=0)
    return "\n".join(
        f"{b.label:>{label}} {b.pages:>{digits},} {'█' * -(-b.pages * width // most)}"
        for b in buckets
    )


def _age(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


_ALWAYS = ("place", "verdict", "file_bytes")
"""Fields of a report that are known where no header can be read."""


def _show_frame(report: FrameReport, json: Path | None) -> None:
    console = table_console(json)
    table = Table("", "", show_header=False, title="frame")
    table.columns[1].overflow = "fold"
    for field, value in msgspec.structs.asdict(report).items():
        is_known = report.key != "" or field in _ALWAYS
        if is_known and (value != "" or field in ("parent", "verdict")):
            shown = f"{value:,}" if isinstance(value, int) else str(value)
            style = "red" if field == "verdict" and value != "ok" else None
            table.add_row(field.replace("_", " "), Text(shown or "(first page)"), style=style)
    console.print(table)
    if json is not None:
        write_json(report, json)
    if report.verdict != "ok":
        raise typer.Exit(1)
