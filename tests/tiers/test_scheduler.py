"""The scheduler over a real runtime: exact hits, overlap, aborts, progress, sharing, calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstrata.errors import CapacityError, InputError
from kvstrata.handles import Tier
from kvstrata.tiers import RequestState

PAGE = 4
BOTH = pytest.mark.parametrize("mode", ["cache", "buffer_only"])


def pages(*names: int) -> list[int]:
    """A prompt of whole pages: page `n` has tokens of its own."""
    return [name * PAGE + i for name in names for i in range(PAGE)]


def brute_force_hits(prompts: Sequence[Sequence[int]]) -> int:
    """Pages of the longest prefix that an earlier request had, summed."""
    seen: set[tuple[int, ...]] = set()
    hits = 0
    for prompt in prompts:
        prefixes = [tuple(prompt[: end * PAGE]) for end in range(1, len(prompt) // PAGE + 1)]
        for prefix in prefixes:
            if prefix not in seen:
                break
            hits += 1
        seen.update(prefixes)
    return hits


PROMPTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=0, max_size=9),
        st.integers(0, PAGE - 1),
        st.integers(1, 6),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.no_cover
@BOTH
@settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(prompts=PROMPTS, batch=st.integers(1, 4), two_pools=st.booleans(), l2=st.integers(4, 12))
def test_hits_are_exact_and_every_byte_is_right(
    make_small: Any, mode: str, prompts: Any, batch: int, two_pools: bool, l2: int
) -> None:
    """Small tiers, any order of pages, chunks and decode: nothing is lost, nothing is wrong."""

    small = make_small(
        l1=14,
        l2=l2,
        mode=mode,
        two_pools=two_pools,
        max_batch=batch,
        chunk_tokens=3 * PAGE,
        decode_steps=2,
        lookahead=3,
    )
    texts = [[*pages(*names), *range(900, 900 + tail)] or [7] for names, tail, _ in prompts]
    for text, (_, _, new) in zip(texts, prompts, strict=True):
        small.submit(text, max_new_tokens=new)
    small.run()
    small.check_no_leak()
    results = small.results.values()
    assert len(results) == len(texts)
    assert all(r.state is RequestState.FINISHED for r in results)
    assert [len(small.results[i + 1].output_tokens) // 4 for i in range(len(texts))] == [
        new for _, _, new in prompts
    ]
    found = sum(r.page_hits + r.duplicate_pages for r in results)
    assert found == brute_force_hits(texts)
    small.runtime.close(10)


@BOTH
def test_hits_from_each_tier(make_small: Any, mode: str) -> None:
    """B049: L1, then L2 (cache mode), then L3; after an L3 load the pages are in L2."""
    small = make_small(mode=mode)
    prompt = pages(1, 2, 3, 4, 5)
    assert small.hits(small.ask([*prompt, 1])) == (0, 0, 0)
    assert small.hits(small.ask([*prompt, 2])) == (5, 0, 0)
    small.drop_tier(Tier.L1)
    if mode == "cache":
        assert small.hits(small.ask([*prompt, 3])) == (0, 5, 0)
        small.drop_tier(Tier.L1)
        small.drop_tier(Tier.L2)
    assert small.hits(small.ask([*prompt, 4])) == (0, 0, 5)
    tree = small.scheduler.cache.tree
    assert tree.resident(Tier.L2) == (5 if mode == "cache" else 0)
    small.check_no_leak()


def test_all_orders_of_tiers_along_a_path(make_small: Any) -> None:
    """B049: whichever tier a part of the path is in, it is used."""
    small = make_small()
    prompt = pages(*range(9))
    small.ask(prompt)
    tree = small.scheduler.cache.tree
    for l1_pages in range(0, 10, 3):
        for l2_pages in range(0, 10, 3):
            small.drop_tier(Tier.L1)
            small.drop_tier(Tier.L2)
            if l2_pages:
                small.ask([*prompt[: l2_pages * PAGE], 999])
                small.drop_tier(Tier.L1)
            small.scheduler.cache.outbox.extend(
                small.scheduler.cache.free(e) for _, e in tree.evict(Tier.L2, 9 - l2_pages)
            )
            if l1_pages:
                small.ask([*prompt[: l1_pages * PAGE], 998])
            result = small.ask([*prompt, 997])
            assert result.page_hits == 9, (l1_pages, l2_pages)
            small.check_no_leak()


def test_a_new_process_finds_everything_in_l3(make_small: Any) -> None:
    first = make_small()
    prompts = [pages(1, 2, 3), pages(1, 2, 4, 5), pages(6)]
    for prompt in prompts:
        first.ask(prompt)
    second = make_small(backend=first.backend)
    results = [second.ask(prompt) for prompt in prompts]
    assert [r.page_hits for r in results] == [3, 4, 1]
    assert second.hits(results[0]) == (0, 0, 3)


def test_wholly_cached_prompt_computes_its_last_token(make_small: Any) -> None:
    small = make_small()
    first = small.ask(pages(1, 2, 3))
    again = small.ask(pages(1, 2, 3))
    assert (again.page_hits, again.computed_tokens) == (3, 1)
    assert again.output_tokens == first.output_tokens
    small.drop_tier(Tier.L1)
    restored = small.ask(pages(1, 2, 3))
    assert small.hits(restored) == (0, 3, 0)
    assert restored.output_tokens == first.output_tokens
    small.check_no_leak()


@BOTH
def test_decoded_pages_are_kept(make_small: Any, mode: str) -> None:
    """A conversation goes on: the answer's pages hit, and tokens do not depend on the cache."""
    small = make_small(mode=mode, decode_steps=3)
    prompt = pages(1, 2)
    answer = small.ask(prompt, max_new_tokens=11)
    tokens = memoryview(answer.output_tokens).cast("i").tolist()
    assert len(tokens) == 11
    follow_up = [*prompt, *tokens, 5, 5, 5]
    result = small.ask(follow_up)
    assert result.page_hits == 2 + 10 // PAGE  # KV of the last token was never computed
    cold = make_small(mode=mode, with_l3=False)
    assert cold.ask(prompt, max_new_tokens=11).output_tokens == answer.output_tokens


