"""`AdoptedPools`: what an engine gives it, wrong and right; a device that breaks; its end."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import ConfigError, InputError, IntegrityError
from kvstrata.gpu_runtime import AdoptedPools, CpuDevice, Timeline, adopt, transfer_interface
from kvstrata.gpu_runtime.copy_queue import CopyPriority
from kvstrata.gpu_runtime.cpu import CpuEvent
from kvstrata.gpu_runtime.device_pages import PageCopy, PageLayout
from kvstrata.gpu_runtime.testing import Gate

PAGES, SLOTS, WAIT_S = 12, 10, 10.0
Pools = Callable[..., AdoptedPools]


class Device(CpuDevice):
    """Notes what it is told to copy and to pin, and stops before a copy while its gate is shut."""

    def __init__(self) -> None:
        super().__init__(Timeline())
        self.gate = Gate()
        self.copies: list[PageCopy] = []
        self.pinned: list[tuple[int, list[int]]] = []
        self.refuses = False

    def copy_out(self, copy: PageCopy) -> None:
        self.gate.pass_through()
        self.copies.append(copy)
        super().copy_out(copy)

    def copy_in(self, copy: PageCopy) -> None:
        self.gate.pass_through()
        self.copies.append(copy)
        super().copy_in(copy)

    def pin(self, address: int, chunk_bytes: Any) -> None:
        if self.refuses:
            raise ConfigError("refused", remedy="use less")
        self.pinned.append((address, list(chunk_bytes)))


def layers() -> list[torch.Tensor]:
    """Byte i of page p of each of three layers is p."""
    page = torch.arange(PAGES, dtype=torch.uint8)[:, None].expand(PAGES, 32)
    return [page.clone() for _ in range(3)]


def host() -> np.ndarray[Any, Any]:
    return np.full((SLOTS, 128), 0xA5, np.uint8)


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device()
    yield device
    device.gate.open()
    device.close(WAIT_S)


@pytest.fixture
def pools(device: Device) -> AdoptedPools:
    pools = AdoptedPools({"kv": adopt(layers(), page_axis=0)}, device)
    pools.pin("kv", host())
    return pools


def copy_out(pools: AdoptedPools, pages: Any, slots: Any) -> Any:
    return pools.copy_out({"kv": pages}, {"kv": slots})


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.uint64])
def test_numbers_of_any_integer_become_int64(
    pools: AdoptedPools, device: Device, dtype: Any
) -> None:
    """Of int32, page times stride overflows from 2 GiB of a pool on: another page is copied."""
    assert copy_out(pools, np.array([7, 3], dtype), np.array([0, 1], dtype)).wait(WAIT_S)
    assert {copy.pages.dtype for copy in device.copies} == {np.dtype(np.int64)}
    assert {copy.slots.dtype for copy in device.copies} == {np.dtype(np.int64)}
    assert pools._host["kv"][:2, 0].tolist() == [7, 3]


def test_numbers_may_change_when_the_call_has_returned(pools: AdoptedPools, device: Device) -> None:
    """The copy is enqueued later: what was checked is what is moved."""
    device.gate.shut()
    pages, slots = np.array([7, 3]), np.array([0, 1])
    copy = copy_out(pools, pages, slots)
    pages[:], slots[:] = PAGES + 99, SLOTS + 99
    device.gate.open()
    assert copy.wait(WAIT_S)
    assert copy.error == ""
    assert pools._host["kv"][:2, 0].tolist() == [7, 3]


@pytest.mark.parametrize(
    ("pages", "slots"),
    [
        (np.array([0.0, 1.0]), np.array([0, 1])),
        (np.array([True, False]), np.array([0, 1])),
        (np.array([[0, 1]]), np.array([0, 1])),
        (np.int64(3), np.array([0])),
        (np.array([0, 1]), np.array([5, 5])),
    ],
    ids=["floats", "bools", "two axes", "no axis", "a host page twice"],
)
def test_numbers_that_are_none_are_refused(pools: AdoptedPools, pages: Any, slots: Any) -> None:
    with pytest.raises(InputError):
        copy_out(pools, pages, slots)


def test_pages_are_written_once_and_read_often(pools: AdoptedPools) -> None:
    twice, once = {"kv": np.array([4, 4])}, {"kv": np.array([0, 1])}
    assert pools.copy_out(twice, once).wait(WAIT_S)
    assert pools.copy_in(once, twice).wait(WAIT_S)
    with pytest.raises(InputError, match="written twice"):
        pools.copy_in(twice, once)


def test_what_is_wrong_is_named(pools: AdoptedPools) -> None:
    ok = np.array([0, 1])
    for pages, slots, key, text in (
        ([0, PAGES], ok, "pages", f"pages of 'kv' name {PAGES}; there are 0 to {PAGES - 1}"),
        (ok, [-1, 0], "slots", "slots of 'kv' name -1"),
        ([0.5, 1.0], ok, "pages", "are float64, not integers"),
        ([], [], "pages", r"have shape \(0,\)"),
        ([[0], [1, 2]], ok, "pages", "are no array on the host"),
        (ok, [3, 3], "slots", "name 3, which is written twice"),
    ):
        with pytest.raises(InputError, match=text) as caught:
            copy_out(pools, pages, slots)
        assert caught.value.where.key == key
        assert caught.value.remedy
    for names in ({"kv": ok, "vk": ok}, {"vk": ok}):
        for pages, slots in ((names, {"kv": ok}), ({"kv": ok}, names)):
            with pytest.raises(InputError, match="vk" if len(names) > 1 else "of pool 'kv'"):
                pools.copy_in(pages, slots)
    for groups in (True, 1.0, None):
        with pytest.raises(InputError, match="groups"):
            pools.copy_in({"kv": ok}, {"kv": ok}, groups=groups)  # type: ignore[arg-type]


def test_a_group_that_is_not_there_is_refused(pools: AdoptedPools) -> None:
    copy = pools.copy_in({"kv": np.arange(2)}, {"kv": np.arange(2)}, groups=3)
    assert copy.wait(WAIT_S, group=2)
    copy.join(-3)
    for group in (3, -4, True, "last"):
        for ask in (copy.done, copy.join, lambda group: copy.wait(WAIT_S, group)):
            with pytest.raises(InputError, match="there is no group"):
                ask(group)  # type: ignore[operator]


# ── host pages, pools ────────────────────────────────────────────────────────────────────────────


def test_host_pages_that_cannot_be_used_are_refused(device: Device) -> None:
    adopted = {name: adopt(layers(), page_axis=0) for name in ("kv", "index")}
    pools, good = AdoptedPools(adopted, device), host()
    fixed = host()
    fixed.flags.writeable = False
    for name, memory, chunk_pages in (
        ("latents", good, None),
        ("kv", good.astype(np.float32), None),
        ("kv", good[:0], None),
        ("kv", good[::2], None),
        ("kv", good[:, :95], None),
        ("kv", good[0], None),
        ("kv", fixed, None),
        ("kv", torch.from_numpy(good), None),
        ("kv", [[1]], None),
        ("kv", good, 0),
        ("kv", good, -1),
        ("kv", good, 2.5),
    ):
        with pytest.raises(ConfigError):
            pools.pin(name, memory, chunk_pages)
    assert not device.pinned
    pools.pin("kv", good, 4)
    with pytest.raises(ConfigError, match="is pinned"):
        pools.pin("kv", host())
    device.refuses = True
    with pytest.raises(ConfigError, match="refused"):
        pools.pin("index", host())
    assert device.pinned == [(good.ctypes.data, [512, 512, 256])]
    numbers = {name: np.arange(2) for name in adopted}
    with pytest.raises(InputError, match="index"):
        pools.copy_out(numbers, numbers)
    device.refuses = False
    pools.pin("index", host())
    assert pools.copy_out(numbers, numbers).wait(WAIT_S)


@pytest.mark.parametrize("wrong", ["elsewhere", "none", "no pool", "shared", "cannot prepare"])
def test_a_device_that_was_taken_over_is_closed_when_it_cannot_be_used(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: CpuDevice, memory: object) -> None:
        raise ConfigError("a page is larger than a chunk", remedy="use less")

    if wrong == "cannot prepare":
        monkeypatch.setattr(CpuDevice, "prepare", refuse)
    device = CpuDevice(Timeline())
    made = [t.to("meta") if wrong == "elsewhere" else t for t in layers()]
    memory = adopt(layers(), page_axis=0)
    if wrong == "elsewhere":
        memory.tensors = tuple(made)
    pools: dict[str, Any] = {
        "none": {}, "no pool": {"kv": layers()[0]}, "shared": {"kv": memory, "again": memory}
    }.get(wrong, {"kv": memory})  # fmt: skip
    with pytest.raises(ConfigError):
        AdoptedPools(pools, device)
    assert not device.compute._thread.is_alive()


def test_memory_is_adopted_once() -> None:
    tensor = torch.zeros(2, PAGES, 32)
    with pytest.raises(ConfigError, match=r"adopt\(\[tensor\]"):
        adopt(tensor, page_axis=1)  # type: ignore[arg-type]
    for tensors in ([tensor, tensor], [tensor[:, :6], tensor[:, 5:11]]):
        with pytest.raises(ConfigError, match="share memory"):
            adopt(tensors, page_axis=1)
    mixed = torch.zeros(PAGES, 3, 32)  # layers within a page
    assert adopt([mixed[:, i] for i in range(3)], page_axis=0).layout.pieces == 3


@given(seed=st.integers(0, 9999))
def test_pages_meet_where_bytes_are_shared(seed: int) -> None:
    """Layouts of one step exactly, as bytes counted one by one; others at least then."""
    rng = np.random.default_rng(seed)
    step = int(rng.integers(4, 12))

    def layout() -> PageLayout:
        other = step if rng.integers(4) else int(rng.integers(4, 12))
        return PageLayout(
            rng.integers(0, 60, int(rng.integers(1, 4))).astype(np.int64),
            other,
            int(rng.integers(1, other + 1)),
            int(rng.integers(1, 6)),
        )

    def taken(one: PageLayout) -> list[set[int]]:
        starts = [[at + p * one.page_stride for p in range(one.pages)] for at in one.starts]
        return [{at + i for at in piece for i in range(one.piece_bytes)} for piece in starts]

    one, other = layout(), layout()
    shares = bool(set().union(*taken(one)) & set().union(*taken(other)))
    if one.page_stride == other.page_stride and min(one.pages, other.pages) > 1:
        assert one.shares_bytes(other) == other.shares_bytes(one) == shares
    else:
        assert one.shares_bytes(other) >= shares
        assert one.shares_bytes(other) == other.shares_bytes(one)
    if one.pages > 1:
        assert one.shares_bytes() == any(a & b for a, b in itertools.combinations(taken(one), 2))


def test_pages_that_overlap_are_not_adopted() -> None:
    for tensor in (
        torch.zeros(1, 32).expand(PAGES, 32),
        torch.zeros(99).as_strided((4, 32), (8, 1)),
    ):
        with pytest.raises(ConfigError, match="overlap"):
            adopt([tensor], page_axis=0)


# ── a device that breaks; the end ────────────────────────────────────────────────────────────────


def test_a_device_that_broke_is_told_of(pools: AdoptedPools, device: Device) -> None:
    """An engine that asks, waits or joins hears of it instead of waiting for ever."""
    numbers = {"kv": np.arange(2)}
    good = pools.copy_in(numbers, numbers)
    assert good.wait(WAIT_S)
    device.gate.shut()

    def broken() -> None:
        device.gate.pass_through()
        raise MemoryError("planted")

    device.h2d.enqueue(broken)
    copy = pools.copy_in(numbers, numbers)
    assert not copy.wait(0.01)
    assert not copy.done()
    device.gate.open()
    for call in (copy.wait, copy.join, lambda: copy.wait(WAIT_S)):
        with pytest.raises(IntegrityError, match="planted"):
            call()
    for call in (copy.done, pools.fence, lambda: pools.copy_out(numbers, numbers)):
        with pytest.raises(IntegrityError, match="planted"):
            call()
    assert good.done()
    good.join()


@pytest.mark.parametrize("way", ["copy_in", "copy_out"])
def test_copies_come_behind_a_fence(
    pools: AdoptedPools, device: Device, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Of either direction: what the engine does there reads pages that are copied to as well."""
    event = CpuEvent()
    monkeypatch.setattr(device, "fence", lambda: event)
    pools.fence()
    numbers = {"kv": np.arange(3)}
    copy = getattr(pools, way)(numbers, numbers)
    assert not copy.wait(0.05)
    assert not device.copies
    event.complete()
    assert copy.wait(WAIT_S)


