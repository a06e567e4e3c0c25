"""What this machine can and cannot do for a configuration, each with its remedy.

A check never raises for what it finds, and what could crash or hang (drivers, vendor libraries)
runs in a child process.
"""

from __future__ import annotations

import enum
import json
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from kvstrata.configs import Config
from kvstrata.memory_limits import available_memory_bytes, free_huge_bytes
from kvstrata.staging.memory import HUGE_BYTES
from kvstrata.units import format_size

CHILD_TIMEOUT_S = 60.0
MIN_OPEN_FILES, GOOD_OPEN_FILES = 256, 1024
MIN_SQLITE = (3, 35, 0)
"""The index of the file-system backend uses RETURNING and UPDATE … FROM."""


class Status(enum.StrEnum):
    OK = "ok"
    INFO = "info"
    """Something optional that is not there."""
    WARN = "warn"
    """It works, and not as well as it could."""
    FAIL = "fail"
    """What the configuration asks for cannot work."""


class Check(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    area: str
    name: str
    status: Status
    found: str
    remedy: str = ""


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `kvstrata doctor --json` writes."""

    config: str
    checks: list[Check]
    failed: int
    warned: int


def run_child(code: str, timeout_s: float = CHILD_TIMEOUT_S) -> dict[str, Any]:
    """Run Python code in a child: what it printed as JSON, or {"error": why}.

    A child that dies or hangs says so; nothing of it reaches this process.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {timeout_s:.0f} s"}
    if done.returncode < 0:
        return {"error": f"the probe was killed by signal {-done.returncode}"}
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"exit code {done.returncode}"}
    return answer if isinstance(answer, dict) else {"error": f"the probe said {answer!r}"}


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the checks look; tests put something else there."""

    root: Path = Path("/")
    """Stands for `/` of what is read from /proc, /sys and /dev."""
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit
    child: Callable[[str], dict[str, Any]] = run_child
    """As `run_child`."""

    def has(self, path: str) -> bool:
        return (self.root / path.lstrip("/")).exists()

    def text(self, path: str) -> str:
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace")
        except OSError:
            return ""


# ── device ───────────────────────────────────────────────────────────────────────────────────────

_TORCH = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "gpus": []}
if torch.cuda.is_available():
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        found["gpus"].append([torch.cuda.get_device_name(i), free, total])
print(json.dumps(found))
"""

_COMPILED = """
import json
from kvstrata.gpu_runtime.cuda_chunks import compiled
print(json.dumps({"compiled": compiled() is not None}))
"""


def check_device(machine: Machine, config: Config | None) -> Iterator[Check]:
    """The GPU, and whether L1 fits."""
    found = machine.child(_TORCH)
    kind = config.device.kind if config is not None else "auto"
    driver = machine.text("/proc/driver/nvidia/version").split("\n")[0]
    has_driver = bool(driver) or machine.has("/dev/nvidiactl")
    if "error" in found:
        yield Check(
            "device", "torch", Status.FAIL, f"cannot be used: {found['error']}", "reinstall torch"
        )
        return
    yield Check("device", "torch", Status.OK, f"{found['torch']}, CUDA {found['cuda'] or 'none'}")
    if not found["gpus"]:
        status = Status.FAIL if kind == "cuda" else Status.INFO
        if has_driver and not found["cuda"]:
            status = Status.FAIL if kind == "cuda" else Status.WARN
            text, remedy = "a driver, but torch without CUDA", "install a CUDA build of torch"
        elif has_driver:
            text, remedy = (
                "a driver, but torch sees no GPU",
                "check nvidia-smi, CUDA_VISIBLE_DEVICES",
            )
        else:
            text, remedy = "no NVIDIA driver", "install the driver, or run on the CPU device"
        yield Check("device", "GPU", status, f"none: {text}; L1 is in host memory", remedy)
        return
    for i, (name, free, total) in enumerate(found["gpus"]):
        need = config.l1_bytes if config is not None and i == 0 and kind != "cpu" else 0
        status = Status.FAIL if need > free else Status.OK
        text = f"{name}, {format_size(free)} of {format_size(total)} free"
        text += f", L1 needs {format_size(need)}" if need else ""
        yield Check("device", f"GPU {i}", status, text, "lower pools.pages" if need > free else "")
    if machine.child(_COMPILED).get("compiled"):
        yield Check("device", "C compiler", Status.OK, "compiles the loop that enqueues copies")
    else:
        text = "none that works: Python enqueues copies, which holds up the thread that launches"
        yield Check("device", "C compiler", Status.WARN, text, "install gcc, or name one in CC")


