"""The admin socket of an engine in this process: bytes that are wrong, names, threads, ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstrata.configs import Config, load_config
from kvstrata.configs.load import load_admin
from kvstrata.errors import (
    ConfigError,
    InputError,
    StorageBusyError,
    StorageError,
    StorageTimeoutError,
    StorageUnavailableError,
    Where,
)
from kvstrata.gpu_runtime import OracleRunner
from kvstrata.tools import admin_server, cli
from kvstrata.tools.admin import (
    MAX_REQUEST_BYTES,
    Answer,
    AskStatus,
    Attach,
    Attached,
    Detach,
    Detached,
    Refused,
    Request,
    Status,
    ask,
    receive_answer,
)
from kvstrata.tools.admin_server import AdminServer
from kvstrata.tools.admin_socket import AdminSocket
from kvstrata.tools.engine import Engine, open_engine
from kvstrata.tools.replay import run_replay
from kvstrata.tools.replay_control import interruptible
from kvstrata.tools.trace import shipped_trace

ROOT = Path(__file__).resolve().parents[2]
HERE = Where(key="admin.socket")
SMALL = ["pools.pages=96", "staging.bytes=2MiB"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "var" / "kvstrata.sock"


@pytest.fixture
def config(path: Path) -> Config:
    return load_config(ROOT / "configs/memory.toml", [*SMALL, f"admin.socket={path}"])


@pytest.fixture
def engine(config: Config) -> Iterator[Engine]:
    with open_engine(config, OracleRunner()) as engine:
        assert engine.admin is not None
        yield engine
        engine.admin.check_integrity()
        engine.runtime.check_integrity()


def told(path: Path, request: Request) -> Answer:
    return ask(str(path), request, 10.0, HERE)


def sent(path: Path, data: bytes) -> Answer:
    """What comes back for these bytes; then nothing more is sent."""
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(str(path))
        channel.sendall(data)
        channel.shutdown(socket.SHUT_WR)
        return receive_answer(channel, time.monotonic() + 10.0)


def framed(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", MAX_REQUEST_BYTES + 1) + b"x" * 10,
        struct.pack("<I", 2**32 - 1),
        struct.pack("<I", 100) + b"short",
        framed(b""),
        framed(b"\xc1" * 64),
        framed(b"\x81" * 4000),
        framed(msgspec.msgpack.encode({"type": "Reboot"})),
        framed(msgspec.msgpack.encode({"type": "Attach"})),
        framed(msgspec.msgpack.encode({"type": "Attach", "backend": 7})),
        framed(msgspec.msgpack.encode({"type": "Detach", "drain_s": "long"})),
    ],
)
def test_bytes_that_are_no_request(path: Path, data: bytes) -> None:
    answer = sent(path, data)
    assert isinstance(answer, Refused)
    assert answer.error == "InputError"
    with pytest.raises(InputError, match="no message of the admin socket"):
        answer.throw()
    assert isinstance(told(path, AskStatus()), Status), "it goes on"


@pytest.mark.usefixtures("engine")
def test_who_sends_nothing_is_not_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_server, "MESSAGE_DEADLINE_S", 0.1)
    with socket.socket(socket.AF_UNIX) as idle:
        idle.connect(str(path))
        idle.sendall(b"\x10")
        assert isinstance(told(path, AskStatus()), Status)
        answer = receive_answer(idle, time.monotonic() + 10.0)
    assert isinstance(answer, Refused)
    assert answer.error == "StorageTimeoutError"
    with socket.socket(socket.AF_UNIX) as gone:  # does not wait for the answer
        gone.connect(str(path))
        gone.sendall(framed(msgspec.msgpack.encode(AskStatus())))
    assert isinstance(told(path, AskStatus()), Status)


def test_detach_and_attach(engine: Engine, path: Path) -> None:
    status = told(path, AskStatus())
    assert isinstance(status, Status)
    assert status.pid == os.getpid()
    assert status.backends == ["ram"]
    assert status.l3 is not None
    assert (status.l3.name, status.l3.plugin, status.l3.attached) == ("ram", "memory", True)
    with pytest.raises(StorageBusyError, match="'ram' is attached"):
        told(path, Attach(backend="ram"))
    answer = told(path, Detach(drain_s=5.0))
    assert isinstance(answer, Detached)
    assert (answer.backend, answer.complete, answer.waiting_pages) == ("ram", True, 0)
    assert engine.runtime.attached_storage() is None
    status = told(path, AskStatus())
    assert isinstance(status, Status)
    assert status.l3 is not None
    assert (status.l3.attached, status.l3.health) == (False, "detached")
    assert told(path, Detach(drain_s=0.0)) == Detached(
        backend="", complete=True, waiting_pages=0, stuck_threads=0, seconds=0.0
    )
    with pytest.raises(InputError, match="backends of this configuration: ram") as caught:
        told(path, Attach(backend="rum"))
    assert caught.value.where.file == ROOT / "configs/memory.toml"
    assert "did you mean ram" in caught.value.remedy
    assert isinstance(told(path, Attach(backend="ram")), Attached)
    assert engine.runtime.attached_storage() is not None


def test_an_exception_is_an_answer(
    engine: Engine, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(type(engine.runtime), "attached_storage", lambda _: broken())
        with pytest.raises(StorageError, match="ZeroDivisionError: a bug"):
            told(path, AskStatus())
    assert "ZeroDivisionError" in caplog.text, "a bug is logged whole"
    assert isinstance(told(path, AskStatus()), Status)


def test_without_l3(config: Config, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = config.source.file
    with open_engine(
        load_config(str(file), [*SMALL, f"admin.socket={path}", "l3.backend="]), OracleRunner()
    ):
        settings = ["--config", str(file), "--set", f"admin.socket={path}"]
        assert cli.main(["backends", "status", *settings]) == 0
        assert "none from the beginning" in capsys.readouterr().out
        assert cli.main(["backends", "attach", "ram", *settings]) == 2
        assert "was made without L3" in capsys.readouterr().err
        assert cli.main(["backends", "detach", "--force", *settings]) == 0


@pytest.fixture
def disk_config(tmp_path: Path, path: Path) -> Path:
    """With a backend `disk` that cannot be opened."""
    (tmp_path / "file").touch()
    file = tmp_path / "c.toml"
    text = (ROOT / "configs/memory.toml").read_text()
    disk = f'[backends.disk]\nplugin = "filesystem"\noptions.path = "{tmp_path}/file"\n'
    file.write_text(f'{text}\n{disk}[admin]\nsocket = "{path}"\n')
    return file


def test_a_backend_that_cannot_be_opened(
    disk_config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said as at a start, with the line of the setting; and L3 stays what it was."""
    file = disk_config
    with open_engine(load_config(file, SMALL), OracleRunner()) as engine:
        assert cli.main(["backends", "detach", "--config", str(file)]) == 0
        assert cli.main(["backends", "attach", "disk", "--config", str(file)]) == 2
        told = capsys.readouterr().err
        assert f"{file}:" in told
        assert "backends.disk.options.path" in told
        assert engine.runtime.attached_storage() is None


