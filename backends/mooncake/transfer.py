"""Frames through the client, in calls that end well within a lease."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvstrata.backends.base import Buffer, HostRegion
from kvstrata.backends.mooncake.client import Client
from kvstrata.backends.mooncake.codes import BAD_PARAMETERS, LEASE_EXPIRED, TRANSFER_FAILED
from kvstrata.backends.mooncake.memory import FrameWindow, Memory, Span, Spans

_FIRST_GUESS_BYTES_PER_S = 100e6
_LEASE_SHARE = 0.5
_TELLING_BYTES = 1 << 20


class Pace:
    """How many bytes a call may move: what arrives within half a lease, as measured. Any thread."""

    def __init__(self, lease_s: float, most_bytes: int) -> None:
        self._lease_s = lease_s
        self._most = most_bytes
        self._lock = threading.Lock()
        self._bytes_per_s = _FIRST_GUESS_BYTES_PER_S

    @property
    def limit_bytes(self) -> int:
        allowed = self._bytes_per_s * self._lease_s * _LEASE_SHARE
        return max(1, min(self._most, int(allowed)))

    def moved(self, nbytes: int, seconds: float) -> None:
        """Falls at once, and rises slowly. Of short calls only the latency would be measured."""
        if nbytes < _TELLING_BYTES and seconds < self._lease_s / 8:
            return
        rate = nbytes / max(seconds, 1e-6)
        with self._lock:
            known = self._bytes_per_s
            self._bytes_per_s = rate if rate < known else known + 0.2 * (rate - known)

    def too_slow(self) -> None:
        """A lease has expired all the same."""
        with self._lock:
            self._bytes_per_s /= 2


@dataclass(frozen=True, slots=True)
class Item:
    """One object of a call."""

    key: str
    span: Span
    buffers: Sequence[Buffer]

    @property
    def nbytes(self) -> int:
        return sum(self.span.sizes)


class Transfers:
    """Any thread. Buffers are used during a call only."""

    def __init__(self, regions: Sequence[HostRegion], pace: Pace, *, is_contiguous: bool) -> None:
        """`is_contiguous`: give the client each frame in one piece (`FrameWindow`). Over RDMA
        pieces cost nothing, and memory that is registered must not be mapped anew."""
        self._regions = tuple(regions)
        self.window = FrameWindow(regions) if is_contiguous else None
        self._spans = Spans(regions, self.window)
        self._pace = pace

    def register(self, client: Client) -> None:
        """Once for each client: everything that frames of the page path lie in."""
        for region in self._regions:
            client.register(region.address, region.nbytes)
        if self.window is not None:
            client.register(self.window.memory.address, self.window.memory.nbytes)

    def close(self) -> None:
        """When no call is under way and no client is left."""
        if self.window is not None:
            self.window.memory.free()

    def check_integrity(self) -> None:
        if self.window is not None:
            self.window.check_integrity()

    @contextlib.contextmanager
    def spans(self, client: Client, lists: Sequence[Sequence[Buffer]]) -> Iterator[list[Span]]:
        """A span for each list of buffers."""
        found = [self._spans.known(buffers) for buffers in lists]
        strangers = [i for i, span in enumerate(found) if span is None]
        sizes = [sum(buffer.nbytes for buffer in lists[i]) for i in strangers]
        try:
            with scratch(client, sum(sizes)) as memory:
                at = 0
                for i, size in zip(strangers, sizes, strict=True):
                    found[i] = self._spans.copied(lists[i], memory, at)
                    at += size
                yield [span for span in found if span is not None]
        finally:
            for span in found:
                if span is not None:
                    span.release()

    def put(self, client: Client, items: Sequence[Item], segments: Sequence[str]) -> list[int]:
        """A code each. The spans are loaded."""

        def whole(part: Sequence[Item]) -> list[int]:
            addresses = [item.span.addresses[0] for item in part]
            sizes = [item.span.sizes[0] for item in part]
            return client.put([item.key for item in part], addresses, sizes, segments)

        def pieces(part: Sequence[Item]) -> list[int]:
            addresses = [item.span.addresses for item in part]
            sizes = [item.span.sizes for item in part]
            return client.put_parts([item.key for item in part], addresses, sizes, segments)

        return self._run(items, whole, pieces)

    def get(self, client: Client, items: Sequence[Item]) -> list[int]:
        """Bytes that are in the buffers now, or a code, each."""

        def whole(part: Sequence[Item]) -> list[int]:
            addresses = [item.span.addresses[0] for item in part]
            sizes = [item.span.sizes[0] for item in part]
            return client.get([item.key for item in part], addresses, sizes)

        def pieces(part: Sequence[Item]) -> list[int]:
            addresses = [item.span.addresses for item in part]
            sizes = [item.span.sizes for item in part]
            return client.get_parts([item.key for item in part], addresses, sizes)

        codes = self._run(items, whole, pieces)
        for i, item in enumerate(items):
            if codes[i] == LEASE_EXPIRED:
                self._pace.too_slow()
                codes[i] = self._run([item], whole, pieces)[0]
            if codes[i] >= 0:
                item.span.store(codes[i])
            elif _may_be_size(codes[i], item.span):
                codes[i] = self._get_other_size(client, item, codes[i])
        return codes

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _run(
        self,
        items: Sequence[Item],
        whole: Callable[[Sequence[Item]], list[int]],
        pieces: Callable[[Sequence[Item]], list[int]],
    ) -> list[int]:
        codes = [0] * len(items)
        for call, is_whole in ((whole, True), (pieces, False)):
            mine = [i for i, item in enumerate(items) if item.span.is_whole is is_whole]
            for part in self._parts(items, mine):
                start = time.perf_counter()
                found = call([items[i] for i in part])
                seconds = time.perf_counter() - start
                for i, code in zip(part, found, strict=True):
                    codes[i] = code
                if all(code >= 0 for code in found):
                    self._pace.moved(sum(items[i].nbytes for i in part), seconds)
        return codes

    def _parts(self, items: Sequence[Item], indices: Sequence[int]) -> Iterator[list[int]]:
        part: list[int] = []
        nbytes = 0
        for i in indices:
            if part and nbytes + items[i].nbytes > self._pace.limit_bytes:
                yield part
                part, nbytes = [], 0
            part.append(i)
            nbytes += items[i].nbytes
        if part:
            yield part

    def _get_other_size(self, client: Client, item: Item, code: int) -> int:
        """The object may be longer or shorter than the buffers: read what is there."""
        size, asked = client.size(item.key), item.nbytes
        if size < 0:
            return size
        if size == asked:
            return code
        with scratch(client, size) as memory:
            found = client.get([item.key], [memory.address], [size])[0]
            if found < 0:
                return found
            at = 0
            for buffer in item.buffers:
                count = min(buffer.nbytes, found - at)
                buffer[:count] = memory.view[at : at + count]
                at += count
            return at


def _may_be_size(code: int, span: Span) -> bool:
    return code == BAD_PARAMETERS or (code == TRANSFER_FAILED and not span.is_whole)


@contextlib.contextmanager
def scratch(client: Client, nbytes: int) -> Iterator[Memory]:
    """Registered memory for one call."""
    memory = Memory(nbytes)
    try:
        if nbytes:
            client.register(memory.address, memory.nbytes)
        try:
            yield memory
        finally:
            if nbytes:
                client.unregister(memory.address)
    finally:
        memory.free()
