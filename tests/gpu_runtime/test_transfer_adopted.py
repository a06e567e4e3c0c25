"""`AdoptedPools`: copies out of and into the pools of engines, in the layouts that they use."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvstrata.errors import ClosedError, ConfigError, InputError
from kvstrata.gpu_runtime import AdoptedPools, CpuDevice, DevicePages, Timeline, Transfer, adopt
from kvstrata.gpu_runtime.device_pages import PageCopy, host_runs
from kvstrata.gpu_runtime.testing import Gate
from kvstrata.staging import aligned

PAGES, SLOTS = 12, 10


def layers(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[torch.Tensor]:
    """Three layers of random bytes."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(3):
        raw = rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)
        out.append(torch.from_numpy(raw).view(dtype))
    return out


# Tensors of an engine, how they are adopted, and the bytes of page p as the engine sees them.
LAYOUTS: dict[str, tuple[Callable[[], list[torch.Tensor]], dict[str, int], Callable[..., Any]]] = {
    "K and V split, NHD": (
        lambda: layers(2, PAGES, 4, 2, 8),
        {"page_axis": 1},
        lambda t, p: [x for layer in t for x in (layer[0, p], layer[1, p])],
    ),
    "K and V split, HND": (
        lambda: layers(2, PAGES, 2, 4, 8),
        {"page_axis": 1},
        lambda t, p: [x for layer in t for x in (layer[0, p], layer[1, p])],
    ),
    "K and V joined": (
        lambda: layers(PAGES, 2, 4, 2, 8),
        {"page_axis": 0},
        lambda t, p: [layer[p] for layer in t],
    ),
    "tokens": (
        lambda: layers(PAGES * 4 + 3, 2, 8),
        {"page_axis": 0, "page_tokens": 4},
        lambda t, p: [layer[4 * p : 4 * p + 4] for layer in t],
    ),
    "latents": (
        lambda: layers(PAGES, 4, 1, 9, dtype=torch.float8_e4m3fn),
        {"page_axis": 0},
        lambda t, p: [layer[p] for layer in t],
    ),
    "heads before pages": (
        lambda: layers(2, PAGES, 4, 8),
        {"page_axis": 1},
        lambda t, p: [layer[h, p] for layer in t for h in range(2)],
    ),
    "a part of a larger tensor": (
        lambda: [t[:, 3:] for t in layers(2, PAGES + 3, 4, 2, 8)],
        {"page_axis": 1},
        lambda t, p: [x for layer in t for x in (layer[0, p], layer[1, p])],
    ),
}


def raw(parts: list[torch.Tensor]) -> bytes:
    return b"".join(p.contiguous().view(torch.uint8).numpy().tobytes() for p in parts)


@pytest.fixture
def pools() -> Iterator[Callable[..., AdoptedPools]]:
    made: list[AdoptedPools] = []

    def make(**adopted: DevicePages) -> AdoptedPools:
        made.append(AdoptedPools(adopted, CpuDevice(Timeline())))
        return made[-1]

    yield make
    assert all(p.close(5.0) for p in made)


def host_for(memory: DevicePages) -> np.ndarray[Any, Any]:
    return np.full((SLOTS, memory.page_bytes + 24), 0xA5, np.uint8)


