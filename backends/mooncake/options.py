"""The options of a `mooncake` backend, and the environment that the client library reads."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvstrata.units import parse_size

Protocol = Literal["tcp", "rdma"]
Role = Literal["client", "store"]
LogLevel = Literal["INFO", "WARNING", "ERROR"]

ADMIN_PORT = 9003
"""Where a master answers questions over HTTP, unless its `-metrics_port` says otherwise."""
NO_ADMIN = "none"

_PREFIXES = ("MC_", "MOONCAKE_", "GLOG_")
_GLOG = {"INFO": "0", "WARNING": "1", "ERROR": "2"}
_MOST_REPLICAS = 8


class MooncakeOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`[backends.NAME.options]` of a `mooncake` backend."""

    master: str = "127.0.0.1:50051"
    """HOST:PORT of the master's RPC server."""
    admin: str = ""
    """HOST:PORT of the master's HTTP server (`-metrics_port`), which knows its segments and keys.
    "": the master's host, port 9003. "none": there is none; then scan, usage and `replicas` above
    1 do not work."""
    metadata: str = "P2PHANDSHAKE"
    """Metadata server of the transfer engine: "P2PHANDSHAKE" or a URL (http, etcd, redis)."""
    host: str = "127.0.0.1"
    """Name or address under which other machines reach this one."""
    role: Role = "client"
    """"client" only uses the store; "store" also gives it `segment_bytes` of this process."""
    segment_bytes: int | str = "1GiB"
    """Memory that a "store" gives."""
    local_buffer_bytes: int | str = "16MiB"
    """The client library's own buffers; pages do not pass through them."""
    protocol: Protocol = "tcp"
    """What pages travel over."""
    devices: tuple[str, ...] = ()
    """RDMA devices, such as ["mlx5_0"]; empty: the library chooses."""
    tcp_fallback: bool = False
    """With protocol "rdma" and no RDMA device here: use TCP, and say so, instead of refusing."""
    tenant: str = "default"
    """Tenant of the master."""
    replicas: int = 1
    """Copies of each page, under keys of their own and on different segments."""
    preferred_segments: tuple[str, ...] = ()
    """Segments (HOST:PORT, as the master names them) that pages go to; empty: all."""
    prefer_same_node: bool = False
    """Allocate on this node when there is room."""
    soft_pin_s: float = 0.0
    """Stored pages are evicted last for so long; 0: not pinned."""
    hard_pin: bool = False
    """Stored pages are never evicted. What does not fit any more is FULL."""
    lease_s: float = 10.0
    """The master's `-default_kv_lease_ttl`: a call moves no more than arrives within half of it."""
    threads: int = 4
    """Calls at once; over TCP one or two of them move bytes. Stores leave one to loads, so that
    with 4 there is a third call of either kind that is ready to move when one of these ends."""
    batch_pages: int = 128
    """Most pages in one call."""
    call_bytes: int | str = "64MiB"
    """Most bytes in one call of the client library."""
    ssd_offload: bool = False
    """The library may write what it evicts to a disk of this store (role "store")."""
    ssd_offload_path: str = ""
    """Folder for it."""
    client_http_port: int = 0
    """Port of the library's own HTTP server (metrics), on all addresses; 0: none."""
    rpc_timeout_s: float = 1.0
    """MC_RPC_TIMEOUT_MS: an answer of the master that takes longer has failed."""
    connect_timeout_s: float = 0.5
    """MC_RPC_CONNECT_TIMEOUT_MS, and what a probe of an address waits."""
    memcpy: bool | None = None
    """MC_STORE_MEMCPY: copy within this process instead of sending; absent: the library decides."""
    hot_cache_bytes: int | str = 0
    """MC_STORE_LOCAL_HOT_CACHE_SIZE: a cache of read pages in this process."""
    huge_pages: bool = False
    """MC_STORE_USE_HUGEPAGE, for the segment."""
    gid_index: int = -1
    """MC_GID_INDEX (RDMA); -1: the library chooses."""
    mtu: Literal[0, 512, 1024, 2048, 4096] = 0
    """MC_MTU (RDMA); 0: the library chooses."""
    ib_port: int = 0
    """MC_IB_PORT (RDMA); 0: the library chooses."""
    log_level: LogLevel = "ERROR"
    """What the library writes to stderr. It takes nothing quieter."""
    environment: dict[str, str] = {}
    """Further variables that the library reads, such as MC_TCP_LANES_PER_PEER = "4"."""

    def __post_init__(self) -> None:
        self._check_addresses()
        self._check_numbers()
        if self.role == "store" and not self.segment_size:
            raise ValueError('segment_bytes is 0: a "store" gives memory; use role = "client"')
        if self.role == "client" and self.ssd_offload:
            raise ValueError('ssd_offload needs role = "store": a client has nothing to offload')
        if self.ssd_offload and not self.ssd_offload_path:
            raise ValueError("ssd_offload_path is empty: give a folder")
        if self.protocol == "tcp" and self.devices:
            raise ValueError('devices are for protocol = "rdma": remove them, or change protocol')
        if self.hard_pin and self.soft_pin_s:
            raise ValueError("hard_pin and soft_pin_s exclude each other: choose one")
        if self.replicas > 1 and self.admin == NO_ADMIN:
            raise ValueError(
                "replicas above 1 need the master's HTTP server: set admin to its HOST:PORT"
            )
        if 0 < len(self.preferred_segments) < self.replicas:
            raise ValueError(
                f"{self.replicas} replicas need as many preferred_segments; "
                f"{len(self.preferred_segments)} are given"
            )
        for name, value in self.environment.items():
            if not name.startswith(_PREFIXES) or not value or "\0" in value:
                raise ValueError(
                    f"environment has {name!r}: names begin with MC_, MOONCAKE_ or GLOG_, and "
                    "values are not empty"
                )
            if name in self._named_environment():
                raise ValueError(f"environment has {name}: it has an option of its own, use that")

    # ── what follows from the options ────────────────────────────────────────────────────────────

    @property
    def segment_size(self) -> int:
        """Bytes this process gives to the store."""
        return parse_size(self.segment_bytes) if self.role == "store" else 0

    @property
    def admin_address(self) -> str | None:
        """HOST:PORT of the master's HTTP server."""
        if self.admin == NO_ADMIN:
            return None
        return self.admin or f"{self.master.rpartition(':')[0]}:{ADMIN_PORT}"

    def client_environment(self) -> dict[str, str]:
        """Every variable that the library is to see."""
        return {**self._named_environment(), **self.environment}

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _named_environment(self) -> dict[str, str]:
        found = {
            "MC_RPC_TIMEOUT_MS": str(int(self.rpc_timeout_s * 1000)),
            "MC_RPC_CONNECT_TIMEOUT_MS": str(int(self.connect_timeout_s * 1000)),
            # More of them hold the interpreter for 90 s while a master is away; we try again.
            "MC_STORE_CLIENT_SETUP_RETRIES": "1",
            "MC_LOG_LEVEL": self.log_level,
            "GLOG_minloglevel": _GLOG[self.log_level],
        }
        if self.memcpy is not None:
            found["MC_STORE_MEMCPY"] = str(int(self.memcpy))
        if parse_size(self.hot_cache_bytes):
            found["MC_STORE_LOCAL_HOT_CACHE_SIZE"] = str(parse_size(self.hot_cache_bytes))
        if self.huge_pages:
            found["MC_STORE_USE_HUGEPAGE"] = "1"
        if self.gid_index >= 0:
            found["MC_GID_INDEX"] = str(self.gid_index)
        if self.mtu:
            found["MC_MTU"] = str(self.mtu)
        if self.ib_port:
            found["MC_IB_PORT"] = str(self.ib_port)
        return found

    def _check_addresses(self) -> None:
        parse_address(self.master, "master")
        if self.admin not in ("", NO_ADMIN):
            parse_address(self.admin, "admin")
        if not self.host or not self.metadata:
            raise ValueError('host and metadata are not empty: host = "127.0.0.1" is this machine')
        if self.metadata != "P2PHANDSHAKE" and "://" not in self.metadata:
            raise ValueError(
                f'metadata is {self.metadata!r}: give "P2PHANDSHAKE" or a URL such as '
                '"http://host:8080/metadata"'
            )

    def _check_numbers(self) -> None:
        for name in ("segment_bytes", "local_buffer_bytes", "call_bytes", "hot_cache_bytes"):
            parse_size(getattr(self, name))
        bounds = {
            "replicas": (1, _MOST_REPLICAS),
            "threads": (1, 256),
            "batch_pages": (1, 1024),
            "client_http_port": (0, 65535),
            "gid_index": (-1, 255),
            "ib_port": (0, 255),
            "lease_s": (0.001, 86_400.0),
            "soft_pin_s": (0.0, 86_400.0),
            "rpc_timeout_s": (0.05, 600.0),
            "connect_timeout_s": (0.05, 600.0),
        }
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"{name} is {value}: give {least} … {most}")
        if parse_size(self.call_bytes) < 4096:
            raise ValueError(f"call_bytes is {self.call_bytes}: give at least the size of a page")


def parse_address(text: str, name: str) -> tuple[str, int]:
    """HOST and PORT of `text`; `ValueError` that names the option otherwise."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f'{name} is {text!r}: give HOST:PORT, such as "127.0.0.1:50051"')
    return host.strip("[]"), int(port)