def test_wrong_use(tmp_path: Path, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f'[admin]\nsocket = "{path}"\n')
    name = ["--config", str(file)]
    assert cli.main(["backends", "detach", "--drain", "3", "--force", *name]) == 2
    assert "keep one" in capsys.readouterr().err
    assert cli.main(["backends", "detach", "--drain", "-1", *name]) == 2
    assert cli.main(["backends", "attach", *name]) == 2
    assert cli.main(["backends", "status", "--config", str(tmp_path / "none.toml")]) == 2
    capsys.readouterr()
    assert cli.main(["backends", "status", *name]) == 1
    said = capsys.readouterr().err
    assert f"{path} ({file}:2: admin.socket): nothing that serves listens here" in said
    file.write_text('[admin]\nsocket = ""\n')
    assert cli.main(["backends", "status", *name]) == 2
    said = capsys.readouterr().err
    assert "no admin socket" in said
    assert "add [admin] with socket" in said
    file.write_text("[admin]\nsokket = 3\n")
    assert cli.main(["backends", "status", *name]) == 2
    assert "did you mean socket" in capsys.readouterr().err
    file.write_text("admin = 3\n")
    assert cli.main(["backends", "status", *name]) == 2
    for bad in ("x" * 108, "a\\u0000b"):
        file.write_text(f'[admin]\nsocket = "{bad}"\n')
        with pytest.raises(ConfigError) as caught:
            load_admin(file)
        assert caught.value.where.line == 2


# ── the name ─────────────────────────────────────────────────────────────────────────────────────