def test_stop_token_ends_a_request(make_small: Any) -> None:
    small = make_small(decode_steps=4)
    tokens = memoryview(small.ask(pages(1), max_new_tokens=9).output_tokens).cast("i").tolist()
    stopped = small.ask(pages(1), max_new_tokens=9, stop_tokens=(tokens[5],))
    assert memoryview(stopped.output_tokens).cast("i").tolist() == tokens[:6]
    small.check_no_leak()


def test_next_batch_is_prepared_while_one_runs(make_small: Any) -> None:
    small = make_small(max_batch=1)
    small.runner.gate.shut()
    for name in (1, 2, 3):
        small.submit(pages(name))
    small.step_until(lambda: small.scheduler.calls["execute_batch"] == 2)
    small.runner.gate.wait_for_one()
    assert small.runner.rows_run == [1], "batch 1 is running, batch 2 is enqueued"
    small.runner.gate.open()
    small.run()


@BOTH
def test_requests_share_pages_that_are_being_computed(make_small: Any, mode: str) -> None:
    """The second waits for the first rather than computing the same pages."""
    small = make_small(mode=mode, max_batch=4)
    for tail in range(4):
        small.submit([*pages(1, 2, 3), tail])
    small.run()
    assert sum(r.page_hits for r in small.results.values()) == 9
    assert sum(r.duplicate_pages for r in small.results.values()) == 0
    small.check_no_leak()


def test_requests_that_share_nothing_pass_those_that_wait(make_small: Any) -> None:
    small = make_small(max_batch=1)
    small.runner.gate.shut()
    small.submit(pages(1, 2))
    waits = small.submit([*pages(1, 2), 9])
    passes = small.submit(pages(7))
    small.step_until(lambda: small.scheduler.calls["execute_batch"] == 2)
    small.runner.gate.open()
    small.run()
    assert small.results[waits].page_hits == 2
    order = list(small.results)
    assert order.index(passes) < order.index(waits)


# ── memory ───────────────────────────────────────────────────────────────────────────────────────


@BOTH
@pytest.mark.parametrize("batch", [1, 4])
def test_progress_when_only_one_request_fits(make_small: Any, mode: str, batch: int) -> None:
    """B071: parked loads never hold what the head of the queue needs. A watchdog bounds it."""
    small = make_small(l1=12, l2=6, mode=mode, max_batch=batch, chunk_tokens=2 * PAGE)
    prompts = [pages(0, *range(10 * n, 10 * n + 8)) for n in (1, 2, 3)] * 3
    for prompt in prompts:
        small.submit(prompt, max_new_tokens=3)
    for _ in range(600):
        for result in small.scheduler.step(5):
            small.results[result.request_id] = result
        if small.scheduler.idle:
            break
    assert small.scheduler.idle, small.scheduler.describe()
    assert len(small.results) == len(prompts)
    small.check()
    small.check_no_leak()


def test_request_that_can_never_fit_is_refused_at_once(make_small: Any) -> None:
    small = make_small(l1=8)
    with pytest.raises(CapacityError, match="L1"):
        small.submit(pages(*range(9)))
    with pytest.raises(CapacityError, match="positions"):
        make_small(l1=4096).submit(pages(1), max_new_tokens=5000)
    assert small.scheduler.idle


def test_bad_input_is_refused(make_small: Any) -> None:
    small = make_small()
    with pytest.raises(InputError, match="without tokens"):
        small.submit([])
    with pytest.raises(InputError, match="max_new_tokens"):
        small.submit([1], max_new_tokens=0)
    with pytest.raises(InputError, match="int32"):
        small.scheduler.submit(memoryview(b"12345678").cast("q"), bytes(32))


# ── calls ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("rows", "length", "new"), [(1, 4, 1), (8, 4, 1), (8, 60, 1), (8, 8, 65)])
def test_calls_a_batch_are_constant(make_small: Any, rows: int, length: int, new: int) -> None:
    """Whatever rows, pages and tokens: one prepare, one execute, and a bounded rest a batch."""
    small = make_small(l1=900, l2=64, max_batch=rows, decode_steps=16)
    for n in range(3 * rows):
        small.submit(pages(*range(100 * n, 100 * n + length // PAGE)), max_new_tokens=new)
    small.scheduler.run_until_idle(30)
    calls = dict(small.scheduler.calls)
    batches = calls.pop("batches")
    for beside in ("drain", "idle"):
        calls.pop(beside, 0)
    assert calls["execute_batch"] == batches
    assert calls["prepare_batch"] <= batches + 3  # releases at the end need a plan too
    assert sum(calls.values()) <= 12 * batches, calls
    decoded = 3 * rows * new
    if new > 1:
        assert sum(calls.values()) / decoded < 0.25
