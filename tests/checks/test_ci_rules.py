"""The rules of the test run itself: skips fail in CI, seeds are printed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TESTS = """\
import pytest

def test_passes():
    pass

@pytest.mark.skip(reason="no reason")
def test_marked():
    pass

def test_skips_inside():
    pytest.skip("not today")

@pytest.mark.cuda
def test_gpu():
    pytest.skip("no GPU")

@pytest.mark.xfail(reason="known")
def test_expected():
    raise AssertionError

def test_seed(seed):
    assert isinstance(seed, int)
"""


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """A folder with this repository's conftest and a few tests."""
    (tmp_path / "conftest.py").write_text((root / "tests/conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    cuda: needs a GPU\n")
    (tmp_path / "test_some.py").write_text(TESTS)
    return tmp_path


@pytest.fixture
def run_pytest(checkout: Path, uncovered: dict[str, str]) -> Run:
    """`run_pytest("-k", …, ci="true")` there."""
    env = {**uncovered, "KVSTRATA_TEST_SEED": "77", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    plugins = ["-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin"]

    def run(*args: str, ci: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-rA", *plugins, *args],
            cwd=checkout, env={**env, "CI": ci}, timeout=60,
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


def test_skips_fail_in_ci_and_only_there(run_pytest: Run) -> None:
    at_home = run_pytest(ci="")
    assert at_home.returncode == 0, at_home.stdout
    in_ci = run_pytest(ci="true")
    assert in_ci.returncode == 1, in_ci.stdout
    assert "1 failed, 2 passed, 1 skipped, 1 xfailed, 1 error" in in_ci.stdout
    assert "CI allows no skip here: Skipped: no reason" in in_ci.stdout
    assert "SKIPPED" in in_ci.stdout
    assert "no GPU" in in_ci.stdout


def test_a_skipped_module_fails_in_ci(checkout: Path, run_pytest: Run) -> None:
    (checkout / "test_some.py").write_text(
        "import pytest\npytest.skip('whole file', allow_module_level=True)\n"
    )
    assert run_pytest(ci="").returncode == 5
    in_ci = run_pytest(ci="true")
    assert in_ci.returncode not in (0, 5)
    assert "CI allows no skip here" in in_ci.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "profile ci (derandomized)"),
        (["--hypothesis-profile=explore"], "profile explore (random"),
        (["--hypothesis-profile=explore", "--hypothesis-seed=5"], "profile explore (seed 5)"),
    ],
)
def test_seeds_are_printed(run_pytest: Run, args: list[str], words: str) -> None:
    done = run_pytest("-k", "passes", *args, ci="true")
    assert f"seeds: KVSTRATA_TEST_SEED=77; hypothesis {words}" in done.stdout
