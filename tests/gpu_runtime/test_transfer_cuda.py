"""Copies on a real GPU: every bit, every layout, both ways, random pages. Needs an NVIDIA GPU."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvstrata.gpu_runtime import AdoptedPools, ComponentPool, ComponentSpec, Timeline, adopt
from kvstrata.gpu_runtime.device_pages import DevicePages, PageCopy
from kvstrata.gpu_runtime.pools import DTYPES
from kvstrata.staging import SharedRegion, aligned

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

PAGES, SLOTS, COUNT = 50, 40, 20
CHUNK_PAGES = 7
"""Host pages that are registered as one region: copies must end at its border."""
HOST_BYTES = 64 << 20


@pytest.fixture(params=["as it is", "by Python", "one by one", "without triton"])
def device(
    request: pytest.FixtureRequest, stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """A device with tiny chunks; in turn without what a driver or an installation may lack."""
    from kvstrata.gpu_runtime import cuda_copies
    from kvstrata.gpu_runtime.cuda import CudaDevice

    if request.param == "without triton":
        stand_in({"HAS_TRITON": False})
    elif request.param == "by Python":
        monkeypatch.setattr(cuda_copies, "compiled", lambda: None)
    device = CudaDevice(Timeline(), chunk_bytes=600_000)
    if request.param == "one by one":
        device._copies_in.batched = device._copies_out.batched = False
    yield device
    assert device.close(10.0)


@pytest.fixture
def host() -> Iterator[np.ndarray[Any, Any]]:
    region = SharedRegion(HOST_BYTES)
    yield region.array
    region.close()


class Mover:
    """Copies through the device's streams, into and out of pinned memory."""

    def __init__(self, device: Any, memory: DevicePages, host: np.ndarray[Any, Any]) -> None:
        self.device, self.memory = device, memory
        self.in_a_hurry = itertools.cycle([False, False, True, True])
        self.is_followed = itertools.cycle([False, False, False, True, True])
        stride = aligned(memory.page_bytes)
        self.host = host[: SLOTS * stride].reshape(SLOTS, stride)
        chunks = [min(CHUNK_PAGES, SLOTS - at) * stride for at in range(0, SLOTS, CHUNK_PAGES)]
        device.pin(host.ctypes.data, chunks)
        memory.host_chunk_pages = CHUNK_PAGES
        device.prepare(memory)

    def move(
        self,
        pages: Any,
        slots: Any,
        *,
        out: bool,
        part: slice = slice(None),
        chunk: torch.Tensor | None = None,
    ) -> None:
        host: Any = self.host if chunk is None else chunk
        copy = PageCopy(self.memory, np.asarray(pages), host, np.asarray(slots), part)
        copy = replace(copy, is_followed=next(self.is_followed))
        stream = self.device.d2h if out else self.device.h2d
        run: Callable[[PageCopy], None] = self.device.copy_out if out else self.device.copy_in
        with stream.hurry if next(self.in_a_hurry) else nullcontext():
            stream.enqueue(lambda: run(copy), copy.nbytes)
            assert stream.record().wait(30.0)
        assert self.device.fault is None


