"""`kvstrata migrate` in this process: what is copied, what is not, and what it says."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstrata.backends.filesystem.files import object_path
from kvstrata.configs import load_config
from kvstrata.tools import cli
from kvstrata.tools.migrate_copy import RateLimit
from kvstrata.tools.migrate_journal import Journal

Migrate = Callable[..., dict[str, Any]]


@pytest.fixture
def migrate(two: Any, monkeypatch: pytest.MonkeyPatch) -> Migrate:
    """`migrate("--move", code=1)`: the command from `a` to `b`; its report."""
    monkeypatch.chdir(two.folder)

    def call(*args: str | Path, code: int = 0, source: str = "a", to: str = "b") -> dict[str, Any]:
        out = two.folder / "report.json"
        out.unlink(missing_ok=True)
        command = ["migrate", "--config", two.config, "--from", source, "--to", to, "--json", out]
        assert cli.main([str(arg) for arg in [*command, *args]]) == code
        return json.loads(out.read_bytes()) if out.exists() else {}

    return call


def test_there_and_back_bit_by_bit(two: Any, migrate: Migrate) -> None:
    pages = len(two.fill("a").requests)
    before = two.frames("a")
    report = migrate()
    assert (report["pages"], report["copied"], report["complete"]) == (pages, pages, True)
    assert two.frames("b") == before
    assert not list(two.folder.glob("var/*.journal*")), "a journal that is done with is removed"
    again = migrate()
    assert (again["copied"], again["existed"]) == (0, pages)
    for path in (two.root("a") / "objects").glob("*/*/*"):
        path.unlink()
    back = migrate("--read-back", source="b", to="a")
    assert back["copied"] == pages
    assert two.frames("a") == before
    for name in "ab":
        two.assert_closed(name)
        with two.opened(name) as backend:
            assert backend.wait_for_scan(30)
            backend.check_integrity()


def test_it_reads_without_a_trace(two: Any, migrate: Migrate) -> None:
    """What is migrated does not count as used: eviction stays as it was."""
    two.fill("a")

    def order() -> list[Any]:
        with two.opened("a") as backend:
            assert backend.wait_for_scan(30)
            found = sorted(
                backend.scan(), key=lambda stored: (stored.last_used_s, stored.object.key)
            )
        return [stored.object for stored in found]

    before = order()
    migrate("--read-back")
    assert order() == before


def test_the_destination_keeps_the_order_of_use(two: Any, migrate: Migrate) -> None:
    """Chains arrive by when they were last used: the copy evicts as the original would."""
    tree = two.fill("a", chains=6, longest=1)
    chains = [request.object for request in tree.requests if request.depth == 0]
    with two.opened("a") as backend:
        for name in reversed(chains):
            backend.index.touch([name])
    migrate()
    with two.opened("b") as backend:
        found = sorted(backend.scan(), key=lambda stored: stored.last_used_s)
    roots = [stored.object for stored in found if stored.object in chains]
    leaves = [name for name in roots if all(r.parent != name for r in tree.requests)]
    assert leaves == [name for name in reversed(chains) if name in leaves]


def test_dry_run_changes_nothing(
    two: Any, migrate: Migrate, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = len(two.fill("a").requests)
    report = migrate("--dry-run")
    assert (report["pages"], report["left"], report["copied"]) == (pages, pages, 0)
    assert "what would be done" in " ".join(capsys.readouterr().out.split())
    assert not two.root("b").exists()
    assert not Path("var").exists()


def test_namespaces(two: Any, migrate: Migrate, make_tree: Any) -> None:
    other = make_tree(b"\x07" * 32, 3).grow(3, 5)
    two.fill("a")
    two.store("a", other.requests)
    report = migrate("--namespace", "0707")
    assert report["copied"] == len(other.requests)
    assert [part["name"] for part in report["namespaces"]] == [""]
    assert set(two.frames("b")) == {object_path(r.object)[8:] for r in other.requests}
    report = migrate("--namespace", "kv")
    assert [part["name"] for part in report["namespaces"]] == ["kv of oracle"]
    assert two.frames("a") == two.frames("b")
    assert migrate("--namespace", "abcdef")["pages"] == 0


def test_age_takes_the_pages_before_along(two: Any, migrate: Migrate) -> None:
    """A page that was used lately hangs on pages that were not."""
    tree = two.fill("a", chains=2, longest=9)
    last = max(tree.requests, key=lambda request: request.depth)
    for path in (two.root("a") / "objects").glob("*/*/*"):
        os.utime(path, (1e9, 1e9))
    os.utime(two.path("a", last.object))
    for path in two.root("a").glob("index-*"):
        path.unlink()  # rebuilt from the files: ages are theirs
    report = migrate("--newer-than", "1d")
    assert report["copied"] == last.depth + 1
    two.assert_closed("b")
    assert migrate("--older-than", "52w")["pages"] >= len(tree.requests) - 1


def test_corrupt_pages_stay_behind_with_what_hangs_on_them(two: Any, migrate: Migrate) -> None:
    tree = two.fill("a")
    parents = {request.parent for request in tree.requests}
    bad = next(r.object for r in tree.requests if r.object in parents and r.depth > 0)
    path = two.path("a", bad)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    report = migrate(code=1)
    below = {bad}
    for request in tree.requests:
        if request.parent in below:
            below.add(request.object)
    assert (report["failed"], report["cut"]) == (1, len(below) - 1)
    assert report["problems"][0]["page"] == bad.name
    assert "checksum" in report["problems"][0]["message"]
    assert report["copied"] == len(tree.requests) - len(below)
    two.assert_closed("b")
    path.write_bytes(data)
    assert migrate()["copied"] == len(below)
    assert two.frames("a") == two.frames("b")


@pytest.mark.parametrize("damage", ["header", "short", "empty", "long", "swap", "other page"])
def test_damaged_frames_do_not_travel(two: Any, migrate: Migrate, damage: str) -> None:
    tree = two.fill("a", chains=3, longest=4)
    one, other = (two.path("a", request.object) for request in tree.requests[-2:])
    data, second = one.read_bytes(), other.read_bytes()
    changed = {
        "header": data[:100] + b"\xff" + data[101:], "short": data[:-1], "empty": b"",
        "long": data + b"\0", "swap": second, "other page": second,
    }[damage]  # fmt: skip
    one.write_bytes(changed)
    if damage == "swap":
        other.write_bytes(data)
    report = migrate(code=1)
    assert report["failed"] >= 1
    two.assert_closed("b")


def test_move(two: Any, migrate: Migrate) -> None:
    pages = len(two.fill("a").requests)
    before = two.frames("a")
    report = migrate("--move")
    assert (report["copied"], report["deleted"]) == (pages, pages)
    assert two.frames("a") == {}
    assert two.frames("b") == before
    with two.opened("a") as backend:
        assert backend.usage().objects == 0


def test_move_keeps_what_others_hang_on(two: Any, migrate: Migrate) -> None:
    """Only old pages are moved; those that a newer one needs stay at the source as well."""
    tree = two.fill("a", chains=1, longest=9)
    last = tree.requests[-1]
    for path in (two.root("a") / "objects").glob("*/*/*"):
        os.utime(path, (1e9, 1e9))
    os.utime(two.path("a", last.object))
    for path in two.root("a").glob("index-*"):
        path.unlink()
    report = migrate("--move", "--older-than", "1d")
    assert report["copied"] == len(tree.requests) - 1
    assert report["deleted"] == 0
    two.assert_closed("a")
    assert len(two.frames("a")) == len(tree.requests)


def test_no_room(two: Any, migrate: Migrate, capsys: pytest.CaptureFixture[str]) -> None:
    tree = two.fill("a")
    bound = ["--set", "backends.b.options.max_bytes=400KiB"]
    migrate(*bound, code=2)
    errors = capsys.readouterr().err
    assert "b has room for 400.0 KiB" in errors
    assert "--may-evict" in errors
    report = migrate(*bound, "--may-evict")
    assert report["complete"]
    assert report["copied"] == len(two.frames("b")) <= 50
    two.assert_closed("b")
    assert len(two.frames("a")) == len(tree.requests)
    migrate("--set", "backends.b.options.min_free_bytes=100TiB", code=2)


def test_a_bounded_destination_that_lost_its_index(two: Any, migrate: Migrate) -> None:
    """It takes nothing before it has counted what it has: the tool waits for that."""
    pages = len(two.fill("a").requests)
    migrate()
    for path in list((two.root("b") / "objects").glob("*/*/*"))[::2]:
        path.unlink()
    for path in two.root("b").glob("index-*"):
        path.unlink()
    report = migrate("--set", "backends.b.options.max_bytes=1GiB")
    assert report["copied"] + report["existed"] == pages
    assert two.frames("a") == two.frames("b")


def test_one_store_under_two_names(
    two: Any, migrate: Migrate, capsys: pytest.CaptureFixture[str]
) -> None:
    two.fill("a", chains=2)
    migrate(to="a", code=2)
    two.root("b").symlink_to(two.root("a"))
    migrate("--move", code=2)
    assert "one store" in capsys.readouterr().err
    assert two.frames("a")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--from", "c"], ["--from c", "a, b"]),
        (["--newer-than", "7"], ["'7'", "not a duration"]),
        (["--rate", "fast"], ["'fast'", "not a size"]),
        (["--rate", "0"], ["never end"]),
        (["--namespace", "xyz"], ["'xyz'", "kvstrata inspect"]),
        (["--journal", "two.toml"], ["two.toml", "not a database"]),
        (["--journal", "/proc/x/y"], ["/proc/x", "journal cannot be made"]),
        (["--json", "/nope/x"], ["no directory"]),
        (["--set", "backends.a.options.path=./nothing"], ["nothing at ./nothing"]),
    ],
)
def test_wrong_use(
    two: Any,
    migrate: Migrate,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    words: list[str],
) -> None:
    two.fill("a", chains=1, longest=2)
    migrate(*args, code=2)
    errors = capsys.readouterr().err
    for word in words:
        assert word in errors
    assert "Traceback" not in errors


def test_journal_of_another_migration(
    two: Any, migrate: Migrate, capsys: pytest.CaptureFixture[str]
) -> None:
    two.fill("a", chains=1, longest=2)
    with Journal("own.journal", "something else"):
        migrate("--journal", "own.journal", code=2)
        assert "another migration is using" in capsys.readouterr().err
    migrate("--journal", "own.journal", code=2)
    assert "journal of another migration" in capsys.readouterr().err


def test_two_roots_configuration(root: Path) -> None:
    two, cache = (load_config(root / f"configs/{n}.toml") for n in ("two-roots", "replay-cache"))
    assert two.l3.backend == "a"
    assert set(two.backends) == {"a", "b"}
    assert [two.backends[n].options.path for n in "ab"] == ["./var/a", "./var/b"]
    for part in ("identity", "pools", "device", "staging", "policies", "scheduler"):
        assert getattr(two, part) == getattr(cache, part)


def test_rate_limit() -> None:
    """On average, and after a pause no more than that."""
    now, waited = 0.0, []

    def wait(seconds: float) -> None:
        nonlocal now
        waited.append(round(seconds, 6))
        now += seconds

    rate = RateLimit(100, wait, lambda: now)
    for _ in range(5):
        rate.take(50)
    assert 1.0 <= now <= 2.5, "250 at 100 a second, less the burst and the last debt"
    assert max(waited) <= 0.5
    now += 10
    rate.take(300)
    rate.take(1)
    assert 2.0 <= waited[-1] <= 3.0
    pauses = len(waited)
    RateLimit(0, wait, lambda: now).take(10**12)
    assert len(waited) == pauses
