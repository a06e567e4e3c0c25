"""What tests do in processes of their own: `children.py COMMAND JSON-OPTIONS`."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import sys
from typing import Any

from kvstrata.backends import (
    BackendContext,
    ObjectId,
    PageIO,
    StorageWorker,
    WorkerSettings,
    WriteRequest,
)
from kvstrata.backends.filesystem import FilesystemBackend, FilesystemOptions
from kvstrata.backends.frame import HEADER_BYTES, encode_header

PAGE_BYTES = 8192


class Os:
    """The module `os`, without `O_TMPFILE` if `named`; `pause_at` a call it waits for its end."""

    def __init__(self, named: bool = False, pause_at: str = "", pause_on: int = 1) -> None:
        self._named = named
        self._pause_at = pause_at
        self._left = pause_on
        self._seen: set[tuple[str, str]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, flags: int, *args: Any, **options: Any) -> int:
        if self._named and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return os.open(path, flags, *args, **options)

    def link(self, *args: Any, **options: Any) -> None:
        self._pause("link", args[1])
        os.link(*args, **options)
        self._pause("linked", args[1])

    def _pause(self, where: str, target: str) -> None:
        is_new = (where, target) not in self._seen  # a first try may find no folder
        self._seen.add((where, target))
        if where == self._pause_at and is_new and not target.endswith("probe"):
            self._left -= 1
            if self._left == 0:
                print("paused", flush=True)
                wait_for_parent()


def wait_for_parent() -> None:
    if not sys.stdin.readline():
        sys.exit(1)


def key_of(namespace: str, i: int, chain: str = "") -> ObjectId:
    key = hashlib.sha256(f"{chain} page {i}".encode()).digest()
    return ObjectId(hashlib.sha256(namespace.encode()).digest(), key)


def data_of(i: int, chain: str = "") -> bytes:
    return random.Random(f"{chain} {i}").randbytes(PAGE_BYTES)


def make_backend(options: dict[str, Any]) -> FilesystemBackend:
    system = Os(
        options.get("named", False), options.get("pause_at", ""), options.get("pause_on", 1)
    )
    table = {"path": options["root"], "min_free_bytes": 0, **options.get("fs", {})}
    return FilesystemBackend(FilesystemOptions(**table), system)


def frame(name: ObjectId, parent: ObjectId | None, depth: int, data: bytes) -> WriteRequest:
    header = memoryview(bytearray(HEADER_BYTES))
    encode_header(header, name, parent, depth, memoryview(data))
    return WriteRequest(name, parent, depth, (header, memoryview(data)))


def construct(options: dict[str, Any]) -> Any:
    """Open on an absent folder, all at once."""
    backend = make_backend(options)
    print("ready", flush=True)
    wait_for_parent()
    backend.open(BackendContext("child"))
    request = frame(key_of("tests", os.getpid()), None, 0, b"x" * PAGE_BYTES)
    outcome = backend.write([request])[0].outcome.value
    backend.close(5)
    return outcome


def store_for_ever(options: dict[str, Any]) -> Any:
    """Store chains through a worker until killed."""
    backend = make_backend(options)
    worker = StorageWorker("child", backend, WorkerSettings(), BackendContext("child"))
    worker.start()
    print("ready", flush=True)
    first = options.get("first", 0)
    while True:
        chain = f"{options['seed']}-{first}"
        first += 1
        pages = []
        for i in range(40):
            parent = key_of("tests", i - 1, chain) if i else None
            data = memoryview(data_of(i, chain))
            pages.append(PageIO(key_of("tests", i, chain), parent, i, data))
        worker.store(pages, 60, lambda result: None, lambda: None)
        worker.flush(60)
        print("stored", flush=True)


def write_chain(options: dict[str, Any]) -> Any:
    """One batch of one chain, perhaps pausing in it."""
    backend = make_backend(options)
    backend.open(BackendContext("child"))
    requests = []
    chain = options.get("chain", "")
    for i in range(options.get("start", 0), options["stop"]):
        parent = key_of("tests", i - 1, chain) if i else None
        requests.append(frame(key_of("tests", i, chain), parent, i, data_of(i, chain)))
    outcomes = [result.outcome.value for result in backend.write(requests)]
    backend.close(5)
    return outcomes


def same_keys(options: dict[str, Any]) -> Any:
    """Write the keys that everybody writes; the bytes say who did. Under `own` namespaces each
    reads back its own."""
    backend = make_backend(options)
    backend.open(BackendContext("child"))
    print("ready", flush=True)
    wait_for_parent()
    rank = options["rank"]
    namespace = f"rank {rank}" if options["own"] else "tests"
    counts: dict[str, int] = {}
    for i in range(options["rounds"]):
        name, data = key_of(namespace, i), bytes([rank]) * PAGE_BYTES
        outcome = backend.write([frame(name, None, 0, data)])[0].outcome.value
        counts[outcome] = counts.get(outcome, 0) + 1
        if options["own"]:
            from kvstrata.backends import ReadRequest

            buffers = (memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(PAGE_BYTES)))
            backend.read([ReadRequest(name, buffers)])
            counts["own bytes"] = counts.get("own bytes", 0) + (bytes(buffers[1]) == data)
    backend.close(5)
    return counts


def fill(options: dict[str, Any]) -> Any:
    """Write many pages under a bound; the most that `usage` and the disk showed."""
    backend = make_backend(options)
    backend.open(BackendContext("child"))
    print("ready", flush=True)
    wait_for_parent()
    most, outcomes = 0, dict[str, int]()
    chain = str(options["rank"])
    for at in range(0, options["pages"], 8):
        requests = []
        for i in range(at, at + 8):
            parent = key_of("tests", i - 1, chain) if i % 40 else None
            depth = i % 40
            requests.append(frame(key_of("tests", i, chain), parent, depth, data_of(i, chain)))
        for result in backend.write(requests):
            outcomes[result.outcome.value] = outcomes.get(result.outcome.value, 0) + 1
        most = max(most, backend.usage().used_bytes)
    backend.close(5)
    return {"most": most, "outcomes": outcomes}


def read_pages(options: dict[str, Any]) -> Any:
    """Load pages through a worker, as another user perhaps; outcomes and messages."""
    if "uid" in options:
        os.setgid(options["uid"])
        os.setuid(options["uid"])
    backend = make_backend(options)
    worker = StorageWorker("child", backend, WorkerSettings(), BackendContext("child"))
    worker.start()
    answers: list[Any] = []
    pages = []
    for i in range(options["stop"]):
        parent = key_of("tests", i - 1) if i else None
        pages.append(PageIO(key_of("tests", i), parent, i, memoryview(bytearray(PAGE_BYTES))))
    if options.get("write"):
        stores = [PageIO(p.object, p.parent, p.depth, memoryview(data_of(p.depth))) for p in pages]
        worker.store(stores, 60, answers.append, lambda: None)
        worker.flush(60)
        answers.clear()
    for path, mode in options.get("chmod", []):
        os.chmod(path, mode)
    worker.load(pages, 60, answers.append, lambda: None)
    worker.flush(60)
    for path, _ in options.get("chmod", []):
        if os.path.exists(path):
            os.chmod(path, 0o700)
    worker.close(5)
    return [[page.outcome.value, page.message] for page in answers[0].pages]


def open_as(options: dict[str, Any]) -> Any:
    """Open as another user; the error."""
    os.setgid(options["uid"])
    os.setuid(options["uid"])
    backend = make_backend(options)
    try:
        backend.open(BackendContext("child"))
    except Exception as error:  # noqa: BLE001 (it is the result)
        return [type(error).__name__, str(error)]
    return ["opened", ""]


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](json.loads(sys.argv[2]))))
