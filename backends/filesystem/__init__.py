"""The `filesystem` backend."""

from kvstrata.backends.filesystem.backend import FilesystemBackend
from kvstrata.backends.filesystem.options import FilesystemOptions

__all__ = ["FilesystemBackend", "FilesystemOptions"]
