"""`kvstrata doctor`: what it finds on machines as they should not be."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstrata.configs import load_config
from kvstrata.tools import cli, doctor_stores
from kvstrata.tools.doctor import (
    Check,
    Machine,
    Status,
    check_device,
    check_gds,
    check_libraries,
    check_limits,
    check_memory,
    run_child,
)
from kvstrata.tools.doctor_stores import check_root, check_stores, file_system_of

INFINITE = resource.RLIM_INFINITY


def _by_name(checks: Any) -> dict[str, Check]:
    found = list(checks)
    for check in found:
        assert check.remedy or check.status is Status.OK, f"{check.name} has no remedy"
    return {check.name: check for check in found}


def test_the_command(two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(two.folder)
    two.fill("a", chains=2)
    out = two.folder / "report.json"
    assert cli.main(["doctor", "--config", str(two.config), "--json", str(out)]) == 0
    report = json.loads(out.read_bytes())
    areas = {check["area"] for check in report["checks"]}
    assert {"device", "memory", "limits", "backend a", "backend b", "libraries", "GDS"} <= areas
    assert report["failed"] == 0
    assert {path.name for path in two.root("a").iterdir()} >= {"objects"}
    assert not list(two.folder.rglob("*doctor*")), "it removes what it writes"
    assert not two.root("b").exists()


def test_it_fails_where_something_cannot_work(
    two: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(two.folder)
    two.root("b").write_text("a file")
    assert cli.main(["doctor", "--config", str(two.config)]) == 1
    assert "1 failed" in capsys.readouterr().out
    assert cli.main(["doctor", "--config", "none.toml"]) == 2


# ── stores ───────────────────────────────────────────────────────────────────────────────────────


def _room(two: Any, name: str = "a", **options: Any) -> dict[str, Check]:
    config = load_config(two.config)
    changed = msgspec.structs.replace(config.backends[name].options, **options)
    return _by_name(check_root(Machine(), config, name, changed))


def test_room(two: Any) -> None:
    two.fill("a", chains=2)
    assert _room(two)["room"].status is Status.OK
    assert "no max_bytes" in _room(two)["room"].found
    assert _room(two, min_free_bytes="900TiB")["room"].status is Status.FAIL
    wide = _room(two, max_bytes="900TiB")["room"]
    assert wide.status is Status.WARN
    assert "will not be reached" in wide.remedy


def test_roots(two: Any, tmp_path: Path) -> None:
    two.fill("a", chains=1)
    two.root("a").chmod(0o755)
    assert _room(two)["root"].status is Status.WARN
    assert _room(two, path=str(two.config))["root"].status is Status.FAIL
    assert _room(two, path=str(two.config / "below"))["root"].status is Status.FAIL
    assert "not made yet" in _room(two, path=str(tmp_path / "x/y/z"))["root"].found
    assert not (tmp_path / "x").exists()
    two.root("b").symlink_to(two.root("a"))
    checks = [c for c in check_stores(Machine(), load_config(two.config)) if c.name == "root"]
    assert any("is also the root of a" in check.found for check in checks)


def test_shared_memory_and_its_kind(two: Any, tmp_path: Path) -> None:
    """A file system is named; what it can do was found by doing it."""
    checks = _room(two, path="/dev/shm")
    assert "(tmpfs)" in checks["root"].found
    assert checks["O_DIRECT"].status in (Status.OK, Status.INFO)
    assert checks["publish"].status is Status.OK
    info = tmp_path / "proc/self"
    info.mkdir(parents=True)
    (info / "mountinfo").write_text(
        "1 1 0:1 / / rw - overlay x rw\n2 1 0:2 / /mnt/my\\040disk rw - xfs y rw\nbroken\n"
    )
    machine = Machine(root=tmp_path)
    assert file_system_of(machine, "/mnt/my disk/kv") == "xfs"
    assert file_system_of(machine, "/mnt/my diskette") == "overlay"
    assert file_system_of(Machine(root=tmp_path / "none"), "/") == "unknown"


@pytest.mark.parametrize(("step", "word"), [("open", "open"), ("pwrite", "write")])
def test_direct_io_that_opens_and_then_refuses(
    two: Any, monkeypatch: pytest.MonkeyPatch, step: str, word: str
) -> None:
    two.fill("a", chains=1)
    original = getattr(os, step)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if step != "open" or args[1] & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return original(*args, **kwargs)

    monkeypatch.setattr(doctor_stores.os, step, refuse)
    check = doctor_stores._direct("a", str(two.root("a")), "overlay")
    assert check.status is Status.INFO
    assert f"overlay refuses it: {word} gives EINVAL" in check.found


def test_a_file_system_without_links(two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    two.fill("a", chains=1)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(doctor_stores.os, "link", refuse)
    check = doctor_stores._publish("a", str(two.root("a")), "exfat")
    assert (check.status, check.found) == (Status.FAIL, "exfat has no hard links (ENOTSUP)")
    assert not list(two.root("a").glob(".kvstrata*"))


# ── machine ──────────────────────────────────────────────────────────────────────────────────────


def _machine(root: Path, child: dict[str, Any] | None = None, **limits: int) -> Machine:
    numbers = {getattr(resource, f"RLIMIT_{name}"): value for name, value in limits.items()}
    return Machine(
        root=root,
        limit=lambda what: (numbers.get(what, INFINITE), INFINITE),
        child=lambda code: child if child is not None else {},
    )


@pytest.mark.parametrize(
    ("kind", "child", "driver", "status", "word"),
    [
        ("auto", {"torch": "2", "cuda": "", "gpus": []}, False, Status.INFO, "no NVIDIA driver"),
        ("auto", {"torch": "2", "cuda": "", "gpus": []}, True, Status.WARN, "without CUDA"),
        ("cuda", {"torch": "2", "cuda": "", "gpus": []}, True, Status.FAIL, "without CUDA"),
        ("cuda", {"torch": "2", "cuda": "13", "gpus": []}, True, Status.FAIL, "sees no GPU"),
    ],
)
def test_no_gpu(
    two: Any, tmp_path: Path, kind: str, child: Any, driver: bool, status: Status, word: str
) -> None:
    config = load_config(two.config, [f"device.kind={kind}"])
    root = tmp_path / "machine"
    root.mkdir()
    if driver:
        (root / "dev").mkdir()
        (root / "dev/nvidiactl").write_text("")
    check = _by_name(check_device(_machine(root, child), config))["GPU"]
    assert check.status is status
    assert word in check.found


def test_a_gpu_that_is_too_small(two: Any, tmp_path: Path) -> None:
    config = load_config(two.config)
    child = {"torch": "2", "cuda": "13", "gpus": [["H200", 1024, 2**30]]}
    check = _by_name(check_device(_machine(tmp_path, child), config))["GPU 0"]
    assert (check.status, check.remedy) == (Status.FAIL, "lower pools.pages")
    child["gpus"] = [["H200", 2**30, 2**30]]
    assert _by_name(check_device(_machine(tmp_path, child), config))["GPU 0"].status is Status.OK
    broken = _by_name(check_device(_machine(tmp_path, {"error": "no module"}), config))["torch"]
    assert broken.status is Status.FAIL


@pytest.mark.parametrize("status", [Status.OK, Status.WARN])
def test_a_gpu_wants_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: Status
) -> None:
    if status is Status.WARN:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CC", raising=False)
    torch = {"torch": "2", "cuda": "13", "gpus": [["H200", 2**30, 2**30]]}
    machine = Machine(
        tmp_path, child=lambda code: torch if "get_device_name" in code else run_child(code)
    )
    check = _by_name(check_device(machine, None))["C compiler"]
    assert (check.status, bool(check.remedy)) == (status, status is Status.WARN)


def test_memory_of_the_control_group(two: Any, tmp_path: Path) -> None:
    """1 MiB of staging in groups with more and with less room."""
    proc, group = tmp_path / "proc/self", tmp_path / "sys/fs/cgroup/job"
    proc.mkdir(parents=True)
    group.mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 1000000 kB\n")
    (proc / "mountinfo").write_text("1 1 0:1 / /sys/fs/cgroup rw - cgroup2 c rw\n")
    (proc / "cgroup").write_text("0::/job\n")
    (group / "memory.current").write_text("0\n")
    config = load_config(two.config)
    for limit, status in ((2**30, Status.OK), (1_200_000, Status.WARN), (500_000, Status.FAIL)):
        (group / "memory.max").write_text(f"{limit}\n")
        checks = _by_name(check_memory(_machine(tmp_path), config))
        assert checks["machine and control group"].status is status
    unknown = _by_name(check_memory(_machine(tmp_path / "none"), config))
    assert unknown["machine and control group"].status is Status.WARN


def test_huge_pages(two: Any, tmp_path: Path) -> None:
    """3 MiB of staging in reserved pages of 2 MiB: the machine's other memory does not matter."""
    folder = tmp_path / "sys/kernel/mm/hugepages/hugepages-2048kB"
    folder.mkdir(parents=True)
    (folder / "resv_hugepages").write_text("1\n")
    config = load_config(two.config, ["staging.huge_pages=true", "staging.bytes=3MiB"])
    for free, status in ((3, Status.OK), (2, Status.FAIL)):
        (folder / "free_hugepages").write_text(f"{free}\n")
        check = _by_name(check_memory(_machine(tmp_path), config))["huge pages"]
        assert (check.status, check.found) == (
            status,
            f"{free - 1} of 2 MiB are free, staging takes 2",
        )
    assert "vm.nr_hugepages=2" in check.remedy


