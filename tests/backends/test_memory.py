"""The memory backend: its bound, and the order in which frames go."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstrata.backends import BackendContext, ObjectId, PageResult, ReadRequest, WriteRequest
from kvstrata.backends.memory import MemoryBackend, MemoryOptions
from kvstrata.boundary import Outcome

SIZE = 100
ROOM = 7
STORED, EXISTS = Outcome.STORED, Outcome.EXISTS


def name(chain: int, depth: int) -> ObjectId:
    return ObjectId(b"n" * 32, bytes([chain, depth]) * 16)


def outcomes(results: Sequence[PageResult]) -> list[Outcome]:
    return [result.outcome for result in results]


class MemoryMachine(RuleBasedStateMachine):
    """Against a list in order of use, searched from its beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[ObjectId] = []
        self.backend = MemoryBackend(MemoryOptions(max_bytes=ROOM * SIZE))
        self.backend.open(BackendContext("x", on_evicted=self.evicted.extend))
        self.order: list[tuple[int, int]] = []

    def leaf(self, kept: set[tuple[int, int]]) -> tuple[int, int] | None:
        for chain, depth in self.order:
            if (chain, depth + 1) not in self.order and (chain, depth) not in kept:
                return (chain, depth)
        return None

    @rule(chain=st.integers(0, 2), start=st.integers(0, 4), count=st.integers(1, 5))
    def write(self, chain: int, start: int, count: int) -> None:
        depths = range(start, start + count)
        requests = [
            WriteRequest(
                name(chain, d), name(chain, d - 1) if d else None, d, (memoryview(bytes(SIZE)),)
            )
            for d in depths
        ]
        kept = {(chain, d) for d in range(start - 1, start + count)}
        expected, gone, whole = [], [], True
        for d in depths:
            outcome = STORED
            if (chain, d) in self.order and whole:
                outcome = EXISTS
            elif not whole or (d and (chain, d - 1) not in self.order):
                outcome = Outcome.PARENT_MISSING
            elif len(self.order) == ROOM:
                leaf = self.leaf(kept)
                if leaf is None:
                    outcome = Outcome.FULL
                else:
                    self.order.remove(leaf)
                    gone.append(name(*leaf))
            if outcome is STORED:
                self.order.append((chain, d))
            whole = whole and outcome.is_stored
            expected.append(outcome)
        self.evicted.clear()
        assert outcomes(self.backend.write(requests)) == expected
        assert self.evicted == gone

    @rule(chain=st.integers(0, 2), depth=st.integers(0, 6))
    def read(self, chain: int, depth: int) -> None:
        request = ReadRequest(name(chain, depth), (memoryview(bytearray(SIZE)),))
        there = (chain, depth) in self.order
        [result] = self.backend.read([request])
        assert result.outcome is (Outcome.LOADED if there else Outcome.MISSING)
        if there:
            self.order.remove((chain, depth))
            self.order.append((chain, depth))

    @rule(chain=st.integers(0, 2), depth=st.integers(0, 6))
    def delete(self, chain: int, depth: int) -> None:
        there = (chain, depth) in self.order
        assert self.backend.delete([name(chain, depth)]) == [there]
        if there:
            self.order.remove((chain, depth))

    @invariant()
    def agrees(self) -> None:
        self.backend.check_integrity()
        assert self.backend.usage().objects == len(self.order)
        assert self.backend.usage().used_bytes == SIZE * len(self.order)


MemoryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMemory = MemoryMachine.TestCase
