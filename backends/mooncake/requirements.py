"""What the `mooncake` backend needs from the machine, and how to get it."""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from kvstrata.errors import ConfigError

_LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
}
"""Shared libraries that the client is linked with, and the Debian packages that have them."""

_INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class Requirement:
    """One thing that is needed. For people: `kvstrata doctor` shows it."""

    name: str
    is_met: bool
    found: str
    """What is there, or what is missing."""
    remedy: str
    """How to get it; empty where it is there."""
    is_optional: bool = False


def mooncake_requirements() -> list[Requirement]:
    """Everything that the backend needs here, met or not. Starts nothing, imports nothing."""
    return [_system(), _client(), *map(_library, _LIBRARIES), _rdma()]


def rdma_devices() -> list[str]:
    """Names of the RDMA devices of this machine that can be used."""
    try:
        names = sorted(os.listdir(_INFINIBAND))
    except OSError:
        return []
    return [name for name in names if Path("/dev/infiniband").is_dir()]


def load_client() -> ModuleType:
    """Import `mooncake.store`. Raises `ConfigError` that says what is missing and how to get it."""
    try:
        return importlib.import_module("mooncake.store")
    except Exception as error:  # the library is linked with others, which may fail in any way
        missing = [r for r in mooncake_requirements() if not (r.is_met or r.is_optional)]
        remedies = "; ".join(r.remedy for r in missing) or "reinstall the distribution"
        raise ConfigError(
            f"the Mooncake client cannot be imported: {type(error).__name__}: {error}",
            remedy=remedies,
        ) from error


def client_folder() -> Path | None:
    """Where the client's distribution keeps its programs; None: it is not installed."""
    spec = find_spec("mooncake")
    places = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(places))) if places else None


def _system() -> Requirement:
    system, machine = platform.system(), platform.machine()
    return Requirement(
        "Linux",
        system == "Linux",
        f"{system} {machine}",
        "" if system == "Linux" else "Mooncake is published for Linux only",
    )


def _client() -> Requirement:
    folder = client_folder()
    has_gpu = Path("/dev/nvidiactl").exists()
    name = "mooncake-transfer-engine" + ("" if has_gpu else "-non-cuda")
    return Requirement(
        "client library",
        folder is not None,
        "no module `mooncake`" if folder is None else str(folder),
        ""
        if folder is not None
        else f"pip install '{name}' (or 'kvstrata[mooncake]' without CUDA)",
    )


def _library(name: str) -> Requirement:
    try:
        ctypes.CDLL(name)
    except OSError as error:
        remedy = f"apt-get install {_LIBRARIES[name]} (or your system's package with {name})"
        return Requirement(name, False, str(error), remedy)
    return Requirement(name, True, "can be loaded", "")


def _rdma() -> Requirement:
    devices = rdma_devices()
    return Requirement(
        "RDMA device",
        bool(devices),
        ", ".join(devices) or "no RDMA device is here; TCP works",
        "" if devices else 'needed for protocol = "rdma" only: an adapter, its driver, rdma-core',
        is_optional=True,
    )
