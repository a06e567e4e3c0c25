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


COLLECT = """
import contextlib, io, json, sys
import pytest

def collect(arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        pytest.main(arguments)
    return out.getvalue()

runs, ask_torch = json.load(sys.stdin)
found = [collect(run) for run in runs]
exec(ask_torch)  # the last line of the output
sys.stderr.write(json.dumps(found))
"""
"""All runs in one process: what takes the time is to import torch."""


@pytest.fixture
def bare(uncovered: dict[str, str], root: Path) -> dict[str, str]:
    """The environment of a machine without a plugin of pytest."""
    return {**uncovered, "PYTHONPATH": str(root / "src"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def test_a_part_finds_its_tests(parts: ModuleType, root: Path, bare: dict[str, str]) -> None:
    """Every test that is marked `cuda` is in exactly one part, also without any plugin; and torch
    has what it is asked for."""
    assert parts.PYTEST[1:3] == ["-m", "pytest"]
    marks = (parts.MARK, parts.CONTROL)
    everything = sorted({f for mark in marks for f in parts.having(mark, "tests/**/test_*.py")})
    chosen = [*parts.TESTS.values(), everything]
    chosen += [[*parts.SANITIZED_FILES, "-k", choice] for choice in parts.SANITIZED.values()]
    runs = [[*parts.PYTEST[3:], "--collect-only", *tests] for tests in chosen]
    done = subprocess.run([sys.executable, "-c", COLLECT], cwd=root, env=bare,
                          input=json.dumps([runs, parts._ASK_TORCH]),
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    outputs = json.loads(done.stderr)
    assert not [output for output in outputs if "error" in output.lower()]
    found = [set(re.findall(r"^tests/\S+::\S.*$", text, re.MULTILINE)) for text in outputs]
    assert all(found)
    of_parts, everything = found[: len(parts.TESTS)], found[len(parts.TESTS)]
    assert sum(map(len, of_parts)) == len(set.union(*of_parts)), "a test is in two parts"
    assert set.union(*of_parts) == everything, "one is in no part"
    assert json.loads(done.stdout).keys() == {"name", "count", "cuda"}


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


def test_counts_and_failures_are_read(
    parts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
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


TORCH = """
from types import SimpleNamespace
cuda = SimpleNamespace(is_available=lambda: True, get_device_name=lambda index: f"GPU {index}",
                       device_count=lambda: 3)
version = SimpleNamespace(cuda="13.0")
"""
"""As much of torch as is asked; `test_a_part_finds_its_tests` asks the real one."""


@pytest.mark.parametrize("text", [TORCH, "raise OSError('no driver')"], ids=["there", "broken"])
def test_the_machine_is_described(
    parts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "torch.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = parts.machine()
    assert found["versions"]["torch"]
    if text is TORCH:
        assert found["device"] == {"name": "GPU 0", "count": 3}
        assert found["versions"]["cuda"] == "13.0"
    else:
        assert found["device"]["name"] == ""
        assert found["device"]["error"]