# ── memory and limits ────────────────────────────────────────────────────────────────────────────


def check_memory(machine: Machine, config: Config | None) -> Iterator[Check]:
    """Host memory against staging, and what bounds pinning."""
    staging = config.staging.bytes if config is not None else 0
    huge = config is not None and config.staging.huge_pages
    if huge:
        yield _huge_pages(machine, staging)
    ordinary = 0 if huge else staging
    available = available_memory_bytes(machine.root)
    text = "unknown" if available is None else f"{format_size(available)} can still be taken"
    status, remedy = Status.OK, ""
    if available is None:
        status, remedy = Status.WARN, "make /proc/meminfo and the control group readable"
    elif ordinary > available:
        status, remedy = Status.FAIL, "lower staging.bytes, or raise the control group's memory.max"
    elif ordinary > 0.8 * available:
        status, remedy = Status.WARN, "leave a fifth of it free: lower staging.bytes"
    text += f", staging takes {format_size(staging)}" if ordinary else ""
    yield Check("memory", "machine and control group", status, text, remedy)
    soft, hard = machine.limit(resource.RLIMIT_MEMLOCK)
    uses_rdma = config is not None and any(b.plugin == "mooncake" for b in config.backends.values())
    text = f"{_limit(soft)} (most {_limit(hard)})"
    if soft == resource.RLIM_INFINITY or (staging and soft >= staging):
        yield Check("memory", "memlock", Status.OK, text)
        return
    text += "; CUDA pins without it, RDMA and io_uring do not"
    remedy = "ulimit -l unlimited (limits.conf, LimitMEMLOCK=, docker --ulimit memlock=-1)"
    yield Check("memory", "memlock", Status.FAIL if uses_rdma else Status.INFO, text, remedy)