def test_limits(two: Any, tmp_path: Path) -> None:
    config = load_config(two.config)
    for number, status in ((INFINITE, Status.OK), (512, Status.WARN), (64, Status.FAIL)):
        checks = _by_name(check_limits(_machine(tmp_path, NOFILE=number), config))
        assert checks["open files"].status is status
    short = _by_name(check_limits(_machine(tmp_path, FSIZE=1000, DATA=1000), config))
    assert short["file size"].status is short["data"].status is Status.FAIL
    memlock = _by_name(check_memory(_machine(tmp_path, MEMLOCK=65536), config))["memlock"]
    assert (memlock.status, memlock.found[:6]) == (Status.INFO, "65,536")


def test_optional_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstrata.tools import doctor

    monkeypatch.setattr(doctor, "_version", lambda name: "" if "mooncake" in name else "1.0")
    missing = _machine(tmp_path, {"error": "cannot open shared object file"})
    checks = _by_name([*check_libraries(missing, None), *check_gds(missing)])
    assert checks["libibverbs.so.1"].remedy == "apt install libibverbs1"
    assert checks["package"].status is checks["libcuda.so.1"].status is Status.INFO
    assert "nvidia-fs" in checks
    monkeypatch.setattr(doctor, "_version", lambda name: "")
    assert _by_name(check_libraries(missing, None))["Python"].status is Status.FAIL
    assert "pip install kvikio" in _by_name(check_gds(missing))["kvikio"].remedy


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("import os; os.abort()", "killed by signal 6"),
        ("import os; os.kill(os.getpid(), 11)", "killed by signal 11"),
        ("import nothing_of_this_name", "ModuleNotFoundError"),
        ("print('hello')", "exit code 0"),
        ("print([1])", "[1]"),
        ("raise SystemExit(3)", "exit code 3"),
    ],
)
def test_a_probe_that_dies_takes_nothing_with_it(code: str, word: str) -> None:
    assert word in run_child(code)["error"]


def test_a_probe_that_hangs_ends() -> None:
    hang = "import threading; threading.Event().wait()"
    assert "no answer within" in run_child(hang, timeout_s=0.5)["error"]
