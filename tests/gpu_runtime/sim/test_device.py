"""The simulated device keeps the contract of streams and events, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstrata.errors import ClosedError, IntegrityError
from kvstrata.gpu_runtime import Timeline
from kvstrata.gpu_runtime.sim import POISON, SimDevice
from kvstrata.gpu_runtime.testing.simulated import sim_bench
from kvstrata.gpu_runtime.turns import Threads, Turns, away, pause, rest

SEEDS = range(40)


@pytest.fixture
def turns_of() -> Iterator[Callable[..., Turns]]:
    made: list[Turns] = []

    def make(seed: int, **options: Any) -> Turns:
        made.append(Turns(seed, **options))
        return made[-1]

    yield make
    for turns in made:
        turns.end()


def orders(run: Callable[[int], list[str]]) -> set[tuple[str, ...]]:
    """All orders that some seed brings about."""
    return {tuple(run(seed)) for seed in SEEDS}


def test_a_stream_keeps_its_order_and_streams_do_not(turns_of: Any) -> None:
    def run(seed: int) -> list[str]:
        turns = turns_of(seed)
        device = SimDevice(Timeline(), turns)
        log: list[str] = []
        for i in range(3):
            device.compute.enqueue(lambda i=i: log.append(f"c{i}"))
            device.d2h.enqueue(lambda i=i: log.append(f"d{i}"))
        assert turns.run_until(lambda: len(log) == 6, 10)
        assert [name for name in log if name[0] == "c"] == ["c0", "c1", "c2"]
        return log

    assert len(orders(run)) > 5


def test_an_event_orders_two_streams(turns_of: Any) -> None:
    """B052, B053: without the wait some seed reads first; with it none does."""

    def run(seed: int, waits: bool) -> list[str]:
        turns = turns_of(seed)
        device = SimDevice(Timeline(), turns)
        log: list[str] = []
        device.compute.enqueue(lambda: (log.append("begin"), pause(), log.append("written")))  # type: ignore[func-returns-value]
        if waits:
            device.d2h.wait_event(device.compute.record())
        device.d2h.enqueue(lambda: log.append("read"))
        assert turns.run_until(lambda: len(log) == 3, 10)
        return log

    assert orders(lambda seed: run(seed, True)) == {("begin", "written", "read")}
    assert orders(lambda seed: run(seed, False)) == {
        ("begin", "written", "read"),
        ("begin", "read", "written"),
        ("read", "begin", "written"),
    }


def test_completions_are_late_and_in_the_order_of_the_contract(turns_of: Any) -> None:
    """The host may hear of an event after later work of its stream, and of work that waited for
    it; but callbacks of a stream come in order, and after those of what it waited for."""

    def run(seed: int) -> list[str]:
        turns = turns_of(seed)
        device = SimDevice(Timeline(), turns)
        log: list[str] = []
        device.h2d.enqueue(lambda: log.append("copy"))
        copied = device.h2d.record()
        copied.on_complete(lambda: log.append("copied"))
        device.compute.wait_event(copied)
        for name in ("first", "second"):
            device.compute.enqueue(lambda name=name: log.append(name))
            device.compute.record().on_complete(lambda name=name: log.append(f"{name} done"))
        assert turns.run_until(lambda: len(log) == 6, 10)
        assert copied.query()
        assert log.index("copied") < log.index("first done") < log.index("second done")
        assert log.index("copy") < log.index("first")
        return log

    found = orders(run)
    assert any(log.index("second") < log.index("copied") for log in found)
    assert any(log.index("copied") < log.index("first") for log in found)


def test_a_callback_after_the_end_comes_at_once(turns_of: Any) -> None:
    turns = turns_of(1)
    device = SimDevice(Timeline(), turns)
    event = device.compute.record()
    assert not event.query()
    assert event.wait(5)
    heard: list[int] = []
    event.on_complete(lambda: heard.append(1))
    assert heard == [1]
    device.h2d.wait_event(event)  # nothing to wait for any more
    assert device.close(1)


def test_a_wait_ends_with_its_time(turns_of: Any) -> None:
    turns = turns_of(1)
    device = SimDevice(Timeline(), turns)
    device.compute.enqueue(lambda: rest(30))
    event = device.compute.record()
    assert not event.wait(5)
    assert not device.close(5), "it is still running"
    with pytest.raises(ClosedError):
        device.compute.enqueue(pause)
    assert event.wait(60)
    assert device.close(5)


def test_in_the_background(turns_of: Any) -> None:
    """As the other suites use it: turns are given as soon as there is something to do. Work that
    blocks in real time keeps nobody else waiting."""
    device = SimDevice(Timeline(), turns_of(3, background=True))
    gate, copied = threading.Event(), threading.Event()
    device.compute.enqueue(lambda: away(lambda: gate.wait(20)))  # type: ignore[arg-type, return-value]
    blocked = device.compute.record()
    device.h2d.enqueue(pause)
    device.h2d.record().on_complete(copied.set)
    assert copied.wait(20)
    assert not blocked.query()
    gate.set()
    assert blocked.wait(20)
    assert device.close(20)


def test_what_a_fiber_raises_is_raised(turns_of: Any) -> None:
    turns = turns_of(1)
    turns.spawn("bad", lambda: {}["missing"])
    with pytest.raises(IntegrityError, match="missing"):
        turns.run(5)


def test_threads_of_others_take_turns(turns_of: Any) -> None:
    """Conditions with and without time, notices, and a join; nothing waits in real time."""
    turns = turns_of(5)
    threads = Threads(turns)
    lock = threads.Lock()
    condition = threads.Condition(lock)
    log: list[Any] = []

    def wait() -> None:
        with lock:
            log.append(condition.wait(3000))
            log.append(condition.wait(3000))

    thread = threads.Thread(target=wait, name="waiter", daemon=True)
    thread.start()
    turns.run(3)
    with lock:
        condition.notify_all()
        assert not condition.wait(1), "notified nobody"
    thread.join(10_000)
    assert not thread.is_alive()
    assert log == [True, False]


def test_freed_pages_hold_poison_and_copies_are_torn() -> None:
    """B056: a write to a freed page, or a read of one, cannot look right by chance."""
    torn = 0
    for seed in range(10):
        with sim_bench(seed, "cache", "calm") as bench:
            core, pool, array = bench.core, bench.core.pools["kv"], bench.core.staging.array("kv")
            pages = {name: table.reserve(2) for name, table in core.tables.items()}
            slots = {name: table.reserve(2) for name, table in core.staging.tables.items()}
            pool.data[:, pages["kv"]] = 7
            array[slots["kv"]] = 0
            ended: list[str] = []
            bench.runtime._moves.copies.d2h(pages, slots, ended.append)
            while not ended:
                bench.turns.run(1)
                seen = array[slots["kv"]][:, : pool.page_bytes]
                torn += bool((seen == 7).any() and (seen != 7).any())
            assert (array[slots["kv"]][:, : pool.page_bytes] == 7).all()
            core.release_l1(pages)
            core.staging.give_back(slots)
            assert (pool.data[:, pages["kv"]] == POISON).all()
            assert (array[slots["kv"]] == POISON).all()
    assert torn > 10
