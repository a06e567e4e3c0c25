"""Sizes as people write them."""

from __future__ import annotations

import pytest

from kvstrata.units import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("0", 0),
        ("64MiB", 64 << 20),
        ("64 mib", 64 << 20),
        ("1.5GiB", 3 << 29),
        ("10 GB", 10**10),
        ("2TiB", 2 << 40),
        ("7 B", 7),
    ],
)
def test_parse(text: int | str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "10 Gigs", "1 2", "0x10", "٣", -5, True])
def test_refused(text: int | str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


def test_format() -> None:
    assert format_size(0) == "0 B"
    assert format_size(36 * 1024) == "36.0 KiB"
    assert format_size(3 << 29) == "1.5 GiB"
    assert format_size(5 << 40) == "5.0 TiB"
