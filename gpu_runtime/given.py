"""Checks of what an engine gives to a `TransferInterface`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstrata.errors import InputError, Where
from kvstrata.gpu_runtime.device_pages import DevicePages
from kvstrata.staging import Pages

CHUNK_ALIGNMENT = 16
"""Bytes that a kernel loads at once."""


def page_numbers(what: str, given: Pages, limit: int, are_written: bool) -> Pages:
    """`given` as int64 of our own: of fewer bits, an address that is made of them overflows."""
    numbers: npt.NDArray[Any]
    try:
        numbers = np.asarray(given)
    except ValueError:  # lists of different lengths
        numbers = np.empty(0, np.bool_)
    good = numbers.ndim == 1 and len(numbers) > 0 and numbers.dtype.kind in "iu"
    if not good or numbers.min() < 0 or numbers.max() >= limit:
        raise InputError(
            f"{what} are not integers, all between 0 and {limit - 1}",
            remedy="name pages that the pool has, and one at least",
            where=Where(key="pages"),
        )
    if are_written and len(np.unique(numbers)) != len(numbers):
        raise InputError(
            f"{what} name one that is written twice",
            remedy="name each page that a copy writes once",
            where=Where(key="pages"),
        )
    return np.array(numbers, np.int64)


def can_stage(chunk: torch.Tensor, memory: DevicePages) -> bool:
    if chunk.layout is not torch.strided or chunk.dim() != 2 or chunk.is_neg():
        return False
    starts = (chunk.data_ptr(), chunk.storage_offset(), chunk.shape[1])
    return (
        (chunk.dtype, chunk.device) == (torch.uint8, memory.device)
        and chunk.stride() == (chunk.shape[1], 1)
        and chunk.shape[1] >= memory.page_bytes
        and not any(start % CHUNK_ALIGNMENT for start in starts)
    )


def span_of(chunk: torch.Tensor) -> tuple[int, int]:
    """Addresses of its first byte and behind its last."""
    return chunk.data_ptr(), chunk.data_ptr() + chunk.numel()
