"""`LocalGPURuntime` on the CPU device, under the conformance suite: with one pool and two, with
page numbers and stamps that nobody expects."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstrata.gpu_runtime import ComponentSpec, LocalGPURuntime
from kvstrata.gpu_runtime.testing import RuntimeTests
from kvstrata.staging import Pages

KV = ComponentSpec("kv", layers=2, kv_heads=1, head_dim=4, dtype="bfloat16")
INDEX = ComponentSpec("index", layers=1, kv_heads=1, head_dim=5, dtype="uint8", layout="HND")


def random_stamps(seed: int) -> Iterator[int]:
    """Stamps in no order, up to the largest; none comes twice."""
    numbers = random.Random(f"stamps {seed}")
    seen = {0}
    while True:
        stamp = numbers.getrandbits(64)
        if stamp not in seen:
            seen.add(stamp)
            yield stamp


def permuted(seed: int) -> Callable[[int], Pages]:
    return lambda n: np.random.default_rng([seed, n]).permutation(n)


class TestLocal(RuntimeTests):
    @pytest.fixture
    def make_runtime(self) -> type[LocalGPURuntime]:
        return LocalGPURuntime


class TestHostileIdentities(RuntimeTests):
    """Two pools of different page bytes, whose page numbers and stamps have no order."""

    components = (KV, INDEX)

    @pytest.fixture
    def make_runtime(self, seed: int) -> Callable[..., LocalGPURuntime]:
        return lambda *args: LocalGPURuntime(
            *args,
            runtime_id=2**63 - 1,
            stamp_source=random_stamps(seed),
            page_order=permuted(seed),
        )
