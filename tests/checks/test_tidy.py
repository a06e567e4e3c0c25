"""The habits of the code that no tool checks: size, docstrings, words, imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

MAX_FUNCTION_LINES = 70
MAX_FILE_LINES = 400

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("src/kvstrata/boundary.py", "file"): "all values of one contract, mostly docstrings",
}
"""(path, function or "file") → why it may be longer."""

# Put together here, so that this file does not find itself.
UNFINISHED = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "X" * 3)))
BARE_PACKAGES = {"backends", "configs", "gpu_runtime", "staging", "tiers", "tools"}


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def test_functions_fit_a_screen(all_files: list[Path], root: Path) -> None:
    long = []
    for path in all_files:
        for node in _functions(ast.parse(path.read_text())):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES and (_name(path, root), node.name) not in EXCEPTIONS:
                long.append(f"{_name(path, root)}:{node.lineno} {node.name}: {lines} lines")
    assert not long, f"more than {MAX_FUNCTION_LINES} lines: {long}"


def test_files_are_short(all_files: list[Path], root: Path) -> None:
    long = []
    for path in all_files:
        lines = len(path.read_text().splitlines())
        if lines > MAX_FILE_LINES and (_name(path, root), "file") not in EXCEPTIONS:
            long.append(f"{_name(path, root)}: {lines} lines")
    assert not long, f"more than {MAX_FILE_LINES} lines: {long}"


def test_exceptions_are_still_needed(root: Path) -> None:
    for (name, what), reason in EXCEPTIONS.items():
        assert reason, f"say why {name} {what} may be longer"
        text = (root / name).read_text()
        if what == "file":
            assert len(text.splitlines()) > MAX_FILE_LINES, f"{name} is short enough now"
        else:
            assert any(
                f.name == what and (f.end_lineno or 0) - f.lineno + 1 > MAX_FUNCTION_LINES
                for f in _functions(ast.parse(text))
            ), f"{name} {what} is short enough now"


def test_every_module_says_what_it_is(all_files: list[Path], root: Path) -> None:
    bare = [_name(p, root) for p in all_files if not ast.get_docstring(ast.parse(p.read_text()))]
    assert not bare, f"without a docstring: {bare}"


def test_nothing_is_left_unfinished(all_files: list[Path], root: Path) -> None:
    found = [
        f"{_name(path, root)}:{number}: {line.strip()}"
        for path in all_files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if UNFINISHED.search(line)
    ]
    assert not found, "open an issue instead:\n" + "\n".join(found)


def test_the_product_does_not_print(product_files: list[Path], root: Path) -> None:
    found = [
        f"{_name(path, root)}:{node.lineno}"
        for path in product_files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert not found, f"use typer.echo, a console or a logger: {found}"


def test_packages_are_imported_by_their_full_name(all_files: list[Path], root: Path) -> None:
    """`import tiers` would make a second module beside `kvstrata.tiers`."""
    found = []
    for path in all_files:
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            if any(name.split(".")[0] in BARE_PACKAGES for name in names):
                found.append(f"{_name(path, root)}:{node.lineno}")
    assert not found, f"import kvstrata.<package>: {found}"


def test_names_in_all_exist_and_inits_only_re_export(root: Path, packages: tuple[str, ...]) -> None:
    for package in packages:
        for path in (root / package).rglob("__init__.py"):
            tree = ast.parse(path.read_text())
            kinds = {type(node) for node in tree.body}
            allowed = {ast.Expr, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.If}
            assert kinds <= allowed, f"{_name(path, root)} holds code: {kinds - allowed}"
            assert any("__all__" in ast.unparse(node) for node in tree.body), (
                f"{_name(path, root)} has no __all__"
            )


def test_the_rules_find_what_they_look_for(tmp_path: Path) -> None:
    """The checks above can fail."""
    long = "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES
    (node,) = _functions(ast.parse(long))
    assert (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    assert UNFINISHED.search("# TO" + "DO: later")
