"""Component pools: device memory for the KV of each component, as the model sees it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvstrata.errors import ConfigError, Where
from kvstrata.gpu_runtime.device_pages import WHOLE, DevicePages, PageLayout

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "uint8": torch.uint8,
    "int8": torch.int8,
}


@dataclass(frozen=True, slots=True)
class ComponentSpec:
    """Geometry of one component pool.

    `kind`: "full" has K and V for every token of every layer; "mla" one latent vector (kv_heads is
    1, head_dim its length with the rotary part). `layout` is the order inside a page: "NHD" (token,
    head, dim) or "HND" (head, token, dim).
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    layout: str = "NHD"
    kind: str = "full"

    @property
    def planes(self) -> int:
        """Separate arrays: K and V of each layer, or its latents."""
        return self.layers if self.kind == "mla" else 2 * self.layers

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one plane."""
        return self.kv_heads * self.head_dim * DTYPES[self.dtype].itemsize

    def page_bytes(self, page_tokens: int) -> int:
        return self.planes * self.token_bytes * page_tokens


class ComponentPool(DevicePages):
    """The KV of one component: layer-first on the device, `pages` pages of `page_tokens` tokens.

    `data` is uint8 [planes, pages, page_tokens * token_bytes]; plane 2·l holds K of layer l, plane
    2·l+1 its V (kind "mla": plane l its latents). `kv(layer)` and `latent(layer)` give typed views.
    """

    def __init__(
        self, spec: ComponentSpec, pages: int, page_tokens: int, device: torch.device
    ) -> None:
        _check(spec)
        self.spec, self.pages, self.page_tokens = spec, pages, page_tokens
        self.plane_bytes = spec.token_bytes * page_tokens
        shape = (spec.planes, pages, self.plane_bytes)
        try:
            self.data = torch.zeros(shape, dtype=torch.uint8, device=device)
        except RuntimeError as exc:  # what torch raises when memory is short
            raise ConfigError(
                f"{pages} pages of {spec.page_bytes(page_tokens)} bytes for {spec.name!r}: {exc}",
                where=Where(key="pools.pages"),
                remedy="make pools.pages smaller",
            ) from exc
        planes = np.arange(spec.planes, dtype=np.int64) * (pages * self.plane_bytes)
        starts = self.data.data_ptr() + planes
        super().__init__(PageLayout(starts, self.plane_bytes, self.plane_bytes, pages), [self.data])
        self._words = self.data.view(self._word)

    def take(self, pages: torch.Tensor, part: slice = WHOLE) -> torch.Tensor:
        """All planes at once."""
        return self._words[part].index_select(1, pages).transpose(0, 1)

    def put(self, pages: torch.Tensor, source: torch.Tensor, part: slice = WHOLE) -> None:
        self._words[part].index_copy_(1, pages, source.transpose(0, 1))

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, typed: [pages, tokens, heads, dim] (NHD) or [pages, heads, tokens,
        dim] (HND). Views of the pool."""
        assert self.spec.kind != "mla", "it has latents"
        typed = self._typed()
        return typed[2 * layer], typed[2 * layer + 1]

    def latent(self, layer: int) -> torch.Tensor:
        """The latents of one layer of kind "mla", typed: [pages, tokens, dim]. A view."""
        assert self.spec.kind == "mla", "it has K and V"
        return self._typed()[layer].flatten(2)

    def _typed(self) -> torch.Tensor:
        s = self.spec
        inner = (
            (self.page_tokens, s.kv_heads, s.head_dim)
            if s.layout == "NHD"
            else (s.kv_heads, self.page_tokens, s.head_dim)
        )
        return self.data.view(DTYPES[s.dtype]).view(s.planes, self.pages, *inner)

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page inside the pool. For the compute stream."""
        self._words[:, target] = self._words[:, source]


def _check(spec: ComponentSpec) -> None:
    """Raise ConfigError for a component that no pool can hold."""
    choices = {"kind": ("full", "mla"), "dtype": tuple(DTYPES), "layout": ("NHD", "HND")}
    for key, known in choices.items():
        value = getattr(spec, key)
        if value not in known:
            raise ConfigError(
                f"component {spec.name!r}: {key} {value!r} is not available in this version",
                where=Where(key=f"pools.components.{key}"),
                remedy=f"use {' or '.join(known)}",
            )
    if spec.kind == "mla" and spec.kv_heads != 1:
        raise ConfigError(
            f"component {spec.name!r} has {spec.kv_heads} heads of latents",
            where=Where(key="pools.components.kv_heads"),
            remedy="all heads share one latent: give kv_heads = 1 and head_dim = its length",
        )
    if min(spec.layers, spec.kv_heads, spec.head_dim) < 1:
        raise ConfigError(
            f"component {spec.name!r} is empty: {spec}",
            where=Where(key="pools.components"),
            remedy="give layers, kv_heads and head_dim of at least 1",
        )
