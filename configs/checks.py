"""What no single field decides: choices by name, and settings that cannot work together.

All of it runs before anything is allocated, and reports the first thing that is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvstrata.configs.convert import nearest
from kvstrata.configs.schema import ITEM_BYTES, AdminConfig, ByteSize, Config
from kvstrata.configs.source import ConfigSource, Keys
from kvstrata.errors import ConfigError
from kvstrata.handles import StagingMode
from kvstrata.memory_limits import available_memory_bytes
from kvstrata.tiers import policies
from kvstrata.units import format_size

MIN_STAGING_PAGES = 4
"""Loads and stores each need a page under way and one behind it."""

MAX_SOCKET_BYTES = 107
"""What the system takes as the path of a local socket."""

_LATER = "not available in this version"


@dataclass(frozen=True, slots=True)
class Choice:
    """The names that a setting takes, and those that it does not take yet."""

    known: tuple[str, ...]
    later: Mapping[str, str] = field(default_factory=dict)
    """Name → what is missing."""


CHOICES: Mapping[Keys, Choice] = {
    ("device", "kind"): Choice(("auto", "cpu", "cuda")),
    ("staging", "mode"): Choice(tuple(mode.value for mode in StagingMode)),
    ("policies", "eviction"): Choice(tuple(policies.EVICTION)),
    ("policies", "write"): Choice(
        tuple(policies.WRITE), {"write_back": f"the write_back policy is {_LATER}"}
    ),
    ("policies", "prefetch"): Choice(
        tuple(policies.PREFETCH),
        {n: f"the {n} policy is {_LATER}" for n in ("best_effort", "timeout")},
    ),
    ("policies", "restore"): Choice(
        tuple(policies.RESTORE), {"measured": f"restore by measurement is {_LATER}"}
    ),
}
"""Settings that are one of several names."""

COMPONENT_CHOICES: Mapping[str, Choice] = {
    "kind": Choice(
        ("full", "mla"),
        {
            "swa": f"sliding-window attention pools are {_LATER}",
            "mamba": f"state pools (Mamba) are {_LATER}",
            "indexer": f"sidecar pools (sparse-attention indexer) are {_LATER}",
        },
    ),
    "dtype": Choice(tuple(ITEM_BYTES)),
    "layout": Choice(("NHD", "HND")),
}
BACKEND_CHOICES: Mapping[str, Choice] = {
    "on_full": Choice(("block", "drop")),
    "isolation": Choice(("auto", "thread", "process")),
}


def check(config: Config) -> None:
    """Raise ConfigError for the first setting that cannot work."""
    _check_names(config)
    _check_identity(config)
    _check_geometry(config)
    _check_staging(config)
    _check_l3(config)
    check_admin(config.admin, config.source)
    _check_memory(config)


def _settings(config: Config) -> Iterator[tuple[Keys, str, Choice]]:
    for keys, choice in CHOICES.items():
        section, name = str(keys[0]), str(keys[1])
        yield keys, getattr(getattr(config, section), name), choice
    for i, component in enumerate(config.pools.components):
        for name, choice in COMPONENT_CHOICES.items():
            yield ("pools", "components", i, name), getattr(component, name), choice
    for backend, settings in config.backends.items():
        for name, choice in BACKEND_CHOICES.items():
            yield ("backends", backend, name), getattr(settings, name), choice


def _check_names(config: Config) -> None:
    if config.policies.write == "write_back" and config.staging.mode == "buffer_only":
        raise ConfigError(
            "write_back cannot work with staging mode buffer_only: a page that leaves L1 would "
            "have no copy, since staging keeps none and it was not stored yet",
            remedy='use write = "write_through", or mode = "cache"',
            where=config.where("policies", "write"),
        )
    for keys, value, choice in _settings(config):
        if value in choice.known:
            continue
        missing = choice.later.get(value)
        raise ConfigError(
            missing or f'there is no {keys[-1]} "{value}"',
            remedy=f"use {' or '.join(choice.known)}" if missing else nearest(value, choice.known),
            where=config.where(*keys),
        )


def _check_identity(config: Config) -> None:
    own = config.identity
    if not own.revision and not Path(own.model).is_dir():
        raise ConfigError(
            "the revision of the model is missing: pages of other weights would pass for its own",
            remedy='add revision = "…" (a commit, tag or version), or name a model directory',
            where=config.where("namespace"),
        )
    if own.parallel_rank >= own.parallel_size:
        raise ConfigError(
            f"rank {own.parallel_rank} of {own.parallel_size} ranks",
            remedy="ranks count from 0 to parallel_size - 1",
            where=config.where("namespace", "parallel_rank"),
        )


def _check_geometry(config: Config) -> None:
    pools = config.pools
    names = [c.name for c in pools.components]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ConfigError(
                f'two components are called "{name}"',
                remedy="give each component a name of its own",
                where=config.where("pools", "components", i, "name"),
            )
    if pools.max_context_tokens < pools.page_tokens:
        raise ConfigError(
            f"{pools.max_context_tokens} tokens are less than one page of {pools.page_tokens}",
            remedy="raise max_context_tokens or lower page_tokens",
            where=config.where("pools", "max_context_tokens"),
        )
    slots = pools.pages * pools.page_tokens
    if slots >= 2**31:
        raise ConfigError(
            f"{pools.pages} pages of {pools.page_tokens} tokens are {slots} token slots; "
            f"slot numbers are int32, so fewer than {2**31} fit",
            remedy=f"use at most {(2**31 - 1) // pools.page_tokens} pages",
            where=config.where("pools", "pages"),
        )


def _check_staging(config: Config) -> None:
    if config.staging_pages < MIN_STAGING_PAGES:
        need = ByteSize(MIN_STAGING_PAGES * config.staging_page_bytes)
        raise ConfigError(
            f"{format_size(config.staging.bytes)} hold {config.staging_pages} pages of "
            f"{format_size(config.page_bytes)}; at least {MIN_STAGING_PAGES} are needed",
            remedy=f'use bytes = "{need.text}" or more, or smaller pages',
            where=config.where("staging", "bytes"),
        )


def _check_l3(config: Config) -> None:
    name = config.l3.backend
    if name and name not in config.backends:
        raise ConfigError(
            f"there is no [backends.{name}]",
            remedy=nearest(name, config.backends) if config.backends else "add that table",
            where=config.where("l3", "backend"),
        )
    if not name and config.staging.mode == "buffer_only":
        raise ConfigError(
            "staging mode buffer_only has nothing to do without L3",
            remedy='name a backend in [l3], or use mode = "cache"',
            where=config.where("staging", "mode"),
        )


def check_admin(admin: AdminConfig, source: ConfigSource) -> None:
    """Raise ConfigError for a socket that cannot be made."""
    nbytes = len(os.fsencode(admin.socket))
    if nbytes > MAX_SOCKET_BYTES:
        raise ConfigError(
            f"{nbytes} bytes are too long for a local socket, which takes {MAX_SOCKET_BYTES}",
            remedy="give a shorter path; one may be relative to the working directory",
            where=source.where(("admin", "socket")),
        )
    if "\0" in admin.socket:
        raise ConfigError(
            "a path has no null byte",
            remedy="give the path of a file",
            where=source.where(("admin", "socket")),
        )


def _check_memory(config: Config) -> None:
    """L1 lies in host memory on the CPU device, beside staging. What a GPU has is known when the
    pools are made."""
    available = available_memory_bytes()
    kind = config.device.kind
    on_gpu = kind == "cuda" or (kind == "auto" and Path("/dev/nvidiactl").exists())
    l1_bytes = 0 if on_gpu else config.l1_bytes
    need = l1_bytes + config.staging.bytes
    if available is None or need <= available:
        return
    larger = ("staging", "bytes") if config.staging.bytes > l1_bytes else ("pools", "pages")
    raise ConfigError(
        f"L1 ({format_size(l1_bytes)}) and staging "
        f"({format_size(config.staging.bytes)}) need {format_size(need)} of memory; "
        f"{format_size(available)} are available",
        remedy="lower pools.pages or staging.bytes",
        where=config.where(*larger),
    )
