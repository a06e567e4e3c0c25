"""Interfaces inside the runtime: device, stream, event, and the ModelRunner it drives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvstrata.errors import IntegrityError

if TYPE_CHECKING:
    from kvstrata.gpu_runtime.device_pages import DevicePages, PageCopy
    from kvstrata.gpu_runtime.pools import ComponentPool
    from kvstrata.gpu_runtime.req_to_token import ReqToToken


LOOK_S = 0.1
"""Who waits for what a stream of a device brings looks this often whether the device is broken."""


START_FAILED_CLOSE_S = 5.0
"""For what was started, when a constructor raises."""
STRANDED: list[object] = []
"""Pools and host memory that a device did not let go of: they stay, mapped and registered, for
good, because something may still write them."""


class Event(ABC):
    """A point in a stream. Complete when all work enqueued before it has ended."""

    @abstractmethod
    def query(self) -> bool:
        """Whether it is complete. Any thread, never blocks."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> bool:
        """Block the calling host thread until complete; False when the time ran out."""

    @abstractmethod
    def on_complete(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when complete (at once if it is), from a thread of the device.

        Callbacks of one stream run in order, and those of an event before those of any event whose
        stream waited for it. They must be short and must not wait for the device.
        """


class Stream(ABC):
    """An ordered queue of device work."""

    name: str

    @abstractmethod
    def enqueue(self, work: Callable[[], None], nbytes: int = 0) -> None:
        """Run `work` after everything enqueued before. Returns at once. `work` must not raise:
        what it touches stays alive until it ran. `nbytes` it moves go into the timeline."""

    @abstractmethod
    def new_event(self) -> Event:
        """An event of this stream that is not recorded yet. It may be waited for at once: by a
        stream, or with a callback; it completes after it was recorded."""

    @abstractmethod
    def record(self, event: Event | None = None) -> Event:
        """Put `event`, made by `new_event` of this stream and not recorded before, or a new one
        behind everything enqueued so far."""

    @abstractmethod
    def wait_event(self, event: Event) -> None:
        """Work enqueued later starts only when `event` is complete. Does not block the host."""


class Device(ABC):
    """One execution device with a compute stream and a copy stream each way."""

    torch_device: torch.device
    compute: Stream
    h2d: Stream
    d2h: Stream

    fault: BaseException | None = None
    """What broke the device. Its events do not complete then; the runtime refuses further work."""

    def await_unless_broken(self, wait: Callable[[float], bool]) -> None:
        """Call `wait(seconds)` until it says True. Raises IntegrityError when the device is broken:
        what is waited for may never come."""
        while not wait(LOOK_S):
            self.check_fault()

    def check_fault(self) -> None:
        """Raise IntegrityError when the device is broken."""
        if self.fault is not None:
            raise IntegrityError(f"the device is broken: {self.fault!r}") from self.fault

    @abstractmethod
    def close(self, deadline_s: float) -> bool:
        """End all streams after what is enqueued; False when something was still running."""

    copy_slice_bytes: int = 180 << 20
    """A copy that is larger goes in slices, between which a more urgent one may go. Of most pages,
    three of a GPU's chunks of 64 MiB."""

    def copy_out(self, copy: PageCopy) -> None:
        """Device pages into host pages. Work for the D2H stream: called on its thread, returns when
        it is enqueued there, which may be when most of it has moved."""
        copy.memory.gather(copy)

    def copy_in(self, copy: PageCopy) -> None:
        """Host pages into device pages: the mirror image of `copy_out`, for the H2D stream."""
        copy.memory.scatter(copy)

    def fence(self) -> Event:
        """An event behind what the calling thread has enqueued on the device outside of our
        streams, where a model that somebody else runs does."""
        raise NotImplementedError

    def join(self, event: Event) -> None:
        """What the calling thread enqueues on the device outside of our streams from now on waits
        for `event`. Blocks until the event is recorded, which is when its work is enqueued."""
        raise NotImplementedError

    def prepare(self, memory: DevicePages) -> None:
        """Make ready what copies of `memory` need, so that none pays for it. Before the first."""
        del memory

    def pin(self, address: int, chunk_bytes: Sequence[int]) -> None:
        """Register host memory for direct copies, in consecutive chunks; no copy crosses a border.

        All or nothing: raises ConfigError when a chunk is refused. Undone by `close`.
        """
        del address, chunk_bytes  # host memory is as good as any on a device that is the host


@dataclass(eq=False, slots=True)
class ForwardRow:
    """One row of one forward step: compute positions `start … start + count - 1`.

    `tokens` is int32 [n], n ≥ start + count, the request's tokens from position 0. KV of the
    positions before `start` is in the pools already; all of it is found through ReqToToken row
    `slot`. `attached_pages` leading pages came from a cache (a page that `start` points into is a
    private copy of one). `samples` is True when the step ends the prompt or decodes. `room` is how
    many tokens a sampling row may return: 1 at the end of a prompt, and in a decode as many as it
    has positions for, so that a speculating runner can return all that it accepted.
    """

    slot: int
    namespace: bytes
    tokens: npt.NDArray[np.int32]
    start: int
    count: int
    attached_pages: int
    first_in_batch: bool
    samples: bool
    room: int = 1
    payload: bytes = b""
    generation: int = 0
    """Of the request. Slots are used again: what a runner keeps for a request it keeps by both."""


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What a forward step may touch. Valid during the call only."""

    pools: Mapping[str, ComponentPool]
    req_to_token: ReqToToken
    page_tokens: int


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """`sampled[i]` are the new tokens of row i, 1 … `room` of them, or none where it does not
    sample. With n tokens of a decode, KV of n positions from `start` on is in place: that of the
    last token never is. `failed` says of a row, by its index, why it alone cannot go on."""

    sampled: Sequence[Sequence[int]]
    counters: dict[str, int] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)


class ModelRunner(Protocol):
    """Computes KV and tokens. Called on the compute stream's thread, one step at a time, with the
    KV of everything before `start` in place. It writes only positions from `start` on that the row
    has pages for (`count`, or `room` in a decode).
    What one request has brought about ends that one (`ForwardResult.failed`); an exception ends the
    whole batch: all its rows are ABORTED."""

    def forward(self, rows: Sequence[ForwardRow], context: ForwardContext) -> ForwardResult: ...
