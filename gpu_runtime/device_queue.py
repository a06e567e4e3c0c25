"""Prefetches to L1 wait here for device pages."""

from __future__ import annotations

import math
from collections import deque

from kvstrata.boundary import Prefetch
from kvstrata.errors import CapacityError
from kvstrata.gpu_runtime.core import RuntimeCore
from kvstrata.gpu_runtime.move import Move
from kvstrata.gpu_runtime.prefetch import PrefetchToL1
from kvstrata.gpu_runtime.transfers import Copies, reserve_all


class DevicePageQueue:
    """Prefetches to L1 that wait for pages that are being freed; first come, first served.

    One that even those pages cannot satisfy ends at once, with cause "capacity": only control can
    make room then. Under the runtime's lock.
    """

    def __init__(self, core: RuntimeCore, copies: Copies) -> None:
        self._core, self._copies = core, copies
        self._waiting: deque[PrefetchToL1] = deque()

    def join(self, action: Prefetch) -> Move:
        move = PrefetchToL1(self._core, self._copies, action)
        self._waiting.append(move)
        self.pump()
        return move

    def pump(self) -> None:
        """Call it whenever device pages became free, or a move was cancelled."""
        for move in [m for m in self._waiting if m.cancelled]:
            self._waiting.remove(move)
            move.give_up("cancelled")
        while self._waiting:
            move = self._waiting[0]
            if not self._can_wait_for(move):
                self._waiting.popleft()
                move.give_up("capacity")
                continue
            try:
                target = reserve_all(self._core, move.keys.page_count)
            except CapacityError:
                return
            self._waiting.popleft()
            move.start(target)

    def expire(self, now_s: float) -> float:
        """End those that waited until their deadline; returns the next one."""
        for move in [m for m in self._waiting if m.end_s <= now_s]:
            self._waiting.remove(move)
            move.give_up("timeout")
        self.pump()
        return min((m.end_s for m in self._waiting), default=math.inf)

    def stop(self, cause: str) -> None:
        """At shutdown: end all that wait."""
        while self._waiting:
            self._waiting.popleft().give_up(cause)

    def _can_wait_for(self, move: PrefetchToL1) -> bool:
        need = move.keys.page_count
        return all(need <= t.free + t.freeing for t in self._core.tables.values())
