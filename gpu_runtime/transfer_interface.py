"""`TransferInterface`: copies for an engine that allocates its own KV cache and runs its own model.

Inside another engine its allocator is the authority. The same copies as in the runtime move the
bytes; the promise is weaker: which page is free, and when its bytes are complete, is the engine's
knowledge, told with `fence` and asked for with `Transfer.join`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvstrata.errors import ClosedError, ConfigError, InputError, Where
from kvstrata.gpu_runtime.base import LOOK_S, START_FAILED_CLOSE_S, STRANDED, Device, Event
from kvstrata.gpu_runtime.copy_queue import CopyPriority
from kvstrata.gpu_runtime.device_pages import DevicePages, PageCopy
from kvstrata.gpu_runtime.transfers import CopyQueues, CopyResult
from kvstrata.staging import Pages

PageNumbers = Mapping[str, Pages]
"""int64 [n] by pool, the same n in each: device pages, or host pages."""
Chunks = Mapping[str, torch.Tensor]
"""By pool: staging on the device, contiguous uint8 [pages, stride], address and stride multiples of
16. Storage that reaches the device itself (GPUDirect) reads into it and writes from it."""


CHUNK_ALIGNMENT = 16
"""Bytes that a kernel loads at once."""


class Transfer:
    """A copy under way, in one or several groups of layers that end one after the other."""

    def __init__(self, device: Device, result: CopyResult, events: Sequence[Event]) -> None:
        self._device, self._result, self._events = device, result, tuple(events)

    @property
    def groups(self) -> int:
        return len(self._events)

    @property
    def error(self) -> str:
        """Why the copy failed, "" if it did not. Meaningful when `done`."""
        return self._result.error

    def done(self, group: int = -1) -> bool:
        """Whether the group, and those before it, have ended. Any thread; never blocks. Raises
        IntegrityError when the device broke before: it never ends then."""
        if self._events[group].query():
            return True
        self._device.check_fault()
        return False

    def wait(self, timeout_s: float | None = None, group: int = -1) -> bool:
        """Block the calling thread until it has ended; False when the time ran out. Raises as
        `done` does."""
        event, end_s = self._events[group], time.monotonic() + (timeout_s or 0.0)
        if timeout_s is None:
            self._device.await_unless_broken(event.wait)
            return True
        while not event.wait(max(0.0, min(LOOK_S, end_s - time.monotonic()))):
            self._device.check_fault()
            if time.monotonic() >= end_s:
                return False
        return True

    def join(self, group: int = -1) -> None:
        """Let the engine's stream (torch's current one) wait for the group, not the host; the host
        waits only until the copy is enqueued. What runs there next finds the bytes. Raises
        IntegrityError when the device broke before."""
        self._device.join(self._events[group])

    def on_complete(self, callback: Callable[[], None]) -> None:
        """Call `callback` once at its end, from a thread of the device. It must not wait."""
        self._events[-1].on_complete(callback)


class TransferInterface(Protocol):
    """What an engine's integration calls. One thread at a time; no call waits for a copy.

    Pages and host pages of a transfer belong to it until it is done: the engine neither writes nor
    reads nor frees them (of a `copy_out`, reading is allowed). The arrays that name them are the
    engine's again when the call returns. All but `close` raise IntegrityError when the device is
    broken, and ClosedError after `close`.

    A host page holds the pieces of a page, one after the other as the pool was adopted, in
    `DevicePages.page_bytes` bytes: `copy_out({"kv": pages}, {"kv": slots})` fills rows `slots` of
    what was pinned for "kv".
    """

    def pin(self, pool: str, host: npt.NDArray[np.uint8], chunk_pages: int | None = None) -> None:
        """Register host pages of `pool`, uint8 [pages, stride], in chunks of `chunk_pages`; once a
        pool, before the first copy. The memory stays until `close`. Raises ConfigError; pools that
        were pinned before stay so."""
        ...

    def fence(self) -> None:
        """Copies that are started from now on (and what still waits for its turn of those before)
        wait for what the engine has enqueued until now on torch's current stream: call it behind
        the kernels that wrote what is copied next, and those that read or write what it is copied
        to (`torch.zeros` of a chunk is one). What the host has waited for needs none."""
        ...

    def copy_out(
        self, pages: PageNumbers, slots: PageNumbers, *, chunks: Chunks | None = None
    ) -> Transfer:
        """Device pages into host pages, or into those of `chunks`, which stay until it is done and
        need no `pin`. Raises InputError for pages that are not there, and for a host page that is
        named twice."""
        ...

    def copy_in(
        self,
        pages: PageNumbers,
        slots: PageNumbers,
        *,
        groups: int = 1,
        chunks: Chunks | None = None,
    ) -> Transfer:
        """Host pages, or those of `chunks`, into device pages; with `groups` the pieces come in so
        many groups, in the order in which the pool was adopted, so that a model may begin before
        the last are there. Where `groups` divides the layers, and the pool was adopted layer by
        layer, group i brings the layers before (i + 1) · layers / groups. InputError as above."""
        ...

    def close(self, deadline_s: float) -> bool:
        """End what is under way; False when something may still run (all memory stays then, the
        engine's as well)."""
        ...


class AdoptedPools:
    """`TransferInterface` over pools that `adopt` made, and a device that it takes over: also when
    the constructor raises (ConfigError), the device is closed."""

    def __init__(self, pools: Mapping[str, DevicePages], device: Device) -> None:
        self._pools, self._device = dict(pools), device
        self._host: dict[str, npt.NDArray[np.uint8]] = {}
        self._lent: dict[CopyResult, Chunks] = {}
        """Chunks of transfers under way: their memory is not given away before the end."""
        self._closed = False
        self._queues = CopyQueues(device)
        with ExitStack() as undo:
            undo.callback(device.close, START_FAILED_CLOSE_S)
            self._check_pools()
            for pool in self._pools.values():
                device.prepare(pool)
            undo.pop_all()

    def pin(self, pool: str, host: npt.NDArray[np.uint8], chunk_pages: int | None = None) -> None:
        self._check_open()
        self._check_pin(pool, host, chunk_pages)
        memory, most = self._pools[pool], chunk_pages or len(host)
        chunks = [min(most, len(host) - at) * host.shape[1] for at in range(0, len(host), most)]
        self._device.pin(host.ctypes.data, chunks)
        memory.host_chunk_pages = most
        self._host[pool] = host

    def fence(self) -> None:
        self._check_open()
        event = self._device.fence()
        self._device.d2h.wait_event(event)
        self._device.h2d.wait_event(event)

    def copy_out(
        self, pages: PageNumbers, slots: PageNumbers, *, chunks: Chunks | None = None
    ) -> Transfer:
        return self._copy(pages, slots, CopyPriority.WRITE_BACK, 1, chunks, out=True)

    def copy_in(
        self,
        pages: PageNumbers,
        slots: PageNumbers,
        *,
        groups: int = 1,
        chunks: Chunks | None = None,
    ) -> Transfer:
        return self._copy(pages, slots, CopyPriority.RESTORE, groups, chunks, out=False)

    def close(self, deadline_s: float) -> bool:
        self._closed = True
        self._queues.flush()
        ended = self._device.close(deadline_s)
        if not ended:
            STRANDED.append((self._pools, self._host, self._lent))
        return ended

    def _copy(
        self,
        pages: PageNumbers,
        slots: PageNumbers,
        priority: CopyPriority,
        groups: int,
        chunks: Chunks | None,
        *,
        out: bool,
    ) -> Transfer:
        self._check_open()
        host = self._host if chunks is None else chunks
        for what, given in (("pages", pages), ("slots", slots), ("chunks", host)):
            if not isinstance(given, Mapping):
                raise InputError(
                    f"{what} are a {type(given).__name__}, not one for each pool",
                    remedy=f"name the pool: {what}={{{next(iter(self._pools))!r}: ...}}",
                    where=Where(key=what),
                )
        if not isinstance(groups, int):
            raise InputError(
                f"{groups!r} groups", remedy="give a whole number", where=Where(key="groups")
            )
        if chunks is not None:
            self._check_chunks(chunks)
        numbers = {
            name: self._numbers(name, pages, slots, host, groups, out=out) for name in self._pools
        }
        copies = [
            [
                PageCopy(
                    memory,
                    numbers[name][0],
                    host[name],
                    numbers[name][1],
                    _part(memory.layout.pieces, group, groups),
                )
                for name, memory in self._pools.items()
            ]
            for group in range(groups)
        ]
        result = CopyResult()
        events = self._queues.add(copies, priority, result, out=out)
        if chunks is not None:
            self._lent[result] = dict(chunks)
            events[-1].on_complete(lambda: self._lent.__delitem__(result))
        return Transfer(self._device, result, events)

    # ── what is given ────────────────────────────────────────────────────────────────────────────

    def _check_open(self) -> None:
        self._device.check_fault()
        if self._closed:
            raise ClosedError("these pools are closed")

    def _check_pools(self) -> None:
        if not self._pools:
            raise ConfigError("no pools", remedy="adopt one at least", where=Where(key="pools"))
        for name, memory in self._pools.items():
            if memory.device != self._device.torch_device:
                raise ConfigError(
                    f"pool {name!r} is on {memory.device}, not on {self._device.torch_device}",
                    remedy="give each device its own pools",
                    where=Where(key=name),
                )

    def _check_pin(self, pool: str, host: npt.NDArray[np.uint8], chunk_pages: int | None) -> None:
        if pool not in self._pools or pool in self._host:
            raise ConfigError(
                f"pool {pool!r} is " + ("pinned" if pool in self._host else "not there"),
                remedy=f"pin each of {sorted(self._pools)} once",
                where=Where(key=pool),
            )
        least = self._pools[pool].page_bytes
        shaped = host.dtype == np.uint8 and host.ndim == 2 and 0 not in host.shape
        writable = host.flags.c_contiguous and host.flags.writeable
        word = self._pools[pool].layout.word_bytes
        if not (shaped and writable) or host.shape[1] < least or host.shape[1] % word:
            raise ConfigError(
                f"host pages of {pool!r} must be contiguous and writable uint8 [pages, stride], "
                f"stride at least {least} and a multiple of {word}, not {host.dtype} {host.shape}",
                remedy="allocate them with a stride of a page's bytes, rounded up to 4096",
                where=Where(key=pool),
            )
        for name, other in self._host.items():
            if np.may_share_memory(host, other):
                raise ConfigError(
                    f"host pages of {pool!r} are those of {name!r} as well",
                    remedy="allocate memory for each pool",
                    where=Where(key=pool),
                )
        if chunk_pages is not None and chunk_pages < 1:
            raise ConfigError(
                f"chunks of {chunk_pages} pages",
                remedy="register at least one page at a time",
                where=Where(key=pool),
            )

    def _check_chunks(self, chunks: Chunks) -> None:
        taken: list[tuple[int, int]] = []
        for name, memory in self._pools.items():
            chunk: object = chunks.get(name)
            if not isinstance(chunk, torch.Tensor):
                found = type(chunk).__name__
            elif not _can_stage(chunk, memory):
                found = f"{chunk.dtype} {tuple(chunk.shape)} on {chunk.device}"
            elif self._is_in_use(span := _span(chunk), taken):
                found = "memory of a pool or of another chunk"
            else:
                taken.append(span)
                continue
            raise InputError(
                f"a chunk of {name!r} must be a contiguous tensor uint8 [pages, stride] on "
                f"{memory.device}, stride at least {memory.page_bytes}, address and stride "
                f"multiples of {CHUNK_ALIGNMENT}, not {found}",
                remedy="allocate one for every pool, with the stride rounded up to 4096",
                where=Where(key=name),
            )

    def _is_in_use(self, span: tuple[int, int], taken: Sequence[tuple[int, int]]) -> bool:
        return any(begin < span[1] and span[0] < end for begin, end in taken) or any(
            memory.layout.overlaps(*span) for memory in self._pools.values()
        )

    def _numbers(
        self,
        name: str,
        pages: PageNumbers,
        slots: PageNumbers,
        hosts: Mapping[str, npt.NDArray[np.uint8]] | Chunks,
        groups: int,
        *,
        out: bool,
    ) -> tuple[Pages, Pages]:
        """Copies of the numbers of one pool, int64: the engine may write into its own at once."""
        memory = self._pools[name]
        for what, given in (("pages", pages), ("slots", slots), ("pinned host memory", hosts)):
            if name not in given:
                raise InputError(
                    f"no {what} of pool {name!r}",
                    remedy="pin each pool once, and name pages and slots of every pool",
                    where=Where(key=name),
                )
        device = _checked(f"page numbers of {name!r}", pages[name], memory.layout.pages, not out)
        host = _checked(f"slot numbers of {name!r}", slots[name], len(hosts[name]), out)
        if len(device) != len(host) or not 1 <= groups <= memory.layout.pieces:
            raise InputError(
                f"{len(device)} pages, {len(host)} host pages, {groups} groups of "
                f"{memory.layout.pieces} pieces",
                remedy="as many host pages as pages, and at most as many groups as pieces",
                where=Where(key=name),
            )
        return device, host


def _checked(what: str, given: Pages, limit: int, are_written: bool) -> Pages:
    """`given` as int64 of our own: of fewer bits, an address that is made of them overflows."""
    numbers: npt.NDArray[Any]
    try:
        numbers = np.asarray(given)
    except ValueError:  # lists of different lengths
        numbers = np.empty(0, np.bool_)
    good = numbers.ndim == 1 and len(numbers) > 0 and numbers.dtype.kind in "iu"
    if not good or numbers.min() < 0 or numbers.max() >= limit:
        raise InputError(
            f"{what} are not integers, all between 0 and {limit - 1}",
            remedy="name pages that the pool has, and one at least",
            where=Where(key="pages"),
        )
    if are_written and len(np.unique(numbers)) != len(numbers):
        raise InputError(
            f"{what} name one that is written twice",
            remedy="name each page that a copy writes once",
            where=Where(key="pages"),
        )
    return np.array(numbers, np.int64)


def _can_stage(chunk: torch.Tensor, memory: DevicePages) -> bool:
    if chunk.layout is not torch.strided or chunk.dim() != 2 or chunk.is_neg():
        return False
    starts = (chunk.data_ptr(), chunk.storage_offset(), chunk.shape[1])
    return (
        (chunk.dtype, chunk.device) == (torch.uint8, memory.device)
        and chunk.stride() == (chunk.shape[1], 1)
        and chunk.shape[1] >= memory.page_bytes
        and not any(start % CHUNK_ALIGNMENT for start in starts)
    )


def _span(chunk: torch.Tensor) -> tuple[int, int]:
    """Addresses of its first byte and behind its last."""
    return chunk.data_ptr(), chunk.data_ptr() + chunk.numel()


def _part(pieces: int, group: int, groups: int) -> slice:
    """Pieces of one of `groups` groups; they differ by one at most."""
    return slice(pieces * group // groups, pieces * (group + 1) // groups)
