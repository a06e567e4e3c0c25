"""A small real engine: local runtime, memory backend, oracle.

Each test that takes `make_small` runs on every kind of runtime (`KINDS`), unless it is marked
`cuda`: on the CPU device as it is; "hostile", with page numbers and stamps without any order, and
freed pages that come back at once, last, or at random; "simulated", on a device that reorders
whatever events leave free; and on a GPU, where there is one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from kvstrata.backends import (
    BackendContext,
    ObjectId,
    PageResult,
    ReadRequest,
    StorageWorker,
    WriteRequest,
)
from kvstrata.backends.memory import MemoryBackend, MemoryOptions
from kvstrata.boundary import Outcome
from kvstrata.gpu_runtime import (
    ComponentSpec,
    CpuDevice,
    Device,
    ForwardContext,
    ForwardResult,
    ForwardRow,
    LocalGPURuntime,
    OracleRunner,
    RuntimeSettings,
    Timeline,
)
from kvstrata.gpu_runtime.sim import SimDevice, poison, tear
from kvstrata.gpu_runtime.testing import Gate
from kvstrata.gpu_runtime.testing.rig import PATIENT
from kvstrata.gpu_runtime.turns import Turns, away
from kvstrata.handles import StagingMode, Tier
from kvstrata.staging import Pages, PageTable, StagingSettings
from kvstrata.tiers import (
    CacheControl,
    Deadlines,
    RequestResult,
    Scheduler,
    SchedulerSettings,
    TreeCore,
    policy_class,
)

PAGE = 4
"""Tokens a page: small, so that a few tokens make many pages."""
KV = ComponentSpec("kv", layers=1, kv_heads=1, head_dim=64, dtype="bfloat16")
INDEX = ComponentSpec("index", layers=1, kv_heads=1, head_dim=24, dtype="uint8")
NAMESPACE = bytes(range(32))
KINDS = ("cpu", "hostile", "simulated")
ON_GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.cuda,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    ],
)


class GatedRunner(OracleRunner):
    """The oracle behind a gate, and with a list of what it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.fail_next = False
        self.rows_run: list[int] = []
        self.weights = b""
        self.fail_weights = False
        self._made_by: dict[bytes, bytes] = {}
        """Namespace → the weights that compute it, the first time and ever after."""

    def new_weights(self, payload: bytes) -> None:
        if self.fail_weights:
            self.fail_weights = False
            raise OSError("planted")
        self.weights = payload

    def forward(self, rows: Sequence[ForwardRow], context: ForwardContext) -> ForwardResult:
        self.rows_run.append(len(rows))
        self.gate.pass_through()
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("planted")
        result = super().forward(rows, context)
        for row in rows:
            made_by = self._made_by.setdefault(row.namespace, self.weights)
            assert made_by == self.weights, f"KV of {made_by!r} and {self.weights!r} is mixed"
        failed = {i: "planted" for i, row in enumerate(rows) if row.payload == b"fail"}
        return ForwardResult(result.sampled, result.counters, failed)


class FaultyBackend(MemoryBackend):
    """Memory that can be slow (gates), lose, corrupt or refuse pages on purpose."""

    def __init__(self) -> None:
        super().__init__(MemoryOptions())
        self.read_gate, self.write_gate, self.exists_gate = Gate(), Gate(), Gate()
        self.refuse: set[bytes] = set()
        self.corrupt: set[bytes] = set()
        self.lose: set[bytes] = set()
        self.order: list[bytes] = []

    @property
    def concurrency(self) -> int:
        return 3

    def exists(self, objects: Sequence[ObjectId]) -> list[bool]:
        self.exists_gate.pass_through()
        return super().exists(objects)

    def read(self, requests: Sequence[ReadRequest]) -> list[PageResult]:
        self.read_gate.pass_through()
        results = super().read(requests)
        for i, request in enumerate(requests):
            if request.object.key in self.corrupt:
                request.buffers[-1][3] ^= 0xFF
            if request.object.key in self.lose:
                results[i] = PageResult(Outcome.MISSING)
        return results

    def write(self, requests: Sequence[WriteRequest]) -> list[PageResult]:
        self.write_gate.pass_through()
        results: list[PageResult] = []
        for request in requests:
            if request.object.key in self.refuse or (results and not results[-1].outcome.is_stored):
                results.append(PageResult(Outcome.ACCESS, 0, "planted"))
                continue
            results += super().write([request])
            self.order.append(request.object.key)
        return results


