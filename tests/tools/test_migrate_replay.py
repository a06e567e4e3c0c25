"""The L3 of a replay, migrated to another root and back; and migrated while the replay runs."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.tools import cli
from kvstrata.tools.trace import shipped_trace

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs/two-roots.toml"
WAIT_S = 60.0


class Folder:
    """Commands in a working directory of their own: `./var/a` and `./var/b` are there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, command: str, *args: str | Path) -> subprocess.Popen[bytes]:
        """In a process of its own."""
        process = subprocess.Popen(
            [sys.executable, "-m", "kvstrata.tools.cli", *self._line(command, *args)],
            cwd=self.path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip
        self.started.append(process)
        return process

    def end(self) -> None:
        """Leave nothing behind, however the test ended."""
        for process in self.started:
            with process:  # closes its pipe and waits
                process.kill()

    def wait(self, process: subprocess.Popen[bytes], command: str) -> dict[str, Any]:
        with process:
            _, errors = process.communicate(timeout=WAIT_S)
        return self._report(command, process.returncode, errors.decode())

    def run(self, command: str, *args: str | Path) -> dict[str, Any]:
        """In this process, which has imported all of it."""
        with contextlib.chdir(self.path):
            code = cli.main(self._line(command, *args))
        return self._report(command, code)

    def _line(self, command: str, *args: str | Path) -> list[str]:
        out = self.path / f"{command}.json"
        out.unlink(missing_ok=True)
        return [str(part) for part in (command, "--config", CONFIG, "--json", out, *args)]

    def _report(self, command: str, code: int, errors: str = "") -> dict[str, Any]:
        report = self.path / f"{command}.json"
        found = report.read_text() if report.exists() else "no report"
        assert code == 0, f"{errors}\n{found}"
        return json.loads(found)

    def frames(self, name: str) -> dict[str, bytes]:
        objects = self.path / "var" / name / "objects"
        return {
            path.relative_to(objects).as_posix(): path.read_bytes()
            for path in objects.glob("*/*/*")
        }


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    folder = Folder(tmp_path)
    yield folder
    folder.end()


@pytest.fixture
def conversations(tmp_path: Path, seed: int) -> Path:
    """30 conversations that take turns, 10 each: what was computed comes back, and is evicted."""
    rng = random.Random(seed)
    turns: list[tuple[float, list[int]]] = []
    block = 0
    for _ in range(30):
        ids: list[int] = []
        for turn in range(10):
            count = rng.randint(1, 4)
            ids = [*ids, *range(block, block + count)]
            block += count
            turns.append((turn + rng.random() * 3, ids))
    lines = [
        json.dumps(
            {"timestamp": i, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        )
        for i, (_, ids) in enumerate(sorted(turns))
    ]
    path = tmp_path / "conversations.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_to_another_root_and_back(folder: Folder) -> None:
    trace = shipped_trace()
    first = folder.run("replay", "--trace", trace)
    before = folder.frames("a")
    report = folder.run("migrate", "--from", "a", "--to", "b", "--read-back")
    assert report["copied"] == report["pages"] == len(before)
    assert folder.frames("b") == before
    second = folder.run("replay", "--trace", trace, "--set", "l3.backend=b")
    assert second["page_hits"] + second["duplicates_in_flight"] == second["full_pages"]
    assert second["full_pages"] == first["full_pages"]
    assert second["pages_mismatched"] == 0
    shutil.rmtree(folder.path / "var/a")
    report = folder.run("migrate", "--from", "b", "--to", "a", "--move")
    assert report["deleted"] == len(before)
    assert folder.frames("a") == before
    assert folder.frames("b") == {}
    third = folder.run("replay", "--trace", trace)
    assert third["page_hits"] + third["duplicates_in_flight"] == third["full_pages"]
    assert third["pages_mismatched"] == 0
    assert third["hit_tokens"]["l3"] > 0
    assert folder.run("verify", "a")["problems"] == []


def test_beside_a_replay_on_the_source(folder: Folder, conversations: Path) -> None:
    """The replay writes to the source and evicts from it while it is migrated, again and again."""
    bound = ["--set", "backends.a.options.max_bytes=12MiB"]
    replay = folder.start("replay", "--trace", conversations, "--batch", "2", *bound)
    begun = 0
    while replay.poll() is None:
        if not any((folder.path / "var/a").glob("objects/*/*/*")):
            with contextlib.suppress(subprocess.TimeoutExpired):
                replay.wait(0.01)
            continue
        begun += 1
        report = folder.run("migrate", "--from", "a", "--to", "b", "--rate", "20MiB")
        assert report["problems"] == []
        assert folder.run("verify", "a")["problems"] == [], "what changes is no finding"
    done = folder.wait(replay, "replay")
    assert done["pages_mismatched"] == 0
    assert done["failed_requests"] == 0
    assert begun > 0, "a migration began while the replay ran"
    assert folder.run("verify", "b")["problems"] == []
    assert folder.run("verify", "a")["problems"] == []
    again = folder.run("replay", "--trace", conversations, "--set", "l3.backend=b")
    assert again["pages_mismatched"] == 0
    assert again["hit_tokens"]["l3"] > 0
