"""Weights of a real model that change while it serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvstrata.errors import ConfigError
from kvstrata.gpu_runtime import TransformersRunner
from kvstrata.gpu_runtime.hf_models import tiny_model
from kvstrata.tiers import RequestState

PAGE = 8
NEW = 12


def weights(payload: bytes) -> Any:
    """Those of the tiny Llama with another seed, or of another model."""
    kind, _, seed = payload.decode().partition(":")
    return tiny_model(kind, int(seed)).state_dict()


def change(rig: Any, epoch: int, payload: bytes) -> bytes:
    """Returns the fingerprint of the new epoch."""
    own = msgspec.structs.replace(rig.own, epoch=epoch)
    rig.engine.scheduler.new_epoch(epoch, lambda _: own.fingerprint(), payload=payload)
    return own.fingerprint()


@pytest.mark.parametrize("mode", ["cache", "buffer_only"])
def test_tokens_are_those_of_the_new_weights(
    make_rig: Any, plain: Any, prompt_of: Callable[[int], list[int]], mode: str
) -> None:
    """Nothing of the old ones is hit, in no tier, in this process and in the next."""
    prompt = prompt_of(3 * PAGE + 5)
    old, new = plain(prompt, NEW), plain(prompt, NEW, seed=5)
    assert old != new
    rig = make_rig(mode=mode, weights=weights)
    assert rig.ask(prompt, NEW).tokens == old
    name = change(rig, 1, b"llama:5")
    assert rig.engine.scheduler.cache.tree.pages == 0
    first = rig.ask(prompt, NEW, namespace=name)
    second = rig.ask(prompt, NEW, namespace=name)
    assert (first.tokens, first.hits) == (new, (0, 0, 0))
    assert (second.tokens, second.hits) == (new, (3, 0, 0))
    rig.engine.close()
    for epoch, seed, want in ((1, 5, new), (0, 0, old)):
        other = make_rig(mode=mode, epoch=epoch, seed=seed)
        answer = other.ask(prompt, NEW)
        assert (answer.tokens, answer.hits) == (want, (0, 0, 3)), "each finds its own"


def test_a_change_in_the_middle_of_requests(
    make_rig: Any, plain: Any, prompt_of: Callable[[int], list[int]]
) -> None:
    """The one that runs ends with what the old weights made, those that wait have the new ones."""
    prompts = [prompt_of(2 * PAGE + 3) for _ in range(3)]
    rig = make_rig(max_batch=1, steps=1, weights=weights)
    ids = [rig.submit(prompt, 40) for prompt in prompts]
    scheduler = rig.engine.scheduler
    while not any(request.output for request in scheduler._requests.values()):
        scheduler.step(1.0)
    running = [r.request_id for r in scheduler._requests.values() if r.handle is not None]
    change(rig, 1, b"llama:5")
    rig.run()
    for request_id, prompt in zip(ids, prompts, strict=True):
        result = rig.results[request_id]
        if request_id in running:
            assert result.state is RequestState.FAILED
            assert "weights changed (epoch 1)" in result.error
        else:
            assert rig.answer(request_id).tokens == plain(prompt, 40, seed=5)
    assert running


def test_weights_of_another_model_change_nothing(
    make_rig: Any, plain: Any, prompt_of: Callable[[int], list[int]]
) -> None:
    """And rows fail until there are good ones: control believes that the old ones are gone."""
    prompt = prompt_of(PAGE)
    rig = make_rig(weights=weights)
    name = change(rig, 1, b"qwen2:0")
    request = rig.submit(prompt, 1, namespace=name)
    rig.run()
    assert "weights of another model" in rig.results[request].error
    name = change(rig, 2, b"llama:0")
    assert rig.ask(prompt, NEW, namespace=name).tokens == plain(prompt, NEW)


def test_a_runner_without_other_weights_says_so() -> None:
    with pytest.raises(ConfigError, match="weights="):
        TransformersRunner(tiny_model()).new_weights(b"")
