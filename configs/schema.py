"""The settings: one frozen struct a table of the file, and `Config`, which holds them all.

Field names are the keys of the file. A unit comes last in a name. Ranges that one field alone
decides stand here; what needs several fields is in `checks`. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from kvstrata.backends.policies import (
    BreakerSettings,
    ProcessSettings,
    RateSettings,
    RetrySettings,
)
from kvstrata.configs.source import ConfigSource, Keys
from kvstrata.errors import Where

if TYPE_CHECKING:
    from kvstrata.tiers.namespace import Namespace

ITEM_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "int8": 1,
}
"""Bytes of one element, by dtype. The keys are the dtypes that pools may have."""

HOST_ALIGN_BYTES = 4096
"""Pages in staging start at such a border, so that direct I/O works on them."""

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_\-]{0,63}$"
"""Names of components and backends: they become labels of metrics and parts of messages."""

Positive = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
RequiredText = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
Name = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]


class ByteSize(int):
    """A number of bytes above 0. In the file: an integer, or a string such as "64MiB"."""

    @property
    def text(self) -> str:
        """The same number with the largest unit that divides it: "64MiB"."""
        for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if self % factor == 0:
                return f"{self // factor}{unit}"
        return str(int(self))


class Secret(str):
    """A string that no message, table or repr shows."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'" if self else "''"


class NamespaceConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[namespace]`: what the pages belong to. Any difference makes another namespace."""

    model: RequiredText
    """Model id or path."""
    revision: Text = ""
    """Revision of the weights. "" only where `model` is a directory: taken from its files."""
    adapter: Text = ""
    """Adapter (LoRA) that the KV was computed with."""
    salt: Secret = Secret("")
    """Tenant's secret: equal prompts under different salts share nothing. Never shown."""
    salt_env: Text = ""
    """Environment variable to take `salt` from."""
    parallel_rank: Count = 0
    """Tensor-parallel rank of this execution domain."""
    parallel_size: Positive = 1
    """Number of tensor-parallel ranks."""
    epoch: Count = 0
    """Raised by one whenever the weights change in place."""
    engine: Text = ""
    """Engine and version, where another would make other bytes of the same tokens."""


class DeviceConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[device]`: where L1 is."""

    kind: str = "auto"
    """auto | cpu | cuda. auto takes the first GPU if there is one."""
    chunk_bytes: ByteSize = ByteSize(64 << 20)
    """GPU memory through which pages with small pieces are copied, four times: two each way."""


class ComponentConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[[pools.components]]`: one component of a page, a pool of its own."""

    name: Name
    """Name of the pool."""
    kind: str = "full"
    """full (keys and values) | mla (one latent a token: kv_heads = 1, head_dim its length)."""
    layers: Positive
    kv_heads: Positive
    head_dim: Positive
    dtype: str = "bfloat16"
    """bfloat16 | float16 | float32 | float8_e4m3fn | float8_e5m2 | uint8 | int8."""
    layout: str = "NHD"
    """NHD (tokens, heads, head_dim) | HND (heads, tokens, head_dim)."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers: its keys and values, or its latents."""
        arrays = self.layers if self.kind == "mla" else 2 * self.layers
        return arrays * self.kv_heads * self.head_dim * ITEM_BYTES[self.dtype]


class PoolsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[pools]`: L1, the pages in device memory."""

    pages: Positive
    """Pages of every component's pool."""
    page_tokens: Positive = 512
    """Tokens of a page: the unit of matching, moving and storing."""
    max_requests: Positive = 64
    """Rows of the ReqToToken table: requests that run at once."""
    max_context_tokens: Positive = 131_072
    """Columns of the ReqToToken table: the longest request."""
    components: Annotated[tuple[ComponentConfig, ...], msgspec.Meta(min_length=1)]
    """The components of a page; all have `pages` pages."""


class StagingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[staging]`: L2, pinned host memory."""

    mode: str = "cache"
    """cache: L2 keeps pages. buffer_only: it is a window between L1 and L3."""
    bytes: ByteSize = ByteSize(64 * 2**20)
    """All staging memory."""
    load_reserve: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.25
    """Share of the pages that only loads may take."""
    backend_cap: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.75
    """Most of the pages that one backend may hold, lent and quarantined together."""
    huge_pages: bool = False
    """Take it from the huge pages of 2 MiB that the system has reserved (vm.nr_hugepages)."""


class L3Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[l3]`: which backend is L3."""

    backend: Text = ""
    """NAME of a `[backends.NAME]` table; "" runs without L3."""


class BackendConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[backends.NAME]`: one instance of a storage plugin and the worker that owns it."""

    plugin: RequiredText
    """Name of the plugin, as `kvstrata backends list` has it."""
    on_full: str = "block"
    """When the worker's queue or the backend is full: block (a store waits for room, until its
    deadline, with its pages) | drop (it is skipped, counted)."""
    queue_pages: Positive = 4096
    """Bound of the worker's queue."""
    deadline_s: Seconds = 60.0
    """A store that takes longer has failed."""
    load_deadline_s: Seconds = 30.0
    """A load that takes longer is a miss."""
    lookup_deadline_s: Seconds = 5.0
    """A lookup that takes longer finds nothing."""
    queue_s: Seconds = 10.0
    """With on_full = "drop": a store that would wait longer, at the pace measured, is skipped."""
    isolation: str = "auto"
    """Where the plugin runs: auto (as it declares) | thread | process (of its own)."""
    retry: RetrySettings = RetrySettings()
    """`[backends.NAME.retry]`: attempts, first_delay_s, max_delay_s."""
    breaker: BreakerSettings = BreakerSettings()
    """`[backends.NAME.breaker]`: failures, cooldown_s, probe_s, probe_deadline_s."""
    rate: RateSettings = RateSettings()
    """`[backends.NAME.rate]`: bytes_per_s, ops_per_s."""
    process: ProcessSettings = ProcessSettings()
    """`[backends.NAME.process]`: open_deadline_s, restart_delay_s, restart_delay_max_s,
    memory_bytes, kill_after_s."""
    options: Any = msgspec.field(default_factory=dict)
    """The plugin's `Options` struct, validated (a table in the file)."""


class PoliciesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[policies]`: the choices of the control side, by name."""

    eviction: str = "lru"
    """Which pages leave L1 and L2 first: lru."""
    write: str = "write_through"
    """When pages are backed up: write_through (as soon as they are computed)."""
    prefetch: str = "wait_complete"
    """How long a request waits for L3: wait_complete (until its prefetch has ended)."""
    restore: str = "always"
    """Restore a hit or recompute it: always (restore)."""


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[scheduler]`: the reference scheduler."""

    max_batch: Positive = 8
    """Rows of a batch."""
    chunk_tokens: Positive = 16_384
    """Prefill tokens that a row computes in one batch."""
    lookahead: Count = 16
    """Waiting requests that are looked up (and prefetched) ahead."""
    decode_steps: Positive = 64
    """Tokens that a decoding row makes in one batch."""


class AdminConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[admin]`: how an operator reaches a process that serves (`kvstrata backends status`)."""

    socket: Text = ""
    """Path of the local socket, for its owner only; "" has none. One process, one path."""


@dataclass(frozen=True, slots=True)
class Component:
    """The geometry of one component's pool, derived from the settings."""

    name: str
    kind: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    layout: str
    page_tokens: int
    page_bytes: int
    """Bytes of a page: keys and values of all layers, contiguous on the host."""


@dataclass(frozen=True, slots=True)
class Config:
    """A whole configuration, checked. The fields are the tables of the file; `[namespace]` is
    `identity` because `namespace()` makes the tiers' value of it and the geometry."""

    identity: NamespaceConfig
    pools: PoolsConfig
    device: DeviceConfig = field(default_factory=DeviceConfig)
    staging: StagingConfig = field(default_factory=StagingConfig)
    l3: L3Config = field(default_factory=L3Config)
    backends: Mapping[str, BackendConfig] = field(default_factory=dict, repr=False)
    policies: PoliciesConfig = field(default_factory=PoliciesConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    admin: AdminConfig = field(default_factory=AdminConfig)
    source: ConfigSource = field(default_factory=ConfigSource, repr=False, compare=False)
    """Where each setting came from."""

    @property
    def components(self) -> tuple[Component, ...]:
        """The pools, in the order of the file."""
        tokens = self.pools.page_tokens
        return tuple(
            Component(
                name=c.name,
                kind=c.kind,
                layers=c.layers,
                kv_heads=c.kv_heads,
                head_dim=c.head_dim,
                dtype=c.dtype,
                layout=c.layout,
                page_tokens=tokens,
                page_bytes=c.token_bytes * tokens,
            )
            for c in self.pools.components
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all components together."""
        return sum(c.page_bytes for c in self.components)

    @property
    def req_to_token_bytes(self) -> int:
        """The ReqToToken table: a row a request, a slot number (int32) a token."""
        return self.pools.max_requests * self.pools.max_context_tokens * 4

    @property
    def l1_bytes(self) -> int:
        """Device memory: the pools and the ReqToToken table."""
        return self.pools.pages * self.page_bytes + self.req_to_token_bytes

    @property
    def staging_pages(self) -> int:
        """Pages, all components together, that staging holds; each starts at a 4 KiB border."""
        return self.staging.bytes // self.staging_page_bytes

    @property
    def staging_page_bytes(self) -> int:
        """What one page, all components together, takes in staging."""
        return sum(-(-c.page_bytes // HOST_ALIGN_BYTES) * HOST_ALIGN_BYTES for c in self.components)

    @property
    def l3_backend(self) -> BackendConfig | None:
        """The backend that `[l3]` names; None without L3."""
        return self.backends[self.l3.backend] if self.l3.backend else None

    def where(self, *keys: str | int) -> Where:
        """The place of a setting, for errors that show up later: `where("l3", "backend")`."""
        return self.source.where(tuple(keys))

    def namespace(self) -> Namespace:
        """The complete identity of every page that this configuration reads or writes.

        Reads the model's directory where `revision` is left to it.
        """
        from kvstrata.backends.frame import FORMAT_VERSION
        from kvstrata.tiers.namespace import ComponentIdentity, Namespace, revision_of_path

        parts = tuple(
            ComponentIdentity(
                name=c.name,
                kind=c.kind,
                dtype=c.dtype,
                layout=c.layout,
                layers=c.layers,
                kv_heads=c.kv_heads,
                head_dim=c.head_dim,
                page_bytes=c.page_bytes,
            )
            for c in self.components
        )
        own = self.identity
        return Namespace(
            model=own.model,
            revision=own.revision or revision_of_path(Path(own.model)),
            page_tokens=self.pools.page_tokens,
            components=parts,
            parallel_rank=own.parallel_rank,
            parallel_size=own.parallel_size,
            adapter=own.adapter,
            salt=str(own.salt),
            epoch=own.epoch,
            engine=own.engine,
            format_version=FORMAT_VERSION,
        )


SECTIONS: Mapping[str, type[msgspec.Struct]] = {
    "namespace": NamespaceConfig,
    "device": DeviceConfig,
    "pools": PoolsConfig,
    "staging": StagingConfig,
    "l3": L3Config,
    "policies": PoliciesConfig,
    "scheduler": SchedulerConfig,
    "admin": AdminConfig,
}
"""The tables of fixed shape. `[backends.NAME]` tables are `BackendConfig`."""

__all__ = [
    "ITEM_BYTES",
    "SECTIONS",
    "AdminConfig",
    "BackendConfig",
    "ByteSize",
    "Component",
    "ComponentConfig",
    "Config",
    "ConfigSource",
    "DeviceConfig",
    "Keys",
    "L3Config",
    "NamespaceConfig",
    "PoliciesConfig",
    "PoolsConfig",
    "SchedulerConfig",
    "Secret",
    "StagingConfig",
]
