"""Turns: one thread at a time, and a seed says whose turn it is.

What takes turns is an actor. A `Fiber` is an actor with a thread of its own, which runs until it
pauses, parks or ends; all other threads wait for their turn meanwhile. So a run depends on nothing
but the seed: not on the machine, its load or its clock. `Threads` stands in for the `threading`
module of code that shall take turns without knowing it.

Weights are redrawn now and then, and are far apart: an actor may stand still for a hundred turns
while others go on, which is when a missing wait shows.
"""

from __future__ import annotations

import math
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from kvstrata.errors import IntegrityError

TURN_S = 0.001
"""Simulated seconds that a turn takes."""
_WEIGHTS = (1.0, 1.0, 0.2, 0.02, 0.002)
_REDRAW = 1 / 40
"""Probability that a turn draws new weights."""

_T = TypeVar("_T")


class Actor(Protocol):
    """What can take a turn."""

    def ready(self) -> bool:
        """Whether it could go on now."""
        ...

    def turn(self) -> None:
        """Go on, for a bit. Only called when `ready`."""
        ...


class _Ended(BaseException):
    """Raised in a fiber at the end of the simulation, where it waits."""


class Fiber:
    """An actor with a thread. Made by `Turns.spawn`."""

    def __init__(self, turns: Turns, name: str, target: Callable[[], None]) -> None:
        self.name = name
        self.turns, self._target = turns, target
        self._go = _shut_lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._woken = True
        self._until_s = math.inf
        self.is_away = False
        self.alive = False

    def start(self) -> None:
        self.alive = True
        self._thread.start()

    def ready(self) -> bool:
        return (
            self.alive and not self.is_away and (self._woken or self.turns.now() >= self._until_s)
        )

    @property
    def wakes_s(self) -> float:
        return self._until_s if self.alive else math.inf

    def turn(self) -> None:
        self._go.release()
        self.turns.handed_back.acquire()

    def wake(self) -> None:
        """End its `park`."""
        self._woken = True

    def _run(self) -> None:
        _fibers[threading.get_ident()] = self
        self._go.acquire()
        try:
            if not self.turns.ended:
                self._target()
        except _Ended:
            pass
        except BaseException as exc:  # noqa: BLE001 - the thread that gives turns raises it
            self.turns.fault = self.turns.fault or exc
        del _fibers[threading.get_ident()]
        self.alive = False
        self.turns.handed_back.release()

    def hand_back(self) -> None:
        """Let others go on; returns with its next turn."""
        self.turns.handed_back.release()
        self._go.acquire()
        if self.turns.ended:
            raise _Ended

    def park(self, until_s: float = math.inf) -> bool:
        """Wait for `wake`; False when the time came first."""
        self._woken, self._until_s = False, until_s
        try:
            self.hand_back()
            return self._woken
        finally:
            self._woken, self._until_s = True, math.inf

    def away(self, wait: Callable[[], _T]) -> _T:
        """Run `wait`, which may block, in real time; others go on meanwhile."""
        self.is_away = True
        self.turns.handed_back.release()
        try:
            return wait()
        finally:
            self.is_away = False
            self.turns.nudge()
            self._go.acquire()


