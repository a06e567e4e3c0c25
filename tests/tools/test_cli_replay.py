"""What `kvstrata replay` refuses, and how it ends: exit code 2, one message, no traceback.

Each kind of fault is met once by a real process; the variants run in this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.tools import cli

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Refused = Callable[..., None]

GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}\n'


def _check(code: int, errors: str, *words: str) -> None:
    assert code == 2, errors
    assert "Traceback" not in errors
    complaints = [line for line in errors.splitlines() if line.startswith("kvstrata: error: ")]
    assert len(complaints) == 1, errors
    for word in words:
        assert word in errors, errors


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """`refused(["replay", …], words…)`: the command, in this process, ends as it should."""

    def call(args: list[str | Path], *words: str) -> None:
        code = cli.main([str(arg) for arg in args])
        _check(code, capsys.readouterr().err, *words)

    return call


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace of one request."""
    path = tmp_path / "trace.jsonl"
    path.write_text(GOOD)
    return path


def test_shipped_trace_replays_from_any_folder(run: Run, config_file: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = run("replay", "--config", config_file, "--json", report)
    assert done.returncode == 0, done.stderr
    values = json.loads(report.read_text())
    assert values["requests"] == 60
    assert values["page_hits"] + values["duplicates_in_flight"] == 402
    assert values["pages_mismatched"] == 0


def test_trace_line_that_is_wrong_in_a_process(run: Run, config_file: Path, trace: Path) -> None:
    trace.write_text(GOOD + "not json\n")
    done = run("replay", "--config", config_file, "--trace", trace)
    _check(done.returncode, done.stderr, f"{trace}:2", "not JSON")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"timestamp": 0, "input_length": 600, "output_length": 1}', ["hash_ids", "missing"]),
        ('{"timestamp": 0, "input_length": -1, "output_length": 1, "hash_ids": []}',
         ["input_length", "-1"]),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [3]}',
         ["hash_ids", "do not cover 600 tokens"]),
    ],
)  # fmt: skip
def test_trace_line_that_is_wrong(
    refused: Refused, config_file: Path, trace: Path, line: str, words: list[str]
) -> None:
    trace.write_text(GOOD + line + "\n")
    refused(["replay", "--config", config_file, "--trace", trace], f"{trace}:2", *words)


def test_trace_that_is_missing_or_empty(
    refused: Refused, config_file: Path, tmp_path: Path
) -> None:
    command = ["replay", "--config", config_file, "--trace"]
    refused([*command, tmp_path / "none.jsonl"], "none.jsonl", "no such file")
    (tmp_path / "empty.jsonl").write_text("")
    refused([*command, tmp_path / "empty.jsonl"], "holds no request")


@pytest.mark.parametrize(
    ("option", "number"),
    [("--requests", "-5"), ("--requests", "0"), ("--page-tokens", "0"), ("--batch", "0")],
)
def test_numbers_below_one(
    capsys: pytest.CaptureFixture[str], config_file: Path, option: str, number: str
) -> None:
    assert cli.main(["replay", "--config", str(config_file), option, number]) == 2
    errors = capsys.readouterr().err
    assert option in errors
    assert "greater than or equal to 1" in " ".join(errors.replace("│", " ").split())


def test_config_that_is_missing_or_wrong(refused: Refused, config_file: Path) -> None:
    refused(["replay", "--config", "none.toml"], "none.toml", "no such file")
    config_file.write_text("[pools\n")
    refused(["replay", "--config", config_file], f"{config_file}:1", "not TOML")


def test_pool_larger_than_memory(refused: Refused, config_file: Path) -> None:
    text = config_file.read_text().replace("head_dim = 8 ", "head_dim = 800000 ")
    config_file.write_text(text.replace('"32MiB"', '"16GiB"'))
    refused(["replay", "--config", config_file], "pools.pages", "are available")


@pytest.mark.parametrize("path", ["/proc/kvstrata", "/dev/null/store", "a-file/store"])
def test_folder_that_cannot_be_written(
    refused: Refused, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").write_text("")
    config = tmp_path / "c.toml"
    config.write_text((root / "configs/local.toml").read_text().replace("./var/local", path))
    refused(["replay", "--config", config], Path(path).name)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may enter; pytest's own may be entered by their owner alone."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_folder_without_permission(root: Path, open_folder: Path) -> None:
    """In a process, as somebody who is not root (where the tests run as root)."""
    closed = open_folder / "closed"
    closed.mkdir(mode=0o500)
    config = open_folder / "c.toml"
    text = (root / "configs/local.toml").read_text().replace("./var/local", str(closed / "store"))
    config.write_text(text)
    code = (
        "import os, sys\n"
        "from kvstrata.tools.cli import main\n"
        "import kvstrata.tools.replay\n"
        "main(['config', 'check', sys.argv[-1]])  # imports what the interpreter finds as root\n"
        "if os.geteuid() == 0:\n"
        "    os.setgid(65534); os.setuid(65534)\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    # Coverage of this child could not be saved: its data file is where nobody may write.
    env = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_")}
    done = subprocess.run(
        [sys.executable, "-c", code, "replay", "--config", str(config)],
        capture_output=True, text=True, timeout=60, check=False, cwd=open_folder,
        env={**env, "PYTHONPATH": str(root / "src")},
    )  # fmt: skip
    closed.chmod(0o700)
    _check(done.returncode, done.stderr, "ermission denied", "store")