def test_copies_in_go_before_those_of_less_hurry(
    pools: AdoptedPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody waits for what comes in, as a rule, and for nothing that goes out."""
    numbers, seen = {"kv": np.arange(2)}, list[CopyPriority]()
    real = pools._queues.add

    def add(copies: Any, priority: CopyPriority, *args: Any, **more: Any) -> Any:
        seen.append(priority)
        return real(copies, priority, *args, **more)

    monkeypatch.setattr(pools._queues, "add", add)
    assert pools.copy_in(numbers, numbers).wait(WAIT_S)
    assert pools.copy_out(numbers, numbers).wait(WAIT_S)
    assert seen == [CopyPriority.RESTORE, CopyPriority.WRITE_BACK]


def test_memory_goes_when_a_later_close_has_ended_all(monkeypatch: pytest.MonkeyPatch) -> None:
    stranded: list[object] = []
    monkeypatch.setattr(transfer_interface, "STRANDED", stranded)
    device = Device()
    device.gate.shut()
    pools = AdoptedPools({"kv": adopt(layers(), page_axis=0)}, device)
    pools.pin("kv", host())
    copy_out(pools, [1], [1])
    assert [pools.close(0.0), pools.close(0.0)] == [False, False]
    assert stranded == [pools]
    device.gate.open()
    assert pools.close(WAIT_S)
    assert not stranded


def test_memory_of_a_copy_that_outlives_close_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine may drop everything: pools and host pages may still be written."""
    monkeypatch.setattr(transfer_interface, "STRANDED", [])
    device = Device()
    close = CpuDevice.close
    monkeypatch.setattr(CpuDevice, "close", lambda *args: close(*args) and False)
    memory, pages = adopt(layers(), page_axis=0), host()
    kept = [weakref.ref(memory), weakref.ref(pages)]
    pools = AdoptedPools({"kv": memory}, device)
    pools.pin("kv", pages)
    assert not pools.close(WAIT_S)
    del pools, memory, pages, device
    gc.collect()
    assert all(ref() is not None for ref in kept)
    monkeypatch.undo()
    gc.collect()
    assert all(ref() is None for ref in kept)
    assert not [t for t in threading.enumerate() if t.name.startswith("kvstrata-h2d")]
