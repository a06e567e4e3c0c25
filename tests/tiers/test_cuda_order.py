"""Order on a real GPU: slow kernels planted on each side of every copy, under memory pressure.

Needs an NVIDIA GPU (`make gpu-correct`).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstrata.gpu_runtime import ForwardContext, ForwardRow
from kvstrata.handles import Tier
from kvstrata.tiers import RequestState

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]

PAGE = 4
SPIN = 20_000_000
"""Cycles of a planted spin kernel: about 10 ms."""


def pages(*names: int) -> list[int]:
    return [name * PAGE + i for name in names for i in range(PAGE)]


def plant_slow_copies(small: Any, rng: random.Random, cycles: int) -> None:
    """Spin on the streams of copies before (and after) the bytes move, at random."""
    device = small.runtime.core.device
    for copies in (device._copies_in, device._copies_out):
        real = copies.copy

        def spin(streams: Any = copies.streams) -> None:
            for stream in streams:
                if rng.random() < 0.5:
                    with torch.cuda.stream(stream):
                        torch.cuda._sleep(rng.randrange(cycles))

        def slow(copy: Any, real: Any = real, spin: Any = spin) -> None:
            spin()
            real(copy)
            spin()

        copies.copy = slow


@pytest.fixture
def slow_runner(gated_runner: Any) -> Any:
    """Spins on the compute stream before it reads and before it writes."""
    rng = random.Random(1)
    gated_runner.cycles = 2_000_000
    for name in ("_verify", "_compute"):
        real = getattr(gated_runner, name)

        def slow(row: ForwardRow, keys: bytes, context: ForwardContext, real: Any = real) -> Any:
            torch.cuda._sleep(rng.randrange(gated_runner.cycles))
            return real(row, keys, context)

        setattr(gated_runner, name, slow)
    return gated_runner


@pytest.mark.parametrize("mode", ["cache", "buffer_only"])
def test_a_thousand_rounds_under_memory_pressure(
    make_small: Any, on_gpu: Any, slow_runner: Any, mode: str, seed: int
) -> None:
    """B052, B053, B054: slow kernels before reads, before writes, and around copies; tiny tiers,
    so that every page is reused at once. A missing wait shows as a wrong byte."""
    rng = random.Random(seed)
    small = make_small(l1=24, l2=12, mode=mode, max_batch=3, make_device=on_gpu, runner=slow_runner)
    slow_runner.cycles = 400_000
    plant_slow_copies(small, rng, 400_000)
    prompts = [
        [*pages(*[rng.randrange(3) for _ in range(rng.randrange(1, 8))]), i] for i in range(1000)
    ]
    for i, prompt in enumerate(prompts):
        small.submit(prompt, max_new_tokens=rng.randrange(1, 4))
        if i % 4 == 0:
            small.step_until(lambda: small.scheduler.waiting < 12)
    small.run()
    small.check_no_leak()
    assert len(small.results) == 1000
    assert all(r.state is RequestState.FINISHED for r in small.results.values())
    assert small.scheduler.counters["pages_verified"] > 1000


@pytest.mark.parametrize("mode", ["cache", "buffer_only"])
def test_hits_from_each_tier(make_small: Any, on_gpu: Any, mode: str) -> None:
    small = make_small(mode=mode, make_device=on_gpu)
    prompt = pages(1, 2, 3, 4, 5)
    small.ask([*prompt, 1])
    assert small.hits(small.ask([*prompt, 2])) == (5, 0, 0)
    small.drop_tier(Tier.L1)
    small.drop_tier(Tier.L2)
    assert small.hits(small.ask([*prompt, 4])) == (0, 0, 5)
    assert small.ask(prompt).page_hits == 5
    small.check_no_leak()


def test_backup_waits_for_a_slow_kernel(make_small: Any, on_gpu: Any, slow_runner: Any) -> None:
    """B052: the kernel that writes the pages spins; the backup holds the new bytes all the same."""
    small = make_small(make_device=on_gpu, runner=slow_runner)
    slow_runner.cycles = SPIN
    small.ask(pages(1, 2, 3))
    small.drop_tier(Tier.L1)
    assert small.hits(small.ask([*pages(1, 2, 3), 1]))[1] == 3


def test_copies_run_beside_compute(make_small: Any, on_gpu: Any) -> None:
    """The H2D of batch N+1 runs before the compute of N has ended, on the GPU's own clock."""
    small = make_small(max_batch=1, make_device=on_gpu)
    small.ask(pages(1, 2, 3))
    small.drop_tier(Tier.L1)
    small.runner.gate.shut()
    small.submit(pages(8, 9))
    small.step_until(lambda: small.scheduler.calls["execute_batch"] == 2)
    small.runner.gate.wait_for_one()
    small.submit([*pages(1, 2, 3), 1])
    small.step_until(lambda: "h2d" in small.runtime.transfers())
    small.runner.gate.open()
    small.run()
    share = small.runtime.hidden_share()
    assert share is not None
    assert share > 0


def test_replay_on_the_gpu(tmp_path: Path) -> None:
    """The shipped trace through the CLI's own function, all three tiers."""
    from kvstrata.configs import load_config
    from kvstrata.tools.replay import run_replay
    from kvstrata.tools.trace import shipped_trace

    root = Path(__file__).resolve().parents[2]
    for name in ("local", "buffer-only"):
        overrides = ["device.kind=cuda", f"backends.disk.options.path={tmp_path / name}"]
        config = load_config(root / f"configs/{name}.toml", overrides)
        first = run_replay(config, shipped_trace())
        assert (first.page_hits, first.pages_mismatched) == (402, 0)
        second = run_replay(config, shipped_trace())
        assert (second.page_hits, second.pages_mismatched) == (575, 0)


def test_sequence_of_runtimes_leaves_the_gpu_usable(make_small: Any, on_gpu: Any) -> None:
    """Pinned memory is registered and given back each time."""
    for _ in range(3):
        small = make_small(make_device=on_gpu)
        small.ask(pages(1, 2))
        small.runtime.close(10)
        assert torch.cuda.is_available()