def ended(transfer: Transfer) -> Transfer:
    assert transfer.wait(10.0)
    assert transfer.done()
    assert transfer.error == ""
    return transfer


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.parametrize("groups", [1, 3])
def test_every_layout_there_and_back(pools: Any, name: str, groups: int) -> None:
    """B102: the host has a page's bytes in the engine's order; other pages are another's again."""
    make, how, page = LAYOUTS[name]
    tensors = make()
    memory = adopt(tensors, **how)
    assert memory.layout.pages == PAGES
    transfers, host = pools(kv=memory), host_for(memory)
    transfers.pin("kv", host, chunk_pages=4)
    out, slots, back = np.array([7, 0, 11]), np.array([2, 9, 3]), np.array([1, 5, 4])
    before = {p: raw(page(tensors, p)) for p in range(PAGES)}
    transfers.fence()
    ended(transfers.copy_out({"kv": out}, {"kv": slots})).join()
    for p, s in zip(out.tolist(), slots.tolist(), strict=True):
        assert host[s, : memory.page_bytes].tobytes() == before[p]
        assert (host[s, memory.page_bytes :] == 0xA5).all()
    copy = ended(transfers.copy_in({"kv": back}, {"kv": slots}, groups=groups))
    assert copy.groups == groups
    after = {p: raw(page(tensors, p)) for p in range(PAGES)}
    assert after == before | {1: before[7], 5: before[0], 4: before[11]}


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.parametrize("groups", [1, 3])
def test_chunks_on_the_device(pools: Any, name: str, groups: int) -> None:
    """What GPUDirect storage reads into and writes from: the same bytes as on the host."""
    make, how, page = LAYOUTS[name]
    tensors = make()
    memory = adopt(tensors, **how)
    transfers = pools(kv=memory)
    chunk = torch.full((SLOTS, aligned(memory.page_bytes + 1)), 0xA5, dtype=torch.uint8)
    out, slots, back = np.array([7, 0, 11]), np.array([2, 9, 3]), np.array([1, 5, 4])
    before = {p: raw(page(tensors, p)) for p in range(PAGES)}
    ended(transfers.copy_out({"kv": out}, {"kv": slots}, chunks={"kv": chunk}))
    for p, s in zip(out.tolist(), slots.tolist(), strict=True):
        assert chunk[s, : memory.page_bytes].numpy().tobytes() == before[p]
    rest = np.setdiff1d(np.arange(SLOTS), slots)
    assert (chunk[rest] == 0xA5).all()
    assert (chunk[:, memory.page_bytes :] == 0xA5).all()
    ended(transfers.copy_in({"kv": back}, {"kv": slots}, groups=groups, chunks={"kv": chunk}))
    after = {p: raw(page(tensors, p)) for p in range(PAGES)}
    assert after == before | {1: before[7], 5: before[0], 4: before[11]}


def test_chunks_that_cannot_be_used_are_refused(pools: Any) -> None:
    memory = adopt(layers(PAGES, 4, 8), page_axis=0)
    transfers, some = pools(kv=memory), {"kv": np.arange(2)}
    flat = torch.zeros(SLOTS * 4096 + 16, dtype=torch.uint8)
    good = flat[: SLOTS * 4096].view(SLOTS, 4096)
    for chunks in (
        {"kv": None},
        {"kv": good[:0]},
        {"kv": good.to(torch.int8)},
        {"kv": good[:, :-16]},
        {"kv": good.view(-1)},
        {"kv": flat[1 : 1 + SLOTS * 4096].view(SLOTS, 4096)},
        {"kv": flat[: SLOTS * 200].view(SLOTS, 200)},
        {"kv": flat[: SLOTS * 16].view(SLOTS, 16)},
        {"kv": good.to("meta")},
        {"kv": good.numpy()},
        {"kv": torch.zeros(8, 4112, dtype=torch.uint8)[:1, :4096]},
        {"kv": torch.eye(8, dtype=torch.uint8).to_sparse()},
    ):
        with pytest.raises(InputError, match="a chunk of 'kv' must be") as caught:
            transfers.copy_in(some, some, chunks=chunks)
        assert caught.value.remedy
    with pytest.raises(InputError, match=f"slots of 'kv' name {SLOTS}; there are 0 to"):
        transfers.copy_in(some, {"kv": np.array([0, SLOTS])}, chunks={"kv": good})
    for wrong in ((some["kv"], some, None), (some, [0, 1], None), (some, some, good)):
        with pytest.raises(InputError, match="not one for each pool"):
            transfers.copy_in(wrong[0], wrong[1], chunks=wrong[2])


def test_the_example_of_the_documentation() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/architecture.md").read_text()
    (code,) = re.findall(r"```python\n(.*?AdoptedPools.*?)```", text, re.DOTALL)
    exec(compile(code, "docs/architecture.md", "exec"), {})


