"""From a backend's table in a configuration to the storage worker that owns an instance of it."""

from __future__ import annotations

from typing import Any

from kvstrata.backends import (
    BackendContext,
    Isolation,
    StorageWorker,
    WorkerSettings,
    load_plugin,
)
from kvstrata.configs import Config
from kvstrata.configs.schema import SECTIONS
from kvstrata.errors import ConfigError
from kvstrata.tools.stores import make_backend

START_MARGIN_S = 5.0
"""A process that cannot be opened in time is ended first, and says why."""


def open_worker(config: Config, name: str | None = None) -> StorageWorker | None:
    """The worker of the backend `name`, by default the one of `[l3]`, not started; None without L3.

    Raises PluginError when the plugin does not take its options."""
    name = config.l3.backend if name is None else name
    if not name:
        return None
    backend = config.backends[name]
    plugin = load_plugin(backend.plugin)
    isolation = plugin.isolation if backend.isolation == "auto" else Isolation(backend.isolation)
    instance = make_backend(
        config, name, backend.options, in_process=isolation is Isolation.PROCESS
    )
    on_full: Any = backend.on_full
    settings = WorkerSettings(
        on_full=on_full,
        queue_pages=backend.queue_pages,
        queue_s=backend.queue_s,
        retry=backend.retry,
        breaker=backend.breaker,
        rate=backend.rate,
        open_deadline_s=backend.process.open_deadline_s + START_MARGIN_S,
        kill_after_s=backend.process.kill_after_s,
    )
    context = BackendContext(
        name=name, page_bytes={c.name: c.page_bytes for c in config.components}
    )
    return StorageWorker(name, instance, settings, context)


def located(error: ConfigError, config: Config, name: str) -> ConfigError:
    """`error`, whose `where` has only a key, with the line of the setting that it is about.

    A backend knows its own options and not the file that they came from; it is `name` here.
    """
    place = error.where
    if place.file is not None or not place.key:
        return error
    keys = tuple(place.key.split("."))
    if keys[0] not in SECTIONS:
        keys = ("backends", name, "options", *keys)
    return ConfigError(error.message, remedy=error.remedy, where=config.where(*keys))
