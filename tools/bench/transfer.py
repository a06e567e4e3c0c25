"""`kvstrata bench transfer`: copies between GPU and host beside their limit and the peers."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from kvstrata.errors import ConfigError, InputError, Where
from kvstrata.tools.bench.transfer_beside import Model, between, measure
from kvstrata.tools.bench.transfer_methods import (
    AT_ONCE,
    GEOMETRIES,
    Case,
    Geometry,
    Method,
    medians,
    methods_of,
)
from kvstrata.tools.bench.transfer_wall import Wall, loop_beside

GATE_CYCLES = 60_000_000
LAYER_GROUPS = 16
BURST_PAGES = 64
LOOP_S = 0.3
WALL_TURNS = 5
"""Measurements through the runtime for each of the others: they are short, and spread more."""
COMPUTE, DECODE, DECODE_LARGE = "compute-bound", "decode-like", "decode-like, large products"
COMPUTE_TURNS = 4
"""So many measurements beside such work for each of the others: its clocks wander by a percent,
and what is looked for is less."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Scattered pages of one geometry by one method, medians. `share` is of the limit, which is one
    contiguous pinned copy in the same run (of both ways at once, for "both")."""

    geometry: str
    method: str
    way: str
    gb_per_s: float
    share: float
    host_ms_per_gib: float
    """Processor time of the thread that enqueues it, not all of it with the interpreter lock."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a sustained transfer costs work beside it, GPU times, medians."""

    geometry: str
    method: str
    way: str
    work: str
    factor: float
    extra_ms_per_gib: float
    quartiles: tuple[float, float]
    """Of `extra_ms_per_gib`: half of the measurements are between."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A decode loop that is launched from Python, beside transfers of another thread. On the GPU
    alone those would cost it `gpu_percent`, by the `Cost` of its own graph, at this rate. Both are
    of the time of the loop alone."""

    loop: str
    transfers: str
    alone_ms: float
    loss_percent: float
    gpu_percent: float
    gib_per_s: float


@dataclass(slots=True)
class TransferReport:
    device: str
    torch: str
    nbytes: int
    repeats: int
    huge_pages: bool = False
    """What the host's side is made of: pages of 2 MiB, or of 4 KiB."""
    rates: list[Rate] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    wall: list[Rate] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    first_group_share: dict[str, float] = field(default_factory=dict)
    """Of the time of a restore of 32K tokens, until its first of 16 layer groups is there."""
    verified: dict[str, bool] = field(default_factory=dict)


Note = Callable[[str], None]


def run(
    nbytes: int,
    repeats: int,
    *,
    only: str = "",
    lmcache: Path | None = None,
    huge_pages: bool = False,
    seed: int = 1,
    note: Note = print,
    save: Callable[[TransferReport], None] = lambda report: None,
) -> TransferReport:
    """Everything, in seven minutes and 40 GB of the device's memory; `only` geometries with this in
    their names.

    `lmcache` is a folder with LMCache's c_ops library, where the package is not installed. `save`
    is called with what there is, part by part. Raises ConfigError without a GPU, InputError for a
    name that fits none."""
    geometries = [g for g in GEOMETRIES if only in g.label]
    if not geometries:
        raise InputError(
            f"no geometry has {only!r} in its name",
            remedy="one of: " + "; ".join(g.label for g in GEOMETRIES),
            where=Where(key="--only"),
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            "this benchmark needs an NVIDIA GPU",
            remedy="run it where there is one; `kvstrata doctor` says what is missing",
            where=Where(key="device"),
        )
    name = torch.cuda.get_device_name()
    report = TransferReport(name, str(torch.__version__), nbytes, repeats, huge_pages)
    first = geometries[0]
    burst = BURST_PAGES * first.spec.page_bytes(first.page_tokens)
    walls = [(geometry, geometry.label, nbytes) for geometry in geometries]
    walls.append((first, f"{BURST_PAGES} pages: {first.label}", burst))
    for geometry, label, size in walls:
        note(f"{label}: through RuntimeInterface")  # first, in a process that is as a server's
        _wall(report, geometry, label, size, seed)
        save(report)
    model = Model()
    for geometry in geometries:
        note(f"{geometry.label}: rates")
        case = Case(geometry, nbytes, seed, huge_pages=huge_pages)
        methods = dict(methods_of(case, lmcache, peers=True))
        _rates(report, case, methods, repeats)
        note(f"{geometry.label}: beside a model")
        works = {COMPUTE: model.compute_bound, DECODE: model.decode_like}
        del methods[AT_ONCE]  # this work is enqueued before it starts: no launches to slow
        if geometry is not first:
            methods = {name: methods[name] for name in ("contiguous", "kvstrata")}
        else:
            works[DECODE_LARGE] = model.decode_like_large
        _costs(report, model, case, works, methods, repeats)
        case.close()
        save(report)
        del case, methods
        torch.cuda.empty_cache()
    report.wall = [replace(r, share=r.gb_per_s / _limit(report, r.way)) for r in report.wall]
    save(report)
    note("loops")
    _loops(report, model, first, nbytes, repeats, seed)
    save(report)
    note("layer groups")
    _groups(report, first, repeats, seed)
    return report


