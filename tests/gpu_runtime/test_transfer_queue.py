"""`CopyQueue`: urgent copies first, a bounded number on the device, nothing lost at the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import IntegrityError
from kvstrata.gpu_runtime import ComponentPool, ComponentSpec, CpuDevice, Timeline
from kvstrata.gpu_runtime.base import Event
from kvstrata.gpu_runtime.copy_queue import LEAST, MOST, MOST_BYTES, CopyPriority, CopyQueue, Slice
from kvstrata.gpu_runtime.device_pages import PageCopy
from kvstrata.gpu_runtime.transfers import CopyQueues, CopyResult, chunk_pages, slices_of


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(Timeline())
    yield device
    assert device.close(5.0)


class Ran:
    """What ran, in order; the first slice waits until it is let go."""

    def __init__(self, nbytes: int = 1) -> None:
        self.nbytes = nbytes
        self.names: list[str] = []
        self.gate = threading.Event()

    def slices(self, name: str, count: int) -> list[Slice]:
        return [Slice(lambda i=i: self._run(f"{name}{i}"), self.nbytes) for i in range(count)]  # type: ignore[misc]

    def _run(self, name: str) -> None:
        assert self.gate.wait(10.0)
        self.names.append(name)


@pytest.mark.parametrize(
    ("nbytes", "depth"),
    [(1, MOST), (MOST_BYTES // 4, 4), (MOST_BYTES // 2 + 1, LEAST), (2 * MOST_BYTES, LEAST)],
)
def test_an_urgent_copy_overtakes_at_the_border_of_a_slice(
    device: CpuDevice, nbytes: int, depth: int
) -> None:
    """What is on the device goes on, a few large slices or more small ones; of the rest the restore
    is first, then in order."""
    queue, ran = CopyQueue(device.h2d), Ran(nbytes)
    (slow,) = queue.add([ran.slices("p", depth + 3)], CopyPriority.PREFETCH)
    (next_one,) = queue.add([ran.slices("q", 1)], CopyPriority.PREFETCH)
    (urgent,) = queue.add([ran.slices("r", 2)], CopyPriority.RESTORE)
    assert queue.queued == 3
    queue.check_integrity()
    ran.gate.set()
    for event in (slow, next_one, urgent):
        assert event.wait(10.0)
    first = [f"p{i}" for i in range(depth)]
    assert ran.names == [*first, "r0", "r1", *(f"p{i}" for i in range(depth, depth + 3)), "q0"]
    assert queue.queued == 0
    queue.check_integrity()


@pytest.mark.parametrize("out", [True, False])
def test_copies_go_by_the_priority_that_they_are_given(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch, out: bool
) -> None:
    pool = ComponentPool(ComponentSpec("kv", 1, 1, 8, "float16"), 40, 4, torch.device("cpu"))
    host, gate, moved = np.zeros((40, pool.page_bytes), np.uint8), threading.Event(), list[int]()

    def copy(some: PageCopy) -> None:
        assert gate.wait(10.0)
        moved.extend(some.pages.tolist())

    for way in ("copy_in", "copy_out"):
        monkeypatch.setattr(device, way, copy)
    monkeypatch.setattr(device, "copy_slice_bytes", pool.page_bytes)
    queues, ends = CopyQueues(device), list[Event]()
    for first, priority in zip((0, 20, 30), reversed(CopyPriority), strict=True):
        pages = np.arange(first, first + (20 if first == 0 else 3))
        ends += queues.add([[PageCopy(pool, pages, host, pages)]], priority, CopyResult(), out=out)
    gate.set()
    assert all(event.wait(10.0) for event in ends)
    assert moved == [*range(MOST), 30, 31, 32, 20, 21, 22, *range(MOST, 20)]


@pytest.mark.parametrize("first", [1, MOST_BYTES // 2])
def test_a_slice_that_is_too_large_beside_others_waits_for_them(
    device: CpuDevice, first: int
) -> None:
    queue, ran = CopyQueue(device.h2d), Ran(first)
    small = ran.slices("a", 3)
    ran.nbytes = MOST_BYTES
    (event,) = queue.add([[*small[:2], *ran.slices("b", 2)]], CopyPriority.PREFETCH)
    assert (queue._under_way, queue._bytes) == (LEAST, 2 * first)
    queue.check_integrity()
    ran.gate.set()
    assert event.wait(10.0)
    assert ran.names == ["a0", "a1", "b0", "b1"]
    queue.check_integrity()


def test_an_event_can_be_waited_for_before_it_is_recorded(device: CpuDevice) -> None:
    queue, ran, behind = CopyQueue(device.h2d), Ran(), threading.Event()
    events = queue.add([ran.slices("a", MOST), ran.slices("b", 2)], CopyPriority.PREFETCH)
    device.compute.wait_event(events[1])
    device.compute.enqueue(behind.set)
    assert not events[0].query()
    assert not behind.is_set()
    ran.gate.set()
    assert behind.wait(10.0)
    assert all(event.query() for event in events)
    assert ran.names == [*(f"a{i}" for i in range(MOST)), "b0", "b1"]


def test_groups_complete_one_after_the_other(device: CpuDevice) -> None:
    queue, ran, heard = CopyQueue(device.h2d), Ran(), []
    events = queue.add([ran.slices(name, 3) for name in "abc"], CopyPriority.RESTORE)
    for name, event in zip("abc", events, strict=True):
        event.on_complete(lambda name=name: heard.append((name, len(ran.names))))  # type: ignore[misc]
    ran.gate.set()
    assert events[-1].wait(10.0)
    assert [name for name, _ in heard] == ["a", "b", "c"]
    assert all(count >= 3 * i for i, (_, count) in enumerate(heard, 1))


def test_what_is_broken_is_noticed(device: CpuDevice) -> None:
    for attribute, value, text in (
        ("_under_way", 0, "wait with room"),
        ("_under_way", -1, "wait with room"),
        ("_under_way", MOST + 1, "on the device"),
        ("_bytes", -1, "bytes"),
        ("_bytes", 0, "bytes"),
    ):
        queue, ran = CopyQueue(device.h2d), Ran()
        queue.add([ran.slices("a", MOST + 1)], CopyPriority.PREFETCH)
        queue.check_integrity()
        right = getattr(queue, attribute)
        setattr(queue, attribute, value)
        with pytest.raises(IntegrityError, match=text):
            queue.check_integrity()
        setattr(queue, attribute, right)
        ran.gate.set()


def test_flush_enqueues_all_so_that_streams_can_end(device: CpuDevice) -> None:
    queue, ran = CopyQueue(device.d2h), Ran()
    (event,) = queue.add([ran.slices("a", 50)], CopyPriority.WRITE_BACK)
    queue.flush()
    assert queue.queued == 0
    (later,) = queue.add([ran.slices("b", 20)], CopyPriority.WRITE_BACK)
    assert queue.queued == 0
    ran.gate.set()
    assert event.wait(10.0)
    assert later.wait(10.0)
    assert len(ran.names) == 70


def test_slices_that_end_at_once_do_not_nest(device: CpuDevice) -> None:
    """A thousand slices that have ended before anybody looks: a loop, not a recursion."""

    class Instant:
        name = "instant"

        def __init__(self) -> None:
            self.ran = 0

        def new_event(self) -> Any:
            return device.fence()

        def enqueue(self, work: Any, nbytes: int = 0) -> None:
            del nbytes
            work()

        def record(self, event: Any = None) -> Any:
            return event or device.fence()

    ran = Ran()
    ran.gate.set()
    queue = CopyQueue(Instant())  # type: ignore[arg-type]
    queue.add([ran.slices("a", 1000)], CopyPriority.WRITE_BACK)
    assert len(ran.names) == 1000


@given(count=st.integers(1, 400), most=st.integers(1, 1 << 14), seed=st.integers(0, 99))
def test_slices_cover_a_copy_once_in_the_order_of_the_host(
    count: int, most: int, seed: int
) -> None:
    pool = ComponentPool(ComponentSpec("kv", 1, 1, 8, "uint8"), 400, 2, torch.device("cpu"))
    rng = np.random.default_rng(seed)
    pages, slots = rng.permutation(400)[:count], rng.permutation(400)[:count]
    parts = slices_of(PageCopy(pool, pages, np.zeros((400, 64), np.uint8), slots), most)
    pairs = [pair for p in parts for pair in zip(p.slots.tolist(), p.pages.tolist(), strict=True)]
    assert pairs == sorted(zip(slots.tolist(), pages.tolist(), strict=True))
    assert all(part.nbytes <= max(most, pool.page_bytes) for part in parts)
    assert len({part.nbytes for part in parts[:-1]}) <= 1
    assert [part.is_followed for part in parts] == [True] * (len(parts) - 1) + [False]


@pytest.mark.parametrize(
    ("page_bytes", "pages"),
    [(1, 128), (65536, 128), (65537, 127), (131_072, 64), (2 << 20, 64), (1 << 30, 64)],
)
def test_pages_of_a_storage_job(page_bytes: int, pages: int) -> None:
    assert chunk_pages(page_bytes) == pages
