"""Who drives a simulated bench, and how a wait of the runtime is taken out."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from kvstrata.boundary import BackedUp, Event, Free, Freed, Outcome
from kvstrata.gpu_runtime.testing.simulated import (
    PAGE,
    SimBench,
    next_token,
    sim_bench,
)
from kvstrata.gpu_runtime.testing.wild import Wild
from kvstrata.handles import Extents, StagingMode, Tier
from kvstrata.tiers import (
    CacheControl,
    Deadlines,
    Node,
    RequestResult,
    RequestState,
    Scheduler,
    SchedulerSettings,
    TreeCore,
    policy_class,
)

MOST_SEEDS = 300
MOST_TURNS = 60_000
"""A run that needs more is stuck."""


@dataclass
class Scheduled:
    """The scheduler runs requests that share prefixes, while a test aborts and evicts."""

    bench: SimBench
    prompts: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    results: dict[int, RequestResult] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    epoch_rate: float = -1.0
    """How often the weights change; drawn if it is negative."""

    def __post_init__(self) -> None:
        bench, rng = self.bench, self.bench.rng
        self.abort_rate, self.evict_rate = rng.choice([0.0, 0.02, 0.1]), rng.choice([0, 0.1, 0.2])
        if self.epoch_rate < 0:
            self.epoch_rate = rng.choice([0.0, 0.0, 0.0, 0.01])
        self.cache = CacheControl(
            TreeCore(policy_class("eviction", "lru")(), 10**6),
            policy_class("write", "write_through")(),
            StagingMode(bench.mode),
            has_l3=True,
            deadlines=Deadlines(bench.store_s, bench.load_s, 20.0),
        )
        self._check_what_control_hears()
        self.scheduler = Scheduler(
            bench.runtime,
            self.cache,
            policy_class("prefetch", "wait_complete")(),
            policy_class("restore", "always")(),
            SchedulerSettings(
                page_tokens=PAGE,
                max_context_tokens=256,
                max_requests=4,
                max_batch=rng.randrange(1, 4),
                chunk_tokens=PAGE * rng.randrange(1, 4),
                decode_steps=rng.randrange(1, 4),
                lookahead=rng.randrange(1, 6),
                depth=rng.randrange(1, 4),
            ),
            clock=bench.turns.now,
        )

    def go(self, requests: int = 12) -> None:
        self.run(requests)
        self.bench.check_rest()
        self._check_outputs()
        self._check_tree()

    def run(self, requests: int = 0) -> None:
        """Submit so many more requests, and go on until all have ended."""
        bench, rng, scheduler = self.bench, self.bench.rng, self.scheduler
        left = requests
        while left or not scheduler.idle:
            if left and scheduler.waiting < 5 and rng.random() < 0.3:
                self._submit()
                left -= 1
            if rng.random() < self.abort_rate:
                self._abort()
            if rng.random() < self.evict_rate:
                self.evict(rng.choice([Tier.L1, Tier.L2]), rng.randrange(1, 9))
            if rng.random() < self.epoch_rate:
                self.new_epoch()
            for result in scheduler.step(0.0):
                self.results[result.request_id] = result
            bench.go_on()
            if rng.random() < 0.1:
                bench.check()
                scheduler.check_integrity()
            assert scheduler.counters["pages_mismatched"] == 0, "a row read wrong bytes"
            assert bench.turns.taken < MOST_TURNS, f"stuck: {scheduler.describe()}"

    def _submit(self) -> None:
        rng = self.bench.rng
        prompt = self.bench.draw_prompt()
        if self.prompts and rng.random() < 0.4:
            prompt, _ = rng.choice(list(self.prompts.values()))
        self.submit(prompt, rng.randrange(1, 8))

    def submit(self, prompt: list[int], new: int) -> int:
        data = np.asarray(prompt, np.int32).tobytes()
        namespace = self.bench.namespaces[-1]
        request_id = self.scheduler.submit(data, namespace, max_new_tokens=new)
        self.prompts[request_id] = (prompt, new)
        return request_id

    def abort(self, request_id: int) -> None:
        self.scheduler.abort(request_id)
        self.aborted.add(request_id)

    def _abort(self) -> None:
        """Abort a request; sometimes give all pages up at once that nobody else has locked."""
        alive = [i for i in self.prompts if i not in self.results]
        if alive:
            self.abort(self.bench.rng.choice(alive))
            if self.bench.rng.random() < 0.5:
                for tier in (Tier.L1, Tier.L2):
                    self.evict(tier, 99)

    def new_epoch(self) -> None:
        number = len(self.bench.namespaces)
        self.bench.namespaces.append(bytes([number]) * 32)
        new = self.bench.namespaces[-1]
        self.scheduler.new_epoch(number, lambda old: new, payload=b"weights %d" % number)

    def evict(self, tier: Tier, pages: int) -> None:
        gone = self.cache.tree.evict(tier, pages)
        self.cache.outbox += [self.cache.free(extents) for _, extents in gone]

    def _check_what_control_hears(self) -> None:
        """When it learns where pages are, their bytes are there; when it hears that pages are
        stored or free, they are."""
        cache, tree, bench = self.cache, self.cache.tree, self.bench
        set_resident, backed_up, free = tree.set_resident, cache._backed_up, cache.free

        def note_resident(node: Node, tier: Tier, extents: Extents) -> None:
            bench.check_pages(node.keys, tier, extents)
            set_resident(node, tier, extents)

        def note_backup(event: BackedUp) -> None:
            backup = cache._backups[event.action_id]
            if backup.target is Tier.L3 and tree.is_alive(backup.end):
                keys = tree.key_run(tree.span(backup.end, backup.count))
                bench.check_stored(keys.slice(0, event.n))
            backed_up(event)

        def note_free(extents: Extents) -> Free:
            action = free(extents)
            bench.note_free(action)
            return action

        def handle(event: Event) -> None:
            if isinstance(event, Freed):
                bench.check_freed(event)
            CacheControl.handle(cache, event)

        for owner, name, function in (
            (tree, "set_resident", note_resident),
            (cache, "_backed_up", note_backup),
            (cache, "free", note_free),
            (cache, "handle", handle),
        ):
            setattr(owner, name, function)

    def _check_outputs(self) -> None:
        assert self.results.keys() == self.prompts.keys()
        for request_id, result in self.results.items():
            prompt, new = self.prompts[request_id]
            wanted = [self._output_of(prompt, new, space) for space in self.bench.namespaces]
            begun = any(want.startswith(result.output_tokens) for want in wanted)
            if result.state is RequestState.ABORTED:
                assert request_id in self.aborted, result
                assert begun, "an aborted request made wrong tokens"
            elif "weights changed" in result.error:
                assert len(wanted) > 1, result
                assert begun, "a request made wrong tokens before the weights changed"
            elif result.state is RequestState.FAILED and self.bench.weather == "failing":
                assert "planted" in result.error, result
            else:
                assert result.state is RequestState.FINISHED, result
                assert result.output_tokens in wanted, "wrong or missing tokens"

    def _output_of(self, prompt: list[int], new: int, namespace: bytes) -> bytes:
        tokens = list(prompt)
        for _ in range(new):
            tokens.append(next_token(tokens, namespace))
        return np.asarray(tokens[len(prompt) :], np.int32).tobytes()

    def _check_tree(self) -> None:
        """What is not free belongs to the tree; every page of it holds what its key says."""
        tree, core, bench = self.cache.tree, self.bench.core, self.bench
        for tier, tables in ((Tier.L1, core.tables), (Tier.L2, core.staging.tables)):
            for table in tables.values():
                assert table.total - table.free == tree.resident(tier), f"{table}: leak"
        todo = list(tree._roots.values())
        while todo:
            node = todo.pop()
            todo += (node.children or {}).values()
            for tier in (Tier.L1, Tier.L2):
                if node.extents(tier):
                    bench.check_pages(node.keys, tier, node.extents(tier))
        counters = self.cache.counters
        assert not [k for k in counters if "stale" in k and counters[k]], counters
        lost = (Outcome.MISSING, Outcome.PARENT_MISSING)
        stats = bench.worker.stats().pages
        if bench.weather == "calm":
            assert not [o for op in ("load", "store") for o in lost if stats.get(op, {}).get(o)]


Edit = tuple[Any, str, str, str]
"""Owner, function, and a piece of its source that becomes another."""


def plant(patch: pytest.MonkeyPatch, edits: tuple[Edit, ...]) -> None:
    """Compile functions anew, changed."""
    sources: dict[tuple[Any, str], str] = {}
    for owner, name, old, new in edits:
        place = (owner, name)
        source = sources.get(place) or textwrap.dedent(inspect.getsource(getattr(owner, name)))
        assert source.count(old) == 1, f"{place}: {old!r} is there not once:\n{source}"
        sources[place] = source.replace(old, new)
    for (owner, name), source in sources.items():
        text = source.replace("super()", f"super({getattr(owner, '__name__', '')}, self)")
        made: dict[str, Any] = {}
        exec(compile(text, f"<planted in {name}>", "exec"), getattr(owner, name).__globals__, made)
        patch.setattr(owner, name, made[name])


DRIVERS: dict[str, Any] = {"wild": Wild, "scheduler": Scheduled}


@pytest.fixture
def run_seed() -> Callable[..., None]:
    """`run_seed("scheduler" or "wild", seed, mode, weather)`: raises what it noticed."""

    def run(driver: str, seed: int, mode: str = "", weather: str = "") -> None:
        with sim_bench(seed, mode, weather) as bench:
            DRIVERS[driver](bench).go()

    return run


@pytest.fixture
def close_after() -> Callable[[int, int], None]:
    """`close_after(seed, steps)`: a wild control closes the runtime in the middle."""

    def close(seed: int, steps: int) -> None:
        with sim_bench(seed) as bench:
            wild = Wild(bench)
            wild.act(steps)
            bench.runtime.close(1000)
            wild.driver.poll()
            assert not wild.driver.open
            assert not wild.driver.running
            assert not wild.driver.mismatched

    return close


@pytest.fixture
def scheduled() -> type[Scheduled]:
    return Scheduled


@pytest.fixture
def trace_of() -> Callable[[int], list[str]]:
    """All that a wild control hears in one run, but for the times of compute."""

    def trace(seed: int) -> list[str]:
        with sim_bench(seed) as bench:
            wild = Wild(bench)
            wild.go()
            batches = [msgspec.structs.replace(b, compute_s=0) for b in wild.driver.done.values()]
            return [str(bench.turns.taken), *map(repr, (*wild.driver.ended.items(), *batches))]

    return trace


@pytest.fixture
def plant_edits(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[Edit, ...]], None]:
    return lambda edits: plant(monkeypatch, edits)


@pytest.fixture
def find_seed(run_seed: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """`find_seed(edits, mode, weather, first)`: plants a bug, and says which run notices it, and
    how. It begins to look at seed `first`, and looks at all."""

    def find(edits: tuple[Edit, ...], mode: str, weather: str, first: int = 0) -> str:
        plant(monkeypatch, edits)
        for seed in (*range(first, MOST_SEEDS), *range(first)):
            for driver in DRIVERS:
                try:
                    run_seed(driver, seed, mode, weather)
                except Exception as exc:  # noqa: BLE001 - whatever it is, it was noticed
                    return f"{driver}, seed {seed}: {type(exc).__name__}: {exc}"
        raise AssertionError(f"{MOST_SEEDS} seeds did not notice")

    return find
