"""What goes back to control: the queue behind `poll`, and the actions that still owe an event."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from kvstrata.boundary import Action, ActionFailed, RuntimeEvent, Wake
from kvstrata.errors import IntegrityError, PlanError


class EventQueue:
    """Events on their way to `poll`. `emit` and `nudge` from any thread, `take` from control's."""

    def __init__(self) -> None:
        self._events: deque[RuntimeEvent] = deque()
        self._wake = threading.Condition()
        self._waiting_for: tuple[type[RuntimeEvent], ...] = (RuntimeEvent,)
        self._nudged = False

    def emit(self, event: RuntimeEvent) -> None:
        with self._wake:
            self._events.append(event)
            if isinstance(event, self._waiting_for):
                self._wake.notify()

    def nudge(self) -> None:
        """End the wait of `poll` without an event: control has to look at the report."""
        with self._wake:
            self._nudged = True
            self._wake.notify()

    def wait(self, wake: Wake, timeout_s: float) -> bool:
        """Wait until there is something that `wake` names; False when the time ran out."""
        kinds = wake.kinds
        with self._wake:
            self._waiting_for = kinds
            return self._wake.wait_for(
                lambda: self._nudged or any(isinstance(event, kinds) for event in self._events),
                timeout_s,
            )

    def take(self) -> list[RuntimeEvent]:
        """All events, oldest first."""
        with self._wake:
            self._nudged = False
            events = list(self._events)
            self._events.clear()
        return events


class OpenActions:
    """Actions that were started and owe their one terminal event. Under the runtime's lock."""

    def __init__(self, events: EventQueue) -> None:
        self._events = events
        self._open: set[int] = set()

    def check_new(self, actions: Iterable[Action]) -> None:
        """Raise PlanError when an id of a message is in use, or there twice."""
        seen: set[int] = set()
        for action in actions:
            if action.action_id in self._open or action.action_id in seen:
                raise PlanError(f"action id {action.action_id} is in use")
            seen.add(action.action_id)

    def start(self, action_id: int) -> None:
        self._open.add(action_id)

    def end(self, action_id: int, event: RuntimeEvent) -> None:
        """Emit the terminal event of an action. Exactly once a started action."""
        if action_id not in self._open:
            raise IntegrityError(f"second terminal event of action {action_id}: {event}")
        self._open.remove(action_id)
        self._events.emit(event)

    def ids(self) -> list[int]:
        return sorted(self._open)

    def __contains__(self, action_id: int) -> bool:
        return action_id in self._open

    def fail_all(self, cause: str) -> None:
        for action_id in sorted(self._open):
            self.end(action_id, ActionFailed(action_id=action_id, cause=cause))
