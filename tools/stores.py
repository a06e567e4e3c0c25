"""A backend of a configuration, opened for a tool: without a worker, beside whoever serves from it.

Tools talk to the plugin itself, because a worker makes headers and tools move frames as they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches

import msgspec

from kvstrata.backends import BackendContext, ObjectId, StorageBackend, load_plugin
from kvstrata.backends.filesystem import FilesystemBackend, FilesystemOptions
from kvstrata.backends.process import ProcessBackend
from kvstrata.configs import BackendConfig, Config
from kvstrata.errors import ConfigError, InputError, KvstrataError, PluginError, StorageBusyError
from kvstrata.tiers import component_fingerprint

CLOSE_DEADLINE_S = 10.0
COUNT_DEADLINE_S = 600.0


def backend_config(config: Config, name: str, option: str) -> BackendConfig:
    """`[backends.NAME]`. Raises InputError when there is none; `option` is where NAME was given."""
    found = config.backends.get(name)
    if found is None:
        known = ", ".join(sorted(config.backends)) or "none"
        close = get_close_matches(name, config.backends, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(
            f"{option} {name}: there is no [backends.{name}]",
            remedy=f"{hint}the backends of this configuration: {known}",
            where=config.where("backends"),
        )
    return found


def make_backend(
    config: Config, name: str, options: msgspec.Struct, *, in_process: bool = False
) -> StorageBackend:
    """An instance that is not open, here or `in_process`: in one of its own. Raises PluginError."""
    backend = config.backends[name]
    plugin = load_plugin(backend.plugin)
    try:
        if in_process:
            return ProcessBackend(plugin, options, backend.process)
        return plugin(options)
    except KvstrataError:
        raise
    except Exception as error:
        raise PluginError(
            f"backend {name!r} (plugin {backend.plugin!r}) cannot be made: "
            f"{type(error).__name__}: {error}",
            remedy="check its options; if they are right, the plugin needs a fix",
            where=config.where("backends", name),
        ) from error


@contextmanager
def open_store(
    config: Config,
    name: str,
    *,
    writes: bool,
    on_evicted: Callable[[Sequence[ObjectId]], None] | None = None,
) -> Iterator[StorageBackend]:
    """The backend `name`, closed in the end. One that is only read evicts nothing, even where it
    is over its bounds, and must be there already. Raises ConfigError, InputError, StorageError."""
    options = config.backends[name].options
    if not writes:
        options = _without_bounds(config, name, options)
    backend = make_backend(config, name, options)
    pages = {c.name: c.page_bytes for c in config.components}
    try:
        backend.open(BackendContext(name, pages, on_evicted))
    except ConfigError as error:
        where = config.where("backends", name, "options", error.where.key or "")
        raise ConfigError(error.message, remedy=error.remedy, where=where) from error
    try:
        if writes:
            wait_until_counted(backend)
        yield backend
    finally:
        backend.close(CLOSE_DEADLINE_S)


def wait_until_counted(backend: StorageBackend) -> None:
    """Until `usage` is exact: before that a store with a bound takes nothing. Raises
    StorageBusyError."""
    if isinstance(backend, FilesystemBackend) and not backend.wait_for_scan(COUNT_DEADLINE_S):
        raise StorageBusyError(
            f"{backend.files.root}: its index is not rebuilt within {COUNT_DEADLINE_S:.0f} s"
        )


def _without_bounds(config: Config, name: str, options: msgspec.Struct) -> msgspec.Struct:
    if not isinstance(options, FilesystemOptions):
        return options
    if not os.path.isdir(options.path):
        raise InputError(
            f"backend {name}: there is nothing at {options.path}",
            remedy="check the path; a relative one counts from the working directory",
            where=config.where("backends", name, "options", "path"),
        )
    return msgspec.structs.replace(options, max_bytes=0, min_free_bytes=0)


def root_of(config: Config, name: str) -> str | None:
    """The folder that a file-system backend keeps its frames in."""
    options = config.backends[name].options
    return options.path if isinstance(options, FilesystemOptions) else None


def store_identity(config: Config, name: str) -> str:
    """What makes it this store and no other; bounds and policies do not. May hold secrets."""
    root = root_of(config, name)
    backend = config.backends[name]
    return os.path.realpath(root) if root else repr((backend.plugin, backend.options))


def is_same_store(config: Config, one: str, other: str) -> bool:
    """The two names stand for one store, as far as their options tell."""
    roots = [root_of(config, name) for name in (one, other)]
    if all(root is not None and os.path.isdir(root) for root in roots):
        return os.path.samefile(*(root or "" for root in roots))
    return store_identity(config, one) == store_identity(config, other)


def namespace_names(config: Config) -> dict[bytes, str]:
    """What the configuration calls its own namespaces, by fingerprint."""
    whole = config.namespace().fingerprint()
    names = {component_fingerprint(whole, c.name): c.name for c in config.components}
    model = config.identity.model
    return {fingerprint: f"{name} of {model}" for fingerprint, name in names.items()}
