"""Ways to move the same scattered pages between GPU and host: ours, the bus's limit, the peers'."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvstrata.gpu_runtime import ComponentPool, ComponentSpec
from kvstrata.gpu_runtime.base import Device
from kvstrata.gpu_runtime.cuda_chunks import HEADER
from kvstrata.gpu_runtime.cuda_copies import CHUNK_BYTES, CudaCopies
from kvstrata.gpu_runtime.device_pages import WHOLE, PageCopy
from kvstrata.gpu_runtime.hurry import Hurry
from kvstrata.gpu_runtime.transfers import slices_of
from kvstrata.staging import SharedRegion, aligned

GATED_CHUNKS = 64
"""Chunks of one copy that can be enqueued before the first byte moves."""
LMCACHE_TOKENS = 256
"""Tokens of one call of LMCache: its default chunk."""
HOST_KERNEL_GRID = 64


@dataclass(frozen=True, slots=True)
class Geometry:
    """A model's KV cache, at one page size."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    kind: str
    page_tokens: int

    @property
    def spec(self) -> ComponentSpec:
        return ComponentSpec(
            "kv", self.layers, self.kv_heads, self.head_dim, "bfloat16", kind=self.kind
        )

    @property
    def label(self) -> str:
        return f"{self.name}, {self.page_tokens} tokens a page"


GEOMETRIES = tuple(
    Geometry(name, layers, heads, dim, kind, tokens)
    for name, layers, heads, dim, kind in (
        ("Llama-3-8B", 32, 8, 128, "full"),
        ("MLA 61x576", 61, 1, 576, "mla"),
    )
    for tokens in (16, 64)
)


@dataclass(eq=False, slots=True)
class CopyStream:
    cuda: torch.cuda.Stream
    followers: list[torch.cuda.Stream] = field(default_factory=list)
    hurry: Hurry = field(default_factory=Hurry)

    def fail(self, error: BaseException) -> None:
        raise error

    def wait(self, event: torch.cuda.Event) -> None:
        for stream in (self.cuda, *self.followers):
            stream.wait_event(event)


AT_ONCE = "kvstrata, at once"

Method = Callable[[bool], None]
"""Enqueues one copy of all pages, out of the device (True) or in, on the stream of that way."""


