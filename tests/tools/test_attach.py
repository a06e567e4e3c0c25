"""Storage is detached, by force or with a drain, and attached again, while requests are served."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstrata.backends import StorageWorker
from kvstrata.backends.testing.faults import FaultyBackend, FaultyOptions
from kvstrata.boundary import Outcome
from kvstrata.configs import Config, load_config
from kvstrata.errors import ConfigError, StorageBusyError
from kvstrata.gpu_runtime import OracleRunner
from kvstrata.tiers import RequestResult, RequestState
from kvstrata.tools.engine import Engine, open_engine, open_worker
from kvstrata.tools.trace import read_trace

TRACE = Path(__file__).resolve().parents[2] / "tools" / "data" / "small.jsonl"
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SMALL = ["pools.pages=96", "staging.bytes=2MiB", "staging.mode=cache"]


@pytest.fixture
def config() -> Config:
    return load_config(CONFIGS / "memory.toml", SMALL)


class Served:
    """The shipped trace, request by request; every restored byte is compared."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.mismatches = 0

    def requests(self, first: int, stop: int) -> list[RequestResult]:
        scheduler = self.engine.scheduler
        for i, request in enumerate(read_trace(TRACE, stop)):
            if i >= first:
                scheduler.submit(request.prompt(), self.engine.namespace, max_new_tokens=1)
        results: list[RequestResult] = []
        end = time.monotonic() + 60
        while not scheduler.idle:
            assert time.monotonic() < end, "requests wait for ever"
            results += scheduler.step(0.05)
        self.engine.runtime.check_integrity()
        assert len(results) == stop - first
        assert all(r.state is RequestState.FINISHED and not r.error for r in results)
        return results


def l3_hits(results: list[RequestResult]) -> int:
    return sum(n for r in results for tier, n in r.hit_pages.items() if tier.name == "L3")


@pytest.fixture
def serve(config: Config) -> Iterator[Callable[[], Served]]:
    opened: list[Engine] = []

    def start() -> Served:
        opened.append(open_engine(config, OracleRunner()))
        return Served(opened[-1])

    yield start
    for engine in opened:
        engine.close(5.0)


def fresh_worker(config: Config) -> StorageWorker:
    worker = open_worker(config)
    assert worker is not None
    return worker


def test_detach_with_drain_and_attach(serve, config: Config) -> None:
    served = serve()
    runtime = served.engine.runtime
    served.requests(0, 20)
    stored = runtime.storage_stats().pages["store"]
    assert runtime.detach_storage(10.0)
    assert runtime.detach_storage(10.0)  # again
    assert l3_hits(served.requests(20, 40)) == 0
    assert runtime.storage_stats().bytes_moved["store"] > 0
    assert stored
    degraded = served.engine.scheduler.cache.counters["degraded"]
    assert degraded == 1
    runtime.attach_storage(fresh_worker(config))
    with pytest.raises(StorageBusyError, match="detach"):
        runtime.attach_storage(fresh_worker(config))
    served.requests(40, 60)
    served.requests(0, 60)
    assert served.engine.scheduler.cache.counters["degraded"] == degraded + 1
    pages = runtime.storage_stats().pages
    assert sum(n for outcome, n in pages["store"].items() if outcome.is_stored) > 0
    assert pages["load"]


def test_force_detach_of_a_hung_backend(config: Config) -> None:
    """Serving goes on, the detach ends in time, and the buffers that the hung call has stay apart
    until it returns."""
    hung = FaultyBackend(FaultyOptions(faults={"write": {"hang": 1.0}, "read": {"hang": 1.0}}))
    settings = fresh_worker(config)
    broken = StorageWorker("ram", hung, settings.settings, settings._context)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvstrata.tools.engine.open_worker", lambda _: broken)
        engine = open_engine(config, OracleRunner())
    served = Served(engine)
    try:
        for request in read_trace(TRACE, 5):
            engine.scheduler.submit(request.prompt(), engine.namespace, max_new_tokens=1)
        while hung.happened.get(("write", "hang")) is None:
            engine.scheduler.step(0.05)
        begun = time.monotonic()
        assert not engine.runtime.detach_storage(0.5, force=True)
        assert time.monotonic() - begun < 10.0, "the call hangs until it is released"
        while not engine.scheduler.idle:
            engine.scheduler.step(0.05)
        staging = engine.runtime.core.staging
        assert staging.lent("ram") > 0
        engine.runtime.attach_storage(fresh_worker(config))
        served.requests(5, 25)
        assert engine.runtime.storage_stats().bytes_moved["store"] > 0
        hung.release()
        end = time.monotonic() + 20
        while staging.lent("ram"):
            assert time.monotonic() < end, "the late call did not give its buffers back"
            engine.scheduler.step(0.05)
        engine.runtime.check_integrity()
    finally:
        hung.release()
        engine.close(5.0)


def test_attach_needs_a_runtime_with_l3(config: Config) -> None:
    without = replace(config, l3=type(config.l3)(backend=""))
    with open_engine(without, OracleRunner()) as engine:
        assert engine.runtime.detach_storage(1.0)
        with pytest.raises(ConfigError, match="without L3"):
            engine.runtime.attach_storage(fresh_worker(config))


def test_what_only_l3_had_is_a_miss_at_once_when_it_is_detached(
    serve: Callable[[], Served],
) -> None:
    """Control drops its belief with the first refusal; it does not ask again and again."""
    served = serve()
    served.requests(0, 40)
    results = served.requests(0, 40)
    assert l3_hits(results), "something is in no tier but L3"
    worker = served.engine.runtime.attached_storage()
    assert worker is not None
    assert served.engine.runtime.detach_storage(10.0)
    pages = sum(sum(r.hit_pages.values()) for r in results)
    served.requests(0, 40)
    loads = worker.stats().pages["load"]
    assert 0 < loads[Outcome.UNAVAILABLE] <= 2 * pages
    assert not loads.get(Outcome.CANCELLED)