@dataclass
class Small:
    """An engine with everything that a test wants to look at."""

    runtime: LocalGPURuntime
    scheduler: Scheduler
    runner: GatedRunner
    backend: FaultyBackend
    results: dict[int, RequestResult] = field(default_factory=dict)
    namespace: bytes = NAMESPACE
    epoch: int = 0

    def submit(self, tokens: Sequence[int], **kwargs: Any) -> int:
        data = np.asarray(tokens, np.int32).tobytes()
        return self.scheduler.submit(data, self.namespace, **kwargs)

    def new_epoch(self) -> None:
        """Other weights, and another namespace."""
        self.epoch += 1
        self.namespace = bytes([self.epoch]) * 32
        payload = b"weights %d" % self.epoch
        self.scheduler.new_epoch(self.epoch, lambda old: self.namespace, payload=payload)

    def run(self) -> None:
        """Until nothing is open; then everything must be consistent."""
        for result in self.scheduler.run_until_idle(30):
            self.results[result.request_id] = result
        self.check()

    def step_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(2000):
            if condition():
                return
            for result in self.scheduler.step(0.01):
                self.results[result.request_id] = result
        raise AssertionError(f"never came true: {self.scheduler.describe()}")

    def ask(self, tokens: Sequence[int], **kwargs: Any) -> RequestResult:
        """One request, to its end, everything stored."""
        request_id = self.submit(tokens, **kwargs)
        self.run()
        return self.results[request_id]

    def check(self) -> None:
        self.scheduler.check_integrity()
        self.runtime.check_integrity()
        assert self.scheduler.counters["pages_mismatched"] == 0

    def check_no_leak(self) -> None:
        """Idle: every page that is not free belongs to the tree, and nothing is locked."""
        assert self.scheduler.idle
        if self.runtime.core.worker is not None:  # results come first, the buffers back after
            assert self.runtime.core.worker.flush(20)
        tree, core = self.scheduler.cache.tree, self.runtime.core
        for table in core.tables.values():
            assert table.freeing == 0
            assert table.total - table.free == tree.resident(Tier.L1)
        for table in core.staging.tables.values():
            assert table.freeing == 0
            assert table.total - table.free == tree.resident(Tier.L2)
        assert tree.evictable(Tier.L1) == tree.resident(Tier.L1), "something is still locked"
        assert tree.evictable(Tier.L2) == tree.resident(Tier.L2)
        assert core.staging.lent(core.backend_name) == 0
        assert len(self.runtime.batches.rows) == 0

    def hits(self, result: RequestResult) -> tuple[int, int, int]:
        return tuple(result.hit_pages[tier] for tier in Tier)  # type: ignore[return-value]

    def drop_tier(self, tier: Tier) -> None:
        """Evict everything from L1 or L2."""
        self.scheduler.cache.outbox.extend(
            self.scheduler.cache.free(e) for _, e in self.scheduler.cache.tree.evict(tier, 10**9)
        )
        self.run()


MakeSmall = Callable[..., Small]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "runtime_kind" in metafunc.fixturenames:
        on_gpu = any(mark.name == "cuda" for mark in metafunc.definition.iter_markers())
        kinds = KINDS[:1] if on_gpu else (*KINDS, ON_GPU)
        metafunc.parametrize("runtime_kind", kinds, indirect=True)


def cuda_device(timeline: Timeline) -> Device:
    from kvstrata.gpu_runtime.cuda import CudaDevice

    return CudaDevice(timeline)