def test_one_has_the_name(path: Path) -> None:
    first = AdminSocket(str(path), HERE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.with_name(f"{path.name}.lock").stat().st_mode) == 0o600
    first.check_integrity()
    with pytest.raises(ConfigError, match=f"process {os.getpid()} listens at {path}"):
        AdminSocket(str(path), HERE)
    first.check_integrity()
    first.close()
    first.close()
    first.check_integrity()
    assert [*path.parent.iterdir()] == []
    AdminSocket(str(path), HERE).close()


def test_permissions_whatever_the_umask(path: Path) -> None:
    before = os.umask(0)
    try:
        opened = AdminSocket(str(path), HERE)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    opened.close()


def test_what_lies_at_the_path(path: Path, tmp_path: Path) -> None:
    path.parent.mkdir()
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is no socket"):
        AdminSocket(str(path), HERE)
    assert path.read_text() == "mine"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen(1)
        with pytest.raises(ConfigError, match="another process listens"):
            AdminSocket(str(path), HERE)
        assert path.is_socket()
    AdminSocket(str(path), HERE).close()  # nobody listens there now
    assert [*path.parent.iterdir()] == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="no socket can be made"):
        AdminSocket(str(tmp_path / "file/x.sock"), HERE)


def test_many_at_once(path: Path) -> None:
    """One of them gets the name, whatever a dead one left; and again, when that one ends."""
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    for _ in range(20):
        got: list[AdminSocket] = []
        barrier = threading.Barrier(4)

        def take(barrier: threading.Barrier = barrier, got: list[AdminSocket] = got) -> None:
            barrier.wait(10)
            with contextlib.suppress(ConfigError):
                got.append(AdminSocket(str(path), HERE))

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(got) == 1
        got[0].check_integrity()
        got[0].close()
        assert [*path.parent.iterdir()] == []


def test_it_removes_only_its_own(path: Path) -> None:
    first = AdminSocket(str(path), HERE)
    path.unlink()
    path.write_text("another's")
    first.close()
    assert path.read_text() == "another's"


# ── its end ──────────────────────────────────────────────────────────────────────────────────────


def test_a_process_that_ends_answers_no_more(engine: Engine, path: Path) -> None:
    engine.close(5.0)
    with pytest.raises(StorageUnavailableError, match="nothing that serves"):
        told(path, AskStatus())
    assert not [t for t in threading.enumerate() if t.name == "kvstrata-admin"]
    engine.close(5.0)


def test_a_command_under_way_delays_the_end_no_longer_than_said(
    engine: Engine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, leave = threading.Event(), threading.Event()

    def hangs(*_: object) -> Answer:
        begun.set()
        leave.wait(30)
        raise StorageTimeoutError("at last")

    monkeypatch.setattr(admin_server, "_do", hangs)
    errors: list[StorageError] = []

    def operator() -> None:
        try:
            told(path, Detach(drain_s=60.0))
        except StorageError as error:
            errors.append(error)

    thread = threading.Thread(target=operator)
    thread.start()
    assert begun.wait(10)
    at = time.monotonic()
    engine.close(0.4)
    assert time.monotonic() - at < 15.0, "the command hangs for twice as long"
    leave.set()
    thread.join(10)
    assert "at last" in str(errors[0])


def test_a_signal_while_the_engine_is_handed_over(
    config: Config, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator sees it a moment before the replay has it. It is closed all the same."""

    def told_to_end(*args: Any, **options: Any) -> Engine:
        engine = open_engine(*args, **options)
        signal.raise_signal(signal.SIGTERM)
        return engine

    monkeypatch.setattr("kvstrata.tools.replay.open_engine", told_to_end)
    with interruptible() as stop:
        report = run_replay(config, shipped_trace(), stop=stop)
    assert (stop.exit_code, report.run.complete) == (128 + signal.SIGTERM, False)
    assert [*path.parent.iterdir()] == []


def test_nothing_is_left_when_an_engine_cannot_start(
    config: Config, path: Path, disk_config: Path
) -> None:
    other = AdminServer(str(path))
    with pytest.raises(ConfigError, match="listens at"):
        open_engine(config, OracleRunner())
    other.close(1.0)
    broken = load_config(disk_config, [*SMALL, "l3.backend=disk"])
    with pytest.raises(ConfigError, match=r"backends\.disk\.options\.path"):
        open_engine(broken, OracleRunner())
    assert [*path.parent.iterdir()] == []
