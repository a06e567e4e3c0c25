"""The command as people start it, a process of its own; and stores for the tools to work on."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvstrata.backends import BackendContext, ObjectId, WriteRequest
from kvstrata.backends.filesystem import FilesystemBackend, FilesystemOptions
from kvstrata.backends.filesystem.files import object_path
from kvstrata.backends.frame import HEADER_BYTES, encode_header, parse_header, verify
from kvstrata.configs import load_config
from kvstrata.tiers import component_fingerprint
from kvstrata.tools import cli

ROOT = Path(__file__).resolve().parents[2]

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`run("config", "check", FILE)`: `kvstrata` in a process, in an empty working directory."""

    def call(*args: str | Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
        places = [str(ROOT / "src"), *([str(path)] if path else [])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "COLUMNS": "200"}
        work = tmp_path / "work"
        work.mkdir(exist_ok=True)
        return subprocess.run(
            [sys.executable, "-m", "kvstrata.tools.cli", *map(str, args)],
            cwd=work, env=env, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    return call


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """As `run`, in this process: what is raised ends the test."""

    def call(*args: str | Path) -> subprocess.CompletedProcess[str]:
        work = tmp_path / "work"
        work.mkdir(exist_ok=True)
        monkeypatch.chdir(work)
        monkeypatch.setenv("COLUMNS", "200")
        capsys.readouterr()
        line = [str(arg) for arg in args]
        code = cli.main(line)
        return subprocess.CompletedProcess(line, code, *capsys.readouterr())

    return call


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A small configuration on the memory plugin."""
    path = tmp_path / "c.toml"
    path.write_text((ROOT / "configs/memory.toml").read_text())
    return path


@pytest.fixture
def plugin_dir(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with two more distributions: one raises on import, one is fine."""
    folder = tmp_path / "plugins"
    for name, body in (
        ("broken_store", "raise RuntimeError('no driver on this machine')\n"),
        (
            "fine_store",
            (
                "import msgspec\n"
                "from kvstrata.backends.memory import MemoryBackend\n"
                "class FineOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):\n"
                "    api_key: str = 'built-in'\n"
                "    '''Secret of the store.'''\n"
                "    max_bytes: int = 0\n"
                "class Fine(MemoryBackend):\n"
                "    Options = FineOptions\n"
            ),
        ),
    ):
        info = folder / f"{name}-1.2.dist-info"
        info.mkdir(parents=True)
        (folder / f"{name}.py").write_text(body)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        target = "Broken" if name == "broken_store" else "Fine"
        (info / "entry_points.txt").write_text(
            f"[kvstrata.backends]\n{name.removesuffix('_store')} = {name}:{target}\n"
        )
    return folder


# ── stores that tools work on ────────────────────────────────────────────────────────────────────

TWO_ROOTS = """
[namespace]
model = "oracle"
revision = "1"
[pools]
pages = 64
page_tokens = 16
max_context_tokens = 1024
[[pools.components]]
name = "kv"
layers = 1
kv_heads = 1
head_dim = 8
[staging]
bytes = "1MiB"
[l3]
backend = "a"
[backends.a]
plugin = "filesystem"
[backends.a.options]
path = "{folder}/a"
min_free_bytes = 0
batch_pages = 8
[backends.b]
plugin = "filesystem"
[backends.b.options]
path = "{folder}/b"
min_free_bytes = 0
batch_pages = 8
"""
PAGE_BYTES = 512


@dataclass
class Tree:
    """Frames of one namespace that hang together as those of conversations do."""

    namespace: bytes
    seed: int
    requests: list[WriteRequest] = field(default_factory=list)

    def grow(self, chains: int, longest: int) -> Tree:
        """Chains that leave others at random pages."""
        rng = random.Random(self.seed)
        for _ in range(chains):
            above = rng.choice(self.requests) if self.requests and rng.random() < 0.7 else None
            for _ in range(rng.randint(1, longest)):
                above = self.add(above, rng)
        return self

    def add(self, above: WriteRequest | None, rng: random.Random) -> WriteRequest:
        name = ObjectId(self.namespace, rng.randbytes(32))
        parent, depth = (None, 0) if above is None else (above.object, above.depth + 1)
        self.requests.append(frame_of(name, parent, depth, rng.randbytes(PAGE_BYTES)))
        return self.requests[-1]


def frame_of(name: ObjectId, parent: ObjectId | None, depth: int, payload: bytes) -> WriteRequest:
    header = memoryview(bytearray(HEADER_BYTES))
    encode_header(header, name, parent, depth, memoryview(payload))
    return WriteRequest(name, parent, depth, (header, memoryview(payload)))


@dataclass
class TwoRoots:
    """A configuration with the file-system backends `a` and `b`, and the frames in them."""

    folder: Path
    seed: int

    def __post_init__(self) -> None:
        self.config = self.folder / "two.toml"
        self.config.write_text(TWO_ROOTS.format(folder=self.folder))
        fingerprint = load_config(self.config).namespace().fingerprint()
        self.namespace = component_fingerprint(fingerprint, "kv")

    def root(self, name: str) -> Path:
        return self.folder / name

    @contextmanager
    def opened(self, name: str, **options: object) -> Iterator[FilesystemBackend]:
        own = {"min_free_bytes": 0, "batch_pages": 8, **options}
        backend = FilesystemBackend(FilesystemOptions(path=str(self.root(name)), **own))
        backend.open(BackendContext(name, {"kv": PAGE_BYTES}))
        try:
            yield backend
        finally:
            backend.close(10.0)

    def fill(self, name: str, chains: int = 12, longest: int = 12) -> Tree:
        """A tree of frames in backend `name`."""
        tree = Tree(self.namespace, self.seed).grow(chains, longest)
        self.store(name, tree.requests)
        return tree

    def store(self, name: str, requests: Sequence[WriteRequest]) -> None:
        with self.opened(name) as backend:
            for request in requests:
                assert backend.write([request])[0].outcome.is_stored

    def frames(self, name: str) -> dict[str, bytes]:
        """Every frame by its path below the root."""
        objects = self.root(name) / "objects"
        files = (path for path in objects.glob("*/*/*") if path.is_file())
        return {path.relative_to(objects).as_posix(): path.read_bytes() for path in files}

    def path(self, name: str, page: ObjectId) -> Path:
        return self.root(name) / object_path(page)

    def assert_closed(self, name: str) -> None:
        """Every frame is whole, and the one that it hangs on is there."""
        headers = []
        for path, data in self.frames(name).items():
            header = parse_header(memoryview(data))
            verify(header, header.object, memoryview(data)[HEADER_BYTES:])
            assert path.endswith(header.key.hex())
            headers.append(header)
        keys = {header.key for header in headers}
        for header in headers:
            assert header.parent is None or header.parent_key in keys, "a page without its parent"


@pytest.fixture
def two(tmp_path: Path, seed: int) -> TwoRoots:
    return TwoRoots(tmp_path, seed)


@pytest.fixture
def make_frame() -> Callable[..., WriteRequest]:
    """`make_frame(name, parent, depth, payload)`."""
    return frame_of


@pytest.fixture
def make_tree() -> type[Tree]:
    return Tree
