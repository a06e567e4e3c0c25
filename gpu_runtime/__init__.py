"""The runtime: everything physical, behind `kvstrata.boundary.RuntimeInterface`."""

from kvstrata.gpu_runtime.base import (
    Device,
    Event,
    ForwardContext,
    ForwardResult,
    ForwardRow,
    ModelRunner,
    Stream,
)
from kvstrata.gpu_runtime.core import RuntimeSettings
from kvstrata.gpu_runtime.cpu import CpuDevice
from kvstrata.gpu_runtime.local import LocalGPURuntime
from kvstrata.gpu_runtime.oracle import OracleRunner
from kvstrata.gpu_runtime.pools import ComponentPool, ComponentSpec
from kvstrata.gpu_runtime.req_to_token import ReqToToken
from kvstrata.gpu_runtime.timeline import PathTotals, Timeline

__all__ = [
    "ComponentPool",
    "ComponentSpec",
    "CpuDevice",
    "Device",
    "Event",
    "ForwardContext",
    "ForwardResult",
    "ForwardRow",
    "LocalGPURuntime",
    "ModelRunner",
    "OracleRunner",
    "PathTotals",
    "ReqToToken",
    "RuntimeSettings",
    "Stream",
    "Timeline",
]
