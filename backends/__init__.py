"""Storage: the contract of a backend, the worker that runs one, and the backends by name."""

from kvstrata.backends.base import (
    API_VERSION,
    SUPPORTED_VERSIONS,
    BackendContext,
    Buffer,
    Health,
    HealthState,
    HostRegion,
    Isolation,
    NoOptions,
    ObjectId,
    PageResult,
    ReadRequest,
    StorageBackend,
    StoredObject,
    SupportsKill,
    Usage,
    WriteRequest,
)
from kvstrata.backends.frame import FORMAT_VERSION
from kvstrata.backends.jobs import JobResult, PageIO, WorkerSettings, WorkerStats
from kvstrata.backends.registry import PluginInfo, build_options, list_plugins, load_plugin
from kvstrata.backends.worker import StorageWorker

__all__ = [
    "API_VERSION",
    "FORMAT_VERSION",
    "SUPPORTED_VERSIONS",
    "BackendContext",
    "Buffer",
    "Health",
    "HealthState",
    "HostRegion",
    "Isolation",
    "JobResult",
    "NoOptions",
    "ObjectId",
    "PageIO",
    "PageResult",
    "PluginInfo",
    "ReadRequest",
    "StorageBackend",
    "StorageWorker",
    "StoredObject",
    "SupportsKill",
    "Usage",
    "WorkerSettings",
    "WorkerStats",
    "WriteRequest",
    "build_options",
    "list_plugins",
    "load_plugin",
]
