"""Gather and scatter on the device, by Triton: pieces of pages to or from a contiguous chunk.

Any component and dtype, as bytes. Few programs (GRID) with wide loads: enough for several times the
speed of a bus, and all but a few multiprocessors stay with the model.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

GRID = 16
"""Programs of one launch: 600 GB/s on an H200, ten times its bus."""
_BLOCK = 4096
_WARPS = 8


# Numbers that differ from call to call must not make Triton compile again.
@triton.jit(do_not_specialize=["n_tiles"], do_not_specialize_on_alignment=["pages", "starts"])  # type: ignore[untyped-decorator, unused-ignore]
def _move_pieces(  # type: ignore[no-untyped-def] # noqa: PLR0917 # pragma: no cover - on a GPU
    pool,
    starts,
    page_stride,
    pages,
    chunk,
    n_tiles,
    pieces,
    piece_words,
    tiles,
    OUT: tl.constexpr,  # noqa: N803 - a constant of the kernel
    BLOCK: tl.constexpr,  # noqa: N803
    ALIGNED: tl.constexpr,  # noqa: N803
):
    """Words of piece j of page i: `starts[j] + pages[i] * page_stride` in the pool,
    `(i * pieces + j) * piece_words` in the chunk. A tile is a part of one piece."""
    for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        piece = (tile // tiles) % pieces
        i = tile // (tiles * pieces)
        start = tl.multiple_of(tl.load(starts + piece), ALIGNED)
        offsets = (tile % tiles) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < piece_words
        in_pool = pool + start + tl.load(pages + i) * page_stride + offsets
        in_chunk = chunk + (i.to(tl.int64) * pieces + piece) * piece_words + offsets
        if OUT:
            tl.store(in_chunk, tl.load(in_pool, mask), mask)
        else:
            tl.store(in_pool, tl.load(in_chunk, mask), mask)


@triton.jit(  # type: ignore[untyped-decorator, unused-ignore]
    do_not_specialize=["n"], do_not_specialize_on_alignment=["source", "target"]
)
def _copy_numbers(source, target, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803 # pragma: no cover
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + offsets, tl.load(source + offsets, offsets < n), offsets < n)


def move_pieces(
    pool: torch.Tensor,
    starts: torch.Tensor,
    pages: torch.Tensor,
    chunk: torch.Tensor,
    *,
    page_stride: int,
    piece_bytes: int,
    out: bool,
    aligned: bool,
    grid: int = GRID,
) -> None:
    """Enqueue on the current stream: `pages` (int64 [n], on the device) of a pool to `chunk`, or
    from it.

    Piece j of page 0 starts `starts[j]` words (int64, on the device; may be negative) behind the
    address of `pool`, that of page p `page_stride` bytes times p later. Words are those of `pool`
    and `chunk`, int64 or uint8; all sizes are multiples of them. Nothing is kept alive: the caller
    holds all until it has run. `aligned`: all starts and sizes are multiples of 16 bytes.
    """
    word = chunk.element_size()
    words = piece_bytes // word
    block = min(_BLOCK, triton.next_power_of_2(words))
    tiles = triton.cdiv(words, block)
    total = len(pages) * len(starts) * tiles
    kernel: Any = _move_pieces
    kernel[(max(1, min(grid, total)),)](
        pool,
        starts,
        page_stride // word,
        pages,
        chunk,
        total,
        len(starts),
        words,
        tiles,
        OUT=out,
        BLOCK=block,
        ALIGNED=16 // word if aligned else 1,
        num_warps=_WARPS if block == _BLOCK else 4,
    )


def copy_numbers(source: torch.Tensor, target: torch.Tensor) -> None:
    """int64 [n] from pinned host memory to the device on the current stream, by a kernel: a copy
    engine would put it behind the large copies that it is for."""
    n = len(source)
    kernel: Any = _copy_numbers
    kernel[(triton.cdiv(n, 1024),)](source, target, n, BLOCK=1024)
