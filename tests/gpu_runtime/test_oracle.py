"""The proof can fail: whatever is wrong with a page that a row reads, the oracle says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from kvstrata.boundary import BatchPlan, RowPlan, RowResult
from kvstrata.gpu_runtime import (
    ComponentPool,
    ComponentSpec,
    ForwardContext,
    ForwardResult,
    ForwardRow,
    LocalGPURuntime,
    OracleRunner,
    ReqToToken,
)
from kvstrata.gpu_runtime.testing import Prompt, Rig
from kvstrata.handles import Extents, Tier, by_pool, page_count
from kvstrata.staging.pages import pages_of_runs

Bench = Callable[..., Rig]
SIZE = 4
"""Tokens a page."""


def pages_of(extents: Extents, pool: str) -> list[int]:
    return [int(p) for e in by_pool(extents)[pool] for p in pages_of_runs(e.page_runs)]


def data(rig: Rig, pool: str = "kv") -> torch.Tensor:
    """The bytes of a pool: [planes, pages, bytes]."""
    assert isinstance(rig.runtime, LocalGPURuntime)
    return rig.runtime.core.pools[pool].data


def mismatched(rig: Rig, prompt: Prompt, pages: Extents) -> int:
    """Attach pages to a longer prompt; how many of them the oracle calls wrong."""
    before, seen = rig.driver.mismatched, rig.driver.verified
    row = rig.ask(prompt.more([1, 2]), attach=pages)
    rig.release(row.handle)
    found = rig.driver.mismatched - before
    rig.driver.mismatched = before  # they are wanted
    assert rig.driver.verified - seen == page_count(pages)
    return found


# ── one thing wrong ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("pool", ["kv", "index"])
def test_every_single_byte_counts(bench: Bench, pool: str) -> None:
    """Flip each byte of one page, one at a time: always exactly that page is wrong."""
    rig = bench(two_pools=True)
    prompt = rig.prompt(12)
    extents = rig.make_pages(prompt)
    page = pages_of(extents, pool)[1]
    planes, _, nbytes = data(rig, pool).shape
    for plane in range(planes):
        for at in range(0, nbytes, 1 if pool == "index" else 3):
            data(rig, pool)[plane, page, at] ^= 1
            assert mismatched(rig, prompt, extents) == 1, (plane, at)
            data(rig, pool)[plane, page, at] ^= 1
    assert mismatched(rig, prompt, extents) == 0


def swap_pages(rig: Rig, extents: Extents) -> None:
    a, b = pages_of(extents, "kv")[:2]
    data(rig)[:, [a, b]] = data(rig)[:, [b, a]]


def swap_layers(rig: Rig, extents: Extents) -> None:
    a, b = pages_of(extents, "kv")[:2]
    planes = data(rig)
    planes[:, [a, b]] = planes[[2, 3, 0, 1]][:, [a, b]]


def swap_k_and_v(rig: Rig, extents: Extents) -> None:
    a, b = pages_of(extents, "kv")[:2]
    planes = data(rig)
    planes[:, [a, b]] = planes[[1, 0, 3, 2]][:, [a, b]]


def shift_positions(rig: Rig, extents: Extents) -> None:
    """Each token's KV one position further, inside its page."""
    a, b = pages_of(extents, "kv")[:2]
    planes = data(rig)
    tokens = planes[:, [a, b]].view(planes.shape[0], 2, SIZE, -1)
    planes[:, [a, b]] = tokens.roll(1, dims=2).reshape(planes.shape[0], 2, -1)


def zero_pages(rig: Rig, extents: Extents) -> None:
    data(rig)[:, pages_of(extents, "kv")[:2]] = 0


@pytest.mark.parametrize(
    "damage", [swap_pages, swap_layers, swap_k_and_v, shift_positions, zero_pages]
)
def test_what_was_mixed_up_is_found(bench: Bench, damage: Callable[[Rig, Extents], None]) -> None:
    rig = bench()
    prompt = rig.prompt(16)
    extents = rig.make_pages(prompt)
    damage(rig, extents)
    assert mismatched(rig, prompt, extents) == 2
    if damage is not zero_pages:  # its own inverse, or a circle
        for _ in range(SIZE - 1 if damage is shift_positions else 1):
            damage(rig, extents)
        assert mismatched(rig, prompt, extents) == 0


