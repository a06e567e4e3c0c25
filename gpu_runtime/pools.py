"""Component pools in device memory, and the gather and scatter between them and host pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvstrata.errors import ConfigError, Where

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
    """Geometry of one component pool. `layout` is the order inside a page: "NHD" (token, head,
    dim) or "HND" (head, token, dim)."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    layout: str = "NHD"
    kind: str = "full"

    @property
    def planes(self) -> int:
        """Separate K and V arrays: two a layer."""
        return 2 * self.layers

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one plane."""
        return self.kv_heads * self.head_dim * DTYPES[self.dtype].itemsize

    def page_bytes(self, page_tokens: int) -> int:
        return self.planes * self.token_bytes * page_tokens


class ComponentPool:
    """The KV of one component: layer-first on the device, `pages` pages of `page_tokens` tokens.

    `data` is uint8 [planes, pages, page_tokens * token_bytes]; plane 2·l holds K of layer l, plane
    2·l+1 its V. `kv(layer)` gives typed views. On the host a page is page-first: its planes one
    after the other. Not locked: the page table says who may touch which page.
    """

    def __init__(
        self, spec: ComponentSpec, pages: int, page_tokens: int, device: torch.device
    ) -> None:
        _check(spec)
        self.spec, self.pages, self.page_tokens = spec, pages, page_tokens
        self.page_bytes = spec.page_bytes(page_tokens)
        self.plane_bytes = spec.token_bytes * page_tokens
        shape = (spec.planes, pages, self.plane_bytes)
        try:
            self.data = torch.zeros(shape, dtype=torch.uint8, device=device)
        except RuntimeError as exc:  # what torch raises when memory is short
            raise ConfigError(
                f"{pages} pages of {self.page_bytes} bytes for {spec.name!r}: {exc}",
                where=Where(key="pools.pages"),
                remedy="make pools.pages smaller",
            ) from exc
        self.host_chunk_pages = 1 << 62
        """Host pages between two borders of registered memory."""
        word = 8 if self.plane_bytes % 8 == 0 else 1
        self._word = torch.int64 if word == 8 else torch.uint8
        self._words = self.data.view(self._word)

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, typed: [pages, tokens, heads, dim] (NHD) or [pages, heads, tokens,
        dim] (HND). Views of the pool."""
        s = self.spec
        inner = (
            (self.page_tokens, s.kv_heads, s.head_dim)
            if s.layout == "NHD"
            else (s.kv_heads, self.page_tokens, s.head_dim)
        )
        typed = self.data.view(DTYPES[s.dtype]).view(s.planes, self.pages, *inner)
        return typed[2 * layer], typed[2 * layer + 1]

    def gather(
        self, pages: torch.Tensor, host: npt.NDArray[np.uint8], slots: npt.NDArray[np.int64]
    ) -> None:
        """Copy device pages (int64 [n], on the device) into host pages `slots` of uint8 [pages,
        stride]. For the D2H stream."""
        taken = self._words.index_select(1, pages).transpose(0, 1)
        if self.data.is_cuda:
            rows = taken.contiguous().view(torch.uint8).view(len(slots), self.page_bytes)
            for part, there in self._host_parts(host, slots):
                there.copy_(rows[part], non_blocking=True)
            return
        self._host_words(host)[_index(slots)] = taken

    def scatter(
        self, pages: torch.Tensor, host: npt.NDArray[np.uint8], slots: npt.NDArray[np.int64]
    ) -> None:
        """Copy host pages into device pages: the mirror image of `gather`. For the H2D stream."""
        if self.data.is_cuda:
            rows = torch.empty(
                (len(slots), self.page_bytes), dtype=torch.uint8, device=self.data.device
            )
            for part, there in self._host_parts(host, slots):
                rows[part].copy_(there, non_blocking=True)
            view = rows.view(self._word).view(len(slots), self.spec.planes, -1)
        else:
            view = self._host_words(host)[_index(slots)]
        self._words.index_copy_(1, pages, view.transpose(0, 1))

    def _host_parts(
        self, host: npt.NDArray[np.uint8], slots: npt.NDArray[np.int64]
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Cuts of a copy in which the host side is contiguous, so that it is one asynchronous copy:
        runs of pages where nothing lies between them, else single pages."""
        raw = torch.from_numpy(host)
        step = 1 if host.shape[1] > self.page_bytes else len(slots)
        at = 0
        while at < len(slots):
            end = at + 1
            while end < min(at + step, len(slots)) and slots[end] == slots[end - 1] + 1:
                if slots[end] % self.host_chunk_pages == 0:
                    break  # a copy must not cross into memory that was registered apart
                end += 1
            first = int(slots[at])
            yield slice(at, end), raw[first : first + end - at, : self.page_bytes]
            at = end

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page inside the pool. For the compute stream."""
        self._words[:, target] = self._words[:, source]

    def _host_words(self, host: npt.NDArray[np.uint8]) -> torch.Tensor:
        """Host pages as words [pages, planes, words a plane], without the padding."""
        raw = torch.from_numpy(host)[:, : self.page_bytes]
        words = raw.view(self._word)
        return words.view(len(host), self.spec.planes, -1)


def _check(spec: ComponentSpec) -> None:
    """Raise ConfigError for a component that no pool can hold."""
    choices = {"kind": ("full",), "dtype": tuple(DTYPES), "layout": ("NHD", "HND")}
    for key, known in choices.items():
        value = getattr(spec, key)
        if value not in known:
            raise ConfigError(
                f"component {spec.name!r}: {key} {value!r} is not available in this version",
                where=Where(key=f"pools.components.{key}"),
                remedy=f"use {' or '.join(known)}",
            )
    if min(spec.layers, spec.kv_heads, spec.head_dim) < 1:
        raise ConfigError(
            f"component {spec.name!r} is empty: {spec}",
            where=Where(key="pools.components"),
            remedy="give layers, kv_heads and head_dim of at least 1",
        )


def _index(slots: npt.NDArray[np.int64]) -> torch.Tensor | slice:
    """A slice for a contiguous run: it is copied in place, without an index pass."""
    first, last = int(slots[0]), int(slots[-1])
    if last - first == len(slots) - 1 and bool((np.diff(slots) == 1).all()):
        return slice(first, last + 1)
    return torch.from_numpy(slots)
