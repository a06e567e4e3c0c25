"""The options of a `filesystem` backend."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvstrata.units import parse_size

Durability = Literal["none", "data", "full"]


class FilesystemOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`[backends.NAME.options]` of a `filesystem` backend."""

    path: str
    """The root folder, made if it is absent. Relative to the working directory. Several processes
    may share one root."""
    max_bytes: int | str = 0
    """Bound of all frames together, in blocks of the file system, work in flight included; a
    number or text like "10GiB". 0: none."""
    min_free_bytes: int | str = "1GiB"
    """What stays free on the file system; frames are evicted for it. 0: no such bound."""
    durability: Durability = "none"
    """What a frame survives: "none" the end of the process, "data" also a power loss (its bytes
    are on the device before it has a name), "full" that its name is there as well then."""
    threads: int = 2
    """Calls at once."""
    batch_pages: int = 64
    """Most pages in one call."""

    def __post_init__(self) -> None:
        if not self.path or "\0" in self.path:
            raise ValueError("path is empty or has a zero byte: give a folder")
        parse_size(self.max_bytes)
        parse_size(self.min_free_bytes)
        for name in ("threads", "batch_pages"):
            if not 1 <= getattr(self, name) <= 1024:
                raise ValueError(f"{name} is {getattr(self, name)}: give 1 … 1024")
