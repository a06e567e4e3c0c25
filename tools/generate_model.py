"""The model of `kvstrata generate`: a directory or a tiny one, its tokenizer, its identity, and the
config fitted to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvstrata.configs import ComponentConfig, Config
from kvstrata.configs.checks import check
from kvstrata.errors import ConfigError, Where
from kvstrata.gpu_runtime.hf_models import (
    component_spec_of,
    load_model,
    revision_of_weights,
    tiny_model,
    transformers,
)
from kvstrata.tiers.namespace import revision_of_path
from kvstrata.units import format_size

TINY = {"tiny": "llama", "tiny-qwen2": "qwen2", "tiny-qwen3": "qwen3"}
"""Values of `--model` that are no directory: random weights, bytes as tokens."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to run, with its tokenizer and its identity."""

    name: str
    revision: str
    model: Any
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    has_text: bool
    """False: its tokens are noise, print their numbers."""
    stop_tokens: tuple[int, ...]


def load_subject(name: str) -> Subject:
    """The model that `--model` names: "tiny" and its like, with a seed ("tiny:5") or without, or a
    local directory."""
    kind, _, seed = name.partition(":")
    if kind in TINY and (not seed or seed.isdecimal()):
        model = tiny_model(TINY[kind], int(seed or 0))
        return Subject(
            name=name,
            revision=revision_of_weights(model),
            model=model,
            encode=lambda text: list(text.encode()),
            decode=lambda tokens: bytes(tokens).decode(errors="backslashreplace"),
            has_text=False,
            stop_tokens=(),
        )
    path = Path(name).resolve()
    transformers().utils.logging.disable_progress_bar()
    model = load_model(path)
    revision = revision_of_path(path)
    tokenizer = _load_tokenizer(path)
    return Subject(
        name=str(path),
        revision=revision,
        model=model,
        encode=lambda text: list(tokenizer(text)["input_ids"]),
        decode=lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)),
        has_text=True,
        stop_tokens=_stop_tokens(model),
    )


def _load_tokenizer(path: Path) -> Any:
    auto = transformers().AutoTokenizer
    try:
        tokenizer = auto.from_pretrained(path, local_files_only=True)
        if not tokenizer("a")["input_ids"]:  # what some families make of missing files
            raise ValueError("it knows no tokens")
    except (OSError, ValueError, KeyError, ImportError) as exc:
        raise ConfigError(
            f"the tokenizer cannot be loaded: {exc}",
            remedy="the directory needs a tokenizer.json beside the weights",
            where=Where(file=path, key="model"),
        ) from exc
    return tokenizer


def _stop_tokens(model: Any) -> tuple[int, ...]:
    ends = getattr(model.generation_config, "eos_token_id", None)
    if ends is None:
        return ()
    return tuple(ends) if isinstance(ends, (list, tuple)) else (int(ends),)


def fit_config(config: Config, subject: Subject) -> tuple[Config, list[str]]:
    """`config` with the model's identity and geometry, checked again, and notes on what changed.

    Name and layout of the component stay what the file says; it must be one.
    """
    if len(config.pools.components) != 1:
        raise ConfigError(
            f"{len(config.pools.components)} components; a decoder of Transformers has one",
            remedy="leave one [[pools.components]]",
            where=config.where("pools", "components"),
        )
    given = config.pools.components[0]
    spec = component_spec_of(subject.model, given.name, given.layout)
    mine = ComponentConfig(
        name=spec.name, layers=spec.layers, kv_heads=spec.kv_heads, head_dim=spec.head_dim,
        dtype=spec.dtype, layout=spec.layout,
    )  # fmt: skip
    fitted = dataclasses.replace(
        config,
        identity=msgspec.structs.replace(
            config.identity, model=subject.name, revision=subject.revision
        ),
        pools=msgspec.structs.replace(config.pools, components=(mine,)),
    )
    check(fitted)
    notes = []
    if mine != given:
        notes.append(
            f"the pools take the model's geometry: {mine.layers} layers x {mine.kv_heads} heads x "
            f"{mine.head_dim} x {mine.dtype}, {format_size(fitted.page_bytes)} a page"
        )
    return fitted, notes
