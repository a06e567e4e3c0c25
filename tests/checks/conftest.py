"""Where the checkout's files are."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("backends", "configs", "gpu_runtime", "staging", "tiers", "tools")


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def packages() -> tuple[str, ...]:
    """The folders at the root that are packages of `kvstrata`."""
    return PACKAGES


@pytest.fixture(scope="session")
def product_files() -> list[Path]:
    """Every Python file of the product."""
    files = [f for name in PACKAGES for f in (ROOT / name).rglob("*.py")]
    files += (ROOT / "src/kvstrata").glob("*.py")
    assert len(files) > len(PACKAGES), "the product's files were not found"
    return sorted(files)


@pytest.fixture(scope="session")
def all_files(product_files: list[Path]) -> list[Path]:
    """Every Python file of the repository: product, tests and examples."""
    more = [f for name in ("tests", "examples") for f in (ROOT / name).rglob("*.py")]
    return sorted([*product_files, *more])
