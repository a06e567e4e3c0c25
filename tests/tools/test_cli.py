"""The command line: what it prints, and how it ends when something is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata import __version__
from kvstrata.errors import CapacityError, ConfigError, IntegrityError, StorageError, Where
from kvstrata.tools import cli

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def _refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2 and one message on stderr: no traceback, nothing on stdout."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("kvstrata: error: ")
    assert len(done.stderr.splitlines()) == 2, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


# ── config ───────────────────────────────────────────────────────────────────────────────────────


def test_config_check(call: Run, config_file: Path) -> None:
    done = call("config", "check", config_file, "--set", "pools.max_context_tokens=1048576")
    assert done.returncode == 0, done.stderr
    assert "OK" in done.stdout
    assert "16.0 MiB" in done.stdout
    assert "ram (memory)" in done.stdout
    assert "note: a request of max_context_tokens needs 2048 pages" in done.stdout


def test_config_show_is_toml_that_means_the_same(
    call: Run, config_file: Path, tmp_path: Path
) -> None:
    first = call("config", "show", config_file)
    assert first.returncode == 0, first.stderr
    assert "max_batch = 8                            # default" in first.stdout
    assert 'bytes = "32MiB"\n' in first.stdout
    shown = tmp_path / "shown.toml"
    shown.write_text(first.stdout)
    assert tomllib.loads(first.stdout)["pools"]["components"][0]["dtype"] == "bfloat16"
    again = call("config", "show", shown)
    assert again.returncode == 0, again.stderr
    assert again.stdout == "".join(
        line.split(" # default")[0].rstrip() + "\n" for line in first.stdout.splitlines()
    )


def test_config_show_hides_secrets(run: Run, config_file: Path, plugin_dir: Path) -> None:
    done = run(
        "config", "show", config_file, "--set", "namespace.salt=hush-hush",
        "--set", "backends.x.plugin=fine", "--set", "backends.x.options.api_key=hush-hush",
        path=plugin_dir,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "hush" not in done.stdout
    assert 'salt = "(hidden)"' in done.stdout
    assert 'api_key = "(hidden)"' in done.stdout


def test_missing_config(call: Run) -> None:
    _refused(call("config", "check", "none.toml"), "none.toml", "no such file")


def test_malformed_config(call: Run, config_file: Path) -> None:
    config_file.write_text("[pools]\npages = = 3\n")
    _refused(call("config", "check", config_file), f"{config_file}:2", "not TOML")


def test_config_that_is_a_directory(call: Run, tmp_path: Path) -> None:
    _refused(call("config", "show", tmp_path), "directory")


def test_unknown_backend(call: Run, config_file: Path) -> None:
    text = config_file.read_text().replace('"memory"', '"memroy"')
    config_file.write_text(text)
    _refused(call("config", "check", config_file), "memroy", "memory")
    _refused(call("backends", "show", "memroy"), "memroy")


def test_backend_that_raises_on_import(run: Run, config_file: Path, plugin_dir: Path) -> None:
    done = run(
        "config", "check", config_file, "--set", "backends.ram.plugin=broken", path=plugin_dir
    )
    _refused(done, "broken", "broken_store", "RuntimeError: no driver on this machine")


def test_page_size_0(call: Run, config_file: Path) -> None:
    text = config_file.read_text().replace("page_tokens = 512", "page_tokens = 0")
    config_file.write_text(text)
    line = text.splitlines().index("page_tokens = 0") + 1
    _refused(call("config", "check", config_file), f"{config_file}:{line}: pools.page_tokens", "0")


def test_pool_larger_than_memory(call: Run, config_file: Path) -> None:
    done = call("config", "check", config_file, "--set", "pools.components.0.head_dim=100000",
               "--set", "staging.bytes=2GiB", "--set", "pools.pages=1000000")  # fmt: skip
    _refused(done, "--set pools.pages", "are available", "lower pools.pages")


def test_wrong_arguments(call: Run) -> None:
    for args in (["nope"], ["config"], ["config", "check"], ["config", "check", "--nope", "x"]):
        done = call(*args)
        assert done.returncode == 2, args
        assert "Traceback" not in done.stderr


# ── backends ─────────────────────────────────────────────────────────────────────────────────────


def test_backends_list_names_a_broken_one(run: Run, plugin_dir: Path) -> None:
    done = run("backends", "list", path=plugin_dir)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[1]: line for line in done.stdout.splitlines() if line.startswith("│")}
    assert "broken_store" in rows["broken"]
    assert "1.2" in rows["broken"]
    assert "RuntimeError: no driver on this machine" in done.stdout
    for name, distribution in (("fine", "fine_store"), ("memory", "kvstrata")):
        assert distribution in rows[name]
        assert rows[name].rstrip("│ ").endswith("ok")


def test_backends_show(run: Run, plugin_dir: Path) -> None:
    done = run("backends", "show", "fine", path=plugin_dir)
    assert done.returncode == 0, done.stderr
    for word in ("fine_store.Fine", "api_key", "Secret of the store.", "max_bytes", "int"):
        assert word in done.stdout
    _refused(run("backends", "show", "broken", path=plugin_dir), "broken_store")


def test_backends_show_every_shipped_plugin(call: Run) -> None:
    for name, option in (("memory", "max_bytes"), ("filesystem", "path"), ("mooncake", "list of")):
        done = call("backends", "show", name)
        assert done.returncode == 0, done.stderr
        assert option in done.stdout
        assert "Ellipsis" not in done.stdout


def test_conformance_passes(call: Run) -> None:
    done = call("backends", "conformance", "memory")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout
    assert "checks passed" in done.stdout


def test_conformance_fails(run: Run, plugin_dir: Path) -> None:
    with (plugin_dir / "fine_store.py").open("a") as file:
        file.write("    def exists(self, objects):\n        return [True for _ in objects]\n")
    done = run("backends", "conformance", "fine", path=plugin_dir)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED" in done.stdout


def test_conformance_options(call: Run) -> None:
    _refused(call("backends", "conformance", "memory", "--option", "x"), "--option x", "KEY=VALUE")
    _refused(call("backends", "conformance", "memory", "--option", "x=1"), "x")
    _refused(call("backends", "conformance", "memory", "--option", "max_bytes=[1"), "not TOML")


# ── the command itself ───────────────────────────────────────────────────────────────────────────


def test_version_and_help(run: Run) -> None:
    assert run("--version").stdout == f"kvstrata {__version__}\n"
    done = run("--help")
    assert done.returncode == 0
    for name in cli.MOUNTS:
        assert name in done.stdout


def test_start_up_imports_neither_torch_nor_commands(root: Path) -> None:
    code = (
        "import sys\n"
        "from kvstrata.tools.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "heavy = {'torch', 'kvstrata.tools.replay', 'kvstrata.tools.bench'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)\n"
    )
    for args in (["--help"], ["config", "show", "configs/memory.toml"], ["backends", "list"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *args], cwd=root, timeout=60, check=False,
            capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(root / "src")},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def test_reader_that_goes_away(root: Path, config_file: Path) -> None:
    """`kvstrata config show F | head -0`: no traceback and no complaint."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvstrata.tools.cli", "config", "show", str(config_file)],
            stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
            env={**os.environ, "PYTHONPATH": str(root / "src")},
        )  # fmt: skip
    finally:
        os.close(write_end)
    assert done.stderr == ""
    assert done.returncode == 1


