"""From a configuration to a running engine: worker, runtime, cache control and scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from kvstrata.backends import BackendContext, StorageWorker, WorkerSettings, load_plugin
from kvstrata.configs import Config
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
        self.close()


def open_worker(config: Config) -> StorageWorker | None:
    """The worker of the backend that `[l3]` names, not started; None without L3."""
    backend = config.l3_backend
    if backend is None:
        return None
    plugin = load_plugin(backend.plugin)
    context = BackendContext(
        name=config.l3.backend, page_bytes={c.name: c.page_bytes for c in config.components}
    )
    on_full: Any = backend.on_full
    settings = WorkerSettings(on_full=on_full, queue_pages=backend.queue_pages)
    return StorageWorker(config.l3.backend, plugin(backend.options), settings, context)


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

        return CudaDevice
    return CpuDevice


def open_engine(config: Config, runner: ModelRunner, *, max_batch: int | None = None) -> Engine:
    """Build and start everything that `config` names. Raises ConfigError, PluginError or
    StorageError; nothing is left running then."""
    settings, worker = runtime_settings(config), open_worker(config)
    runtime = LocalGPURuntime(settings, runner, worker, make_device=device_of(config))
    backend, policies = config.l3_backend, config.policies
    tree = TreeCore(policy_class("eviction", policies.eviction)(), MAX_TREE_PAGES)
    cache = CacheControl(
        tree,
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
    scheduler = Scheduler(
        runtime,
        cache,
        policy_class("prefetch", policies.prefetch)(),
        policy_class("restore", policies.restore)(),
        SchedulerSettings(
            page_tokens=config.pools.page_tokens,
            max_context_tokens=config.pools.max_context_tokens,
            max_batch=max_batch or config.scheduler.max_batch,
            chunk_tokens=config.scheduler.chunk_tokens,
            lookahead=config.scheduler.lookahead,
            decode_steps=config.scheduler.decode_steps,
        ),
    )
    return Engine(scheduler, runtime, config.namespace().fingerprint())
