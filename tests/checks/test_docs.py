"""Links in the documentation lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)[^)]*\)|!\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+\s+(.*?)\s*$", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def _anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower().replace("`", "")).replace(" ", "-")


def _broken(page: Path) -> list[str]:
    text = _FENCE.sub("", page.read_text())
    broken = []
    for match in _LINK.finditer(text):
        link = match[1] or match[2]
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        if not target.exists():
            broken.append(link)
        elif anchor and target.suffix == ".md":
            headings = _HEADING.findall(_FENCE.sub("", target.read_text()))
            if anchor not in {_anchor(h) for h in headings}:
                broken.append(link)
    return broken


def _pages(root: Path) -> list[Path]:
    return [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "examples").rglob("*.md")]


def test_relative_links_resolve(root: Path) -> None:
    broken = {p.relative_to(root).as_posix(): found for p in _pages(root) if (found := _broken(p))}
    assert not broken


def test_file_names_in_code_spans_exist(root: Path) -> None:
    """`configs/local.toml` in a page is a file of this repository."""
    folders = "tiers|staging|backends|gpu_runtime|configs|tools|tests|examples|docs|src"
    span = re.compile(rf"`((?:{folders})/[\w./\-]+\.(?:py|toml|md|jsonl))`")
    missing = [
        f"{page.name}: {name}"
        for page in _pages(root)
        for name in span.findall(page.read_text())
        if not (root / name).exists()
    ]
    assert not missing


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("[a](b.md)", ["b.md"]),
        ("[a](here.md#gone)", ["here.md#gone"]),
        ("[a](here.md#a-part-of-it) [b](https://x.org/y) [c](#a-part-of-it)", []),
        ("![p](picture.png)", ["picture.png"]),
        ("```\n[a](b.md)\n```", []),
    ],
)
def test_broken_links_are_found(tmp_path: Path, text: str, broken: list[str]) -> None:
    page = tmp_path / "here.md"
    page.write_text(f"# A `part` of it!\n\n{text}\n")
    assert _broken(page) == broken


def test_readme_shows_the_plugin_of_the_documentation(root: Path) -> None:
    """That one is run through the conformance suite (tests/backends/test_plugin_docs.py)."""
    blocks = {}
    for name in ("README.md", "docs/plugins.md"):
        found = re.findall(r"```python\n(.*?)```", (root / name).read_text(), re.DOTALL)
        blocks[name] = [block for block in found if "class DictStore" in block]
    assert len(blocks["README.md"]) == 1
    assert blocks["README.md"] == blocks["docs/plugins.md"]


def test_readme_config_is_valid(root: Path, tmp_path: Path) -> None:
    from kvstrata.configs import load_config

    [text] = re.findall(r"```toml\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
    path = tmp_path / "readme.toml"
    path.write_text(text)
    assert load_config(path).l3.backend == "disk"
