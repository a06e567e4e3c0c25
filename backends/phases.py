"""What part of a call was spent on copies: the thread that calls the backend asks afterwards."""

from __future__ import annotations

import threading


class _Copies(threading.local):
    seconds = 0.0


_copies = _Copies()


def note_copy(seconds: float) -> None:
    """A backend says, in the thread it was called in, that it spent so long copying payloads. It
    counts as `copy_s`, not as I/O."""
    _copies.seconds += seconds


def take_copy() -> float:
    """What was noted in this thread since the last time."""
    seconds, _copies.seconds = _copies.seconds, 0.0
    return seconds
