"""What a request does in the next batch: a first chunk, a further chunk, or tokens to decode."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.boundary import OpenRow, RowPlan
from kvstrata.handles import RequestRuntimeHandle
from kvstrata.tiers.node import Node
from kvstrata.tiers.request import Request

MAX_STILL_STEPS = 3
"""Steps with open requests in which nothing was sent, under way or heard: more is a bug."""

MAX_WAKES = 3
"""Polls beside one batch that end for less than a batch: so the calls a batch have a bound."""

MAX_ATTEMPTS = 3
"""Restores of one request that may fail before it computes everything."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """`chunk_tokens`: prefill tokens a row computes in a batch. `decode_steps`: tokens a decoding
    row makes in one. `lookahead`: waiting requests that are looked up and prefetched early.
    `depth`: batches that may be prepared or running at a time."""

    page_tokens: int
    max_context_tokens: int = 131_072
    max_requests: int = 64
    max_batch: int = 8
    chunk_tokens: int = 16_384
    lookahead: int = 16
    decode_steps: int = 64
    depth: int = 2


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """One row of the next batch; its KV ends at `end` then, and it takes `new_pages` L1 pages."""

    request: Request
    plan: RowPlan
    end: int
    new_pages: int


def next_chunk(
    request: Request, handle: RequestRuntimeHandle, settings: SchedulerSettings
) -> PlannedRow:
    """The next prefill chunk of a running request, or its next tokens."""
    start, size = request.planned_kv, settings.page_tokens
    if request.prefilled:
        plan = RowPlan(row=handle)
        end = min(start + settings.decode_steps, request.max_kv)
    else:
        count = min(request.prompt_tokens - start, settings.chunk_tokens)
        plan = RowPlan(row=handle, start=start, count=count)
        end = start + count
    return PlannedRow(request, plan, end, _pages(end, size) - _pages(start, size))


def is_usable(path: list[Node]) -> bool:
    """Can a row attach and restore `path`? Pages in L1 first, then pages in L2."""
    lead = next((i for i, node in enumerate(path) if not node.l1), len(path))
    return all(node.l2 and not node.l1 for node in path[lead:])


def first_chunk(
    request: Request, path: list[Node], index: int, settings: SchedulerSettings
) -> PlannedRow:
    """The first chunk of a READY request, which attaches and restores the pages of `path`.

    `index` is its place in `BatchPlan.open`. A wholly cached prompt computes its last token again.
    """
    size = settings.page_tokens
    lead = next((i for i, node in enumerate(path) if not node.l1), len(path))
    restored = sum(node.page_count for node in path[lead:])
    cached = restored + sum(node.page_count for node in path[:lead])
    start = min(cached * size, request.prompt_tokens - 1)
    count = min(request.prompt_tokens - start, settings.chunk_tokens)
    request.cached_tokens = start
    plan = RowPlan(
        row=index,
        attach=tuple(extent for node in path[:lead] for extent in node.l1),
        restore=tuple(extent for node in path[lead:] for extent in node.l2),
        start=start,
        count=count,
    )
    private_copy = 1 if start < cached * size else 0
    new = _pages(start + count, size) - cached + restored + private_copy
    return PlannedRow(request, plan, start + count, new)


def open_row(request: Request) -> OpenRow:
    return OpenRow(
        tokens=request.tokens,
        namespace=request.chain.namespace,
        max_new_tokens=request.max_new_tokens,
        stop_tokens=request.stop_tokens,
        payload=request.payload,
    )


def _pages(tokens: int, page_tokens: int) -> int:
    return -(-tokens // page_tokens)
