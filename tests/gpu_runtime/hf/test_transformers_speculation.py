"""Several tokens a step: the same tokens as one by one, and no KV of a refused guess is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.gpu_runtime.hf_drafting import PromptLookup
from kvstrata.gpu_runtime.sampling import SamplingParams
from kvstrata.handles import Tier

PAGE = 8
NEW = 24

Tokens = npt.NDArray[np.int32]


class Knows:
    """Guesses right, as long as the answer that it was given goes."""

    def __init__(self, whole: Sequence[int]) -> None:
        self._whole = list(whole)

    def propose(self, tokens: Tokens, limit: int) -> list[int]:
        return self._whole[len(tokens) : len(tokens) + limit]


class Errs(Knows):
    """Guesses right but for every `nth` token."""

    def __init__(self, whole: Sequence[int], nth: int = 1) -> None:
        super().__init__(whole)
        self._nth = nth

    def propose(self, tokens: Tokens, limit: int) -> list[int]:
        right = super().propose(tokens, limit) or [0] * limit
        return [t if (len(tokens) + i) % self._nth else (t + 1) % 256 for i, t in enumerate(right)]


class OutOfRange:
    """Proposes more than it may, and what is no token."""

    def propose(self, tokens: Tokens, limit: int) -> list[int]:
        return [300, -1] * limit


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("draft", [1, 4, 50])
def test_prompt_lookup_makes_the_same_tokens(
    make_rig: Any, plain: Any, prompt_of: Callable[[int], list[int]], kind: str, draft: int
) -> None:
    """With pages that come from every tier."""
    prompt = prompt_of(10) * 4
    want = plain(prompt, NEW, kind)
    rig = make_rig(kind, drafter=PromptLookup(), draft_tokens=draft)
    for dropped in ((), (), (Tier.L1,), (Tier.L1, Tier.L2)):
        rig.drop(*dropped)
        assert rig.ask(prompt, NEW).tokens == want
    assert 0 < rig.counter("accepted") <= rig.counter("drafted")
    assert rig.runner.steps < 4 * NEW


def test_right_guesses_save_steps(
    make_rig: Any, plain: Any, prompt_of: Callable[[int], list[int]]
) -> None:
    prompt = prompt_of(PAGE + 3)
    want = plain(prompt, NEW)
    rig = make_rig(drafter=Knows(prompt + want), draft_tokens=4, steps=NEW)
    assert rig.ask(prompt, NEW).tokens == want
    # The prompt makes 1 token, four steps 5 each, and the last one the 3 that are left.
    assert rig.runner.steps == 6
    assert rig.counter("drafted") == rig.counter("accepted") == 4 * 4 + 2


@pytest.mark.parametrize("steps", [1, 3, 16])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_refused_guesses_leave_nothing_behind(
    make_rig: Any, plain: Any, prompt_of: Callable[[int], list[int]], nth: int, steps: int
) -> None:
    """Ends on every offset of a page. Guesses are written behind the row's KV, over the border of a
    page even; only pages that real tokens fill are kept, and with real KV."""
    prompt = prompt_of(PAGE + 3)
    whole = prompt + plain(prompt, 2 * PAGE + 8)
    rig = make_rig(drafter=Errs(whole, nth), draft_tokens=6, steps=steps, backend="")
    tree = rig.engine.scheduler.cache.tree
    for new in range(PAGE, 2 * PAGE):
        rig.drop(Tier.L1, Tier.L2)
        assert rig.ask(prompt, new).tokens == whole[len(prompt) : len(prompt) + new]
        full = (len(prompt) + new - 1) // PAGE
        assert tree.resident(Tier.L1) == full
        turn = whole[: len(prompt) + new]
        answer = rig.ask(turn, 8)
        assert answer.hits == (full, 0, 0)
        assert answer.tokens == whole[len(turn) : len(turn) + 8]
    if steps > 1:
        assert rig.counter("accepted") < rig.counter("drafted")


def test_rows_with_and_without_drafts_share_a_batch(
    make_rig: Any, plain: Any, prompt_of: Callable[[int], list[int]]
) -> None:
    """Sampled rows draft nothing; stop tokens end a row among accepted guesses."""
    first, second = prompt_of(PAGE + 3), prompt_of(2 * PAGE)
    want = plain(first, NEW)
    stop = next(token for i, token in enumerate(want) if i >= 5 and token not in want[:i])
    hot = SamplingParams(temperature=1.0, seed=3)
    alone = make_rig(backend="").ask(second, NEW, sampling=hot).tokens

    rig = make_rig(drafter=Knows(first + want), draft_tokens=4)
    ids = [
        rig.submit(first, NEW),
        rig.submit(second, NEW, sampling=hot),
        rig.submit(first, NEW, stop_tokens=(stop,)),
    ]
    rig.run()
    assert rig.answer(ids[0]).tokens == want
    assert rig.answer(ids[1]).tokens == alone
    assert rig.answer(ids[2]).tokens == want[: want.index(stop) + 1]


def test_drafts_that_are_no_tokens_are_not_run(
    make_rig: Any, plain: Any, prompt_of: Callable[[int], list[int]]
) -> None:
    prompt = prompt_of(PAGE)
    rig = make_rig(drafter=OutOfRange())
    assert rig.ask(prompt, NEW).tokens == plain(prompt, NEW)
    assert rig.counter("drafted") == 0


# ── prompt lookup ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("tokens", "limit", "want"),
    [
        ([1, 2, 3, 4, 9, 2, 3, 4], 3, [9, 2, 3]),
        ([1, 2, 3, 4, 9, 2, 3, 4], 1, [9]),
        ([5, 1, 7, 5, 2, 7, 5], 9, [2, 7, 5]),  # the longer match wins
        ([5, 1, 5, 2, 5], 9, [2, 5]),  # the latest wins
        ([1, 2, 3], 4, []),
        ([4], 4, []),
        ([4, 4], 4, [4]),
        ([1, 2, 1], 0, []),
    ],
)
def test_prompt_lookup(tokens: list[int], limit: int, want: list[int]) -> None:
    assert PromptLookup().propose(np.asarray(tokens, np.int32), limit) == want


def test_prompt_lookup_looks_back_so_far() -> None:
    tokens = np.asarray([7, 8, *range(100, 120), 7], np.int32)
    assert PromptLookup(window=64).propose(tokens, 1) == [8]
    assert PromptLookup(window=16).propose(tokens, 1) == []


@settings(max_examples=60)
@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40), limit=st.integers(0, 8))
def test_prompt_lookup_proposes_what_came_before(tokens: list[int], limit: int) -> None:
    found = PromptLookup().propose(np.asarray(tokens, np.int32), limit)
    assert len(found) <= limit
    if found:
        text = bytes(tokens[:-1] if len(found) == 1 else tokens)
        assert bytes([tokens[-1], found[0]]) in bytes(tokens)
        assert bytes(found) in text or len(found) == 1
