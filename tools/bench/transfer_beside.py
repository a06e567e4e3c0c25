"""What a transfer costs the model beside it: compute-bound and decode-like work, GPU times."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvstrata.tools.bench.transfer_methods import Case, Method

LARGE = "large"
GATE_CYCLES = 100_000_000
"""About 50 ms in which the model's work is enqueued."""


class Model:
    """Work for the compute stream, enqueued beforehand, so that only the GPU's time counts."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.left, self.right = (
            torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16),
            torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16),
        )
        self.product = torch.empty(8192, 8192, device="cuda", dtype=torch.bfloat16)
        self.weights = torch.randn(40, 8192, 8192, device="cuda", dtype=torch.bfloat16)
        self.vectors, self.result = (
            torch.randn(8192, 8, device="cuda", dtype=torch.bfloat16),
            torch.empty(8192, 8, device="cuda", dtype=torch.bfloat16),
        )
        self.large = self.weights.view(-1)[: 11 * 8192 * 28672].view(11, 8192, 28672)
        self.rows, self.large_result = (
            torch.randn(8, 8192, device="cuda", dtype=torch.bfloat16),
            torch.empty(8, 28672, device="cuda", dtype=torch.bfloat16),
        )
        self.graphs: dict[str, torch.cuda.CUDAGraph] = {}
        with torch.cuda.stream(self.stream):
            self.multiply()
            for name, step in (("", self.decode_step), (LARGE, self.large_step)):
                step()
                torch.cuda.synchronize()
                self.graphs[name] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graphs[name], stream=self.stream):
                    step()

    def multiply(self) -> None:
        torch.mm(self.left, self.right, out=self.product)

    def decode_step(self) -> None:
        """Reads 5.4 GB of weights for eight rows, 134 MB with each product."""
        for weight in self.weights:
            torch.mm(weight, self.vectors, out=self.result)

    def large_step(self) -> None:
        """The same bytes, in products that take 3.5 times as long each."""
        for weight in self.large:
            torch.mm(self.rows, weight, out=self.large_result)

    def compute_bound(self) -> None:
        for _ in range(120):
            self.multiply()

    def decode_like(self) -> None:
        for _ in range(110):
            self.graphs[""].replay()

    def decode_like_large(self) -> None:
        for _ in range(110):
            self.graphs[LARGE].replay()


@dataclass(frozen=True, slots=True)
class Beside:
    """One pair: the work alone, and beside a sustained transfer."""

    alone_ms: float
    beside_ms: float
    gib_moved: float

    @property
    def extra_ms_per_gib(self) -> float:
        return (self.beside_ms - self.alone_ms) / self.gib_moved


def measure(model: Model, work: Callable[[], None], case: Case, move: Method, out: bool) -> Beside:
    alone_ms, _ = _once(model, work, _Mover(case, None, out))
    beside_ms, moved = _once(model, work, _Mover(case, move, out))
    return Beside(alone_ms, beside_ms, moved * case.nbytes / (1 << 30))


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
    """Milliseconds of the work, all of it enqueued before it starts, and copies beside it."""
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
