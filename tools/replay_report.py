"""The report of a replay: its JSON fields and its table."""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from kvstrata import __version__
from kvstrata.configs import Config
from kvstrata.errors import ClosedError, StorageError
from kvstrata.handles import Tier
from kvstrata.tools.engine import Engine
from kvstrata.units import format_size

if TYPE_CHECKING:
    from kvstrata.tools.replay import ReplayTotals

MAXRSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What was replayed, and how."""

    config: str
    trace: str
    trace_requests: int
    """Requests that were asked for."""
    max_batch: int
    page_tokens: int
    decode: str
    complete: bool
    """False: it was stopped early, and all counts are of what ended before."""
    version: str = __version__


class HitTokens(msgspec.Struct, frozen=True):
    """Prompt tokens that were not computed, by the tier they were found in."""

    l1: int
    l2: int
    l3: int


class PathReport(msgspec.Struct, frozen=True):
    """One transfer path: bytes moved, seconds it was busy, GB/s while busy."""

    bytes: int
    busy_s: float
    gb_per_s: float
    operations: int


class Percentiles(msgspec.Struct, frozen=True):
    """Milliseconds, from submission on."""

    p50: float
    p95: float
    p99: float


class StorageReport(msgspec.Struct, frozen=True):
    """L3, the backend that was attached last: pages by operation and outcome, room taken, and what
    was given up."""

    backend: str
    plugin: str
    outcomes: dict[str, dict[str, int]]
    used_bytes: int | None
    """None: the backend could not say."""
    limit_bytes: int | None
    objects: int | None
    late_pages: int
    corrupt_deleted: int


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `kvstrata replay --json` writes. Pages are prompt pages; all counts are of ended
    requests."""

    run: RunInfo
    requests: int
    failed_requests: int
    prompt_tokens: int
    output_tokens: int
    full_pages: int
    page_hits: int
    duplicates_in_flight: int
    hit_tokens: HitTokens
    computed_tokens: int
    pages_verified: int
    pages_mismatched: int
    storage: StorageReport | None
    calls_per_batch: float
    """Calls across RuntimeInterface while batches were under way, divided by batches."""
    calls: dict[str, int]
    paths: dict[str, PathReport]
    hidden_transfer_share: float | None
    """Share of the seconds of D2H and H2D during which compute ran."""
    compute_s: float
    first_token_ms: Percentiles
    request_ms: Percentiles
    control: dict[str, int]
    """Evictions by tier, short prefetches and failed backups by cause, deferred batches."""
    errors: list[str]
    peak_memory_bytes: int
    """The most memory that the process has had resident, pools and staging included."""
    seconds: float


def build_report(
    engine: Engine, config: Config, totals: ReplayTotals, run: RunInfo, seconds: float
) -> ReplayReport:
    """The report of what has ended so far. Asks the backend for its usage, so it may block."""
    scheduler, size = engine.scheduler, config.pools.page_tokens
    calls = dict(scheduler.calls)
    batches = calls.pop("batches", 0)
    beside = calls.get("drain", 0) + calls.get("idle", 0)
    counters = dict(scheduler.counters)
    transfers = engine.runtime.transfers()
    compute = transfers.pop("compute", None)
    paths = {name: _path(t.nbytes, t.busy_s, t.operations) for name, t in transfers.items()}
    stats = engine.runtime.storage_stats()
    if stats is not None:
        for name, operation in (("l3_read", "load"), ("l3_write", "store")):
            paths[name] = _path(
                stats.bytes_moved[operation], stats.io_s[operation], stats.calls[operation]
            )
    return ReplayReport(
        run=run,
        requests=totals.requests,
        failed_requests=totals.aborted,
        prompt_tokens=totals.prompt_tokens,
        output_tokens=totals.output_tokens,
        full_pages=totals.full_pages,
        page_hits=totals.page_hits,
        duplicates_in_flight=totals.duplicates,
        hit_tokens=HitTokens(*(totals.hit_pages[tier] * size for tier in Tier)),
        computed_tokens=totals.computed_tokens,
        pages_verified=counters.pop("pages_verified", 0),
        pages_mismatched=counters.pop("pages_mismatched", 0),
        storage=_storage(engine, config),
        calls_per_batch=round((sum(calls.values()) - beside) / max(batches, 1), 3),
        calls={"batches": batches, **calls},
        paths=paths,
        hidden_transfer_share=engine.runtime.hidden_share(),
        compute_s=compute.busy_s if compute else 0.0,
        first_token_ms=_percentiles(totals.first_token_s),
        request_ms=_percentiles(totals.total_s),
        control={**dict(scheduler.cache.counters), **counters},
        errors=sorted(set(totals.errors))[:8],
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_UNIT_BYTES,
        seconds=round(seconds, 3),
    )


def _path(nbytes: int, busy_s: float, operations: int) -> PathReport:
    speed = nbytes / busy_s / 1e9 if busy_s > 0 else 0.0
    return PathReport(nbytes, round(busy_s, 4), round(speed, 3), operations)


