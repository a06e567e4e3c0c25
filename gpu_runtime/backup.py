"""Backup: L1 → L2, L2 → L3, and L1 → L3 through the window."""

from __future__ import annotations

import math
from collections import deque

from kvstrata.boundary import BackedUp, Backup
from kvstrata.gpu_runtime.core import PageSet, RuntimeCore, page_set_count
from kvstrata.gpu_runtime.move import Move
from kvstrata.gpu_runtime.transfers import (
    ComponentJobs,
    Copies,
    chunk_pages,
    chunks_of,
    part_of,
)
from kvstrata.handles import Extents, Tier
from kvstrata.staging import PageTable, SlotKind, SlotRequest, Slots


class BackupToL2(Move):
    """Gather device pages into host pages that stay, as control's."""

    def __init__(self, core: RuntimeCore, copies: Copies, action: Backup, source: PageSet) -> None:
        super().__init__(core, copies, action.action_id, action.deadline_s)
        self.source, self.count = source, page_set_count(source)
        for name, pages in source.items():
            core.tables[name].begin_backup(pages)
        self.request = SlotRequest(
            SlotKind.WRITE, self.count, self._granted, self._refused, end_s=self.end_s
        )
        core.staging.request(self.request)

    def cancel(self) -> None:
        self.core.staging.cancel(self.request)

    def _granted(self, slots: Slots) -> None:
        for name, pages in slots.items():
            self.core.staging.tables[name].begin_load(pages)

        target = dict(slots)
        named: Extents = ()

        def copied(error: str) -> None:
            extents: Extents = ()
            if not error:
                for name, pages in slots.items():
                    self.core.staging.tables[name].ready(pages)
                extents = self.core.claim(Tier.L2, target, named)
            self.core.staging.give_back(slots)
            self._done(0 if error else self.count, extents, error)

        def enqueued() -> None:
            nonlocal named
            named = self.core.extents_of(Tier.L2, target)

        self.copies.d2h(self.source, slots, copied, enqueued=enqueued)

    def _refused(self, cause: str) -> None:
        self._done(0, (), cause)

    def _done(self, n: int, extents: Extents, cause: str) -> None:
        for name, pages in self.source.items():
            self.core.tables[name].end_backup(pages)
        self.core.settle_frees()
        self.end(BackedUp(action_id=self.action_id, n=n, extents=extents, cause=cause))


class StoreQueue:
    """Backups to L3 in the order in which control asked for them.

    One asks for its chunks only when all chunks of those before it were granted: so no page goes to
    a backend before its parent, however small the window is. Under the runtime's lock.
    """

    def __init__(self) -> None:
        self._waiting: deque[BackupToL3] = deque()
        self._told: BackupToL3 | None = None
        """The first one, when it knows that it is its turn."""
        self._telling = False

    def join(self, move: BackupToL3) -> None:
        self._waiting.append(move)
        self._tell()

    def leave(self, move: BackupToL3) -> None:
        """`move` will not ask again. Idempotent."""
        if move in self._waiting:
            self._waiting.remove(move)
            self._tell()

    def _tell(self) -> None:
        """Let the first one ask. A loop: one that leaves at once does not nest the next."""
        if self._telling:
            return
        self._telling = True
        try:
            while self._waiting and self._waiting[0] is not self._told:
                self._told = self._waiting[0]
                self._told.ask()
        finally:
            self._telling = False

    def expire(self, now_s: float) -> float:
        """End those that waited for their turn until their deadline; returns the next one."""
        for move in [m for m in self._waiting if m is not self._told and m.end_s <= now_s]:
            move.give_up("timeout")
        return min((m.end_s for m in self._waiting if m is not self._told), default=math.inf)


