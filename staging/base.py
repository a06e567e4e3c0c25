"""Values of host staging: what a pool is made of and what a user of it asks for."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvstrata.errors import ConfigError, Where
from kvstrata.memory_limits import available_memory_bytes
from kvstrata.staging.pages import Pages

MIN_PAGES = 4
"""Fewer cannot hold a load and a write at the same time with a reserve between them."""


class SlotKind(enum.Enum):
    LOAD = "load"
    WRITE = "write"


Slots = Mapping[str, Pages]
"""Host pages by component, the same number in each."""


@dataclass(frozen=True, slots=True)
class StagingSettings:
    """`load_reserve`: share of the pages that writes never take. `backend_cap`: the most that one
    backend may hold, lent and quarantined together. `huge_pages`: see `SharedRegion`."""

    total_bytes: int
    load_reserve: float = 0.25
    backend_cap: float = 0.75
    huge_pages: bool = False

    def page_count(self, stride: int) -> int:
        """How many pages of `stride` bytes fit. Raises ConfigError for what cannot work."""
        shares = (
            ("load_reserve", self.load_reserve, 0 <= self.load_reserve < 1),
            ("backend_cap", self.backend_cap, 0 < self.backend_cap <= 1),
        )
        for key, share, is_good in shares:
            if not is_good:
                raise ConfigError(
                    f"{share} is not a share of the staging pages",
                    where=Where(key=f"staging.{key}"),
                    remedy="use a number between 0 and 1",
                )
        pages = self.total_bytes // stride
        if pages < MIN_PAGES:
            raise ConfigError(
                f"staging of {self.total_bytes} bytes holds {pages} pages",
                where=Where(key="staging.bytes"),
                remedy=f"give it at least {MIN_PAGES * stride} bytes ({MIN_PAGES} pages)",
            )
        available = None if self.huge_pages else available_memory_bytes()
        if available is not None and self.total_bytes > available:
            raise ConfigError(
                f"staging of {self.total_bytes} bytes; {available} bytes of memory are available",
                where=Where(key="staging.bytes"),
                remedy="make staging.bytes smaller",
            )
        return pages


@dataclass(eq=False, slots=True)
class SlotRequest:
    """A place in the queue for host pages, or for the right to lend pages to a backend.

    `grant(slots)` is called once, under the runtime's lock, when `count` pages of every component
    are there (all or none); with `pages_needed` False only the backend's share is taken and
    `slots` is empty. `refuse(cause)` is called instead when the request cannot be met: "capacity"
    (never), "timeout" (not before `end_s` on the runtime's clock), "unavailable" (the backend hangs
    with its whole share), "cancelled" or "closed".
    """

    kind: SlotKind
    count: int
    grant: Callable[[Slots], None]
    refuse: Callable[[str], None]
    backend: str | None = None
    pages_needed: bool = True
    end_s: float = math.inf

    @property
    def is_store(self) -> bool:
        """A write whose pages come back by themselves, when the backend has read them."""
        return self.kind is SlotKind.WRITE and self.backend is not None
