"""Sampling: parameters, the draw itself, and that nothing but seed and position decides it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvstrata.errors import InputError
from kvstrata.gpu_runtime.sampling import SamplingParams, decode_params, draw, uniform
from kvstrata.handles import Tier
from kvstrata.tiers import RequestState

PAGE = 8
NEW = 20


def logits_of(*shares: float) -> torch.Tensor:
    return torch.tensor(shares, dtype=torch.float32).log()


def drawn(logits: torch.Tensor, params: SamplingParams, count: int) -> np.ndarray[Any, Any]:
    """How often each token is drawn, as shares."""
    tokens = [draw(logits, params, position) for position in range(count)]
    return np.bincount(tokens, minlength=len(logits)) / count


# ── the draw ─────────────────────────────────────────────────────────────────────────────────────


def test_shares_are_those_of_the_logits() -> None:
    found = drawn(logits_of(0.1, 0.6, 0.3), SamplingParams(temperature=1.0, seed=1), 3000)
    np.testing.assert_allclose(found, [0.1, 0.6, 0.3], atol=0.03)


def test_temperature_sharpens_and_flattens() -> None:
    logits = logits_of(0.2, 0.8)
    cold = drawn(logits, SamplingParams(temperature=0.5, seed=1), 2000)
    np.testing.assert_allclose(cold, [0.04 / 0.68, 0.64 / 0.68], atol=0.03)
    hot = drawn(logits, SamplingParams(temperature=1e6, seed=1), 2000)
    np.testing.assert_allclose(hot, [0.5, 0.5], atol=0.04)
    frozen = drawn(logits * 1e4, SamplingParams(temperature=1e-300, seed=1), 10)
    np.testing.assert_array_equal(frozen, [0, 1])


def test_top_k_and_top_p_cut_the_tail() -> None:
    logits = logits_of(0.05, 0.4, 0.25, 0.3)
    one = drawn(logits, SamplingParams(temperature=1.0, top_k=1), 50)
    np.testing.assert_array_equal(one, [0, 1, 0, 0])
    two = drawn(logits, SamplingParams(temperature=1.0, top_k=2), 2000)
    np.testing.assert_allclose(two, [0, 4 / 7, 0, 3 / 7], atol=0.03)
    least = drawn(logits, SamplingParams(temperature=1.0, top_p=1e-9), 50)
    np.testing.assert_array_equal(least, [0, 1, 0, 0])
    # The token that crosses 0.5 is one of them.
    half = drawn(logits, SamplingParams(temperature=1.0, top_p=0.5), 2000)
    np.testing.assert_allclose(half, [0, 4 / 7, 0, 3 / 7], atol=0.03)
    both = drawn(logits, SamplingParams(temperature=1.0, top_k=3, top_p=0.5), 50)
    assert both[0] == both[2] == 0
    more = drawn(logits, SamplingParams(temperature=1.0, top_k=99), 2000)
    np.testing.assert_allclose(more, [0.05, 0.4, 0.25, 0.3], atol=0.03)


def test_numbers_are_the_same_everywhere() -> None:
    """They come from a digest: no library's generator may change what a seed means."""
    assert uniform(0, 0) == 0.45655684206750935
    numbers = np.array([uniform(7, position) for position in range(4000)])
    assert 0 <= numbers.min() < 0.01
    assert 0.99 < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.02
    assert uniform(7, 8) not in (uniform(8, 7), uniform(7, 9), uniform(2**64 - 1, 8))


# ── parameters ───────────────────────────────────────────────────────────────────────────────────


