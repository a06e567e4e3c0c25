"""The boundary between control and execution: what crosses it, and the interface it crosses by.

Control (`kvstrata.tiers`) decides, the runtime (`kvstrata.gpu_runtime`) executes. Everything here
is a frozen msgspec struct, so the same message works for a runtime in this process and for one in
another (`encode`, `decode_events`, `decode_plan`). No value holds an address, a tensor, a stream
or a callable. Tokens are little-endian int32 buffers; keys are runs of 32-byte digests.

Life of an action: control numbers it (`action_id`, unique in the runtime's life), sends it in
`apply` or in `BatchPlan.actions`, and gets exactly one terminal event with that id, also when it
failed, was cancelled, or the runtime was closed.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

from kvstrata.handles import Extents, RequestRuntimeHandle, Tier

KEY_BYTES = 32
"""Length of a page key and of a namespace fingerprint (SHA-256)."""


class KeyRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive pages of one prefix chain.

    `keys` is the concatenation of their digests; `parent` the key of the page before the first
    (for `first_page_index == 0` the root of the chain); `namespace` the fingerprint they live in.
    """

    namespace: bytes
    parent: bytes
    first_page_index: int
    keys: bytes

    @property
    def page_count(self) -> int:
        return len(self.keys) // KEY_BYTES

    def key(self, i: int) -> bytes:
        return self.keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]

    def parent_of(self, i: int) -> bytes:
        return self.parent if i == 0 else self.key(i - 1)

    def slice(self, start: int, stop: int) -> KeyRun:
        return KeyRun(
            self.namespace,
            self.parent_of(start),
            self.first_page_index + start,
            self.keys[start * KEY_BYTES : stop * KEY_BYTES],
        )


# ── actions ──────────────────────────────────────────────────────────────────────────────────────


