"""Runtimes on the bench of the conformance suite, for tests that look inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvstrata.gpu_runtime import ComponentSpec, LocalGPURuntime
from kvstrata.gpu_runtime.testing import Rig, RuntimeSuite

KV = ComponentSpec("kv", layers=2, kv_heads=1, head_dim=4, dtype="bfloat16")
INDEX = ComponentSpec("index", layers=1, kv_heads=1, head_dim=5, dtype="uint8", layout="HND")

Bench = Callable[..., Rig]


@pytest.fixture
def bench() -> Iterator[Bench]:
    """`bench(pages=…, host_pages=…, mode=…, two_pools=…, …)`: a rig on the CPU device."""
    with ExitStack() as stack:

        def open_rig(two_pools: bool = False, **options: Any) -> Rig:
            suite = RuntimeSuite()
            suite.components = (KV, INDEX) if two_pools else (KV,)
            return stack.enter_context(suite.bench(LocalGPURuntime, **options))

        yield open_rig