class BackupToL3(Move):
    """Store pages, chunk by chunk in chain order; a chunk that fails ends the action.

    From L1 each chunk takes window pages, and its device pages are released after the D2H, not
    after the store. From L2 the host pages themselves are lent.
    """

    def __init__(
        self,
        core: RuntimeCore,
        copies: Copies,
        action: Backup,
        tier: Tier,
        source: PageSet,
        *,
        queue: StoreQueue,
    ) -> None:
        super().__init__(core, copies, action.action_id, action.deadline_s)
        self.queue = queue
        self.keys, self.tier, self.source = action.keys, tier, source
        most = chunk_pages(max(core.staging.page_bytes.values()))
        most = min(most, max(1, core.staging.write_window // 2))
        if tier is Tier.L1:  # so that it never waits for what waits for it
            most = min(most, core.staging.store_window)
        self.chunks = chunks_of(page_set_count(source), most)
        self.stored: list[int] = [0] * len(self.chunks)
        self.causes: list[str] = [""] * len(self.chunks)
        """Why the page after those that a chunk stored was not. Chunks end in any order."""
        self.cause = ""
        """Why no further chunk is asked for."""
        self.next = 0
        self.running = 0
        self.request: SlotRequest | None = None
        for name, pages in source.items():
            self._table(name).begin_backup(pages)
        queue.join(self)

    def cancel(self) -> None:
        if self.request is not None:
            self.core.staging.cancel(self.request)
        else:
            self.give_up("cancelled")

    def give_up(self, cause: str) -> None:
        """Ask for no further chunk; ends when those under way have ended."""
        self.cause = self.cause or cause
        self.queue.leave(self)
        self._finish_if_idle()

    def _table(self, name: str) -> PageTable:
        return self.core.table(self.tier, name)

    def ask(self) -> None:
        """Queue for the next chunk, or leave the queue when there is none."""
        if self.cause or self.next == len(self.chunks):
            self.queue.leave(self)
            self._finish_if_idle()
            return
        start, stop = self.chunks[self.next]
        index, self.next = self.next, self.next + 1
        self.running += 1

        def granted(slots: Slots) -> None:
            self.request = None
            if self.next == len(self.chunks):
                self.queue.leave(self)
            if self.tier is Tier.L1:
                self._copy(index, slots)
            else:
                self._store(index, part_of(self.source, start, stop))

        def refused(cause: str) -> None:
            self.request = None
            self.running -= 1
            self.next = index
            self.give_up(cause)

        self.request = SlotRequest(
            SlotKind.WRITE,
            stop - start,
            granted,
            refused,
            backend=self.lender,
            pages_needed=self.tier is Tier.L1,
            end_s=self.end_s,
        )
        self.core.staging.request(self.request)

    def _copy(self, index: int, slots: Slots) -> None:
        start, stop = self.chunks[index]
        part = part_of(self.source, start, stop)
        for name, pages in slots.items():
            self.core.staging.tables[name].begin_load(pages)

        def copied(error: str) -> None:
            self._end_source(part)
            # A chunk before it failed: the prefix stays closed. Or nothing is stored any more.
            error = error or self.cause or ("closed" if self.core.closed else "")
            if not error:
                self._store(index, slots)
                self.ask()  # the D2H of the next chunk overlaps this store
                return
            self.running -= 1
            self.core.staging.end_lend(self.lender, stop - start)
            self.core.staging.give_back(slots)
            self.give_up(error)

        self.copies.d2h(part, slots, copied)

    def _store(self, index: int, pages: Slots) -> None:
        start, stop = self.chunks[index]
        lent = [True]

        def done(n: int, cause: str) -> None:
            self.running -= 1
            for name, p in pages.items() if lent[0] else ():  # given up, and still being read
                table = self.core.staging.tables[name]
                (table.quarantine if self.tier is Tier.L1 else table.strand)(p)
            self.stored[index] = n
            if n < stop - start:
                self.causes[index] = cause
                self.cause = self.cause or cause
            if self.tier is Tier.L2:
                self.ask()
            else:
                self._finish_if_idle()

        def released() -> None:
            lent[0] = False
            self.core.staging.end_lend(self.lender, stop - start)
            if self.tier is Tier.L1:
                self.core.staging.give_back(pages)
            else:
                self._end_source(dict(pages))

        ComponentJobs(
            self.core,
            self.keys.slice(start, stop),
            pages,
            self.remaining_s(),
            load=False,
            done=done,
            released=released,
        )

    def _end_source(self, pages: PageSet) -> None:
        for name, p in pages.items():
            self._table(name).end_backup(p)
        if self.tier is Tier.L2:
            self.core.staging.pump()
        self.core.settle_frees()

    def _finish_if_idle(self) -> None:
        if self.running or self.ended or (self.next < len(self.chunks) and not self.cause):
            return
        if self.next < len(self.chunks):
            rest = self.chunks[self.next][0]
            self.next = len(self.chunks)
            self._end_source(part_of(self.source, rest, page_set_count(self.source)))
        n, cause = 0, ""
        for (start, stop), stored, why in zip(self.chunks, self.stored, self.causes, strict=True):
            n += stored
            if stored < stop - start:
                cause = why or self.cause
                break
        self.end(BackedUp(action_id=self.action_id, n=n, cause=cause))


def start_backup(
    core: RuntimeCore,
    copies: Copies,
    action: Backup,
    tier: Tier,
    source: PageSet,
    *,
    queue: StoreQueue,
) -> Move:
    """Start; the source pages are held until they were read."""
    if action.target is Tier.L2:
        return BackupToL2(core, copies, action, source)
    return BackupToL3(core, copies, action, tier, source, queue=queue)
