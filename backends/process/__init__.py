"""Backends in a process of their own: what they do to it costs misses only."""

from kvstrata.backends.process.backend import ProcessBackend
from kvstrata.backends.process.supervisor import ProcessSettings

__all__ = ["ProcessBackend", "ProcessSettings"]
