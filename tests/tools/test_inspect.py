"""`kvstrata inspect`: the figures are those of what was stored; one frame is decoded."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstrata.tools import cli

Inspect = Callable[..., dict[str, Any]]


@pytest.fixture
def inspect(two: Any, monkeypatch: pytest.MonkeyPatch) -> Inspect:
    """`inspect("a", code=1)`: the command; its report."""
    monkeypatch.chdir(two.folder)

    def call(*args: str | Path, code: int = 0, config: bool = True) -> dict[str, Any]:
        out = two.folder / "report.json"
        out.unlink(missing_ok=True)
        options = ["--config", two.config] if config else []
        command = ["inspect", "--json", out, *options, *args]
        assert cli.main([str(arg) for arg in command]) == code
        return json.loads(out.read_bytes()) if out.exists() else {}

    return call


def test_shape(two: Any, inspect: Inspect, make_tree: Any) -> None:
    tree = two.fill("a", chains=40, longest=9)
    other = make_tree(b"\x07" * 32, 3).grow(3, 5)
    two.store("a", other.requests)
    old = two.path("a", other.requests[0].object)
    before = two.frames("a")
    report = inspect()
    assert report["backend"] == "a"
    assert report["objects"] == len(before)
    mine, foreign = report["namespaces"]
    assert (mine["name"], foreign["name"]) == ("kv of oracle", "")
    assert mine["pages"] == len(tree.requests)
    assert mine["bytes"] == sum(r.nbytes for r in tree.requests)
    assert mine["page_bytes"] == [512]
    children = Counter(r.parent for r in tree.requests if r.parent is not None)
    assert mine["chains"] == sum(r.depth == 0 for r in tree.requests)
    assert mine["leaves"] == len(tree.requests) - len(children)
    assert mine["branching"] == sum(count > 1 for count in children.values())
    assert mine["longest"] == max(r.depth for r in tree.requests) + 1
    assert sum(bucket["pages"] for bucket in mine["depths"]) == len(tree.requests)
    assert sum(bucket["pages"] for bucket in mine["children"]) == len(tree.requests)
    assert mine["ages"] == [{"label": "last minute", "pages": len(tree.requests)}]
    assert mine["depths"][0] == {"label": "0", "pages": mine["chains"]}
    assert (mine["orphans"], mine["faulty"]) == (0, 0)
    assert inspect("--namespace", "0707")["namespaces"] == [
        {**foreign, "newest_use_s": pytest.approx(0, abs=60),
         "oldest_use_s": pytest.approx(0, abs=60)}
    ]  # fmt: skip
    assert two.frames("a") == before
    os.truncate(old, 10)
    (_, foreign) = inspect()["namespaces"]
    assert foreign["faulty"] == 1


@pytest.mark.parametrize(("used_s", "label"), [(1e9, "older"), (0.0, "not known")])
def test_ages(two: Any, inspect: Inspect, used_s: float, label: str) -> None:
    tree = two.fill("a", chains=1, longest=4)
    for path in (two.root("a") / "objects").glob("*/*/*"):
        os.utime(path, (used_s, used_s))
    for path in two.root("a").glob("index-*"):
        path.unlink()
    (shape,) = inspect("a")["namespaces"]
    assert shape["ages"] == [{"label": label, "pages": len(tree.requests)}]
    assert (shape["oldest_use_s"] is None) == (used_s == 0)


def test_an_empty_store(two: Any, inspect: Inspect, capsys: pytest.CaptureFixture[str]) -> None:
    inspect("b", code=2)
    assert "there is nothing at" in capsys.readouterr().err
    two.store("b", [])
    assert inspect("b")["namespaces"] == []


def test_frame_by_key_and_by_file(
    two: Any, inspect: Inspect, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = two.fill("a")
    page = tree.requests[-1]
    by_key = inspect("--frame", page.object.key.hex()[:12])
    by_name = inspect("--frame", page.object.name)
    path = two.path("a", page.object)
    by_file = inspect("--frame", path)
    bare = inspect("--frame", path, config=False)
    assert by_key == by_name
    for report in (by_key, by_file, bare):
        assert report["verdict"] == "ok"
        assert report["key"] == page.object.key.hex()
        assert report["depth"] == page.depth
        assert report["parent"] == (page.parent.key.hex() if page.parent else "")
        assert report["stored_bytes"] == 512
        assert bytes.fromhex(report["first_bytes"]) == bytes(page.buffers[1][:32])
    assert "1 layers x K, V x 16 tokens" in by_file["meaning"]
    assert bare["meaning"] == ""
    inspect("--frame", "ffffffffffff0", code=2)
    assert "no key begins so" in capsys.readouterr().err
    inspect("--frame", "nothing", code=2, config=False)
    assert "--frame: there is no file nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda data: data[:100], "only 100 of"),
        (lambda data: data[:-1], "cut off"),
        (lambda data: data + b"\0", "too long"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "checksum"),
        (lambda data: b"x" + data[1:], "not a frame"),
    ],
)
def test_a_frame_that_is_wrong(two: Any, inspect: Inspect, damage: Any, word: str) -> None:
    path = two.path("a", two.fill("a").requests[3].object)
    path.write_bytes(damage(path.read_bytes()))
    assert word in inspect("--frame", path, code=1)["verdict"]
    assert word in inspect("--frame", path.name, code=1)["verdict"]


def test_of_what_is_no_frame_nothing_is_made_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    junk = tmp_path / "junk"
    junk.write_bytes(bytes(range(200)) * 30)
    assert cli.main(["inspect", "--frame", str(junk)]) == 1
    shown = capsys.readouterr().out
    assert "not a frame" in shown
    assert "6,000" in shown
    assert "depth" not in shown
    assert "checksum kind" not in shown


def test_a_frame_in_anothers_place(two: Any, inspect: Inspect) -> None:
    one, other = (two.path("a", r.object) for r in two.fill("a").requests[:2])
    one.write_bytes(other.read_bytes())
    assert "lies here" in inspect("--frame", one, code=1)["verdict"]
