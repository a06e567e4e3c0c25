"""Component pools: every bit survives gather and scatter; ReqToToken says where tokens are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import ConfigError
from kvstrata.gpu_runtime import ComponentPool, ComponentSpec, ReqToToken
from kvstrata.gpu_runtime.device_pages import PageCopy
from kvstrata.gpu_runtime.pools import DTYPES
from kvstrata.staging import aligned

CPU = torch.device("cpu")

# Bit patterns that a detour over another type would change: NaN payloads, signalling NaNs,
# negative zero, denormals, infinities.
SPECIAL = {
    "float32": np.array([0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0x80000000, 1], np.uint32),
    "bfloat16": np.array([0x7FC1, 0x7F81, 0xFFFF, 0x8000, 1, 0xFF80], np.uint16),
    "float16": np.array([0x7E01, 0x7C01, 0xFFFF, 0x8000, 1, 0xFC00], np.uint16),
    "float8_e4m3fn": np.array([0x7F, 0xFF, 0x80, 1], np.uint8),
    "float8_e5m2": np.array([0x7D, 0x7E, 0xFF, 0x80, 0xFC, 1], np.uint8),
    "uint8": np.array([0, 255, 128], np.uint8),
    "int8": np.array([0, 255, 128], np.uint8),
}


def fill(pool: ComponentPool, seed: int) -> None:
    """Random bytes, with special patterns all over them."""
    flat = pool.data.view(-1).numpy()
    flat[:] = np.random.default_rng(seed).integers(0, 256, flat.size, np.uint8)
    raw = SPECIAL[pool.spec.dtype].tobytes()
    for at in range(0, flat.size - len(raw), 3 * len(raw)):
        flat[at : at + len(raw)] = np.frombuffer(raw, np.uint8)


def page_first(pool: ComponentPool, page: int) -> bytes:
    """What a page is on the host: its planes one after the other."""
    return b"".join(pool.data[plane, page].numpy().tobytes() for plane in range(pool.spec.planes))


GEOMETRY = st.fixed_dictionaries(
    {
        "layers": st.integers(1, 3),
        "kv_heads": st.integers(1, 3),
        "head_dim": st.integers(1, 9),
        "dtype": st.sampled_from(sorted(DTYPES)),
        "layout": st.sampled_from(["NHD", "HND"]),
    }
)


@given(
    geometry=GEOMETRY,
    page_tokens=st.integers(1, 6),
    shape=st.sampled_from(["random", "up", "down", "gap"]),
    count=st.integers(1, 6),
    seed=st.integers(0, 2**32),
)
def test_gather_and_scatter_move_every_bit_and_nothing_else(
    geometry: dict[str, object], page_tokens: int, shape: str, count: int, seed: int
) -> None:
    """B102: all dtypes, both layouts, odd sizes, contiguous pages and others."""
    spec = ComponentSpec("kv", **geometry)  # type: ignore[arg-type]
    pool, other = (ComponentPool(spec, 12, page_tokens, CPU) for _ in range(2))
    fill(pool, seed)
    fill(other, seed + 1)
    numbers = np.random.default_rng(seed)
    pages, slots, targets = (
        {
            "random": numbers.permutation(12)[:count],
            "up": np.arange(12 - count, 12),
            "down": np.arange(count)[::-1].copy(),
            "gap": np.concatenate((np.arange(count - 1), [11])),
        }[shape].astype(np.int64)
        for _ in range(3)
    )
    host = np.full((12, aligned(pool.page_bytes)), 0xA5, np.uint8)
    before_host, before_pool, before_other = host.copy(), pool.data.clone(), other.data.clone()

    pool.gather(PageCopy(pool, pages, host, slots))
    for page, slot in zip(pages.tolist(), slots.tolist(), strict=True):
        assert host[slot, : pool.page_bytes].tobytes() == page_first(pool, page)
        assert (host[slot, pool.page_bytes :] == 0xA5).all(), "the padding was written"
    untouched = np.setdiff1d(np.arange(12), slots)
    assert (host[untouched] == before_host[untouched]).all()
    assert torch.equal(pool.data, before_pool)

    other.scatter(PageCopy(other, targets, host, slots))
    for page, target in zip(pages.tolist(), targets.tolist(), strict=True):
        assert page_first(other, target) == page_first(pool, page)
    untouched = np.setdiff1d(np.arange(12), targets)
    assert torch.equal(other.data[:, untouched], before_other[:, untouched])


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_typed_views_are_the_pool_itself(dtype: str, layout: str) -> None:
    spec = ComponentSpec("kv", layers=2, kv_heads=3, head_dim=5, dtype=dtype, layout=layout)
    pool = ComponentPool(spec, 4, 7, CPU)
    fill(pool, 1)
    item = DTYPES[dtype].itemsize
    for layer in range(2):
        for which, view in enumerate(pool.kv(layer)):
            assert view.dtype == DTYPES[dtype]
            assert tuple(view.shape) == ((4, 7, 3, 5) if layout == "NHD" else (4, 3, 7, 5))
            plane = pool.data[2 * layer + which]
            assert torch.equal(view.contiguous().view(torch.uint8).view(4, -1), plane)
            assert view.data_ptr() == plane.data_ptr()
    assert pool.page_bytes == 4 * 7 * 3 * 5 * item == spec.page_bytes(7)


def test_copy_page_copies_one_page_in_all_planes() -> None:
    pool = ComponentPool(ComponentSpec("kv", 2, 1, 3, "uint8"), 5, 3, CPU)
    fill(pool, 2)
    before = pool.data.clone()
    pool.copy_page(1, 3)
    assert page_first(pool, 3) == page_first(pool, 1)
    assert torch.equal(pool.data[:, [0, 1, 2, 4]], before[:, [0, 1, 2, 4]])


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"kind": "mla", "kv_heads": 8}, "kv_heads"),
        ({"kind": "swa"}, "kind"),
        ({"dtype": "float64"}, "dtype"),
        ({"layout": "DHN"}, "layout"),
        ({"layers": 0}, ""),
        ({"head_dim": -1}, ""),
    ],
)
def test_what_a_pool_cannot_hold_is_a_config_error(change: dict[str, object], key: str) -> None:
    """B105: names the feature that is missing."""
    spec = {"name": "kv", "layers": 1, "kv_heads": 1, "head_dim": 8, "dtype": "uint8", **change}
    with pytest.raises(ConfigError) as caught:
        ComponentPool(ComponentSpec(**spec), 4, 4, CPU)  # type: ignore[arg-type]
    assert str(caught.value.where.key).endswith(key)
    if key:
        assert str(change[key]) in str(caught.value)


def test_more_device_memory_than_there_is_is_a_config_error() -> None:
    spec = ComponentSpec("kv", layers=1, kv_heads=1, head_dim=2**20, dtype="float32")
    with pytest.raises(ConfigError, match="pages of") as caught:
        ComponentPool(spec, 2**24, 512, CPU)
    assert caught.value.where.key == "pools.pages"


# ── ReqToToken ───────────────────────────────────────────────────────────────────────────────────


def test_req_to_token_holds_the_slot_of_each_position() -> None:
    table = ReqToToken(("kv", "index"), 3, 10, 4, CPU)
    assert table.tables["kv"].shape == (3, 12), "whole pages"
    pages = np.array([7, 2, 5], np.int64)
    table.set_pages("kv", 1, 0, pages)
    table.set_pages("index", 1, 1, pages[:2])
    table.set_pages("kv", 2, 0, np.empty(0, np.int64))
    want = [p * 4 + i for p in (7, 2, 5) for i in range(4)]
    assert table.slots("kv", 1, 0, 12).tolist() == want
    assert table.slots("kv", 1, 3, 7).tolist() == want[3:7]
    assert table.slots("index", 1, 4, 12).tolist() == want[:8]
    assert table.slots("kv", 0, 0, 12).tolist() == table.slots("kv", 2, 0, 12).tolist() == [0] * 12
    table.set_pages("kv", 1, 1, np.array([0], np.int64))
    assert table.slots("kv", 1, 0, 12).tolist() == [*want[:4], 0, 1, 2, 3, *want[8:]]
