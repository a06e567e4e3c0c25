"""A whole engine around a small Transformers model, and what the model says by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvstrata.configs import load_config
from kvstrata.gpu_runtime.hf_models import component_spec_of, tiny_model
from kvstrata.gpu_runtime.sampling import SamplingParams
from kvstrata.gpu_runtime.transformers_runner import TransformersRunner
from kvstrata.handles import Tier
from kvstrata.tiers import Namespace, RequestResult, RequestState
from kvstrata.tools.engine import Engine, open_engine

PAGE = 8
"""Tokens a page."""

CONFIG = """
[namespace]
model = "{kind}"
revision = "1"
epoch = {epoch}
[device]
kind = "{device}"
[pools]
pages = {l1}
page_tokens = {page}
max_requests = 16
max_context_tokens = 512
[[pools.components]]
name = "kv"
layers = {spec.layers}
kv_heads = {spec.kv_heads}
head_dim = {spec.head_dim}
dtype = "{spec.dtype}"
layout = "{spec.layout}"
[staging]
mode = "{mode}"
bytes = "{staging}"
[l3]
backend = "{backend}"
[backends.disk]
plugin = "filesystem"
[backends.disk.options]
path = "{root}"
[backends.ram]
plugin = "memory"
[scheduler]
max_batch = {max_batch}
chunk_tokens = {chunk}
decode_steps = {steps}
"""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Kernels this small only lose by a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Recorder(TransformersRunner):
    """Keeps the logits of every step that samples."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logits: list[torch.Tensor] = []
        self.steps = 0

    def _choose(self, works: Any, logits: torch.Tensor) -> Any:
        self.steps += 1
        if len(logits):
            self.logits.append(logits.clone().cpu())
        return super()._choose(works, logits)


@dataclass
class Answer:
    """What came of one request."""

    tokens: list[int]
    hits: tuple[int, int, int]
    """Pages from L1, L2, L3."""
    result: RequestResult


@dataclass
class Rig:
    """An engine with everything that a test wants to look at."""

    engine: Engine
    runner: Recorder
    own: Namespace
    """The identity that the engine's fingerprint is of."""
    results: dict[int, RequestResult] = field(default_factory=dict)

    def submit(
        self,
        prompt: Sequence[int],
        count: int,
        *,
        sampling: SamplingParams | None = None,
        namespace: bytes | None = None,
        **kwargs: Any,
    ) -> int:
        return self.engine.scheduler.submit(
            np.asarray(prompt, np.int32).tobytes(),
            namespace or self.engine.namespace,
            max_new_tokens=count,
            payload=sampling.encode() if sampling else b"",
            **kwargs,
        )

    def run(self) -> None:
        """Until nothing is open; then everything must be consistent."""
        for result in self.engine.scheduler.run_until_idle(60):
            self.results[result.request_id] = result
        self.engine.scheduler.check_integrity()
        self.engine.runtime.check_integrity()
        self.runner.check_integrity()

    def answer(self, request_id: int) -> Answer:
        result = self.results[request_id]
        assert result.state is RequestState.FINISHED, result.error
        tokens = np.frombuffer(result.output_tokens, np.int32).tolist()
        return Answer(tokens, tuple(result.hit_pages[tier] for tier in Tier), result)

    def ask(self, prompt: Sequence[int], count: int, **kwargs: Any) -> Answer:
        """One request to its end, everything stored. `runner.logits` are its own afterwards."""
        self.runner.logits.clear()
        request_id = self.submit(prompt, count, **kwargs)
        self.run()
        return self.answer(request_id)

    def drop(self, *tiers: Tier) -> None:
        """Evict everything from tiers."""
        cache = self.engine.scheduler.cache
        for tier in tiers:
            cache.outbox.extend(cache.free(e) for _, e in cache.tree.evict(tier, 10**9))
            self.run()
            assert cache.tree.resident(tier) == 0

    def counter(self, name: str) -> int:
        return self.engine.scheduler.counters[name]


MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[MakeRig]:
    """`make_rig(kind="qwen2", mode="buffer_only", …)`. Rigs of one test share the root of L3;
    everything is closed at the end, or by `rig.engine.close()`."""
    opened: list[Rig] = []

    def make(
        kind: str = "llama",
        *,
        dtype: torch.dtype = torch.float32,
        layout: str = "NHD",
        mode: str = "cache",
        backend: str = "disk",
        device: str = "cpu",
        l1: int = 128,
        staging: str = "4MiB",
        chunk: int = 512,
        max_batch: int = 8,
        steps: int = 16,
        epoch: int = 0,
        seed: int = 0,
        **runner: Any,
    ) -> Rig:
        model = tiny_model(kind, seed, dtype)
        text = CONFIG.format(
            kind=kind, epoch=epoch, device=device, l1=l1, page=PAGE,
            spec=component_spec_of(model, layout=layout), mode=mode, staging=staging,
            backend=backend, root=tmp_path / "l3", max_batch=max_batch, chunk=chunk, steps=steps,
        )  # fmt: skip
        path = tmp_path / "config.toml"
        path.write_text(text)
        recorder = Recorder(model, **runner)
        config = load_config(path)
        opened.append(Rig(open_engine(config, recorder), recorder, config.namespace()))
        return opened[-1]

    yield make
    for rig in opened:
        rig.engine.close()


Greedy = Callable[..., list[int]]


@pytest.fixture
def plain() -> Greedy:
    """`plain(prompt, count, kind="llama", …)`: the tokens of `generate` of Transformers itself."""

    def run(
        prompt: Sequence[int],
        count: int,
        kind: str = "llama",
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> list[int]:
        model = tiny_model(kind, seed, dtype).to(device)
        ids = torch.tensor([list(prompt)], device=device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    return run


@pytest.fixture
def plain_model() -> Callable[[str], Any]:
    """`plain_model("llama")`: the model that rigs run, untouched."""
    return tiny_model


@pytest.fixture
def prompt_of(seed: int) -> Callable[[int], list[int]]:
    """`prompt_of(37)`: that many random tokens."""
    rng = np.random.default_rng(seed)
    return lambda count: rng.integers(0, 256, count).tolist()
