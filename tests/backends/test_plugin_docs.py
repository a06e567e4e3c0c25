"""The example distribution and the code in the documentation work as they stand."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from kvstrata.backends.testing import run_conformance

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "kvstrata-dirstore"


def test_example_distribution(tmp_path: Path, uncovered: dict[str, str]) -> None:
    """B109: built and installed like any other, found by its entry point, and its own tests (the
    conformance suite) pass."""
    target = tmp_path / "site"
    copy = tmp_path / "source"
    ignore = ("__pycache__", "*.egg-info", "build")
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns(*ignore))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--no-compile"]
    environment = {
        **uncovered,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", target, copy],
        check=True,
        env=environment,
    )
    environment["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{target}"
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", copy / "tests"]
    out = subprocess.run(
        tests, check=False, env=environment, cwd=copy, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stdout + out.stderr
    assert "passed" in out.stdout


def test_plugin_of_the_documentation() -> None:
    text = (ROOT / "docs" / "plugins.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [source] = [block for block in blocks if "class DictStore" in block]
    scope: dict[str, object] = {}
    exec(compile(source, "docs/plugins.md", "exec"), scope)
    store, options = scope["DictStore"], scope["NoOptions"]
    assert isinstance(store, type)
    assert isinstance(options, type)
    results = run_conformance(lambda: store(options()))
    assert [result for result in results if not result.passed] == []


def test_options_of_the_documentation() -> None:
    """Every other block of Python is at least correct Python."""
    text = (ROOT / "docs" / "plugins.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        compile(block, "docs/plugins.md", "exec")
