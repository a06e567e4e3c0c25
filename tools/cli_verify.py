"""`kvstrata verify`: is every frame of a store what it says it is?"""

from __future__ import annotations

import re
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstrata.backends import ObjectId
from kvstrata.backends.filesystem.files import object_path
from kvstrata.configs import load_config
from kvstrata.errors import InputError, Where
from kvstrata.tiers import component_fingerprint
from kvstrata.tools.catalog import Catalog
from kvstrata.tools.cli_options import (
    ConfigOption,
    JsonOption,
    NamespaceOption,
    RateOption,
    SetOption,
    ThreadsOption,
    namespaces_of,
    size_bytes,
)
from kvstrata.tools.cli_output import table_console, write_json
from kvstrata.tools.cli_progress import page_progress
from kvstrata.tools.migrate_copy import RateLimit
from kvstrata.tools.replay_control import interruptible
from kvstrata.tools.stores import backend_config, open_store, root_of
from kvstrata.tools.verify import Kind, Verification, VerifyReport, build_report
from kvstrata.units import format_size

MAX_ROWS = 40
"""Of the table; `--json` has all, with whole names."""
_LONG = re.compile(r"([0-9a-f]{16})[0-9a-f]{48}")

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="A backend of the configuration.")
]


def verify(
    name: NameArgument,
    config: ConfigOption,
    namespace: NamespaceOption = None,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Delete what no load can use, and the pages behind it."),
    ] = False,
    keep_orphans: Annotated[
        bool,
        typer.Option("--keep-orphans", help="With --repair: keep pages whose parent is missing."),
    ] = False,
    rate: RateOption = None,
    threads: ThreadsOption = 2,
    json: JsonOption = None,
    set_: SetOption = None,
) -> None:
    """Read every frame of a backend and check its header, checksums, place and chain, and the
    backend's own index.

    It changes nothing without --repair, and runs beside a server. Exit code 0: all is well; 1:
    problems were found (repaired or not); 2: wrong use.
    """
    settings = load_config(config, set_ or ())
    backend_config(settings, name, "NAME")
    if keep_orphans and not repair:
        raise InputError(
            "--keep-orphans says what --repair keeps",
            remedy="give --repair too, or neither",
            where=Where(key="--keep-orphans"),
        )
    prefixes = namespaces_of(settings, namespace)
    bytes_per_s = size_bytes(rate, "--rate")
    root = root_of(settings, name)
    whole = settings.namespace().fingerprint()
    sizes = {component_fingerprint(whole, c.name): c.page_bytes for c in settings.components}

    def place_of(page: ObjectId) -> str:
        return page.name if root is None else f"{root}/{object_path(page)}"

    began = time.monotonic()
    console = Console(stderr=True)
    with (
        interruptible() as stop,
        page_progress(console) as on_progress,
        Catalog() as catalog,
        open_store(settings, name, writes=False) as backend,
    ):
        stop.in_loop = True
        limit = RateLimit(bytes_per_s, stop.finish.wait)
        look = Verification(
            backend, place_of, sizes, prefixes, stop, on_progress, threads, limit.take
        )
        problems = look.run(catalog, repair=repair, keep_orphans=keep_orphans)
        stop.in_loop = False
    report = build_report(name, look, problems, began)
    print_report(report, table_console(json), root)
    if json is not None:
        write_json(report, json)
    if stop.exit_code is not None:
        console.print("stopped early; the rest was not looked at", style="yellow")
        raise typer.Exit(stop.exit_code)
    if problems:
        raise typer.Exit(1)


def print_report(report: VerifyReport, console: Console, root: str | None) -> None:
    if report.problems:
        table = Table("problem", "where", "what", "remedy", title=report.backend)
        table.columns[1].overflow = "fold"
        shown = [p for p in report.problems if p.kind != Kind.UNREACHABLE]
        for problem in shown[:MAX_ROWS]:
            place = _LONG.sub(r"\1…", problem.place.removeprefix(f"{root}/"))
            table.add_row(problem.kind, Text(place), Text(problem.message), Text(problem.remedy))
        console.print(table)
        if root is not None:
            console.print(Text(f"files are below {root}"), style="dim")
        if more := len(report.problems) - min(len(shown), MAX_ROWS):
            text = f"… and {more:,} more"
            if len(shown) <= MAX_ROWS:
                text = f"… and {more:,} unreachable pages that hang on these"
            console.print(f"{text}; --json has all, with whole names", highlight=False)
    speed = report.bytes / report.seconds / 1e6 if report.seconds else 0.0
    summary = Table("", "", title=f"{report.backend}: what was looked at", show_header=False)
    summary.columns[1].justify = "right"
    summary.add_row("frames", f"{report.frames:,}")
    summary.add_row("read", f"{format_size(report.bytes)}, {speed:.0f} MB/s")
    if report.vanished:
        summary.add_row("evicted meanwhile", f"{report.vanished:,}")
    for kind, count in report.counts.items():
        summary.add_row(kind, f"{count:,}", style="red")
    if report.deleted:
        summary.add_row("deleted by --repair", f"{report.deleted:,}")
    found = "no problem" if report.complete else "not complete"
    summary.add_row("problems", f"{len(report.problems):,}" if report.problems else found)
    console.print(summary)
