"""The process of a backend: `python -m kvstrata.backends.process.host PARENT_PID FD,FD,…`.

Started by `Child`. The sockets are its only ties to the parent; each has a thread of its own, which
takes one request after the other. The last socket tells of evictions, and by its end that the
parent is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from kvstrata.backends.base import (
    BackendContext,
    Buffer,
    ObjectId,
    ReadRequest,
    StorageBackend,
    StoredObject,
    Usage,
    WriteRequest,
)
from kvstrata.backends.process import wire
from kvstrata.backends.process.memory import MappedRegion
from kvstrata.backends.process.wire import Channel, Message
from kvstrata.errors import StorageError

SCAN_BATCH = 1024
_PR_SET_PDEATHSIG = 1
_MOST_LIKELY_OOM = "900"

logger = logging.getLogger(__name__)


class Host:
    """The backend, and the threads that serve it."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        *self._serving, self._events = channels
        self._events_lock = threading.Lock()
        self._closed = threading.Event()
        self._regions: list[MappedRegion] = []

    def run(self) -> None:
        """From the first message, `Open`, until the backend is closed. Main thread."""
        threading.Thread(target=self._watch_parent, name="parent", daemon=True).start()
        first = self._serving[0]
        request, _ = first.receive(wire.requests)
        assert isinstance(request, wire.Open)
        try:
            self.backend = self._open(request)
        except BaseException as error:  # noqa: BLE001 (whatever it is, the parent is told)
            first.send(wire.pack_error(error))
            return
        first.send(wire.Done())
        for i, channel in enumerate(self._serving):
            name = f"channel-{i}"
            threading.Thread(target=self._serve, args=(channel,), name=name, daemon=True).start()
        self._closed.wait()

    def _open(self, request: wire.Open) -> StorageBackend:
        module, _, attribute = request.target.partition(":")
        found: object = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
        assert isinstance(found, type)
        assert issubclass(found, StorageBackend)
        backend = found(msgspec.convert(request.options, found.Options))
        self._regions = [MappedRegion(fd, nbytes) for fd, nbytes in request.regions]
        context = BackendContext(
            name=request.name,
            page_bytes=request.page_bytes,
            on_evicted=self._evicted if request.reports_evictions else None,
            regions=tuple(region.region for region in self._regions),
        )
        backend.open(context)
        return backend

    def _watch_parent(self) -> None:
        """End with the parent, also where the kernel does not see to it."""
        with contextlib.suppress(OSError):
            self._events.socket.recv(1)
        if not self._closed.is_set():
            os._exit(1)

    def _evicted(self, names: Sequence[ObjectId]) -> None:
        with contextlib.suppress(OSError), self._events_lock:
            self._events.send(wire.Evicted(wire.pack_all(names)))

    def _serve(self, channel: Channel) -> None:
        scan: Iterator[StoredObject] = iter(())
        while True:
            try:
                request, fds = channel.receive(wire.requests)
            except (EOFError, OSError):
                return
            answer: Message
            try:
                if isinstance(request, wire.Scan):
                    scan = iter(self.backend.scan(request.namespace))
                if isinstance(request, (wire.Scan, wire.ScanMore)):
                    answer = _objects(scan)
                elif isinstance(request, wire.ScanEnd):
                    scan, answer = iter(()), wire.Done()
                else:
                    answer = self._answer(request, fds)
                body = wire.encode(answer)  # a plugin may have returned what cannot be sent
            except BaseException as error:
                if not isinstance(error, StorageError):
                    logger.exception("%s failed", type(request).__name__)
                body = wire.encode(wire.pack_error(error))
            finally:
                for fd in fds:
                    os.close(fd)
            with contextlib.suppress(OSError):
                channel.send_encoded(body)
            if isinstance(request, wire.Close):
                self._closed.set()
                return

    def _answer(self, request: wire.Request, fds: list[int]) -> Message:
        backend = self.backend
        match request:
            case wire.Read():
                lists = self._buffers(request.parts, fds, request.call_bytes)
                names = wire.unpack_all(request.names)
                reads = [*map(ReadRequest, names, lists)]
                return wire.pack_results(backend.read(reads))
            case wire.Write():
                lists = self._buffers(request.parts, fds, request.call_bytes)
                names = wire.unpack_all(request.names)
                parents = [wire.unpack(parent) if parent else None for parent in request.parents]
                writes = [*map(WriteRequest, names, parents, request.depths, lists)]
                return wire.pack_results(backend.write(writes))
            case wire.Exists():
                return wire.Flags([*map(bool, backend.exists(wire.unpack_all(request.names)))])
            case wire.Delete():
                return wire.Flags([*map(bool, backend.delete(wire.unpack_all(request.names)))])
            case wire.AskUsage():
                usage = backend.usage()
                if not isinstance(usage, Usage):
                    raise StorageError(f"usage is {usage!r}")
                return wire.UsageIs(usage)
            case wire.AskHealth():
                health = backend.health()
                return wire.HealthIs(health.state, wire.text(health.message))
            case wire.Close():
                backend.close(request.deadline_s)
                return wire.Done()
        raise StorageError(f"{type(request).__name__} is not for here")

    def _buffers(self, parts: wire.Parts, fds: list[int], nbytes: int) -> list[tuple[Buffer, ...]]:
        """The buffers of each page. The memory of the call, if it has one, is unmapped when the
        last of them is gone."""
        views = [region.view for region in self._regions]
        if fds:
            views.append(memoryview(mmap.mmap(fds[0], nbytes)))  # CALL_REGION is the last
        numbers = iter(parts.numbers)
        triples = zip(numbers, numbers, numbers, strict=True)
        buffers = (views[region][offset : offset + n] for region, offset, n in triples)
        return [tuple(islice(buffers, count)) for count in parts.counts]


def _objects(scan: Iterator[StoredObject]) -> wire.Objects:
    found = [(wire.pack(o.object), o.nbytes, o.last_used_s) for o in islice(scan, SCAN_BATCH)]
    return wire.Objects(found, is_last=len(found) < SCAN_BATCH)


def main(parent: int, fds: Sequence[int]) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before it could be asked for
        os._exit(1)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_MOST_LIKELY_OOM)
    for fd in fds:
        os.set_inheritable(fd, False)
    Host([Channel(socket.socket(fileno=fd)) for fd in fds]).run()


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(fd) for fd in sys.argv[2].split(",")])
