"""What a transfer costs the model beside it: compute-bound and decode-like work, GPU times."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from kvstrata.tools.bench.transfer_methods import Case, Method

GATE_CYCLES = 100_000_000
"""About 50 ms in which the model's work is enqueued."""
STEADY, MOST_TRIES = 0.02, 4
"""Work that reads much has two speeds on an H200, 4 % apart, and changes from one to the other now
and then, also where nothing else runs."""

_K = TypeVar("_K")
_T = TypeVar("_T")


class DecodeLoop:
    """Steps of 40 products that read weights of 8192 x `width`, for eight rows, a norm behind each:
    each kernel launched from Python, or one graph a step."""

    def __init__(self, width: int) -> None:
        shapes = [(8192, width), (width, 8192)] * 20
        self.weights = [
            torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / 90 for shape in shapes
        ]
        self.state = torch.randn(8, 8192, device="cuda", dtype=torch.bfloat16)
        self.stream = torch.cuda.Stream()
        self.graph = torch.cuda.CUDAGraph()
        self.launched(2)
        with torch.inference_mode(), torch.cuda.graph(self.graph, stream=self.stream):
            self._step()

    def launched(self, count: int) -> float:
        """Seconds a step, 80 launches each."""
        return self._timed(count, self._step)

    def replayed(self, count: int) -> float:
        """Seconds a step, one replay each."""
        return self._timed(count, self.graph.replay)

    def _step(self) -> None:
        x = self.state
        for weight in self.weights:
            x = x @ weight
            x = torch.nn.functional.rms_norm(x, x.shape[-1:])

    def _timed(self, count: int, step: Callable[[], None]) -> float:
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            self.stream.synchronize()
            started = time.perf_counter()
            for _ in range(count):
                step()
            self.stream.synchronize()
            return (time.perf_counter() - started) / count


class Model:
    """Work of 0.2 s for the compute stream."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.small, self.large = DecodeLoop(8192), DecodeLoop(28672)
        self._left, self._right, self._product = (
            torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        )
        self.compute_bound()

    def compute_bound(self) -> None:
        for _ in range(120):
            torch.mm(self._left, self._right, out=self._product)

    def decode_like(self) -> None:
        """Reads 5.4 GB of weights a step, 134 MB with each product."""
        for _ in range(110):
            self.small.graph.replay()

    def decode_like_large(self) -> None:
        """3.5 times as much with each product."""
        for _ in range(34):
            self.large.graph.replay()


@dataclass(frozen=True, slots=True)
class Beside:
    """The work beside a sustained transfer, and alone: the mean of before and after."""

    alone_ms: float
    beside_ms: float
    gib_moved: float

    @property
    def extra_ms_per_gib(self) -> float:
        return (self.beside_ms - self.alone_ms) / self.gib_moved


def measure(
    model: Model, work: Callable[[], None], case: Case, methods: dict[str, Method], out: bool
) -> dict[str, Beside]:
    """Each method in turn."""

    def once(move: Method | None) -> tuple[float, float]:
        return _once(model, work, _Mover(case, move, out))

    besides = {name: partial(once, move) for name, move in methods.items()}
    return {
        name: Beside(alone_ms, beside_ms, moved * case.nbytes / (1 << 30))
        for name, alone_ms, (beside_ms, moved) in between(lambda: once(None)[0], besides)
    }


def between(
    alone: Callable[[], float], besides: Mapping[_K, Callable[[], _T]]
) -> Iterator[tuple[_K, float, _T]]:
    """Each of `besides` between two runs of the work alone, and their mean. Clocks drift; and where
    the two are not alike it is done again, as the GPU did not go at one speed."""
    before = alone()
    for key, beside in besides.items():
        for _ in range(MOST_TRIES):
            found, after = beside(), alone()
            mean, is_steady = (before + after) / 2, abs(after - before) <= STEADY * before
            before = after
            if is_steady:
                break
        yield key, mean, found


class _Mover:
    """A thread that keeps two or three copies enqueued, as a server under load has."""

    def __init__(self, case: Case, move: Method | None, out: bool) -> None:
        self._move, self._stream, self._out = move, case.stream(out), out
        self._stop = threading.Event()
        self.ends: list[torch.cuda.Event] = []
        self.runs = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="bench-transfers")

    def __enter__(self) -> _Mover:
        self._thread.start()
        self.runs.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while self._move is not None and not self._stop.is_set():
                self._once(self._move)
        except BaseException as exc:  # noqa: BLE001 - raised where it is waited for
            self._error = exc
        self.runs.set()

    def _once(self, move: Method) -> None:
        move(self._out)
        self.ends.append(torch.cuda.Event(enable_timing=True, blocking=True))
        self.ends[-1].record(self._stream)
        if len(self.ends) > 2:
            self.ends[-3].synchronize()
            self.runs.set()

    def moved_between(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Copies that ran between two events; those at the borders count in part."""
        if len(self.ends) < 2:
            return 0.0
        times = [begin.elapsed_time(event) for event in self.ends]
        counts = np.arange(len(times), dtype=float)
        return float(np.diff(np.interp([0.0, begin.elapsed_time(end)], times, counts))[0])


def _once(model: Model, work: Callable[[], None], mover: _Mover) -> tuple[float, float]:
    """GPU milliseconds of the work, all of it enqueued before it starts, and copies beside it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    with mover:
        with torch.cuda.stream(model.stream):
            torch.cuda._sleep(GATE_CYCLES)
            begin.record()
            work()
            end.record()
        end.synchronize()
    torch.cuda.synchronize()
    return begin.elapsed_time(end), mover.moved_between(begin, end)