# ── GPU time ─────────────────────────────────────────────────────────────────────────────────────


def _rates(report: TransferReport, case: Case, methods: dict[str, Method], repeats: int) -> None:
    ways = {"D2H": (True,), "H2D": (False,), "both": (True, False)}
    rows: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for turn in range(repeats + 1):
        for method, move in methods.items():
            for way, outs in ways.items():
                measured = _timed(case, move, outs)
                if turn:  # the first one warms up
                    rows.setdefault((method, way), []).append(measured)
    limits = {way: medians(rows["contiguous", way])[0] for way in ways}
    for (method, way), times in rows.items():
        seconds, host_s = medians(times)
        nbytes = case.nbytes * len(ways[way])
        gib = nbytes / (1 << 30)
        share = limits[way] / seconds
        rate = Rate(
            case.geometry.label, method, way, nbytes / seconds / 1e9, share, host_s * 1e3 / gib
        )
        report.rates.append(rate)
    for out in (True, False):
        case.ours(out)
        report.verified[f"{case.geometry.label} {'D2H' if out else 'H2D'}"] = case.verify(out)


def _timed(case: Case, move: Method, outs: tuple[bool, ...]) -> tuple[float, float]:
    """GPU seconds from a common start to the last end, and a host's seconds of enqueueing. Each
    way has a thread, as in a runtime."""
    torch.cuda.synchronize()
    gate = torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(case.stream(outs[0])):
        torch.cuda._sleep(GATE_CYCLES)
        gate.record()
    for out in outs:
        case.streams[out].wait(gate)
    with ThreadPoolExecutor(len(outs)) as threads:
        host_s = sum(threads.map(partial(_host_s, move), outs))
    ends = []
    for out in outs:
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record(case.stream(out))
    torch.cuda.synchronize()
    return max(gate.elapsed_time(end) for end in ends) / 1e3, host_s


def _host_s(move: Method, out: bool) -> float:
    started = time.thread_time()
    move(out)
    return time.thread_time() - started


def _costs(
    report: TransferReport,
    model: Model,
    case: Case,
    works: dict[str, Callable[[], None]],
    methods: dict[str, Method],
    repeats: int,
) -> None:
    for out in (True, False):
        for work, run_work in works.items():
            turns: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
            for _ in range(repeats * (COMPUTE_TURNS if work == COMPUTE else 1)):
                for method, beside in measure(model, run_work, case, methods, out).items():
                    factor = beside.beside_ms / beside.alone_ms
                    turns[method].append((factor, beside.extra_ms_per_gib))
            for method, measured in turns.items():
                factor, extra = medians(measured)
                low, high = np.quantile([it[1] for it in measured], (0.25, 0.75)).tolist()
                way = "D2H" if out else "H2D"
                label = case.geometry.label
                cost = Cost(label, method, way, work, factor, extra, (low, high))
                report.costs.append(cost)


# ── wall time ────────────────────────────────────────────────────────────────────────────────────


def _wall(report: TransferReport, geometry: Geometry, label: str, nbytes: int, seed: int) -> None:
    """Its share follows, when the limit is known."""
    wall = Wall(geometry, nbytes, seed, huge_pages=report.huge_pages)
    try:
        moves = _moves(wall)
        rows: dict[str, list[list[float]]] = {way: [] for way in moves}
        for turn in range(WALL_TURNS * report.repeats + 1):
            for way, move in moves.items():
                seconds = move()
                if turn:
                    rows[way].append([seconds])
    finally:
        wall.close()
        torch.cuda.empty_cache()
    for way, times in rows.items():
        rate = wall.nbytes * (2 if way == "both" else 1) / medians(times)[0] / 1e9
        report.wall.append(Rate(label, "RuntimeInterface", way, rate, 0.0, 0.0))


def _moves(wall: Wall) -> dict[str, Callable[[], float]]:
    first, in_l2 = wall.pages(), wall.to_l2(wall.pages())
    return {
        "D2H": lambda: wall.out(first),
        "H2D": lambda: wall.back(in_l2),
        "both": lambda: wall.both(first, in_l2),
    }


