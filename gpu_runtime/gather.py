"""Gather and scatter on the device, by Triton: pieces of pages to or from a chunk of whole pages.

Any component and dtype, as bytes, with wide loads. One program a multiprocessor is best: each loses
a few microseconds, where a few programs keep theirs for a tenth of a millisecond, and a kernel of
the model that deals its work out evenly waits for the slowest. What differs from call to call is in
memory and not in the arguments, so one captured graph serves all calls: its launch takes a tenth of
the host's time that Triton's own takes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvstrata.gpu_runtime.cuda_chunks import HEADER

_BLOCK = 4096
_NUMBERS = 1024


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _fetch(order, here, FIRST: tl.constexpr, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803 # pragma: no cover
    """An order from pinned host memory to the device. Only for copies out, which leave the engine
    alone that brings it with the pages of copies in."""
    n = tl.load(order) * (1 + tl.load(order + 5)) + FIRST
    for at in range(0, n, NUMBERS):
        offsets = at + tl.arange(0, NUMBERS)
        tl.store(here + offsets, tl.load(order + offsets, offsets < n), offsets < n)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _pass(source, target, mask):  # type: ignore[no-untyped-def] # pragma: no cover - on a GPU
    """Bytes that nobody reads soon: the model's own stay in the cache."""
    words = tl.load(source, mask, eviction_policy="evict_first")
    tl.store(target, words, mask, eviction_policy="evict_first")


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _move(  # type: ignore[no-untyped-def] # noqa: PLR0917 # pragma: no cover - on a GPU
    pool,
    starts,
    order,
    chunk,
    page_stride,
    piece_words,
    tiles,
    FIRST: tl.constexpr,  # noqa: N803 - a constant of the kernel
    OUT: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    ALIGNED: tl.constexpr,  # noqa: N803
):
    """Words of piece j of the i-th page: `starts[j] + page * page_stride` in the pool, in the chunk
    `at + place * page_words + (j - first) * piece_words`. A tile is a part of one piece."""
    first = tl.load(order + 1)
    pieces = tl.load(order + 2)
    page_words = tl.multiple_of(tl.load(order + 3), ALIGNED)
    at = tl.multiple_of(tl.load(order + 4), ALIGNED)
    count = tl.load(order)
    has_places = tl.load(order + 5) != 0
    n_tiles = count * pieces * tiles
    for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        number = tile // tiles
        i = number // pieces
        start = tl.multiple_of(tl.load(starts + first + number % pieces), ALIGNED)
        page = tl.load(order + FIRST + i)
        place = tl.where(has_places, tl.load(order + FIRST + count + i, has_places), i)
        offsets = (tile % tiles) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < piece_words
        in_pool = pool + start + page * page_stride + offsets
        in_chunk = chunk + at + place * page_words + (number % pieces) * piece_words + offsets
        if OUT:
            _pass(in_pool, in_chunk, mask)
        else:
            _pass(in_chunk, in_pool, mask)


def move_pieces(
    pool: torch.Tensor,
    starts: torch.Tensor,
    order: torch.Tensor,
    chunk: torch.Tensor,
    *,
    page_stride: int,
    piece_bytes: int,
    out: bool,
    aligned: bool,
    grid: int,
) -> None:
    """Enqueue on the current stream: pages of a pool to a chunk, or from it.

    `order` (int64, on the device) is HEADER numbers and the page numbers; they say where the chunk
    is, counted from the address of `chunk`. Piece j of page 0 starts
    `starts[j]` words (int64, on the device; may be negative) behind the address of `pool`, that of
    page p `page_stride` bytes times p later. Words are those of `pool` and `chunk`, int64 or uint8;
    all sizes are multiples of them. Nothing is kept alive: the caller holds all until it has run.
    `aligned`: all starts, sizes and places are multiples of 16 bytes. `grid`: programs.
    """
    word = chunk.element_size()
    words = piece_bytes // word
    block = min(_BLOCK, triton.next_power_of_2(words))
    kernel: Any = _move
    kernel[(grid,)](
        pool,
        starts,
        order,
        chunk,
        page_stride // word,
        words,
        triton.cdiv(words, block),
        FIRST=HEADER,
        OUT=out,
        BLOCK=block,
        ALIGNED=16 // word if aligned else 1,
        num_warps=8 if block == _BLOCK else 4,
    )


def fetch_order(pinned: torch.Tensor, order: torch.Tensor) -> None:
    """Enqueue on the current stream: the order in `pinned` host memory to the device."""
    kernel: Any = _fetch
    kernel[(1,)](pinned, order, FIRST=HEADER, NUMBERS=_NUMBERS)
