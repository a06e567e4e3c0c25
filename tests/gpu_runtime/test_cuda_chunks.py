"""The compiled loop over chunks makes the calls that Python makes, one by one, without a GPU.

`test_cuda_copies.py` and `test_cuda_copies_order.py` say that Python's are right.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvstrata.gpu_runtime import adopt, cuda_chunks, cuda_copies, cuda_driver
from kvstrata.gpu_runtime.cuda_copies import CudaCopies
from kvstrata.gpu_runtime.cuda_driver import CudaCopyError
from kvstrata.gpu_runtime.device_pages import PageCopy
from kvstrata.gpu_runtime.hurry import Hurry

REFUSED, NOT_READY = 700, 600
NUMBER = ctypes.c_int64


class World:
    """A driver that notes its calls, for Python and for C; `calls_left` until it refuses one."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.calls_left = 0
        self.refused = ""
        """The kind of call that was."""
        self.orders: dict[int, Any] = {}
        """By graph: the order that its kernel reads."""
        self.pinned: dict[int, Any] = {}
        """By address: the order that a copy brings."""
        self.handles: Iterator[int] = itertools.count(1000)
        self.hurry = Hurry()
        self.hurries: list[bool] = []
        """Whether anybody is in a hurry, from one look to the next."""
        self._kept: list[object] = []

    def call(self, *what: object) -> int:
        self.calls.append(what)
        self.calls_left -= 1
        if self.calls_left == 0:
            self.refused = str(what[0])
            return REFUSED
        return 0

    def query(self, event: int) -> int:
        """Not passed, when it is asked for the first time in a row."""
        asked = ("query", event)
        self.hurry.word[0] = self.hurries.pop() if self.hurries else 0
        is_first = self.calls[-1:] != [asked]
        return self.call(*asked) or (NOT_READY if is_first else 0)

    def launch(self, graph: int, stream: int) -> int:
        order = self.orders[graph]
        count = int(order[0])
        return self.call("launch", graph, stream, *order[:6].tolist(), *order[8 : 8 + count])

    def copy_batch(self, targets: Any, sources: Any, nbytes: Any, stream: int) -> int:
        numbers = tuple(tuple(int(n) for n in array) for array in (targets, sources, nbytes))
        orders = [self.pinned[at][:n // 8].tolist() for at, n in zip(*numbers[1:], strict=True)
                  if at in self.pinned]  # fmt: skip
        return self.call("copy", stream, *numbers, orders)

    def addresses(self, *, tells_failed: bool) -> Any:
        """As `cuda_driver.addresses` has them."""

        def batch(to: int, of: int, lengths: int, n: int, *rest: int) -> int:
            arrays = [(NUMBER * n).from_address(at) for at in (to, of, lengths)]
            assert rest[:3] == (11, 22, 1)
            assert len(rest) == 4 + tells_failed
            return self.copy_batch(*arrays, rest[-1])

        short: dict[str, tuple[Callable[..., int], int]] = {
            "cuEventRecord": (lambda event, stream: self.call("record", event, stream), 2),
            "cuStreamWaitEvent": (
                lambda stream, event, flags: self.call("wait", stream, event) + flags,
                3,
            ),
            "cuGraphLaunch": (self.launch, 2),
            "cuEventSynchronize": (lambda event: self.call("synchronize", event), 1),
            "cuEventQuery": (self.query, 1),
        }
        kinds = [short[name] for name in cuda_driver.ADDRESSES]
        kinds.append((batch, 9 if tells_failed else 8))
        callbacks = [
            ctypes.CFUNCTYPE(ctypes.c_int, *[NUMBER] * count)(function) for function, count in kinds
        ]
        self._kept += callbacks
        found = [ctypes.cast(callback, ctypes.c_void_p).value for callback in callbacks]
        return np.array([*found, tells_failed, 11, 22], np.int64)


@pytest.fixture(params=[False, True], ids=["copies", "copies and failures"])
def world(fake_torch: Any, stand_in: Any, monkeypatch: pytest.MonkeyPatch, request: Any) -> World:
    assert cuda_chunks.compiled() is not None, "tests need a C compiler: cc, gcc or clang"
    world = World()

    class Event:
        def __init__(self, _: Any) -> None:
            self.handle = next(world.handles)

        def record(self, stream: Any) -> None:
            cuda_driver.check(world.call("record", self.handle, stream.cuda_stream), "it")

        def hold_back(self, stream: Any) -> None:
            cuda_driver.check(world.call("wait", stream.cuda_stream, self.handle), "it")

        def synchronize(self) -> None:
            cuda_driver.check(world.call("synchronize", self.handle), "it")

        def has_passed(self) -> bool:
            code = world.query(self.handle)
            cuda_driver.check(0 if code == NOT_READY else code, "cuEventQuery")
            return code == 0

    def copy_batch(targets: Any, sources: Any, nbytes: Any, stream: int, **_: Any) -> None:
        cuda_driver.check(world.copy_batch(targets, sources, nbytes, stream), "it")

    driver = SimpleNamespace(
        CudaCopyError=CudaCopyError, no_collection=nullcontext, has_batches=lambda: True,
        copy_batch=copy_batch,
        instantiate=lambda _: next(world.handles), destroy=lambda _: None, check=cuda_driver.check,
        launch=lambda graph, stream: cuda_driver.check(world.launch(graph, stream), "it"),
    )  # fmt: skip
    fake_torch.cuda.Stream = lambda priority: SimpleNamespace(
        cuda_stream=7, priority=priority, synchronize=lambda: None
    )
    stand_in({
        "torch": fake_torch, "ReusedEvent": Event, "cuda_driver": driver, "HAS_TRITON": True,
        "fetch_order": lambda *_: None, "move_pieces": lambda *_, **__: None,
    })  # fmt: skip
    numbers = world.addresses(tells_failed=request.param)
    monkeypatch.setattr(cuda_driver, "addresses", lambda: numbers)
    return world


def made(world: World, memories: list[Any], *, out: bool, chunk_bytes: int) -> CudaCopies:
    world.handles = itertools.count(1000)
    stream = SimpleNamespace(cuda_stream=5)
    fail = lambda error: world.calls.append(("it fails", str(REFUSED) in str(error)))  # noqa: E731
    owner: Any = SimpleNamespace(cuda=stream, followers=[], hurry=world.hurry, fail=fail)
    copies = CudaCopies(torch.device("cpu"), owner, out=out, chunk_bytes=chunk_bytes, ring=4)
    for memory in memories:
        copies.prepare(memory)
    for step in copies._steps:
        world.orders |= dict.fromkeys(step.graphs, step.numbers)
        world.pinned[step.pinned.data_ptr()] = step.numbers
    world.handles = itertools.repeat(1)  # of an event that a failure makes
    return copies


CALLS = {
    "record": "cuEventRecord", "wait": "cuStreamWaitEvent", "launch": "cuGraphLaunch",
    "synchronize": "cuEventSynchronize", "query": "cuEventQuery", "copy": "a copy",
}  # fmt: skip


def noted(world: World, run: Callable[[], None], *, by_c: bool) -> list[tuple[object, ...]]:
    world.calls.clear()
    world.refused = ""
    try:
        run()
    except CudaCopyError as error:
        by_c = by_c and "refused it" not in str(error)  # Python ends what is late
        names_it = not by_c or f"refused {CALLS[world.refused]}" in str(error)
        world.calls.append((str(REFUSED) in str(error), names_it))
    return list(world.calls)


@pytest.mark.parametrize("part_of_ten", range(10))
def test_calls_are_those_that_python_makes(
    world: World, monkeypatch: pytest.MonkeyPatch, seed: int, part_of_ten: int
) -> None:
    """Random pools, parts, chunks, regions and host pages, of which a call is refused or none, and
    now and then somebody is in a hurry."""
    rng = np.random.default_rng((seed, part_of_ten))
    for _ in range(15):
        pages, slots = int(rng.integers(1, 40)), int(rng.integers(40, 60))
        layers = int(rng.integers(1, 5))
        memories = [
            adopt([*torch.zeros((layers, pages, size), dtype=torch.uint8)], page_axis=0)
            for size in rng.choice([16, 24, 80], 2)
        ]
        monkeypatch.setattr(cuda_copies, "ORDER_PAGES", int(rng.choice([1, 3, 2048])))
        monkeypatch.setattr(cuda_copies, "LAST_CHUNK_BYTES", int(rng.choice([1, 500, 1 << 20])))
        out, chunk_bytes = bool(rng.integers(2)), 80 * layers * int(rng.integers(1, 9))
        copies = made(world, memories, out=out, chunk_bytes=chunk_bytes)
        loop = copies._loop
        assert loop is not None
        for _ in range(6):
            memory = memories[rng.integers(2)]
            memory.host_chunk_pages = int(rng.integers(1, slots))
            host = np.zeros((slots, memory.page_bytes + int(rng.choice([0, 16]))), np.uint8)
            count, begin = int(rng.integers(pages + 1)), int(rng.integers(layers))
            part = slice(begin, int(rng.integers(begin + 1, layers + 1)))
            places = np.sort(rng.permutation(slots)[:count])
            copy = PageCopy(
                memory, rng.permutation(pages)[:count], host, places, part,
                is_followed=bool(rng.integers(2)),
            )  # fmt: skip
            hurries = (rng.random(60) < rng.choice([0, 0.5, 1])).tolist()
            first, refused = copies._turn, int(rng.integers(30)) * int(rng.integers(2))
            late, found = copies._late, []
            orders = [step.numbers.copy() for step in copies._steps]
            for copies._loop in (None, loop):
                copies._turn, world.calls_left, world.hurries = first, refused, list(hurries)
                copies._late = late
                copies._behind = [lambda: world.calls.append(("behind it",))] if late else []
                for step, order in zip(copies._steps, orders, strict=True):
                    step.numbers[:] = order if late is not None and step is late.step else -1
                calls = noted(world, partial(copies.copy, copy), by_c=copies._loop is loop)
                left = copies._late and (copies._late.number, copies._late.step.turn)
                found.append((calls, copies._turn, left, len(copies._behind)))
            assert found[0] == found[1]
            copies._behind.clear()


@pytest.fixture
def compile_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for compilers that nobody else finds."""
    cuda_chunks._compile.cache_clear()
    yield tmp_path
    cuda_chunks._compile.cache_clear()


@pytest.mark.parametrize(
    "compiler", ["false", "true", 'gcc "', "nobody-has-it", "/tmp", "gcc -fvisibility=hidden", ""]
)
def test_an_odd_compiler_is_passed_over(
    compile_anew: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    assert cuda_chunks.compiled() is not None


@pytest.mark.parametrize("broken", [False, True])
def test_without_a_compiler_python_does_it(
    compile_anew: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: bool,
) -> None:
    if broken:
        program = compile_anew / "cc"
        program.write_text("#!/bin/sh\necho no such header >&2; exit 1")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(compile_anew))
    monkeypatch.delenv("CC", raising=False)
    assert cuda_chunks.compiled() is None
    assert ("no such header" if broken else "there is none") in caplog.text


@pytest.mark.usefixtures("compile_anew")
def test_without_a_folder_to_compile_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(cuda_chunks, "TemporaryDirectory", refuse)
    assert cuda_chunks.compiled() is None


@pytest.mark.usefixtures("compile_anew")
def test_threads_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    real = cuda_chunks._compile_by
    monkeypatch.setattr(
        cuda_chunks, "_compile_by", lambda command: made.append(command) or real(command)
    )
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: cuda_chunks.compiled(), range(4)))
    assert len(made) == len(set(map(id, found))) == 1