def test_parameters_travel_as_bytes() -> None:
    params = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, seed=2**64 - 1)
    assert decode_params(params.encode()) == params
    assert not params.greedy
    assert decode_params(b"") == SamplingParams()
    assert SamplingParams().greedy


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1.0), ("temperature", float("nan")), ("temperature", float("inf")),
     ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5), ("top_p", float("nan")), ("seed", -1),
     ("seed", 2**64)],
)  # fmt: skip
def test_parameters_out_of_range(name: str, value: float) -> None:
    params = SamplingParams(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(InputError, match=name):
        params.encode()
    if value != 2**64:  # which msgpack has no number for
        with pytest.raises(InputError, match=name):
            decode_params(msgspec.msgpack.encode(params))


@pytest.mark.parametrize("payload", [b"\xff", b"text", msgspec.msgpack.encode({"heat": 1})])
def test_payloads_that_are_no_parameters(payload: bytes) -> None:
    with pytest.raises(InputError, match="SamplingParams"):
        decode_params(payload)


# ── in the runtime ───────────────────────────────────────────────────────────────────────────────


def test_neither_batch_nor_cache_nor_chunks_change_what_is_drawn(
    make_rig: Any, prompt_of: Callable[[int], list[int]]
) -> None:
    prompts = [prompt_of(4 * PAGE + 5), prompt_of(PAGE), prompt_of(3)]
    params = [
        SamplingParams(temperature=0.8, seed=11),
        SamplingParams(temperature=1.3, top_k=40, seed=12),
        SamplingParams(temperature=1.0, top_p=0.9, seed=13),
    ]
    rig = make_rig()
    alone = [
        rig.ask(prompt, NEW, sampling=p).tokens for prompt, p in zip(prompts, params, strict=True)
    ]
    for dropped in ((), (Tier.L1,), (Tier.L1, Tier.L2)):
        rig.drop(*dropped)
        again = rig.ask(prompts[0], NEW, sampling=params[0])
        assert again.tokens == alone[0]
        assert sum(again.hits) == 4
    rig.engine.close()

    other = make_rig(chunk=7, steps=3)
    ids = [other.submit(prompt, NEW, sampling=p) for prompt, p in zip(prompts, params, strict=True)]
    other.run()
    assert [other.answer(i).tokens for i in ids] == alone


def test_each_token_is_drawn_at_its_position(
    make_rig: Any, prompt_of: Callable[[int], list[int]]
) -> None:
    """From the logits of the step before it, with the number of its position; guesses are made for
    greedy rows only."""
    prompt, params = prompt_of(PAGE + 3), SamplingParams(temperature=2.0, seed=5)
    rig = make_rig(backend="", drafter=Repeats())
    tokens = rig.ask(prompt, NEW, sampling=params).tokens
    logits = rig.runner.logits
    assert [len(step) for step in logits] == [1] * NEW
    assert tokens == [draw(step[0], params, len(prompt) + i) for i, step in enumerate(logits)]
    assert rig.counter("drafted") == 0


class Repeats:
    def propose(self, tokens: Any, limit: int) -> list[int]:
        return [int(tokens[-1])] * limit


def test_seeds_differ_and_repeat(make_rig: Any, prompt_of: Callable[[int], list[int]]) -> None:
    prompt = prompt_of(PAGE + 1)
    rig = make_rig(backend="")
    one, two, again = (
        rig.ask(prompt, NEW, sampling=SamplingParams(temperature=1.0, seed=seed)).tokens
        for seed in (1, 2, 1)
    )
    assert one == again != two


def test_what_a_request_gets_wrong_fails_it_alone(
    make_rig: Any, plain: Any, prompt_of: Callable[[int], list[int]]
) -> None:
    """A payload that is nonsense, a token out of range: the rows beside them go on."""
    prompt = prompt_of(PAGE + 1)
    rig = make_rig()
    nonsense = rig.engine.scheduler.submit(
        np.asarray(prompt_of(7), np.int32).tobytes(), rig.engine.namespace, payload=b"nonsense"
    )
    good = rig.submit(prompt, NEW)
    outside = rig.submit([1, 256], NEW)
    rig.run()
    for request, why in ((nonsense, "SamplingParams"), (outside, "vocabulary of 256")):
        assert rig.results[request].state is RequestState.FAILED
        assert why in rig.results[request].error
    assert rig.runner.steps < 2 * NEW, "they shared batches"
    assert rig.answer(good).tokens == plain(prompt, NEW)


def test_a_wrong_payload_is_found_with_the_first_chunk(
    make_rig: Any, prompt_of: Callable[[int], list[int]]
) -> None:
    rig = make_rig(chunk=PAGE)
    data = np.asarray(prompt_of(4 * PAGE), np.int32).tobytes()
    request = rig.engine.scheduler.submit(data, rig.engine.namespace, payload=b"nonsense")
    rig.run()
    assert rig.results[request].state is RequestState.FAILED
    assert rig.runner.steps == 0


@pytest.mark.parametrize("token", [-1, 256, 2**31 - 1])
def test_a_token_outside_of_the_vocabulary(make_rig: Any, token: int) -> None:
    """On a GPU it would be an assertion in a kernel, which nothing in the process survives."""
    rig = make_rig()
    request = rig.submit([1, 2, token, 3], 1)
    rig.run()
    assert rig.results[request].state is RequestState.FAILED
    assert "vocabulary of 256" in rig.results[request].error


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0)])
def test_logits_that_are_no_numbers_are_counted(
    make_rig: Any, prompt_of: Callable[[int], list[int]], params: SamplingParams
) -> None:
    rig = make_rig()
    with torch.no_grad():
        rig.runner.model.lm_head.weight[5] = float("nan")
    answer = rig.ask(prompt_of(PAGE), 4, sampling=params)
    assert answer.tokens == [5] * 4
    assert rig.counter("nonfinite_logits") == 4
