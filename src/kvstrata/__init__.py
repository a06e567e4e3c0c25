"""kvstrata: tiered KV-cache storage for LLM servers.

Control (`kvstrata.tiers`) decides, the runtime (`kvstrata.gpu_runtime`) executes, host memory is
lent by `kvstrata.staging`, and storage lives behind workers in `kvstrata.backends`.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvstrata")
except PackageNotFoundError:  # run from a checkout with PYTHONPATH=src
    __version__ = "0+unknown"

__all__ = ["__version__"]
