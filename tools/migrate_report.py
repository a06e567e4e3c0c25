"""What a migration came to: its JSON fields and its table. All of it is read from the journal, so
that it counts over all runs of one migration."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstrata.backends import ObjectId
from kvstrata.tools.catalog import State
from kvstrata.tools.migrate_journal import Journal
from kvstrata.units import format_size

MAX_PROBLEMS = 20


class Problem(msgspec.Struct, frozen=True):
    """A page that was not migrated, or not removed."""

    page: str
    """`<namespace>/<key>`, as a file-system backend names it below `objects/`, shard left out."""
    fault: str
    message: str


class NamespaceReport(msgspec.Struct, frozen=True):
    namespace: str
    name: str
    """What the configuration calls it; "": it is not one of its own."""
    pages: int
    bytes: int
    at_destination: int


class MigrateReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `kvstrata migrate --json` writes."""

    source: str
    destination: str
    complete: bool
    """False: the same command goes on."""
    dry_run: bool
    move: bool
    resumed: bool
    runs: int
    """How often the command was run for this migration."""
    phase: str
    stopped_because: str
    pages: int
    """Asked for, with those that they hang on."""
    bytes: int
    copied: int
    copied_bytes: int
    existed: int
    """At the destination before."""
    vanished: int
    """Went from the source before they could be copied (eviction); no fault."""
    cut: int
    """Not copied, because a page before them was not."""
    failed: int
    evicted: int
    """Copied, and evicted from the destination since."""
    deleted: int
    """From the source (`--move`)."""
    left: int
    """Not copied yet."""
    namespaces: list[NamespaceReport]
    problems: list[Problem]
    """The first of them."""
    seconds: float
    journal: str

    @property
    def is_clean(self) -> bool:
        return not (self.failed or self.evicted or self.problems or self.stopped_because)


def build_report(
    journal: Journal,
    names: dict[bytes, str],
    *,
    source: str,
    destination: str,
    move: bool,
    may_evict: bool,
    dry_run: bool = False,
    stopped_because: str = "",
) -> MigrateReport:
    at_home = (State.DONE, State.SAFE, State.DELETED)
    pages, nbytes = journal.count()
    copied, copied_bytes = journal.count("copied=1 AND state IN (?,?,?)", at_home)
    existed, _ = journal.count("copied=0 AND state IN (?,?,?)", at_home)

    def number(state: State) -> int:
        return journal.count("state=?", (state,))[0]

    evicted = 0 if may_evict else number(State.EVICTED)
    return MigrateReport(
        source=source,
        destination=destination,
        complete=journal.phase == "done",
        dry_run=dry_run,
        move=move,
        resumed=journal.is_resumed,
        runs=int(journal.get("runs") or 0),
        phase=journal.phase,
        stopped_because=stopped_because,
        pages=pages,
        bytes=nbytes,
        copied=copied,
        copied_bytes=copied_bytes,
        existed=existed,
        vanished=number(State.VANISHED),
        cut=number(State.CUT),
        failed=number(State.FAILED),
        evicted=evicted,
        deleted=number(State.DELETED),
        left=number(State.PENDING) + number(State.WRITING),
        namespaces=_namespaces(journal, names),
        problems=_problems(journal),
        seconds=round(float(journal.get("seconds") or 0), 3),
        journal=journal.path,
    )


def _namespaces(journal: Journal, names: dict[bytes, str]) -> list[NamespaceReport]:
    rows = journal.rows(
        "SELECT ns, count(*), sum(nbytes), sum(state IN (?,?,?)) FROM pages WHERE selected>0 "
        "GROUP BY ns ORDER BY 3 DESC",
        (State.DONE, State.SAFE, State.DELETED),
    )
    return [NamespaceReport(ns.hex(), names.get(ns, ""), *numbers) for ns, *numbers in rows]


def _problems(journal: Journal) -> list[Problem]:
    """Failures; orphans of the source; and pages whose parent is not at the destination though its
    own state does not say so."""
    rows = journal.rows(
        "SELECT c.ns, c.key, coalesce(c.fault, 'parent missing'), c.message FROM pages c "
        "LEFT JOIN pages p ON p.id=c.parent_id WHERE c.selected>0 AND (c.state=? OR (c.state=? AND "
        "(c.fault IS NOT NULL OR p.state NOT IN (?, ?, ?, ?)))) ORDER BY c.state, c.id LIMIT ?",
        (State.FAILED, State.CUT, *_SAID_ELSEWHERE, MAX_PROBLEMS),
    )
    return [
        Problem(ObjectId(ns, key).name, fault, message or _MEANING.get(fault, ""))
        for ns, key, fault, message in rows
    ]


_SAID_ELSEWHERE = (State.VANISHED, State.EVICTED, State.CUT, State.FAILED)
"""States of a parent that say why its child was cut."""
_MEANING = {"missing": "it is gone", "error": "it cannot be read"}


def print_report(report: MigrateReport, console: Console) -> None:
    title = f"{report.source} → {report.destination}"
    if report.dry_run:
        title += ": what would be done"
    elif not report.complete:
        title += f": not complete ({report.phase})"
    table = Table("", "pages", "", title=title, show_header=False)
    table.columns[1].justify = "right"
    speed = report.copied_bytes / report.seconds / 1e6 if report.seconds else 0.0
    took = f"{format_size(report.copied_bytes)} in {report.seconds:.1f} s ({speed:.1f} MB/s)"
    if report.runs > 1:
        took += f", {report.runs} runs"
    rows: list[tuple[str, int, str]] = [
        ("pages", report.pages, format_size(report.bytes)),
        ("copied", report.copied, "" if report.dry_run else took),
        ("there before", report.existed, "left as they were"),
        ("vanished", report.vanished, "evicted at the source meanwhile"),
        ("cut", report.cut, "a page before them was not copied"),
        ("failed", report.failed, ""),
        ("evicted", report.evicted, "from the destination, after they were copied"),
        ("left", report.left, "to copy"),
    ]
    if report.move:
        rows.append(("deleted", report.deleted, "at the source"))
    for name, number, note in rows:
        if number or name in ("pages", "copied", "deleted"):
            table.add_row(name, f"{number:,}", note)
    table.add_section()
    for part in report.namespaces:
        name = part.name or "(not of this configuration)"
        table.add_row(f"{part.namespace[:16]}…", f"{part.pages:,}", f"{name}, {_at(part)}")
    console.print(table)
    if report.problems:
        problems = Table("page", "fault", "what", title="problems")
        for problem in report.problems:
            problems.add_row(Text(problem.page[65:81] + "…"), problem.fault, Text(problem.message))
        console.print(problems)
        if any(problem.fault != "destination" for problem in report.problems):
            console.print(
                f"kvstrata verify {report.source} says more of what is wrong with it", style="dim"
            )


def _at(part: NamespaceReport) -> str:
    return f"{format_size(part.bytes)}, {part.at_destination:,} at the destination"
