"""Sizes as people write them: `64MiB`, `1.5 GiB`, `4096`."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"(\d{1,24}(?:\.\d{1,9})?)\s*([a-zA-Z]*)", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes that `text` stands for. Raises ValueError that says what is accepted."""
    match = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f'"{text}" is not a size: write bytes or a string such as "64MiB"')
    value = Fraction(match[1]) * factor
    if value.denominator != 1:
        raise ValueError(f'"{text}" is not a whole number of bytes')
    return int(value)


def format_size(nbytes: int) -> str:
    """`nbytes` in the largest binary unit that leaves at least 1, with up to two decimals."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = _UNITS[unit.lower()]
        if nbytes >= factor:
            return f"{nbytes / factor:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{nbytes} B"
