"""Gates, and a runner and a backend that stop and fail where a test wants it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvstrata.backends import (
    ObjectId,
    PageResult,
    ReadRequest,
    WriteRequest,
)
from kvstrata.backends.memory import MemoryBackend, MemoryOptions
from kvstrata.boundary import Outcome
from kvstrata.gpu_runtime.base import ForwardContext, ForwardResult, ForwardRow
from kvstrata.gpu_runtime.oracle import OracleRunner
from kvstrata.gpu_runtime.testing.driver import WAIT_S, require


class Gate:
    """Blocks who comes while it is shut; a test can wait until somebody has come."""

    def __init__(self, *, shut: bool = False) -> None:
        self._open = threading.Event()
        self._came = threading.Semaphore(0)
        if not shut:
            self._open.set()

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def came(self) -> bool:
        """Has somebody come since the last look?"""
        return self._came.acquire(blocking=False)

    def wait_for_one(self) -> None:
        require(self._came.acquire(timeout=WAIT_S), "nobody came to the gate")

    def pass_through(self) -> None:
        if not self._open.is_set():
            self._came.release()
            require(self._open.wait(2 * WAIT_S), "the gate stayed shut")


class GatedRunner(OracleRunner):
    """The oracle, which stops before the steps that a test names, and raises when it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        """Forward steps that were begun."""
        self.fail_at: dict[int, BaseException] = {}
        self.refuse: set[bytes] = set()
        """Payloads of rows that it does not want."""
        self.weights: list[bytes] = []
        """Payloads of all changes, in order."""
        self.fail_weights = False
        """Whether the next change raises."""
        self._gates: dict[int, Gate] = {}

    def pause(self, step: int | None = None) -> Gate:
        """A gate before a step, by its number from 0 (default: the next one)."""
        gate = Gate(shut=True)
        self._gates[self.steps if step is None else step] = gate
        return gate

    def open_all(self) -> None:
        for gate in list(self._gates.values()):
            gate.open()

    def new_weights(self, payload: bytes) -> None:
        self.weights.append(payload)
        if self.fail_weights:
            self.fail_weights = False
            raise OSError("planted")

    def forward(self, rows: Sequence[ForwardRow], context: ForwardContext) -> ForwardResult:
        step, self.steps = self.steps, self.steps + 1
        if step in self._gates:
            self._gates[step].pass_through()
        if step in self.fail_at:
            raise self.fail_at.pop(step)
        good = [row for row in rows if row.payload not in self.refuse]
        made = super().forward(good, context)
        tokens = iter(made.sampled)
        bad = {i: "refused by the test" for i, row in enumerate(rows) if row not in good}
        sampled = [() if i in bad else next(tokens) for i in range(len(rows))]
        return ForwardResult(sampled, made.counters, failed=bad)


class FaultyBackend(MemoryBackend):
    """Memory that can be slow, and can lose, corrupt or refuse pages. Names are page keys; with a
    component's namespace (`ObjectId`) only that component is hit."""

    def __init__(self, max_bytes: int = 0) -> None:
        super().__init__(MemoryOptions(max_bytes))
        self.reads, self.writes, self.asks = Gate(), Gate(), Gate()
        self.lose: set[bytes | ObjectId] = set()
        self.corrupt: set[bytes | ObjectId] = set()
        self.refuse: set[bytes | ObjectId] = set()
        self.read_calls = 0

    @property
    def concurrency(self) -> int:
        return 3

    @property
    def max_batch(self) -> int:
        return 8

    def open_all(self) -> None:
        for gate in (self.reads, self.writes, self.asks):
            gate.open()

    def exists(self, objects: Sequence[ObjectId]) -> list[bool]:
        self.asks.pass_through()
        return super().exists(objects)

    def delete(self, objects: Sequence[ObjectId]) -> list[bool]:
        self.asks.pass_through()
        return super().delete(objects)

    def read(self, requests: Sequence[ReadRequest]) -> list[PageResult]:
        self.read_calls += 1
        self.reads.pass_through()
        results = super().read(requests)
        for i, request in enumerate(requests):
            if self._names(self.corrupt, request.object) and results[i].nbytes:
                request.buffers[-1][0] ^= 0xFF
            if self._names(self.lose, request.object):
                results[i] = PageResult(Outcome.MISSING)
        return results

    def write(self, requests: Sequence[WriteRequest]) -> list[PageResult]:
        self.writes.pass_through()
        results: list[PageResult] = []
        for request in requests:
            if results and not results[-1].outcome.is_stored:
                results.append(PageResult(Outcome.PARENT_MISSING))
            elif self._names(self.refuse, request.object):
                results.append(PageResult(Outcome.ACCESS, 0, "refused by the test"))
            else:
                results += super().write([request])
        return results

    @staticmethod
    def _names(names: set[bytes | ObjectId], obj: ObjectId) -> bool:
        return obj.key in names or obj in names
