"""An operator detaches and attaches L3 of a replay that runs: real processes, real commands."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.errors import ConfigError, StorageUnavailableError, Where
from kvstrata.tools import cli
from kvstrata.tools.admin import AskStatus, BackendStatus, Status, ask
from kvstrata.tools.admin_socket import AdminSocket

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0
SMALL = ["pools.pages=128", "staging.bytes=3MiB", "scheduler.max_batch=4"]


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More requests than a test waits for: half of the pages of each come back now and then, and
    are in no tier but L3 by then."""
    rng = random.Random(5)
    lines, block = [], 0
    for i in range(8_000):
        old = 4 * rng.randrange(max(1, i - 300), i) if i > 1 and rng.random() < 0.5 else None
        ids = [old, old + 1, block, block + 1] if old else [*range(block, block + 4)]
        block += 4
        lines.append(
            json.dumps({"timestamp": i, "input_length": 2048, "output_length": 1, "hash_ids": ids})
        )
    path = tmp_path_factory.mktemp("trace") / "endless.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


class Server:
    """`kvstrata replay` in a process, and the operator beside it."""

    def __init__(self, folder: Path, trace: Path, config: Path, *settings: str) -> None:
        self.folder, self.config = folder, config
        self.socket = folder / "var/admin.sock"
        self.settings = ["--set", f"admin.socket={self.socket}"]
        self.report = folder / "report.json"
        self.args = ["replay", "--config", str(config), "--trace", str(trace), *self.settings]
        for setting in (*SMALL, *settings):
            self.args += ["--set", setting]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvstrata.tools.cli", *self.args, "--json", str(self.report)],
            cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([f"{ROOT}/src", *_plugins(self)])},
        )  # fmt: skip
        self.until(lambda _: True)

    def command(self, *args: str) -> int:
        """`kvstrata backends ARGS`, as the operator types it."""
        return cli.main(["backends", *args, "--config", str(self.config), *self.settings])

    def status(self) -> Status:
        answer = ask(str(self.socket), AskStatus(), 10.0, Where(key="admin.socket"))
        assert isinstance(answer, Status)
        return answer

    def until(self, holds: Callable[[BackendStatus], bool]) -> BackendStatus:
        """Ask until it does."""
        assert self.process is not None
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            assert self.process.poll() is None, self.process.communicate()[1].decode()
            with contextlib.suppress(StorageUnavailableError):
                l3 = self.status().l3
                if l3 is not None and holds(l3):
                    return l3
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.02)
        raise AssertionError(f"it does not come to that: {self.status()}")

    def end(self, signum: int) -> int:
        assert self.process is not None
        self.process.send_signal(signum)
        with self.process:
            _, errors = self.process.communicate(timeout=WAIT_S)
        assert b"Traceback" not in errors, errors.decode()
        print(errors.decode())  # seen when the exit code is not what the test wants
        return self.process.returncode


def _plugins(server: Server) -> list[str]:
    folder = server.folder / "plugins"
    return [str(folder)] if folder.exists() else []


