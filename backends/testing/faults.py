"""A backend that fails on purpose, from a seed: for tests of the worker, and of what uses it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvstrata.backends.base import (
    BackendContext,
    Health,
    ObjectId,
    PageResult,
    ReadRequest,
    StorageBackend,
    StoredObject,
    Usage,
    WriteRequest,
)
from kvstrata.backends.filesystem import FilesystemBackend, FilesystemOptions
from kvstrata.backends.memory import MemoryBackend, MemoryOptions
from kvstrata.boundary import Outcome
from kvstrata.errors import StorageBusyError, StorageError, StorageUnavailableError

_T = TypeVar("_T")

BEFORE = (
    "slow",
    "hang",
    "error",
    "unavailable",
    "busy",
    "raise",
    "leak",
    "gil",
    "segfault",
    "exit",
    "kill",
)
"""What happens before the call. The last five are for a process of its own: "leak" keeps 64
MiB for ever, "gil" holds the interpreter lock for `hang_s`."""
INSTEAD = ("lie", "miscount", "corrupt", "short")
"""What becomes of the answer: "lie" does nothing and says that all went well, "miscount" leaves a
result out, "corrupt" turns a bit of the first page, "short" leaves out its last bytes."""
OPERATIONS = ("open", "close", "exists", "read", "write", "delete", "scan", "usage", "health")


class FaultyOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """`faults` maps operation → kind → probability a call."""

    faults: dict[str, dict[str, float]] = {}
    seed: int = 0
    path: str = ""
    """Frames lie in a `filesystem` backend here; "": in memory, and end with the process."""
    once: str = ""
    """A directory: each kind of fault happens once an operation, in whatever process; a file there
    marks that it did."""
    slow_s: float = 0.01
    hang_s: float = 3600.0
    concurrency: int = 2

    def __post_init__(self) -> None:
        for operation, kinds in self.faults.items():
            unknown = set(kinds) - {*BEFORE, *INSTEAD}
            if operation not in OPERATIONS or unknown:
                raise ValueError(f"there is no fault {unknown or ''} of {operation}")


class FaultyBackend(StorageBackend):
    """A memory or filesystem backend with faults. `release` ends every "hang" of this process."""

    Options = FaultyOptions

    def __init__(self, options: FaultyOptions) -> None:
        super().__init__(options)
        self._plan = options
        self._inner: StorageBackend = (
            FilesystemBackend(FilesystemOptions(path=options.path))
            if options.path
            else MemoryBackend(MemoryOptions())
        )
        self._random = random.Random(options.seed)
        self._lock = threading.Lock()
        self._free = threading.Event()
        self._leaked: list[bytes] = []
        self.happened: dict[tuple[str, str], int] = {}
        """How often, by operation and kind, in this process."""

    @property
    def concurrency(self) -> int:
        return self._plan.concurrency

    @property
    def max_batch(self) -> int:
        return self._inner.max_batch

    def release(self) -> None:
        """What hangs goes on; nothing hangs from now on."""
        self._free.set()

    def open(self, context: BackendContext) -> None:
        self._run("open", lambda: self._inner.open(context))

    def close(self, deadline_s: float) -> None:
        self._run("close", lambda: self._inner.close(deadline_s))

    def exists(self, objects: Sequence[ObjectId]) -> list[bool]:
        return self._run("exists", lambda: self._inner.exists(objects), [True] * len(objects))

    def read(self, requests: Sequence[ReadRequest]) -> list[PageResult]:
        lie = [PageResult(Outcome.LOADED, request.nbytes) for request in requests]
        return self._run("read", lambda: self._inner.read(requests), lie, requests)

    def write(self, requests: Sequence[WriteRequest]) -> list[PageResult]:
        lie = [PageResult(Outcome.STORED, request.nbytes) for request in requests]
        kind = self._draw("write")
        if kind in ("corrupt", "short") and requests:
            self._before("write", "")
            return self._inner.write([_spoiled(requests[0], kind), *requests[1:]])
        return self._run("write", lambda: self._inner.write(requests), lie, kind=kind)

    def delete(self, objects: Sequence[ObjectId]) -> list[bool]:
        return self._run("delete", lambda: self._inner.delete(objects), [True] * len(objects))

    def scan(self, namespace: bytes | None = None) -> Iterator[StoredObject]:
        yield from self._run("scan", lambda: list(self._inner.scan(namespace)))

    def usage(self) -> Usage:
        return self._run("usage", self._inner.usage)

    def health(self) -> Health:
        return self._run("health", self._inner.health)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _draw(self, operation: str) -> str:
        kinds = self._plan.faults.get(operation, {})
        with self._lock:
            for kind, probability in kinds.items():
                if self._random.random() < probability and self._is_first(operation, kind):
                    at = (operation, kind)
                    self.happened[at] = self.happened.get(at, 0) + 1
                    return kind
        return ""

    def _is_first(self, operation: str, kind: str) -> bool:
        if not self._plan.once:
            return True
        try:
            (Path(self._plan.once) / f"{operation}-{kind}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _run(
        self,
        operation: str,
        call: Callable[[], _T],
        lie: _T | None = None,
        requests: Sequence[ReadRequest] = (),
        kind: str | None = None,
    ) -> _T:
        kind = self._draw(operation) if kind is None else kind
        self._before(operation, kind)
        if kind == "lie" and lie is not None:
            return lie
        answer: Any = call()
        if kind == "miscount" and isinstance(answer, list):
            answer = answer[:-1]
        if kind in ("corrupt", "short") and requests and answer[0].outcome is Outcome.LOADED:
            if kind == "short":
                answer[0] = PageResult(Outcome.LOADED, answer[0].nbytes - 1)
            else:
                requests[0].buffers[-1][0] ^= 1
        return answer  # type: ignore[no-any-return]

    def _before(self, operation: str, kind: str) -> None:
        match kind:
            case "slow":
                time.sleep(self._plan.slow_s)
            case "hang":
                self._free.wait(self._plan.hang_s)
            case "error":
                raise StorageError(f"{operation} fails, as told")
            case "unavailable":
                raise StorageUnavailableError(f"{operation} is away, as told")
            case "busy":
                raise StorageBusyError(f"{operation} is busy, as told")
            case "raise":
                raise RuntimeError(f"{operation} raises, as told")
            case "leak":
                self._leaked.append(b"\1" * 2**26)
            case "gil":
                ctypes.PyDLL(None).sleep(int(self._plan.hang_s))
            case "segfault":
                with contextlib.suppress(OSError):
                    os.close(2)  # no core or trace on the parent's terminal
                ctypes.string_at(0)
            case "exit":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)


def _spoiled(request: WriteRequest, kind: str) -> WriteRequest:
    """The same request with other bytes than were asked for: never in the lent buffer."""
    data = bytearray(b"".join(request.buffers))
    if kind == "corrupt":
        data[-1] ^= 1
    else:
        del data[-1:]
    return WriteRequest(request.object, request.parent, request.depth, (memoryview(data),))
