"""Configuration: TOML files to checked values. `load_config` is the one way in.

The folder also holds the configurations that the project ships (`*.toml`).
"""

from kvstrata.configs.load import load_config
from kvstrata.configs.schema import (
    AdminConfig,
    BackendConfig,
    ByteSize,
    Component,
    ComponentConfig,
    Config,
    DeviceConfig,
    L3Config,
    NamespaceConfig,
    PoliciesConfig,
    PoolsConfig,
    SchedulerConfig,
    Secret,
    StagingConfig,
)
from kvstrata.configs.source import ConfigSource

__all__ = [
    "AdminConfig",
    "BackendConfig",
    "ByteSize",
    "Component",
    "ComponentConfig",
    "Config",
    "ConfigSource",
    "DeviceConfig",
    "L3Config",
    "NamespaceConfig",
    "PoliciesConfig",
    "PoolsConfig",
    "SchedulerConfig",
    "Secret",
    "StagingConfig",
    "load_config",
]
