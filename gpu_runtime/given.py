"""Checks of what an engine gives to `AdoptedPools`. What is wrong is an InputError or ConfigError
that names it, before anything is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from kvstrata.errors import ConfigError, InputError, Where
from kvstrata.gpu_runtime.device_pages import DevicePages
from kvstrata.staging import Pages

CHUNK_ALIGNMENT = 16
"""Bytes that a kernel loads at once."""

Pools = Mapping[str, DevicePages]


def check_pools(pools: object, device: torch.device) -> None:
    """Raises ConfigError."""
    if not isinstance(pools, Mapping) or not pools:
        raise ConfigError("no pools", remedy="adopt one at least", where=Where(key="pools"))
    for name, memory in pools.items():
        if not isinstance(memory, DevicePages):
            raise ConfigError(
                f"pool {name!r} is a {type(memory).__name__}",
                remedy="give what `adopt` returns for its tensors",
                where=Where(key=name),
            )
        if memory.device != device:
            raise ConfigError(
                f"pool {name!r} is on {memory.device}, not on {device}",
                remedy="give each device its own pools",
                where=Where(key=name),
            )
    for (name, one), (other_name, other) in combinations(pools.items(), 2):
        if one.layout.shares_bytes(other.layout):
            raise ConfigError(
                f"pools {name!r} and {other_name!r} share memory",
                remedy="adopt each tensor once",
                where=Where(key=other_name),
            )


def check_host(
    name: str,
    host: object,
    chunk_pages: object,
    pools: Pools,
    pinned: Mapping[str, npt.NDArray[np.uint8]],
) -> None:
    """Host pages of pool `name` that are to be pinned. Raises ConfigError."""
    where = Where(key=str(name))
    if name not in pools or name in pinned:
        raise ConfigError(
            f"pool {name!r} is " + ("pinned" if name in pinned else "not there"),
            remedy=f"pin each of {sorted(pools)} once",
            where=where,
        )
    memory = pools[name]
    if not isinstance(host, np.ndarray) or not _can_be_pinned(host, memory):
        found = (
            f"{host.dtype} {host.shape}" if isinstance(host, np.ndarray) else type(host).__name__
        )
        raise ConfigError(
            f"host pages of {name!r} must be a contiguous and writable numpy array uint8 "
            f"[pages, stride], stride at least {memory.page_bytes} and a multiple of "
            f"{memory.layout.word_bytes}, not {found}",
            remedy="allocate them with a stride of a page's bytes, rounded up to 4096; of a tensor "
            "on the host, give tensor.numpy()",
            where=where,
        )
    for other_name, other in pinned.items():
        if np.may_share_memory(host, other):
            raise ConfigError(
                f"host pages of {name!r} are those of {other_name!r} as well",
                remedy="allocate memory for each pool",
                where=where,
            )
    if chunk_pages is not None and (not is_whole(chunk_pages) or chunk_pages < 1):
        raise ConfigError(
            f"chunks of {chunk_pages} pages",
            remedy="register at least one page at a time",
            where=where,
        )


def check_names(what: str, given: object, pools: Pools) -> None:
    """`given` has something for each of the pools, and for nothing else. Raises InputError."""
    if not isinstance(given, Mapping):
        raise InputError(
            f"{what} are a {type(given).__name__}, not one for each pool",
            remedy=f"name the pool: {what}={{{next(iter(pools))!r}: ...}}",
            where=Where(key=what),
        )
    missing = (name for name in pools if name not in given)
    for name in (*missing, *(name for name in given if name not in pools)):
        wrong = f"no {what} of pool {name!r}" if name in pools else f"there is no pool {name!r}"
        raise InputError(
            wrong,
            remedy=f"give {what} of each pool, and of no other: {sorted(pools)}",
            where=Where(key=what),
        )


def check_pinned(pinned: Mapping[str, object], pools: Pools) -> None:
    """Raises InputError."""
    for name in pools:
        if name not in pinned:
            raise InputError(
                f"no pinned host memory of pool {name!r}",
                remedy="pin each pool once, before the first copy",
                where=Where(key=name),
            )


def check_chunks(chunks: Mapping[str, object], pools: Pools) -> None:
    """Staging on the device, one of each pool. Raises InputError."""
    check_names("chunks", chunks, pools)
    taken: list[tuple[int, int]] = []
    for name, memory in pools.items():
        chunk = chunks[name]
        if not isinstance(chunk, torch.Tensor):
            found = type(chunk).__name__
        elif not _can_stage(chunk, memory):
            strides = chunk.stride() if chunk.layout is torch.strided else chunk.layout
            found = f"{chunk.dtype} {tuple(chunk.shape)} on {chunk.device} (strides {strides})"
        elif _is_in_use(span := _span(chunk), taken, pools):
            found = "memory of a pool or of another chunk"
        else:
            taken.append(span)
            continue
        raise InputError(
            f"a chunk of {name!r} must be a contiguous tensor uint8 [pages, stride] on "
            f"{memory.device}, stride at least {memory.page_bytes}, address and stride "
            f"multiples of {CHUNK_ALIGNMENT}, not {found}",
            remedy="allocate one for every pool, with the stride rounded up to 4096",
            where=Where(key=name),
        )


def page_numbers(what: str, pool: str, given: object, limit: int, *, are_written: bool) -> Pages:
    """`given` as int64 of our own: of fewer bits, an address that is made of them overflows; and
    the engine may write into its own at once. Raises InputError."""
    try:
        numbers = np.asarray(given)
    except (ValueError, TypeError, RuntimeError) as exc:  # of different lengths, or on a GPU
        wrong = f"are no array on the host: {exc}"
    else:
        wrong = _wrong_numbers(numbers, limit, are_written=are_written)
    if wrong:
        raise InputError(
            f"{what} of {pool!r} {wrong}",
            remedy="name those that are there, by integers, and what a copy writes once",
            where=Where(key=what),
        )
    return np.array(numbers, np.int64)


def check_counts(name: str, pages: Pages, slots: Pages, groups: int, memory: DevicePages) -> None:
    """Raises InputError."""
    if len(pages) != len(slots) or not 1 <= groups <= memory.layout.pieces:
        raise InputError(
            f"{len(pages)} pages, {len(slots)} host pages, {groups} groups of "
            f"{memory.layout.pieces} pieces",
            remedy="as many host pages as pages, and at most as many groups as pieces",
            where=Where(key=name),
        )


def is_whole(number: object) -> TypeGuard[int]:
    return isinstance(number, int) and not isinstance(number, bool)


def _wrong_numbers(numbers: npt.NDArray[Any], limit: int, *, are_written: bool) -> str:
    """ "" if nothing is."""
    if numbers.ndim != 1 or not len(numbers):
        return f"have shape {numbers.shape}, not one axis with one number at least"
    if numbers.dtype.kind not in "iu":
        return f"are {numbers.dtype}, not integers"
    beyond = numbers[(numbers < 0) | (numbers >= limit)]
    if len(beyond):
        return f"name {beyond[0]}; there are 0 to {limit - 1}"
    if are_written:
        names, counts = np.unique(numbers, return_counts=True)
        if counts.max() > 1:
            return f"name {names[counts > 1][0]}, which is written twice"
    return ""


def _can_be_pinned(host: npt.NDArray[Any], memory: DevicePages) -> bool:
    if host.dtype != np.uint8 or host.ndim != 2 or 0 in host.shape:
        return False
    stride = host.shape[1]
    fits = stride >= memory.page_bytes and stride % memory.layout.word_bytes == 0
    return fits and host.flags.c_contiguous and host.flags.writeable


def _can_stage(chunk: torch.Tensor, memory: DevicePages) -> bool:
    if chunk.layout is not torch.strided or chunk.dim() != 2 or chunk.is_neg():
        return False
    starts = (chunk.data_ptr(), chunk.storage_offset(), chunk.shape[1])
    return (
        (chunk.dtype, chunk.device) == (torch.uint8, memory.device)
        and chunk.stride() == (chunk.shape[1], 1)
        and len(chunk) > 0
        and chunk.shape[1] >= memory.page_bytes
        and not any(start % CHUNK_ALIGNMENT for start in starts)
    )


def _span(chunk: torch.Tensor) -> tuple[int, int]:
    """Addresses of its first byte and behind its last."""
    return chunk.data_ptr(), chunk.data_ptr() + chunk.numel()


def _is_in_use(span: tuple[int, int], taken: Sequence[tuple[int, int]], pools: Pools) -> bool:
    return any(begin < span[1] and span[0] < end for begin, end in taken) or any(
        memory.layout.overlaps(*span) for memory in pools.values()
    )
