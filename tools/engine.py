"""From a configuration to a running engine: worker, runtime, cache control and scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from kvstrata.configs import Config
from kvstrata.errors import ConfigError
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
from kvstrata.tools.admin_server import AdminServer
from kvstrata.tools.workers import located, open_worker

CLOSE_DEADLINE_S = 30.0
ABORT_DEADLINE_S = 3.0
"""After an exception nobody waits for what storage is doing."""
MAX_TREE_PAGES = 8_000_000
"""Pages that the tree remembers (about 60 bytes each)."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A scheduler over a runtime. Close it, or use it as a context manager."""

    scheduler: Scheduler
    runtime: LocalGPURuntime
    namespace: bytes
    """Fingerprint of the configured namespace."""
    admin: AdminServer | None = None
    """Answers operators, where the configuration has `admin.socket`."""

    def close(self, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        end = time.monotonic() + deadline_s
        if self.admin is not None:
            self.admin.close(deadline_s / 4)
        self.runtime.close(max(0.0, end - time.monotonic()))

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(CLOSE_DEADLINE_S if kind is None else ABORT_DEADLINE_S)


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
            huge_pages=config.staging.huge_pages,
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


def open_engine(
    config: Config,
    runner: ModelRunner,
    *,
    max_batch: int | None = None,
    opened: Callable[[], None] = lambda: None,
) -> Engine:
    """Build and start everything that `config` names. Raises ConfigError (with the place of the
    setting), PluginError or StorageError; nothing is left running then.

    `opened` is called when all is there, before an operator can see it. From then on, until the
    engine is in its caller's hands, no signal handler may raise: nobody would close it."""
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
    with ExitStack() as undo:
        admin = _listen(config)
        if admin is not None:
            undo.callback(admin.close, 0.0)
        worker = open_worker(config)
        try:
            runtime = LocalGPURuntime(
                runtime_settings(config), runner, worker, make_device=device_of(config)
            )
        except ConfigError as error:
            raise located(error, config, config.l3.backend) from error
        undo.callback(runtime.close, ABORT_DEADLINE_S)
        scheduler = Scheduler(runtime, cache, prefetch, restore, settings)
        opened()
        if admin is not None:
            admin.start(runtime, config)
        undo.pop_all()
    return Engine(scheduler, runtime, namespace, admin)


def _listen(config: Config) -> AdminServer | None:
    """Before anything else is opened, so that a second process on one configuration ends here."""
    path = config.admin.socket
    return AdminServer(path, config.where("admin", "socket")) if path else None
