"""Configurations as text, written to a file of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvstrata.configs import Config, load_config

BASE = """\
[namespace]
model = "m"
revision = "1"

[pools]
pages = 8
page_tokens = 16
max_context_tokens = 64

[[pools.components]]
name = "kv"
layers = 2
kv_heads = 1
head_dim = 8

[staging]
bytes = "64KiB"

[l3]
backend = "ram"

[backends.ram]
plugin = "memory"
"""

Load = Callable[..., Config]


@pytest.fixture
def base() -> str:
    """A small configuration that is right."""
    return BASE


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Write a text to a file and load it; `replace` pairs are applied to the base text."""

    def run(*replace: tuple[str, str], text: str = BASE, overrides: Sequence[str] = ()) -> Config:
        for old, new in replace:
            assert old in text, f"nothing to replace: {old}"
            text = text.replace(old, new, 1)
        path = tmp_path / "c.toml"
        path.write_text(text)
        return load_config(path, overrides)

    return run
