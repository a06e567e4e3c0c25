"""`kvstrata replay`: a trace through L1, L2 and L3, every restored byte checked.

The trace is replayed as fast as it goes; timestamps are not used. Tokens come from the trace's
block ids, KV from the oracle (`kvstrata.gpu_runtime.oracle`), storage from the config.
"""

from __future__ import annotations

import enum
import gc
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvstrata.configs import Config, load_config
from kvstrata.errors import CapacityError, InputError, Where
from kvstrata.gpu_runtime import OracleRunner
from kvstrata.handles import Tier
from kvstrata.tiers import RequestResult, RequestState
from kvstrata.tools.cli_options import JsonOption, SetOption
from kvstrata.tools.cli_output import STDOUT, write_json
from kvstrata.tools.engine import ABORT_DEADLINE_S, Engine, open_engine
from kvstrata.tools.replay_control import Interruption, OnResult, interruptible, progress
from kvstrata.tools.replay_report import ReplayReport, RunInfo, build_report, print_report
from kvstrata.tools.trace import TraceRequest, read_trace, shipped_trace

SETTLE_S = 5.0
"""What the runtime may take to tell of a deadline."""
STEP_TIMEOUT_S = 0.5
MIN_OUTSTANDING = 64
"""Requests that are submitted ahead of the scheduler: enough to look ahead, bounded memory."""


class Decode(enum.StrEnum):
    """`none`: prefill and one token. `real`: as many tokens as the trace says."""

    NONE = "none"
    REAL = "real"


@dataclass(slots=True)
class ReplayTotals:
    """Sums over the requests that ended."""

    requests: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    full_pages: int = 0
    page_hits: int = 0
    duplicates: int = 0
    computed_tokens: int = 0
    hit_pages: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    first_token_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, result: RequestResult) -> None:
        if result.state is not RequestState.FINISHED:
            self.aborted += 1
            if result.error:
                self.errors.append(result.error)
            return
        self.requests += 1
        self.prompt_tokens += result.prompt_tokens
        self.output_tokens += len(result.output_tokens) // 4
        self.full_pages += result.full_pages
        self.page_hits += result.page_hits
        self.duplicates += result.duplicate_pages
        self.computed_tokens += result.computed_tokens
        for tier, pages in result.hit_pages.items():
            self.hit_pages[tier] += pages
        self.first_token_s.append(result.first_token_s)
        self.total_s.append(result.total_s)


def run_replay(
    config: Config,
    trace: Path,
    *,
    requests: int | None = None,
    batch: int | None = None,
    decode: Decode = Decode.NONE,
    stop: Interruption | None = None,
    on_result: OnResult | None = None,
) -> ReplayReport:
    """Replay and report. `stop` ends it early; the report is partial then.

    Raises InputError for a trace that is wrong, what `open_engine` raises, and IntegrityError when
    the runtime's books do not agree in the end.
    """
    totals, stop = ReplayTotals(), stop or Interruption()
    count = sum(1 for _ in read_trace(trace, requests))  # a bad line ends it before it began
    pending = read_trace(trace, requests)
    with open_engine(config, OracleRunner(), max_batch=batch, opened=stop.enter_loop) as engine:
        gc.freeze()  # a full collection would walk every imported module, 10 ms and more each time
        started = time.monotonic()
        backend = config.l3_backend
        settle_s = SETTLE_S + (backend.deadline_s if backend else 0.0)
        for result in _drive(engine, pending, trace, decode, stop, settle_s=settle_s):
            totals.add(result)
            if on_result is not None:
                on_result(totals.requests + totals.aborted, count, totals.page_hits)
        stop.in_loop = False
        run = RunInfo(
            config=str(config.source.file or ""),
            trace=str(trace),
            trace_requests=count,
            max_batch=engine.scheduler.settings.max_batch,
            page_tokens=config.pools.page_tokens,
            decode=decode.value,
            complete=totals.requests + totals.aborted == count,
        )
        report = build_report(engine, config, totals, run, time.monotonic() - started)
        engine.runtime.check_integrity()
        if stop.leave.is_set():
            engine.close(ABORT_DEADLINE_S)
    return report


def _drive(
    engine: Engine,
    pending: Iterator[TraceRequest],
    trace: Path,
    decode: Decode,
    stop: Interruption,
    *,
    settle_s: float,
) -> Iterator[RequestResult]:
    """Keep the scheduler fed until the trace has ended and everything is stored.

    What is still open `settle_s` after the last request has outlived its deadline: it waits for
    pages that a backend holds, whose call may hang for good."""
    scheduler = engine.scheduler
    ahead = max(MIN_OUTSTANDING, 4 * scheduler.settings.max_batch)
    exhausted, outstanding, settled_s = False, 0, math.inf
    while not stop.leave.is_set():
        exhausted = exhausted or stop.finish.is_set()
        while not exhausted and scheduler.waiting < ahead:
            request = next(pending, None)
            if request is None:
                exhausted = True
                break
            _submit(engine, request, trace, decode)
            outstanding += 1
        if exhausted and (scheduler.idle or time.monotonic() > settled_s):
            return
        for result in scheduler.step(STEP_TIMEOUT_S):
            outstanding -= 1
            yield result
        if exhausted and not outstanding:
            settled_s = min(settled_s, time.monotonic() + settle_s)


def _submit(engine: Engine, request: TraceRequest, trace: Path, decode: Decode) -> None:
    new_tokens = max(1, request.output_length) if decode is Decode.REAL else 1
    try:
        engine.scheduler.submit(request.prompt(), engine.namespace, max_new_tokens=new_tokens)
    except CapacityError as exc:
        raise InputError(
            f"the request does not fit: {exc}",
            where=Where(trace, request.line),
            remedy="raise pools.pages or pools.max_context_tokens in the config",
        ) from exc


def replay(
    config: Annotated[Path, typer.Option(help="Configuration file (TOML).")],
    trace: Annotated[
        Path | None,
        typer.Option(help="Trace in Mooncake's JSONL format; default: the shipped one."),
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first N requests.")] = None,
    page_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens a page, instead of pools.page_tokens.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Rows a batch, instead of scheduler.max_batch.")
    ] = None,
    decode: Annotated[
        Decode, typer.Option(help="none: prefill and one token; real: the trace's output length.")
    ] = Decode.NONE,
    json: JsonOption = None,
    set_: SetOption = None,
) -> None:
    """Replay a trace through L1, L2 and L3, and check every restored byte.

    Exit code 1 when a restored page was wrong or a request failed. Ctrl-C ends it after what is
    under way, with a partial report and exit code 130; L3 keeps what was stored.
    """
    overrides = list(set_ or [])
    if page_tokens is not None:
        overrides.append(f"pools.page_tokens={page_tokens}")
    settings = load_config(config, overrides)
    console = Console(stderr=True)
    with interruptible() as stop, progress(console) as on_result:
        report = run_replay(
            settings,
            trace or shipped_trace(),
            requests=requests,
            batch=batch,
            decode=decode,
            stop=stop,
            on_result=on_result,
        )
    print_report(report, console if json == STDOUT else Console())
    if json is not None:
        write_json(report, json)
    if not report.run.complete:
        console.print("stopped early; L3 keeps what was stored", style="yellow")
    if report.pages_mismatched or report.failed_requests:
        raise typer.Exit(1)
    if stop.exit_code is not None:
        raise typer.Exit(stop.exit_code)
