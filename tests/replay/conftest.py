"""Replays as processes, the traces they run, and a look at the L3 that they leave behind."""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstrata.backends import ObjectId
from kvstrata.backends.frame import HEADER_BYTES, FrameHeader, parse_header, verify
from kvstrata.configs import load_config
from kvstrata.tiers.keys import page_keys
from kvstrata.tiers.namespace import component_fingerprint
from kvstrata.tools.trace import TraceRequest, read_trace, shipped_trace

ROOT = Path(__file__).resolve().parents[2]
REAL_TRACE = ROOT.parent / "shared/traces/conversation.jsonl"
WAIT_S = 60.0
"""How long a test waits for what must happen. Never reached when all is well."""


# ── traces ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Trace:
    """Requests in a file, and what a perfect cache makes of them."""

    path: Path
    requests: tuple[TraceRequest, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(r.input_length for r in self.requests)

    def full_pages(self, page_tokens: int = 512) -> int:
        return sum(r.input_length // page_tokens for r in self.requests)

    def hits(self, page_tokens: int = 512, first: int | None = None) -> int:
        """Pages of the longest prefix that was seen before, by brute force over the ids.

        A page is known by the page before it, the id that it lies in and its place there.
        """
        assert 512 % page_tokens == 0
        seen: dict[tuple[int, int, int], int] = {}
        hits = 0
        for request in self.requests[:first]:
            page, is_hit = 0, True
            for i in range(request.input_length // page_tokens):
                block, place = divmod(i * page_tokens, 512)
                name = (page, request.hash_ids[block], place)
                is_hit = is_hit and name in seen
                hits += is_hit
                page = seen.setdefault(name, len(seen) + 1)
        return hits


def _write(path: Path, lines: Sequence[bytes]) -> Trace:
    path.write_bytes(b"".join(lines))
    return Trace(path, tuple(read_trace(path)))


@pytest.fixture(scope="session")
def trace_lines() -> list[bytes]:
    """The first lines of the real trace where it is, else as many that are like them."""
    if REAL_TRACE.exists():
        return REAL_TRACE.read_bytes().splitlines(keepends=True)[:2000]
    return list(_like_the_real_trace(np.random.default_rng(1), 2000))


def _like_the_real_trace(rng: np.random.Generator, count: int) -> Iterator[bytes]:
    """All requests begin with one block; three in ten go on with one of before, often an old one.
    Of the others half are longer than 16 blocks, and a tenth than 58."""
    before: list[list[int]] = []
    numbers = itertools.count(1)
    for i in range(count):
        if rng.random() < (0.28 if i > 120 else 0.05) and before:
            which = int(len(before) * rng.random() ** 4)
            ids = before[which] + list(itertools.islice(numbers, int(rng.integers(1, 9))))
            before[which] = ids
        else:
            length = int(np.clip(rng.lognormal(np.log(16), 1.0), 2, 200))
            ids = [0, *itertools.islice(numbers, length - 1)]
            before.append(ids)
        length = 512 * len(ids) - int(rng.integers(512))
        request = {"timestamp": 335 * i, "input_length": length, "hash_ids": ids}
        yield json.dumps(request | {"output_length": int(rng.integers(25, 600))}).encode() + b"\n"


@pytest.fixture(scope="session")
def opening(trace_lines: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The first 120 requests of the trace, as they came: few hits, many pages."""
    return _write(tmp_path_factory.mktemp("trace") / "opening.jsonl", trace_lines[:120])


@pytest.fixture(scope="session")
def dense(trace_lines: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """80 requests of the conversations that come back most: nearly all pages are hits, of up to
    more than a hundred pages at once."""
    turns: dict[int, list[bytes]] = defaultdict(list)
    for line in trace_lines:
        ids = json.loads(line)["hash_ids"]
        turns[ids[1] if len(ids) > 2 else -1].append(line)
    turns.pop(-1, None)
    busy = {line for lines in turns.values() if len(lines) >= 5 for line in lines}
    kept = [line for line in trace_lines if line in busy][:80]
    return _write(tmp_path_factory.mktemp("trace") / "dense.jsonl", kept)


@pytest.fixture(scope="session")
def small() -> Trace:
    """The shipped trace: 60 requests, 575 full pages."""
    return Trace(shipped_trace(), tuple(read_trace(shipped_trace())))


# ── processes ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Done:
    """How a replay ended."""

    code: int
    """Negative: the signal that killed it."""
    out: str
    err: str
    report: dict[str, Any]
    """What `--json` wrote; empty if it wrote nothing."""
    rss_bytes: int

    def ok(self) -> dict[str, Any]:
        """The report of a replay that ended well."""
        assert self.code == 0, self.err or self.out
        assert "Traceback" not in self.err
        assert self.report["pages_mismatched"] == 0
        assert self.report["failed_requests"] == 0
        assert self.report["errors"] == []
        return self.report


class Running:
    """A replay on its way."""

    def __init__(self, server: Server, pid: int, folder: Path) -> None:
        self.pid = pid
        self._server = server
        self._folder = folder
        self._fd = os.pidfd_open(pid)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def ends_within(self, seconds: float) -> bool:
        return bool(self._poll.poll(seconds * 1000))

    def send(self, signum: int) -> None:
        signal.pidfd_send_signal(self._fd, signum)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Nothing of it runs meanwhile, so that a walk over files sees one moment."""
        self.send(signal.SIGSTOP)
        while not self.ends_within(0) and not self._is_stopped():
            pass
        yield
        self.send(signal.SIGCONT)

    def _is_stopped(self) -> bool:
        """All of its threads are stopped, or it has ended."""
        try:
            stats = [path.read_text() for path in Path(f"/proc/{self.pid}/task").glob("*/stat")]
        except OSError:
            return False
        return all(stat.rpartition(")")[2].split()[0] in "TtZX" for stat in stats)

    def end(self) -> None:
        """Leave nothing of it behind, however the test ended."""
        if self._fd >= 0:
            self.send(signal.SIGKILL)
            self._reap()

    def _reap(self) -> Any:
        answer = self._server.ask({"wait": self.pid})
        os.close(self._fd)
        self._fd = -1
        return answer

    def wait(self, timeout_s: float = WAIT_S) -> Done:
        in_time = self.ends_within(timeout_s)
        if not in_time:
            self.send(signal.SIGKILL)
        answer = self._reap()
        texts = [self._folder / name for name in ("out", "err")]
        out, err = (path.read_text() if path.exists() else "" for path in texts)
        assert in_time, f"still running after {timeout_s} s\n{out}{err}"
        json_file = self._folder / "report.json"
        report = json.loads(json_file.read_bytes()) if json_file.exists() else {}
        return Done(answer["code"], out, err, report, answer["rss"] * 1024)


class Server:
    """The process that forks replays; see `children.py`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("children.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"},
        )  # fmt: skip

    def ask(self, order: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=WAIT_S)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


@dataclass
class Kvstrata:
    """`kvstrata` in processes, in a folder that everybody may enter."""

    server: Server
    folder: Path
    started: list[Running] = field(default_factory=list)

    def start(self, *args: str | Path, plant: dict[str, Any] | None = None,
              env: dict[str, str] | None = None) -> Running:  # fmt: skip
        folder = self.folder / f"run{len(self.started)}"
        folder.mkdir()
        order = {
            "args": [str(a).replace("REPORT", str(folder / "report.json")) for a in args],
            "folder": str(self.folder),
            "out": str(folder / "out"),
            "err": str(folder / "err"),
            "plant": plant or {},
            "env": env or {},
        }
        running = Running(self.server, self.server.ask(order)["pid"], folder)
        self.started.append(running)
        return running

    def replay(self, config: str | Path, trace: Trace | Path, root: Store | Path,
               *args: str | Path, sets: Sequence[str] = (), plant: dict[str, Any] | None = None,
               env: dict[str, str] | None = None) -> Running:  # fmt: skip
        """`config`: a name in configs/, or a file. `sets`: texts for `--set`."""
        file = ROOT / f"configs/{config}.toml" if isinstance(config, str) else config
        place = root.path if isinstance(root, Store) else root
        overrides = [f"backends.disk.options.path={place}", *sets]
        options = [part for text in overrides for part in ("--set", text)]
        file_of_trace = trace.path if isinstance(trace, Trace) else trace
        return self.start("replay", "--config", file, "--trace", file_of_trace, "--json", "REPORT",
                          *options, *args, plant=plant, env=env)  # fmt: skip


@pytest.fixture
def kvstrata(server: Server, tmp_path: Path) -> Iterator[Kvstrata]:
    commands = Kvstrata(server, tmp_path)
    yield commands
    for running in commands.started:
        running.end()


# ── what they leave behind ───────────────────────────────────────────────────────────────────────


class Store:
    """A root of the file-system backend, as an inspector sees it: files and SQL, no backend."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def frames(self) -> list[Path]:
        return sorted(self.path.glob("objects/*/*/*"))

    def disk_bytes(self) -> int:
        """Blocks of all frames. One that goes meanwhile counts as gone."""
        total = 0
        for folder in self.path.glob("objects/*/*"):
            with os.scandir(folder) as entries:
                for entry in entries:
                    try:
                        total += entry.stat().st_blocks * 512
                    except FileNotFoundError:
                        continue
        return total

    def index_bytes(self) -> int:
        """What the index says is used, reservations included."""
        [path] = self.path.glob("index-v1-*.sqlite")
        connection = sqlite3.connect(path)
        try:
            used, inflight = connection.execute("SELECT used, inflight FROM meta").fetchone()
        finally:
            connection.close()
        return int(used) + int(inflight)

    def orphans(self) -> list[Path]:
        """Folders and temporary files of processes that are gone (no process is open now)."""
        return sorted(self.path.glob("owners/*"))

    def headers(self) -> dict[ObjectId, FrameHeader]:
        """All frames, each whole: header and payload checked, nothing before or behind."""
        found = {}
        for path in self.frames():
            data = memoryview(path.read_bytes())
            name = ObjectId(bytes.fromhex(path.parts[-3]), bytes.fromhex(path.parts[-1]))
            header = parse_header(data)
            verify(header, name, data[HEADER_BYTES:])
            assert path.stat().st_mode & 0o777 == 0o600
            found[name] = header
        return found

    def check(self) -> set[ObjectId]:
        """Every frame is whole, none is without its parent, and the index agrees with the disk.
        For a root that no process has open, after one has closed it well."""
        headers = self.headers()
        for header in headers.values():
            assert header.parent is None or header.parent in headers, "a frame without its parent"
        assert self.index_bytes() == self.disk_bytes()
        assert self.orphans() == []
        return set(headers)


@pytest.fixture
def make_store() -> type[Store]:
    """`make_store(path)`: for roots elsewhere than `store` is."""
    return Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "l3")


def _names(trace: Trace, config: str, *sets: str) -> list[list[ObjectId]]:
    """The frames of the full pages of each request."""
    loaded = load_config(ROOT / f"configs/{config}.toml", sets)
    namespace = loaded.namespace().fingerprint()
    place = component_fingerprint(namespace, loaded.components[0].name)
    size = loaded.pools.page_tokens
    names = []
    for request in trace.requests:
        keys = page_keys(namespace, request.prompt(), size)
        names.append([ObjectId(place, keys[i : i + 32]) for i in range(0, len(keys), 32)])
    return names


@pytest.fixture
def names_of() -> Any:
    """`names_of(trace, config, *sets)`: names of the frames of each request's full pages."""
    return _names


@pytest.fixture
def hits_on() -> Any:
    """`hits_on(names, stored)`: page hits of a replay that begins with `stored` in L3."""

    def count(names: list[list[ObjectId]], stored: set[ObjectId]) -> int:
        known, hits = set(stored), 0
        for pages in names:
            for page in pages:
                if page not in known:
                    break
                hits += 1
            known.update(pages)
        return hits

    return count
