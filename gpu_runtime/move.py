"""`Move`: the life of one action from its start to its one terminal event."""

from __future__ import annotations

from kvstrata.boundary import BackedUp, PrefetchReady, Restored
from kvstrata.errors import IntegrityError
from kvstrata.gpu_runtime.core import RuntimeCore
from kvstrata.gpu_runtime.transfers import Copies


class Move:
    """Base of one action's work. All methods run under the runtime's lock."""

    def __init__(self, core: RuntimeCore, copies: Copies, action_id: int) -> None:
        self.core, self.copies, self.action_id = core, copies, action_id
        self.cancelled = False
        self.ended = False

    def cancel(self) -> None:
        """Stop before the next step. What is under way ends normally."""
        self.cancelled = True

    def end(self, event: BackedUp | PrefetchReady | Restored) -> None:
        if self.ended:
            raise IntegrityError(f"action {self.action_id} ended twice")
        self.ended = True
        if self.core.is_open(self.action_id):  # close() may have ended it
            self.core.end_action(self.action_id, event)
