"""Real processes: forks, signals and exits, `kvstrata mooncake up`, replays and a migration."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstrata.tools.trace import shipped_trace

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "configs/mooncake.toml"
LONG_TRACE = ROOT.parent / "shared/traces/conversation.jsonl"
ENV = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
CLI = (sys.executable, "-m", "kvstrata.tools.cli")
SOON_S = 8.0
"""For what takes two seconds at most on a machine that does nothing else."""

CHILD = """\
import os, signal, sys
import msgspec
from kvstrata.backends import BackendContext
from kvstrata.backends.mooncake import MooncakeBackend, MooncakeOptions
from kvstrata.backends.testing.frames import Frames
backend = MooncakeBackend(msgspec.json.decode(sys.argv[1], type=MooncakeOptions))
backend.open(BackendContext("child"))
frames = Frames()
def work(i):
    assert backend.write([frames.write(i)])[0].outcome.value == "stored"
    assert backend.read([frames.read(i)])[0].outcome.value == "loaded"
work(1)
"""
ENDINGS = {
    "the end": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "exception": ("raise ValueError", 1),
    "os._exit": ("os._exit(4)", 4),
    "close": ("backend.close(5.0)", 0),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); signal.pause()", -signal.SIGTERM),
    "SIGINT": ("os.kill(os.getpid(), signal.SIGINT); signal.pause()", -signal.SIGINT),
    "a fork that exits": (
        """
pid = os.fork()
if pid == 0: sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
work(2); backend.close(5.0)""",
        0,
    ),
    "a fork while a client closes": (
        """
backend.close(5.0)
pid = os.fork()
if pid == 0: sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7""",
        0,
    ),
}


_started: list[subprocess.Popen[Any]] = []


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """However a test ends."""
    yield
    while _started:
        with _started.pop() as process:  # closes its pipes and waits
            process.kill()


def _popen(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    _started.append(subprocess.Popen(command, **options))
    return _started[-1]


def _start(code: str, options) -> subprocess.Popen[bytes]:
    text = msgspec.json.encode(options).decode()
    return _popen([sys.executable, "-c", code, text], env=ENV, stderr=subprocess.DEVNULL)


def test_processes_end_well_however_they_end(shared) -> None:
    children = {name: _start(CHILD + code, shared.options) for name, (code, _) in ENDINGS.items()}
    ends = {name: child.wait(20) for name, child in children.items()}
    assert ends == {name: code for name, (_, code) in ENDINGS.items()}


def test_a_process_ends_when_the_master_is_dead(site) -> None:
    cluster = site.start(1)
    code = CHILD + "sys.stdout.write('ready'); sys.stdout.flush(); sys.stdin.read()"
    child = _popen(
        [sys.executable, "-c", code, msgspec.json.encode(site.options).decode()],
        env=ENV, stderr=subprocess.DEVNULL, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout.read(5) == b"ready"
    cluster.kill_master()
    start = time.monotonic()
    child.communicate(timeout=20)
    assert child.returncode == 0
    assert time.monotonic() - start < SOON_S


# ── kvstrata mooncake up ─────────────────────────────────────────────────────────────────────────


def _up(*args: str) -> subprocess.Popen[str]:
    return _popen(
        [*CLI, "mooncake", "up", "--config", str(CONFIG), "--segment-bytes", "32MiB", *args],
        env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _descendants(pid: int) -> set[int]:
    found = {int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    return found.union(*(_descendants(child) for child in found))


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_up_ends_its_processes_with_itself(until, number) -> None:
    up = _up("--stores", "2")
    line = up.stdout.readline()
    assert line.startswith("ready: master 127.0.0.1:50051, stores 127.0.0.1:")
    children = _descendants(up.pid)
    assert len(children) == 3
    up.send_signal(number)
    up.communicate(timeout=20)
    assert up.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 0)
    until(lambda: not any(_is_running(pid) for pid in children))


def test_up_says_when_it_cannot(until) -> None:
    with socket.create_server(("127.0.0.1", 50051)):
        up = _up("--stores", "0")
        _, error = up.communicate(timeout=20)
    assert up.returncode == 2
    assert "somebody listens at 127.0.0.1:50051 already" in error
    assert "Traceback" not in error
    up = _up("--private")
    _, error = up.communicate(timeout=20)
    assert up.returncode == 2
    assert "--private without a command" in error


def test_up_ends_when_a_store_dies(until) -> None:
    up = _up("--stores", "1")
    assert up.stdout.readline().startswith("ready")
    store = max(_descendants(up.pid))
    os.kill(store, signal.SIGKILL)
    _, error = up.communicate(timeout=20)
    assert up.returncode == 1
    assert "the store-0 has ended with -9" in error


def test_a_store_node_and_a_private_command(until) -> None:
    """`kvstrata mooncake store` joins the master; the command's exit code is that of `up`."""
    ask = 'print(u.urlopen("http://127.0.0.1:9003/get_all_segments").read().decode())'
    script = (
        f"{' '.join(CLI)} mooncake store --config {CONFIG} --segment-bytes 16MiB & node=$!; "
        f"while ! {sys.executable} -c 'import urllib.request as u; {ask}' | grep -q :; do :; done; "
        "kill $node; wait $node; exit 5"
    )
    up = _up("--stores", "0", "--private", "--", "sh", "-c", script)
    out, _ = up.communicate(timeout=40)
    assert up.returncode == 5
    assert "ready: 127.0.0.1:" in out


