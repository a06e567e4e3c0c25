"""Options that several commands share, and how they are read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from kvstrata.boundary import KEY_BYTES
from kvstrata.configs import Config
from kvstrata.errors import InputError, Where
from kvstrata.tools.cli_output import check_output
from kvstrata.tools.stores import namespace_names
from kvstrata.units import parse_size

ConfigOption = Annotated[Path, typer.Option("--config", help="Configuration file (TOML).")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Override a setting: section.key=value.")
]
JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        help="Write the report to this file; - : to stdout, and the table to stderr.",
        callback=check_output,
    ),
]
NamespaceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--namespace",
        help="Only this namespace: the beginning of its fingerprint, or a component of this "
        "configuration; repeatable.",
    ),
]

RateOption = Annotated[
    str | None, typer.Option("--rate", help='Most bytes a second, "100MiB"; default: no limit.')
]
ThreadsOption = Annotated[int, typer.Option("--threads", min=1, max=64, help="Batches in flight.")]

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhdw])", re.ASCII)
MIN_DIGITS = 4


def duration_s(text: str | None, option: str) -> float | None:
    """Seconds of "90s", "15m", "12h", "7d", "2w". Raises InputError."""
    if text is None:
        return None
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise InputError(
            f"{text!r} is not a duration",
            remedy='write a number and a unit: "90s", "15m", "12h", "7d" or "2w"',
            where=Where(key=option),
        )
    return float(match[1]) * _SECONDS[match[2]]


def size_bytes(text: str | None, option: str) -> int:
    """Bytes of "100MiB"; 0 for None. Raises InputError."""
    if text is None:
        return 0
    try:
        nbytes = parse_size(text)
    except ValueError as error:
        raise InputError(
            str(error), remedy='for example "100MiB"', where=Where(key=option)
        ) from error
    if nbytes == 0:
        raise InputError("0 would never end", remedy="leave it out", where=Where(key=option))
    return nbytes


def namespaces_of(config: Config, texts: list[str] | None) -> tuple[bytes, ...]:
    """Fingerprints, or their beginnings. Raises InputError."""
    own = {name.split(" ")[0]: key for key, name in namespace_names(config).items()}
    return tuple(own.get(text) or _prefix(text, own) for text in texts or ())


def _prefix(text: str, own: dict[str, bytes]) -> bytes:
    try:
        prefix = bytes.fromhex(text)
    except ValueError:
        prefix = b""
    if not MIN_DIGITS // 2 <= len(prefix) <= KEY_BYTES:
        raise InputError(
            f"{text!r} is no namespace",
            remedy=f"give an even number of hex digits, {MIN_DIGITS} or more (kvstrata inspect "
            f"lists them), or a component: {', '.join(own)}",
            where=Where(key="--namespace"),
        )
    return prefix
