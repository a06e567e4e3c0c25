"""Pages in device memory: where their bytes are, whoever has allocated them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from kvstrata.errors import ConfigError, Where


@dataclass(frozen=True)
class PageLayout:
    """Where a page's bytes are: `pieces` ranges of `piece_bytes` each, at equal steps a page.

    Piece j of page p is at `starts[j] + p * page_stride` (byte addresses, int64 [pieces]). A pool
    that is layer-first has a piece for each layer's K and V; one that is page-first has one piece.
    On the host a page is its pieces, one after the other.
    """

    starts: npt.NDArray[np.int64]
    page_stride: int
    piece_bytes: int
    pages: int

    @property
    def pieces(self) -> int:
        return len(self.starts)

    @property
    def page_bytes(self) -> int:
        return self.pieces * self.piece_bytes

    @cached_property
    def word_bytes(self) -> int:
        """8 where everything is a multiple of it, else 1."""
        return 8 if self.is_multiple_of(8) else 1

    def overlaps(self, begin: int, end: int) -> bool:
        """Whether a byte between these addresses may be one of a page, or of what is between two
        pages of a piece."""
        return bool(((self.starts < end) & (self.starts + self.extent > begin)).any())

    def shares_bytes(self, other: PageLayout | None = None) -> bool:
        """Whether a byte is in a page of both, or else in two pieces of its own: exactly, if both
        have one step from page to page; else whether it may be."""
        found = self._meets(other or self)
        if other is None:
            np.fill_diagonal(found, val=False)
        return bool(found.any())

    def _meets(self, other: PageLayout) -> npt.NDArray[np.bool_]:
        """Which piece of this meets which one of the other."""
        step, distances = self.page_stride, self.starts[:, None] - other.starts
        if step == other.page_stride and min(self.pages, other.pages) > 1:
            turns, rest = np.divmod(distances, step)
            met = (rest < other.piece_bytes) & (-self.pages < turns) & (turns < other.pages)
            turns += 1
            met |= (step - rest < self.piece_bytes) & (-self.pages < turns) & (turns < other.pages)
        else:
            met = (distances < other.extent) & (-distances < self.extent)
        return met

    @property
    def extent(self) -> int:
        """Bytes from the first byte of a piece in page 0 to the last in the last page."""
        return (self.pages - 1) * self.page_stride + self.piece_bytes

    def is_multiple_of(self, nbytes: int) -> bool:
        """Whether all addresses and sizes are."""
        sizes = (self.page_stride % nbytes, self.piece_bytes % nbytes)
        return sizes == (0, 0) and not bool((self.starts % nbytes).any())


WHOLE = slice(None)
"""All pieces of a page."""


class DevicePages:
    """Pages of one pool on one device. Keeps `tensors` alive, whose memory they are.

    Not locked, and it knows no page states: its owner says who may touch which page when.
    """

    def __init__(self, layout: PageLayout, tensors: Sequence[torch.Tensor]) -> None:
        self.layout = layout
        self.tensors = tuple(tensors)
        self.page_bytes = layout.page_bytes
        self.host_chunk_pages = 1 << 62
        """Host pages between two borders of registered memory."""
        word = torch.int64 if layout.word_bytes == 8 else torch.uint8
        self._word = word
        self._views = [view for tensor in tensors for view in _views(tensor, layout, word)]

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def first_word(self) -> torch.Tensor:
        """Words of the first piece: the address that others are counted from."""
        return self._views[0]

    def take(self, pages: torch.Tensor, part: slice = WHOLE) -> torch.Tensor:
        """A copy of device pages (int64 [n], on the device): words [n, pieces, words a piece], of
        the pieces in `part`."""
        return torch.stack([view[pages] for view in self._views[part]], dim=1)

    def put(self, pages: torch.Tensor, source: torch.Tensor, part: slice = WHOLE) -> None:
        """The mirror image of `take`."""
        for piece, view in enumerate(self._views[part]):
            view[pages] = source[:, piece]

    def gather(self, copy: PageCopy) -> None:
        """Device pages into the pages of `copy.host`, which are on this device."""
        words = self._host_words(copy.host)[:, copy.part]
        index = torch.from_numpy(copy.pages).to(self.device)
        words[host_index(copy.slots)] = self.take(index, copy.part)

    def scatter(self, copy: PageCopy) -> None:
        """The mirror image of `gather`."""
        words = self._host_words(copy.host)[:, copy.part]
        index = torch.from_numpy(copy.pages).to(self.device)
        self.put(index, words[host_index(copy.slots)], copy.part)

    def words_of(self, chunk: torch.Tensor, count: int, pieces: int) -> torch.Tensor:
        """The first bytes of uint8 memory, as words [count, pieces, words a piece]."""
        nbytes = count * pieces * self.layout.piece_bytes
        return chunk[:nbytes].view(self._word).view(count, pieces, self._shape(count)[2])

    def _shape(self, count: int) -> tuple[int, int, int]:
        layout = self.layout
        return count, layout.pieces, layout.piece_bytes // layout.word_bytes

    def _host_words(self, host: npt.NDArray[np.uint8] | torch.Tensor) -> torch.Tensor:
        """Host pages as words [pages, pieces, words a piece], without the padding."""
        whole = host if isinstance(host, torch.Tensor) else torch.from_numpy(host)
        raw = whole[:, : self.page_bytes]
        return raw.view(self._word).view(self._shape(len(host)))


@dataclass(frozen=True, slots=True)
class PageCopy:
    """What one copy moves, in either direction: device `pages` (int64 [n]) of `memory` and host
    pages `slots` (int64 [n]) of `host`, uint8 [host pages, stride]; of each page the pieces in
    `part`, which have their place in a host page. Both sides stay until the copy has ended.

    A tensor as `host` is staging on the device itself, with pages as those of the host: a chunk
    that storage reads and writes directly (GPUDirect)."""

    memory: DevicePages
    pages: npt.NDArray[np.int64]
    host: npt.NDArray[np.uint8] | torch.Tensor
    slots: npt.NDArray[np.int64]
    part: slice = field(default_factory=lambda: WHOLE)
    is_followed: bool = False
    """Another copy comes at once on the same stream, and before any other work: its beginning may
    end this one."""

    def some(self, some: slice | npt.NDArray[np.int64]) -> PageCopy:
        """The same with these of its pages."""
        return replace(self, pages=self.pages[some], slots=self.slots[some])

    @property
    def pieces(self) -> range:
        return range(self.memory.layout.pieces)[self.part]

    @property
    def nbytes(self) -> int:
        return len(self.pages) * len(self.pieces) * self.memory.layout.piece_bytes

    @property
    def is_staged_on_device(self) -> bool:
        return isinstance(self.host, torch.Tensor)

    @property
    def host_address(self) -> int:
        """Of the first host page."""
        host = self.host
        return host.data_ptr() if isinstance(host, torch.Tensor) else int(host.ctypes.data)

    @property
    def part_address(self) -> int:
        """Of what moves of the first host page."""
        return self.host_address + self.pieces.start * self.memory.layout.piece_bytes

    @property
    def host_step(self) -> int:
        """Bytes from a host page to the next."""
        return int(self.host.shape[1])


def adopt(
    tensors: Sequence[torch.Tensor], *, page_axis: int, page_tokens: int | None = None
) -> DevicePages:
    """Pages of memory that somebody else has allocated and manages: one tensor a layer (or one its
    K and one its V), in order.

    `page_axis` numbers the pages. Axes before it make pieces of their own (K and V of
    [2, pages, …]); what is behind it must be contiguous: whether tokens or heads come first there
    does not matter, bytes are moved as they are. With `page_tokens` the axis numbers tokens, and a
    page is so many of them ([tokens, heads, dim]). Raises ConfigError for what cannot be adopted.
    """
    given: object = tensors
    if isinstance(given, torch.Tensor):  # its first axis would be taken for layers
        raise ConfigError(
            f"one tensor {tuple(given.shape)}, not a sequence of them",
            where=Where(key="tensors"),
            remedy="adopt([tensor], ...)",
        )
    views = [
        view
        for number, tensor in enumerate(tensors)
        for view in _pieces(tensor, page_axis, page_tokens, Where(key=f"tensors[{number}]"))
    ]
    found = {(v.shape[0], v.stride(0), v.shape[1], v.device) for v in views}
    if len(found) != 1:
        raise ConfigError(
            f"one number of pages, step and size of a page and device, not {found or 'none'}",
            where=Where(key="tensors"),
            remedy="adopt tensors of one shape, type and device; each component by itself",
        )
    pages, stride, nbytes, _ = found.pop()
    starts = np.asarray([view.data_ptr() for view in views], np.int64)
    layout = PageLayout(starts, stride, nbytes, pages)
    if layout.shares_bytes():
        raise ConfigError(
            "two of the tensors share memory",
            where=Where(key="tensors"),
            remedy="adopt each once, and no view of another one",
        )
    return DevicePages(layout, views)


def _pieces(
    tensor: torch.Tensor, page_axis: int, page_tokens: int | None, where: Where
) -> list[torch.Tensor]:
    """Views uint8 [pages, bytes] of one tensor, for each index of the axes before `page_axis`."""
    if not 0 <= page_axis < tensor.dim() or 0 in tensor.shape:
        raise ConfigError(
            f"shape {tuple(tensor.shape)} has no pages along axis {page_axis}",
            where=where,
            remedy="name the axis that numbers the pages",
        )
    nbytes = _bytes_behind(tensor, page_axis)
    if nbytes < 0:
        raise ConfigError(
            f"what is behind axis {page_axis} of {tuple(tensor.shape)} is not contiguous "
            f"(strides {tensor.stride()})",
            where=where,
            remedy="adopt the tensor that owns the memory, in its own order of axes",
        )
    step = tensor.stride(page_axis) * tensor.element_size()
    pages = tensor.shape[page_axis]
    if page_tokens is not None:
        if page_tokens < 1 or pages < page_tokens or step != nbytes:
            raise ConfigError(
                f"{pages} tokens of {nbytes} bytes, {step} bytes apart, make no pages of "
                f"{page_tokens}",
                where=where,
                remedy="tokens must follow each other, and fill at least one page",
            )
        pages, step, nbytes = pages // page_tokens, step * page_tokens, nbytes * page_tokens
    if pages > 1 and step < nbytes:
        raise ConfigError(
            f"pages of {nbytes} bytes, {step} bytes apart, overlap",
            where=where,
            remedy="adopt the tensor that owns the memory, not an expanded view of it",
        )
    rows = [tensor]
    for _ in range(page_axis):
        rows = [row for outer in rows for row in outer.unbind(0)]
    return [_strided(row, pages, step, nbytes) for row in rows]


def _bytes_behind(tensor: torch.Tensor, axis: int) -> int:
    """Bytes of one index of `axis`; -1 when they do not follow each other."""
    count = 1
    for size, stride in zip(tensor.shape[:axis:-1], tensor.stride()[:axis:-1], strict=True):
        if size > 1 and stride != count:
            return -1
        count *= size
    return count * tensor.element_size()


def _strided(row: torch.Tensor, pages: int, step: int, nbytes: int) -> torch.Tensor:
    storage = torch.empty(0, dtype=torch.uint8, device=row.device).set_(row.untyped_storage())
    first = row.storage_offset() * row.element_size()
    return storage.as_strided((pages, nbytes), (step, 1), first)


def _views(tensor: torch.Tensor, layout: PageLayout, word: torch.dtype) -> list[torch.Tensor]:
    """`tensor`, uint8 [pages, bytes] or [pieces, pages, bytes], as words, a view a piece."""
    rows = tensor.unbind(0) if tensor.dim() == 3 else (tensor,)
    assert all(row.shape == (layout.pages, layout.piece_bytes) for row in rows), "one layout"
    return [row.view(word) for row in rows]


def host_index(slots: npt.NDArray[np.int64]) -> torch.Tensor | slice:
    """A slice for a contiguous run: it is copied in place, without an index pass."""
    first, last = int(slots[0]), int(slots[-1])
    if last - first == len(slots) - 1 and bool((np.diff(slots) == 1).all()):
        return slice(first, last + 1)
    return torch.from_numpy(slots)


def host_runs(
    slots: npt.NDArray[np.int64], border: int, *, joined: bool, borders: Sequence[int] = ()
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Runs of host pages that one copy can cover: their first places in `slots`, and their lengths.

    `joined`: nothing lies between two pages. No run crosses a multiple of `border`: memory that was
    registered apart begins there. Nor does one cross a place in `borders`.
    """
    if not joined:
        return np.arange(len(slots)), np.ones(len(slots), np.int64)
    cut = np.ones(len(slots) + 1, np.bool_)
    cut[1:-1] = (np.diff(slots) != 1) | (slots[1:] % border == 0)
    cut[list(borders)] = True
    first = np.flatnonzero(cut[:-1])
    return first, np.diff(np.append(first, len(slots)))
