"""The order that `CudaCopies` makes on a GPU, without one: vector clocks over its streams.

Each operation knows what happens before it: what was on its stream, and behind the events that the
stream was made to wait for. Two uses of a chunk or an order of which one writes must be in order,
whatever copies come, and wherever a call of the driver fails. With a GPU:
`tests/tiers/test_cuda_order.py`.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvstrata.gpu_runtime import adopt, cuda_copies
from kvstrata.gpu_runtime.cuda_chunks import Step
from kvstrata.gpu_runtime.cuda_copies import CudaCopies
from kvstrata.gpu_runtime.cuda_driver import CudaCopyError, check
from kvstrata.gpu_runtime.device_pages import DevicePages, PageCopy

write_order = Step.write_order
Clock = dict[str, int]
"""Stream → its last operation that has ended."""
CHUNK_BYTES, PAGES = 704, 40


def join(into: Clock, other: Clock) -> None:
    for stream, number in other.items():
        into[stream] = max(into.get(stream, 0), number)


class NowAndThen:
    """Somebody is in a hurry, or nobody is."""

    def __init__(self, world: World) -> None:
        self.world = world

    def __bool__(self) -> bool:
        return bool(self.world.rng.integers(2))


class World:
    """What the copies of one `CudaCopies` do to streams and memory."""

    def __init__(self, seed: tuple[int, ...]) -> None:
        self.rng = np.random.default_rng(seed)
        self.clocks: dict[str, Clock] = {}
        self.host: Clock = {}
        """What the enqueuing thread has waited for."""
        self.uses: dict[tuple[str, str, bool], int] = {}
        """Memory on the device, stream, whether it writes → the last such operation."""
        self.orders: dict[int, tuple[str, int]] = {}
        """The last operation that reads the order of a step from the host's memory."""
        self.chunks: list[range] = []
        self.steps: list[Step] = []
        self.calls_left = 0
        """Until a call of the driver fails; 0: none does."""
        self.instantiated = 0
        self.owner: Any = SimpleNamespace(followers=[], hurry=NowAndThen(self))
        self.is_out = True

    def clock(self, stream: Any) -> Clock:
        return self.clocks.setdefault(stream.name, {})

    def call(self) -> None:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise CudaCopyError("planted")

    def run(self, stream: Any, uses: dict[str, bool]) -> tuple[str, int]:
        """One operation; `uses`: memory on the device, and whether it writes that."""
        clock = self.clock(stream)
        join(clock, self.host)
        number = clock[stream.name] = clock.get(stream.name, 0) + 1
        for memory, writes in uses.items():
            for (used, other, wrote), then in self.uses.items():
                in_order = clock.get(other, 0) >= then or used != memory or not (writes or wrote)
                assert in_order, f"{memory}: {stream.name} does not wait for {other}"
            self.uses[memory, stream.name, writes] = number
        return stream.name, number

    def write_order(self, step: Step, copy: PageCopy, **more: Any) -> Any:
        """By the host."""
        number = next(i for i, one in enumerate(self.steps) if one is step)
        stream, read = self.orders.get(number, ("", 0))
        assert self.host.get(stream, 0) >= read, "an order is written while it is read"
        return write_order(step, copy, **more)


