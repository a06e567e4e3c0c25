"""`CacheControl`: keeps the tree true to what the runtime reports, and asks it to move pages.

Every action it sends is remembered until its terminal event. It holds no page, stream or address:
nodes, extents and action ids only.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

from kvstrata.boundary import (
    Action,
    ActionFailed,
    BackedUp,
    Backup,
    Drop,
    Dropped,
    EpochBegan,
    Event,
    Evicted,
    Free,
    Freed,
    KeyRun,
    Located,
    Lookup,
    NewEpoch,
    Prefetch,
    PrefetchReady,
    Restore,
    Restored,
    StatusReport,
    TierDegraded,
)
from kvstrata.errors import IntegrityError
from kvstrata.handles import Extents, StagingMode, Tier, page_count, slice_extents
from kvstrata.tiers.epochs import Epochs, clear_tree
from kvstrata.tiers.node import L3State, Node
from kvstrata.tiers.pending import Deadlines, PendingBackup, PendingLoad
from kvstrata.tiers.policies import WritePolicy
from kvstrata.tiers.rooms import Rooms
from kvstrata.tiers.tree import TreeCore

MAX_MOVE_PAGES = 64
"""Most pages of a node that is made by a computation, and so of one backup."""

_KEEP_BELIEF = ("capacity", "cancelled", "closed")
"""Causes of a short prefetch that say nothing about what L3 holds."""


class CacheControl:
    """Moves pages between tiers as the policies say. One thread: the control thread.

    `outbox` collects actions; the scheduler sends them with its next call to the runtime.
    """

    def __init__(
        self,
        tree: TreeCore,
        write: WritePolicy,
        mode: StagingMode,
        *,
        has_l3: bool,
        deadlines: Deadlines | None = None,
    ) -> None:
        self.tree, self.mode, self.has_l3 = tree, mode, has_l3
        self._write = write
        self._deadlines = deadlines or Deadlines()
        self._ids = itertools.count(1)
        self.outbox: list[Action] = []
        self._lookups: dict[int, Callable[[int], None]] = {}
        self._backups: dict[int, PendingBackup] = {}
        self._loads: dict[int, PendingLoad] = {}
        self._others: set[int] = set()
        self._stale: set[int] = set()
        """Moves of pages of an older epoch: what they bring is given back."""
        self.epochs = Epochs()
        self._epoch_id = 0
        self.rooms = Rooms()
        self.counters: Counter[str] = Counter()
        """evicted_l1, evicted_l2, evicted_l3, backup_failed_<cause>, prefetch_short_<cause>,
        duplicate_pages, degraded."""

    @property
    def in_flight(self) -> int:
        """Actions whose terminal event has not come, those in the outbox included."""
        open_moves = len(self._backups) + len(self._loads) + len(self._stale)
        return len(self._lookups) + open_moves + len(self._others)

    # ── asking ───────────────────────────────────────────────────────────────────────────────────

    def lookup(self, keys: KeyRun, done: Callable[[int], None]) -> None:
        """How many leading pages of `keys` does L3 seem to hold?"""
        action_id = next(self._ids)
        self._lookups[action_id] = done
        self.outbox.append(
            Lookup(action_id=action_id, keys=keys, deadline_s=self._deadlines.lookup_s)
        )

    def prefetch(self, nodes: list[Node], target: Tier, done: Callable[[int], None]) -> int:
        """Fetch consecutive nodes from L3. `done(n_valid)`; the caller has locked the last one."""
        keys = self.tree.key_run(nodes)
        action_id = next(self._ids)
        self._note_load(action_id, PendingLoad(nodes[-1], keys.page_count, target, done))
        self.outbox.append(
            Prefetch(
                action_id=action_id, keys=keys, target=target, deadline_s=self._deadlines.load_s
            )
        )
        return action_id

    def restore(self, nodes: list[Node], done: Callable[[int], None]) -> int:
        """Copy consecutive L2 nodes into L1, outside of a batch; as `prefetch`."""
        source = tuple(extent for node in nodes for extent in node.l2)
        count = sum(node.page_count for node in nodes)
        action_id = next(self._ids)
        self._note_load(action_id, PendingLoad(nodes[-1], count, Tier.L1, done))
        self.outbox.append(Restore(action_id=action_id, source=source))
        return action_id

    def _note_load(self, action_id: int, load: PendingLoad) -> None:
        self.tree.lock(load.end)
        self._loads[action_id] = load
        self.rooms.note_taken(load.target, load.count)

    def free(self, extents: Extents) -> Free:
        """Give a claim up; the action is returned, not queued."""
        action_id = next(self._ids)
        self._others.add(action_id)
        return Free(action_id=action_id, extents=extents)

    def evict_for(self, tier: Tier, more: int = 0) -> list[Free]:
        """Evict until what was asked of a tier, and `more` pages, fit, as far as it goes."""
        pages = self.rooms.short(tier, more)
        victims = self.tree.evict(tier, pages) if pages > 0 else []
        gone = sum(page_count(extents) for _, extents in victims)
        self.counters[f"evicted_{tier.name.lower()}"] += gone
        self.rooms.note_freed(tier, gone)
        return [self.free(extents) for _, extents in victims]

    def make_room(self) -> None:
        """Evict for the actions in the outbox, and for what waits in the runtime. Once before they
        are sent: evicting splits nodes, so nobody may be walking over some."""
        self.outbox.extend(self.evict_for(Tier.L1))
        if self.mode is StagingMode.CACHE:
            self.outbox.extend(self.evict_for(Tier.L2))

    # ── epochs ───────────────────────────────────────────────────────────────────────────────────

    def begin_epoch(self, epoch: int, payload: bytes) -> None:
        """Forget all pages, give those in L1 and L2 up, and announce the change. No page is locked
        but by loads that are under way; what they bring, and backups, is given back."""
        for load in self._loads.values():
            self.tree.unlock(load.end)
        self._stale |= self._loads.keys() | self._backups.keys()
        self._loads.clear()
        self._backups.clear()
        unsent = {a.action_id for a in self.outbox if isinstance(a, Prefetch | Restore | Backup)}
        self._stale -= unsent
        self.outbox = [a for a in self.outbox if a.action_id not in unsent]
        self.outbox += [self.free(extents) for extents in clear_tree(self.tree)]
        self._epoch_id = next(self._ids)
        self._others.add(self._epoch_id)
        self.outbox.append(NewEpoch(action_id=self._epoch_id, epoch=epoch, payload=payload))

    # ── pages that became READY ──────────────────────────────────────────────────────────────────

    def insert_ready(self, prefix: KeyRun, run: KeyRun, extents: Extents) -> tuple[Node, int]:
        """Pages of `run` (at least one) are READY in L1; the tree takes them and backs them up.

        `prefix` are the pages of the chain before them, which the tree may have lost by now.
        Returns the node that ends with the last one, and how many pages were in L1 already: those
        are given back.
        """
        duplicates = at = 0
        new: list[Node] = []
        node: Node | None = None
        self.tree.insert(prefix)
        step = self.move_pages
        for start in range(0, run.page_count, step):
            part = run.slice(start, min(start + step, run.page_count))
            for node in self.tree.insert(part):
                mine = slice_extents(extents, at, at + node.page_count)
                at += node.page_count
                if node.l1:
                    duplicates += node.page_count
                    self.outbox.append(self.free(mine))
                else:
                    self.tree.set_resident(node, Tier.L1, mine)
                    new.append(node)
        for ready in new:
            self._write_back(ready, Tier.L1)
        assert node is not None, "a run has pages"
        self.counters["duplicate_pages"] += duplicates
        return node, duplicates

    @property
    def move_pages(self) -> int:
        """The most pages of a node that is new: its backup must fit into L2 beside another."""
        room = self.rooms[Tier.L2]
        if self.mode is StagingMode.BUFFER_ONLY:
            return MAX_MOVE_PAGES
        return max(1, min(MAX_MOVE_PAGES, (room.total - room.reserve) // 2))

    def believe_stored(self, run: KeyRun) -> None:
        """L3 seems to hold these pages (a lookup said so)."""
        for node in self.tree.insert(run):
            if node.l3 is L3State.NONE:
                self.tree.set_l3(node, L3State.STORED)

    def touch(self, path: list[Node]) -> None:
        """A request uses these nodes: store again what L3 lost or never got."""
        for node in path:
            if node.l3 is L3State.NONE and (node.l1 or node.l2):
                self._write_back(node, Tier.L2 if node.l2 else Tier.L1)

    def lose_l2(self, nodes: list[Node]) -> None:
        """The host copies of these nodes cannot be used: give them up."""
        for node in nodes:
            extents = self.tree.clear_resident(node, Tier.L2)
            if extents:
                self.outbox.append(self.free(extents))

    def _write_back(self, node: Node, ready: Tier) -> None:
        target = self._write.backup_target(node, ready, self.mode)
        if target is None or (target is Tier.L3 and not self._may_store(node)):
            return
        if node.l3 is L3State.COPYING:
            return  # it is on its way to L2
        action_id = next(self._ids)
        if target is Tier.L3:
            self.tree.set_l3(node, L3State.QUEUED)
        else:
            if node.l3 is L3State.NONE:
                self.tree.set_l3(node, L3State.COPYING)
            self.rooms.note_taken(Tier.L2, node.page_count, keep=self.rooms[Tier.L2].reserve)
        self._backups[action_id] = PendingBackup(node, node.page_count, target)
        source = node.l2 if ready is Tier.L2 else node.l1
        self.outbox.append(
            Backup(
                action_id=action_id,
                keys=self.tree.key_run([node]),
                source=source,
                target=target,
                deadline_s=self._deadlines.store_s,
            )
        )
        if target is Tier.L3:
            self._store_children(node)

    def _may_store(self, node: Node) -> bool:
        """The prefix stays closed: no page is stored below one that is not stored or queued."""
        parent = node.parent
        return self.has_l3 and parent is not None and (parent.is_root or parent.l3.closes_prefix)

    def _store_children(self, node: Node) -> None:
        """Children that had to wait for their parent's turn."""
        ready = Tier.L2 if self.mode is StagingMode.CACHE else Tier.L1
        for child in list((node.children or {}).values()):
            if child.l3 is L3State.NONE and child.extents(ready):
                self._write_back(child, ready)

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def handle(self, event: Event) -> None:
        """Any event but BatchDone, which is the scheduler's."""
        if getattr(event, "action_id", None) in self._stale:
            self._stale.remove(event.action_id)  # type: ignore[union-attr]
            if extents := getattr(event, "extents", ()):
                self.outbox.append(self.free(extents))
            return
        match event:
            case StatusReport():
                self.rooms.note_status(event)
            case Located():
                self._lookups.pop(event.action_id)(event.n)
            case PrefetchReady():
                self._loaded(event.action_id, event.n_valid, event.extents, event.cause)
            case Restored():
                self._loaded(event.action_id, event.n, event.extents, "restore")
            case BackedUp():
                self._backed_up(event)
            case Freed() | Dropped() | EpochBegan():
                self._others.remove(event.action_id)
            case ActionFailed():
                self._failed(event)
            case Evicted():
                self.counters["evicted_l3"] += self.tree.lost_l3(event.keys)
            case TierDegraded():
                self.counters["degraded"] += 1
            case _:
                raise IntegrityError(f"not an event of the cache: {event}")

    def _failed(self, event: ActionFailed) -> None:
        if event.action_id in self._lookups:
            self._lookups.pop(event.action_id)(0)
        elif event.action_id in self._loads:
            self._loaded(event.action_id, 0, (), event.cause)
        elif event.action_id in self._backups:
            self._backed_up(BackedUp(action_id=event.action_id, n=0, cause=event.cause))
        else:
            self._others.remove(event.action_id)
            kind = "epoch" if event.action_id == self._epoch_id else "free"
            self.counters[f"{kind}_failed_{event.cause}"] += 1

    def _loaded(self, action_id: int, n: int, extents: Extents, cause: str) -> None:
        load = self._loads.pop(action_id)
        run = self.tree.key_run(self.tree.span(load.end, load.count))
        at = 0
        for node in self.tree.insert(run.slice(0, n)):
            mine = slice_extents(extents, at, at + node.page_count)
            at += node.page_count
            if node.extents(load.target):
                self.outbox.append(self.free(mine))
            else:
                self.tree.set_resident(node, load.target, mine)
        if n < load.count:
            self.counters[f"prefetch_short_{cause}"] += load.count - n
            if cause not in _KEEP_BELIEF and cause != "restore":
                for node in self.tree.insert(run.slice(n, load.count)):
                    if node.l3 is L3State.STORED:
                        self.tree.invalidate_l3(node)
        load.done(n)
        self.tree.unlock(load.end)

    def _backed_up(self, event: BackedUp) -> None:
        backup = self._backups.pop(event.action_id)
        if not self.tree.is_alive(backup.end):  # L3 lost it, and L1 gave it up meanwhile
            if event.extents:
                self.outbox.append(self.free(event.extents))
            return
        run = self.tree.key_run(self.tree.span(backup.end, backup.count))
        if event.n < backup.count:
            self.counters[f"backup_failed_{event.cause}"] += backup.count - event.n
        if backup.target is Tier.L2:
            at = 0
            for node in self.tree.insert(run.slice(0, event.n)):
                mine = slice_extents(event.extents, at, at + node.page_count)
                at += node.page_count
                if node.l2:
                    self.outbox.append(self.free(mine))
                else:
                    self.tree.set_resident(node, Tier.L2, mine)
                self._copied(node)
            for node in self.tree.insert(run.slice(event.n, run.page_count)):
                self._copied(node)
        else:
            if event.n == 0 and event.cause == "parent_missing":
                lost = self.tree.insert(run)[0].parent
                while lost is not None and lost.l3 is L3State.STORED:  # `touch` stores them again
                    self.tree.invalidate_l3(lost)
                    lost = lost.parent
            self._note_stored(run, event.n)

    def _copied(self, node: Node) -> None:
        """The way to L2 has ended, there or not: on to L3."""
        if node.l3 is L3State.COPYING:
            self.tree.set_l3(node, L3State.NONE)
        if node.l2:
            self._write_back(node, Tier.L2)

    def _note_stored(self, run: KeyRun, n: int) -> None:
        stored = self.tree.insert(run.slice(0, n))
        for node in stored:
            self.tree.set_l3(node, L3State.STORED)
        for node in self.tree.insert(run.slice(n, run.page_count)):
            if node.l3 is L3State.QUEUED:
                self.tree.set_l3(node, L3State.NONE)
        first = stored[0] if stored else None
        if first is not None and not self._may_store(first):
            self._close_prefix(first, run.slice(0, n))

    def _close_prefix(self, first: Node, stored: KeyRun) -> None:
        """Pages were stored while the store of their parent failed: store that, or drop these."""
        parent = first.parent
        if parent is not None and (parent.l1 or parent.l2):
            self._write_back(parent, Tier.L2 if parent.l2 else Tier.L1)
            if parent.l3.closes_prefix:
                return
        for node in self.tree.insert(stored):
            self.tree.set_l3(node, L3State.NONE)
        action_id = next(self._ids)
        self._others.add(action_id)
        self.outbox.append(
            Drop(action_id=action_id, keys=stored, deadline_s=self._deadlines.store_s)
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError when tree and open actions contradict each other."""
        self.tree.check_integrity()
        for action_id, backup in self._backups.items():
            if not self.tree.is_alive(backup.end):
                continue
            states = {node.l3 for node in self.tree.span(backup.end, backup.count)}
            if backup.target is Tier.L3 and states != {L3State.QUEUED}:
                raise IntegrityError(f"backup {action_id} of pages that are {states}")