def _percentiles(seconds: list[float]) -> Percentiles:
    if not seconds:
        return Percentiles(0.0, 0.0, 0.0)
    ordered = sorted(seconds)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e3, 3)

    return Percentiles(at(0.50), at(0.95), at(0.99))


def _storage(engine: Engine, config: Config) -> StorageReport | None:
    worker = engine.runtime.core.worker
    if worker is None:
        return None
    stats = worker.stats()
    try:
        usage = worker.usage()
    except (StorageError, ClosedError):  # it does not answer, or is detached
        usage = None
    return StorageReport(
        backend=worker.name,
        plugin=config.backends[worker.name].plugin,
        outcomes={
            operation: {outcome.value: n for outcome, n in sorted(pages.items(), key=str)}
            for operation, pages in stats.pages.items()
        },
        used_bytes=usage.used_bytes if usage else None,
        limit_bytes=usage.limit_bytes if usage else None,
        objects=usage.objects if usage else None,
        late_pages=stats.late_pages,
        corrupt_deleted=stats.corrupt_deleted,
    )


def print_report(report: ReplayReport, console: Console) -> None:
    """The last table of `kvstrata replay`."""
    title = f"{report.requests:,} requests in {report.seconds:.1f} s"
    if not report.run.complete:
        title = f"{title}, stopped early: {report.run.trace_requests:,} were asked for"
    table = Table(title=title, show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    _rows_of_pages(table, report)
    table.add_section()
    _rows_of_paths(table, report)
    if report.storage is not None:
        table.add_section()
        _rows_of_storage(table, report.storage)
    table.add_section()
    _rows_of_control(table, report)
    console.print(table)
    for error in report.errors:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)


def _rows_of_pages(table: Table, report: ReplayReport) -> None:
    hits, prompt = report.hit_tokens, max(report.prompt_tokens, 1)
    table.add_row("prompt tokens", f"{report.prompt_tokens:,}", f"{report.full_pages:,} full pages")
    for name, tokens in (("L1", hits.l1), ("L2", hits.l2), ("L3", hits.l3)):
        table.add_row(f"hit in {name}", f"{tokens:,}", f"{tokens / prompt:.1%} of prompt tokens")
    table.add_row("computed", f"{report.computed_tokens:,}", f"+ {report.output_tokens:,} decoded")
    table.add_row(
        "page hits", f"{report.page_hits:,}", f"{report.duplicates_in_flight:,} computed twice"
    )
    wrong = report.pages_mismatched
    style = "bold red" if wrong else "green"
    table.add_row("pages verified", f"{report.pages_verified:,}", "byte by byte")
    table.add_row("pages mismatched", f"[{style}]{wrong:,}[/]", "")
    if report.failed_requests:
        table.add_row("failed requests", f"[bold red]{report.failed_requests:,}[/]", "")


def _rows_of_paths(table: Table, report: ReplayReport) -> None:
    for name, path in report.paths.items():
        if path.operations:
            table.add_row(
                name.replace("_", " "),
                f"{path.bytes / 2**20:,.1f} MiB",
                f"{path.gb_per_s:.2f} GB/s while busy, {path.operations:,} operations",
            )
    share = report.hidden_transfer_share
    hidden = "no transfers" if share is None else f"{share:.0%}"
    table.add_row("transfer time hidden", hidden, "D2H and H2D while compute ran")


def _rows_of_storage(table: Table, storage: StorageReport) -> None:
    for operation, outcomes in storage.outcomes.items():
        if outcomes:
            text = ", ".join(f"{n:,} {name}" for name, n in outcomes.items())
            table.add_row(f"storage {operation}", f"{sum(outcomes.values()):,}", text)
    if storage.corrupt_deleted:
        table.add_row("corrupt frames", f"{storage.corrupt_deleted:,}", "deleted")
    if storage.used_bytes is None:
        table.add_row("storage used", "unknown", "")
        return
    limit = "no limit" if storage.limit_bytes is None else f"of {format_size(storage.limit_bytes)}"
    what = f"{storage.objects:,} frames, {limit}"
    table.add_row("storage used", f"{storage.used_bytes / 2**20:,.1f} MiB", what)


def _rows_of_control(table: Table, report: ReplayReport) -> None:
    for name, p in (("first token", report.first_token_ms), ("request", report.request_ms)):
        table.add_row(f"{name} p50", f"{p.p50:,.1f} ms", f"p95 {p.p95:,.1f}, p99 {p.p99:,.1f} ms")
    batches = report.calls.get("batches", 0)
    table.add_row("calls a batch", f"{report.calls_per_batch:.2f}", f"{batches:,} batches")
    for name in sorted(report.control):
        if report.control[name]:
            table.add_row(name.replace("_", " "), f"{report.control[name]:,}", "")
    table.add_row("memory", f"{report.peak_memory_bytes / 2**20:,.0f} MiB", "resident, at the most")