def test_pages_in_a_wrong_order_and_of_another_prompt_are_found(bench: Bench) -> None:
    """What control could do wrong with valid extents."""
    rig = bench(pages=48)
    prompt, other = rig.prompt(12), rig.prompt(12, 1)
    pages, others = rig.make_pages(prompt), rig.make_pages(other)
    (extent,) = pages
    turned = (extent.slice(1, 2), extent.slice(0, 1), extent.slice(2, 3))
    assert mismatched(rig, prompt, turned) == 2
    assert mismatched(rig, prompt, others) == 3
    shifted = rig.prompt(4, 2).more(prompt.tokens[:8])  # the same tokens, one page further
    assert mismatched(rig, shifted, (extent,)) == 3
    salted = Prompt(prompt.tokens, SIZE, bytes(32))
    assert mismatched(rig, salted, pages) == 3
    assert mismatched(rig, prompt, pages) == 0


def test_a_page_that_was_damaged_on_its_way_is_found(bench: Bench) -> None:
    """In host memory, where no checksum of a frame looks."""
    rig = bench()
    prompt = rig.prompt(12)
    copies = rig.in_l2(prompt)
    assert isinstance(rig.runtime, LocalGPURuntime)
    rig.runtime.core.staging.payload("kv", pages_of(copies, "kv")[2])[5] ^= 0x10
    row = rig.ask(prompt.more([7]), restore=copies)
    assert (rig.driver.verified, rig.driver.mismatched) == (3, 1)
    rig.driver.mismatched = 0
    assert page_count(row.extents) == 3


def test_the_pages_of_two_components_are_not_the_same(bench: Bench) -> None:
    """Equal geometry, another name: mixing them up is seen."""
    runner = OracleRunner()
    found = []
    for name in ("kv", "index"):
        pool = ComponentPool(ComponentSpec(name, 1, 1, 8, "uint8"), 4, SIZE, torch.device("cpu"))
        found.append(runner._generate(name, pool, bytes(32)))
    assert not torch.equal(*found)


# ── the decode path ──────────────────────────────────────────────────────────────────────────────


def test_what_is_decoded_is_verified_when_it_is_attached(bench: Bench) -> None:
    """Pages that fill during decode hold what a prefill of the same tokens computes."""
    rig = bench()
    prompt = rig.prompt(5)
    batch, handle = rig.start(prompt, 12)
    results = [rig.only_row(batch)]
    for steps in (1, 4, 6):
        batch, _ = rig.driver.run(BatchPlan(rows=(RowPlan(row=handle),), steps=steps))
        results.append(rig.only_row(batch))
    tokens = np.frombuffer(b"".join(r.sampled for r in results), np.int32)
    extents = tuple(e for r in results for e in r.extents)
    assert [page_count(r.extents) for r in results] == [1, 0, 1, 2], "never a partial page"
    assert page_count(extents) == 4
    whole = prompt.more(tokens[:-1])  # KV of the last token is never needed
    rig.release(handle)
    assert mismatched(rig, whole, extents) == 0
    page = pages_of(extents, "kv")[3]
    data(rig)[0, page, 0] ^= 1
    assert mismatched(rig, whole, extents) == 1


def test_a_row_verifies_what_it_attached_in_each_batch(bench: Bench) -> None:
    """A shared page that somebody wrote to while a request ran is found in its next batch."""
    rig = bench()
    prompt = rig.prompt(8)
    extents = rig.make_pages(prompt)
    batch, handle = rig.start(prompt.more([1]), 8, attach=extents)
    rig.only_row(batch)
    data(rig)[1, pages_of(extents, "kv")[0], 2] ^= 1
    batch, _ = rig.driver.run(BatchPlan(rows=(RowPlan(row=handle),), steps=2))
    rig.only_row(batch)
    assert rig.driver.mismatched == 1
    rig.driver.mismatched = 0


