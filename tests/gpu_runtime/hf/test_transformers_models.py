"""Which models run: families, geometry, directories; what is refused, and with which words."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kvstrata.errors import ConfigError
from kvstrata.gpu_runtime import (
    ComponentPool,
    ComponentSpec,
    ForwardContext,
    ForwardRow,
    LocalGPURuntime,
    ReqToToken,
    RuntimeSettings,
)
from kvstrata.gpu_runtime.hf_attention import GROUPED_TOKENS, QUERY_BLOCK
from kvstrata.gpu_runtime.hf_models import (
    component_spec_of,
    load_model,
    revision_of_weights,
    tiny_model,
)
from kvstrata.gpu_runtime.transformers_runner import TransformersRunner
from kvstrata.staging import StagingSettings
from kvstrata.tiers.namespace import revision_of_path

SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def config_of(family: str, **more: Any) -> Any:
    return getattr(transformers, f"{family}Config")(**{**SMALL, **more})


class Bench:
    """A runner over a pool and a ReqToToken row per request, without a runtime."""

    def __init__(self, model: Any, pages: int = 700, page: int = 4, layout: str = "NHD") -> None:
        self.runner = TransformersRunner(model)
        spec = self.runner.spec
        spec = ComponentSpec("kv", spec.layers, spec.kv_heads, spec.head_dim, spec.dtype, layout)
        cpu = torch.device("cpu")
        pool = ComponentPool(spec, pages, page, cpu)
        pool.kv(0)[0].fill_(float("nan"))  # what nobody wrote must not be read
        pool.kv(0)[1].fill_(float("nan"))
        self.table = ReqToToken(("kv",), 8, 1024, page, cpu)
        self.order = np.random.default_rng(3).permutation(pages)
        self.context = ForwardContext({"kv": pool}, self.table, page)
        self.runner.bind(self.context)

    def open(self, slot: int, pages: int, first: int) -> None:
        self.table.set_pages("kv", slot, 0, self.order[first : first + pages])

    def step(self, *rows: tuple[int, list[int], int, int]) -> list[list[int]]:
        """Rows of (slot, tokens, start, count)."""
        forward = [
            ForwardRow(slot, b"", np.asarray(tokens, np.int32), start, count, 0, True,
                       samples=start + count == len(tokens))
            for slot, tokens, start, count in rows
        ]  # fmt: skip
        return [list(t) for t in self.runner.forward(forward, self.context).sampled]


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("Mistral", {"sliding_window": None}),
        ("Granite", {"logits_scaling": 8.0, "attention_multiplier": 0.3}),
        ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    ],
)
def test_families_beyond_the_three(
    prompt_of: Callable[[int], list[int]], family: str, more: dict[str, Any]
) -> None:
    """What is special in them (scaled scores and logits, experts) stays theirs."""
    make = getattr(transformers, f"{family}ForCausalLM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = make(config_of(family, initializer_range=0.3, **more)).eval()
    prompt = prompt_of(37)
    want = greedy(model, prompt, 8)
    bench = Bench(model)
    bench.open(2, 20, first=50)
    assert bench.step((2, prompt[:20], 0, 20)) != [[]]
    tokens = list(prompt)
    start = 20
    while len(tokens) < len(prompt) + 8:
        (new,) = bench.step((2, tokens, start, len(tokens) - start))
        start = len(tokens)
        tokens += new
    assert tokens[len(prompt) :] == want


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_steps_of_mixed_rows(prompt_of: Callable[[int], list[int]], layout: str) -> None:
    """Long and short chunks, decodes and rows that do not sample yet, in one step, against each
    row by itself. The long one attends in several blocks behind a prefix."""
    lengths = [1, 9, 9, GROUPED_TOKENS + 5, QUERY_BLOCK + 300]
    starts = [30, 7, 0, 0, 60]
    rows = []
    for slot, (start, count) in enumerate(zip(starts, lengths, strict=True)):
        rows.append((slot, prompt_of(start + count + (slot == 3)), start, count))
    model = tiny_model("qwen2")
    together, apart = Bench(model, layout=layout), Bench(model)
    for bench in (together, apart):
        first = 0
        for slot, tokens, start, _ in rows:
            pages = -(-len(tokens) // 4)
            bench.open(slot, pages, first)
            first += pages
            if start:
                bench.step((slot, [*tokens[:start], 0], 0, start))
    found = together.step(*rows)
    assert found == [apart.step(row)[0] for row in rows]
    assert [len(t) for t in found] == [1, 1, 1, 0, 1]
    for slot, tokens, _, _ in rows[:3] + rows[4:]:
        assert found[slot] == greedy(tiny_model("qwen2"), tokens, 1)


def test_long_chunks_write_what_short_ones_do(prompt_of: Callable[[int], list[int]]) -> None:
    """Behind a prefix, in several blocks of queries: KV of every layer, at every position."""
    tokens = prompt_of(60 + 2 * QUERY_BLOCK - 100)
    found = []
    for chunk in (QUERY_BLOCK * 2, 97):
        bench = Bench(tiny_model("qwen2"))
        bench.open(1, -(-len(tokens) // 4), first=11)
        ends = [60, *range(60 + chunk, len(tokens), chunk), len(tokens)]
        for start, end in zip([0, *ends], ends, strict=False):
            bench.step((1, tokens, start, end - start))
        slots = bench.table.slots("kv", 1, 0, len(tokens)).to(torch.int64)
        pool = bench.context.pools["kv"]
        planes = [plane.flatten(0, 1)[slots] for layer in range(3) for plane in pool.kv(layer)]
        found.append(torch.stack(planes))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


# ── geometry ─────────────────────────────────────────────────────────────────────────────────────


def test_geometry_comes_from_the_model() -> None:
    assert component_spec_of(tiny_model("llama")) == ComponentSpec("kv", 2, 2, 16, "float32")
    other = component_spec_of(tiny_model("qwen3", dtype=torch.bfloat16), "k", "HND")
    assert other == ComponentSpec("k", 3, 2, 16, "bfloat16", "HND")


@pytest.mark.parametrize(
    ("family", "more", "words"),
    [
        ("Mistral", {"sliding_window": 16}, "window of 16"),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
         "sliding_attention"),
        ("Gemma2", {}, "sliding_attention"),
        ("DeepseekV3", {}, "kv_lora_rank"),
        ("Llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "depends on the len"),
    ],
)  # fmt: skip
def test_attention_that_no_pool_can_hold(family: str, more: dict[str, Any], words: str) -> None:
    class Model:
        config = config_of(family, **more)
        dtype = torch.float32

    with pytest.raises(ConfigError, match=words):
        component_spec_of(Model())


def test_other_models_that_are_refused() -> None:
    with pytest.raises(ConfigError, match="float64"):
        component_spec_of(tiny_model(dtype=torch.float64))
    with pytest.raises(ConfigError, match="no tiny"):
        tiny_model("gpt5")
    bloom = transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=256, hidden_size=64, n_layer=1, n_head=4)
    )
    with pytest.raises(ConfigError, match="AttentionInterface"):
        TransformersRunner(bloom)


def test_pools_of_another_model_are_refused_at_the_start() -> None:
    """The runtime's constructor raises it, before anything runs."""
    spec = component_spec_of(tiny_model("qwen2"))
    settings = RuntimeSettings((spec,), 8, 4, 2, 64, StagingSettings(total_bytes=1 << 20))
    with pytest.raises(ConfigError, match="layers=2"):
        LocalGPURuntime(settings, TransformersRunner(tiny_model("llama")))