@dataclass(eq=False)
class RuntimeKind:
    """What a runtime is made with, and what is done to it then."""

    name: str
    rng: random.Random
    turns: list[Turns] = field(default_factory=list)

    def options(self) -> dict[str, Any]:
        if self.name == "cpu":
            return {}
        if self.name == "cuda":
            return {"make_device": cuda_device}
        rng, made = self.rng, {}
        if self.name == "simulated":
            turns = Turns(rng.getrandbits(32), background=True)
            self.turns.append(turns)
            print(f"seed of the turns: {turns.seed}")
            made["make_device"] = lambda timeline: SimDevice(timeline, turns)
        return {
            "runtime_id": rng.getrandbits(63),
            "stamp_source": iter(lambda: rng.getrandbits(63), 0),
            "page_order": lambda n: np.asarray(rng.sample(range(n), n), np.int64),
            **made,
        }

    def change(self, small: Small) -> None:
        core, gate = small.runtime.core, small.runner.gate
        if self.name == "simulated":
            poison(core)
            tear(core)
            wait = gate.pass_through
            gate.pass_through = lambda: away(wait)  # type: ignore[method-assign]
        elif self.name == "hostile":
            order = self.rng.choice([None, last, at_random])
            print(f"freed pages are used again: {order.__name__ if order else 'at once'}")
            for table in (*core.tables.values(), *core.staging.tables.values()):
                table.on_free = partial(order, table, self.rng) if order else None


def last(table: PageTable, rng: random.Random, pages: Pages) -> None:
    """Freed pages are on top of the stack; they go below all others."""
    del rng
    stack = table._free_stack[: table.free]
    stack[:] = np.roll(stack, len(pages))


def at_random(table: PageTable, rng: random.Random, pages: Pages) -> None:
    del pages
    stack = table._free_stack[: table.free]
    stack[:] = stack[rng.sample(range(len(stack)), len(stack))]


@pytest.fixture
def runtime_kind(request: pytest.FixtureRequest, seed: int) -> Iterator[RuntimeKind]:
    kind = RuntimeKind(request.param, random.Random(f"{request.node.name} {seed}"))
    yield kind
    for turns in kind.turns:
        turns.end()


@pytest.fixture
def make_small(runtime_kind: RuntimeKind) -> Iterator[MakeSmall]:
    """`make_small(l1=…, l2=…, mode=…, …)`; everything is closed at the end."""
    opened: list[Small] = []

    def make(
        *,
        l1: int = 64,
        l2: int = 32,
        mode: str = "cache",
        two_pools: bool = False,
        backend: FaultyBackend | None = None,
        with_l3: bool = True,
        deadlines: Deadlines | None = None,
        max_rows: int = 16,
        backend_cap: float = 0.75,
        make_device: Callable[[Timeline], Device] = CpuDevice,
        runner: GatedRunner | None = None,
        **scheduler: Any,
    ) -> Small:
        components = (KV, INDEX) if two_pools else (KV,)
        backend = backend or FaultyBackend()
        runner = runner or GatedRunner()
        worker = None
        if with_l3:
            context = BackendContext("store", {c.name: c.page_bytes(PAGE) for c in components})
            worker = StorageWorker("store", backend, PATIENT, context)
        stride = sum(-(-c.page_bytes(PAGE) // 4096) * 4096 for c in components)
        settings = RuntimeSettings(
            components=components,
            pages=l1,
            page_tokens=PAGE,
            max_requests=max_rows,
            max_context_tokens=4096,
            staging=StagingSettings(total_bytes=l2 * stride, backend_cap=backend_cap),
            mode=StagingMode(mode),
        )
        options = {"make_device": make_device, **runtime_kind.options()}
        runtime = LocalGPURuntime(settings, runner, worker, **options)
        cache = CacheControl(
            TreeCore(policy_class("eviction", "lru")(), 10**6),
            policy_class("write", "write_through")(),
            StagingMode(mode),
            has_l3=with_l3,
            deadlines=deadlines or Deadlines(20, 20, 20),
        )
        engine = Scheduler(
            runtime,
            cache,
            policy_class("prefetch", "wait_complete")(),
            policy_class("restore", "always")(),
            SchedulerSettings(
                page_tokens=PAGE, max_context_tokens=4096, max_requests=max_rows, **scheduler
            ),
        )
        small = Small(runtime, engine, runner, backend)
        runtime_kind.change(small)
        opened.append(small)
        return small

    yield make
    for small in opened:
        for gate in (
            small.runner.gate,
            small.backend.read_gate,
            small.backend.write_gate,
            small.backend.exists_gate,
        ):
            gate.open()
        small.runtime.close(10)


@pytest.fixture
def gated_runner() -> GatedRunner:
    return GatedRunner()


@pytest.fixture
def on_gpu() -> Callable[[Timeline], Device]:
    """`make_device` of a GPU."""
    return cuda_device