def there_and_back(device: Any, memory: DevicePages, host: Any, seed: int) -> None:
    """Random pages to random slots, and to other pages; all else keeps its bytes."""
    rng = np.random.default_rng(seed)
    mover = Mover(device, memory, host)
    views = memory._views

    def bytes_of() -> Any:
        return np.stack([v.contiguous().cpu().numpy().view(np.uint8) for v in views], 1)

    for view in views:
        raw = rng.integers(0, 256, (len(view), memory.layout.piece_bytes), np.uint8)
        view.copy_(torch.from_numpy(raw).cuda().view(view.dtype))
    for slots in (np.arange(5, 5 + COUNT), rng.permutation(SLOTS)[:COUNT]):
        host[:] = 0xA5
        before = bytes_of()
        pages = rng.permutation(len(before))[:COUNT]
        mover.move(pages, slots, out=True)
        assert (mover.host[slots, : memory.page_bytes] == before[pages].reshape(COUNT, -1)).all()
        rest = np.setdiff1d(np.arange(SLOTS), slots)
        assert (mover.host[rest] == 0xA5).all()
        assert (mover.host[:, memory.page_bytes :] == 0xA5).all(), "the padding was written"
        targets = rng.permutation(len(before))[:COUNT]
        mover.move(targets, slots, out=False)
        after = bytes_of()
        assert (after[targets] == before[pages]).all()
        rest = np.setdiff1d(np.arange(len(before)), targets)
        assert (after[rest] == before[rest]).all()
    chunk = torch.full(mover.host.shape, 0xA5, dtype=torch.uint8, device="cuda")
    for slots in (np.arange(5, 5 + COUNT), rng.permutation(SLOTS)[:COUNT]):
        before, pages = bytes_of(), rng.permutation(PAGES)[:COUNT]
        chunk.fill_(0xA5)
        torch.cuda.synchronize()
        mover.move(pages, slots, out=True, chunk=chunk)
        found = chunk.cpu().numpy()
        assert (found[slots, : memory.page_bytes] == before[pages].reshape(COUNT, -1)).all()
        found[slots, : memory.page_bytes] = 0xA5
        assert (found == 0xA5).all(), "bytes beside the pages were written"
        targets = rng.permutation(PAGES)[:COUNT]
        mover.move(targets, slots, out=False, chunk=chunk)
        after = bytes_of()
        assert (after[targets] == before[pages]).all()
        rest = np.setdiff1d(np.arange(PAGES), targets)
        assert (after[rest] == before[rest]).all()
    pieces = memory.layout.pieces
    mover.host[:] = rng.integers(0, 256, mover.host.shape, np.uint8)
    copied = torch.from_numpy(mover.host.copy()).cuda()  # no copy may cross two registered regions
    for staged in (None, copied) if pieces > 1 else ():
        before, part = bytes_of(), slice(pieces // 2, pieces)
        pages = rng.permutation(len(before))[:COUNT]
        torch.cuda.synchronize()
        mover.move(pages, slots, out=False, part=part, chunk=staged)
        after = bytes_of()
        rows = mover.host[slots, : memory.page_bytes].reshape(COUNT, pieces, -1)
        assert (after[pages][:, part] == rows[:, part]).all()
        assert (after[pages][:, : pieces // 2] == before[pages][:, : pieces // 2]).all()


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize(
    ("layout", "heads", "dim"), [("NHD", 2, 64), ("HND", 3, 20), ("NHD", 1, 5)]
)
def test_every_type_and_odd_size(
    device: Any, host: Any, dtype: str, layout: str, heads: int, dim: int
) -> None:
    """B102: random bytes (NaN payloads and all)."""
    spec = ComponentSpec("kv", 3, heads, dim, dtype, layout)
    there_and_back(device, ComponentPool(spec, PAGES, 16, device.torch_device), host, 1)


@pytest.mark.parametrize(
    ("spec", "page_tokens"),
    [
        (ComponentSpec("kv", 2, 8, 128, "bfloat16"), 16),
        (ComponentSpec("kv", 2, 8, 128, "bfloat16"), 64),
        (ComponentSpec("kv", 3, 1, 576, "bfloat16", kind="mla"), 16),
        (ComponentSpec("kv", 3, 1, 576, "bfloat16", kind="mla"), 64),
    ],
)
def test_pieces_as_large_as_those_of_models(
    device: Any, host: Any, spec: ComponentSpec, page_tokens: int
) -> None:
    there_and_back(device, ComponentPool(spec, PAGES, page_tokens, device.torch_device), host, 2)


ENGINES: dict[str, Callable[[], DevicePages]] = {
    "K and V split, NHD": lambda: adopt(_layers(2, PAGES, 16, 4, 32), page_axis=1),
    "K and V split, HND": lambda: adopt(_layers(2, PAGES, 4, 16, 32), page_axis=1),
    "K and V joined": lambda: adopt(_layers(PAGES, 2, 16, 4, 32), page_axis=0),
    "tokens, K and V apart": lambda: adopt(
        _layers(PAGES * 16 + 3, 4, 32), page_axis=0, page_tokens=16
    ),
    "latents": lambda: adopt(_layers(PAGES, 16, 576), page_axis=0),
    "page first": lambda: adopt(_layers(PAGES, 3, 2, 16, 4, 32)[:1], page_axis=0),
    "heads before pages": lambda: adopt(_layers(4, PAGES, 16, 32), page_axis=1),
    "odd bytes": lambda: adopt([t.view(torch.uint8) for t in _layers(PAGES, 3, 7)], page_axis=0),
}


def _layers(*shape: int) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3)]


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_pools_of_engines(device: Any, host: Any, engine: str) -> None:
    there_and_back(device, ENGINES[engine](), host, 3)


def test_pages_through_a_file_and_kvikio(tmp_path: Path) -> None:
    """Device memory to a file and back, in its compatibility mode where there is no GPUDirect; the
    chunk is lent to it, the pages are not."""
    kvikio = pytest.importorskip("kvikio")
    from kvstrata.gpu_runtime.cuda import CudaDevice

    tensors = _layers(PAGES, 2, 16, 4, 32)
    for tensor in tensors:
        tensor.view(torch.int16).random_()
    memory = adopt(tensors, page_axis=0)
    before = [tensor.clone() for tensor in tensors]
    pools = AdoptedPools({"kv": memory}, CudaDevice(Timeline()))
    chunk = torch.zeros((COUNT, aligned(memory.page_bytes)), dtype=torch.uint8, device="cuda")
    rng = np.random.default_rng(4)
    pages, slots = rng.permutation(PAGES)[:COUNT], np.arange(COUNT)
    pools.fence()
    assert pools.copy_out({"kv": pages}, {"kv": slots}, chunks={"kv": chunk}).wait(30.0)
    path = tmp_path / "pages"
    with kvikio.CuFile(path, "w") as file:
        assert file.pwrite(chunk).get() == chunk.numel()
    torch.cuda.synchronize()
    for tensor in (*tensors, chunk):
        tensor.zero_()
    pools.fence()
    torch.cuda.synchronize()
    with kvikio.CuFile(path, "r") as file:
        assert file.pread(chunk).get() == chunk.numel()
    targets = rng.permutation(PAGES)[:COUNT]
    assert pools.copy_in({"kv": targets}, {"kv": slots}, chunks={"kv": chunk}).wait(30.0)
    for tensor, was in zip(tensors, before, strict=True):
        assert (tensor[targets].view(torch.int16) == was[pages].view(torch.int16)).all()
    assert pools.close(10.0)


def test_a_join_waits_for_no_work_of_the_gpu(host: Any) -> None:
    """Not for that of the engine that copies are fenced behind, nor for copies before."""
    from kvstrata.gpu_runtime.cuda import CudaDevice

    tensors = _layers(PAGES, 2, 16, 4, 32)
    memory = adopt(tensors, page_axis=0)
    device = CudaDevice(Timeline(), chunk_bytes=10 * memory.page_bytes)
    pools, numbers = AdoptedPools({"kv": memory}, device), {"kv": np.arange(PAGES)}
    stride = aligned(memory.page_bytes)
    pools.pin("kv", host[: PAGES * stride].reshape(PAGES, stride))
    for tensor in tensors:
        tensor.fill_(1.0)
    pools.fence()
    assert pools.copy_out(numbers, numbers).wait(30.0)
    torch.cuda._sleep(2_000_000_000)  # a second
    slept = torch.cuda.Event()
    slept.record()
    for tensor in tensors:
        tensor.fill_(2.0)
    pools.fence()
    first, second = (pools.copy_in(numbers, numbers) for _ in range(2))
    second.join()
    ended = [torch.empty_like(tensor).copy_(tensor) for tensor in tensors]
    assert not slept.query(), "the host has waited for it"
    assert first.wait(30.0)
    torch.cuda.synchronize()
    assert all(bool((tensor == 1.0).all()) for tensor in ended)
    assert pools.close(10.0)


def test_a_copy_waits_for_what_its_stream_has_waited_for(device: Any, host: Any) -> None:
    """A kernel that is slow writes the pages; the copy on the other stream has its bytes."""
    memory = ComponentPool(
        ComponentSpec("kv", 2, 2, 64, "bfloat16"), PAGES, 16, device.torch_device
    )
    mover = Mover(device, memory, host)
    for value in range(1, 30):

        def write(value: int = value) -> None:
            torch.cuda._sleep(2_000_000)
            memory.data.fill_(value)

        device.compute.enqueue(write)
        device.d2h.wait_event(device.compute.record())
        mover.move(range(COUNT), range(COUNT), out=True)
        assert (mover.host[:COUNT, : memory.page_bytes] == value).all()


def test_a_copy_may_be_the_first_thing_that_a_thread_does_with_the_gpu(
    device: Any, host: Any
) -> None:
    """The driver's calls need a context that is current in their thread; both ways to copy."""
    for heads in (8, 128):
        spec = ComponentSpec("kv", 2, heads, 32, "bfloat16")
        memory = ComponentPool(spec, PAGES, 16, device.torch_device)
        pages = np.arange(2)
        copy = PageCopy(memory, pages, host[: 2 * memory.page_bytes].reshape(2, -1), pages)
        failures: list[BaseException] = []

        def run(copy: PageCopy = copy, failures: list[BaseException] = failures) -> None:
            try:
                device._copies_out.copy(copy)
            except BaseException as exc:  # noqa: BLE001 - looked at below
                failures.append(exc)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        torch.cuda.synchronize()
        assert not failures


@pytest.mark.parametrize("in_a_hurry", [False, True])
def test_graphs_are_captured_beside_copies(device: Any, host: Any, in_a_hurry: bool) -> None:
    """By an engine, which does not say that they are of its thread alone: neither spoils the other.
    Threads of ours ask for events all the time."""
    sizes = [128] * 2
    memory = adopt(
        [torch.zeros((PAGES, n), dtype=torch.uint8, device="cuda") for n in sizes], page_axis=0
    )
    mover, pages = Mover(device, memory, host), np.arange(COUNT)
    copy = PageCopy(memory, pages, mover.host, pages)
    stop, ends = threading.Event(), list[Any]()

    def keep_moving() -> None:
        while not stop.is_set():
            device.d2h.enqueue(lambda: device.copy_out(copy), copy.nbytes)
            device.h2d.enqueue(lambda: device.copy_in(copy), copy.nbytes)
            ends[:] = device.d2h.record(), device.h2d.record()
            assert all(end.wait(30.0) for end in ends)

    thread = threading.Thread(target=keep_moving)
    thread.start()
    try:
        with ExitStack() as stack:
            for stream in (device.h2d, device.d2h) if in_a_hurry else ():
                stack.enter_context(stream.hurry)
            for i in range(30):
                x, graph = torch.full((1 << 16,), i, device="cuda"), torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for _ in range(200):
                        x += 1
                graph.replay()
                torch.cuda.synchronize()
                assert int(x[0]) == i + 200
    finally:
        stop.set()
        thread.join()
    assert device.fault is None
    assert all(end.query() for end in ends)
