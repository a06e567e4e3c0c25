"""`CudaCopies` without a GPU: which bytes it names, in what order, and what a failure leaves.

The driver is one that copies at once; the kernel is torch's. On a GPU: `test_transfer_cuda.py`.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvstrata.gpu_runtime import adopt, cuda_copies, cuda_driver
from kvstrata.gpu_runtime.cuda_chunks import HEADER
from kvstrata.gpu_runtime.cuda_copies import CudaCopies
from kvstrata.gpu_runtime.device_pages import DevicePages, PageCopy
from kvstrata.gpu_runtime.hurry import Hurry
from kvstrata.gpu_runtime.transfers import slices_of

PIECES = [1, 7, 8, 42, 80, 4096, 65536, 70000]


class Event:
    """Notes who records it and who waits for it."""

    log: list[tuple[str, str]]

    def __init__(self, stream: Any) -> None:
        self.record(stream)

    def record(self, stream: Any) -> None:
        self._after = stream.name

    def hold_back(self, stream: Any) -> None:
        self.log.append((stream.name, self._after))

    def synchronize(self) -> None:
        return

    passed = True
    asked: Event | None = None
    slept: list[float]

    def has_passed(self) -> bool:
        """Not at once, unless all have; the host sleeps before it asks for the same again."""
        if self.passed or Event.asked is self:
            Event.asked = None
            return True
        Event.asked = self
        return False

    @staticmethod
    def sleep(seconds: float) -> None:
        assert Event.asked is not None
        Event.slept.append(seconds)
        Event.log.append(("host", Event.asked._after))


class Driver:
    """Copies at once, and checks that no copy crosses memory that was registered apart."""

    CudaCopyError = cuda_driver.CudaCopyError

    def __init__(self) -> None:
        self.regions: list[tuple[int, int]] = []
        self.calls: list[int] = []
        """Bytes of each."""
        self.has_batches = lambda: True
        self.no_collection = nullcontext

    def copy_batch(self, targets: Any, sources: Any, nbytes: Any, *_: Any, **__: Any) -> None:
        for numbers in (targets, sources, nbytes):
            assert numbers.dtype == np.int64
            assert numbers.flags.c_contiguous
            assert len(numbers) == len(nbytes) > 0
        self.calls.append(int(nbytes.sum()))
        for target, source, n in zip(
            *(a.tolist() for a in (targets, sources, nbytes)), strict=True
        ):
            for begin, end in self.regions:
                assert all(a + n <= end for a in (target, source) if begin <= a < end), "it crosses"
            ctypes.memmove(target, source, n)


@pytest.fixture
def driver(fake_torch: Any, stand_in: Callable[[dict[str, Any]], None]) -> Driver:
    Event.log, Event.slept, Event.asked = [], [], None
    driver = Driver()
    stand_in({
        "torch": fake_torch, "ReusedEvent": Event, "HAS_TRITON": False, "cuda_driver": driver,
        "DIRECT_BYTES": PIECES[-2], "compiled": lambda: None,
        "time": SimpleNamespace(sleep=Event.sleep),
    })  # fmt: skip
    return driver


def made(*, out: bool, chunk_bytes: int = 1 << 20) -> CudaCopies:
    stream = SimpleNamespace(name="owner", cuda_stream=0)
    owner: Any = SimpleNamespace(cuda=stream, followers=[], hurry=Hurry())
    return CudaCopies(torch.device("cpu"), owner, out=out, chunk_bytes=chunk_bytes)


def pool(rng: np.random.Generator, layers: int, pages: int, piece: int) -> tuple[DevicePages, Any]:
    """Pages, and their bytes: uint8 [layers, pages, piece]."""
    raw = rng.integers(0, 256, (layers, pages, piece), np.uint8)
    return adopt([torch.from_numpy(layer) for layer in raw], page_axis=0), raw


def after(host: Any, device: Any, part: slice, moved: tuple[Any, Any], *, out: bool) -> Any:
    """Bytes of host pages and of `device`, as `pool` gives them, when pages and slots `moved`."""
    (pages, slots), (layers, _, piece) = moved, device.shape
    want_host, want_device = host.copy(), device.copy()
    for j in range(layers)[part]:
        here = (slots, slice(j * piece, (j + 1) * piece))
        if out:
            want_host[here] = device[j][pages]
        else:
            want_device[j][pages] = host[here]
    return want_host, want_device


@pytest.mark.parametrize("part_of_ten", range(10))
def test_every_byte_goes_where_it_should(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, seed: int, part_of_ten: int
) -> None:
    """Random sizes, strides, regions, parts and chunks, by batches or one by one, to the host or to
    staging on the device: exactly the bytes that were named move, and no others."""
    rng = np.random.default_rng((seed, part_of_ten))
    for _ in range(30):
        layers, pages, piece = rng.integers(1, 5), rng.integers(1, 40), rng.choice(PIECES)
        memory, device = pool(rng, int(layers), int(pages), int(piece))
        slots, stride = int(rng.integers(1, 50)), memory.page_bytes
        stride += int(rng.choice([0, 64, 13, -stride % 16]))
        host = rng.integers(0, 256, (slots, stride), np.uint8)
        border = memory.host_chunk_pages = int(rng.integers(1, slots + 1))
        at = host.ctypes.data
        driver.regions = [
            (at + i * stride, at + min(i + border, slots) * stride) for i in range(0, slots, border)
        ]
        monkeypatch.setattr(cuda_copies, "ORDER_PAGES", int(rng.choice([1, 2, 2048])))
        for name in ("FIRST_BYTES", "CALL_BYTES", "FIRST_CHUNK_BYTES", "LAST_CHUNK_BYTES"):
            monkeypatch.setattr(cuda_copies, name, int(rng.choice([1, 100_000, 8 << 20])))
        out, chunk = bool(rng.integers(2)), memory.page_bytes * int(rng.integers(1, 9))
        copies = made(out=out, chunk_bytes=chunk + int(rng.integers(0, 5)))
        n = int(rng.integers(1, min(pages, slots) + 1))
        numbers = rng.permutation(int(pages))[:n]
        places = rng.permutation(slots)[:n] if rng.integers(2) else np.arange(slots)[-n:]
        begin = int(rng.integers(layers))
        part = slice(begin, int(rng.integers(begin + 1, layers + 1)))
        want = after(host, device, part, (numbers, places), out=out)
        is_chunk = stride % 16 == 0 and rng.integers(2)
        there: Any = torch.from_numpy(host) if is_chunk else host
        copy = PageCopy(memory, numbers, there, places, part)
        for one in slices_of(copy, int(rng.choice([1, memory.page_bytes * 3, 1 << 30]))):
            copies.copy(one)
        assert copies._late is None
        assert (host == want[0]).all()
        assert (device == want[1]).all()


@pytest.mark.parametrize("in_a_hurry", [False, True])
@pytest.mark.parametrize("piece", [64, 65536])
@pytest.mark.parametrize("out", [True, False])
def test_who_waits_for_whom(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, out: bool, piece: int, in_a_hurry: bool
) -> None:
    """Chunks are handed on, and the stream is behind all of it, also when a copy fails. Kernels do
    not wait on the GPU unless somebody is in a hurry, but for the last one into the device."""
    rng = np.random.default_rng(1)
    memory, _ = pool(rng, 2, 8, piece)
    host = np.zeros((8, memory.page_bytes), np.uint8)
    monkeypatch.setattr(Event, "passed", False)
    copies = made(out=out, chunk_bytes=2 * memory.page_bytes)
    assert [s.name for s in copies.streams] == ["owner", "follower"]
    assert copies.streams[1].priority == -1  # type: ignore[attr-defined]
    assert copies._owner.followers == [copies.streams[1]]
    copy = PageCopy(memory, np.arange(8), host, rng.permutation(8))
    with copies._owner.hurry if in_a_hurry else nullcontext():
        copies.copy(copy)
    free, full = ("follower", "owner"), ("owner", "follower")
    if piece == 65536:
        assert not Event.log
    elif out:  # the chunk is free again, then it is full; nobody else waits
        assert Event.log == [free if in_a_hurry else ("host", "owner"), full] * 4
    else:
        kernels = full if in_a_hurry else ("host", "follower")
        assert Event.log == [free] + [free, kernels] * 3 + [full]
    an_eighth = 2 * memory.page_bytes / 55e9 / 8
    assert all(seconds == pytest.approx(an_eighth) for seconds in Event.slept)

    def refuse(*_: Any, **__: Any) -> None:
        Event.log.clear()
        planted()

    driver.copy_batch = refuse  # type: ignore[method-assign]
    with pytest.raises(cuda_driver.CudaCopyError):
        copies.copy(copy)
    assert set(Event.log[-2:]) == {free, full}


def planted(*_: Any, **__: Any) -> None:
    raise cuda_driver.CudaCopyError("planted")


@pytest.mark.parametrize("idle", [True, False])
def test_calls_of_a_direct_copy(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, idle: bool
) -> None:
    """The first is short where nothing moves, the next twice as long; none is long."""
    memory, _ = pool(np.random.default_rng(1), 2, 8, 65536)
    for name, pieces in (("FIRST_BYTES", 2), ("CALL_BYTES", 5)):
        monkeypatch.setattr(cuda_copies, name, pieces * 65536)
    monkeypatch.setattr(Event, "passed", idle)
    copies, host = made(out=True), np.zeros((8, memory.page_bytes), np.uint8)
    copies.copy(PageCopy(memory, np.arange(8), host, np.arange(8)))
    want = [2, 4, 5, 5] if idle else [5, 5, 5, 1]
    assert driver.calls == [n * 65536 for n in want]


@pytest.mark.parametrize("is_followed", [True, False])
@pytest.mark.parametrize("idle", [True, False])
@pytest.mark.parametrize("out", [True, False])
def test_chunks_of_a_copy_are_about_as_large(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, out: bool, idle: bool, is_followed: bool
) -> None:
    """But the first is short where the bus waits for it to be gathered, and the last into the
    device, where nothing follows."""
    memory, _ = pool(np.random.default_rng(1), 2, 9, 64)
    monkeypatch.setattr(cuda_copies, "FIRST_CHUNK_BYTES", memory.page_bytes)
    monkeypatch.setattr(cuda_copies, "LAST_CHUNK_BYTES", 2 * memory.page_bytes)
    monkeypatch.setattr(Event, "passed", idle)
    copies = made(out=out, chunk_bytes=4 * memory.page_bytes)
    host = np.zeros((9, memory.page_bytes), np.uint8)
    copies.copy(PageCopy(memory, np.arange(9), host, np.arange(9), is_followed=is_followed))
    short = (1, 4, 4) if out else (4, 3, 2)
    want = short if (idle if out else not is_followed) else (3, 3, 3)
    assert driver.calls == [n * memory.page_bytes for n in want]


@pytest.fixture
def capture(
    driver: Driver, fake_torch: Any, stand_in: Callable[[dict[str, Any]], None]
) -> Callable[[str], None]:
    """Kernels are names: what is captured now is that of the pool that was named last."""
    now = [""]

    class Graph:
        def __init__(self, *, keep_graph: bool) -> None:
            assert keep_graph
            self.name = now[0]

        def raw_cuda_graph(self) -> str:
            return self.name

    fake_torch.cuda.CUDAGraph = Graph
    captured: list[str] = []
    fake_torch.captured = captured
    for name in ("fetch_order", "move_pieces"):
        stand_in({name: lambda *_, name=name, **__: captured.append(name)})
    stand_in({"HAS_TRITON": True})
    return lambda name: now.__setitem__(0, name)


@pytest.mark.parametrize("part_of_ten", range(10))
def test_orders_say_where_the_bytes_are(
    driver: Driver,
    capture: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    part_of_ten: int,
) -> None:
    """A kernel that does byte by byte what its order says: random pools, parts, chunks of ours and
    staging on the device, with several orders a copy."""
    capture("kernel")
    rng = np.random.default_rng((seed, part_of_ten))
    for _ in range(20):
        monkeypatch.setattr(cuda_copies, "ORDER_PAGES", int(rng.choice([1, 3, 2048])))
        out, layers = bool(rng.integers(2)), int(rng.integers(1, 5))
        pages = int(rng.integers(1, 30))
        memory, device = pool(rng, layers, pages, int(rng.choice([16, 80, 4096])))
        slots = pages + int(rng.integers(20))
        host = rng.integers(0, 256, (slots, memory.page_bytes + 16), np.uint8)
        staged = torch.from_numpy(host) if rng.integers(2) else host
        copies = made(out=out, chunk_bytes=memory.page_bytes * int(rng.integers(1, 5)))
        driver.launch = partial(run_order, copies)  # type: ignore[attr-defined]
        driver.instantiate = count_from(0)  # type: ignore[attr-defined]
        n, begin = int(rng.integers(1, pages + 1)), int(rng.integers(layers))
        part = slice(begin, int(rng.integers(begin + 1, layers + 1)))
        numbers, places = rng.permutation(pages)[:n], rng.permutation(slots)[:n]
        want = after(host, device, part, (numbers, places), out=out)
        copies.copy(PageCopy(memory, numbers, staged, places, part))
        assert (host == want[0]).all()
        assert (device == want[1]).all()


def count_from(first: int) -> Callable[[object], int]:
    numbers = itertools.count(first)
    return lambda _: next(numbers)


def run_order(copies: CudaCopies, number: int, _: object) -> None:
    """What `gather._move` does with the order of step `number`."""
    step, (memory, starts) = copies._steps[number], copies._known[0]
    there = step.pinned if copies._out else step.order  # the kernel fetches it, or the copy did
    layout, order = memory.layout, there.tolist()
    count, first, pieces, page_words, at, has_places = order[:6]
    names = order[HEADER:]
    word, base = layout.word_bytes, memory.first_word.data_ptr()
    for i in range(count):
        place = names[count + i] if has_places else i
        for j in range(pieces):
            in_pool = base + int(starts[first + j]) * word + names[i] * layout.page_stride
            in_chunk = step.address + (at + place * page_words) * word + j * layout.piece_bytes
            target, source = (in_chunk, in_pool) if copies._out else (in_pool, in_chunk)
            ctypes.memmove(target, source, layout.piece_bytes)


@pytest.mark.parametrize("out", [True, False])
def test_orders_are_fetched_where_no_copy_brings_them(
    driver: Any, capture: Callable[[str], None], fake_torch: Any, out: bool
) -> None:
    capture("kernel")
    driver.instantiate = count_from(0)
    made(out=out).prepare(pool(np.random.default_rng(1), 2, 8, 64)[0])
    kernels = ["fetch_order"] * out + ["move_pieces"]
    assert fake_torch.captured == kernels * (1 + cuda_copies.RING)


def test_a_capture_that_fails_leaves_nothing(driver: Any, capture: Callable[[str], None]) -> None:
    """Else chunks of one pool would be moved by another pool's kernel."""
    rng, left = np.random.default_rng(1), random.Random(1).randrange(3, 12)
    alive: list[str] = []

    def instantiate(name: str) -> str:
        nonlocal left
        left -= 1
        if left == 0:
            raise cuda_driver.CudaCopyError("planted")
        alive.append(name)
        return name

    driver.instantiate, driver.destroy = instantiate, alive.remove
    copies, (first, _), (second, _) = made(out=True), pool(rng, 2, 8, 64), pool(rng, 2, 8, 64)
    capture("first")
    with pytest.raises(cuda_driver.CudaCopyError):
        copies.prepare(first)
    assert not alive
    capture("second")
    copies.prepare(second)
    capture("first")
    copies.prepare(first)
    for step in copies._steps:
        assert step.graphs == ["second", "first"]

    def refuse(name: str) -> None:
        alive.remove(name)
        raise cuda_driver.CudaCopyError("planted")

    driver.destroy = refuse
    copies.close()
    assert not alive
