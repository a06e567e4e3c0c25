"""No wait without its mutation: every place of the runtime that orders work, or holds what work
uses, is one that `test_waits_of_…` or `test_epochs` take out, or its reason stands here."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CALLS = {
    "wait_event", "on_complete", "record", "begin_load", "begin_compute", "begin_backup",
    "end_backup", "hold", "release_l1", "give_back", "quarantine", "strand", "end_lend",
}  # fmt: skip
"""What orders, holds, lends, or gives back."""

EACH = {"wait_event", "on_complete", "record", "hold", "begin_backup", "end_backup"}
"""Of these an edit must replace the call itself; of the others, something in its function."""

DEVICES = ("cpu", "cuda", "cuda_copies", "cuda_events", "hurry", "sim", "turns")
"""Devices keep the contract of streams by themselves; their tests are of their own."""

_STATE = "a state that the page table demands; no other thread looks before the copy has ended"

REASONS: dict[tuple[str, str, str], str] = {
    ("backup", "BackupToL2._granted", "begin_load"): _STATE,
    ("prefetch", "PrefetchToL1.start", "begin_load"): _STATE,
    ("batches", "BatchEngine._drop_row", "release_l1"): (
        "a row goes when control releases it, whatever batches name it"
    ),
    ("prefetch", "PrefetchToL2._free_tail", "give_back"): (
        "host pages of a load to L2 that was given up are free at once"
    ),
    ("prefetch", "_quarantine", "quarantine"): (
        "window pages of a load that was given up are free at once"
    ),
    ("transfers", "settle_l1", "release_l1"): (
        "device pages of a load are free while one of its chunks is copied"
    ),
    ("compute", "Compute.__init__", "wait_event"): (
        "what the constructor enqueued on a stream that is none of ours: only a GPU has one"
    ),
    ("copy_queue", "CopyQueue._pump", "on_complete"): (
        "who comes first, not what waits for what: without it an urgent copy is late"
    ),
    ("transfer_interface", "AdoptedPools.fence", "wait_event"): (
        "pools of another engine: the tests of the transfer interface, not of the runtime"
    ),
    ("transfer_interface", "AdoptedPools._copy", "on_complete"): (
        "lets go of a chunk's memory; without it the memory only stays longer"
    ),
    ("transfer_interface", "Transfer.on_complete", "on_complete"): (
        "hands the engine's callback on; nothing of the runtime waits for it"
    ),
}
"""(file, function, call) → the mutation that covers it under another function's name, or why no
order depends on it."""

Site = tuple[str, str, str]


def sites(root: Path) -> Iterator[Site]:
    for file in sorted((root / "gpu_runtime").glob("*.py")):
        if file.stem not in DEVICES:
            for function, name in _functions(ast.parse(file.read_text()).body, ""):
                for node in ast.walk(function):
                    called = node.func if isinstance(node, ast.Call) else None
                    if isinstance(called, ast.Attribute) and called.attr in CALLS:
                        yield file.stem, name, called.attr


def _functions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[ast.FunctionDef, str]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield node, prefix + node.name


def mutated(folder: Path) -> Iterator[tuple[str, str, str, str]]:
    """(file, function, what is replaced, the mutation's name) of every edit."""
    for name in ("test_waits_of_batches", "test_waits_of_moves", "test_epochs"):
        spec = importlib.util.spec_from_file_location(f"sites_{name}", folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        planted = {k: edits for k, (_, _, edits) in getattr(module, "WAITS", {}).items()}
        planted |= {k: (edit,) for k, edit in getattr(module, "GUARDS", {}).items()}
        for title, edits in planted.items():
            for owner, function, old, _ in edits:
                home = getattr(owner, "__module__", None) or owner.__name__
                inside = f"{owner.__name__}." if isinstance(owner, type) else ""
                yield home.rpartition(".")[2], inside + function, old, title


@pytest.fixture
def root() -> Path:
    return Path(__file__).resolve().parents[3]


def test_every_wait_is_taken_out_or_explained(root: Path) -> None:
    edits = list(mutated(Path(__file__).parent))
    places = {(file, function) for file, function, _, _ in edits}
    found = set(sites(root))
    assert len(found) > 30, "they are not found any more"
    bare = {s for s in found if s[:2] not in places and s not in REASONS}
    texts = [(file, function, old) for file, function, old, _ in edits]
    bare |= {s for s in found if s[2] in EACH and not _names(s, texts) and s not in REASONS}
    assert not bare, f"plant a mutation that takes it out, or give a reason: {sorted(bare)}"
    stale = sorted(s for s in REASONS if s not in found)
    assert not stale, f"not needed any more: {stale}"


def _names(site: Site, texts: list[tuple[str, str, str]]) -> bool:
    """Does an edit of that function replace that very call?"""
    return any((file, function) == site[:2] and site[2] in old for file, function, old in texts)
