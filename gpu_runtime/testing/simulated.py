"""A bench that takes turns: the runtime on the simulated device, and its storage worker.

Everything is a function of the seed: sizes, identities, deadlines, failures, and the order of
streams, completions and storage threads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from kvstrata.backends import BackendContext, StorageWorker, worker
from kvstrata.backends.frame import HEADER_BYTES
from kvstrata.boundary import (
    KEY_BYTES,
    Evicted,
    Free,
    Freed,
    KeyRun,
    Outcome,
    StatusReport,
    TierDegraded,
)
from kvstrata.gpu_runtime.base import ForwardRow
from kvstrata.gpu_runtime.core import RuntimeSettings
from kvstrata.gpu_runtime.local import LocalGPURuntime
from kvstrata.gpu_runtime.oracle import _sample
from kvstrata.gpu_runtime.pools import ComponentSpec
from kvstrata.gpu_runtime.sim import (
    SimBackend,
    SimDevice,
    SimRunner,
    poison,
    tear,
    written_while_free,
)
from kvstrata.gpu_runtime.testing.driver import require
from kvstrata.gpu_runtime.testing.rig import PATIENT
from kvstrata.gpu_runtime.transfers import objects_of
from kvstrata.gpu_runtime.turns import Threads, Turns, rest
from kvstrata.handles import Extents, StagingMode, Tier
from kvstrata.staging import StagingSettings
from kvstrata.staging.pages import pages_of_runs
from kvstrata.tiers.keys import page_keys
from kvstrata.tiers.namespace import component_fingerprint

PAGE = 4
CHAINS = ([0, 0, 0, 0, 0, 0, 0], [0, 0, 1, 0, 1, 0, 1], [1, 1, 1, 0, 0, 1, 1])
"""Names of the pages of prompts, which are prefixes of these."""
MOST_STILL = 300
"""A run in which nothing goes on so many times is stuck."""
SLOW_COPY_S = 0.1
CLOSE_S = 1000.0
"""Simulated."""
KV = ComponentSpec("kv", layers=1, kv_heads=1, head_dim=8, dtype="bfloat16")
INDEX = ComponentSpec("index", layers=1, kv_heads=1, head_dim=24, dtype="uint8")
NAMESPACE = bytes(range(32))


def keys_of(tokens: Sequence[int], namespace: bytes = NAMESPACE) -> bytes:
    """Keys of the full pages."""
    full = len(tokens) // PAGE * PAGE
    return page_keys(namespace, np.asarray(tokens[:full], np.int32).data, PAGE) if full else b""


def split(keys: bytes) -> list[bytes]:
    return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]


def next_token(tokens: Sequence[int], namespace: bytes = NAMESPACE) -> int:
    """What the oracle samples after `tokens`, without any cache."""
    data = np.asarray(tokens, np.int32)
    row = ForwardRow(0, namespace, data, len(data) - 1, 1, 0, True, True)
    return _sample(keys_of(tokens, namespace), row)


@dataclass
class SimBench:
    """`rng` draws what a test does; `turns` whose turn it is."""

    seed: int
    turns: Turns
    mode: str = ""
    """Drawn if empty, as is the weather."""
    weather: str = ""
    """"calm"; "hurried": copies and storage are slow, and deadlines pass; "failing": copies and
    forward steps raise; "lossy": copies are slow, and storage does not find what it has."""
    runtime_id: int | None = None
    """Drawn from the seed if None."""
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(f"bench {self.seed}")
        modes, weathers = ["cache", "buffer_only"], ["calm", "calm", "hurried", "failing"]
        self.mode, self.weather = (
            self.mode or rng.choice(modes),
            self.weather or rng.choice(weathers),
        )
        components = (KV, INDEX) if rng.random() < 0.3 else (KV,)
        self.runner, self.backend = SimRunner(), SimBackend()
        context = BackendContext("store", {c.name: c.page_bytes(PAGE) for c in components})
        self.worker = StorageWorker("store", self.backend, PATIENT, context, clock=self.turns.now)
        stride = sum(-(-c.page_bytes(PAGE) // 4096) * 4096 for c in components)
        settings = RuntimeSettings(
            components=components,
            pages=rng.randrange(11, 18),
            page_tokens=PAGE,
            max_requests=4,
            max_context_tokens=256,
            staging=StagingSettings(total_bytes=rng.randrange(4, 12) * stride),
            mode=StagingMode(self.mode),
        )
        self.runtime = LocalGPURuntime(
            settings,
            self.runner,
            self.worker,
            make_device=lambda timeline: SimDevice(timeline, self.turns),
            runtime_id=rng.getrandbits(63) if self.runtime_id is None else self.runtime_id,
            stamp_source=iter(lambda: rng.getrandbits(63), -1),
            page_order=lambda n: np.asarray(rng.sample(range(n), n), np.int64),
        )
        self.core = self.runtime.core
        setattr(self.core, "now", self.turns.now)  # noqa: B010 - a method becomes a clock
        poison(self.core)
        tear(self.core)
        self.namespaces = [NAMESPACE]
        """One an epoch."""
        self._still = 0
        self._freed: dict[int, Extents] = {}
        self.store_s = self.load_s = 20.0
        slow_rate = fail_rate = 0.0
        if self.weather == "hurried":
            self.store_s, self.load_s = rng.uniform(0.02, 0.2), rng.uniform(0.01, 0.1)
            self.backend.dawdles = lambda: rng.random() < 0.05
            slow_rate = 0.2
        if self.weather == "lossy":
            self.backend.loses = lambda: rng.random() < 0.3
            slow_rate = 0.3
        if self.weather == "failing":
            self.runner.fails = lambda: rng.random() < 0.02
            fail_rate = rng.choice([0.05, 0.3])
        for pool in self.core.pools.values():
            for name in ("gather", "scatter"):
                setattr(pool, name, self._plagued(getattr(pool, name), slow_rate, fail_rate))

    def _plagued(self, copy: Callable[..., None], slow: float, fail: float) -> Callable[..., None]:
        """A copy that is slow, or raises, now and then."""

        def plagued(*args: Any) -> None:
            if self.rng.random() < slow:
                rest(SLOW_COPY_S)
            copy(*args)
            if self.rng.random() < fail:
                raise OSError("planted")

        return plagued

    def draw_prompt(self) -> list[int]:
        """A prefix of a chain, so that pages are shared; now and then one that nobody else has."""
        names = self.rng.choice(CHAINS)[: self.rng.randrange(0, 8)]
        if self.rng.random() < 0.2:
            names = [self.rng.randrange(2, 200), *names[:6]]
        prompt = [n * PAGE + i for n in names for i in range(PAGE)]
        return [*prompt, *range(900, 900 + self.rng.choice([0, 0, 1, PAGE - 1]))] or [7]

    def go_on(self) -> None:
        """Some turns. Raises when nothing went on too often, or a FREE page was written."""
        if self.turns.run(self.rng.randrange(1, 16)):
            self._still = 0
            self.check_free()
            return
        self.turns.skip()  # only time can help
        self._still += 1
        require(self._still < MOST_STILL, "nothing goes on")

    # ── what must hold ───────────────────────────────────────────────────────────────────────────

    def check_pages(self, keys: bytes, tier: Tier, extents: Extents) -> None:
        """Data before name: pages that control was told of hold what their keys say."""
        _, pages = self.core.resolve(extents, tier)
        for name, numbers in pages.items():
            found = self._page_bytes(tier, name, numbers)
            require((found == self._want(name, keys)).all(), f"{tier.name} {name}: wrong bytes")

    def check_stored(self, keys: KeyRun) -> None:
        """Pages that were said to be stored are."""
        for name in self.core.pools:
            for obj in objects_of(self.core, keys, name):
                require(obj in self.backend._frames, "said to be stored, and is not")

    def note_free(self, action: Free) -> None:
        self._freed[action.action_id] = action.extents

    def check_freed(self, event: Freed) -> None:
        """Pages that were said to be free are."""
        for extent in self._freed.pop(event.action_id):
            pages = pages_of_runs(extent.page_runs)
            table = self.core.table(extent.tier, extent.pool)
            require(table.is_free(pages, extent.generation), "said to be free, and is not")

    def check(self) -> None:
        """At any time: invariants hold, and what a backend still uses counts as lent to it."""
        self.runtime.check_integrity()
        require(not self.runner.mixed, f"KV of two weights in {self.runner.mixed}")
        self.check_free()
        lent = self.core.staging.lent(self.core.backend_name) * len(self.core.pools)
        require(self.backend.held <= lent, f"{self.backend.held} pages in use, {lent} are lent")

    def check_free(self) -> None:
        written = written_while_free(self.core)
        require(not written, f"written while it was FREE: {written}")

    def check_rest(self) -> None:
        """When all has ended: nothing is under way, lent or half done."""
        require(self.worker.flush(CLOSE_S), "storage never came to rest")
        self.check()
        for table in (*self.core.tables.values(), *self.core.staging.tables.values()):
            require(table.freeing == 0, f"{table}: still freeing")
        assert self.core.staging.lent(self.core.backend_name) == 0
        assert len(self.runtime.batches.rows) == 0
        for event in self.runtime.poll(0.0):
            late = not isinstance(event, StatusReport | TierDegraded | Evicted)
            require(not late, f"an event too late: {event}")
        self.check_store()

    def check_store(self) -> None:
        """Every frame holds what its key says; nothing was ever corrupt, or lost."""
        pairs = ((space, name) for space in self.namespaces for name in self.core.pools)
        by_namespace = {component_fingerprint(space, name): name for space, name in pairs}
        for obj, frame in self.backend._frames.items():
            name = by_namespace[obj.namespace]
            found = np.frombuffer(frame.data[HEADER_BYTES:], np.uint8)
            require((found == self._want(name, obj.key)[0]).all(), f"L3 {name}: wrong bytes")
        stats = self.worker.stats()
        assert stats.callback_errors == 0
        for operation in ("load", "store"):
            counts = stats.pages.get(operation, {})
            bad = [o for o in (Outcome.CORRUPT, Outcome.ERROR) if counts.get(o)]
            require(not bad, f"{operation}: {bad}")

    def _want(self, name: str, keys: bytes) -> Any:
        """Bytes of the pages with `keys`, [pages, page bytes]."""
        words = self.runner._generate(name, self.core.pools[name], keys)
        return words.contiguous().view(torch.uint8).reshape(len(keys) // KEY_BYTES, -1).numpy()

    def _page_bytes(self, tier: Tier, name: str, numbers: Any) -> Any:
        pool = self.core.pools[name]
        if tier is Tier.L2:
            return self.core.staging.array(name)[numbers][:, : pool.page_bytes]
        taken = pool.data[:, torch.from_numpy(numbers)].transpose(0, 1)
        return taken.reshape(len(numbers), -1).numpy()


@contextmanager
def sim_bench(
    seed: int, mode: str = "", weather: str = "", runtime_id: int | None = None
) -> Iterator[SimBench]:
    """A bench whose storage threads take turns as well; at the end every thread has ended."""
    turns = Turns(seed)
    with patch.object(worker, "threading", Threads(turns)):
        try:
            bench = SimBench(seed, turns, mode, weather, runtime_id)
            yield bench
            bench.runtime.close(CLOSE_S)
        finally:
            turns.end()
