"""`TransferInterface`: copies for an engine that allocates its own KV cache and runs its own model.

Inside another engine its allocator is the authority. The same copies as in the runtime move the
bytes; the promise is weaker: which page is free, and when its bytes are complete, is the engine's
knowledge, told with `fence` and asked for with `Transfer.join`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvstrata.errors import ClosedError, InputError, Where
from kvstrata.gpu_runtime.base import LOOK_S, START_FAILED_CLOSE_S, STRANDED, Device, Event
from kvstrata.gpu_runtime.copy_queue import CopyPriority
from kvstrata.gpu_runtime.device_pages import DevicePages, PageCopy
from kvstrata.gpu_runtime.given import (
    check_chunks,
    check_counts,
    check_host,
    check_names,
    check_pinned,
    check_pools,
    is_whole,
    page_numbers,
)
from kvstrata.gpu_runtime.transfers import CopyQueues, CopyResult
from kvstrata.staging import Pages

PageNumbers = Mapping[str, Pages]
"""int64 [n] by pool, the same n in each: device pages, or host pages."""
Chunks = Mapping[str, torch.Tensor]
"""By pool: staging on the device, contiguous uint8 [pages, stride], address and stride multiples of
16. Storage that reaches the device itself (GPUDirect) reads into it and writes from it."""


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
        IntegrityError when the device broke before: it never ends then; and InputError for a group
        that is not there, as all below."""
        if self._event(group).query():
            return True
        self._device.check_fault()
        return False

    def wait(self, timeout_s: float | None = None, group: int = -1) -> bool:
        """Block the calling thread until it has ended; False when the time ran out. Raises as
        `done` does."""
        event, end_s = self._event(group), time.monotonic() + (timeout_s or 0.0)
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
        waits only until the copy is enqueued. With what is before it, that is at once up to MOST
        slices of MOST_BYTES in all (`copy_queue`; a group is a slice at least); of more, when the
        rest has moved, so what that is fenced behind must be able to end. What runs there next
        finds the bytes. Raises IntegrityError when the device broke before."""
        self._device.join(self._event(group))

    def on_complete(self, callback: Callable[[], None]) -> None:
        """Call `callback` once at its end, from a thread of the device. It must not wait."""
        self._events[-1].on_complete(callback)

    def _event(self, group: int) -> Event:
        if not is_whole(group) or not -self.groups <= group < self.groups:
            raise InputError(
                f"there is no group {group!r}",
                remedy=f"name one from 0 to {self.groups - 1}, or -1: the last",
                where=Where(key="group"),
            )
        return self._events[group]


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
        need no `pin`. Raises InputError for pages or pools that are not there, and for a page that
        is written twice."""
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
        layer, group i brings the layers before (i + 1) · layers / groups. Copies into the device
        go in the order of the calls. InputError as above."""
        ...

    def close(self, deadline_s: float) -> bool:
        """End what is under way; False when something may still run: all memory stays then, the
        engine's as well, until a later `close` says True."""
        ...


class AdoptedPools:
    """`TransferInterface` over pools that `adopt` made, and a device that it takes over: also when
    the constructor raises (ConfigError), the device is closed."""

    def __init__(self, pools: Mapping[str, DevicePages], device: Device) -> None:
        self._device = device
        self._host: dict[str, npt.NDArray[np.uint8]] = {}
        self._lent: dict[CopyResult, Chunks] = {}
        """Chunks of transfers under way: their memory is not given away before the end."""
        self._closed = False
        self._queues = CopyQueues(device)
        with ExitStack() as undo:
            undo.callback(device.close, START_FAILED_CLOSE_S)
            check_pools(pools, device.torch_device)
            self._pools = dict(pools)
            for pool in self._pools.values():
                device.prepare(pool)
            undo.pop_all()

    def pin(self, pool: str, host: npt.NDArray[np.uint8], chunk_pages: int | None = None) -> None:
        self._check_open()
        check_host(pool, host, chunk_pages, self._pools, self._host)
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
        if ended and self in STRANDED:  # not before
            STRANDED.remove(self)
        elif not ended and self not in STRANDED:
            STRANDED.append(self)
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
        check_names("pages", pages, self._pools)
        check_names("slots", slots, self._pools)
        if not is_whole(groups):
            raise InputError(
                f"{groups!r} groups", remedy="give a whole number", where=Where(key="groups")
            )
        if chunks is None:
            check_pinned(self._host, self._pools)
        else:
            check_chunks(chunks, self._pools)
        host = self._host if chunks is None else chunks
        numbers = {
            name: self._numbers(name, pages, slots, len(host[name]), groups, out=out)
            for name in self._pools
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

    def _numbers(
        self,
        name: str,
        pages: PageNumbers,
        slots: PageNumbers,
        host_pages: int,
        groups: int,
        *,
        out: bool,
    ) -> tuple[Pages, Pages]:
        memory = self._pools[name]
        device = page_numbers("pages", name, pages[name], memory.layout.pages, are_written=not out)
        host = page_numbers("slots", name, slots[name], host_pages, are_written=out)
        check_counts(name, device, host, groups, memory)
        return device, host

    def _check_open(self) -> None:
        self._device.check_fault()
        if self._closed:
            raise ClosedError("these pools are closed")


def _part(pieces: int, group: int, groups: int) -> slice:
    """Pieces of one of `groups` groups; they differ by one at most."""
    return slice(pieces * group // groups, pieces * (group + 1) // groups)
