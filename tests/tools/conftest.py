"""The command as people start it: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`run("config", "check", FILE)`: `kvstrata` in a process, in an empty working directory."""

    def call(*args: str | Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
        places = [str(ROOT / "src"), *([str(path)] if path else [])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "COLUMNS": "200"}
        work = tmp_path / "work"
        work.mkdir(exist_ok=True)
        return subprocess.run(
            [sys.executable, "-m", "kvstrata.tools.cli", *map(str, args)],
            cwd=work, env=env, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    return call


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A small configuration on the memory plugin."""
    path = tmp_path / "c.toml"
    path.write_text((ROOT / "configs/memory.toml").read_text())
    return path


@pytest.fixture
def plugin_dir(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with two more distributions: one raises on import, one is fine."""
    folder = tmp_path / "plugins"
    for name, body in (
        ("broken_store", "raise RuntimeError('no driver on this machine')\n"),
        (
            "fine_store",
            (
                "import msgspec\n"
                "from kvstrata.backends.memory import MemoryBackend\n"
                "class FineOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):\n"
                "    api_key: str = 'built-in'\n"
                "    '''Secret of the store.'''\n"
                "    max_bytes: int = 0\n"
                "class Fine(MemoryBackend):\n"
                "    Options = FineOptions\n"
            ),
        ),
    ):
        info = folder / f"{name}-1.2.dist-info"
        info.mkdir(parents=True)
        (folder / f"{name}.py").write_text(body)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        target = "Broken" if name == "broken_store" else "Fine"
        (info / "entry_points.txt").write_text(
            f"[kvstrata.backends]\n{name.removesuffix('_store')} = {name}:{target}\n"
        )
    return folder