class CacheAction(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all work that control asks for and that is not a row of a batch."""

    action_id: int


class Lookup(CacheAction, frozen=True, tag=True, kw_only=True):
    """How many leading pages of `keys` does L3 seem to hold? → `Located`. A hint, not a promise."""

    keys: KeyRun
    deadline_s: float


class Prefetch(CacheAction, frozen=True, tag=True, kw_only=True):
    """Bring `keys` from L3 into `target` (L2, or L1 through the window) → `PrefetchReady`.

    It waits in the runtime for host pages, and for L1 pages that are being freed; when even those
    do not suffice, the event says so at once (`cause = "capacity"`, `n_valid = 0`).
    """

    keys: KeyRun
    target: Tier
    deadline_s: float


class Backup(CacheAction, frozen=True, tag=True, kw_only=True):
    """Copy READY pages one tier down, or from L1 through the window to L3 → `BackedUp`.

    `source` is L1 (target L2 or L3) or L2 (target L3). The runtime holds the source pages until
    they were read, so control may free them at once.
    """

    keys: KeyRun
    source: Extents
    target: Tier
    deadline_s: float


class Restore(CacheAction, frozen=True, tag=True, kw_only=True):
    """Copy READY L2 pages into new L1 pages, outside of a batch → `Restored`."""

    source: Extents


class Free(CacheAction, frozen=True, tag=True, kw_only=True):
    """Control gives up its claim on `extents` → `Freed`, when the last page is free.

    Rows and transfers that still use a page keep it alive (`freeing` in the capacity report).
    """

    extents: Extents


class Drop(CacheAction, frozen=True, tag=True, kw_only=True):
    """Delete `keys` from L3 → `Dropped`."""

    keys: KeyRun
    deadline_s: float


class NewEpoch(CacheAction, frozen=True, tag=True, kw_only=True):
    """The weights change, and KV from before is worth nothing from now on → `EpochBegan`.

    Takes effect behind the backups and frees of its message, before the rest of it. Batches that
    were executed before still run under the old weights. Then the ModelRunner takes the new ones
    from `payload` (opaque), in the order of the compute stream, and what is computed behind it is
    of the new epoch. Every request that was opened before ends: its rows that have not run are
    ABORTED. Every page that is in use now is old, whenever an event hands it over: its extents can
    be freed and nothing else, so no row attaches or restores them (`StaleHandleError`) and no
    action copies them (`ActionFailed`, "stale"). Actions that are under way are cancelled.

    When the ModelRunner cannot change its weights, or fails to, the action fails ("runner"). The
    epoch has begun all the same, and rows fail until another one begins: nobody knows what the
    weights are. `epoch` is control's number for it.
    """

    epoch: int
    payload: bytes = b""


Action = Lookup | Prefetch | Backup | Restore | Free | Drop | NewEpoch


# ── batches ──────────────────────────────────────────────────────────────────────────────────────


class OpenRow(msgspec.Struct, frozen=True, kw_only=True):
    """A request that enters the runtime with this batch.

    `tokens` are all prompt tokens from position 0 (int32, little-endian), so that a row whose
    restored pages fail can be computed again from the first bad page. `namespace` is the
    fingerprint its keys are derived under. `payload` is opaque, for the ModelRunner (sampling …).
    """

    tokens: bytes
    namespace: bytes
    max_new_tokens: int
    stop_tokens: tuple[int, ...] = ()
    payload: bytes = b""


class RowPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one request does in this batch.

    `row` is a handle, or the index into `BatchPlan.open` for a request that enters now. At
    admission `attach` (READY L1 pages from position 0) and then `restore` (READY L2 pages, copied
    into new L1 pages) cover the leading pages. Then either a prefill chunk: compute tokens
    `start … start + count - 1`; or, with `count == 0`, a decode from the last sampled token, which
    never leaves the runtime. A chunk that ends the prompt samples one token. A `start` inside an
    attached or restored page (a wholly cached prompt computes its last token) gets a private copy
    of that page first: a shared page is never written.
    """

    row: RequestRuntimeHandle | int
    attach: Extents = ()
    restore: Extents = ()
    start: int = 0
    count: int = 0


class BatchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One message a batch. Applied in this order: release, backups (which hold their source),
    frees, a new epoch, other actions, open, rows.

    `steps` is how many tokens each decode row makes (pages for all of them are reserved now).
    """

    release: tuple[RequestRuntimeHandle, ...] = ()
    frees: tuple[Free, ...] = ()
    actions: tuple[Action, ...] = ()
    open: tuple[OpenRow, ...] = ()
    rows: tuple[RowPlan, ...] = ()
    steps: int = 1


class PreparedBatchHandle(msgspec.Struct, frozen=True, array_like=True):
    """A batch whose memory is reserved and whose H2D copies are under way.

    `opened[i]` is the handle of `BatchPlan.open[i]`.
    """

    runtime_id: int
    batch_id: int
    opened: tuple[RequestRuntimeHandle, ...]


class BatchTicket(msgspec.Struct, frozen=True, array_like=True):
    """A batch that is enqueued; `BatchDone` with this `batch_id` ends it."""

    runtime_id: int
    batch_id: int


# ── events ───────────────────────────────────────────────────────────────────────────────────────


class RowStatus(enum.Enum):
    """How a row of a batch ended."""

    OK = "ok"
    NEEDS_RECOMPUTE = "needs_recompute"
    """Pages from `n_valid_pages` on did not arrive; the row computed nothing."""
    ABORTED = "aborted"
    MASKED = "masked"
    """The request had finished in an earlier batch; the row did nothing."""


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a finished batch.

    `extents` are the full L1 pages that became READY with this batch, restored and computed ones,
    for page indices `first_page_index …`; control owns them from now on and must free them.
    `sampled` are the new tokens (int32). `finished` means that no further row may name the handle.
    """

    handle: RequestRuntimeHandle
    status: RowStatus
    first_page_index: int = 0
    extents: Extents = ()
    sampled: bytes = b""
    finished: bool = False
    n_valid_pages: int = 0
    error: str = ""
    """Why the ModelRunner could not go on with this row, which is ABORTED then."""


class Outcome(enum.Enum):
    """What became of one page in one storage operation; the label it is counted under."""

    LOADED = "loaded"
    STORED = "stored"
    EXISTS = "exists"
    MISSING = "missing"
    CORRUPT = "corrupt"
    FULL = "full"
    TIMEOUT = "timeout"
    ACCESS = "access"
    UNAVAILABLE = "unavailable"
    PARENT_MISSING = "parent_missing"
    """Not stored, because the page before it was not: the prefix stays closed."""
    CANCELLED = "cancelled"
    OVERLOADED = "overloaded"
    """The queue of the worker is full and the store was dropped."""
    ERROR = "error"

    @property
    def is_stored(self) -> bool:
        return self in (Outcome.STORED, Outcome.EXISTS)


class RuntimeEvent(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all that comes back."""


class Located(RuntimeEvent, frozen=True, tag=True, kw_only=True):
    """Terminal event of `Lookup`: the first `n` pages seem to be in L3."""

    action_id: int
    n: int


class PrefetchReady(RuntimeEvent, frozen=True, tag=True, kw_only=True):
    """Terminal event of `Prefetch`: `n_valid` leading pages are READY in `extents`.

    Control owns the extents. `cause` says why the page after them did not come ("" if all came).
    """

    action_id: int
    n_valid: int
    extents: Extents = ()
    cause: str = ""


class BackedUp(RuntimeEvent, frozen=True, tag=True, kw_only=True):
    """Terminal event of `Backup`: `n` leading pages are in the target tier.

    For target L2 they are `extents`, which control owns now. `cause` as in `PrefetchReady`.
    """

    action_id: int
    n: int
    extents: Extents = ()
    cause: str = ""


class Restored(RuntimeEvent, frozen=True, tag=True, kw_only=True):
    """Terminal event of `Restore`: the first `n` pages are READY in L1, as `extents`."""

    action_id: int
    n: int
    extents: Extents = ()
    cause: str = ""


class Freed(RuntimeEvent, frozen=True, tag=True, kw_only=True):
    """Terminal event of `Free`."""

    action_id: int


class Dropped(RuntimeEvent, frozen=True, tag=True, kw_only=True):
    """Terminal event of `Drop`: `n` of the pages were there and are deleted."""

    action_id: int
    n: int


class EpochBegan(RuntimeEvent, frozen=True, tag=True, kw_only=True):
    """Terminal event of `NewEpoch`: batches behind it compute with the new weights."""

    action_id: int
    epoch: int


class ActionFailed(RuntimeEvent, frozen=True, tag=True, kw_only=True):
    """Terminal event of any action that did nothing: a stale extent, a cancel, a shutdown."""

    action_id: int
    cause: str
    message: str = ""


class BatchDone(RuntimeEvent, frozen=True, tag=True, kw_only=True):
    """Terminal event of a batch. `counters` are the ModelRunner's own (pages verified …); `error`
    is what the ModelRunner raised, if it did (all rows are ABORTED then)."""

    batch_id: int
    rows: tuple[RowResult, ...]
    compute_s: float
    counters: dict[str, int] = {}
    error: str = ""


class Evicted(RuntimeEvent, frozen=True, tag=True, kw_only=True):
    """L3 evicted these pages by itself. Comes unasked."""

    namespace: bytes
    keys: bytes


class TierDegraded(RuntimeEvent, frozen=True, tag=True, kw_only=True):
    """A tier changed its health: "ok", "degraded" or "open" (not used for now). Unasked."""

    tier: Tier
    backend: str
    health: str
    message: str = ""


class PoolCapacity(msgspec.Struct, frozen=True, array_like=True):
    """Pages of one pool in one tier. L2 only: `waiting` pages must become free before what is
    queued in the runtime fits, backups leave `reserve` pages to loads, one prefetch to L2 may have
    `window` pages at most, and `stuck` of the pages that are being freed are held by a backend
    beyond its deadline: they come back, nobody knows when."""

    tier: Tier
    pool: str
    total: int
    free: int
    freeing: int
    waiting: int = 0
    reserve: int = 0
    window: int = 0
    stuck: int = 0


class PathCost(msgspec.Struct, frozen=True, array_like=True):
    """A transfer path as measured since start: "d2h", "h2d", "l3_read", "l3_write"."""

    path: str
    bytes: int
    busy_s: float
    queued: int


class StatusReport(RuntimeEvent, frozen=True, tag=True, kw_only=True):
    """Last event of every `poll`: capacity and costs at that moment."""

    capacity: tuple[PoolCapacity, ...]
    costs: tuple[PathCost, ...]
    prefill_tokens_per_s: float = 0.0


Event = (
    Located
    | PrefetchReady
    | BackedUp
    | Restored
    | Freed
    | Dropped
    | EpochBegan
    | ActionFailed
    | BatchDone
    | Evicted
    | TierDegraded
    | StatusReport
)


# ── the interface ────────────────────────────────────────────────────────────────────────────────


class Wake(enum.Enum):
    """Which events end the wait of a `poll`; whatever came meanwhile is returned with them."""

    ANY = "any"
    LOADS = "loads"
    """Events that may let a request run: BatchDone, Located, PrefetchReady, Restored,
    ActionFailed, TierDegraded."""
    BATCH = "batch"
    """BatchDone and TierDegraded: all that counts while enough batches are enqueued."""

    @property
    def kinds(self) -> tuple[type[RuntimeEvent], ...]:
        if self is Wake.BATCH:
            return (BatchDone, TierDegraded)
        if self is Wake.LOADS:
            return (BatchDone, TierDegraded, Located, PrefetchReady, Restored, ActionFailed)
        return (RuntimeEvent,)


@runtime_checkable
class RuntimeInterface(Protocol):
    """One execution domain. Called by one control thread; no call waits for a device or storage.

    Ownership: the runtime owns everything physical. Control owns a claim on the extents that
    events handed to it, until it frees them. Nothing crosses for a token: the number of calls a
    batch does not depend on tokens, pages or requests.
    """

    def prepare_batch(self, plan: BatchPlan) -> PreparedBatchHandle:
        """Apply the plan's releases, frees and actions, reserve all pages, start H2D.

        Returns at once; may be called while earlier batches run. Raises `CapacityError` when the
        rows do not fit: then no row was opened and no page taken, while releases, frees and
        actions did take effect (so the caller sends them once). Raises `StaleHandleError` for a
        handle or extent that is not the runtime's, or an extent of an older epoch, before anything
        at all took effect.
        """
        ...

    def execute_batch(self, batch: PreparedBatchHandle) -> BatchTicket:
        """Enqueue the batch behind its H2D copies and all earlier batches. Returns at once.

        Each prepared batch is executed once, in the order of preparation; one without rows needs
        no execution.
        """
        ...

    def apply(self, actions: Sequence[Action]) -> None:
        """Start work that belongs to no batch, in the order of `BatchPlan`. Never raises for a
        stale extent: the action's terminal event is `ActionFailed`."""
        ...

    def cancel(self, what: RequestRuntimeHandle | int) -> None:
        """Abort a request (its rows end as ABORTED at the next step) or an action by id.

        A hint: an action may end normally all the same. Unknown ids are ignored.
        """
        ...

    def poll(self, timeout_s: float, wake: Wake = Wake.ANY) -> list[Event]:
        """Events since the last call, oldest first, `StatusReport` last.

        Waits up to `timeout_s` for the first one that `wake` names, so that control wakes once a
        decision and not once a page. The only way anything comes back.
        """
        ...

    def close(self, deadline_s: float) -> None:
        """Stop. Afterwards `poll` still yields the terminal event of everything that was open."""
        ...


_encoder = msgspec.msgpack.Encoder()
_plan_decoder = msgspec.msgpack.Decoder(BatchPlan)
_actions_decoder = msgspec.msgpack.Decoder(list[Action])
_events_decoder = msgspec.msgpack.Decoder(list[Event])


def encode(value: object) -> bytes:
    """Any value of this module (or a list of them) as msgpack."""
    return _encoder.encode(value)


def decode_plan(data: bytes) -> BatchPlan:
    return _plan_decoder.decode(data)


def decode_actions(data: bytes) -> list[Action]:
    return _actions_decoder.decode(data)


def decode_events(data: bytes) -> list[Event]:
    return _events_decoder.decode(data)
