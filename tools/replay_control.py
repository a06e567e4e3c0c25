"""What a person sees of a replay while it runs, and how they end it early."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LOOK_S = 0.05
"""Who waits for a flag looks so often."""
LINE_EVERY_S = 30.0
"""On anything but a terminal progress is a line, no more often than this."""

OnResult = Callable[[int, int, int], None]
"""`(requests that ended, requests of the trace, page hits so far)`."""


class Flag:
    """An event that a signal handler may set at any moment. `threading.Event` has a lock, which the
    interrupted thread may hold: its handler would wait for itself."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def wait(self, timeout_s: float) -> bool:
        """Until it is set, within LOOK_S; False when the time ran out first."""
        end_s = time.monotonic() + timeout_s
        while not self._is_set and (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(left_s, LOOK_S))
        return self._is_set


@dataclass(slots=True)
class Interruption:
    """How a replay is asked to end early; another thread or a signal handler sets it."""

    finish: Flag = field(default_factory=Flag)
    """Take no further requests: what is under way ends and is stored."""
    leave: Flag = field(default_factory=Flag)
    """End now: what is under way is given up."""
    in_loop: bool = False
    """The replay looks at these flags soon; elsewhere only an exception ends it."""
    signal: int = 0
    """The last signal that came."""

    def enter_loop(self) -> None:
        self.in_loop = True

    @property
    def exit_code(self) -> int | None:
        """The shell's code for a process that a signal ended; None: none came."""
        return 128 + self.signal if self.signal else None


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """The first Ctrl-C ends the replay after what is under way, SIGTERM or a second one now, and
    a third at once."""
    state = Interruption()

    def handler(signum: int, frame: object) -> None:
        state.signal = signum
        if state.leave.is_set() or not state.in_loop:
            if signum == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + signum)
        if signum == signal.SIGTERM or state.finish.is_set():
            state.leave.set()
        state.finish.set()

    before = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield state
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)


@contextmanager
def progress(
    console: Console, clock: Callable[[], float] = time.monotonic
) -> Iterator[OnResult | None]:
    """A live line on a terminal, a plain line now and then elsewhere."""
    if not console.is_terminal:
        yield _Lines(console, clock)
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[hits]:,} page hits"),
        TimeElapsedColumn(),
        console=console,
        refresh_per_second=4,
        transient=True,  # the table says it all
    )
    with bar:
        task = bar.add_task("replay", total=None, hits=0)
        yield lambda done, total, hits: bar.update(task, completed=done, total=total, hits=hits)


class _Lines:
    """`OnResult` for files and pipes. A short replay writes none."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._began = self._last = clock()

    def __call__(self, done: int, total: int, hits: int) -> None:
        now = self._clock()
        if now - self._last >= LINE_EVERY_S:
            self._last = now
            text = f"{done:,} of {total:,} requests, {hits:,} page hits, {now - self._began:.0f} s"
            self._console.print(text, highlight=False)