def test_memory_that_is_used_twice_is_refused(pools: Any) -> None:
    """Else one copy writes over what another one moves, and nobody is told."""
    tensors = {name: layers(PAGES, 4, 8) for name in ("a", "b")}
    memory = {name: adopt(some, page_axis=0) for name, some in tensors.items()}
    transfers, some = pools(**memory), {"a": np.arange(2), "b": np.arange(2)}
    chunk = torch.zeros(3 * SLOTS, 4096, dtype=torch.uint8)
    pool = torch.zeros(4, 4096, dtype=torch.uint8)
    for a, b in ((chunk, chunk), (chunk[:SLOTS], chunk[SLOTS - 1 : 2 * SLOTS])):
        with pytest.raises(InputError, match="memory of a pool or of another chunk"):
            transfers.copy_out(some, some, chunks={"a": a, "b": b})
    ended(transfers.copy_out(some, some, chunks={"a": chunk[:SLOTS], "b": chunk[SLOTS:]}))
    own = pools(kv=adopt([pool], page_axis=0))
    with pytest.raises(InputError, match="memory of a pool or of another chunk"):
        own.copy_out({"kv": np.arange(1)}, {"kv": np.array([3])}, chunks={"kv": pool})
    host = np.zeros((SLOTS, 4096), np.uint8)
    transfers.pin("a", host)
    with pytest.raises(ConfigError, match="those of 'a' as well"):
        transfers.pin("b", host[2:])
    with pytest.raises(ConfigError, match="multiple of 8"):
        transfers.pin("b", np.zeros((4, memory["b"].page_bytes + 4), np.uint8))
    with pytest.raises(InputError, match="groups"):
        transfers.copy_in(some, some, groups=1.0)
    transfers.pin("b", np.zeros((SLOTS, 4096), np.uint8))
    with pytest.raises(InputError, match="are no array"):
        transfers.copy_in({"a": [[0], [1, 2]], "b": [0, 1]}, some)


def test_nothing_is_taken_after_the_end(pools: Any) -> None:
    memory = adopt(layers(PAGES, 4, 8), page_axis=0)
    transfers, some = pools(kv=memory), {"kv": np.arange(2)}
    assert transfers.close(5.0)
    for call in (
        transfers.fence,
        lambda: transfers.pin("kv", host_for(memory)),
        lambda: transfers.copy_out(some, some),
        lambda: transfers.copy_in(some, some),
    ):
        with pytest.raises(ClosedError):
            call()


def test_groups_bring_the_first_layers_first(pools: Any) -> None:
    """Two groups have ended, and have their bytes, while the third has not begun."""
    memory = adopt(layers(PAGES, 4, 8), page_axis=0)
    transfers, host, gate = pools(kv=memory), host_for(memory), Gate(shut=True)
    transfers.pin("kv", host)
    copy_in = transfers._device.copy_in

    def gated(copy: PageCopy) -> None:
        if copy.pieces.start == 2:
            gate.pass_through()
        copy_in(copy)

    transfers._device.copy_in = gated
    before = memory._views[2].clone()
    copy = transfers.copy_in({"kv": np.arange(3)}, {"kv": np.arange(3)}, groups=3)
    gate.wait_for_one()
    assert copy.wait(10.0, 1)
    copy.join(1)
    called: list[int] = []
    copy.on_complete(lambda: called.append(1))
    assert all(view[:3].view(torch.uint8).eq(0xA5).all() for view in memory._views[:2])
    assert (memory._views[2] == before).all()
    assert not copy.done()
    assert not called
    gate.open()
    assert copy.wait(10.0)
    assert called == [1]
    assert memory._views[2][:3].view(torch.uint8).eq(0xA5).all()


def test_what_cannot_be_adopted_says_why() -> None:
    good = layers(2, PAGES, 4, 2, 8)
    cases: list[tuple[list[torch.Tensor], dict[str, int], str]] = [
        ([], {"page_axis": 0}, "not none"),
        (good, {"page_axis": 5}, "no pages along axis 5"),
        ([t.transpose(3, 4) for t in good], {"page_axis": 1}, "not contiguous"),
        ([good[0], *layers(2, PAGES, 4, 2, 4)], {"page_axis": 1}, "one number of pages"),
        (good, {"page_axis": 1, "page_tokens": PAGES + 1}, "make no pages of"),
        ([t[:, :, :0] for t in good], {"page_axis": 1}, "has no pages"),
    ]
    for tensors, how, text in cases:
        with pytest.raises(ConfigError) as caught:
            adopt(tensors, **how)
        assert text in str(caught.value)
        assert caught.value.remedy


