"""`TransferInterface`: copies for an engine that allocates its own KV cache and runs its own model.

Inside another engine its allocator is the authority. The same copies as in the runtime move the
bytes; the promise is weaker: which page is free, and when its bytes are complete, is the engine's
knowledge, told with `fence` and asked for with `Transfer.join`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstrata.errors import ConfigError, InputError, Where
from kvstrata.gpu_runtime.base import Device, Event
from kvstrata.gpu_runtime.copy_queue import CopyPriority, CopyQueue, Slice
from kvstrata.gpu_runtime.device_pages import DevicePages, PageCopy
from kvstrata.gpu_runtime.transfers import CopyResult, run_slice, slices_of
from kvstrata.staging import Pages

PageNumbers = Mapping[str, Pages]
"""int64 [n] by pool, the same n in each: device pages, or host pages."""


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
        """Whether the group, and those before it, have ended. Any thread; never blocks."""
        return self._events[group].query()

    def wait(self, timeout_s: float | None = None, group: int = -1) -> bool:
        """Block the calling thread until it has ended; False when the time ran out."""
        return self._events[group].wait(timeout_s)

    def join(self, group: int = -1) -> None:
        """Let the engine's stream (torch's current one) wait for the group, not the host; the host
        waits only until the copy is enqueued. What runs there next finds the bytes."""
        self._device.join(self._events[group])

    def on_complete(self, callback: Callable[[], None]) -> None:
        """Call `callback` once at its end, from a thread of the device. It must not wait."""
        self._events[-1].on_complete(callback)


class TransferInterface(Protocol):
    """What an engine's integration calls. One thread at a time; no call waits for a copy.

    Pages and host pages of a transfer belong to it until it is done: the engine neither writes nor
    reads nor frees them (of a `copy_out`, reading is allowed).
    """

    def pin(self, pool: str, host: npt.NDArray[np.uint8], chunk_pages: int | None = None) -> None:
        """Register host pages of `pool`, uint8 [pages, stride], in chunks of `chunk_pages`; before
        the first copy. The memory stays until `close`. Raises ConfigError."""
        ...

    def fence(self) -> None:
        """Copies that are started from now on wait for what the engine has enqueued until now on
        torch's current stream: call it behind the kernels that wrote the pages (or read them)."""
        ...

    def copy_out(self, pages: PageNumbers, slots: PageNumbers) -> Transfer:
        """Device pages into host pages. Raises InputError for pages that are not there."""
        ...

    def copy_in(self, pages: PageNumbers, slots: PageNumbers, *, groups: int = 1) -> Transfer:
        """Host pages into device pages; with `groups` the layers come in so many groups, the first
        layers first, so that a model may begin before the last are there."""
        ...

    def close(self, deadline_s: float) -> bool:
        """End what is under way; False when something was still running (its memory stays)."""
        ...


class AdoptedPools:
    """`TransferInterface` over pools that `adopt` made, and a device that it takes over."""

    def __init__(self, pools: Mapping[str, DevicePages], device: Device) -> None:
        if not pools:
            raise ConfigError("no pools", remedy="adopt one at least", where=Where(key="pools"))
        self._pools, self._device = dict(pools), device
        self._host: dict[str, npt.NDArray[np.uint8]] = {}
        self._out, self._in = CopyQueue(device.d2h), CopyQueue(device.h2d)
        for pool in self._pools.values():
            device.prepare(pool)

    def pin(self, pool: str, host: npt.NDArray[np.uint8], chunk_pages: int | None = None) -> None:
        memory = self._pools[pool]
        if host.ndim != 2 or host.shape[1] < memory.page_bytes or not host.flags.c_contiguous:
            raise ConfigError(
                f"host pages of {pool!r} must be contiguous uint8 [pages, stride], stride at least "
                f"{memory.page_bytes}, not {host.shape}",
                remedy="allocate them with a stride of a page's bytes, rounded up to 4096",
                where=Where(key=pool),
            )
        most = chunk_pages or len(host)
        chunks = [min(most, len(host) - at) * host.shape[1] for at in range(0, len(host), most)]
        self._device.pin(host.ctypes.data, chunks)
        memory.host_chunk_pages = most
        self._host[pool] = host

    def fence(self) -> None:
        event = self._device.fence()
        self._device.d2h.wait_event(event)
        self._device.h2d.wait_event(event)

    def copy_out(self, pages: PageNumbers, slots: PageNumbers) -> Transfer:
        return self._copy(pages, slots, CopyPriority.WRITE_BACK, 1)

    def copy_in(self, pages: PageNumbers, slots: PageNumbers, *, groups: int = 1) -> Transfer:
        return self._copy(pages, slots, CopyPriority.RESTORE, groups)

    def close(self, deadline_s: float) -> bool:
        self._out.flush()
        self._in.flush()
        return self._device.close(deadline_s)

    def _copy(
        self, pages: PageNumbers, slots: PageNumbers, priority: CopyPriority, groups: int
    ) -> Transfer:
        self._check(pages, slots, groups)
        device, result = self._device, CopyResult()
        out = priority is CopyPriority.WRITE_BACK
        move = device.copy_out if out else device.copy_in
        queued: list[list[Slice]] = []
        for group in range(groups):
            copies = [
                PageCopy(memory, pages[name], self._host[name], slots[name], part)
                for name, memory in self._pools.items()
                for part in (_part(memory.layout.pieces, group, groups),)
            ]
            queued.append(
                [
                    Slice(partial(run_slice, result, partial(move, piece)), piece.nbytes)
                    for copy in copies
                    for piece in slices_of(copy, device.copy_slice_bytes)
                ]
            )
        return Transfer(device, result, (self._out if out else self._in).add(queued, priority))

    def _check(self, pages: PageNumbers, slots: PageNumbers, groups: int) -> None:
        for name, memory in self._pools.items():
            if name not in pages or name not in slots or name not in self._host:
                raise InputError(
                    f"no pages, host pages or pinned memory of pool {name!r}",
                    remedy="pin each pool once, and name pages of every pool in each copy",
                    where=Where(key=name),
                )
            most, host = memory.layout.pages, len(self._host[name])
            for what, numbers, limit in (("page", pages[name], most), ("slot", slots[name], host)):
                if not len(numbers) or numbers.min() < 0 or numbers.max() >= limit:
                    raise InputError(
                        f"{what} numbers of {name!r} are not all between 0 and {limit - 1}",
                        remedy="name pages that the pool has, and one at least",
                        where=Where(key=name),
                    )
            if len(pages[name]) != len(slots[name]) or not 1 <= groups <= memory.layout.pieces:
                raise InputError(
                    f"{len(pages[name])} pages, {len(slots[name])} host pages, {groups} groups of "
                    f"{memory.layout.pieces} pieces",
                    remedy="as many host pages as pages, and at most as many groups as pieces",
                    where=Where(key=name),
                )


def _part(pieces: int, group: int, groups: int) -> slice:
    """Pieces of one of `groups` groups; they differ by one at most."""
    return slice(pieces * group // groups, pieces * (group + 1) // groups)
