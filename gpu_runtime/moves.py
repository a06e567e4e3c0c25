"""Starts the actions of control: each gets exactly one terminal event."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstrata.boundary import (
    KEY_BYTES,
    Action,
    ActionFailed,
    Backup,
    Drop,
    Dropped,
    Free,
    KeyRun,
    Located,
    Lookup,
    Prefetch,
    Restore,
    Restored,
)
from kvstrata.errors import CapacityError, PlanError, StaleHandleError
from kvstrata.gpu_runtime.backup import StoreQueue, start_backup
from kvstrata.gpu_runtime.core import RuntimeCore, page_set_count
from kvstrata.gpu_runtime.device_queue import DevicePageQueue
from kvstrata.gpu_runtime.move import Move
from kvstrata.gpu_runtime.prefetch import PrefetchToL2
from kvstrata.gpu_runtime.transfers import Copies, objects_of, reserve_all, settle_l1
from kvstrata.handles import Extents, StagingMode, Tier


class Moves:
    """Dispatches actions. All methods under the runtime's lock."""

    def __init__(self, core: RuntimeCore) -> None:
        self.core = core
        self.copies = Copies(core)
        self._moves: dict[int, Move] = {}
        self._stores = StoreQueue()
        self._device_pages = DevicePageQueue(core, self.copies)
        core.on_device_pages = self._device_pages.pump
        core.expiries += [self._stores.expire, self._device_pages.expire]

    def check(self, actions: Sequence[Action]) -> None:
        """Raise PlanError for a message that contradicts itself."""
        self.core.actions.check_new(actions)
        for action in actions:
            if isinstance(action, Lookup | Prefetch | Backup | Drop):
                _check_keys(action.keys)

    def start(self, actions: Sequence[Action]) -> None:
        """Backups hold their source before a free of the same message takes it away, and frees
        make room before what follows asks for it. The message was checked."""
        for action in sorted(actions, key=_turn):
            self.core.actions.start(action.action_id)
            match action:
                case Free():
                    self.core.free(action.action_id, action.extents)
                case Lookup() | Drop():
                    self._ask_storage(action)
                case Backup():
                    self._backup(action)
                case Prefetch():
                    self._prefetch(action)
                case Restore():
                    self._restore(action)

    def cancel(self, action_id: int) -> None:
        move = self._moves.get(action_id)
        if move is not None and not move.ended:
            move.cancel()
            self._device_pages.pump()

    def stop(self, cause: str) -> None:
        """At shutdown: what waits ends, what is under way goes no further."""
        self._device_pages.stop(cause)
        self.core.staging.stop(cause)
        self.copies.queues.flush()

    def _track(self, move: Move) -> None:
        if not move.ended:
            self._moves[move.action_id] = move
        if len(self._moves) > 64:
            self._moves = {k: m for k, m in self._moves.items() if not m.ended}
        cached = self.core.settings.mode is StagingMode.CACHE
        if cached and self.core.staging.waiting > self.core.staging.freeing:
            self.core.events.nudge()

    def _ask_storage(self, action: Lookup | Drop) -> None:
        """Ask the worker about every component; the least count is the answer."""
        core, worker = self.core, self.core.worker
        drop = isinstance(action, Drop)
        counts: list[int] = []

        def answer(n: int) -> None:
            if action.action_id in core.actions:  # else close() has ended it
                kind = Dropped if drop else Located
                core.actions.end(action.action_id, kind(action_id=action.action_id, n=n))

        def done(n: int) -> None:
            with core.callback():
                counts.append(n)
                if len(counts) == len(core.pools):
                    answer(min(counts))

        if worker is None or action.keys.page_count == 0:
            answer(0)
            return
        ask: Callable[..., None] = worker.drop if drop else worker.lookup
        for component in core.pools:
            ask(objects_of(core, action.keys, component), action.deadline_s, done)

    def _backup(self, action: Backup) -> None:
        core = self.core
        try:
            tier, pages = core.resolve(action.source)
            if page_set_count(pages) != action.keys.page_count:
                raise StaleHandleError("a backup needs one key a page")
        except StaleHandleError as exc:
            self._refuse(action.action_id, "stale", str(exc))
            return
        path = (tier, action.target)
        if action.target is Tier.L3 and core.worker is None:
            self._refuse(action.action_id, "no_backend")
        elif path not in ((Tier.L1, Tier.L2), (Tier.L1, Tier.L3), (Tier.L2, Tier.L3)):
            self._refuse(action.action_id, "path", f"{tier.name} to {action.target.name}")
        elif action.target is Tier.L2 and core.settings.mode is StagingMode.BUFFER_ONLY:
            self._refuse(action.action_id, "path", "buffer_only keeps no pages in L2")
        else:
            self._track(start_backup(core, self.copies, action, tier, pages, queue=self._stores))

    def _prefetch(self, action: Prefetch) -> None:
        core = self.core
        buffer_only = core.settings.mode is StagingMode.BUFFER_ONLY
        if core.worker is None:
            self._refuse(action.action_id, "no_backend")
        elif action.keys.page_count == 0 or action.target is Tier.L3:
            self._refuse(action.action_id, "path", f"prefetch to {action.target.name}")
        elif action.target is Tier.L2 and buffer_only:
            self._refuse(action.action_id, "path", "buffer_only keeps no pages in L2")
        elif action.target is Tier.L1:
            self._track(self._device_pages.join(action))
        else:
            self._track(PrefetchToL2(core, self.copies, action))

    def _restore(self, action: Restore) -> None:
        core = self.core
        try:
            _, source = core.resolve(action.source, Tier.L2)
            count = page_set_count(source)
            target = reserve_all(core, count)
        except StaleHandleError as exc:
            self._refuse(action.action_id, "stale", str(exc))
            return
        except CapacityError:
            event = Restored(action_id=action.action_id, n=0, cause="capacity")
            core.actions.end(action.action_id, event)
            return
        move = Move(core, self.copies, action.action_id)
        for name in core.pools:
            core.staging.tables[name].hold(source[name])
            core.tables[name].begin_load(target[name])

        named: Extents = ()

        def done(error: str) -> None:
            n = 0 if error else count
            extents = settle_l1(core, target, n, named)
            core.staging.give_back(source)
            core.settle_frees()
            move.end(Restored(action_id=move.action_id, n=n, extents=extents, cause=error))

        def enqueued() -> None:
            nonlocal named
            named = core.extents_of(Tier.L1, target)

        self.copies.h2d(source, target, done, enqueued=enqueued)

    def _refuse(self, action_id: int, cause: str, message: str = "") -> None:
        event = ActionFailed(action_id=action_id, cause=cause, message=message)
        self.core.actions.end(action_id, event)


def _turn(action: Action) -> int:
    return 0 if isinstance(action, Backup) else 1 if isinstance(action, Free) else 2


def _check_keys(keys: KeyRun) -> None:
    lengths = (len(keys.namespace), len(keys.parent), len(keys.keys) % KEY_BYTES)
    if lengths != (KEY_BYTES, KEY_BYTES, 0) or keys.first_page_index < 0:
        raise PlanError(f"torn keys: {lengths}, from page {keys.first_page_index}")
