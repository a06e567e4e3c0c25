"""`kvstrata backends status | detach | attach`: L3 of a process that serves, while it serves.

The configuration says where its admin socket is. Exit code 1: it refused, or a drain did not end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstrata.configs.load import load_admin
from kvstrata.errors import ConfigError, InputError, Where
from kvstrata.tools.admin import (
    Answer,
    AskStatus,
    Attach,
    Attached,
    BackendStatus,
    Detach,
    Detached,
    Request,
    Status,
    ask,
)
from kvstrata.tools.cli_options import ConfigOption, JsonOption, SetOption
from kvstrata.tools.cli_output import table_console, write_json
from kvstrata.units import format_size

STATUS_DEADLINE_S = 30.0
MARGIN_S = 30.0
"""For an earlier command to end, beside what this one may take."""
ATTACH_DEADLINE_S = 600.0
"""The process bounds it itself, by `process.open_deadline_s` of the backend."""
DRAIN_S = 30.0
MAX_DRAIN_S = 3600.0


def status(config: ConfigOption, json: JsonOption = None, set_: SetOption = None) -> None:
    """Show what a process that serves has as L3: health, queue, counters by outcome, times."""
    answer = _ask(config, set_, AskStatus(), STATUS_DEADLINE_S)
    assert isinstance(answer, Status)
    _print(answer, table_console(json))
    if json is not None:
        write_json(answer, json)


def detach(
    config: ConfigOption,
    drain: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=MAX_DRAIN_S,
            help=f"Seconds for what is under way and what waits; default {DRAIN_S:g}. Closing the "
            "backend takes as long again at the most.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Give up what waits; for a backend that hangs.")
    ] = False,
    set_: SetOption = None,
) -> None:
    """Let a process that serves go on without L3, until another backend is attached.

    From the first moment L3 is a miss; what was to be stored is stored while the drain lasts. Exit
    code 1 when the drain did not end: L3 is detached all the same, and pages were given up.
    """
    if drain is not None and force:
        raise InputError(
            "--drain and --force are both given",
            remedy="--drain waits for what is under way, --force does not: keep one",
            where=Where(key="--force"),
        )
    drain_s = 0.0 if force else DRAIN_S if drain is None else drain
    answer = _ask(config, set_, Detach(drain_s=drain_s), 2 * drain_s + MARGIN_S)
    assert isinstance(answer, Detached)
    console = Console(highlight=False)
    if not answer.backend:
        console.print("no backend is attached: nothing to do")
        return
    console.print(f"{answer.backend} is detached, after {answer.seconds:.1f} s")
    if not answer.complete and answer.waiting_pages:
        rest = "were" if force else "are stored or"
        console.print(f"{answer.waiting_pages:,} pages waited for their store, and {rest} given up")
    if answer.stuck_threads:
        console.print(
            f"{answer.stuck_threads} calls of it have not returned: the host pages that they use "
            "stay apart until they do"
        )
    if not answer.complete and not force:
        raise typer.Exit(1)


def attach(
    config: ConfigOption,
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A backend of the process's configuration."),
    ],
    set_: SetOption = None,
) -> None:
    """Let a process that serves go on with another backend, or the same again, as L3."""
    answer = _ask(config, set_, Attach(backend=name), ATTACH_DEADLINE_S)
    assert isinstance(answer, Attached)
    Console(highlight=False).print(f"{answer.backend} is L3 now, after {answer.seconds:.1f} s")


def _ask(config: Path, overrides: list[str] | None, request: Request, deadline_s: float) -> Answer:
    admin, source = load_admin(config, overrides or ())
    where = source.where(("admin", "socket"))
    if not admin.socket:
        raise ConfigError(
            "this configuration has no admin socket",
            remedy='add [admin] with socket = "./var/kvstrata.sock", and start the process anew',
            where=where,
        )
    return ask(admin.socket, request, deadline_s, where)


# ── the table ────────────────────────────────────────────────────────────────────────────────────


def _print(answer: Status, console: Console) -> None:
    about = Table(show_header=False, title=f"process {answer.pid}", title_justify="left")
    about.add_column(style="bold")
    about.add_column(overflow="fold")
    about.add_row("config", Text(f"{answer.config}, up {answer.uptime_s:,.0f} s"))
    about.add_row("backends", Text(", ".join(answer.backends) or "none"))
    l3 = answer.l3
    if l3 is None:
        about.add_row("L3", "none from the beginning")
        console.print(about)
        return
    about.add_row("L3", Text(f"{l3.name} ({l3.plugin})"))
    about.add_row("health", Text(f"{l3.health}{f': {l3.message}' if l3.message else ''}"))
    for name, value in _rows(l3):
        about.add_row(name, value)
    console.print(about)
    console.print(_operations(l3))


def _rows(l3: BackendStatus) -> list[tuple[str, str]]:
    waits = [f"{pages:,} {operation}" for operation, pages in l3.queued_pages.items() if pages]
    rows = [("queued pages", ", ".join(waits) or "0"), ("running jobs", str(l3.running_jobs))]
    if l3.used_bytes is not None:
        limit = "no limit" if l3.limit_bytes is None else f"of {format_size(l3.limit_bytes)}"
        rows.append(("used", f"{format_size(l3.used_bytes)}, {limit}, {l3.objects or 0:,} frames"))
    counts = (
        ("stores without room", l3.waiting_for_room),
        ("late pages", l3.late_pages),
        ("corrupt, deleted", l3.corrupt_deleted),
        ("breaker opened", l3.breaker_opened),
        ("killed", l3.kills),
        ("stuck threads", l3.abandoned_threads),
    )
    return [*rows, *((name, f"{count:,}") for name, count in counts if count)]


def _operations(l3: BackendStatus) -> Table:
    table = Table("operation")
    table.add_column("pages by outcome", overflow="fold")
    for name in ("calls", "retries", "moved", "queue", "I/O", "check", "copy"):
        table.add_column(name, justify="right")
    for operation, calls in l3.calls.items():
        outcomes = sorted(l3.pages.get(operation, {}).items())
        seconds = (t[operation] for t in (l3.queue_s, l3.io_s, l3.check_s, l3.copy_s))
        table.add_row(
            operation,
            ", ".join(f"{pages:,} {outcome}" for outcome, pages in outcomes if pages),
            f"{calls:,}",
            f"{l3.retries[operation]:,}",
            format_size(l3.bytes_moved[operation]),
            *(f"{s:,.2f} s" for s in seconds),
        )
    return table
