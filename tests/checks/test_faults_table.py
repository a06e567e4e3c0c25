"""Every test that `docs/faults.md` names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

NODE = re.compile(r"`([\w/]+\.py)::([\w:]+)`")


def test_every_test_that_is_named_exists(root: Path) -> None:
    text = (root / "docs/faults.md").read_text()
    named = NODE.findall(text)
    assert len(named) > 40
    assert text.count(".py::") == len(named), "a name that this test does not read"
    missing = [f"{file}::{path}" for file, path in named if not _has(root / file, path)]
    assert not missing


def _has(file: Path, path: str) -> bool:
    """Is there a function, or a method of a class, of that name in the file?"""
    if not file.exists():
        return False
    body: list[ast.stmt] = ast.parse(file.read_text()).body
    for name in path.split("::"):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = [node for node in body if isinstance(node, kinds) and node.name == name]
        if not found:
            return False
        body = found[0].body
    return True
