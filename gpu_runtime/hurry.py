"""`Hurry`: whether somebody waits on the host until copies are enqueued."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from kvstrata.gpu_runtime.base import Event


class Hurry:
    """Of one device. Any thread.

    Copies are enqueued while they move, as what waits on the GPU slows launches there. Who needs
    one to be enqueued is in a hurry, by `with`, as long as it waits: meanwhile the GPU waits.
    """

    def __init__(self) -> None:
        self.word = np.zeros(1, np.int64)
        """How many are in a hurry; read by C code, at any time."""
        self._lock = threading.RLock()  # a signal's handler may wait, too
        self._sleepers: set[threading.Event] = set()

    def __bool__(self) -> bool:
        return bool(self.word[0])

    def __enter__(self) -> None:
        with self._lock:
            self.word[0] += 1
            for sleeper in self._sleepers:
                sleeper.set()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.word[0] -= 1

    @contextmanager
    def or_complete(self, event: Event) -> Iterator[Callable[[float], bool]]:
        """A wait of so many seconds for `event` to be complete or for anybody to be in a hurry; it
        says whether either came."""
        wakes = threading.Event()
        with self._lock:
            self._sleepers.add(wakes)
            if self:
                wakes.set()
        try:
            event.on_complete(wakes.set)
            yield wakes.wait
        finally:
            with self._lock:
                self._sleepers.discard(wakes)
