"""Hugging Face decoders for the runtime: what it can run, their geometry, their identity."""

from __future__ import annotations

import hashlib
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from kvstrata.errors import ConfigError, Where
from kvstrata.gpu_runtime.pools import DTYPES, ComponentSpec

TINY_VOCABULARY = 256
"""Tokens of a tiny model: bytes."""
TINY_POSITIONS = 4096

_LENGTH_BOUND_ROPE = ("dynamic", "longrope")
"""Rotary embeddings that depend on the length of the sequence: a key that was rotated for one
request is another key in a longer one, so no page of it can be shared."""


def transformers() -> Any:
    """The package, imported when it is needed. Raises ConfigError where it is missing."""
    try:
        return import_module("transformers")
    except ImportError as exc:
        raise ConfigError(
            f"Transformers is needed to run a model: {exc}",
            remedy="pip install 'kvstrata[transformers]'",
        ) from exc


def component_spec_of(model: Any, name: str = "kv", layout: str = "NHD") -> ComponentSpec:
    """Geometry of the one component that `model` needs. Raises ConfigError for a model whose KV
    the pools cannot hold."""
    config = model.config.get_text_config(decoder=True)
    _check_attention(config)
    dtypes = {dtype: name for name, dtype in DTYPES.items()}
    if model.dtype not in dtypes:
        _refuse(config, f"its KV is {model.dtype}")
    heads = config.num_attention_heads
    return ComponentSpec(
        name=name,
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=dtypes[model.dtype],
        layout=layout,
    )


def _check_attention(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        _refuse(config, f"it has layers of {sorted(kinds - {'full_attention'})}")
    window = getattr(config, "sliding_window", None)
    typed = getattr(config, "layer_types", None) is not None
    if window and not typed and getattr(config, "use_sliding_window", True):
        _refuse(config, f"it attends to a window of {window} tokens")
    for key in ("attn_logit_softcapping", "kv_lora_rank"):
        if getattr(config, key, None):
            _refuse(config, f"its attention has {key}")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in _LENGTH_BOUND_ROPE:
        _refuse(config, f"its rotary embedding ({kind}) depends on the length of the request")


def _refuse(config: Any, why: str) -> None:
    raise ConfigError(
        f"{config.model_type}: {why}, which is not available in this version",
        remedy="use a decoder with full attention in all layers: Llama, Qwen2, Qwen3",
        where=Where(key="model"),
    )


def load_model(path: str | Path, *, device: torch.device | str = "cpu") -> Any:
    """The causal language model in a local directory, in the dtype it was saved in. Fetches
    nothing, runs no code of the directory. Raises ConfigError."""
    folder, where = Path(path), Where(file=Path(path), key="model")
    if not (folder / "config.json").is_file():
        raise ConfigError(
            "no model there (no config.json)",
            remedy="give a directory that save_pretrained wrote",
            where=where,
        )
    auto = transformers().AutoModelForCausalLM
    broken = import_module("safetensors").SafetensorError
    try:
        model = auto.from_pretrained(folder, local_files_only=True, dtype="auto")
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, broken) as exc:
        raise ConfigError(
            f"the model cannot be loaded: {exc}", remedy="check its files", where=where
        ) from exc
    return model.eval().to(device)


def tiny_model(kind: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A decoder of 2 (Llama) or 3 (Qwen2, Qwen3) layers with random weights that `seed` decides,
    made in memory. Its vocabulary is the bytes."""
    hf = transformers()
    families = {"llama": ("Llama", 2), "qwen2": ("Qwen2", 3), "qwen3": ("Qwen3", 3)}
    if kind not in families:
        raise ConfigError(
            f'there is no tiny "{kind}"',
            remedy=f"use {', '.join(families)}",
            where=Where(key="model"),
        )
    family, layers = families[kind]
    config = getattr(hf, f"{family}Config")(
        vocab_size=TINY_VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=TINY_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = getattr(hf, f"{family}ForCausalLM")(config)
    _fill(model, seed)
    return model.to(dtype).eval()


@torch.no_grad()
def _fill(model: Any, seed: int) -> None:
    """Weights from a generator of their own, the same whatever Transformers' own start is. Wide
    enough that the tokens vary."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim > 1:
            scale = 1.0 if "embed" in name else weight.shape[-1] ** -0.5
            weight.copy_(noise * scale)
        else:
            weight.copy_(noise * 0.1 + (0.0 if name.endswith("bias") else 1.0))


def revision_of_weights(model: Any) -> str:
    """A revision from every byte of the weights, and the config as this version of Transformers
    writes it: for models made in memory."""
    config = {k: v for k, v in model.config.to_dict().items() if not k.startswith("_")}
    config.pop("transformers_version", None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return "weights-" + digest.hexdigest()
