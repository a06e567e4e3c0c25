"""One runtime on the bench: with a gated oracle, a faulty backend and a driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstrata.backends import BackendContext, StorageWorker, WorkerSettings
from kvstrata.backends.policies import BreakerSettings
from kvstrata.boundary import (
    BackedUp,
    BatchDone,
    BatchPlan,
    PrefetchReady,
    RowPlan,
    RowResult,
    RowStatus,
    RuntimeInterface,
)
from kvstrata.gpu_runtime.core import RuntimeSettings
from kvstrata.gpu_runtime.pools import ComponentSpec
from kvstrata.gpu_runtime.testing.driver import Driver, Prompt, equal, of_type, require
from kvstrata.gpu_runtime.testing.parts import FaultyBackend, GatedRunner
from kvstrata.handles import Extents, RequestRuntimeHandle, StagingMode, Tier, page_count
from kvstrata.staging import StagingSettings, aligned

MakeRuntime = Callable[..., RuntimeInterface]
"""`make_runtime(settings, runner, worker)`, worker None for a runtime without L3."""

PATIENT = WorkerSettings(breaker=BreakerSettings(failures=0, probe_s=0))
"""The worker asks on, however the backend fails: the tests are about the runtime."""
BACKEND = "bench"
KV = ComponentSpec("kv", layers=2, kv_heads=1, head_dim=4, dtype="float16")
CLOSE_S = 10.0


@dataclass(eq=False, slots=True)
class Rig:
    """What a test works with. Prompts are made of seeds, so equal seeds are equal prompts."""

    settings: RuntimeSettings
    runtime: RuntimeInterface
    runner: GatedRunner
    backend: FaultyBackend
    worker: StorageWorker | None
    driver: Driver

    def prompt(self, tokens: int, seed: int = 0) -> Prompt:
        return Prompt.random(tokens, self.settings.page_tokens, seed)

    # ── common moves ─────────────────────────────────────────────────────────────────────────────

    def start(
        self, prompt: Prompt, max_new_tokens: int = 1, **row: Any
    ) -> tuple[int, RequestRuntimeHandle]:
        """Open one request and run the rest of its prompt; the batch and the handle."""
        cached = page_count(row.get("attach", ())) + page_count(row.get("restore", ()))
        start = min(cached * self.settings.page_tokens, len(prompt) - 1)
        plan = RowPlan(row=0, start=start, count=len(prompt) - start, **row)
        batch, (handle,) = self.driver.run(
            BatchPlan(open=(prompt.open(max_new_tokens),), rows=(plan,))
        )
        return batch, handle

    def ask(self, prompt: Prompt, max_new_tokens: int = 1, **row: Any) -> RowResult:
        """The same, and wait for its end."""
        batch, _ = self.start(prompt, max_new_tokens, **row)
        return self.only_row(batch)

    def only_row(self, batch: int) -> RowResult:
        (row,) = self.driver.wait_batch(batch).rows
        return row

    def make_pages(self, prompt: Prompt) -> Extents:
        """L1 extents of a prompt's full pages, which belong to the test; the request has gone."""
        row = self.ask(prompt)
        equal(row.status, RowStatus.OK, "status of a prefill")
        equal(page_count(row.extents), prompt.full_pages, "pages of a prefill")
        self.release(row.handle)
        return row.extents

    def release(self, *handles: RequestRuntimeHandle) -> None:
        self.driver.prepare(BatchPlan(release=handles))

    def free(self, *extents: Extents) -> None:
        """Free, and wait until they are free."""
        actions = [self.driver.free(e) for e in extents if e]
        for action_id in self.driver.apply(*actions):
            self.driver.wait_action(action_id)

    def store(self, prompt: Prompt, source: Extents, target: Tier = Tier.L3) -> BackedUp:
        """Back all of a prompt's pages up and wait."""
        count = page_count(source)
        action = self.driver.backup(prompt.keys(0, count), source, target)
        return of_type(self.driver.do(action), BackedUp)

    def in_l2(self, prompt: Prompt) -> Extents:
        """L2 extents of a prompt's pages; nothing of it is left in L1."""
        pages = self.make_pages(prompt)
        event = self.store(prompt, pages, Tier.L2)
        equal(event.n, prompt.full_pages, "pages backed up to L2")
        self.free(pages)
        return event.extents

    def in_l3(self, prompt: Prompt) -> None:
        """A prompt's pages are in L3 and nowhere else."""
        pages = self.make_pages(prompt)
        equal(self.store(prompt, pages).n, prompt.full_pages, "pages stored")
        self.free(pages)

    def fetch(self, prompt: Prompt, target: Tier, **more: Any) -> PrefetchReady:
        action = self.driver.prefetch(prompt.keys(), target, **more)
        return of_type(self.driver.do(action), PrefetchReady)

    # ── what must hold ───────────────────────────────────────────────────────────────────────────

    def verify(self, prompt: Prompt, pages: Extents) -> None:
        """Attach pages of a prompt: the oracle compares every byte of them."""
        before = self.driver.verified
        count = page_count(pages)
        row = self.ask(prompt.more([1, 2, 3]), attach=pages)
        equal(row.status, RowStatus.OK, "status of a row that attaches")
        equal(self.driver.verified - before, count, "pages compared")
        equal(self.driver.mismatched, 0, "pages with a wrong byte")
        self.release(row.handle)
        self.free(row.extents)

    def check(self) -> None:
        equal(self.driver.mismatched, 0, "pages with a wrong byte")
        check = getattr(self.runtime, "check_integrity", None)
        if check is not None:
            check()
        if self.worker is not None:
            equal(self.worker.stats().callback_errors, 0, "callbacks that raised")

    def expect_free(self, l1: int | None = None, l2: int | None = None) -> None:
        """As many pages are free (default: all of them), and none is on its way; soon, if not now:
        pages come back a moment after the event that says how an operation ended."""
        wanted = {
            Tier.L1: self.driver.pages(Tier.L1)[0] if l1 is None else l1,
            Tier.L2: self.driver.pages(Tier.L2)[0] if l2 is None else l2,
        }
        what = ", ".join(f"{pages} free in {tier.name}" for tier, pages in wanted.items())
        self.driver.wait_status(
            lambda s: all((c.free, c.freeing) == (wanted[c.tier], 0) for c in s.capacity), what
        )

    def close(self) -> None:
        """Close; everything that was open has its event then."""
        self.runner.open_all()
        self.backend.open_all()
        self.runtime.close(CLOSE_S)
        self.driver.poll()
        require(not self.driver.open, f"actions without an end: {self.driver.open}")
        require(not self.driver.running, f"batches without an end: {self.driver.running}")