def test_a_model_that_somebody_changes_is_noticed() -> None:
    model = tiny_model()
    bench = Bench(model)
    bench.open(0, 4, 0)
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="did not attend"):
        bench.step((0, [1, 2, 3], 0, 3))
    with pytest.raises(ConfigError, match="sdpa"):
        bench.runner.check_integrity()
    model.set_attn_implementation("kvstrata")
    with pytest.raises(RuntimeError, match="TransformersRunner"):
        model(torch.tensor([[1, 2]]), use_cache=False)


# ── weights and directories ──────────────────────────────────────────────────────────────────────


def test_tiny_models_are_decided_by_their_seed() -> None:
    revisions = {revision_of_weights(tiny_model("llama", seed)) for seed in (0, 0, 1)}
    revisions |= {revision_of_weights(tiny_model(kind)) for kind in ("qwen2", "qwen3")}
    assert len(revisions) == 4
    model = tiny_model()
    before = revision_of_weights(model)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] += 1e-3
    assert revision_of_weights(model) != before


def test_a_directory_gives_the_same_model(
    tmp_path: Path, prompt_of: Callable[[int], list[int]]
) -> None:
    model = tiny_model("qwen2", 4, torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert not loaded.training
    for (name, mine), (_, theirs) in zip(
        sorted(model.state_dict().items()), sorted(loaded.state_dict().items()), strict=True
    ):
        assert torch.equal(mine, theirs), name
    before = revision_of_path(tmp_path)
    tiny_model("qwen2", 5, torch.bfloat16).save_pretrained(tmp_path)
    assert revision_of_path(tmp_path) != before


def test_directories_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model(tmp_path / "none")
    tiny_model().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no such family"}')
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(tmp_path)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="Transformers is needed"):
        tiny_model()
