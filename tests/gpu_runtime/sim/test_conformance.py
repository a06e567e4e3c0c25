"""The conformance suite on the simulated device: copies torn, freed pages poisoned, events late."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstrata.gpu_runtime import ComponentSpec, LocalGPURuntime
from kvstrata.gpu_runtime.sim import SimDevice, poison, tear
from kvstrata.gpu_runtime.testing import RuntimeTests, parts
from kvstrata.gpu_runtime.turns import Turns, away


class TestSimulated(RuntimeTests):
    components = (
        ComponentSpec("kv", layers=2, kv_heads=1, head_dim=4, dtype="bfloat16"),
        ComponentSpec("index", layers=1, kv_heads=1, head_dim=5, dtype="uint8", layout="HND"),
    )

    @pytest.fixture
    def make_runtime(
        self, seed: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Callable[..., LocalGPURuntime]]:
        """Another seed a test; a gate that is shut keeps its own stream waiting only."""
        rng = random.Random(f"{request.node.name} {seed}")
        opened: list[Turns] = []
        wait = parts.Gate.pass_through
        monkeypatch.setattr(parts.Gate, "pass_through", lambda gate: away(lambda: wait(gate)))

        def make(*args: Any) -> LocalGPURuntime:
            turns = Turns(rng.getrandbits(32), background=True)
            opened.append(turns)
            print(f"seed of the turns: {turns.seed}")
            runtime = LocalGPURuntime(
                *args, make_device=lambda timeline: SimDevice(timeline, turns)
            )
            poison(runtime.core)
            tear(runtime.core)
            return runtime

        yield make
        for turns in opened:
            turns.end()
