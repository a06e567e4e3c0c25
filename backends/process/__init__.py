"""Backends in a process of their own: what they do to it costs misses only."""

from kvstrata.backends.policies import ProcessSettings
from kvstrata.backends.process.backend import ProcessBackend

__all__ = ["ProcessBackend", "ProcessSettings"]
