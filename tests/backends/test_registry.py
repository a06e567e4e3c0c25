"""Plugins by name: lazy, validated, and blamed by name and distribution."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kvstrata.backends import Isolation, StorageBackend, build_options, list_plugins, load_plugin
from kvstrata.backends.filesystem import FilesystemBackend, FilesystemOptions
from kvstrata.backends.memory import MemoryBackend, MemoryOptions
from kvstrata.errors import ConfigError, PluginError, Where

GOOD = """
from kvstrata.backends.memory import MemoryBackend
class Backend(MemoryBackend):
    pass
"""

ABSTRACT = """
from kvstrata.backends import StorageBackend
class Backend(StorageBackend):
    def open(self, context): ...
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a module, and a distribution that has it as a backend, on the path."""
    modules = []
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(source: str, name: str = "other", dist: str = "kv-other", target: str = "") -> None:
        module = dist.replace("-", "_")
        modules.append(module)
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
        point = f"[kvstrata.backends]\n{name} = {module}:{target or 'Backend'}\n"
        (info / "entry_points.txt").write_text(point)

    yield put
    for module in modules:
        sys.modules.pop(module, None)


def test_built_in() -> None:
    assert load_plugin("memory") is MemoryBackend
    assert load_plugin("filesystem") is FilesystemBackend
    assert {"memory", "filesystem"} <= {info.name for info in list_plugins()}


def test_a_plugin(install: Install) -> None:
    install(GOOD)
    backend = load_plugin("other")
    assert issubclass(backend, StorageBackend)
    [info] = [info for info in list_plugins() if info.name == "other"]
    assert info.distributions == ("kv-other",)
    assert info.target == "kv_other:Backend"


def test_lazy(install: Install) -> None:
    """A plugin that nobody asks for is not imported, whatever it would do."""
    install("raise SystemExit(9)")
    assert "other" in {info.name for info in list_plugins()}
    assert load_plugin("memory") is MemoryBackend


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import missing_module", "ModuleNotFoundError"),
        ("raise SystemExit(9)", "SystemExit"),
        ("1/0", "ZeroDivisionError"),
        ("class GeneratorExit2(BaseException): pass\nraise GeneratorExit2('x')", "GeneratorExit2"),
        ("def f(:", "SyntaxError"),
        ("", "AttributeError"),
    ],
)
def test_import_that_fails(install: Install, source: str, reason: str) -> None:
    install(source)
    with pytest.raises(PluginError, match=reason) as caught:
        load_plugin("other")
    assert "'other'" in str(caught.value)
    assert "'kv-other'" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("Backend = 3", "not a subclass"),
        ("class Backend: pass", "not a subclass"),
        (GOOD + "    api_version = 0", "version 0 of the storage contract"),
        (GOOD + "    api_version = 3", "version 3 of the storage contract"),
        (GOOD + '    isolation = "process"', "not a member of Isolation"),
        (GOOD + "    Options = dict", "not a msgspec.Struct"),
        (
            "import msgspec\n" + GOOD + "    class Options(msgspec.Struct): pass",
            "forbid_unknown_fields",
        ),
        (
            ABSTRACT,
            "does not implement close, delete, exists, read, scan, usage, write",
        ),
    ],
)
def test_contract_that_is_not_kept(install: Install, source: str, reason: str) -> None:
    """B109, B110: another version of the contract, and methods that are missing, are refused with
    a clear message before anything is made."""
    install(source)
    with pytest.raises(PluginError, match=reason) as caught:
        load_plugin("other")
    assert "'kv-other'" in str(caught.value)


def test_a_plugin_of_the_contract_before(install: Install) -> None:
    """B109: version 1 knew no isolation; such a plugin loads, and runs on threads."""
    install(GOOD + "    api_version = 1")
    assert load_plugin("other").isolation is Isolation.THREAD


def test_two_claim_one_name(install: Install) -> None:
    install(GOOD)
    install(GOOD, dist="kv-second")
    with pytest.raises(PluginError, match="'kv-other' and 'kv-second'"):
        load_plugin("other")


def test_a_plugin_does_not_take_a_built_in_name(install: Install) -> None:
    install(GOOD, name="filesystem")
    with pytest.raises(PluginError, match="kv-other"):
        load_plugin("filesystem")


def test_unknown_name() -> None:
    with pytest.raises(PluginError, match="filesystem, memory"):
        load_plugin("nvmee")


def test_options() -> None:
    options = build_options(FilesystemBackend, {"path": "x", "max_bytes": "10GiB"})
    assert options == FilesystemOptions(path="x", max_bytes="10GiB")
    assert build_options(MemoryBackend, {}) == MemoryOptions()


@pytest.mark.parametrize(
    ("table", "key", "reason"),
    [
        ({"path": "x", "max_bites": 3}, "max_bites", "no such option"),
        ({}, "path", "it is missing"),
        ({"path": 7}, "path", "Expected `str`"),
        ({"path": "x", "durability": "some"}, "durability", "Invalid enum value"),
        ({"path": "x", "max_bytes": "10 Gigs"}, "", "10 Gigs"),
        ({"path": "x", "max_bytes": -1}, "", "not negative"),
        ({"path": ""}, "", "path is empty"),
        ({"path": "x", "threads": 0}, "", "threads is 0"),
        ({"path": "x", "batch_pages": 4096}, "", "batch_pages is 4096"),
    ],
)
def test_options_that_are_wrong(table: dict[str, object], key: str, reason: str) -> None:
    where = Where(Path("local.toml"), 12, "backends.disk.options")
    with pytest.raises(ConfigError, match=reason) as caught:
        build_options(FilesystemBackend, table, where)
    expected = "backends.disk.options" + (f".{key}" if key else "")
    assert caught.value.where == Where(Path("local.toml"), 12, expected)
    assert "max_bytes" in caught.value.remedy


def test_without_metadata() -> None:
    """From a checkout, with only PYTHONPATH set, those of this package are there."""
    source = Path(__file__).resolve().parents[2] / "src"
    script = (
        "import importlib.metadata as m; m.entry_points = lambda **k: []\n"
        "from kvstrata.backends import load_plugin, list_plugins\n"
        "print([i.name for i in list_plugins()], load_plugin('memory').__name__)"
    )
    out = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(source), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert out.strip() == "['filesystem', 'memory', 'mooncake'] MemoryBackend"


def test_options_of_base_class_forbid_everything() -> None:
    from kvstrata.backends import NoOptions

    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"a": 1}, NoOptions)
