"""Sizes as people write them: "64 MiB", "10GiB", "1.5 GB", 4096."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "B": 1,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_size(value: int | str) -> int:
    """Bytes of `value`: a number of bytes, or text with a unit (KiB … TiB, KB … TB).

    Raises `ValueError`, with the accepted forms, for anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"a size is not negative, got {value}")
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f'{value!r} is not a size: write bytes or text like "64MiB" or "10 GB"')
    whole = float(match[1]) * unit if "." in match[1] else int(match[1]) * unit
    return int(whole)


def format_size(nbytes: float) -> str:
    """`nbytes` for people: "36.0 KiB", "1.5 GiB"."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
