"""Changes of weights, in the order of the compute stream; nothing old is used for what is new."""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.boundary import Action, ActionFailed, Backup, EpochBegan, Free, NewEpoch, Restore
from kvstrata.gpu_runtime.batches import BatchEngine
from kvstrata.gpu_runtime.core import RuntimeCore
from kvstrata.gpu_runtime.moves import Moves


class Epochs:
    """Starts the actions of a message around the change of weights in it, if there is one.

    Under the runtime's lock. A row knows by how many changes it was preceded, and so does the
    compute stream: it runs those rows only whose number is its own.
    """

    def __init__(self, core: RuntimeCore, batches: BatchEngine, moves: Moves) -> None:
        self._core, self._batches, self._moves = core, batches, moves

    def start(self, actions: Sequence[Action]) -> None:
        """Backups and frees, changes, the rest. The message was checked."""
        changes = [action for action in actions if isinstance(action, NewEpoch)]
        if not changes:
            self._start_moves(actions)
            return
        self._start_moves([a for a in actions if isinstance(a, Backup | Free)])
        for change in changes:
            self._core.actions.start(change.action_id)
            self._begin(change)
        self._start_moves([a for a in actions if not isinstance(a, Backup | Free | NewEpoch)])

    def _start_moves(self, actions: Sequence[Action]) -> None:
        """Copies of old pages are refused; everything else starts."""
        good = []
        for action in actions:
            if isinstance(action, Backup | Restore) and action.source in self._batches.old_pages:
                self._core.actions.start(action.action_id)
                self._fail(action, "stale", "extents of an older epoch")
            else:
                good.append(action)
        self._moves.start(good)

    def _begin(self, change: NewEpoch) -> None:
        compute = self._batches.compute
        # All that is under way has its pages, and they are old, or it is cancelled before it gets
        # any: so what it brings later is old as well.
        for action_id in self._core.actions.ids():
            self._moves.cancel(action_id)
        self._batches.old_pages.begin_epoch(self._core)
        self._batches.rows.epoch += 1
        number = self._batches.rows.epoch
        stream = self._core.device.compute
        failure = [""]

        def work() -> None:
            compute.begin_epoch(number, change.payload)
            failure[0] = compute.unknown_weights

        stream.enqueue(work)
        stream.record().on_complete(lambda: self._began(change, failure[0]))

    def _began(self, change: NewEpoch, failure: str) -> None:
        """On a thread of the device."""
        with self._core.callback():
            if change.action_id not in self._core.actions:
                return  # close() has ended it
            if failure:
                self._fail(change, "runner", failure)
            else:
                event = EpochBegan(action_id=change.action_id, epoch=change.epoch)
                self._core.actions.end(change.action_id, event)

    def _fail(self, action: Action, cause: str, message: str) -> None:
        event = ActionFailed(action_id=action.action_id, cause=cause, message=message)
        self._core.actions.end(action.action_id, event)
