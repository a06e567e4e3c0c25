"""The scheduler when requests are aborted and storage, copies or the model fail."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from kvstrata.backends.memory import MemoryBackend
from kvstrata.boundary import Outcome
from kvstrata.handles import Tier
from kvstrata.tiers import RequestState

PAGE = 4
BOTH = pytest.mark.parametrize("mode", ["cache", "buffer_only"])


def pages(*names: int) -> list[int]:
    """A prompt of whole pages: page `n` has tokens of its own."""
    return [name * PAGE + i for name in names for i in range(PAGE)]


# ── aborts ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("state", ["waiting", "lookup", "staging", "ready", "running"])
@BOTH
def test_abort_in_every_state(make_small: Any, mode: str, state: str) -> None:
    """B058, B086, B093: whatever was held for it comes back."""
    small = make_small(mode=mode, max_batch=1)
    small.ask(pages(1, 2, 3))
    small.drop_tier(Tier.L1)
    small.drop_tier(Tier.L2)
    gate = {
        "lookup": small.backend.exists_gate,
        "staging": small.backend.read_gate,
        "ready": small.runner.gate,
        "running": small.runner.gate,
    }.get(state)
    if gate:
        gate.shut()
    if state == "ready":
        for name in (7, 8):  # both places in the runtime are taken
            small.submit(pages(name))
        small.step_until(lambda: small.scheduler.calls["execute_batch"] >= 3)
    prompt = pages(1, 2, 3, 4) if state != "waiting" else pages(5)
    victim = small.submit([*prompt, 1])
    request = small.scheduler._requests[victim]
    if state != "waiting":
        small.step_until(lambda: request.state.value == state)
    assert small.scheduler.abort(victim)
    assert not small.scheduler.abort(victim)
    if gate:
        gate.open()
    small.run()
    assert small.results[victim].state is RequestState.ABORTED
    small.check_no_leak()
    assert small.ask([*pages(1, 2, 3), 9]).page_hits == 3


def test_a_thousand_aborts_leak_nothing(make_small: Any, seed: int) -> None:
    """B086: 1000 aborts at random points; free pages are what they were."""
    rng = random.Random(seed)
    small = make_small(l1=40, l2=12, max_batch=3)
    alive: list[int] = []
    for i in range(1000):
        names = [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
        alive.append(small.submit([*pages(*names), i], max_new_tokens=rng.randrange(1, 6)))
        for _ in range(rng.randrange(3)):
            for result in small.scheduler.step(0):
                small.results[result.request_id] = result
        victim = alive.pop(rng.randrange(len(alive)))
        small.scheduler.abort(victim)
    small.run()
    small.check_no_leak()


# ── faults ───────────────────────────────────────────────────────────────────────────────────────


def test_a_runner_that_fails_costs_its_batch_only(make_small: Any) -> None:
    small = make_small()
    small.runner.fail_next = True
    failed = small.ask(pages(1, 2))
    assert failed.state is RequestState.FAILED
    assert "planted" in failed.error
    assert small.ask(pages(1, 2)).state is RequestState.FINISHED
    small.check_no_leak()


def test_a_request_that_fails_ends_alone(make_small: Any) -> None:
    small = make_small(max_batch=4)
    small.runner.gate.shut()
    ids = [small.submit(pages(n), payload=b"fail" if n == 2 else b"") for n in range(4)]
    small.step_until(lambda: small.scheduler.calls["execute_batch"] >= 1)
    small.runner.gate.open()
    small.run()
    states = [small.results[i].state for i in ids]
    finished, failed = RequestState.FINISHED, RequestState.FAILED
    assert states == [finished, finished, failed, finished]
    assert small.results[ids[2]].error == "planted"
    small.check_no_leak()


@BOTH
@pytest.mark.parametrize("kind", ["corrupt", "lose"])
def test_a_bad_page_is_a_miss_and_is_stored_anew(make_small: Any, mode: str, kind: str) -> None:
    """B001, B002, B083: page 2 of 4 is bad; two pages hit, the rest is computed, L3 heals."""
    small = make_small(mode=mode)
    small.ask(pages(1, 2, 3, 4))
    for tier in (Tier.L1, Tier.L2):
        small.drop_tier(tier)
    bad = small.backend.order[2]
    getattr(small.backend, kind).add(bad)
    result = small.ask(pages(1, 2, 3, 4))
    assert result.state is RequestState.FINISHED
    assert result.page_hits == 2
    getattr(small.backend, kind).clear()
    stats = small.runtime.storage_stats()
    assert stats is not None
    expected = Outcome.CORRUPT if kind == "corrupt" else Outcome.MISSING
    assert stats.pages["load"][expected] == 1
    for tier in (Tier.L1, Tier.L2):
        small.drop_tier(tier)
    assert small.hits(small.ask([*pages(1, 2, 3, 4), 1])) == (0, 0, 4)
    small.check_no_leak()


@BOTH
def test_the_stored_prefix_stays_closed(make_small: Any, mode: str) -> None:
    """B047: while the store of a page fails, nothing below it is stored; later all of it is."""
    small = make_small(mode=mode)
    probe = make_small(mode=mode)
    probe.ask(pages(1, 2, 3, 4, 5))
    chain = probe.backend.order
    small.backend.refuse.add(chain[2])
    small.ask(pages(1, 2, 3, 4, 5))
    assert small.backend.order == chain[:2]
    assert small.scheduler.cache.counters["backup_failed_access"] == 3
    small.backend.refuse.clear()
    small.ask([*pages(1, 2, 3, 4, 5), 9])  # used again: stored
    assert small.backend.order == chain
    small.check_no_leak()


def test_a_failed_copy_is_computed_again(make_small: Any, monkeypatch: Any) -> None:
    """The host copy cannot be restored: the row says so, and starts again without it."""
    small = make_small()
    small.ask(pages(1, 2, 3))
    small.drop_tier(Tier.L1)
    device = small.runtime.core.device
    real = device.copy_in
    failures = [OSError("planted")]

    def copy_in(copy: Any) -> None:
        if failures:
            raise failures.pop()
        real(copy)

    monkeypatch.setattr(device, "copy_in", copy_in)
    result = small.ask(pages(1, 2, 3))
    assert result.state is RequestState.FINISHED
    assert small.scheduler.counters["needs_recompute"] == 1
    small.check_no_leak()


def test_a_failed_copy_with_the_next_chunk_under_way(make_small: Any, monkeypatch: Any) -> None:
    """The batch behind it names the row that was given up; what it says ends no request."""
    small = make_small(chunk_tokens=PAGE)
    small.ask(pages(1, 2, 3))
    small.drop_tier(Tier.L1)
    device = small.runtime.core.device
    real = device.copy_in
    enqueued = threading.Event()

    def copy_in(copy: Any) -> None:
        if not enqueued.is_set():
            assert enqueued.wait(20)
            raise OSError("planted")
        real(copy)

    monkeypatch.setattr(device, "copy_in", copy_in)
    batches = small.scheduler.calls["execute_batch"]
    request_id = small.submit(pages(1, 2, 3, 4, 5), max_new_tokens=3)
    small.step_until(lambda: small.scheduler.calls["execute_batch"] == batches + 2)
    enqueued.set()
    small.run()
    result = small.results[request_id]
    assert result.state is RequestState.FINISHED
    assert small.scheduler.counters["needs_recompute"] == 1
    cold = make_small(with_l3=False)
    assert result.output_tokens == cold.ask(pages(1, 2, 3, 4, 5), max_new_tokens=3).output_tokens
    small.check_no_leak()


def test_a_page_on_its_way_to_l3_is_waited_for(make_small: Any) -> None:
    """B073: bounded by the deadline of the store; nothing is computed twice meanwhile."""
    small = make_small(mode="buffer_only")
    small.backend.write_gate.shut()
    small.submit(pages(1, 2))
    small.step_until(lambda: len(small.results) == 1)
    small.scheduler.cache.outbox.extend(
        small.scheduler.cache.free(e) for _, e in small.scheduler.cache.tree.evict(Tier.L1, 99)
    )
    again = small.submit([*pages(1, 2), 3])
    small.step_until(lambda: small.scheduler.calls["idle"] > 20)
    assert again not in small.results
    small.backend.write_gate.open()
    small.run()
    assert small.results[again].page_hits == 2


def test_no_store_leaves_nothing(make_small: Any) -> None:
    small = make_small()
    small.ask(pages(1, 2), store=False)
    assert small.backend.order == []
    assert small.scheduler.cache.tree.pages == 0
    assert small.ask(pages(1, 2)).page_hits == 0
    small.check_no_leak()


def test_eviction_by_l3_is_heard(make_small: Any) -> None:
    """`Evicted` comes unasked, and a later request does not wait for what is gone."""
    small = make_small()
    small.ask(pages(1, 2, 3))
    for tier in (Tier.L1, Tier.L2):
        small.drop_tier(tier)
    objects = [s.object for s in small.backend.scan()]
    by_key = {o.key: o for o in objects}
    gone = by_key[small.backend.order[2]]
    small.backend.delete([gone])
    assert small.runtime.core.worker is not None
    small.runtime.core.worker._evicted([gone])
    small.step_until(lambda: small.scheduler.cache.counters["evicted_l3"] == 1)
    result = small.ask(pages(1, 2, 3))
    assert result.page_hits == 2
    stats = small.runtime.storage_stats()
    assert stats is not None
    assert Outcome.MISSING not in stats.pages["load"]


def test_a_load_that_ends_first_runs_first(make_small: Any, monkeypatch: Any) -> None:
    """B075: it does not wait for those before it in the queue, whose storage stands still."""
    small = make_small(l1=64, l2=40, max_batch=2)
    first, later = pages(1, 2, 3), [pages(n, n + 1) for n in range(10, 20, 2)]
    for prompt in (first, *later):
        small.ask(prompt)
    small.drop_tier(Tier.L1)
    small.drop_tier(Tier.L2)
    slow = small.backend.order[0]

    def one_hangs(requests: Any) -> Any:
        if any(request.object.key == slow for request in requests):
            small.backend.read_gate.pass_through()
        return MemoryBackend.read(small.backend, requests)

    monkeypatch.setattr(small.backend, "read", one_hangs)
    small.backend.read_gate.shut()
    waits = small.submit([*first, 1])
    ids = [small.submit([*prompt, 1]) for prompt in later]
    small.step_until(lambda: all(i in small.results for i in ids))
    assert waits not in small.results
    assert [small.hits(small.results[i])[2] for i in ids] == [2] * len(ids)
    small.backend.read_gate.open()
    small.run()
    assert small.hits(small.results[waits])[2] == 3
    small.check_no_leak()