def _huge_pages(machine: Machine, staging: int) -> Check:
    free, count = free_huge_bytes(machine.root), -(-staging // HUGE_BYTES)
    text = f"{free // HUGE_BYTES} of 2 MiB are free, staging takes {count}"
    status = Status.OK if free >= staging else Status.FAIL
    remedy = f"sysctl vm.nr_hugepages={count}, or staging.huge_pages = false"
    return Check("memory", "huge pages", status, text, "" if free >= staging else remedy)


def check_limits(machine: Machine, config: Config | None) -> Iterator[Check]:
    """ulimits that storage meets."""
    soft, hard = machine.limit(resource.RLIMIT_NOFILE)
    text = f"{_limit(soft)} (most {_limit(hard)})"
    status, remedy = Status.OK, f"ulimit -n {GOOD_OPEN_FILES} or more"
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        status = Status.FAIL
    elif soft != resource.RLIM_INFINITY and soft < GOOD_OPEN_FILES:
        status = Status.WARN
    yield Check("limits", "open files", status, text, "" if status is Status.OK else remedy)
    frame = 4096 + max((c.page_bytes for c in config.components), default=0) if config else 4096
    for name, what in (("file size", resource.RLIMIT_FSIZE), ("data", resource.RLIMIT_DATA)):
        soft, hard = machine.limit(what)
        need = frame if what == resource.RLIMIT_FSIZE else (config.staging.bytes if config else 0)
        is_short = soft != resource.RLIM_INFINITY and soft < need
        status = Status.FAIL if is_short else Status.OK
        text = f"{_limit(soft)} (most {_limit(hard)}), {format_size(need)} needed"
        yield Check("limits", name, status, text, f"raise the limit of {name}" if is_short else "")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


# ── libraries ────────────────────────────────────────────────────────────────────────────────────

_REQUIRED = ("msgspec", "xxhash", "aiofiles", "typer", "rich", "numpy")
_LOAD = """
import ctypes, json, sys
try:
    ctypes.CDLL({name!r})
    print(json.dumps({{}}))
except OSError as error:
    print(json.dumps({{"error": str(error)}}))
"""
_IMPORT = """
import importlib, json
module = importlib.import_module({name!r})
print(json.dumps({{"version": str(getattr(module, "__version__", ""))}}))
"""
_MOONCAKE = ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")


def check_libraries(machine: Machine, config: Config | None) -> Iterator[Check]:
    """What is needed, and what is optional."""
    found = {name: _version(name) for name in _REQUIRED}
    missing = [name for name, number in found.items() if not number]
    text = ", ".join(f"{name} {number or 'missing'}" for name, number in found.items())
    yield Check(
        "libraries", "Python", Status.FAIL if missing else Status.OK, text,
        f"pip install {' '.join(missing)}" if missing else "",
    )  # fmt: skip
    is_old = sqlite3.sqlite_version_info < MIN_SQLITE
    yield Check(
        "libraries", "SQLite", Status.FAIL if is_old else Status.OK, sqlite3.sqlite_version,
        "use a Python with SQLite 3.35 or newer" if is_old else "",
    )  # fmt: skip
    needs = config is not None and any(b.plugin == "mooncake" for b in config.backends.values())
    yield from _check_mooncake(machine, needs)


def _check_mooncake(machine: Machine, is_needed: bool) -> Iterator[Check]:
    bad = Status.FAIL if is_needed else Status.INFO
    installed = [f"{name} {number}" for name in _MOONCAKE if (number := _version(name))]
    verbs = machine.child(_LOAD.format(name="libibverbs.so.1"))
    yield Check(
        "mooncake", "libibverbs.so.1", bad if "error" in verbs else Status.OK,
        verbs.get("error", "can be loaded"), "apt install libibverbs1" if "error" in verbs else "",
    )  # fmt: skip
    if not installed:
        remedy = f"pip install {_MOONCAKE[0]} (without CUDA: {_MOONCAKE[1]})"
        yield Check("mooncake", "package", bad, "not installed", remedy)
        return
    answer = machine.child(_IMPORT.format(name="mooncake"))
    text = f"{', '.join(installed)}: {answer.get('error', 'can be imported')}"
    remedy = "see what it misses: ldd on its *.so" if "error" in answer else ""
    yield Check("mooncake", "package", bad if "error" in answer else Status.OK, text, remedy)


def check_gds(machine: Machine) -> Iterator[Check]:
    """GPUDirect Storage: the driver's parts and kvikio. Optional."""
    for library, remedy in (
        ("libcuda.so.1", "install the NVIDIA driver; kvikio does no I/O without it"),
        ("libcufile.so.0", "comes with CUDA (cuda-libcufile) or the kvikio package"),
    ):
        answer = machine.child(_LOAD.format(name=library))
        is_missing = "error" in answer
        text = answer.get("error", "can be loaded")
        status = Status.INFO if is_missing else Status.OK
        yield Check("GDS", library, status, text, remedy if is_missing else "")
    has_nvfs = machine.has("/proc/driver/nvidia-fs/version")
    yield Check(
        "GDS", "nvidia-fs", Status.OK if has_nvfs else Status.INFO,
        machine.text("/proc/driver/nvidia-fs/version").strip() or "the kernel module is not loaded",
        "" if has_nvfs else "install nvidia-fs and modprobe it; without it cuFile copies by host",
    )  # fmt: skip
    number = _version("kvikio-cu12") or _version("kvikio-cu13")
    if not number:
        remedy = "pip install kvikio-cu12 (CUDA 13: kvikio-cu13)"
        yield Check("GDS", "kvikio", Status.INFO, "not installed", remedy)
        return
    answer = machine.child(_IMPORT.format(name="kvikio"))
    status = Status.INFO if "error" in answer else Status.OK
    text = f"{number}: {answer.get('error', 'can be imported')}"
    yield Check("GDS", "kvikio", status, text, "mend what is above" if "error" in answer else "")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
