"""`Hurry`: whether somebody waits on the host until copies are enqueued."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue

import numpy as np

from kvstrata.gpu_runtime.base import Event


class Hurry:
    """Of one stream. Any thread, also a signal's handler.

    Copies are enqueued while they move, as what waits on the GPU slows launches there. Who needs
    one to be enqueued is in a hurry, by `with`, as long as it waits: meanwhile the GPU waits. (A
    KeyboardInterrupt just as the wait ends may leave the stream in a hurry for good.)
    """

    def __init__(self) -> None:
        self.word = np.zeros(1, np.int64)
        """How many are in a hurry; read by C code, at any time."""
        self._lock = threading.RLock()
        self._sleepers: set[SimpleQueue[None]] = set()

    def __bool__(self) -> bool:
        return bool(self.word[0])

    def __enter__(self) -> None:
        with self._lock:
            self.word[0] += 1
            try:
                for sleeper in list(self._sleepers):
                    sleeper.put(None)
            except BaseException:  # of a signal's handler
                self.word[0] -= 1
                raise

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.word[0] -= 1

    def sleep_until(self, event: Event, wait: Callable[[Callable[[float], bool]], None]) -> None:
        """Until `event` is complete, or anybody is in a hurry. `wait`: calls what it is given, a
        wait of so many seconds, until that says True; it may raise."""
        wakes: SimpleQueue[None] = SimpleQueue()
        with self._lock:
            self._sleepers.add(wakes)
            if self:
                wakes.put(None)
        try:
            event.on_complete(partial(wakes.put, None))
            wait(partial(_is_there, wakes))
        finally:  # without the lock: whoever holds it may be closing this thread's stream
            self._sleepers.discard(wakes)


def _is_there(wakes: SimpleQueue[None], seconds: float) -> bool:
    try:
        wakes.get(timeout=seconds)
    except Empty:
        return False
    return True
