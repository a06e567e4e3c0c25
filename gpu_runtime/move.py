"""`Move`: the life of one action from its start to its one terminal event."""

from __future__ import annotations

from kvstrata.boundary import BackedUp, PrefetchReady, Restored
from kvstrata.errors import IntegrityError
from kvstrata.gpu_runtime.core import RuntimeCore
from kvstrata.gpu_runtime.transfers import Copies


class Move:
    """Base of one action's work. All methods run under the runtime's lock.

    `deadline_s` counts from now: waiting for pages is a part of it.
    """

    def __init__(
        self, core: RuntimeCore, copies: Copies, action_id: int, deadline_s: float = 0.0
    ) -> None:
        self.core, self.copies, self.action_id = core, copies, action_id
        self.end_s = core.now() + deadline_s
        self.lender = core.backend_name
        """Whose share of the host pages it uses, also if another backend is attached meanwhile."""
        self.cancelled = False
        self.ended = False

    def remaining_s(self) -> float:
        return max(0.0, self.end_s - self.core.now())

    def cancel(self) -> None:
        """Stop before the next step. What is under way ends normally."""
        self.cancelled = True

    def end(self, event: BackedUp | PrefetchReady | Restored) -> None:
        if self.ended:
            raise IntegrityError(f"action {self.action_id} ended twice")
        self.ended = True
        if self.action_id in self.core.actions:  # close() may have ended it
            self.core.actions.end(self.action_id, event)