@pytest.fixture
def world(
    seed: int, part_of_ten: int, fake_torch: Any, stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> World:
    world = World((seed, part_of_ten))
    world.owner.cuda = fake_torch.cuda.Stream(priority=-1)
    world.owner.cuda.name = "owner"

    class Event:
        def __init__(self, stream: Any) -> None:
            self.clock = dict(world.clock(stream))

        def record(self, stream: Any) -> None:
            world.call()
            self.clock = dict(world.clock(stream))

        def hold_back(self, stream: Any) -> None:
            world.call()
            join(world.clock(stream), self.clock)

        def synchronize(self) -> None:
            join(world.host, self.clock)

        def has_passed(self) -> bool:
            world.call()
            passed = bool(world.rng.integers(2))
            if passed:
                join(world.host, self.clock)
            return passed

    def copy_batch(targets: Any, sources: Any, nbytes: Any, stream: Any, **_: Any) -> None:
        uses = {
            f"chunk {i}": writes
            for addresses, writes in ((targets, True), (sources, False))
            for i, chunk in enumerate(world.chunks)
            if any(address in chunk for address in addresses.tolist())
        }
        brought = [i for i, s in enumerate(world.steps) if s.order.data_ptr() in targets.tolist()]
        uses |= {f"order {i}": True for i in brought}
        ran = world.run(stream, uses)  # what the driver took before it failed runs all the same
        world.orders |= dict.fromkeys(brought, ran)
        world.call()

    def launch(step: int, stream: Any) -> None:
        world.call()
        fetches = gathers = world.is_out
        is_elsewhere = world.steps[step].numbers[4] != 0
        uses = {} if is_elsewhere else {f"chunk {step % 2}": gathers}
        ran = world.run(stream, uses | {f"order {step}": fetches})
        if fetches:
            world.orders[step] = ran

    def instantiate(_: object) -> int:
        world.instantiated += 1
        return world.instantiated - 1

    driver = SimpleNamespace(
        CudaCopyError=CudaCopyError, has_batches=lambda: True, copy_batch=copy_batch,
        no_collection=nullcontext, launch=launch, instantiate=instantiate, destroy=lambda _: None,
    )  # fmt: skip
    stand_in({
        "torch": fake_torch, "ReusedEvent": Event, "cuda_driver": driver,
        "HAS_TRITON": True, "compiled": lambda: None,
        "fetch_order": lambda *_: None, "move_pieces": lambda *_, **__: None,
        "DIRECT_BYTES": 512, "FIRST_BYTES": 1000, "CALL_BYTES": 3000, "FIRST_CHUNK_BYTES": 300,
        "LAST_CHUNK_BYTES": 300,
    })  # fmt: skip
    # A lambda, as a method of `world` would not be one of the step.
    noted = lambda step, copy, **more: world.write_order(step, copy, **more)  # noqa: E731, PLW0108
    monkeypatch.setattr(Step, "write_order", noted)
    return world


def made(world: World, pools: list[DevicePages], *, out: bool | None = None) -> CudaCopies:
    """With a ring of a random size; the graph of a step is its number."""
    ring = int(world.rng.choice([2, 4, 16]))
    world.is_out = bool(world.rng.integers(2)) if out is None else out
    copies = CudaCopies(
        torch.device("cpu"),
        world.owner,
        out=world.is_out,
        chunk_bytes=CHUNK_BYTES,
        ring=ring,
    )
    for memory in pools:
        world.instantiated = 0
        copies.prepare(memory)
    chunks = [step.address for step in copies._steps[:2]]
    world.steps = copies._steps
    world.chunks = [range(at, at + CHUNK_BYTES) for at in chunks]
    return copies


@pytest.mark.parametrize("part_of_ten", range(10))
@pytest.mark.parametrize("fails", [False, True])
def test_chunks_and_orders_are_used_in_order(world: World, fails: bool, part_of_ten: int) -> None:
    """And the stream is behind all copies, which follow what it waits for."""
    del part_of_ten
    sizes = (64, 100, 512)
    pools = [
        adopt([torch.zeros((PAGES, size), dtype=torch.uint8) for _ in range(2)], page_axis=0)
        for size in sizes
    ]
    copies = made(world, pools)
    for _ in range(80):
        memory = pools[world.rng.integers(len(pools))]
        host: Any = np.zeros((PAGES, memory.page_bytes), np.uint8)
        if world.rng.integers(4) == 0:
            host = torch.from_numpy(host)  # staging on the device
        pages = np.arange(world.rng.integers(1, 20))
        slots = world.rng.permutation(PAGES)[: len(pages)]
        world.calls_left = int(world.rng.integers(24)) if fails else 0
        is_followed = bool(world.rng.integers(2))
        try:
            copies.copy(PageCopy(memory, pages, host, slots, is_followed=is_followed))
        except CudaCopyError:
            assert fails
        world.calls_left = 0
        if world.rng.integers(4) == 0:
            copies.catch_up()
        if copies._late is not None:
            assert is_followed
            continue
        last = {s.name: world.clock(s).get(s.name, 0) for s in copies.streams}
        for name, number in last.items():
            behind = world.clock(world.owner.cuda).get(name, 0)
            assert behind >= number, f"the stream is not behind {name}"


@pytest.mark.parametrize("follower", ["a copy", "a direct copy", "new memory", "nothing"])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("part_of_ten", [1])
def test_a_followed_copy_ends_with_what_follows(
    world: World, part_of_ten: int, follower: str, fails: bool
) -> None:
    """Into the device: its last kernel is launched when the next copy is on the bus, so that this
    does not wait for the host. What is to be behind it comes before any other kernel. A copy that
    fails meanwhile changes nothing of that, but leaves no kernel to the next."""
    del part_of_ten
    pools = [
        adopt([torch.zeros((PAGES, size), dtype=torch.uint8) for _ in range(2)], page_axis=0)
        for size in (64, 512, *([64] * 10))
    ]
    copies = made(world, pools[:2], out=False)
    kernels, bus = copies.streams
    now = lambda: (number_of(world, kernels), number_of(world, bus))  # noqa: E731
    for i in range(10):
        memory, count = pools[0], int(world.rng.integers(1, 20))
        pages, host = np.arange(count), np.zeros((PAGES, memory.page_bytes), np.uint8)
        copies.copy(PageCopy(memory, pages, host, pages, is_followed=True))
        launched, copied = now()
        behind: list[Any] = []
        copies.afterwards(lambda behind=behind: behind.append(now()))
        copies.afterwards(lambda behind=behind: behind.append("and then"))
        assert not behind
        if fails:
            world.calls_left = int(world.rng.integers(1, 3))  # before it has copied anything
            with pytest.raises(CudaCopyError):
                copies.copy(PageCopy(memory, pages, host, pages))
            copied = number_of(world, bus)
            assert behind == [(launched + 1, copied), "and then"]
        if follower == "nothing":
            copies.catch_up()
        elif follower == "new memory":
            world.instantiated = 0
            copies.prepare(pools[2 + i])
        else:
            memory = pools[follower == "a direct copy"]
            host = np.zeros((PAGES, memory.page_bytes), np.uint8)
            copies.copy(PageCopy(memory, pages, host, pages))
        is_copied = follower == "a copy" and not fails
        assert behind == [(launched + 1, copied + is_copied), "and then"]


@pytest.mark.parametrize("part_of_ten", [1])
def test_a_late_kernel_that_is_refused_breaks_its_stream(world: World, part_of_ten: int) -> None:
    """Of its copy it was said that it is on its way; the next copy is not believed to be."""
    del part_of_ten
    memory = adopt([torch.zeros((PAGES, 64), dtype=torch.uint8) for _ in range(2)], page_axis=0)
    copies = made(world, [memory], out=False)
    failures: list[BaseException] = []
    world.owner.fail = failures.append
    pages, host = np.arange(9), np.zeros((PAGES, memory.page_bytes), np.uint8)
    copies.copy(PageCopy(memory, pages, host, pages, is_followed=True))
    copies.afterwards(lambda: failures.append(AssertionError("it is behind nothing")))
    driver: Any = cuda_copies.cuda_driver  # the fixture's
    launch, driver.launch = driver.launch, lambda *_: check(1, "launch")
    with pytest.raises(CudaCopyError):
        copies.copy(PageCopy(memory, pages, host, pages))
    assert [type(failure) for failure in failures] == [CudaCopyError]
    driver.launch = launch
    copies.copy(PageCopy(memory, pages, host, pages))
    assert len(failures) == 1


def number_of(world: World, stream: Any) -> int:
    """How much has been enqueued there."""
    return world.clock(stream).get(stream.name, 0)
