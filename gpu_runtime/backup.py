"""Backup: L1 → L2, L2 → L3, and L1 → L3 through the window."""

from __future__ import annotations

from collections import deque

from kvstrata.boundary import BackedUp, Backup
from kvstrata.gpu_runtime.core import PageSet, RuntimeCore, page_set_count
from kvstrata.gpu_runtime.move import Move
from kvstrata.gpu_runtime.transfers import (
    CHUNK_PAGES,
    ComponentJobs,
    Copies,
    chunks_of,
    part_of,
)
from kvstrata.handles import Extents, Tier
from kvstrata.staging import PageTable, SlotKind, SlotRequest, Slots


class BackupToL2(Move):
    """Gather device pages into host pages that stay, as control's."""

    def __init__(self, core: RuntimeCore, copies: Copies, action: Backup, source: PageSet) -> None:
        super().__init__(core, copies, action.action_id)
        self.source, self.count = source, page_set_count(source)
        for name, pages in source.items():
            core.tables[name].begin_backup(pages)
        self.request = SlotRequest(SlotKind.WRITE, self.count, self._granted, self._refused)
        core.staging.request(self.request)

    def cancel(self) -> None:
        self.request.cancelled = True
        self.core.staging.pump()

    def _granted(self, slots: Slots) -> None:
        for name, pages in slots.items():
            self.core.staging.tables[name].begin_load(pages)

        def copied(error: str) -> None:
            extents: Extents = ()
            if not error:
                for name, pages in slots.items():
                    self.core.staging.tables[name].ready(pages)
                extents = self.core.claim(Tier.L2, dict(slots))
            self._done(0 if error else self.count, extents, error)
            self.core.staging.give_back(slots)

        self.copies.d2h(self.source, slots, copied)

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

    def join(self, move: BackupToL3) -> None:
        self._waiting.append(move)
        if len(self._waiting) == 1:
            move.ask()

    def leave(self, move: BackupToL3) -> None:
        """`move` will not ask again. Idempotent."""
        if move not in self._waiting:
            return
        was_first = self._waiting[0] is move
        self._waiting.remove(move)
        if was_first and self._waiting:
            self._waiting[0].ask()


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
        super().__init__(core, copies, action.action_id)
        self.queue = queue
        self.keys, self.deadline_s, self.tier, self.source = (
            action.keys,
            action.deadline_s,
            tier,
            source,
        )
        window = core.staging.write_window
        self.chunks = chunks_of(page_set_count(source), max(1, min(CHUNK_PAGES, window // 2)))
        self.stored: list[int] = [-1] * len(self.chunks)
        self.cause = ""
        self.next = 0
        self.running = 0
        self.request: SlotRequest | None = None
        for name, pages in source.items():
            self._table(name).begin_backup(pages)
        queue.join(self)

    def cancel(self) -> None:
        super().cancel()
        if self.request is not None:
            self.request.cancelled = True
            self.core.staging.pump()

    def _table(self, name: str) -> PageTable:
        return self.core.table(self.tier, name)

    def ask(self) -> None:
        """Queue for the next chunk, or end when none is left."""
        if self.cause or self.cancelled or self.next == len(self.chunks):
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
            self.cause = cause
            self.queue.leave(self)
            self._finish_if_idle()

        self.request = SlotRequest(
            SlotKind.WRITE,
            stop - start,
            granted,
            refused,
            backend=self.core.backend_name,
            pages_needed=self.tier is Tier.L1,
        )
        self.core.staging.request(self.request)

    def _copy(self, index: int, slots: Slots) -> None:
        start, stop = self.chunks[index]
        part = part_of(self.source, start, stop)
        for name, pages in slots.items():
            self.core.staging.tables[name].begin_load(pages)

        def copied(error: str) -> None:
            self._end_source(part)
            if error:
                self.running -= 1
                self.stored[index], self.cause = 0, error
                self.core.staging.end_lend(self.core.backend_name, stop - start)
                self.core.staging.give_back(slots)
                self.queue.leave(self)
                self._finish_if_idle()
                return
            self._store(index, slots)
            self.ask()  # the D2H of the next chunk overlaps this store

        self.copies.d2h(part, slots, copied)

    def _store(self, index: int, pages: Slots) -> None:
        start, stop = self.chunks[index]
        lent = [True]

        def done(n: int, cause: str) -> None:
            self.running -= 1
            if lent[0] and self.tier is Tier.L1:  # given up, and still read by the backend
                for name, p in pages.items():
                    self.core.staging.tables[name].quarantine(p)
            self.stored[index] = n
            if n < stop - start:
                self.cause = self.cause or cause
            if self.tier is Tier.L2:
                self.ask()
            else:
                self._finish_if_idle()

        def released() -> None:
            lent[0] = False
            self.core.staging.end_lend(self.core.backend_name, stop - start)
            if self.tier is Tier.L1:
                self.core.staging.give_back(pages)
            else:
                self._end_source(dict(pages))

        ComponentJobs(
            self.core,
            self.keys.slice(start, stop),
            pages,
            self.deadline_s,
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
        if self.running or self.ended:
            return
        if not (self.cause or self.cancelled) and self.next < len(self.chunks):
            return
        rest = self.chunks[self.next][0] if self.next < len(self.chunks) else None
        if rest is not None:
            self._end_source(part_of(self.source, rest, page_set_count(self.source)))
        n = 0
        for (start, stop), stored in zip(self.chunks, self.stored, strict=True):
            n += max(stored, 0)
            if stored < stop - start:
                break
        cause = self.cause or ("cancelled" if rest is not None else "")
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
