"""From a configuration to a running engine: worker, runtime, cache control and scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from kvstrata.backends import (
    BackendContext,
    Isolation,
    StorageWorker,
    WorkerSettings,
    load_plugin,
)
from kvstrata.backends.process import ProcessBackend
from kvstrata.configs import Config
from kvstrata.configs.schema import SECTIONS
from kvstrata.errors import ConfigError, KvstrataError, PluginError
from kvstrata.gpu_runtime import (
    ComponentSpec,
    CpuDevice,
    Device,
    LocalGPURuntime,
    ModelRunner,
    RuntimeSettings,
    Timeline,
)
from kvstrata.handles import StagingMode
from kvstrata.staging import StagingSettings
from kvstrata.tiers import (
    CacheControl,
    Deadlines,
    Scheduler,
    SchedulerSettings,
    TreeCore,
    policy_class,
)

CLOSE_DEADLINE_S = 30.0
ABORT_DEADLINE_S = 3.0
"""After an exception nobody waits for what storage is doing."""
START_MARGIN_S = 5.0
"""A process that cannot be opened in time is ended first, and says why."""
MAX_TREE_PAGES = 8_000_000
"""Pages that the tree remembers (about 60 bytes each)."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A scheduler over a runtime. Close it, or use it as a context manager."""

    scheduler: Scheduler
    runtime: LocalGPURuntime
    namespace: bytes
    """Fingerprint of the configured namespace."""

    def close(self, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        self.runtime.close(deadline_s)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(CLOSE_DEADLINE_S if kind is None else ABORT_DEADLINE_S)


def open_worker(config: Config, name: str | None = None) -> StorageWorker | None:
    """The worker of the backend `name`, by default the one of `[l3]`, not started; None without L3.

    Raises PluginError when the plugin does not take its options."""
    name = config.l3.backend if name is None else name
    if not name:
        return None
    backend = config.backends[name]
    plugin = load_plugin(backend.plugin)
    context = BackendContext(
        name=name, page_bytes={c.name: c.page_bytes for c in config.components}
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
    isolation = plugin.isolation if backend.isolation == "auto" else Isolation(backend.isolation)
    try:
        instance = (
            ProcessBackend(plugin, backend.options, backend.process)
            if isolation is Isolation.PROCESS
            else plugin(backend.options)
        )
    except KvstrataError:
        raise
    except Exception as error:
        raise PluginError(
            f"backend {backend.plugin!r} cannot be made: {type(error).__name__}: {error}",
            remedy="check its options; if they are right, the plugin needs a fix",
            where=config.where("backends", name),
        ) from error
    return StorageWorker(name, instance, settings, context)


def runtime_settings(config: Config) -> RuntimeSettings:
    return RuntimeSettings(
        components=tuple(
            ComponentSpec(c.name, c.layers, c.kv_heads, c.head_dim, c.dtype, c.layout, c.kind)
            for c in config.components
        ),
        pages=config.pools.pages,
        page_tokens=config.pools.page_tokens,
        max_requests=config.pools.max_requests,
        max_context_tokens=config.pools.max_context_tokens,
        staging=StagingSettings(
            total_bytes=config.staging.bytes,
            load_reserve=config.staging.load_reserve,
            backend_cap=config.staging.backend_cap,
        ),
        mode=StagingMode(config.staging.mode),
    )


def device_of(config: Config) -> Callable[[Timeline], Device]:
    """What makes the device that `device.kind` names; "auto" is a GPU where there is one."""
    import torch

    kind = config.device.kind
    if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()):
        from kvstrata.gpu_runtime.cuda import CudaDevice

        return partial(CudaDevice, chunk_bytes=config.device.chunk_bytes)
    return CpuDevice


def open_engine(config: Config, runner: ModelRunner, *, max_batch: int | None = None) -> Engine:
    """Build and start everything that `config` names. Raises ConfigError (with the place of the
    setting), PluginError or StorageError; nothing is left running then."""
    namespace = config.namespace().fingerprint()
    backend, policies = config.l3_backend, config.policies
    cache = CacheControl(
        TreeCore(policy_class("eviction", policies.eviction)(), MAX_TREE_PAGES),
        policy_class("write", policies.write)(),
        StagingMode(config.staging.mode),
        has_l3=backend is not None,
        deadlines=Deadlines(
            store_s=backend.deadline_s,
            load_s=backend.load_deadline_s,
            lookup_s=backend.lookup_deadline_s,
        )
        if backend
        else None,
    )
    prefetch = policy_class("prefetch", policies.prefetch)()
    restore = policy_class("restore", policies.restore)()
    settings = SchedulerSettings(
        page_tokens=config.pools.page_tokens,
        max_context_tokens=config.pools.max_context_tokens,
        max_requests=config.pools.max_requests,
        max_batch=max_batch or config.scheduler.max_batch,
        chunk_tokens=config.scheduler.chunk_tokens,
        lookahead=config.scheduler.lookahead,
        decode_steps=config.scheduler.decode_steps,
    )
    worker = open_worker(config)
    try:
        runtime = LocalGPURuntime(
            runtime_settings(config), runner, worker, make_device=device_of(config)
        )
    except ConfigError as error:
        raise _located(error, config) from error
    try:
        scheduler = Scheduler(runtime, cache, prefetch, restore, settings)
        return Engine(scheduler, runtime, namespace)
    except BaseException:
        runtime.close(ABORT_DEADLINE_S)
        raise


def _located(error: ConfigError, config: Config) -> ConfigError:
    """`error`, whose `where` has only a key, with the line of the setting that it is about.

    A backend knows its own options and not the file that they came from.
    """
    place = error.where
    if place.file is not None or not place.key:
        return error
    keys = tuple(place.key.split("."))
    if keys[0] not in SECTIONS:
        keys = ("backends", config.l3.backend, "options", *keys)
    return ConfigError(error.message, remedy=error.remedy, where=config.where(*keys))
