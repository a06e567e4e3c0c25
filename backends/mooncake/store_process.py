"""A process that gives a segment of memory to a store, and does nothing else.

`python -m kvstrata.backends.mooncake.store_process OPTIONS`, where OPTIONS is JSON. It writes
`ready NAME` to stdout when the master counts with its segment, and ends with its stdin, or by
SIGTERM or SIGINT.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable

import msgspec

from kvstrata.backends.mooncake.client import transport
from kvstrata.backends.mooncake.link import Link
from kvstrata.backends.mooncake.options import MooncakeOptions

_POLL_S = 0.05
_CLOSE_S = 5.0


def serve(
    options: MooncakeOptions, on_ready: Callable[[str], None], *, until_stdin_ends: bool = True
) -> None:
    """Give `options.segment_size` bytes until a signal comes or stdin ends. A master that is away
    is waited for. Raises `ConfigError` for what can never work."""
    asked, ask = os.pipe()

    def stop(*_: object) -> None:
        os.write(ask, b"x")

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    link = Link(options, transport(options), lambda client: None, lambda view: None)
    link.start("store")
    watched = [asked, sys.stdin.fileno()] if until_stdin_ends else [asked]
    is_ready = False
    while True:
        if not is_ready and not link.view.problem:
            with link.use() as client:
                on_ready(client.name)
            is_ready = True
        ended, _, _ = select.select(watched, [], [], None if is_ready else _POLL_S)
        if asked in ended or (ended and not os.read(sys.stdin.fileno(), 4096)):
            break
    link.close(_CLOSE_S)


def main() -> None:
    options = msgspec.json.decode(sys.argv[1], type=MooncakeOptions)
    started = time.monotonic()

    def ready(name: str) -> None:
        seconds = time.monotonic() - started
        sys.stdout.write(f"ready {name} {seconds:.2f}\n")
        sys.stdout.flush()

    serve(options, ready)


if __name__ == "__main__":
    main()
