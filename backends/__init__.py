"""Storage: the contract of a backend, the worker that runs one, and the backends by name."""

from kvstrata.backends.base import (
    API_VERSION,
    BackendContext,
    Buffer,
    Health,
    HealthState,
    HostRegion,
    NoOptions,
    ObjectId,
    PageResult,
    ReadRequest,
    StorageBackend,
    StoredObject,
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
    "BackendContext",
    "Buffer",
    "Health",
    "HealthState",
    "HostRegion",
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
    "Usage",
    "WorkerSettings",
    "WorkerStats",
    "WriteRequest",
    "build_options",
    "list_plugins",
    "load_plugin",
]
