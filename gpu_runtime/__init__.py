"""The runtime: everything physical, behind `kvstrata.boundary.RuntimeInterface`."""

from kvstrata.gpu_runtime.abilities import SupportsBind, SupportsNewWeights
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
from kvstrata.gpu_runtime.device_pages import DevicePages, PageLayout, adopt
from kvstrata.gpu_runtime.hf_models import component_spec_of
from kvstrata.gpu_runtime.local import LocalGPURuntime
from kvstrata.gpu_runtime.oracle import OracleRunner
from kvstrata.gpu_runtime.pools import ComponentPool, ComponentSpec
from kvstrata.gpu_runtime.req_to_token import ReqToToken
from kvstrata.gpu_runtime.sampling import SamplingParams
from kvstrata.gpu_runtime.timeline import PathTotals, Timeline
from kvstrata.gpu_runtime.transfer_interface import AdoptedPools, Transfer, TransferInterface
from kvstrata.gpu_runtime.transformers_runner import TransformersRunner

__all__ = [
    "AdoptedPools",
    "ComponentPool",
    "ComponentSpec",
    "CpuDevice",
    "Device",
    "DevicePages",
    "Event",
    "ForwardContext",
    "ForwardResult",
    "ForwardRow",
    "LocalGPURuntime",
    "ModelRunner",
    "OracleRunner",
    "PageLayout",
    "PathTotals",
    "ReqToToken",
    "RuntimeSettings",
    "SamplingParams",
    "Stream",
    "SupportsBind",
    "SupportsNewWeights",
    "Timeline",
    "Transfer",
    "TransferInterface",
    "TransformersRunner",
    "adopt",
    "component_spec_of",
]
