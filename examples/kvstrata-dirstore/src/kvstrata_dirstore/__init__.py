"""A backend for kvstrata: one file a frame in one folder, read and written with aiofiles."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import aiofiles
import aiofiles.os
import msgspec

from kvstrata.backends import (
    BackendContext,
    ObjectId,
    PageResult,
    ReadRequest,
    StoredObject,
    Usage,
    WriteRequest,
)
from kvstrata.backends.asyncio_backend import AsyncStorageBackend
from kvstrata.boundary import Outcome

__all__ = ["DirStore", "DirStoreOptions"]


class DirStoreOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The options in the config file."""

    path: str
    """The folder, made if it is absent."""


class DirStore(AsyncStorageBackend):
    """`<path>/<namespace>.<key>`; a frame gets its name when it is complete."""

    Options = DirStoreOptions

    async def open_async(self, context: BackendContext) -> None:
        self.folder = Path(self.options.path).absolute()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.numbers = itertools.count()

    def file(self, name: ObjectId) -> Path:
        return self.folder / f"{name.namespace.hex()}.{name.key.hex()}"

    async def exists_page(self, name: ObjectId) -> bool:
        return await aiofiles.os.path.exists(self.file(name))

    async def read_page(self, request: ReadRequest) -> PageResult:
        try:
            async with aiofiles.open(self.file(request.object), "rb") as file:
                return PageResult(
                    Outcome.LOADED, sum([await file.readinto(b) for b in request.buffers])
                )
        except FileNotFoundError:
            return PageResult(Outcome.MISSING)

    async def write_page(self, request: WriteRequest) -> PageResult:
        scratch = self.folder / f"{os.getpid()}-{id(self)}-{next(self.numbers)}.tmp"
        try:
            async with aiofiles.open(scratch, "wb") as file:
                await file.writelines(request.buffers)
            await aiofiles.os.link(scratch, self.file(request.object))  # never overwrites
        except FileExistsError:
            return PageResult(Outcome.EXISTS)
        finally:
            with contextlib.suppress(FileNotFoundError):
                await aiofiles.os.unlink(scratch)
        return PageResult(Outcome.STORED, request.nbytes)

    async def delete_page(self, name: ObjectId) -> bool:
        with contextlib.suppress(FileNotFoundError):
            await aiofiles.os.unlink(self.file(name))
            return True
        return False

    def scan(self, namespace: bytes | None = None) -> Iterator[StoredObject]:
        for path in self.folder.glob(f"{namespace.hex() if namespace else '*'}.*[0-9a-f]"):
            space, _, key = path.name.partition(".")
            name = ObjectId(bytes.fromhex(space), bytes.fromhex(key))
            with contextlib.suppress(FileNotFoundError):
                found = path.stat()
                yield StoredObject(name, found.st_blocks * 512, found.st_mtime)

    def usage(self) -> Usage:
        found = [stored.nbytes for stored in self.scan()]
        return Usage(used_bytes=sum(found), limit_bytes=None, objects=len(found))