@pytest.fixture
def serve(tmp_path: Path, endless: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def make(config: Path, *settings: str) -> Server:
        servers.append(Server(tmp_path, endless, config, *settings))
        servers[-1].start()
        return servers[-1]

    yield make
    for server in servers:
        if server.process is not None and server.process.poll() is None:
            server.process.kill()
            server.process.communicate()


def stored(l3: BackendStatus) -> int:
    return l3.pages["store"].get("stored", 0)


def test_drain_serve_without_and_go_on_with_another(
    serve: Callable[..., Server], capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(ROOT / "configs/two-roots.toml")
    before = server.until(lambda l3: stored(l3) > 60 and l3.pages["load"].get("loaded", 0) > 0)
    assert (before.name, before.attached, before.health) == ("a", True, "ok")
    assert os.stat(server.socket).st_mode & 0o7777 == 0o600

    assert server.command("attach", "b") == 1, "a is attached"
    assert "'a' is attached; first: kvstrata backends detach" in capsys.readouterr().err
    assert server.command("detach", "--drain", "20") == 0
    assert "a is detached" in capsys.readouterr().out
    without = server.until(lambda l3: not l3.attached)
    assert without.health == "detached"
    assert stored(without) == len([*(server.folder / "var/a/objects").glob("*/*/*")])
    assert server.command("detach") == 0, "again"
    assert "nothing to do" in capsys.readouterr().out
    assert server.command("status") == 0
    assert "detached" in capsys.readouterr().out

    assert server.command("attach", "c") == 2
    told = capsys.readouterr().err
    for part in ("two-roots.toml", "backends", "c: there is no [backends.c]", "a, b"):
        assert part in told
    assert server.command("attach", "b") == 0
    assert "b is L3 now" in capsys.readouterr().out
    after = server.until(lambda l3: stored(l3) > 60 and l3.pages["load"].get("loaded", 0) > 0)
    assert (after.name, after.attached) == ("b", True)
    status = server.folder / "status.json"
    assert server.command("status", "--json", str(status)) == 0
    assert json.loads(status.read_bytes())["l3"]["pages"]["store"]["stored"] >= stored(after)

    assert server.end(signal.SIGINT) == 130
    report = json.loads(server.report.read_bytes())
    assert report["pages_mismatched"] == report["failed_requests"] == 0
    assert report["errors"] == []
    assert report["storage"]["backend"] == "b"
    assert report["hit_tokens"]["l3"] > 0
    files = (server.folder / "var/b/objects").glob("*/*/*")
    assert report["storage"]["outcomes"]["store"]["stored"] == len([*files])
    assert [*server.folder.glob("var/admin*")] == [], "no file of it is left"
    assert server.command("status") == 1
    assert "nothing that serves listens here" in capsys.readouterr().err


def test_force_from_a_backend_that_hangs_then_killed(
    serve: Callable[..., Server],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what the killed process leaves is replaced, while one that lives is not."""
    info = tmp_path / "plugins/faulty-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    entry = "faulty = kvstrata.backends.testing.faults:FaultyBackend"
    (info / "entry_points.txt").write_text(f"[kvstrata.backends]\n{entry}\n")
    monkeypatch.syspath_prepend(tmp_path / "plugins")
    config = tmp_path / "c.toml"
    text = (ROOT / "configs/memory.toml").read_text()
    hung = '[backends.hung]\nplugin = "faulty"\n[backends.hung.options]\n'
    config.write_text(text + hung + "faults = { write = { hang = 1.0 } }\n")
    server = serve(config, "l3.backend=hung")
    server.until(lambda l3: l3.running_jobs > 0 and l3.queued_pages["store"] > 0)
    begun = time.monotonic()
    assert server.command("detach", "--force") == 0
    assert time.monotonic() - begun < 15.0
    told = capsys.readouterr().out
    assert "pages waited for their store, and were given up" in told
    assert "calls of it have not returned" in told
    assert server.command("attach", "ram") == 0
    server.until(lambda l3: l3.name == "ram" and stored(l3) > 100)

    assert server.end(signal.SIGKILL) == -signal.SIGKILL
    assert server.socket.is_socket(), "it had no time to remove it"
    capsys.readouterr()
    assert server.command("status") == 1
    assert "nothing that serves listens here" in capsys.readouterr().err
    server = serve(config)
    pid = server.status().pid
    with pytest.raises(ConfigError, match="a socket of its own") as caught:  # a second process
        AdminSocket(str(server.socket), Where(key="admin.socket"))
    assert f"admin.socket: process {pid} listens at {server.socket}" in str(caught.value)
    assert server.status().pid == pid
    assert server.end(signal.SIGTERM) == 128 + signal.SIGTERM
    assert [*tmp_path.glob("var/admin*")] == []
