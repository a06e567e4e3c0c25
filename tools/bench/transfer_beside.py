"""What a transfer costs the model beside it: compute-bound and decode-like work, GPU times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvstrata.tools.bench.transfer_methods import Case, Method

SUSTAINED = 14
"""Copies that are enqueued before the model's work starts: more than it lasts."""
GATE_CYCLES = 300_000_000
"""About 150 ms in which all of it is enqueued."""


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
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            self.multiply()
            self.decode_step()
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.decode_step()

    def multiply(self) -> None:
        torch.mm(self.left, self.right, out=self.product)

    def decode_step(self) -> None:
        """Reads 5.4 GB of weights for eight rows."""
        for weight in self.weights:
            torch.mm(weight, self.vectors, out=self.result)

    def compute_bound(self) -> None:
        for _ in range(120):
            self.multiply()

    def decode_like(self) -> None:
        for _ in range(110):
            self.graph.replay()


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
    alone_ms, _ = _once(model, work, case, None, out)
    beside_ms, copy_ms = _once(model, work, case, move, out)
    gib = case.nbytes / (1 << 30)
    return Beside(alone_ms, beside_ms, gib * min(SUSTAINED, beside_ms / copy_ms))


def _once(
    model: Model, work: Callable[[], None], case: Case, move: Method | None, out: bool
) -> tuple[float, float]:
    """Milliseconds of the work, and of one copy."""
    begin, end, first, last = (torch.cuda.Event(enable_timing=True) for _ in range(4))
    stream = case.stream(out)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(GATE_CYCLES)
        first.record()
    model.stream.wait_event(first)
    case.streams[out].has_waited = True  # our lanes wait for the gate, too
    for _ in range(SUSTAINED if move else 0):
        assert move is not None
        move(out)
    last.record(stream)
    with torch.cuda.stream(model.stream):
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end), first.elapsed_time(last) / SUSTAINED
