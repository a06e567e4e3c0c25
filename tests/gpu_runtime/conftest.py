"""Runtimes on the bench of the conformance suite, for tests that look inside."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvstrata.gpu_runtime import ComponentSpec, LocalGPURuntime, chunk_kernels, cuda_copies
from kvstrata.gpu_runtime.testing import Prompt, Rig, RuntimeSuite

KV = ComponentSpec("kv", layers=2, kv_heads=1, head_dim=4, dtype="bfloat16")
INDEX = ComponentSpec("index", layers=1, kv_heads=1, head_dim=5, dtype="uint8", layout="HND")

Bench = Callable[..., Rig]


class FakeStream(SimpleNamespace):
    """A CUDA stream that is a name; `cuda_stream`, what a driver is given, is the stream itself."""

    @property
    def cuda_stream(self) -> FakeStream:
        return self

    def synchronize(self) -> None:
        return


@pytest.fixture
def fake_torch() -> Any:
    """What `CudaCopies` needs of torch where there is no GPU."""
    cuda = SimpleNamespace(
        Stream=lambda priority: FakeStream(name="follower", priority=priority),
        device=lambda _: nullcontext(), stream=lambda _: nullcontext(),
        set_device=lambda _: None, synchronize=lambda *_: None,
        CUDAGraph=lambda **_: SimpleNamespace(raw_cuda_graph=lambda: None),
        graph=lambda *_, **__: nullcontext(),
        get_device_properties=lambda _: SimpleNamespace(multi_processor_count=1),
    )  # fmt: skip
    return SimpleNamespace(
        cuda=cuda, empty=torch.empty, uint8=torch.uint8, int64=torch.int64,
        zeros=lambda n, dtype, **_: torch.zeros(n, dtype=dtype), from_numpy=torch.from_numpy,
    )  # fmt: skip


OF_TRITON = ("fetch_order", "move_pieces")
"""Imported only where Triton is."""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], None]:
    """Gives `CudaCopies`, and what makes its kernels, these things by their names."""

    def set_where_it_is(values: dict[str, Any]) -> None:
        for name, value in values.items():
            homes = [m for m in (cuda_copies, chunk_kernels) if name in (*vars(m), *OF_TRITON)]
            assert homes, f"nobody has {name}"
            for module in homes:
                monkeypatch.setattr(module, name, value, raising=False)

    return set_where_it_is


@pytest.fixture
def bench() -> Iterator[Bench]:
    """`bench(pages=…, host_pages=…, mode=…, two_pools=…, …)`: a rig on the CPU device."""
    with ExitStack() as stack:

        def open_rig(two_pools: bool = False, **options: Any) -> Rig:
            suite = RuntimeSuite()
            suite.components = (KV, INDEX) if two_pools else (KV,)
            return stack.enter_context(suite.bench(LocalGPURuntime, **options))

        yield open_rig


Plant = Callable[[Rig, random.Random], Callable[[int], None]]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """`plant(rig, numbers)` lets one copy in forty fail, from now on; what it returns plants
    faults in storage and in the runner, and is to be called at every step."""

    def start(rig: Rig, numbers: random.Random) -> Callable[[int], None]:
        _break_copies(rig, random.Random(numbers.random()), monkeypatch)
        return lambda step: _plant_faults(rig, numbers, step)

    return start


def _plant_faults(rig: Rig, numbers: random.Random, step: int) -> None:
    """Storage that loses, refuses, hangs for a while; copies and runners that fail."""
    backend = rig.backend
    size = rig.settings.page_tokens
    tokens = [100 * (i // size % 2) + i % size for i in range(5 * size)]
    keys = Prompt(np.array(tokens, np.int32), size).keys()
    if step % 7 == 0:
        some = {keys.key(i) for i in range(5) if numbers.random() < 0.1}
        backend.lose, backend.corrupt = set(some), set()
        backend.refuse = {keys.key(i) for i in range(5) if numbers.random() < 0.1}
    if step % 11 == 0:
        backend.open_all()
        if numbers.random() < 0.3:
            numbers.choice([backend.reads, backend.writes, backend.asks]).shut()
    if numbers.random() < 0.03:
        rig.runner.fail_at[rig.runner.steps + numbers.randrange(3)] = ValueError("planted")


def _break_copies(rig: Rig, numbers: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy in forty fails, in either direction."""
    assert isinstance(rig.runtime, LocalGPURuntime)
    for pool in rig.runtime.core.pools.values():
        for way in ("gather", "scatter"):
            whole = getattr(pool, way)

            def copy(*args: Any, whole: Callable[..., None] = whole) -> None:
                if numbers.random() < 0.025:
                    raise RuntimeError("planted")
                whole(*args)

            monkeypatch.setattr(pool, way, copy)
