"""`LocalGPURuntime` on a GPU, under the conformance suite. Needs an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvstrata.gpu_runtime import ComponentSpec, LocalGPURuntime
from kvstrata.gpu_runtime.cuda import CudaDevice
from kvstrata.gpu_runtime.testing import RuntimeTests

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


class TestCuda(RuntimeTests):
    @pytest.fixture
    def make_runtime(self) -> Callable[..., LocalGPURuntime]:
        return lambda *args: LocalGPURuntime(*args, make_device=CudaDevice)


class TestCudaTwoPools(TestCuda):
    components = (
        ComponentSpec("kv", layers=2, kv_heads=1, head_dim=4, dtype="bfloat16"),
        ComponentSpec("index", layers=1, kv_heads=1, head_dim=5, dtype="uint8", layout="HND"),
    )
