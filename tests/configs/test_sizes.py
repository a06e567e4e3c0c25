"""Sizes as people write them."""

from __future__ import annotations

import pytest

from kvstrata.configs import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        ("64MiB", 64 * 2**20),
        ("64 mib", 64 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("2KB", 2000),
        ("1 TB", 10**12),
        ("7B", 7),
        ("0", 0),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "64MoB", "1e3", "0.3B", "1 2", "1GiB/s", "٣"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|whole number"):
        parse_size(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (3 * 2**19, "1.5 MiB"), (2**40, "1 TiB")],
)
def test_format(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text
    assert parse_size(text) == nbytes