def test_the_shared_page_of_a_cached_prompt_keeps_its_bytes(bench: Bench) -> None:
    rig = bench(two_pools=True)
    prompt = rig.prompt(8)
    extents = rig.make_pages(prompt)
    before = {pool: data(rig, pool).clone() for pool in ("kv", "index")}
    batch, handle = rig.start(prompt, 6, attach=extents)
    first: RowResult = rig.only_row(batch)
    batch, _ = rig.driver.run(BatchPlan(rows=(RowPlan(row=handle),), steps=5))
    second = rig.only_row(batch)
    assert (page_count(first.extents), page_count(second.extents)) == (0, 1)
    for pool, bytes_ in before.items():
        shared = pages_of(extents, pool)
        assert torch.equal(data(rig, pool)[:, shared], bytes_[:, shared])
        new = pages_of(second.extents, pool)
        assert not set(new) & set(shared)


def test_a_shared_page_is_never_written_whatever_the_runner_writes(bench: Bench) -> None:
    """A runner that writes nonsense spoils its own pages only: the copy, and what it decodes."""
    rig = bench(two_pools=True)
    prompt = rig.prompt(8)
    extents = rig.make_pages(prompt)
    copies = rig.store(prompt, extents, Tier.L2).extents
    whole = rig.runner.forward
    written: list[dict[str, list[int]]] = []

    def nonsense(rows: Sequence[ForwardRow], context: ForwardContext) -> ForwardResult:
        result = whole(rows, context)
        for row in rows:
            slots: dict[str, list[int]] = {}
            for name, pool in context.pools.items():
                found = context.req_to_token.slots(name, row.slot, row.start, row.start + row.count)
                slots[name] = found.tolist()
                tokens = pool.data.view(pool.spec.planes, -1, pool.spec.token_bytes)
                tokens[:, found.to(torch.int64)] = 0xEE
            written.append(slots)
        return result

    rig.runner.forward = nonsense  # type: ignore[method-assign]
    for cached in ({"attach": extents}, {"restore": copies}):
        batch, handle = rig.start(prompt, 6, **cached)
        row = rig.only_row(batch)
        batch, _ = rig.driver.run(BatchPlan(rows=(RowPlan(row=handle),), steps=5))
        more = rig.only_row(batch)
        rig.release(handle)
        for pool in ("kv", "index"):
            pages = {slot // SIZE for slots in written for slot in slots[pool]}
            assert len(pages) == 3, "the copy, and two that are decoded"
            assert not pages & set(pages_of(row.extents or extents, pool))
        written.clear()
        rig.free(more.extents)
        if row.extents:
            copied = row.extents
    rig.runner.forward = whole  # type: ignore[method-assign]
    assert rig.driver.mismatched == 2, "the two copies, in the batches that decoded"
    rig.driver.mismatched = 0
    assert mismatched(rig, prompt, extents) == 0
    assert mismatched(rig, prompt, copied) == 0


def test_keys_are_kept_from_step_to_step_and_dropped_with_the_request() -> None:
    """A slot that is used by another request starts anew, also in the middle of a page."""
    pool = ComponentPool(ComponentSpec("kv", 1, 1, 4, "float16"), 8, SIZE, torch.device("cpu"))
    table = ReqToToken(("kv",), 1, 32, SIZE, torch.device("cpu"))
    table.set_pages("kv", 0, 0, np.arange(8))
    context = ForwardContext({"kv": pool}, table, SIZE)

    def row(tokens: list[int], start: int, first: bool, attached: int = 0) -> ForwardRow:
        array = np.array(tokens, np.int32)
        count = len(tokens) - start
        return ForwardRow(0, bytes(32), array, start, count, attached, first, samples=True)

    def written(*steps: ForwardRow) -> torch.Tensor:
        runner = OracleRunner()
        pool.data.zero_()
        for step in steps:
            runner.forward([step], context)
        return pool.data.clone()

    one = list(range(11))
    whole = written(row(one, 0, True))
    steps = [row(one[: n + 1], n, n == 7) for n in range(7, 11)]
    by_step = written(row(one[:7], 0, True), *steps)
    assert torch.equal(by_step[:, :2], whole[:, :2]), "full pages are the same, however they came"
    other = [9, 9, 9, 9, 9]
    again = written(row(one, 0, True), row(other, 0, True))
    alone = written(row(other, 0, True))
    assert torch.equal(again[:, 0], alone[:, 0])
