"""Values of host staging: what a pool is made of and what a user of it asks for."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvstrata.staging.pages import Pages


class SlotKind(enum.Enum):
    LOAD = "load"
    WRITE = "write"


Slots = Mapping[str, Pages]
"""Host pages by component, the same number in each."""


@dataclass(frozen=True, slots=True)
class StagingSettings:
    """`load_reserve`: share of the pages that writes never take. `backend_cap`: the most that one
    backend may hold, lent and quarantined together."""

    total_bytes: int
    load_reserve: float = 0.25
    backend_cap: float = 0.75


@dataclass(eq=False, slots=True)
class SlotRequest:
    """A place in the queue for host pages, or for the right to lend pages to a backend.

    `grant(slots)` is called once, under the runtime's lock, when `count` pages of every component
    are there (all or none); with `pages_needed` False only the backend's share is taken and
    `slots` is empty. `refuse(cause)` is called instead when the request cannot be met: "capacity"
    (never), "timeout" (not before `end_s` on the runtime's clock), "cancelled" or "closed".
    """

    kind: SlotKind
    count: int
    grant: Callable[[Slots], None]
    refuse: Callable[[str], None]
    backend: str | None = None
    pages_needed: bool = True
    end_s: float = math.inf