def test_interrupt(root: Path, plugin_dir: Path) -> None:
    """Ctrl-C while a plugin is busy: exit code 130, no traceback."""
    with (plugin_dir / "fine_store.py").open("a") as file:
        file.write(
            "import sys, threading\n"
            "sys.stdout.write('busy\\n'); sys.stdout.flush()\n"
            "threading.Event().wait(50)\n"
        )
    places = os.pathsep.join([str(root / "src"), str(plugin_dir)])
    child = subprocess.Popen(
        [sys.executable, "-m", "kvstrata.tools.cli", "backends", "show", "fine"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": places},
    )  # fmt: skip
    with child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == "busy\n"
        began = time.monotonic()
        child.send_signal(2)
        errors = child.stderr.read()
        assert child.wait(timeout=30) == 130, errors
        assert time.monotonic() - began < 30
        assert "Traceback" not in errors


CAPACITY = CapacityError("kv", need=2, free=1, freeing=0)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("is wrong", remedy="do this", where=Where(Path("f"), 3, "k")), 2,
         "kvstrata: error: f:3: k: is wrong\n  do this\n"),
        (ConfigError("is wrong", remedy="do this"), 2,
         "kvstrata: error: is wrong\n  do this\n"),
        (StorageError("store is away"), 1, "kvstrata: error: store is away\n"),
        (CAPACITY, 1, f"kvstrata: error: {CAPACITY}\n"),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(3), 3, ""),
        (SystemExit("text"), 1, ""),
    ],
)  # fmt: skip
def test_exit_codes(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, message: str
) -> None:
    def fails() -> None:
        raise error

    assert cli.guarded(fails) == code
    assert capsys.readouterr().err == message


def test_bugs_are_not_hidden() -> None:
    def fails() -> None:
        raise IntegrityError("broken")

    with pytest.raises(IntegrityError):
        cli.guarded(fails)


@pytest.mark.parametrize(
    "command",
    ["replay --trace x", "generate --model x", "bench worker", "bench control --trace x"],
)
def test_a_report_that_cannot_be_written_is_refused_before_the_work(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command.split(), "--json", str(tmp_path / "none" / "x.json")]) == 2
    assert "the report cannot be written: there is no directory" in capsys.readouterr().err
