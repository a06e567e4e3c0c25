"""What control remembers of the moves that it has asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstrata.handles import Tier
from kvstrata.tiers.node import Node


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds that storage may take for one action."""

    store_s: float = 60.0
    load_s: float = 30.0
    lookup_s: float = 5.0


@dataclass(frozen=True, slots=True)
class PendingBackup:
    end: Node
    count: int
    target: Tier


@dataclass(frozen=True, slots=True)
class PendingLoad:
    """A prefetch or restore; its pages are locked until it has ended."""

    end: Node
    count: int
    target: Tier
    done: Callable[[int], None]
