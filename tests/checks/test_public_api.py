"""The public names: adding or removing one is a decision, made here as well."""

from __future__ import annotations

import importlib

import pytest

PUBLIC: dict[str, str] = {
    "kvstrata": "__version__",
    "kvstrata.configs": """
        AdminConfig BackendConfig ByteSize Component ComponentConfig Config ConfigSource
        DeviceConfig L3Config NamespaceConfig PoliciesConfig PoolsConfig SchedulerConfig Secret
        StagingConfig load_config
    """,
    "kvstrata.tiers": """
        CacheControl ComponentIdentity Deadlines EvictionPolicy KeyChain L3State Match
        Namespace Node PrefetchPolicy RequestResult RequestState RestorePolicy Scheduler
        SchedulerSettings TreeCore WritePolicy component_fingerprint page_keys partial_key
        policy_class root_key
    """,
    "kvstrata.staging": """
        ALIGNMENT PageState PageTable Pages PinnedHostBufferPool SharedRegion SlotKind
        SlotRequest Slots StagingSettings aligned stamps
    """,
    "kvstrata.backends": """
        API_VERSION BackendContext Buffer FORMAT_VERSION Health HealthState HostRegion Isolation
        JobResult NoOptions ObjectId PageIO PageResult PluginInfo ReadRequest SUPPORTED_VERSIONS
        StorageBackend StorageWorker StoredObject SupportsKill Usage WorkerSettings WorkerStats
        WriteRequest build_options list_plugins load_plugin
    """,
    "kvstrata.gpu_runtime": """
        AdoptedPools ComponentPool ComponentSpec CpuDevice Device DevicePages Event ForwardContext
        ForwardResult ForwardRow LocalGPURuntime ModelRunner OracleRunner PageLayout PathTotals
        ReqToToken RuntimeSettings SamplingParams Stream SupportsBind SupportsNewWeights Timeline
        Transfer TransferInterface TransformersRunner adopt component_spec_of
    """,
    "kvstrata.tools": "",
}
"""Package → its `__all__`, sorted. Print one with
`python -c "import kvstrata.configs as m; print(*sorted(m.__all__))"`."""


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_as_pinned(name: str) -> None:
    module = importlib.import_module(name)
    assert sorted(module.__all__) == sorted(PUBLIC[name].split())


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_exist_and_are_listed_once(name: str) -> None:
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    missing = [n for n in module.__all__ if not hasattr(module, n)]
    assert not missing


def test_every_package_is_pinned(packages: tuple[str, ...]) -> None:
    assert set(PUBLIC) == {"kvstrata", *(f"kvstrata.{name}" for name in packages)}
