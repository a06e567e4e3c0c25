"""`make gpu` on a machine without a GPU: its parts run, and their reports become one."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def parts(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_parts", root / "tests/gpu_parts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_part_finds_its_tests(parts: ModuleType, root: Path) -> None:
    """Every test that is marked `cuda` is in exactly one part, also without any plugin."""

    def collect(*args: str) -> set[str]:
        plugins = [
            arg for name in ("timeout", "xdist", "pytest_cov") for arg in ("-p", f"no:{name}")
        ]
        done = subprocess.run([*parts.PYTEST, *plugins, "--collect-only", *args], cwd=root,
                              capture_output=True, text=True, check=False)  # fmt: skip
        assert "error" not in done.stdout.lower(), done.stdout
        return set(re.findall(r"^tests/\S+::\S.*$", done.stdout, re.MULTILINE))

    chosen = [collect(*tests) for tests in parts.TESTS.values()]
    assert all(chosen)
    assert sum(map(len, chosen)) == len(set.union(*chosen)), "a test is in two parts"
    assert set.union(*chosen) == collect(*parts.marked("tests/**/test_*.py")), "one is in no part"
    for choice in parts.SANITIZED.values():
        assert collect(*parts.SANITIZED_FILES, "-k", choice)


TESTS = """
import pytest
pytestmark = pytest.mark.cuda

def test_good(): pass

def test_bad(): assert 1 == 2, "planted"

@pytest.mark.skip(reason="no GPU")
def test_skipped(): pass

@pytest.fixture
def broken(): raise OSError("planted too")

def test_error(broken): pass
"""


def test_counts_and_failures_are_read(parts: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
    found = parts.run_pytest(command, [str(file), f"--rootdir={tmp_path}", "-c", "/dev/null"], 60)
    assert found["status"] == "failed"
    assert found["counts"] == {"passed": 1, "failed": 1, "error": 1, "skipped": 1}
    assert [f["test"].rpartition("::")[2] for f in found["failures"]] == ["test_bad", "test_error"]
    assert "planted" in found["failures"][0]["message"]


def test_one_that_does_not_end_is_killed(parts: ModuleType) -> None:
    command = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    assert parts.run_pytest(command, [], 0.2)["status"] == "timed out"


@pytest.mark.parametrize("lost", [(), ("order",)])
def test_parts_are_merged(
    parts: ModuleType, tmp_path: Path, lost: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "gpu"
    out.mkdir()
    counts = {"passed": 3, "failed": 0, "error": 0, "skipped": 1}
    values: dict[str, Any] = {
        part: {"part": part, "status": "passed", "seconds": 1.5, "counts": counts,
               "failures": [], "device": {"name": "some GPU"}}
        for part in parts.PARTS
    }  # fmt: skip
    values["sanitize"] = {"part": "sanitize", "status": "unavailable", "reason": "not installed"}
    for part, value in values.items():
        if part not in lost:
            (out / f"{part}.json").write_text(json.dumps(value))
    monkeypatch.setattr(sys, "argv", ["gpu_parts.py", "merge", "--out", str(out)])
    assert parts.main() == (1 if lost else 0)
    merged = json.loads((tmp_path / "gpu.json").read_text())
    assert merged["ok"] is not bool(lost)
    assert [p for p, v in merged["parts"].items() if v["status"] == "missing"] == list(lost)
    printed = capsys.readouterr().out
    assert "some GPU" in printed
    assert "sanitize: not installed" in printed


def test_the_machine_is_described(parts: ModuleType) -> None:
    found = parts.machine()
    assert found["versions"]["torch"]
    assert "name" in found["device"]
