"""What a person gave is wrong: exit code 2, one message that says where, nothing left behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def refused(done: Any, *words: str, code: int = 2) -> None:
    assert done.code == code, done.err
    assert done.out == ""
    assert "Traceback" not in done.err
    assert done.err.startswith("kvstrata: error: ")
    assert len(done.err.splitlines()) == 2, done.err
    for word in words:
        assert word in done.err, done.err


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A copy of configs/local.toml, with its L3 in `l3`."""
    path = tmp_path / "c.toml"
    path.write_text((ROOT / "configs/local.toml").read_text().replace("./var/local", "./l3"))
    return path


def line_of(config: Path, text: str) -> int:
    [line] = [i for i, line in enumerate(config.read_text().splitlines(), 1) if text in line]
    return line


def test_root_that_is_a_file(kvstrata: Any, config: Path, tmp_path: Path) -> None:
    (tmp_path / "l3").write_text("mine")
    done = kvstrata.start("replay", "--config", config).wait()
    place = f"c.toml:{line_of(config, 'path = ')}: backends.disk.options.path: "
    refused(done, place, "ENOTDIR", "name a folder")
    assert (tmp_path / "l3").read_text() == "mine"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may enter; pytest's own may be entered by their owner alone."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_root_that_may_not_be_written(kvstrata: Any, config: Path, open_folder: Path) -> None:
    """As somebody who is not root; the message names the line of the config."""
    closed = open_folder / "closed"
    closed.mkdir(mode=0o500)
    config.write_text(config.read_text().replace('"./l3"', f'"{closed}/l3"'))
    config = config.rename(open_folder / "c.toml")
    (open_folder / "c.toml").chmod(0o644)
    plant = {"user": {"uid": 65534}} if os.geteuid() == 0 else {}
    done = kvstrata.start("replay", "--config", config, plant=plant).wait()
    place = f"c.toml:{line_of(config, 'path = ')}: backends.disk.options.path: "
    refused(done, place, "EACCES", "choose a folder that this user may write to")
    assert list(closed.iterdir()) == []


def test_bound_below_one_page(kvstrata: Any, config: Path, tmp_path: Path) -> None:
    """What only the backend can know is placed in the file too."""
    config.write_text(config.read_text().replace('max_bytes = "1GiB"', 'max_bytes = "20KiB"'))
    done = kvstrata.start("replay", "--config", config).wait()
    refused(done, f"c.toml:{line_of(config, '20KiB')}: backends.disk.options.max_bytes: ", "page")


def test_settings_on_the_command_line(kvstrata: Any, config: Path) -> None:
    command = ("replay", "--config", config, "--set")
    done = kvstrata.start(*command, "backends.disk.options.path=/dev/null").wait()
    refused(done, "--set backends.disk.options.path: ", "ENOTDIR")
    refused(kvstrata.start(*command, "backends.disk.plugin=filesytem").wait(), "filesystem")
    refused(kvstrata.start(*command, "pools.page_tokens=0").wait(), "--set pools.page_tokens")


PLUGINS = {
    "raises": "raise OSError('libstore.so.1: cannot open shared object file')\n",
    "refuses": (
        "import msgspec\n"
        "from kvstrata.backends.memory import MemoryBackend\n"
        "class Plugin(MemoryBackend):\n"
        "    class Options(msgspec.Struct, forbid_unknown_fields=True, frozen=True): ...\n"
        "    def __init__(self, options):\n"
        "        raise ValueError('no cluster')\n"
    ),
    "breaks": (
        "from kvstrata.backends.memory import MemoryBackend\n"
        "class Plugin(MemoryBackend):\n"
        "    def open(self, context):\n"
        "        raise ValueError('no cluster')\n"
    ),
}


@pytest.fixture
def plugins(tmp_path: Path) -> dict[str, Any]:
    """What to plant so that the distributions of `PLUGINS` are installed."""
    folder = tmp_path / "plugins"
    for name, body in PLUGINS.items():
        info = folder / f"store_{name}-2.1.dist-info"
        info.mkdir(parents=True)
        (folder / f"store_{name}.py").write_text(body)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: store_{name}\nVersion: 2.1\n")
        points = f"[kvstrata.backends]\n{name} = store_{name}:Plugin\n"
        (info / "entry_points.txt").write_text(points)
    return {"plugins": {"folder": str(folder)}}


def test_plugins_that_fail(kvstrata: Any, config: Path, plugins: dict[str, Any]) -> None:
    text = config.read_text()
    start, end = text.index("[backends.disk]"), text.index("[scheduler]")
    for name, code, words in (
        ("raises", 2, ("'raises'", "'store_raises'", "libstore.so.1")),
        ("refuses", 2, ("'refuses'", "ValueError: no cluster", "backends.disk")),
        ("breaks", 1, ("'disk'", "ValueError: no cluster")),
    ):
        table = f'[backends.disk]\nplugin = "{name}"\n\n'
        config.write_text(text[:start] + table + text[end:])
        done = kvstrata.start("replay", "--config", config, plant=plugins).wait()
        if code == 2:
            refused(done, *words)
        else:  # the store is away: nothing that a person gave is wrong
            assert done.code == code
            assert "Traceback" not in done.err
            assert all(word in done.err for word in words)


def test_report_that_cannot_be_written(kvstrata: Any, config: Path, tmp_path: Path) -> None:
    """Before the replay, not after it."""
    for place, words in (
        (tmp_path, "this is a directory"),
        (tmp_path / "none" / "r.json", "there is no directory"),
    ):
        done = kvstrata.start("replay", "--config", config, "--json", place).wait()
        refused(done, str(place), words)
    assert not (tmp_path / "l3").exists()


def test_request_that_does_not_fit(kvstrata: Any, config: Path, store: Any) -> None:
    """It is in the middle of the trace: its line is named, and L3 keeps what came before."""
    trace = config.with_name("t.jsonl")
    line = '{{"timestamp": 0, "input_length": {}, "output_length": 1, "hash_ids": {}}}\n'
    trace.write_text(line.format(1500, [1, 2, 3]) + line.format(51200, list(range(9, 109))))
    done = kvstrata.start("replay", "--config", config, "--trace", trace).wait()
    refused(done, "t.jsonl:2: the request does not fit", "pools")
    store.check()
