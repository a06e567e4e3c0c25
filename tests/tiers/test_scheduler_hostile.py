"""Control's whole scheduler suite once more, on runtimes that keep to the contract and to nothing
else: page numbers and stamps without any order, freed pages that come back at once, last, or at
random, and a device that reorders whatever events leave free."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstrata.gpu_runtime.sim import SimDevice, poison, tear
from kvstrata.gpu_runtime.turns import Turns, away
from kvstrata.staging import Pages, PageTable

KINDS = ("hostile", "simulated")


def _tests() -> Iterator[tuple[str, Any]]:
    """The tests of the scheduler, as functions of their own."""
    for name in ("test_scheduler", "test_scheduler_faults", "test_cache_edges"):
        path = Path(__file__).with_name(f"{name}.py")
        spec = importlib.util.spec_from_file_location(f"hostile_{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for key, value in vars(module).items():
            if key.startswith("test_"):
                yield key, value


globals().update(_tests())


@pytest.fixture
def background_turns() -> Iterator[list[Turns]]:
    """Ended when the engines that use them were closed."""
    turns: list[Turns] = []
    yield turns
    for each in turns:
        each.end()


@pytest.fixture(params=KINDS)
def make_small(
    background_turns: list[Turns], make_small: Any, request: pytest.FixtureRequest, seed: int
) -> Callable[..., Any]:
    """`make_small` of the other modules, with another runtime each time."""
    rng = random.Random(f"{request.node.name} {seed}")

    def hostile(**options: Any) -> Any:
        small = make_small(**options, runtime_options=identities(rng))
        order = rng.choice([None, last, at_random])
        print(f"freed pages are used again: {order.__name__ if order else 'at once'}")
        for tables in (small.runtime.core.tables, small.runtime.core.staging.tables):
            for table in tables.values():
                table.on_free = None if order is None else partial(order, table, rng)
        return small

    def simulated(**options: Any) -> Any:
        turns = Turns(rng.getrandbits(32), background=True)
        background_turns.append(turns)
        print(f"seed of the turns: {turns.seed}")
        small = make_small(
            **options,
            runtime_options=identities(rng),
            make_device=lambda timeline: SimDevice(timeline, turns),
        )
        poison(small.runtime.core)
        tear(small.runtime.core)
        wait = small.runner.gate.pass_through
        small.runner.gate.pass_through = lambda: away(wait)
        return small

    return {"hostile": hostile, "simulated": simulated}[request.param]


def identities(rng: random.Random) -> dict[str, Any]:
    """Stamps and page numbers without an order."""
    return {
        "runtime_id": rng.getrandbits(63),
        "stamp_source": stamps(rng),
        "page_order": lambda n: np.asarray(rng.sample(range(n), n), np.int64),
    }


def stamps(rng: random.Random) -> Iterator[int]:
    seen = {0}
    while True:
        stamp = rng.getrandbits(63)
        if stamp not in seen:
            seen.add(stamp)
            yield stamp


def last(table: PageTable, rng: random.Random, pages: Pages) -> None:
    """Freed pages are on top of the stack; they go below all others."""
    del rng
    stack = table._free_stack[: table.free]
    stack[:] = np.roll(stack, len(pages))


def at_random(table: PageTable, rng: random.Random, pages: Pages) -> None:
    del pages
    stack = table._free_stack[: table.free]
    stack[:] = stack[rng.sample(range(len(stack)), len(stack))]