def _limit(report: TransferReport, way: str) -> float:
    """GB/s of a contiguous copy in this run."""
    found = [r.gb_per_s for r in report.rates if (r.method, r.way) == ("contiguous", way)]
    return medians([[rate] for rate in found])[0]


def _loops(
    report: TransferReport, model: Model, geometry: Geometry, nbytes: int, repeats: int, seed: int
) -> None:
    wall = Wall(geometry, nbytes, seed, huge_pages=report.huge_pages)
    try:
        _loops_beside(report, model, geometry.label, wall, repeats)
    finally:
        wall.close()


def _loops_beside(
    report: TransferReport, model: Model, label: str, wall: Wall, repeats: int
) -> None:
    moves, nbytes = _moves(wall), wall.nbytes
    small, large = model.small, model.large
    loops = {
        "80 launches a step, which take longer than the GPU": (small.launched, DECODE),
        "80 launches a step, GPU-bound": (large.launched, DECODE_LARGE),
        "a graph a step": (small.replayed, DECODE),
        "a graph a step, large products": (large.replayed, DECODE_LARGE),
    }
    tasks: dict[tuple[str, str], Callable[[], int]] = {
        ("kvstrata", "D2H"): lambda: nbytes if moves["D2H"]() else 0,
        ("contiguous", "D2H"): _plain_copies(out=True),
        ("kvstrata", "H2D"): lambda: nbytes if moves["H2D"]() else 0,
        ("contiguous", "H2D"): _plain_copies(out=False),
    }
    extra = {
        (cost.work, cost.method, cost.way): cost.extra_ms_per_gib
        for cost in report.costs
        if cost.geometry == label
    }
    rows: dict[tuple[str, str, str], list[tuple[float, float, float]]] = {}
    for turn in range(repeats + 1):
        small.stream, large.stream = torch.cuda.Stream(), torch.cuda.Stream()
        for kind, (steps, _) in loops.items():
            steps(5)  # the first ones on a stream are slow
            loop = partial(steps, max(1, int(LOOP_S / steps(5))))
            besides = {task: partial(loop_beside, loop, again) for task, again in tasks.items()}
            for task, alone_s, (beside_s, rate) in between(loop, besides):
                if turn:  # the first one warms up
                    row = (alone_s * 1e3, 100 * (beside_s / alone_s - 1), rate)
                    rows.setdefault((kind, *task), []).append(row)
    for (kind, method, way), measured in rows.items():
        alone_ms, loss, rate = medians(measured)
        cost = extra[loops[kind][1], method, way]
        gpu = loss_percent(cost, rate)
        report.loops.append(Loop(kind, f"{method}, {way}", alone_ms, loss, gpu, rate))


def loss_percent(extra_ms_per_gib: float, gib_per_s: float) -> float:
    """Of the time that work takes alone, when transfers at this rate cost it so much: the rate is
    that of the time beside them, which is longer."""
    lost = extra_ms_per_gib * gib_per_s / 1e3
    return 100 * lost / (1 - lost)


def _plain_copies(*, out: bool) -> Callable[[], int]:
    """What a thread does that copies contiguous chunks of 32 MiB, with torch, one after another."""
    stream = torch.cuda.Stream()
    device = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    host = torch.empty(32 << 20, dtype=torch.uint8, pin_memory=True)
    target, source = (host, device) if out else (device, host)

    def again() -> int:
        with torch.cuda.stream(stream):
            for _ in range(8):
                target.copy_(source, non_blocking=True)
            stream.synchronize()
        return 8 * (32 << 20)

    return again


def _groups(report: TransferReport, geometry: Geometry, repeats: int, seed: int) -> None:
    """A restore of 32K tokens, layer group by layer group."""
    tokens = 32 * 1024
    nbytes = tokens // geometry.page_tokens * geometry.spec.page_bytes(geometry.page_tokens)
    case = Case(geometry, nbytes, seed, huge_pages=report.huge_pages)
    pieces = case.pool.layout.pieces
    rows = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(LAYER_GROUPS + 1)]
        with torch.cuda.stream(case.stream(False)):
            torch.cuda._sleep(GATE_CYCLES)
            events[0].record()
        case.streams[False].wait(events[0])
        for group, event in enumerate(events[1:]):
            ends = (pieces * group // LAYER_GROUPS, pieces * (group + 1) // LAYER_GROUPS)
            case.at_once(False, slice(*ends))
            event.record(case.stream(False))
        torch.cuda.synchronize()
        whole = events[0].elapsed_time(events[-1])
        rows.append([events[0].elapsed_time(events[1]) / whole, case.nbytes / whole / 1e6])
    share, rate = medians(rows)
    report.first_group_share = {
        "first group": share,
        "whole, of the limit": rate / _limit(report, "H2D"),
    }
    case.close()
