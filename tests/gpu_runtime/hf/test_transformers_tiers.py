"""The promise of the whole: tokens do not change with where a prefix came from.

Bit-equal logits are claimed where the steps have equal shapes (the same chunks, the same rows in a
batch): then every kernel runs as before, on the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvstrata.handles import Tier

PAGE = 8
NEW = 20
"""Tokens that are generated: they fill pages of their own."""

needs_gpu = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["cache", "buffer_only"])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_tokens_and_logits_with_prefixes_from_every_tier(
    make_rig: Any,
    plain: Any,
    prompt_of: Callable[[int], list[int]],
    kind: str,
    mode: str,
    device: str,
) -> None:
    """L1, L2, L3 and L3 in a second engine, against an engine without a cache and against
    Transformers' own loop. Chunks end where the cached prefix does, so logits are bit-equal."""
    prompt = prompt_of(4 * PAGE + 5)
    settings = {"device": device, "chunk": 4 * PAGE}
    want = plain(prompt, NEW, kind, device=device)
    bare = make_rig(kind, backend="", **settings)
    assert bare.ask(prompt, NEW).tokens == want
    logits = list(bare.runner.logits)
    assert len(logits) == NEW

    rig = make_rig(kind, mode=mode, **settings)
    below = (0, 4, 0) if mode == "cache" else (0, 0, 4)
    sources = [((), (0, 0, 0)), ((), (4, 0, 0)), ((Tier.L1,), below)]
    if mode == "cache":
        sources.append(((Tier.L1, Tier.L2), (0, 0, 4)))
    for dropped, hits in sources:
        rig.drop(*dropped)
        answer = rig.ask(prompt, NEW)
        assert answer.hits == hits
        assert answer.tokens == want
        assert same(rig.runner.logits, logits), hits
    rig.engine.close()

    second = make_rig(kind, mode=mode, **settings)
    answer = second.ask(prompt, NEW)
    assert answer.hits == (0, 0, 4)
    assert answer.tokens == want
    assert same(second.runner.logits, logits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_in_both_layouts(
    make_rig: Any,
    prompt_of: Callable[[int], list[int]],
    dtype: torch.dtype,
    layout: str,
    device: str,
) -> None:
    """Bit-equal too: the bytes that come back are those that left."""
    prompt = prompt_of(4 * PAGE + 5)
    rig = make_rig("qwen2", dtype=dtype, layout=layout, chunk=4 * PAGE, device=device)
    cold = rig.ask(prompt, NEW)
    logits = list(rig.runner.logits)
    for dropped, hits in (((Tier.L1,), (0, 4, 0)), ((Tier.L1, Tier.L2), (0, 0, 4))):
        rig.drop(*dropped)
        answer = rig.ask(prompt, NEW)
        assert (answer.hits, answer.tokens) == (hits, cold.tokens)
        assert same(rig.runner.logits, logits)


def test_layouts_hold_the_same_values(make_rig: Any, prompt_of: Callable[[int], list[int]]) -> None:
    prompt = prompt_of(3 * PAGE + 1)
    answers = [make_rig(layout=layout, backend="").ask(prompt, NEW) for layout in ("NHD", "HND")]
    assert answers[0].tokens == answers[1].tokens


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_first_logits_are_those_of_transformers_to_the_bit(
    make_rig: Any, plain_model: Any, prompt_of: Callable[[int], list[int]], kind: str
) -> None:
    """A whole prompt as one chunk goes through the same kernels as in Transformers."""
    prompt = prompt_of(3 * PAGE + 3)
    rig = make_rig(kind, backend="")
    rig.ask(prompt, 1)
    with torch.inference_mode():
        want = plain_model(kind)(torch.tensor([prompt]), logits_to_keep=1).logits[0]
    assert torch.equal(rig.runner.logits[0], want)


def test_wholly_cached_prompt_computes_its_last_token(
    make_rig: Any, plain: Any, prompt_of: Callable[[int], list[int]]
) -> None:
    """In a private copy of the last page: what others read stays as it was. One token alone is
    another shape than a chunk that ends with it, so logits are close, not equal."""
    prompt = prompt_of(4 * PAGE)
    want = plain(prompt, NEW)
    rig = make_rig()
    assert rig.ask(prompt, NEW).tokens == want
    first = rig.runner.logits[0]
    for dropped in ((), (Tier.L1,), (Tier.L1, Tier.L2)):
        rig.drop(*dropped)
        answer = rig.ask(prompt, NEW)
        assert answer.tokens == want
        assert sum(answer.hits) == 4
        assert answer.result.computed_tokens == 1
        torch.testing.assert_close(rig.runner.logits[0], first, rtol=1e-4, atol=1e-4)


def test_generated_pages_are_a_prefix_like_any_other(
    make_rig: Any, plain: Any, prompt_of: Callable[[int], list[int]]
) -> None:
    """The next turn of a conversation attaches what decoding has computed."""
    prompt = prompt_of(2 * PAGE + 3)
    rig = make_rig()
    turn = prompt + rig.ask(prompt, 4 * PAGE).tokens + prompt_of(5)
    answer = rig.ask(turn, NEW)
    assert answer.hits == (6, 0, 0)
    assert answer.tokens == plain(turn, NEW)


@pytest.mark.parametrize("chunk", [1, 5, PAGE, 3 * PAGE + 1])
def test_chunks_of_any_size(
    make_rig: Any, plain: Any, prompt_of: Callable[[int], list[int]], chunk: int
) -> None:
    prompt = prompt_of(5 * PAGE + 3)
    rig = make_rig(chunk=chunk)
    want = plain(prompt, NEW)
    assert rig.ask(prompt, NEW).tokens == want
    assert rig.ask(prompt, NEW).tokens == want
    whole = make_rig(backend="")
    whole.ask(prompt, NEW)
    for mine, theirs in zip(rig.runner.logits, whole.runner.logits, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("max_batch", [1, 3, 8])
def test_batches_of_any_size(
    make_rig: Any, plain: Any, prompt_of: Callable[[int], list[int]], max_batch: int
) -> None:
    """Requests of unequal lengths that share prefixes, all at once: each gets its own tokens."""
    base = prompt_of(3 * PAGE)
    prompts = [base[: 8 * i + 3] + prompt_of(1 + 5 * i) for i in range(4)]
    prompts += [base + prompt_of(7), base, base]
    rig = make_rig(max_batch=max_batch, chunk=20, steps=5)
    ids = [rig.submit(prompt, 6 + 2 * i) for i, prompt in enumerate(prompts)]
    rig.run()
    for i, (request_id, prompt) in enumerate(zip(ids, prompts, strict=True)):
        assert rig.answer(request_id).tokens == plain(prompt, 6 + 2 * i)


def test_little_memory(make_rig: Any, plain: Any, prompt_of: Callable[[int], list[int]]) -> None:
    """Pages are evicted and come back while requests run."""
    base = prompt_of(2 * PAGE)
    prompts = [base + prompt_of(2 * PAGE + i) for i in range(6)]
    rig = make_rig(l1=16, staging="128KiB", max_batch=2)
    for _ in range(2):
        ids = [rig.submit(prompt, 12) for prompt in prompts]
        rig.run()
        for request_id, prompt in zip(ids, prompts, strict=True):
            assert rig.answer(request_id).tokens == plain(prompt, 12)
    assert rig.engine.scheduler.cache.counters["evicted_l1"] > 0


def test_stop_tokens(make_rig: Any, plain: Any, prompt_of: Callable[[int], list[int]]) -> None:
    prompt = prompt_of(PAGE + 1)
    want = plain(prompt, NEW)
    stop = next(token for i, token in enumerate(want) if i >= 4 and token not in want[:i])
    rig = make_rig(steps=7)
    answer = rig.ask(prompt, NEW, stop_tokens=(stop, 300))
    assert answer.tokens == want[: want.index(stop) + 1]


def test_epoch_salt_and_no_store_share_nothing(
    make_rig: Any, plain: Any, prompt_of: Callable[[int], list[int]]
) -> None:
    prompt = prompt_of(4 * PAGE + 1)
    want = plain(prompt, NEW)
    rig = make_rig()
    for _ in range(2):
        answer = rig.ask(prompt, NEW, store=False)
        assert (answer.hits, answer.tokens) == ((0, 0, 0), want)
    assert rig.ask(prompt, NEW).hits == (0, 0, 0), "nothing of a no-store request was kept"
    assert rig.ask(prompt, NEW, store=False).hits == (4, 0, 0), "it may read what others stored"

    for salt in ("a", "b"):
        salted = rig.own.with_request(salt=salt, adapter="").fingerprint()
        first = rig.ask(prompt, NEW, namespace=salted)
        assert (first.hits, first.tokens) == ((0, 0, 0), want)
        assert rig.ask(prompt, NEW, namespace=salted).hits == (4, 0, 0)
    rig.engine.close()

    # The weights change in place. The old pages are there, and the epoch alone keeps them away.
    newer = make_rig(epoch=1, seed=5)
    answer = newer.ask(prompt, NEW)
    assert (answer.hits, answer.tokens) == ((0, 0, 0), plain(prompt, NEW, seed=5))
    forgotten = make_rig(epoch=0, seed=5)
    assert forgotten.ask(prompt, NEW).hits == (0, 0, 4)