class Turns:
    """Gives turns to actors, by weights that are drawn from `seed`.

    By hand (`run`, `run_until`), on the caller's thread: then everything is a function of the
    seed. Or in the background, on a thread, as soon as an actor is ready: then the order is still
    drawn from the seed, but what else the process does comes in between as it happens.
    """

    def __init__(self, seed: int, *, background: bool = False) -> None:
        self.seed = seed
        self.handed_back = _shut_lock()
        self.fault: BaseException | None = None
        """What a fiber raised; the next turn raises it."""
        self.ended = False
        self.lock = threading.Lock()
        """Guards what actors share with threads that take no turns."""
        self.taken = 0
        self._random = random.Random(seed)
        self._actors: list[Actor] = []
        self._fibers: list[Fiber] = []
        self._weights: dict[int, float] = {}
        self._now_s = 0.0
        self._something = threading.Event()
        self._taken_one = threading.Condition()
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._loop, name="kvstrata-turns", daemon=True)
            self._thread.start()

    # ── actors ───────────────────────────────────────────────────────────────────────────────────

    def add(self, actor: Actor) -> None:
        with self.lock:
            self._actors.append(actor)

    def spawn(self, name: str, target: Callable[[], None], *, is_actor: bool = True) -> Fiber:
        """A thread that takes turns: by itself, or inside those of another actor."""
        fiber = Fiber(self, name, target)
        with self.lock:
            self._fibers.append(fiber)
            if is_actor:
                self._actors.append(fiber)
        fiber.start()
        return fiber

    def nudge(self) -> None:
        """An actor may have become ready."""
        self._something.set()

    # ── turns ────────────────────────────────────────────────────────────────────────────────────

    def now(self) -> float:
        """Simulated seconds."""
        return self._now_s

    def run(self, most: int) -> int:
        """Up to `most` turns; returns how many there were. Raises what a fiber raised."""
        for count in range(most):
            if not self._take_one():
                return count
        return most

    def run_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Turns until `condition`, for so many simulated seconds."""
        end_s = self._now_s + timeout_s
        while not condition():
            if self._now_s >= end_s:
                return False
            if not self._take_one():
                self.skip(end_s)
        return True

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for what turns bring about; by hand, the turns are given here."""
        if self._thread is None:
            return self.run_until(condition, timeout_s)
        with self._taken_one:
            return self._taken_one.wait_for(condition, timeout_s)

    def skip(self, most_s: float = math.inf) -> None:
        """Nothing is ready: let the clock jump to the next time that a fiber waits for."""
        wakes_s = min((f.wakes_s for f in self._fibers), default=math.inf)
        self._now_s = max(self._now_s + TURN_S, min(wakes_s, most_s, self._now_s + 1.0))

    def _take_one(self) -> bool:
        with self.lock:
            ready = [a for a in self._actors if a.ready()]
        if not ready:
            return False
        if self._random.random() < _REDRAW:
            self._weights.clear()
        weights = [self._weight(a) for a in ready]
        actor = self._random.choices(ready, weights)[0]
        self.taken += 1
        self._now_s += TURN_S
        actor.turn()
        if self.fault is not None:
            raise IntegrityError(f"a simulated thread raised: {self.fault!r}") from self.fault
        return True

    def _weight(self, actor: Actor) -> float:
        weight = self._weights.get(id(actor))
        if weight is None:
            weight = self._weights[id(actor)] = self._random.choice(_WEIGHTS)
        return weight

    def _loop(self) -> None:
        while not self.ended:
            self._something.clear()
            if self._take_one():
                with self._taken_one:
                    self._taken_one.notify_all()
            elif any(fiber.wakes_s < math.inf for fiber in self._fibers):
                self.skip()
            else:
                self._something.wait()

    def end(self) -> None:
        """End every fiber where it waits; one that is away gets no further turn. Idempotent."""
        self.ended = True
        self.nudge()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for fiber in self._fibers:
            while fiber.alive and not fiber.is_away:
                fiber.turn()


# ── for code that may run in a fiber or not ──────────────────────────────────────────────────────

_fibers: dict[int, Fiber] = {}
"""By the identity of their threads."""


def current() -> Fiber | None:
    """The fiber that this is called from, if it is one."""
    return _fibers.get(threading.get_ident())


def pause() -> None:
    """In a fiber: let others go on. On any other thread: nothing."""
    fiber = current()
    if fiber is not None:
        fiber.hand_back()


def rest(seconds: float) -> None:
    """In a fiber: let others go on, for so many simulated seconds."""
    fiber = current()
    if fiber is not None:
        fiber.park(fiber.turns.now() + seconds)


def away(wait: Callable[[], _T]) -> _T:
    """In a fiber: run `wait`, which may block. On any other thread: just run it."""
    fiber = current()
    return wait() if fiber is None else fiber.away(wait)


def _shut_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


class Threads:
    """Stands in for `threading` in a module whose threads shall take turns.

    Threads are fibers. Conditions park; a lock is a real one, as no fiber ever waits holding one.
    The thread that gives the turns may wait too: it gives turns meanwhile.
    """

    Lock = staticmethod(threading.Lock)

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def Thread(  # noqa: N802 - the name it stands in for
        self, *, target: Callable[[], None], name: str, daemon: bool
    ) -> _Thread:
        assert daemon, "only daemon threads"
        return _Thread(self._turns, name, target)

    def Condition(self, lock: Any) -> _Condition:  # noqa: N802
        return _Condition(self._turns, lock)

    def current_thread(self) -> Fiber | None:
        return current()


class _Thread:
    def __init__(self, turns: Turns, name: str, target: Callable[[], None]) -> None:
        self.name = name
        self._turns, self._target = turns, target
        self._fiber: Fiber | None = None

    def start(self) -> None:
        self._fiber = self._turns.spawn(self.name, self._target)

    def is_alive(self) -> bool:
        return self._fiber is not None and self._fiber.alive

    def join(self, timeout: float) -> None:
        self._turns.run_until(lambda: not self.is_alive(), timeout)


class _Condition:
    def __init__(self, turns: Turns, lock: Any) -> None:
        self._turns, self._lock = turns, lock
        self._waiters: deque[Callable[[], None]] = deque()

    def wait(self, timeout: float = math.inf) -> bool:
        fiber = current()
        woken: list[bool] = []
        wake = fiber.wake if fiber is not None else lambda: woken.append(True)
        self._waiters.append(wake)
        self._lock.release()
        try:
            if fiber is not None:
                return fiber.park(self._turns.now() + timeout)
            return self._turns.run_until(lambda: bool(woken), timeout)
        finally:
            self._lock.acquire()
            if wake in self._waiters:
                self._waiters.remove(wake)

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiters))):
            self._waiters.popleft()()

    def notify_all(self) -> None:
        self.notify(len(self._waiters))
