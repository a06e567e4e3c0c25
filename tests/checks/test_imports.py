"""Import contracts, and what start-up may not import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def _run(root: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(root / "src")}
    return subprocess.run(
        args, cwd=root, env=env, capture_output=True, text=True, timeout=100, check=False
    )


def test_import_contracts_hold(root: Path) -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    done = _run(root, str(tool), "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken" in done.stdout


@pytest.mark.parametrize(
    "module", ["kvstrata.tiers", "kvstrata.backends", "kvstrata.configs", "kvstrata.tools.cli"]
)
def test_module_is_imported_without_torch(root: Path, module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    done = _run(root, sys.executable, "-c", code)
    assert done.returncode == 0, f"{module} imports torch: {done.stderr}"
