"""The layout: links, the installed package, the wheel, the files that others name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest


def test_links_resolve_to_the_root_folders(root: Path, packages: tuple[str, ...]) -> None:
    links = {p.name: p for p in (root / "src/kvstrata").iterdir() if p.is_symlink()}
    assert set(links) == set(packages)
    for name, link in links.items():
        assert os.readlink(link) == f"../../{name}", "links are relative, so that clones work"
        assert link.resolve() == root / name
        assert (link / "__init__.py").is_file()


def test_links_are_stored_as_links(root: Path, packages: tuple[str, ...]) -> None:
    if not (root / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(
        ["git", "ls-files", "-s", "src/kvstrata"],
        cwd=root, check=True, capture_output=True, text=True, timeout=30,
    ).stdout  # fmt: skip
    links = {line.split("/")[-1] for line in listing.splitlines() if line.startswith("120000")}
    assert links == set(packages)


def test_root_holds_what_it_promises(root: Path) -> None:
    for name in (
        "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "constraints.txt",
        "docs", "examples", "pyproject.toml", ".ci/run",
    ):  # fmt: skip
        assert (root / name).exists(), name
    assert os.access(root / ".ci/run", os.X_OK)
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    for name in (project["readme"], *project["license-files"]):
        assert (root / name).is_file(), name
    assert "Apache License" in (root / "LICENSE").read_text()


def test_installed_entry_points_are_those_of_pyproject(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    installed = {e.name: e.value for e in entry_points(group="kvstrata.backends")}
    for name, value in project["entry-points"]["kvstrata.backends"].items():
        assert installed.get(name) == value, "run: make setup"
    scripts = {e.name: e.value for e in entry_points(group="console_scripts")}
    assert scripts["kvstrata"] == project["scripts"]["kvstrata"]


def test_constraints_pin_exactly_what_is_installed(root: Path) -> None:
    from importlib.metadata import version

    for line in (root / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, pinned = line.partition("==")
            assert re.fullmatch(r"[\w.]+", pinned), line
            assert version(name).split("+")[0] == pinned, "run: make setup"


@pytest.fixture(scope="session")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from a copy of what the repository tracks or would track."""
    source = tmp_path_factory.mktemp("source")
    names = ("src", "backends", "configs", "gpu_runtime", "staging", "tiers", "tools")
    files = ("pyproject.toml", "README.md", "LICENSE")
    subprocess.run(
        ["tar", "-C", str(root), "--exclude=__pycache__", "--exclude=*.egg-info", "-cf",
         str(source / "all.tar"), *names, *files],
        check=True, timeout=60,
    )  # fmt: skip
    subprocess.run(["tar", "-C", str(source), "-xf", str(source / "all.tar")], check=True)
    out = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
         "--no-index", "-w", str(out), str(source)],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_every_module_and_all_data(
    wheel: zipfile.ZipFile, root: Path, packages: tuple[str, ...]
) -> None:
    names = set(wheel.namelist())
    expected = {f"kvstrata/{p.name}" for p in (root / "src/kvstrata").glob("*.py")}
    expected.add("kvstrata/py.typed")
    for package in packages:
        for path in (root / package).rglob("*"):
            if path.suffix in (".py", ".toml", ".jsonl") and path.is_file():
                expected.add(f"kvstrata/{path.relative_to(root).as_posix()}")
    assert expected <= names, sorted(expected - names)


def test_wheel_has_no_other_top_level_package(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    info = {top for top in tops if top.endswith(".dist-info")}
    assert tops - info == {"kvstrata"}
    (top,) = info
    assert f"{top}/licenses/LICENSE" in wheel.namelist()
    assert "kvstrata = kvstrata.tools.cli:main" in wheel.read(f"{top}/entry_points.txt").decode()


def test_wheel_works_without_the_checkout(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Modules, package data and the command are all there."""
    wheel.extractall(tmp_path / "site")
    code = (
        "import kvstrata.configs, kvstrata.tools.cli\n"
        "from pathlib import Path\n"
        "from kvstrata.tools.trace import read_trace, shipped_trace\n"
        "assert len(list(read_trace(shipped_trace()))) == 60\n"
        "import kvstrata; here = Path(kvstrata.__file__).parent\n"
        "assert (here / 'configs/local.toml').is_file()\n"
        f"assert here.is_relative_to({str(tmp_path)!r}), here\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")}, cwd=tmp_path,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
