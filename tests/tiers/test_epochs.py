"""The weights change while the scheduler serves: nothing old is hit, and nothing is lost."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvstrata.errors import InputError
from kvstrata.handles import Tier
from kvstrata.tiers import RequestState
from kvstrata.tiers.epochs import Epochs

PAGE = 4
BOTH = pytest.mark.parametrize("mode", ["cache", "buffer_only"])


def pages(*names: int) -> list[int]:
    return [name * PAGE + i for name in names for i in range(PAGE)]


@BOTH
def test_nothing_old_is_hit_in_any_tier(make_small: Any, mode: str) -> None:
    small = make_small(mode=mode)
    prompt = pages(1, 2, 3, 4)
    small.ask([*prompt, 1])
    small.drop_tier(Tier.L1)
    small.ask([*prompt, 2])
    tree = small.scheduler.cache.tree
    assert tree.resident(Tier.L1) == 4
    small.new_epoch()
    assert tree.pages == 0, "the tree has forgotten all at once"
    small.run()
    for tables in (small.runtime.core.tables, small.runtime.core.staging.tables):
        assert all(table.free == table.total for table in tables.values())
    assert small.hits(small.ask([*prompt, 3])) == (0, 0, 0)
    assert small.hits(small.ask([*prompt, 4])) == (4, 0, 0)
    small.drop_tier(Tier.L1)
    small.drop_tier(Tier.L2)
    assert small.hits(small.ask([*prompt, 5])) == (0, 0, 4), "the new ones are stored"
    small.check_no_leak()


@BOTH
def test_the_change_meets_everything_under_way(make_small: Any, mode: str) -> None:
    """A row that runs, one that is ready, loads, stores: the row ends and says why, all that
    waits goes on under the new weights, and what was moved is given back."""
    small = make_small(mode=mode, max_batch=1, l1=40, lookahead=8)
    stored = pages(*range(10, 16))
    small.ask(stored)
    small.drop_tier(Tier.L1)
    small.drop_tier(Tier.L2)
    small.backend.write_gate.shut()
    fresh = small.submit(pages(20, 21, 22))
    small.step_until(lambda: fresh in small.results)
    small.step_until(small.backend.write_gate.came)
    small.backend.read_gate.shut()
    loading = small.submit([*stored, 1], max_new_tokens=3)
    small.step_until(lambda: bool(small.scheduler.cache._loads))
    small.step_until(small.backend.read_gate.came)
    small.runner.gate.shut()
    running = small.submit(pages(30, 31), max_new_tokens=9)
    ready = small.submit(pages(32, 33))
    small.step_until(small.runner.gate.came)
    looking = small.submit(pages(40, 41))
    small.scheduler.step(0.0)
    small.new_epoch()
    small.scheduler.check_integrity()
    late = small.submit([*stored, 3])
    for gate in (small.runner.gate, small.backend.read_gate, small.backend.write_gate):
        gate.open()
    small.run()
    assert small.results[running].state is RequestState.FAILED
    assert "weights changed" in small.results[running].error
    found = [small.results[request_id] for request_id in (loading, ready, looking, late)]
    assert [r.state for r in found] == [RequestState.FINISHED] * 4
    assert len(found[0].output_tokens) == 12
    hits = [sum(small.hits(small.results[i])) for i in (loading, late)]
    assert min(hits) == 0, "one of them made the pages"
    small.check_no_leak()
    assert small.runner.weights == b"weights 1"


@pytest.mark.no_cover
@BOTH
def test_weights_change_again_and_again_under_load(make_small: Any, mode: str, seed: int) -> None:
    """Small tiers, shared prefixes, decodes: the runner notices KV of two weights in one
    namespace, and the oracle a page of another."""
    for number in range(4):
        rng = random.Random(f"{seed} {number}")
        small = make_small(
            l1=20, l2=8, mode=mode, max_batch=2, chunk_tokens=2 * PAGE, decode_steps=2, depth=3
        )
        for _ in range(60):
            if rng.random() < 0.5:
                names = [rng.randrange(2) for _ in range(rng.randrange(8))]
                small.submit([*pages(*names), 7], max_new_tokens=rng.randrange(1, 9))
            if rng.random() < 0.1:
                small.new_epoch()
            for result in small.scheduler.step(0.0 if rng.random() < 0.7 else 0.01):
                small.results[result.request_id] = result
            small.scheduler.check_integrity()
        small.run()
        small.check_no_leak()
        assert small.epoch > 1
        for result in small.results.values():
            failed = result.state is RequestState.FAILED
            assert result.state is RequestState.FINISHED or failed, result
            assert not failed or "weights changed" in result.error, result.error


def test_an_older_namespace_is_refused(make_small: Any) -> None:
    """Also one that the tree had forgotten before the change."""
    small = make_small()
    small.ask(pages(1, 2), store=False)
    old = small.namespace
    small.new_epoch()
    for rename, epoch in ((lambda _: old, 2), (lambda _: small.namespace, 1)):
        small.submit(pages(1))
        with pytest.raises(InputError, match="epoch"):
            small.scheduler.new_epoch(epoch, rename)
    small.run()
    now, small.namespace = small.namespace, old
    with pytest.raises(InputError, match="weights before epoch 1"):
        small.submit(pages(1, 2))
    small.namespace = now
    assert small.ask(pages(1, 2)).state is RequestState.FINISHED
    small.check_no_leak()


def test_two_namespaces_never_become_one() -> None:
    """Of other salts, say: pages of one would be hits of the other. Nothing has changed then."""
    epochs, names = Epochs(), [b"a" * 32, b"b" * 32]
    for name in names:
        epochs.use(name)
    with pytest.raises(InputError, match="two namespaces"):
        epochs.begin(1, names, lambda _: b"c" * 32)
    assert epochs.current is None
    epochs.use(names[0])
    renamed = epochs.begin(1, [*names, names[0]], lambda old: old[:1] * 31 + b"1")
    assert renamed.keys() == set(names)


def test_requests_fail_while_the_weights_are_unknown(make_small: Any) -> None:
    """The runner could not take them: nothing is computed, and so nothing kept, until it can."""
    small = make_small()
    small.runner.fail_weights = True
    small.new_epoch()
    result = small.ask(pages(1, 2))
    assert result.state is RequestState.FAILED
    assert "planted" in result.error
    assert small.scheduler.cache.counters["epoch_failed_runner"] == 1
    assert small.scheduler.cache.tree.pages == 0
    small.new_epoch()
    assert small.ask(pages(1, 2)).state is RequestState.FINISHED
    small.check_no_leak()
