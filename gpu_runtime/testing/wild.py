"""A control that does whatever the boundary allows, drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from kvstrata.boundary import (
    BackedUp,
    BatchPlan,
    Event,
    Free,
    Freed,
    KeyRun,
    OpenRow,
    PrefetchReady,
    Restored,
    RowPlan,
    RowResult,
    RowStatus,
)
from kvstrata.errors import CapacityError
from kvstrata.gpu_runtime.testing.driver import ConformanceError, Driver, require
from kvstrata.gpu_runtime.testing.simulated import (
    KV,
    NAMESPACE,
    PAGE,
    SimBench,
    keys_of,
    next_token,
    split,
)
from kvstrata.handles import Extents, RequestRuntimeHandle, Tier, slice_extents
from kvstrata.tiers.keys import root_key


@dataclass(eq=False)
class WildRow:
    tokens: list[int]
    prompt: int
    most_kv: int
    planned_kv: int = 0
    done: bool = False
    released: bool = False


Used = list[tuple[Tier, list[bytes]]]
"""Pages, by key, that a message uses."""


@dataclass
class Wild:
    """A control without sense or patience: it gives pages up as soon as it has sent what uses them,
    and releases rows while their batches run."""

    bench: SimBench
    rows: dict[RequestRuntimeHandle, WildRow] = field(default_factory=dict)
    batches: dict[int, list[WildRow]] = field(default_factory=dict)
    wanted: dict[int, tuple[Tier, KeyRun]] = field(default_factory=dict)
    """What actions bring, and where to."""

    def __post_init__(self) -> None:
        self.rng, self.driver = self.bench.rng, Driver(self.bench.runtime)
        self.pages: dict[Tier, dict[bytes, list[Extents]]] = {Tier.L1: {}, Tier.L2: {}}
        """Copies that it holds of each page, by key."""
        self.cached = self.bench.mode == "cache"
        self.stored: set[bytes] = set()
        """Keys of pages that were in L3 once."""
        self.impatience = self.rng.choice([0.1, 0.3, 0.6])

    def go(self, steps: int = 60) -> None:
        """Do what comes to mind; then let everything end, and check that all came back."""
        self.act(steps)
        bench = self.bench
        self.release(*self.rows)
        while self.driver.open or self.driver.running or any(self.pages.values()):
            self.give_up([(tier, list(held)) for tier, held in self.pages.items()])
            bench.go_on()
            self.hear()
        bench.check_rest()
        for table in (*bench.core.tables.values(), *bench.core.staging.tables.values()):
            require(table.free == table.total, f"{table}: leak")

    def act(self, steps: int) -> None:
        bench, rng = self.bench, self.rng
        acts = (*[self.batch] * 3, self.backup, self.backup, self.load, self.restore)
        for _ in range(steps):
            rng.choice(acts)()
            if rng.random() < 0.2 and self.rows:
                self.release(rng.choice(list(self.rows)))
            tier = rng.choice(list(self.pages))
            if rng.random() < (0.3 if len(self.pages[tier]) > 6 else 0.05):
                self.give_up([(tier, list(self.pages[tier])[: rng.randrange(1, 9)])])
            bench.go_on()
            self.hear()
            if rng.random() < 0.1:
                bench.check()

    # ── rows ─────────────────────────────────────────────────────────────────────────────────────

    def batch(self) -> None:
        """Go on with some rows and open up to two, with whatever pages there are."""
        rng, steps = self.rng, self.rng.randrange(1, 4)
        rows: list[tuple[WildRow, RowPlan, int]] = []
        opened: list[OpenRow] = []
        used: Used = []
        for handle, row in self.rows.items():
            if not row.done and row.planned_kv < row.most_kv and rng.random() < 0.7:
                rows.append((row, *self.next_part(handle, row, steps)))
        for _ in range(min(rng.randrange(3), 4 - len(self.rows))):
            prompt, new = self.bench.draw_prompt(), rng.randrange(1, 8)
            row = WildRow(prompt, len(prompt), len(prompt) + new - 1)
            plan, pages = self.first_part(row, len(opened))
            rows.append((row, plan, plan.start + plan.count))
            data = np.asarray(prompt, np.int32).tobytes()
            opened.append(OpenRow(tokens=data, namespace=NAMESPACE, max_new_tokens=new))
            used += pages
        plan_rows = tuple(plan for _, plan, _ in rows)
        try:
            prepared = self.driver.prepare(
                BatchPlan(open=tuple(opened), rows=plan_rows, steps=steps)
            )
        except CapacityError:
            return
        for row, _, end in rows:
            row.planned_kv = end
        self.rows |= zip(prepared.opened, [r for r, p, _ in rows if p.row in range(2)], strict=True)
        if rows:
            self.batches[self.driver.execute(prepared)] = [row for row, _, _ in rows]
        if rng.random() < self.impatience:
            self.give_up(used)

    def next_part(
        self, handle: RequestRuntimeHandle, row: WildRow, steps: int
    ) -> tuple[RowPlan, int]:
        at = row.planned_kv
        if at >= row.prompt:
            return RowPlan(row=handle), min(at + steps, row.most_kv)
        count = min(row.prompt - at, PAGE * self.rng.randrange(1, 4))
        return RowPlan(row=handle, start=at, count=count), at + count

    def first_part(self, row: WildRow, index: int) -> tuple[RowPlan, Used]:
        keys = split(keys_of(row.tokens))
        attach = self.leading(Tier.L1, keys)
        restore = self.leading(Tier.L2, keys[len(attach) :])
        cached = (len(attach) + len(restore)) * PAGE
        start = min(cached, row.prompt - 1)
        most = 1 if start < cached else PAGE * self.rng.randrange(1, 4)
        plan = RowPlan(
            row=index,
            attach=self.extents(Tier.L1, attach),
            restore=self.extents(Tier.L2, restore),
            start=start,
            count=min(row.prompt - start, most),
        )
        return plan, [(Tier.L1, attach), (Tier.L2, restore)]

    def release(self, *handles: RequestRuntimeHandle) -> None:
        self.driver.prepare(BatchPlan(release=handles))
        for handle in handles:
            self.rows.pop(handle).released = True

    # ── actions ──────────────────────────────────────────────────────────────────────────────────

    def backup(self) -> None:
        """Copy a run of pages down, and maybe give them up in the same message."""
        source = self.rng.choice([Tier.L1, Tier.L2] if self.cached else [Tier.L1])
        target = Tier.L2 if self.cached and source is Tier.L1 else Tier.L3
        run, keys = self.chain_of(source)
        if keys:
            extents = self.extents(source, keys)
            action = self.driver.backup(run, extents, target, self.bench.store_s)
            self.wanted[action.action_id] = (target, run)
            frees = self.frees(source, keys) if self.rng.random() < self.impatience else []
            self.driver.apply(*frees, action)

    def restore(self) -> None:
        run, keys = self.chain_of(Tier.L2)
        if keys:
            action = self.driver.restore(self.extents(Tier.L2, keys))
            self.wanted[action.action_id] = (Tier.L1, run)
            self.driver.apply(action)
            if self.rng.random() < self.impatience:
                self.give_up([(Tier.L2, keys)])

    def load(self) -> None:
        keys = split(keys_of(self.bench.draw_prompt()))
        if self.rng.random() < 0.7:
            keys = list(takewhile(self.stored.__contains__, keys))
        run = self.run(keys)
        if keys:
            target = Tier.L2 if self.cached else Tier.L1
            action = self.driver.prefetch(run, target, self.bench.load_s)
            self.wanted[action.action_id] = (target, run)
            self.driver.apply(action)

    def give_up(self, used: Used) -> None:
        frees = [free for tier, keys in used for free in self.frees(tier, keys)]
        if frees:
            self.driver.apply(*frees)

    def frees(self, tier: Tier, keys: list[bytes]) -> list[Free]:
        copies = [extents for key in keys for extents in self.pages[tier].pop(key, [])]
        frees = [self.driver.free(extents) for extents in copies]
        for free in frees:
            self.bench.note_free(free)
        return frees

    # ── pages ────────────────────────────────────────────────────────────────────────────────────

    def extents(self, tier: Tier, keys: list[bytes]) -> Extents:
        return tuple(e for key in keys for e in self.pages[tier][key][-1])

    def leading(self, tier: Tier, keys: list[bytes]) -> list[bytes]:
        """The first keys that it holds pages of; sometimes not all of them."""
        held = self.pages[tier]
        n = next((i for i, key in enumerate(keys) if key not in held), len(keys))
        return keys[: n if self.rng.random() < 0.7 else self.rng.randrange(n + 1)]

    def run(self, keys: list[bytes]) -> KeyRun:
        return KeyRun(NAMESPACE, root_key(NAMESPACE), 0, b"".join(keys))

    def chain_of(self, tier: Tier) -> tuple[KeyRun, list[bytes]]:
        """Consecutive pages that it holds in a tier."""
        keys = split(keys_of(self.bench.draw_prompt()))
        first = self.rng.randrange(3)
        found = self.leading(tier, keys[first:])
        return self.run(keys).slice(first, first + len(found)), found

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def hear(self) -> None:
        for event in self.driver.poll():
            if isinstance(event, Freed):
                self.bench.check_freed(event)
        for action_id in [a for a in self.wanted if a in self.driver.ended]:
            self.came(self.driver.ended[action_id], *self.wanted.pop(action_id))
        for batch in [b for b in self.batches if b in self.driver.done]:
            for row, result in zip(
                self.batches.pop(batch), self.driver.done[batch].rows, strict=True
            ):
                self.row_done(row, result)
        require(self.driver.mismatched == 0, "a row read wrong bytes")

    def came(self, event: Event, target: Tier, run: KeyRun) -> None:
        if isinstance(event, PrefetchReady):
            n, extents = event.n_valid, event.extents
        elif isinstance(event, BackedUp | Restored):
            n, extents = event.n, event.extents
        else:
            raise ConformanceError(f"the end of a good action: {event}")
        if target is Tier.L3:
            self.bench.check_stored(run.slice(0, n))
            self.stored.update(split(run.keys)[:n])
        elif extents:
            self.keep(target, split(run.keys)[:n], extents)

    def row_done(self, row: WildRow, result: RowResult) -> None:
        row.done |= result.finished
        for token in np.frombuffer(result.sampled, np.int32).tolist():
            require(token == next_token(row.tokens), "a wrong token")
            row.tokens.append(token)
        if result.status is RowStatus.OK:
            complete = len(row.tokens) > row.most_kv
            require(result.finished == complete or row.released, "ended early or late")
        if result.extents:
            keys = split(keys_of(row.tokens))[result.first_page_index :]
            self.keep(Tier.L1, keys, result.extents)

    def keep(self, tier: Tier, keys: list[bytes], extents: Extents) -> None:
        count = sum(e.page_count for e in extents if e.pool == KV.name)
        self.bench.check_pages(b"".join(keys[:count]), tier, extents)
        for i, key in enumerate(keys[:count]):
            self.pages[tier].setdefault(key, []).append(slice_extents(extents, i, i + 1))
