"""The progress of a tool: a live bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kvstrata.tools.replay_control import LINE_EVERY_S
from kvstrata.units import format_size

OnProgress = Callable[[str, int, int, int], None]
"""`(phase, pages done, pages in all (0: not known), bytes done)`."""


@contextmanager
def page_progress(
    console: Console, clock: Callable[[], float] = time.monotonic
) -> Iterator[OnProgress]:
    """Pages and bytes of the phase that is under way."""
    began = clock()
    if not console.is_terminal:
        last = began

        def line(phase: str, done: int, total: int, nbytes: int) -> None:
            nonlocal last
            now = clock()
            if now - last >= LINE_EVERY_S:
                last = now
                of = f" of {total:,}" if total else ""
                text = f"{phase}: {done:,}{of} pages, {format_size(nbytes)}, {now - began:.0f} s"
                console.print(text, highlight=False)

        yield line
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("pages, {task.fields[size]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        refresh_per_second=4,
        transient=True,  # the table says it all
    )
    with bar:
        task = bar.add_task("", total=None, size="")
        current = ""

        def update(phase: str, done: int, total: int, nbytes: int) -> None:
            nonlocal current
            if phase != current:
                current = phase
                bar.reset(task, description=phase, total=total or None)
            bar.update(task, completed=done, total=total or None, size=format_size(nbytes))

        yield update