class Case:
    """`nbytes` of scattered pages of one geometry, out of twice as many on the device and on either
    of two sides of the host, one for each way."""

    def __init__(
        self, geometry: Geometry, nbytes: int, seed: int, *, huge_pages: bool = False
    ) -> None:
        self.geometry = geometry
        device = torch.device("cuda", torch.cuda.current_device())
        page_bytes = geometry.spec.page_bytes(geometry.page_tokens)
        self.count = max(2, nbytes // page_bytes)
        self.nbytes = self.count * page_bytes
        rng = np.random.default_rng(seed)
        self.pool = ComponentPool(geometry.spec, 2 * self.count, geometry.page_tokens, device)
        self.pool.data.random_(0, 256)
        stride = aligned(page_bytes)
        self.region = SharedRegion(4 * self.count * stride, huge_pages=huge_pages)
        self.region.array[:] = 0
        code = torch.cuda.cudart().cudaHostRegister(
            self.region.array.ctypes.data, self.region.nbytes, 0
        )
        if int(code):
            raise MemoryError(f"cannot pin {self.region.nbytes} bytes: error {int(code)}")
        whole = self.region.array[: 4 * self.count * stride]
        halves = whole.reshape(2, 2 * self.count, stride)
        self.host = {True: halves[0], False: halves[1]}
        self.streams = {out: CopyStream(torch.cuda.Stream(priority=-1)) for out in (True, False)}
        self.copies = {
            out: CudaCopies(
                device,
                self.streams[out],
                out=out,
                chunk_bytes=CHUNK_BYTES,
                ring=GATED_CHUNKS,
            )
            for out in (True, False)
        }
        pages = rng.permutation(2 * self.count)[: self.count]
        self.page_copies = {
            out: PageCopy(
                self.pool, pages, self.host[out], rng.permutation(2 * self.count)[: self.count]
            )
            for out in (True, False)
        }
        for copies in self.copies.values():
            copies.prepare(self.pool)
        self._chunk = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self._pinned: dict[bool, torch.Tensor] = {}
        torch.cuda.synchronize()

    def stream(self, out: bool) -> torch.cuda.Stream:
        return self.streams[out].cuda

    def close(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(self.region.array.ctypes.data)
        self.host.clear()
        self.page_copies.clear()
        self.region.close()

    # ── the methods ──────────────────────────────────────────────────────────────────────────────

    def contiguous(self, out: bool) -> None:
        """The limit: as many bytes in one copy, from one place to one place."""
        host = torch.from_numpy(self.host[out].reshape(-1)[: self.nbytes])
        target, source = (host, self._chunk) if out else (self._chunk, host)
        with torch.cuda.stream(self.stream(out)):
            target.copy_(source, non_blocking=True)

    def ours(self, out: bool, part: slice = WHOLE) -> None:
        """All pieces, or some, of all pages. Returns when most have moved."""
        whole = replace(self.page_copies[out], part=part)
        with torch.cuda.stream(self.stream(out)):
            for some in slices_of(whole, Device.copy_slice_bytes):
                self.copies[out].copy(some)

    def at_once(self, out: bool, part: slice = WHOLE) -> None:
        """The same for somebody who waits until it is enqueued."""
        with self.streams[out].hurry:
            self.ours(out, part)

    def host_kernel(self, out: bool) -> None:
        """A kernel that writes or reads pinned host memory itself, as SGLang's and LMCache's do."""
        from kvstrata.gpu_runtime.gather import move_pieces

        if out not in self._pinned:
            self._pinned[out] = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True)
        layout = self.pool.layout
        starts = torch.from_numpy((layout.starts - layout.starts[0]) // 8).cuda()
        header = np.zeros(HEADER, np.int64)
        header[0], header[2], header[3] = self.count, layout.pieces, layout.page_bytes // 8
        pages = torch.from_numpy(np.concatenate((header, self.page_copies[out].pages))).cuda()
        with torch.cuda.stream(self.stream(out)):
            move_pieces(
                self.pool.first_word,
                starts,
                pages,
                self._pinned[out].view(torch.int64),
                page_stride=layout.page_stride,
                piece_bytes=layout.piece_bytes,
                out=out,
                aligned=True,
                grid=HOST_KERNEL_GRID,
            )
        self._kept = (starts, pages)

    def verify(self, out: bool) -> bool:
        """Whether the last copy `ours(out)` moved every byte, compared on the host."""
        torch.cuda.synchronize()
        copy = self.page_copies[out]
        index = torch.from_numpy(copy.pages).cuda()
        device = self.pool.take(index).contiguous().cpu().numpy().view(np.uint8)
        rows = copy.host[copy.slots, : self.pool.page_bytes]
        return bool((device.reshape(self.count, -1) == rows).all())


class LMCache:
    """LMCache's own kernel, from an installed `lmcache`, or from a folder with its `c_ops` library.

    vLLM's layout for flash attention: a tensor [2, pages, tokens, heads, dim] a layer; pinned
    objects of 256 tokens, its default. Only for models with K and V."""

    def __init__(self, case: Case, folder: Path | None) -> None:
        if folder is not None:
            sys.path.insert(0, str(folder))
        name = "c_ops" if folder is not None else "lmcache.c_ops"
        self.ops: Any = importlib.import_module(name)
        g = case.geometry
        self.case, self.page_tokens = case, g.page_tokens
        shape = (2, 2 * case.count, g.page_tokens, g.kv_heads, g.head_dim)
        self.layers = [
            torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(g.layers)
        ]
        self.pointers = torch.tensor([t.data_ptr() for t in self.layers], device="cuda")
        pages = torch.from_numpy(case.page_copies[True].pages).cuda()
        offsets = torch.arange(g.page_tokens, device="cuda")
        self.slots = (pages[:, None] * g.page_tokens + offsets).flatten()
        size = (2, g.layers, LMCACHE_TOKENS, g.kv_heads * g.head_dim)
        count = len(self.slots) // LMCACHE_TOKENS
        self.objects = {
            out: [torch.zeros(size, dtype=torch.bfloat16, pin_memory=True) for _ in range(count)]
            for out in (True, False)
        }
        self.head_dim, self.pages = g.head_dim, 2 * case.count

    def move(self, out: bool) -> None:
        ops = self.ops
        way = ops.TransferDirection.D2H if out else ops.TransferDirection.H2D
        form = ops.EngineKVFormat.NL_X_TWO_NB_BS_NH_HS
        with torch.cuda.stream(self.case.stream(out)):
            for i, memory in enumerate(self.objects[out]):
                ops.multi_layer_kv_transfer(
                    memory,
                    self.pointers,
                    self.slots[i * LMCACHE_TOKENS : (i + 1) * LMCACHE_TOKENS],
                    torch.device("cuda"),
                    self.pages * self.page_tokens,
                    way,
                    form,
                    block_size=self.page_tokens,
                    head_size=self.head_dim,
                    skip_prefix_n_tokens=0,
                )


def methods_of(case: Case, lmcache: Path | None, *, peers: bool) -> Iterator[tuple[str, Method]]:
    """Everything that can run here, the limit first."""
    yield "contiguous", case.contiguous
    yield "kvstrata", case.ours
    yield AT_ONCE, case.at_once
    if not peers:
        return
    yield "kernel on host memory", case.host_kernel
    if case.geometry.kind == "full":
        try:
            yield "LMCache", LMCache(case, lmcache).move
        except ImportError:
            return


def medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """The median of each column."""
    return [float(x) for x in np.median(np.asarray(rows), axis=0)]
