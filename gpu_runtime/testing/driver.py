"""Plays control for tests: sends messages as to another process, and keeps account of events."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from kvstrata.boundary import (
    Action,
    ActionFailed,
    BackedUp,
    Backup,
    BatchDone,
    BatchPlan,
    Drop,
    Dropped,
    EpochBegan,
    Event,
    Evicted,
    Free,
    Freed,
    KeyRun,
    Located,
    Lookup,
    NewEpoch,
    OpenRow,
    Prefetch,
    PrefetchReady,
    PreparedBatchHandle,
    Restore,
    Restored,
    RuntimeInterface,
    StatusReport,
    TierDegraded,
    Wake,
    decode_actions,
    decode_events,
    decode_plan,
    encode,
)
from kvstrata.errors import CapacityError, KvstrataError
from kvstrata.handles import Extents, RequestRuntimeHandle, Tier
from kvstrata.tiers.keys import page_keys, root_key

WAIT_S = 30.0
"""How long a test waits for what must happen. Never reached when all is well."""

_TERMINAL: dict[type, type] = {
    Lookup: Located,
    Prefetch: PrefetchReady,
    Backup: BackedUp,
    Restore: Restored,
    Free: Freed,
    Drop: Dropped,
    NewEpoch: EpochBegan,
}


class ConformanceError(AssertionError):
    """The runtime does not do what the contract demands."""


def require(condition: object, message: str) -> None:
    """Raises `ConformanceError` with `message` unless `condition`."""
    if not condition:
        raise ConformanceError(message)


T = TypeVar("T")


def of_type(value: object, kind: type[T]) -> T:
    require(isinstance(value, kind), f"{value!r} is not {kind.__name__}")
    return cast(T, value)


def equal(found: object, wanted: object, what: str) -> None:
    require(found == wanted, f"{what}: {found!r}, not {wanted!r}")


def raises(kind: type[KvstrataError], call: Callable[[], object], what: str) -> KvstrataError:
    try:
        call()
    except kind as error:
        return error
    except KvstrataError as error:
        require(False, f"{what}: {error!r}, not {kind.__name__}")
    require(False, f"{what}: nothing was raised")
    raise AssertionError


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens of one request, and the keys of its full pages."""

    tokens: npt.NDArray[np.int32]
    page_tokens: int
    namespace: bytes = bytes(range(32))

    @classmethod
    def random(cls, count: int, page_tokens: int, seed: int) -> Prompt:
        numbers = random.Random(f"prompt {seed}").choices(range(50_000), k=count)
        return cls(np.array(numbers, np.int32), page_tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def full_pages(self) -> int:
        return len(self) // self.page_tokens

    def keys(self, start: int = 0, stop: int | None = None) -> KeyRun:
        keys = page_keys(self.namespace, self.tokens.data, self.page_tokens)
        run = KeyRun(self.namespace, root_key(self.namespace), 0, keys)
        return run.slice(start, self.full_pages if stop is None else stop)

    def more(self, tokens: Iterable[int]) -> Prompt:
        tail = np.array(list(tokens), np.int32)
        return Prompt(np.concatenate((self.tokens, tail)), self.page_tokens, self.namespace)

    def open(self, max_new_tokens: int = 1, stop_tokens: tuple[int, ...] = ()) -> OpenRow:
        return OpenRow(
            tokens=self.tokens.tobytes(),
            namespace=self.namespace,
            max_new_tokens=max_new_tokens,
            stop_tokens=stop_tokens,
        )


@dataclass(eq=False, slots=True)
class Driver:
    """One control thread. Every message is encoded and decoded on its way, both ways, and every
    action and batch must get its one terminal event."""

    runtime: RuntimeInterface
    open: dict[int, Action] = field(default_factory=dict)
    """Actions whose terminal event has not come."""
    ended: dict[int, Event] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    """Batches that were prepared with rows and have not ended."""
    done: dict[int, BatchDone] = field(default_factory=dict)
    unasked: list[Event] = field(default_factory=list)
    """Evicted and TierDegraded."""
    status: StatusReport | None = None
    mismatched: int = 0
    verified: int = 0
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    # ── messages ─────────────────────────────────────────────────────────────────────────────────

    def lookup(self, keys: KeyRun, deadline_s: float = WAIT_S) -> Lookup:
        return Lookup(action_id=next(self._ids), keys=keys, deadline_s=deadline_s)

    def prefetch(self, keys: KeyRun, target: Tier, deadline_s: float = WAIT_S) -> Prefetch:
        number = next(self._ids)
        return Prefetch(action_id=number, keys=keys, target=target, deadline_s=deadline_s)

    def backup(
        self, keys: KeyRun, source: Extents, target: Tier, deadline_s: float = WAIT_S
    ) -> Backup:
        return Backup(
            action_id=next(self._ids),
            keys=keys,
            source=source,
            target=target,
            deadline_s=deadline_s,
        )

    def restore(self, source: Extents) -> Restore:
        return Restore(action_id=next(self._ids), source=source)

    def free(self, extents: Extents) -> Free:
        return Free(action_id=next(self._ids), extents=extents)

    def drop(self, keys: KeyRun, deadline_s: float = WAIT_S) -> Drop:
        return Drop(action_id=next(self._ids), keys=keys, deadline_s=deadline_s)

    def apply(self, *actions: Action) -> list[int]:
        self.runtime.apply(decode_actions(encode(list(actions))))
        self._note_open(actions)
        return [action.action_id for action in actions]

    def new_epoch(self, epoch: int, payload: bytes = b"") -> NewEpoch:
        return NewEpoch(action_id=next(self._ids), epoch=epoch, payload=payload)

    def prepare(self, plan: BatchPlan) -> PreparedBatchHandle:
        try:
            prepared = self.runtime.prepare_batch(decode_plan(encode(plan)))
        except CapacityError:  # then frees and actions did take effect
            self._note_open((*plan.frees, *plan.actions))
            raise
        self._note_open((*plan.frees, *plan.actions))
        if plan.rows:
            self.running.add(prepared.batch_id)
        return prepared

    def execute(self, prepared: PreparedBatchHandle) -> int:
        return self.runtime.execute_batch(prepared).batch_id

    def run(self, plan: BatchPlan) -> tuple[int, tuple[RequestRuntimeHandle, ...]]:
        """Prepare and execute; the batch's id, and the handles of what it opens."""
        prepared = self.prepare(plan)
        return self.execute(prepared), prepared.opened

    def cancel(self, what: RequestRuntimeHandle | int) -> None:
        self.runtime.cancel(what)

    def _note_open(self, actions: Sequence[Action]) -> None:
        self.open.update({action.action_id: action for action in actions})

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def poll(self, timeout_s: float = 0.0, wake: Wake = Wake.ANY) -> list[Event]:
        events = self.runtime.poll(timeout_s, wake)
        require(decode_events(encode(events)) == events, "events change when they are encoded")
        require(isinstance(events[-1], StatusReport), "StatusReport does not come last")
        for event in events:
            self._note(event)
        return events

    def _note(self, event: Event) -> None:
        if isinstance(event, StatusReport):
            self.status = event
        elif isinstance(event, BatchDone):
            require(event.batch_id in self.running, f"a batch ends twice: {event}")
            self.running.remove(event.batch_id)
            self.done[event.batch_id] = event
            self.mismatched += event.counters.get("pages_mismatched", 0)
            self.verified += event.counters.get("pages_verified", 0)
        elif isinstance(event, Evicted | TierDegraded):
            self.unasked.append(event)
        else:
            require(event.action_id in self.open, f"not of an open action: {event}")
            action = self.open.pop(event.action_id)
            fits = isinstance(event, (_TERMINAL[type(action)], ActionFailed))
            require(fits, f"{event} ends {action}")
            self.ended[event.action_id] = event

    def wait_action(self, action_id: int) -> Event:
        self._wait(lambda: action_id in self.ended, f"the end of action {action_id}")
        return self.ended[action_id]

    def wait_batch(self, batch_id: int) -> BatchDone:
        self._wait(lambda: batch_id in self.done, f"the end of batch {batch_id}")
        return self.done[batch_id]

    def wait_idle(self) -> None:
        self._wait(lambda: not self.open and not self.running, "all actions and batches")

    def wait_status(self, test: Callable[[StatusReport], bool], what: str = "such") -> None:
        """Wait for a report of which `test(report)` is true."""
        self.poll()
        self._wait(lambda: self.status is not None and test(self.status), f"a report, {what},")

    def _wait(self, has_come: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + WAIT_S
        while not has_come():
            late = time.monotonic() > end_s
            require(not late, f"{what} did not come; open: {self.open}; {self.status}")
            self.poll(0.05)

    def do(self, action: Action) -> Event:
        """Start one action and wait for its end."""
        self.apply(action)
        return self.wait_action(action.action_id)

    def pages(self, tier: Tier) -> tuple[int, int, int]:
        """Total, free and freeing pages of a tier (the least over its pools), as reported now."""
        self.poll()
        assert self.status is not None
        pools = [c for c in self.status.capacity if c.tier is tier]
        return (
            min(c.total for c in pools),
            min(c.free for c in pools),
            min(c.freeing for c in pools),
        )
