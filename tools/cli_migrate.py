"""`kvstrata migrate`: frames from one backend of a configuration to another, as they are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvstrata.backends import ObjectId, StorageBackend
from kvstrata.configs import Config, load_config
from kvstrata.errors import InputError
from kvstrata.tools.catalog import Page, State
from kvstrata.tools.cli_options import (
    ConfigOption,
    JsonOption,
    NamespaceOption,
    RateOption,
    SetOption,
    ThreadsOption,
    duration_s,
    namespaces_of,
    size_bytes,
)
from kvstrata.tools.cli_output import table_console, write_json
from kvstrata.tools.cli_progress import page_progress
from kvstrata.tools.migrate import MigrateSettings, Migration
from kvstrata.tools.migrate_journal import Journal, Selection
from kvstrata.tools.migrate_report import MigrateReport, build_report, print_report
from kvstrata.tools.replay_control import interruptible
from kvstrata.tools.stores import (
    backend_config,
    is_same_store,
    namespace_names,
    open_store,
    root_of,
    store_identity,
)
from kvstrata.units import format_size, parse_size


def migrate(
    config: ConfigOption,
    from_: Annotated[str, typer.Option("--from", metavar="A", help="The backend to copy from.")],
    to: Annotated[str, typer.Option("--to", metavar="B", help="The backend to copy to.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be copied; change nothing.")
    ] = False,
    namespace: NamespaceOption = None,
    newer_than: Annotated[
        str | None, typer.Option(help='Only pages that were used since, e.g. "7d", "12h".')
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(help="Only pages that were not used since.")
    ] = None,
    move: Annotated[
        bool,
        typer.Option("--move", help="Remove at the source what is verified and durable there."),
    ] = False,
    read_back: Annotated[
        bool, typer.Option("--read-back", help="Read each copy and compare it (with --move: on).")
    ] = False,
    may_evict: Annotated[
        bool, typer.Option("--may-evict", help="Go on where the destination must evict for it.")
    ] = False,
    rate: RateOption = None,
    threads: ThreadsOption = 4,
    journal: Annotated[
        Path | None,
        typer.Option(help="Where progress is kept; default: var/migrate-A-B.journal."),
    ] = None,
    json: JsonOption = None,
    set_: SetOption = None,
) -> None:
    """Copy the frames of one backend to another, byte for byte, beside whoever serves from them.

    Stopped by Ctrl-C or killed, the same command goes on where it was. Pages that the source
    evicts meanwhile are counted, and no fault. Exit code 0: all of it is there; 1: something could
    not be copied; 2: wrong use; 130: stopped by Ctrl-C.
    """
    settings = load_config(config, set_ or ())
    _check_names(settings, from_, to)
    selection = Selection(
        namespaces_of(settings, namespace),
        duration_s(newer_than, "--newer-than"),
        duration_s(older_than, "--older-than"),
    )
    how = MigrateSettings(move, read_back or move, may_evict, size_bytes(rate, "--rate"), threads)
    place = journal or Path("var") / f"migrate-{from_}-{to}.journal"
    progress_console = Console(stderr=True)
    stores = [store_identity(settings, name) for name in (from_, to)]
    identity = repr((*stores, selection, move))
    command = _Command(settings, from_, to, how, selection)
    with Journal("" if dry_run else str(place), identity) as book:
        report, code = command.run(book, progress_console, dry_run=dry_run)
    print_report(report, table_console(json))
    if json is not None:
        write_json(report, json)
    if report.complete and not dry_run:
        _remove_journal(place)
    elif not dry_run:
        why = report.stopped_because or "stopped"
        progress_console.print(
            f"{why}; the same command goes on from here (journal {place})", style="yellow"
        )
    if code is not None or not report.is_clean:
        raise typer.Exit(code or 1)


def _check_names(config: Config, source: str, target: str) -> None:
    for name, option in ((source, "--from"), (target, "--to")):
        backend_config(config, name, option)
    if is_same_store(config, source, target):
        raise InputError(
            f"{source} and {target} are one store",
            remedy="give --from and --to two backends with roots of their own",
            where=config.where("backends"),
        )


class _Command:
    """One run of the command on a journal."""

    def __init__(
        self,
        config: Config,
        source: str,
        target: str,
        settings: MigrateSettings,
        selection: Selection,
    ) -> None:
        self._config = config
        self._names = (source, target)
        self._settings = settings
        self._selection = selection
        self._migration: Migration | None = None

    def run(
        self, book: Journal, console: Console, *, dry_run: bool
    ) -> tuple[MigrateReport, int | None]:
        """The report, and the exit code if a signal decides it."""
        source, target = self._names
        config, settings = self._config, self._settings
        with ExitStack() as stack:
            stop = stack.enter_context(interruptible())
            on_progress = stack.enter_context(page_progress(console))
            opened = stack.enter_context(open_store(config, source, writes=False))
            goal = self._open_target(stack, dry_run)
            migration = Migration(
                opened, goal or opened, book, self._selection, settings, stop, on_progress
            )
            self._migration = migration
            stop.in_loop = True
            migration.prepare()
            if not stop.finish.is_set():
                if book.phase == "copy":
                    self._look_at_target(book, goal)
                if not dry_run:
                    migration.run()
            stop.in_loop = False
            report = build_report(
                book,
                namespace_names(config),
                source=source,
                destination=target,
                move=settings.move,
                may_evict=settings.may_evict,
                dry_run=dry_run,
                stopped_because=migration.stopped_because,
            )
        return report, stop.exit_code

    def _open_target(self, stack: ExitStack, dry_run: bool) -> StorageBackend | None:
        """None: a dry run would have to make it."""
        config, target = self._config, self._names[1]
        root = root_of(config, target)
        if dry_run and root is not None and not os.path.isdir(root):
            return None
        store = open_store(config, target, writes=not dry_run, on_evicted=self._evicted)
        return stack.enter_context(store)

    def _evicted(self, objects: Sequence[ObjectId]) -> None:
        if self._migration is not None:
            self._migration.evicted(objects)

    def _look_at_target(self, book: Journal, goal: StorageBackend | None) -> None:
        """What is there already needs no copy, only a check where that is asked for. Raises
        InputError when the destination would have to evict for the rest."""
        need = book.number("SELECT sum(cost) FROM pages WHERE selected>0 AND state=0")

        def ask(pages: list[Page]) -> None:
            nonlocal need
            there = goal.exists([page.object for page in pages]) if goal is not None else []
            found = [page for page, is_there in zip(pages, there, strict=True) if is_there]
            marks = ",".join("?" * len(found))
            query = f"SELECT sum(cost) FROM pages WHERE id IN ({marks})"
            need -= book.number(query, [page.id for page in found])
            if not self._settings.reads_back:
                book.set_state(found, State.DONE)

        if goal is not None:
            book.each([State.PENDING], goal.max_batch, ask)
        if not self._settings.may_evict:
            self._check_room(goal, need)

    def _check_room(self, goal: StorageBackend | None, need: int) -> None:
        name = self._names[1]
        options = self._config.backends[name].options
        limit = parse_size(getattr(options, "max_bytes", 0) or 0)
        used = goal.usage().used_bytes if goal is not None else 0
        free = _free_bytes(root_of(self._config, name))
        least = parse_size(getattr(options, "min_free_bytes", 0) or 0)
        for room, what in (
            (limit - used if limit else None, "max_bytes"),
            (free - least if free is not None else None, "min_free_bytes"),
        ):
            if room is not None and need > room:
                raise InputError(
                    f"{format_size(need)} are to be copied, and {name} has room for "
                    f"{format_size(max(room, 0))}",
                    remedy="make room, raise the bound, copy less (--newer-than, --namespace), or "
                    "let it evict what was used least: --may-evict",
                    where=self._config.where("backends", name, "options", what),
                )


def _free_bytes(root: str | None) -> int | None:
    if root is None:
        return None
    folder = os.path.abspath(root)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _remove_journal(place: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        Path(f"{place}{suffix}").unlink(missing_ok=True)
