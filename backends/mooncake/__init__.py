"""The `mooncake` backend: pages in a Mooncake Store, over TCP or RDMA."""

from kvstrata.backends.mooncake.backend import MooncakeBackend
from kvstrata.backends.mooncake.options import MooncakeOptions
from kvstrata.backends.mooncake.requirements import Requirement, mooncake_requirements

__all__ = ["MooncakeBackend", "MooncakeOptions", "Requirement", "mooncake_requirements"]