def sampled(done: BatchDone, row: int = 0) -> list[int]:
    return [int(t) for t in np.frombuffer(done.rows[row].sampled, np.int32)]


class RuntimeSuite:
    """What the parts of the conformance suite share. Each test opens a runtime of its own."""

    components: tuple[ComponentSpec, ...] = (KV,)
    page_tokens = 4

    @contextmanager
    def bench(
        self,
        make_runtime: MakeRuntime,
        *,
        pages: int = 32,
        host_pages: int = 16,
        mode: StagingMode = StagingMode.CACHE,
        with_l3: bool = True,
        max_requests: int = 8,
        max_context_tokens: int = 400,
        max_bytes: int = 0,
        **staging: Any,
    ) -> Iterator[Rig]:
        """A running rig; at the end everything is checked, closed and accounted for."""
        stride = sum(aligned(c.page_bytes(self.page_tokens)) for c in self.components)
        settings = RuntimeSettings(
            components=self.components,
            pages=pages,
            page_tokens=self.page_tokens,
            max_requests=max_requests,
            max_context_tokens=max_context_tokens,
            staging=StagingSettings(total_bytes=host_pages * stride, **staging),
            mode=mode,
        )
        runner, backend = GatedRunner(), FaultyBackend(max_bytes)
        worker = None
        if with_l3:
            context = BackendContext(
                BACKEND, {c.name: c.page_bytes(self.page_tokens) for c in self.components}
            )
            worker = StorageWorker(BACKEND, backend, PATIENT, context)
        runtime = make_runtime(settings, runner, worker)
        rig = Rig(settings, runtime, runner, backend, worker, Driver(runtime))
        try:
            yield rig
            rig.check()
        except BaseException:
            runner.open_all()
            backend.open_all()
            runtime.close(CLOSE_S)
            raise
        rig.close()
