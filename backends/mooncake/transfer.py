"""Frames through the client, in calls that end well within a lease."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kvstrata.backends.base import Buffer, HostRegion
from kvstrata.backends.mooncake.client import Client
from kvstrata.backends.mooncake.codes import BAD_PARAMETERS, LEASE_EXPIRED, TRANSFER_FAILED
from kvstrata.backends.mooncake.memory import FrameWindow, Memory, Span, Spans
from kvstrata.errors import StorageError

_FIRST_GUESS_BYTES_PER_S = 100e6
_LEASE_SHARE = 0.5
_TELLING_BYTES = 1 << 20


_Call = Callable[[list[str], Sequence[Span]], list[int]]


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
        found = self._spans.known(lists)
        strangers = [i for i, span in enumerate(found) if span is None]
        sizes = [sum(buffer.nbytes for buffer in lists[i]) for i in strangers]
        try:
            with scratch(client, sum(sizes)) if strangers else contextlib.nullcontext() as memory:
                at = 0
                for i, size in zip(strangers, sizes, strict=True):
                    assert memory is not None
                    found[i] = self._spans.copied(lists[i], memory, at)
                    at += size
                yield [span for span in found if span is not None]
        finally:
            self._spans.release(found)

    def put(
        self, client: Client, keys: Sequence[str], spans: Sequence[Span], segments: Sequence[str]
    ) -> list[int]:
        """A code each. The spans are loaded."""

        def whole(names: list[str], part: Sequence[Span]) -> list[int]:
            addresses = [span.addresses[0] for span in part]
            return client.put(names, addresses, [span.nbytes for span in part], segments)

        def pieces(names: list[str], part: Sequence[Span]) -> list[int]:
            addresses = [span.addresses for span in part]
            return client.put_parts(names, addresses, [span.sizes for span in part], segments)

        return self._run(keys, spans, whole, pieces)

    def get(
        self,
        client: Client,
        keys: Sequence[str],
        spans: Sequence[Span],
        lists: Sequence[Sequence[Buffer]],
    ) -> list[int]:
        """Bytes that are in the buffers (`lists`, one list a span) now, or a code, each."""

        def whole(names: list[str], part: Sequence[Span]) -> list[int]:
            addresses = [span.addresses[0] for span in part]
            return client.get(names, addresses, [span.nbytes for span in part])

        def pieces(names: list[str], part: Sequence[Span]) -> list[int]:
            addresses = [span.addresses for span in part]
            return client.get_parts(names, addresses, [span.sizes for span in part])

        codes = self._run(keys, spans, whole, pieces)
        for i, span in enumerate(spans):
            code = codes[i]
            if code == LEASE_EXPIRED:
                self._pace.too_slow()
                code = codes[i] = self._run([keys[i]], [span], whole, pieces)[0]
            if code >= 0:
                span.store(code)
            elif _may_be_size(code, span):
                codes[i] = self._get_other_size(client, keys[i], span, lists[i], code)
        return codes

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _run(
        self, keys: Sequence[str], spans: Sequence[Span], whole: _Call, pieces: _Call
    ) -> list[int]:
        """A code each; those in one piece and those in several go in different calls."""
        mine = [i for i, span in enumerate(spans) if span.is_whole]
        if len(mine) == len(spans):
            return self._calls(keys, spans, whole)
        codes = [0] * len(spans)
        rest = [i for i, span in enumerate(spans) if not span.is_whole]
        for indices, call in ((mine, whole), (rest, pieces)):
            found = self._calls([keys[i] for i in indices], [spans[i] for i in indices], call)
            for i, code in zip(indices, found, strict=True):
                codes[i] = code
        return codes

    def _calls(self, keys: Sequence[str], spans: Sequence[Span], call: _Call) -> list[int]:
        """As many calls as it takes."""
        codes: list[int] = []
        while (first := len(codes)) < len(spans):
            end, nbytes = self._part(spans, first)
            start = time.perf_counter()
            found = call(list(keys[first:end]), spans[first:end])
            seconds = time.perf_counter() - start
            if len(found) != end - first:
                raise StorageError(f"the client gave {len(found)} codes for {end - first} objects")
            codes += found
            if min(found) >= 0:
                self._pace.moved(nbytes, seconds)
        return codes

    def _part(self, spans: Sequence[Span], first: int) -> tuple[int, int]:
        """The end of what one call may move, from `first`, and its bytes."""
        nbytes, limit = spans[first].nbytes, self._pace.limit_bytes
        for end in range(first + 1, len(spans)):
            more = nbytes + spans[end].nbytes
            if more > limit:
                return end, nbytes
            nbytes = more
        return len(spans), nbytes

    def _get_other_size(
        self, client: Client, key: str, span: Span, buffers: Sequence[Buffer], code: int
    ) -> int:
        """The object may be longer or shorter than the buffers: read what is there."""
        size = client.size(key)
        if size < 0:
            return size
        if size == span.nbytes:
            return code
        with scratch(client, size) as memory:
            found = client.get([key], [memory.address], [size])[0]
            if found < 0:
                return found
            at = 0
            for buffer in buffers:
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
