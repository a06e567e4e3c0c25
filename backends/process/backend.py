"""`ProcessBackend`: a `StorageBackend` whose instance lives in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import msgspec

from kvstrata.backends.base import (
    BackendContext,
    Buffer,
    Health,
    HealthState,
    ObjectId,
    PageResult,
    ReadRequest,
    StorageBackend,
    StoredObject,
    Usage,
    WriteRequest,
)
from kvstrata.backends.phases import note_copy
from kvstrata.backends.policies import ProcessSettings
from kvstrata.backends.process import wire
from kvstrata.backends.process.child import Child
from kvstrata.backends.process.memory import CallMemory, RegionMap
from kvstrata.backends.process.supervisor import Supervisor
from kvstrata.errors import StorageUnavailableError


class ProcessBackend(StorageBackend):
    """Runs `plugin(options)` in a child process and passes every call on.

    The child maps the regions of the context, so payloads are never copied; buffers outside of them
    are, through memory of the call. It is started again, with a growing delay, whenever it ends or
    was killed; until then calls raise `StorageUnavailableError` at once. A call that is under way
    when the process dies raises the same, after the process was reaped: what it was lent is free.

    Threads: as `StorageBackend`. `kill` from any thread.
    """

    def __init__(
        self,
        plugin: type[StorageBackend],
        options: msgspec.Struct,
        settings: ProcessSettings | None = None,
    ) -> None:
        super().__init__(options)
        outline = plugin(options)  # does no I/O; what it is asked for does not need it open
        self._concurrency, self._max_batch = outline.concurrency, outline.max_batch
        target = f"{plugin.__module__}:{plugin.__qualname__}"
        self._supervisor = Supervisor(
            target, options, settings or ProcessSettings(), self._concurrency
        )
        self._regions = RegionMap(())

    @property
    def concurrency(self) -> int:
        return self._concurrency

    @property
    def max_batch(self) -> int:
        return self._max_batch

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none that is open."""
        child = self._supervisor.child
        return None if child is None else child.pid

    @property
    def restarts(self) -> int:
        """How often the process was started again."""
        return self._supervisor.restarts

    def wait_up(self, timeout_s: float) -> bool:
        """Wait until there is a process that is open; False if time ran out."""
        return self._supervisor.wait_up(timeout_s)

    # ── life ─────────────────────────────────────────────────────────────────────────────────────

    def open(self, context: BackendContext) -> None:
        """Raises what the backend's `open` raises, `StorageTimeoutError` after the deadline."""
        self._regions = RegionMap(context.regions)
        self._supervisor.open(context)

    def close(self, deadline_s: float) -> None:
        """The process gets most of `deadline_s` to close the backend, then it is killed."""
        self._supervisor.close(deadline_s)

    def kill(self, why: str) -> None:
        """End the process now; it is started again."""
        child = self._supervisor.child
        if child is not None:
            child.kill(why)

    # ── calls ────────────────────────────────────────────────────────────────────────────────────

    def exists(self, objects: Sequence[ObjectId]) -> list[bool]:
        return self._flags(wire.Exists(wire.pack_all(objects)), len(objects))

    def delete(self, objects: Sequence[ObjectId]) -> list[bool]:
        return self._flags(wire.Delete(wire.pack_all(objects)), len(objects))

    def read(self, requests: Sequence[ReadRequest]) -> list[PageResult]:
        memory = CallMemory()
        parts = self._parts([r.buffers for r in requests], memory)
        names = wire.pack_all([r.object for r in requests])
        return self._move(memory, wire.Read(names, parts, memory.nbytes), is_read=True)

    def write(self, requests: Sequence[WriteRequest]) -> list[PageResult]:
        memory = CallMemory()
        parts = self._parts([r.buffers for r in requests], memory)
        names = wire.pack_all([r.object for r in requests])
        parents = [b"" if r.parent is None else wire.pack(r.parent) for r in requests]
        depths = [r.depth for r in requests]
        request = wire.Write(names, parts, parents, depths, memory.nbytes)
        return self._move(memory, request, is_read=False)

    def scan(self, namespace: bytes | None = None) -> Iterator[StoredObject]:
        child = self._up()
        channel = child.scans.take()
        if channel is None:
            raise StorageUnavailableError(child.why)
        with child.using(child.scans, channel):
            request: wire.Message = wire.Scan(namespace)
            is_open = True
            try:
                while is_open:
                    answer = child.exchange(channel, request)
                    assert isinstance(answer, wire.Objects)
                    is_open = not answer.is_last
                    request = wire.ScanMore()
                    for name, nbytes, used_s in answer.found:
                        yield StoredObject(wire.unpack(name), nbytes, used_s)
            finally:
                if is_open:  # the caller has enough, or the child is gone
                    child.exchange(channel, wire.ScanEnd())

    def usage(self) -> Usage:
        child = self._up()
        answer = child.ask(child.asks, wire.AskUsage())
        assert isinstance(answer, wire.UsageIs)
        return answer.usage

    def health(self) -> Health:
        """Its own opinion; OPEN while there is no process."""
        child = self._supervisor.child
        if child is None:
            return Health(HealthState.OPEN, self._supervisor.down)
        answer = child.ask(child.asks, wire.AskHealth())
        assert isinstance(answer, wire.HealthIs)
        return wire.unpack_health(answer)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _up(self) -> Child:
        child = self._supervisor.child
        if child is None:
            raise StorageUnavailableError(self._supervisor.down)
        return child

    def _flags(self, request: wire.Message, count: int) -> list[bool]:
        child = self._up()
        answer = child.ask(child.data, request)
        assert isinstance(answer, wire.Flags)
        return answer.flags

    def _parts(self, lists: Sequence[Sequence[Buffer]], memory: CallMemory) -> wire.Parts:
        find, numbers = self._regions.find, list[int]()
        for buffers in lists:
            for buffer in buffers:
                numbers += find(buffer) or memory.place(buffer)
        return wire.Parts([len(buffers) for buffers in lists], numbers)

    def _move(
        self, memory: CallMemory, request: wire.Read | wire.Write, *, is_read: bool
    ) -> list[PageResult]:
        child = self._up()
        try:
            start = time.perf_counter()
            memory.make(copy_in=not is_read)
            copied = time.perf_counter() - start
            answer = child.ask(child.data, request, [memory.fd] if memory.fd >= 0 else ())
            assert isinstance(answer, wire.Results)
            if is_read and memory.fd >= 0:
                start = time.perf_counter()
                memory.copy_out()
                copied += time.perf_counter() - start
            note_copy(copied)
            return child.judge(lambda: wire.unpack_results(answer))
        finally:
            memory.close()