# ── the whole way ────────────────────────────────────────────────────────────────────────────────


def _run(*args: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*CLI, *args], env=ENV, capture_output=True, text=True, timeout=110, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done


def _replay(config: Path, trace: Path, out: Path, *args: str) -> dict[str, object]:
    _run("replay", "--config", str(config), "--trace", str(trace), "--json", str(out), *args)
    return json.loads(out.read_text())


@pytest.fixture
def config(site, tmp_path) -> Path:
    """configs/mooncake.toml for this master, and a file system beside it."""
    site.start(2, segment_bytes="1GiB")
    text = CONFIG.read_text().replace("127.0.0.1:50051", site.options.master)
    text = text.replace('protocol = "tcp"', f'admin = "{site.options.admin}"\nprotocol = "tcp"')
    text += '\n[backends.disk]\nplugin = "filesystem"\n\n[backends.disk.options]\n'
    text += f'path = "{tmp_path}/disk"\n'
    path = tmp_path / "mooncake.toml"
    path.write_text(text)
    return path


def test_a_store_dies_in_a_replay_and_a_second_client_follows(
    config, site, tmp_path, until
) -> None:
    """`replicas = 2`: every page comes back as it was, also to a process that stored none."""
    trace = LONG_TRACE if LONG_TRACE.exists() else shipped_trace()
    requests, hits, some_bytes = (
        (1000, 5780, 128 << 20) if LONG_TRACE.exists() else (60, 402, 1 << 20)
    )
    args = ("replay", "--config", str(config), "--trace", str(trace))
    args += ("--requests", str(requests), "--set", "backends.pool.options.replicas=2")
    report = tmp_path / "first.json"
    first = _popen(
        [*CLI, *args, "--json", str(report)], env=ENV, cwd=ROOT, stdout=subprocess.DEVNULL
    )
    until(lambda: sum(s.used_bytes for s in site.admin.segments()) > some_bytes)
    assert first.poll() is None, "the replay goes on without the store"
    site.cluster.kill_store(0)
    assert first.wait(110) == 0
    found = json.loads(report.read_text())
    assert found["page_hits"] == hits
    assert found["pages_mismatched"] == 0
    second = _replay(config, trace, tmp_path / "second.json", *args[-4:])
    assert second["page_hits"] == second["full_pages"]
    assert second["pages_mismatched"] == 0
    for each in (found, second):
        hits, bad = each["page_hits"], each["pages_mismatched"]
        print(f"{requests} requests: {hits} of {each['full_pages']} pages hit, {bad} mismatches")


def test_migrate_there_and_back(config, tmp_path) -> None:
    trace = shipped_trace()
    _replay(config, trace, tmp_path / "disk.json", "--set", "l3.backend=disk")
    there = ("--from", "disk", "--to", "pool", "--journal", str(tmp_path / "there.journal"))
    _run("migrate", "--config", str(config), "--read-back", *there)
    again = _replay(config, trace, tmp_path / "pool.json")
    assert again["page_hits"] == again["full_pages"]
    assert again["pages_mismatched"] == 0
    frames = _frames(tmp_path / "disk")
    assert frames
    (tmp_path / "disk").rename(tmp_path / "before")
    back = ("--from", "pool", "--to", "disk", "--journal", str(tmp_path / "back.journal"))
    _run("migrate", "--config", str(config), *back)
    assert _frames(tmp_path / "disk") == frames


def _frames(root: Path) -> dict[str, bytes]:
    """The files of a file-system root that hold frames."""
    files = [path for path in root.rglob("*") if path.is_file()]
    contents = {path.name: path.read_bytes() for path in files}
    return {name: data for name, data in contents.items() if data.startswith(b"KVSTRATA")}
