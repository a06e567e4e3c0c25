"""How many pages each tier has, as the runtime last said and as actions since have changed it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvstrata.boundary import StatusReport
from kvstrata.handles import Tier


@dataclass(frozen=True, slots=True)
class TierRoom:
    """Pages of one tier, the least over its pools. See `PoolCapacity` for the fields."""

    total: int = 0
    free: int = 0
    freeing: int = 0
    waiting: int = 0
    reserve: int = 0
    window: int = 0

    def comes_free(self, pages: int) -> bool:
        """Pages that are being freed are all that `pages` lack; else eviction must help."""
        return self.free < pages <= self.free + self.freeing


class Rooms:
    """`rooms[tier]` for L1 and L2.

    Each report of the runtime replaces what is known. Between reports control notes what it asked
    for, so that it neither evicts twice for one need nor takes one page twice.
    """

    def __init__(self) -> None:
        self.status: StatusReport | None = None
        """The last report."""
        self._rooms = {Tier.L1: TierRoom(), Tier.L2: TierRoom()}
        self._taken = dict.fromkeys(self._rooms, 0)
        self._keep = dict.fromkeys(self._rooms, 0)

    def __getitem__(self, tier: Tier) -> TierRoom:
        return self._rooms[tier]

    def short(self, tier: Tier, more: int = 0) -> int:
        """Pages to evict before all that was asked for, and `more`, fits; 0 or less: none.

        Pages that are being freed count as free. What waits in the runtime (`waiting`) has used up
        all that the report called free.
        """
        room = self._rooms[tier]
        if room.waiting:
            lack = room.waiting + self._taken[tier] + more
        else:
            lack = more + self._keep[tier] - room.free
        return lack - room.freeing

    def note_taken(self, tier: Tier, pages: int, keep: int = 0) -> None:
        """An action or a batch is going to take `pages`, and leaves `keep` free."""
        room = self._rooms[tier]
        self._rooms[tier] = replace(room, free=room.free - pages)
        self._taken[tier] += pages
        self._keep[tier] = max(self._keep[tier], keep)

    def note_freed(self, tier: Tier, pages: int) -> None:
        room = self._rooms[tier]
        self._rooms[tier] = replace(room, freeing=room.freeing + pages)

    def note_status(self, status: StatusReport) -> None:
        self.status = status
        self._taken = dict.fromkeys(self._rooms, 0)
        self._keep = dict.fromkeys(self._rooms, 0)
        for tier in self._rooms:
            pools = [c for c in status.capacity if c.tier is tier]
            if pools:
                self._rooms[tier] = TierRoom(
                    min(c.total for c in pools),
                    min(c.free for c in pools),
                    min(c.freeing - c.stuck for c in pools),
                    max(c.waiting for c in pools),
                    max(c.reserve for c in pools),
                    min(c.window for c in pools),
                )

    def __repr__(self) -> str:
        return f"Rooms({', '.join(f'{t.name}: {r}' for t, r in self._rooms.items())})"