def test_wrong_numbers_are_refused_before_anything_moves(pools: Any) -> None:
    memory = adopt(layers(PAGES, 4, 8), page_axis=0)
    transfers, host = pools(kv=memory), host_for(memory)
    some = {"kv": np.arange(2)}
    with pytest.raises(InputError, match="pin each pool"):
        transfers.copy_out(some, some)
    with pytest.raises(ConfigError, match="stride"):
        transfers.pin("kv", host[:, :8])
    transfers.pin("kv", host)
    for pages, slots, groups in (
        ([0, PAGES], [0, 1], 1),
        ([-1, 0], [0, 1], 1),
        ([0, 1], [0, SLOTS], 1),
        ([], [], 1),
        ([0, 1], [0], 1),
        ([0, 1], [0, 1], 99),
    ):
        with pytest.raises(InputError):
            transfers.copy_in(
                {"kv": np.asarray(pages, np.int64)},
                {"kv": np.asarray(slots, np.int64)},
                groups=groups,
            )
    assert (host == 0xA5).all()
    with pytest.raises(ConfigError, match="no pools"):
        AdoptedPools({}, CpuDevice(Timeline()))


def test_a_copy_that_fails_says_so_and_goes_no_further(pools: Any, monkeypatch: Any) -> None:
    memory = adopt(layers(PAGES, 4, 8), page_axis=0)
    transfers, host = pools(kv=memory), host_for(memory)
    transfers.pin("kv", host)
    calls = []

    def broken(copy: Any) -> None:
        calls.append(copy)
        raise RuntimeError("planted")

    monkeypatch.setattr(memory, "scatter", broken)
    copy = transfers.copy_in({"kv": np.arange(3)}, {"kv": np.arange(3)}, groups=3)
    assert copy.wait(10.0)
    assert copy.error == "RuntimeError: planted"
    assert len(calls) == 1


def test_host_runs_end_where_registered_memory_does() -> None:
    slots = np.array([3, 4, 5, 8, 7, 9, 10, 11, 12])
    first, count = host_runs(slots, 4, joined=True)
    assert list(zip(first.tolist(), count.tolist(), strict=True)) == [
        (0, 1),  # 3 | 4 begins a region
        (1, 2),
        (3, 1),
        (4, 1),
        (5, 3),  # 9 10 11 | 12
        (8, 1),
    ]
    first, count = host_runs(slots, 4, joined=True, borders=[0, 2, 4, 6, 8, 9])
    assert list(zip(first.tolist(), count.tolist(), strict=True)) == [
        (0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 2), (8, 1),
    ]  # fmt: skip
    first, count = host_runs(slots, 4, joined=False, borders=[0, 2, 9])
    assert first.tolist() == list(range(9))
    assert set(count.tolist()) == {1}


def test_batched_copies_tell_the_driver_what_they_mean(monkeypatch: Any) -> None:
    """Sources are read in the stream's order (B052), every copy is named once, codes are raised."""
    from kvstrata.gpu_runtime import cuda_driver

    calls: list[tuple[Any, ...]] = []

    class Driver:
        code = 0

        def cuMemcpyBatchAsync_v2(self, *arguments: Any) -> int:
            import ctypes

            count = arguments[3].value
            order = ctypes.c_int.from_address(arguments[4].value).value
            names = (ctypes.c_uint64 * count).from_address(arguments[0].value)
            calls.append((count, order, list(names)))
            return self.code

    class Old:
        def cuMemcpyAsync(self, *arguments: Any) -> int:
            calls.append(tuple(a.value for a in arguments))
            return len(calls) > 1

    addresses = np.array([10, 20, 30])
    driver = Driver()
    monkeypatch.setattr(cuda_driver, "_driver", lambda **_: driver)
    monkeypatch.setattr(cuda_driver, "_batches", cuda_driver._batches.__wrapped__)
    cuda_driver.copy_batch(addresses, addresses, addresses, 7)
    cuda_driver.copy_batch(addresses[:0], addresses[:0], addresses[:0], 7)
    assert calls == [(3, 1, [10, 20, 30])]
    driver.code = 1
    with pytest.raises(cuda_driver.CudaCopyError, match="error 1"):
        cuda_driver.copy_batch(addresses, addresses, addresses, 7)
    calls.clear()
    monkeypatch.setattr(cuda_driver, "_driver", lambda **_: Old())
    assert not cuda_driver.has_batches()
    with pytest.raises(cuda_driver.CudaCopyError):
        cuda_driver.copy_batch(addresses, addresses + 1, addresses, 7)
    assert calls == [(10, 11, 10, 7), (20, 21, 20, 7)]
