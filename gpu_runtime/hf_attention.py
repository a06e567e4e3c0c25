"""Attention of a Hugging Face model over the runtime's pools, through ReqToToken.

The rows of a step are packed into one sequence, [1, tokens], without padding: the linear layers
see all of them at once. Here each row is on its own again: its new K and V are written to the
token slots of their positions, K and V of all its positions are gathered, and its queries attend
to them. Nothing is kept between steps but what is in the pools.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from kvstrata.gpu_runtime.pools import DTYPES, ComponentPool
from kvstrata.gpu_runtime.req_to_token import ReqToToken

NAME = "kvstrata"
"""Of the attention implementation, in Transformers' registry."""

GROUPED_TOKENS = 16
"""Rows with equal counts up to this (decodes, verified drafts) attend together, padded."""

QUERY_BLOCK = 512
"""Queries that attend at a time: the mask has this many rows a head of a group, however long the
chunk is."""


@dataclass(frozen=True, slots=True)
class Span:
    """Positions `start … start + count - 1` of ReqToToken row `slot`, at `first` in the packing."""

    slot: int
    start: int
    count: int
    first: int

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class _Where:
    """Token slots as a pool of either layout is indexed by them."""

    slots: torch.Tensor
    pages: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def of(cls, slots: torch.Tensor, page_tokens: int) -> _Where:
        return cls(slots, slots // page_tokens, slots % page_tokens)


@dataclass(frozen=True, slots=True)
class _Part:
    """Spans of equal count that attend together: `first … stop` in the packing."""

    first: int
    stop: int
    count: int
    start: int
    """Of the one span, where there is only one."""
    read: _Where
    """[spans · longest]: where K and V of their positions are."""
    rows: int
    longest: int
    mask: torch.Tensor | None
    """bool [spans, 1, count, longest]; None for one span, whose mask follows from `start`."""


class PagedStep:
    """What one forward step writes and reads, the same in every layer. For one step.

    `spans` are in the order of the packing, which sorts them by `count`.
    """

    def __init__(
        self, spans: Sequence[Span], pool: ComponentPool, req_to_token: ReqToToken
    ) -> None:
        self._pool = pool
        self._layers: set[int] = set()
        written = req_to_token.packed(pool.spec.name, ((s.slot, s.start, s.end) for s in spans))
        self._write = _Where.of(written.to(torch.int64), pool.page_tokens)
        self._parts = [
            _part(part, pool, req_to_token)
            for count, same in groupby(spans, key=lambda span: span.count)
            for part in _together(count, list(same))
        ]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        """Write `key` and `value` [1, kv heads, tokens, dim], then attend with `query` [1, heads,
        tokens, dim]. Returns [1, tokens, heads, dim]."""
        spec, layout = self._pool.spec, self._pool.spec.layout
        shapes = {(t.shape[1], t.shape[3], t.dtype) for t in (key, value)}
        if shapes != {(spec.kv_heads, spec.head_dim, DTYPES[spec.dtype])}:
            raise RuntimeError(f"layer {layer} makes KV of {shapes}, the pool is {spec}")
        self._layers.add(layer)
        planes = self._pool.kv(layer)
        for plane, new in zip(planes, (key, value), strict=True):
            _store(plane, layout, self._write, new[0].transpose(0, 1))
        out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
        for part in self._parts:
            k, v = (_load(plane, layout, part) for plane in planes)
            q = query[0, :, part.first : part.stop]
            q = q.reshape(len(q), part.rows, part.count, -1).transpose(0, 1)
            found = _attention(part, q, k, v, scaling).permute(0, 2, 1, 3)
            out[0, part.first : part.stop] = found.flatten(0, 1)
        return out

    def check_complete(self) -> None:
        """Raise RuntimeError unless every layer has attended: one that did not has left its KV
        unwritten, and saw other rows' tokens as its own."""
        missing = set(range(self._pool.spec.layers)) - self._layers
        if missing:
            raise RuntimeError(f"layers {sorted(missing)} did not attend through the pools")


def _together(count: int, spans: list[Span]) -> list[list[Span]]:
    """Short spans of equal count attend together; long ones one by one."""
    return [spans] if count <= GROUPED_TOKENS else [[span] for span in spans]


def _part(spans: list[Span], pool: ComponentPool, req_to_token: ReqToToken) -> _Part:
    """Where the spans' KV is; shorter ones are padded with their own first position, so that
    nothing of another request is read, and masked."""
    count, longest = spans[0].count, max(span.end for span in spans)
    first, stop = spans[0].first, spans[-1].first + count
    found = req_to_token.leading(pool.spec.name, [span.slot for span in spans], longest)
    slots = found.to(torch.int64)
    if len(spans) == 1:
        read = _Where.of(slots[0], pool.page_tokens)
        return _Part(first, stop, count, spans[0].start, read, 1, longest, None)
    device = slots.device
    starts = torch.tensor([span.start for span in spans], device=device)
    columns = torch.arange(longest, device=device)
    slots = torch.where(columns < (starts + count)[:, None], slots, slots[:, :1])
    last = starts[:, None] + torch.arange(count, device=device)
    mask = (columns <= last[:, :, None])[:, None]
    read = _Where.of(slots.flatten(), pool.page_tokens)
    return _Part(first, stop, count, 0, read, len(spans), longest, mask)


def _store(plane: torch.Tensor, layout: str, at: _Where, values: torch.Tensor) -> None:
    """Write [tokens, heads, dim] to token slots of one plane."""
    if layout == "NHD":
        plane.flatten(0, 1).index_copy_(0, at.slots, values)
    else:
        plane[at.pages, :, at.offsets] = values


def _load(plane: torch.Tensor, layout: str, part: _Part) -> torch.Tensor:
    """K or V of a part, [spans, kv heads, longest, dim]."""
    at = part.read
    if layout == "NHD":
        found = plane.flatten(0, 1).index_select(0, at.slots)
    else:
        found = plane[at.pages, :, at.offsets]
    return found.view(part.rows, part.longest, *found.shape[1:]).transpose(1, 2)


def _attention(
    part: _Part, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """q [spans, heads, count, dim], k and v [spans, kv heads, longest, dim] → as q."""
    if part.mask is not None:
        return _grouped(q, k, v, part.mask, scaling)
    if part.count == 1:
        return _grouped(q, k, v, None, scaling)
    if part.start == 0 and part.count == part.longest:  # nothing before it: the plain kernel
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
    columns = torch.arange(part.longest, device=q.device)
    blocks = []
    for first in range(0, part.count, QUERY_BLOCK):
        stop = min(first + QUERY_BLOCK, part.count)
        seen = part.start + stop
        last = columns[part.start + first : seen]
        mask = (columns[:seen] <= last[:, None])[None, None]
        blocks.append(_grouped(q[:, :, first:stop], k[:, :, :seen], v[:, :, :seen], mask, scaling))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)


def _grouped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """Attention with the query heads of one KV head laid one after the other as queries of it, so
    that no K or V is repeated; kernels take a mask then as well."""
    rows, heads, count, dim = q.shape
    share = heads // k.shape[1]
    packed = q.reshape(rows, k.shape[1], share * count, dim)
    if mask is not None and count > 1 and share > 1:
        mask = mask.repeat(1, 1, share, 1)
    out = F.scaled_dot_product_attention(packed, k, v, attn_mask=mask, scale=scaling)
    return out.reshape(rows, heads, count, dim)


# ── in Transformers ──────────────────────────────────────────────────────────────────────────────

_UNKNOWN = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Arguments with which a model asks for another attention than this one."""


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    kvstrata_step: PagedStep | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function, as `AttentionInterface` calls it. `kvstrata_step` comes through the
    keyword arguments of the model's forward."""
    if kvstrata_step is None or attention_mask is not None:
        raise RuntimeError(
            f"{type(module).__name__} does not hand on the step: it belongs to a TransformersRunner"
            ", which alone may call it, or its family is not one that the runner can run"
        )
    for name in _UNKNOWN:
        if kwargs.get(name) is not None:
            raise RuntimeError(f"{type(module).__name__} needs {name}, which no pool supports")
    return kvstrata_step.attend(module.layer_idx, query, key, value, scaling), None


@functools.cache
def register() -> None:
    """Make the attention known to Transformers, under `NAME`. Without a mask function of that
    name, Transformers makes no mask."""
    import_module("transformers").AttentionInterface.register(NAME, paged_attention)
