"""Pools of two components whose pages differ in size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstrata.staging import PinnedHostBufferPool, StagingSettings

PAGE_BYTES = {"kv": 5000, "index": 96}
STRIDE = 8192 + 4096

MakePool = Callable[..., PinnedHostBufferPool]


def pool_of(pages: int, **settings: Any) -> PinnedHostBufferPool:
    return PinnedHostBufferPool(1, PAGE_BYTES, StagingSettings(pages * STRIDE, **settings))


@pytest.fixture
def make_pool() -> Iterator[MakePool]:
    """`make_pool(pages, load_reserve=…, backend_cap=…)`; closed at the end."""
    made: list[PinnedHostBufferPool] = []

    def make(pages: int, **settings: Any) -> PinnedHostBufferPool:
        made.append(pool_of(pages, **settings))
        return made[-1]

    yield make
    for pool in made:
        pool.close()
