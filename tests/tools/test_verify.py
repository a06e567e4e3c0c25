"""`kvstrata verify`: it finds everything that was planted, and nothing else."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstrata.backends import BackendContext, ObjectId, PageResult, StoredObject
from kvstrata.backends.filesystem.files import object_path
from kvstrata.backends.frame import HEADER_BYTES
from kvstrata.backends.memory import MemoryBackend, MemoryOptions
from kvstrata.boundary import Outcome
from kvstrata.tools import cli
from kvstrata.tools.catalog import Catalog
from kvstrata.tools.replay_control import Interruption
from kvstrata.tools.verify import Verification

Verify = Callable[..., dict[str, Any]]


@pytest.fixture
def verify(two: Any, monkeypatch: pytest.MonkeyPatch) -> Verify:
    """`verify("--repair", code=1)`: the command on `a`; its report."""
    monkeypatch.chdir(two.folder)

    def call(*args: str, code: int = 0) -> dict[str, Any]:
        out = two.folder / "report.json"
        out.unlink(missing_ok=True)
        command = ["verify", "a", "--config", str(two.config), "--json", str(out), *args]
        assert cli.main(command) == code
        return json.loads(out.read_bytes()) if out.exists() else {}

    return call


def _places(report: dict[str, Any], *kinds: str) -> set[str]:
    return {p["place"] for p in report["problems"] if not kinds or p["kind"] in kinds}


def test_a_good_store(two: Any, verify: Verify, capsys: pytest.CaptureFixture[str]) -> None:
    tree = two.fill("a")
    report = verify()
    assert (report["frames"], report["problems"]) == (len(tree.requests), [])
    assert report["complete"]
    assert "no problem" in capsys.readouterr().out


# ── what is planted ──────────────────────────────────────────────────────────────────────────────


def _flip(data: bytes, rng: random.Random, first: int, last: int) -> bytes:
    at, bit = rng.randrange(first, last), rng.randrange(8)
    return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]


def _plant(kind: str, path: Path, other: Path, rng: random.Random) -> list[Path]:
    """Damage `path` (and `other`); the files that are wrong now."""
    data, second = path.read_bytes(), other.read_bytes()
    if kind == "flip in the header":
        path.write_bytes(_flip(data, rng, 0, 144))
    elif kind == "flip behind the fields":
        path.write_bytes(_flip(data, rng, 144, HEADER_BYTES))
    elif kind == "flip in the payload":
        path.write_bytes(_flip(data, rng, HEADER_BYTES, len(data)))
    elif kind == "cut off":
        path.write_bytes(data[: rng.randrange(len(data))])
    elif kind == "too long":
        path.write_bytes(data + bytes(rng.randrange(1, 9000)))
    elif kind == "swapped":
        path.write_bytes(second)
        other.write_bytes(data)
        return [path, other]
    elif kind == "zeros":
        path.write_bytes(bytes(len(data)))
    elif kind == "wrong name":
        name = rng.randbytes(32).hex()
        folder = path.parents[1] / name[:2]
        folder.mkdir(exist_ok=True)
        path.rename(folder / name)
        return [folder / name]
    else:
        assert kind == "wrong folder"
        folder = path.parents[1] / f"{(int(path.parent.name, 16) + 1) % 256:02x}"
        folder.mkdir(exist_ok=True)
        path.rename(folder / path.name)
        return [folder / path.name]
    return [path]


KINDS = ("flip in the header", "flip behind the fields", "flip in the payload", "cut off",
         "too long", "swapped", "zeros", "wrong name", "wrong folder")  # fmt: skip


def test_100_of_100_planted_corruptions(two: Any, verify: Verify, seed: int) -> None:
    """And nothing else but what hangs on them; after --repair nothing is wrong any more."""
    tree = two.fill("a", chains=120, longest=6)
    good = two.frames("a")
    rng = random.Random(seed)
    victims = [two.path("a", r.object) for r in rng.sample(tree.requests, 220)]
    planted: set[str] = set()
    while len(planted) < 100:
        kind = KINDS[len(planted) % len(KINDS)]
        wrong = _plant(kind, victims.pop(), victims.pop(), rng)
        planted |= {str(path) for path in wrong}
    report = verify(code=1)
    found = _places(report, "corrupt", "foreign")
    root = f"{two.root('a')}/"
    found |= {root + place for place in _places(report, "stray file")}
    assert planted - found == set(), f"seed {seed}"
    assert found - planted == set(), f"seed {seed}"
    repaired = verify("--repair", code=1)
    assert repaired["deleted"] > 0
    for name in report["counts"]:
        if name in ("foreign", "stray file"):  # those are not deleted
            for place in _places(report, name):
                Path(place if place.startswith("/") else root + place).unlink()
    # What hung on a frame that was deleted by hand is an orphan now.
    assert cli.main(["verify", "a", "--config", str(two.config), "--repair"]) in (0, 1)
    assert verify()["problems"] == []
    left = two.frames("a")
    assert all(good.get(path) == data for path, data in left.items())
    two.assert_closed("a")


def test_missing_parents_and_wrong_depths(two: Any, verify: Verify, make_frame: Any) -> None:
    tree = two.fill("a")
    parents = {request.parent for request in tree.requests}
    gone = next(r for r in tree.requests if r.object in parents and r.depth == 1)
    two.path("a", gone.object).unlink()
    deep = ObjectId(two.namespace, b"\x05" * 32)
    frame = make_frame(deep, tree.requests[0].object, 7, b"d" * 512)
    path = two.path("a", deep)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(frame.buffers))
    report = verify(code=1)
    children = {str(two.path("a", r.object)) for r in tree.requests if r.parent == gone.object}
    assert _places(report, "orphan") == children
    assert _places(report, "depth") == {str(path)}
    below, grown = {gone.object}, True
    while grown:
        more = {r.object for r in tree.requests if r.parent in below} - below
        below, grown = below | more, bool(more)
    hang = {str(two.path("a", name)) for name in below - {gone.object}} - children
    assert _places(report, "unreachable") == hang
    verify("--repair", "--keep-orphans", code=1)
    assert not path.exists()
    assert all(Path(place).exists() for place in children | hang)
    assert verify("--repair", code=1)["deleted"] == len(children | hang)
    assert verify()["problems"] == []


def test_index_against_files(two: Any, verify: Verify, make_frame: Any) -> None:
    """Files that came and went behind the index, and an index that was lost."""
    tree = two.fill("a")
    leaf = next(r for r in tree.requests if all(o.parent != r.object for o in tree.requests))
    two.path("a", leaf.object).unlink()
    report = verify(code=1)
    assert [(p["kind"], p["message"]) for p in report["problems"]] == [
        ("index", "1 rows had no file")
    ]
    new = make_frame(ObjectId(two.namespace, b"\x06" * 32), None, 0, b"n" * 512)
    path = two.path("a", new.object)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(new.buffers))
    report = verify(code=1)
    assert [p["message"] for p in report["problems"]] == [
        "1 frames had no row, or a wrong size in it"
    ]
    assert verify()["problems"] == []


def test_index_beside_a_server(two: Any, verify: Verify, make_frame: Any) -> None:
    """The index was complete when somebody else opened the store; what is wrong since is said."""
    tree = two.fill("a")
    with two.opened("a") as server:
        assert server.wait_for_scan(30)
        lock = os.open(two.root("a") / "scan.lock", os.O_RDWR | os.O_CREAT)
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)  # as if the server scanned: verify's own does not
            leaf = next(
                r for r in tree.requests if all(o.parent != r.object for o in tree.requests)
            )
            two.path("a", leaf.object).unlink()
            new = make_frame(ObjectId(two.namespace, b"\x06" * 32), None, 0, b"n" * 512)
            path = two.path("a", new.object)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"".join(new.buffers))
            report = verify(code=1)
        finally:
            os.close(lock)
    assert {(p["kind"], p["place"]) for p in report["problems"]} == {
        ("index", object_path(leaf.object)),
        ("index", object_path(new.object)),
    }


def test_what_is_no_frame(two: Any, verify: Verify) -> None:
    tree = two.fill("a", chains=2)
    objects = two.root("a") / "objects"
    (objects / "notes.txt").write_text("hello")
    shard = two.path("a", tree.requests[0].object).parent
    (shard / "abc.tmp").write_text("")
    (shard / f"{shard.name}{'0' * 62}").symlink_to("/etc/passwd")
    os.mkfifo(shard / f"{shard.name}{'1' * 62}")
    (objects / ("e" * 64)).write_text("")
    report = verify(code=1)
    assert report["counts"] == {"stray file": 5}
    assert verify("--repair", code=1)["deleted"] == 0, "what is no frame is not ours to delete"


def test_a_frame_of_the_wrong_size(two: Any, verify: Verify, make_frame: Any) -> None:
    """Right in itself, but no page of this configuration."""
    two.fill("a", chains=1)
    odd = make_frame(ObjectId(two.namespace, b"\x05" * 32), None, 0, b"odd")
    two.store("a", [odd])
    report = verify(code=1)
    assert report["counts"] == {"size": 1}
    verify("--repair", code=1)
    assert verify()["problems"] == []


def test_it_reads_a_namespace(two: Any, verify: Verify, make_tree: Any) -> None:
    other = make_tree(b"\x07" * 32, 3).grow(3, 5)
    two.fill("a")
    two.store("a", other.requests)
    assert verify("--namespace", "0707")["frames"] == len(other.requests)


def test_wrong_use(two: Any, verify: Verify, capsys: pytest.CaptureFixture[str]) -> None:
    verify(code=2)
    assert "there is nothing at" in capsys.readouterr().err
    assert not two.root("a").exists(), "a look makes no store"
    verify("--keep-orphans", code=2)
    assert cli.main(["verify", "nope", "--config", str(two.config)]) == 2
    assert "a, b" in capsys.readouterr().err
    assert cli.main(["verify", "--config", str(two.config)]) == 2


def test_a_store_over_its_bounds_is_not_trimmed(two: Any, verify: Verify) -> None:
    pages = len(two.fill("a").requests)
    report = verify("--set", "backends.a.options.max_bytes=80KiB")
    assert report["frames"] == pages == len(two.frames("a"))


# ── beside a server ──────────────────────────────────────────────────────────────────────────────


class Changing(MemoryBackend):
    """Something happens right before the Nth read."""

    def __init__(self) -> None:
        super().__init__(MemoryOptions())
        self.open(BackendContext("memory"))
        self.left, self.event = 0, threading.Event()
        self.happens: Callable[[], object] = self.event.set

    @property
    def max_batch(self) -> int:
        return 4

    def read(self, requests: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            self.happens()
        return super().read(requests)


def _look(backend: Changing, **how: Any) -> tuple[Verification, list[Any]]:
    place = lambda name: name.name  # noqa: E731
    stop = Interruption()
    look = Verification(backend, place, {}, (), stop, lambda *a: None, threads=1)
    with Catalog() as catalog:
        options = {"repair": False, "keep_orphans": False, **how}
        return look, look.run(catalog, **options)


def _filled(tree: Any) -> Changing:
    backend = Changing()
    for request in tree.requests:
        backend.write([request])
    return backend


def test_what_is_evicted_meanwhile_is_no_fault(make_tree: Any, seed: int) -> None:
    tree = make_tree(b"\x01" * 32, seed).grow(20, 8)
    backend = _filled(tree)
    chain = [r.object for r in tree.requests if r.depth > 0]
    backend.left, backend.happens = 3, lambda: backend.delete(chain)
    look, problems = _look(backend)
    assert problems == []
    assert look.vanished > 0
    assert look.frames + look.vanished == len(tree.requests)


def test_what_was_replaced_meanwhile_is_not_deleted(make_tree: Any, seed: int) -> None:
    """The server found the corrupt page itself, and stored it anew before the repair."""
    tree = make_tree(b"\x01" * 32, seed).grow(5, 4)
    backend = _filled(tree)
    name = tree.requests[0].object
    good = backend._frames[name].data
    backend._frames[name].data = good[:-1] + bytes([good[-1] ^ 1])
    reads = -(-len(tree.requests) // 4)
    backend.left = reads + 1

    def replace() -> None:
        backend._frames[name].data = good

    backend.happens = replace
    look, problems = _look(backend, repair=True)
    assert {p.kind for p in problems} <= {"corrupt", "unreachable"}
    assert look.deleted == 0
    assert len(backend._frames) == len(tree.requests)


def test_a_frame_that_cannot_be_read(make_tree: Any, seed: int) -> None:
    backend = _filled(make_tree(b"\x01" * 32, seed).grow(1, 4))
    name = next(iter(backend._frames))
    read = backend.read

    def refuse(requests: Any) -> Any:
        refused = PageResult(Outcome.ACCESS, 0, "EACCES: Permission denied")
        results = read(requests)
        return [refused if q.object == name else r for q, r in zip(requests, results, strict=True)]

    backend.read = refuse  # type: ignore[method-assign]
    _, problems = _look(backend)
    assert [(p.kind, p.message) for p in problems][:1] == [
        ("unreadable", "EACCES: Permission denied")
    ]
    assert {p.kind for p in problems} <= {"unreadable", "unreachable"}


def test_a_store_that_compresses(make_tree: Any, make_frame: Any, seed: int) -> None:
    """What it counts says nothing of how long a frame is."""
    tree = make_tree(b"\x01" * 32, seed).grow(1, 1)
    rng = random.Random(seed)
    large = make_frame(ObjectId(tree.namespace, b"\x05" * 32), None, 0, rng.randbytes(100_000))
    backend = _filled(tree)
    backend.write([large])
    scan = backend.scan
    backend.scan = lambda namespace=None: (  # type: ignore[method-assign]
        StoredObject(found.object, 10, found.last_used_s) for found in scan(namespace)
    )
    _, problems = _look(backend)
    assert problems == []


def test_stopped_it_says_so(make_tree: Any, seed: int) -> None:
    backend = _filled(make_tree(b"\x01" * 32, seed).grow(5, 4))
    stop = Interruption()
    stop.finish.set()
    look = Verification(backend, str, {}, (), stop, lambda *a: None)
    with Catalog() as catalog:
        assert look.run(catalog, repair=True, keep_orphans=False) == []
    assert not look.complete
    assert look.frames == 0
