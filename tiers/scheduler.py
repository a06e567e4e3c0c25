"""The reference scheduler: continuous batches over `RuntimeInterface`.

One thread calls `submit`, `abort` and `step`. A batch takes a prepare and an execute; a poll waits
for what can let the next one go, and actions travel with the next plan, or in one apply where
there is none: the calls a batch do not depend on its rows, pages or tokens. Batch N+1 is prepared,
and enqueued, while batch N runs.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from itertools import islice

from kvstrata.boundary import (
    BatchDone,
    BatchPlan,
    Event,
    Free,
    RowResult,
    RowStatus,
    RuntimeInterface,
    Wake,
)
from kvstrata.errors import CapacityError, IntegrityError
from kvstrata.handles import RequestRuntimeHandle, Tier
from kvstrata.tiers.admission import Admission, Verdict
from kvstrata.tiers.cache import CacheControl
from kvstrata.tiers.planning import (
    MAX_ATTEMPTS,
    MAX_STILL_STEPS,
    MAX_WAKES,
    PlannedRow,
    SchedulerSettings,
    first_chunk,
    is_usable,
    next_chunk,
    open_row,
)
from kvstrata.tiers.policies import PrefetchPolicy, RestorePolicy
from kvstrata.tiers.request import Request, RequestResult, RequestState, new_request


class Scheduler:
    """Runs requests. See the module for its threads; `CacheControl` moves the pages."""

    def __init__(
        self,
        runtime: RuntimeInterface,
        cache: CacheControl,
        prefetch: PrefetchPolicy,
        restore: RestorePolicy,
        settings: SchedulerSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runtime, self.cache, self.settings = runtime, cache, settings
        self.admission = Admission(cache, prefetch, restore)
        self._clock = clock
        self._queue: deque[Request] = deque()
        self._requests: dict[int, Request] = {}
        self._ready: deque[Request] = deque()
        self._running: dict[RequestRuntimeHandle, Request] = {}
        self._batches: dict[int, list[Request]] = {}
        self._release: list[RequestRuntimeHandle] = []
        self._results: list[RequestResult] = []
        self._memory_short = False
        self._still_steps = 0
        self._wakes = 0
        self._next_id = 1
        self.calls: Counter[str] = Counter()
        """Calls of the runtime, by method, and `batches`; `idle`: polls and applies while no batch
        was under way, `drain`: those when no request was open either."""
        self.counters: Counter[str] = Counter()
        """The ModelRunner's counters, summed; rows that needed a recompute."""
        self._note(runtime.poll(0.0))

    # ── from outside ─────────────────────────────────────────────────────────────────────────────

    def submit(
        self,
        tokens: bytes,
        namespace: bytes,
        *,
        max_new_tokens: int = 1,
        stop_tokens: tuple[int, ...] = (),
        payload: bytes = b"",
        store: bool = True,
    ) -> int:
        """Queue a request; `tokens` is any int32 buffer, `namespace` the fingerprint of its keys.

        Raises InputError for empty input and for a namespace of an older epoch, CapacityError for
        a request that can never fit.
        """
        self.cache.epochs.use(namespace)
        request = new_request(
            self._next_id,
            tokens,
            namespace,
            self.settings.page_tokens,
            max_new_tokens=max_new_tokens,
            stop_tokens=stop_tokens,
            payload=payload,
            store=store,
            now_s=self._clock(),
        )
        self.admission.check_fits(request, self.settings.max_context_tokens)
        self._next_id += 1
        self._requests[request.request_id] = request
        self._queue.append(request)
        return request.request_id

    def abort(self, request_id: int) -> bool:
        """End a request in any state; its result comes with the next step. False if unknown."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        if request in self._queue:
            self._queue.remove(request)
        if request in self._ready:
            self._ready.remove(request)
        for action_id in request.loads_open:
            self._runtime.cancel(action_id)
            self.calls["cancel"] += 1
        self._end(request, RequestState.ABORTED)
        return True

    def new_epoch(
        self, epoch: int, rename: Callable[[bytes], bytes], *, payload: bytes = b""
    ) -> None:
        """The weights change, to what `payload` tells the ModelRunner. `epoch` must have grown.

        `rename` makes the fingerprint of the new epoch from one of the old (InputError if they are
        equal); the old ones are refused from now on. Requests that have a row end as FAILED, with
        what they have made; all others run under the new weights. Nothing that was kept is hit.
        """
        names = [request.chain.namespace for request in self._requests.values()]
        renamed = self.cache.epochs.begin(epoch, names, rename)
        for request in list(self._requests.values()):
            if request.handle is not None:
                request.error = f"the weights changed (epoch {epoch})"
                self._end(request, RequestState.FAILED)
                continue
            self.admission.leave(request)
            name = renamed[request.chain.namespace]
            self._requests[request.request_id] = request.under(name)
        self._ready.clear()
        self._queue = deque(self._requests.values())
        self.cache.begin_epoch(epoch, payload)

    @property
    def waiting(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def idle(self) -> bool:
        """No request, batch, release or action is open: it is safe to close."""
        busy = self._requests or self._batches or self._release or self.cache.outbox
        return not busy and not self.cache.in_flight

    def step(self, timeout_s: float) -> list[RequestResult]:
        """Admit, send what can be sent, take events (waiting up to `timeout_s`): what ended."""
        self._advance()
        sent = False
        while self._send():
            sent = True
            self._advance()
        self.cache.make_room()
        if self.cache.outbox:
            actions, self.cache.outbox = self.cache.outbox, []
            self._count("apply")
            self._runtime.apply(actions)
        waits = bool(self._batches or self.cache.in_flight)
        self._count("poll")
        events = self._runtime.poll(timeout_s if waits else 0.0, self._wake())
        self._note(events)
        moving = sent or waits or len(events) > 1 or self._results or not self._requests
        self._still_steps = 0 if moving else self._still_steps + 1
        if self._still_steps > MAX_STILL_STEPS:
            raise IntegrityError(f"no progress: {self.describe()}")
        results, self._results = self._results, []
        return results

    def _wake(self) -> Wake:
        """What is worth waking for now."""
        if not self._batches:
            return Wake.ANY
        enough = len(self._batches) >= self.settings.depth or self._wakes > MAX_WAKES
        return Wake.BATCH if enough else Wake.LOADS

    def run_until_idle(self, timeout_s: float) -> list[RequestResult]:
        """Step until nothing is open. Raises IntegrityError when `timeout_s` was not enough."""
        end_s = self._clock() + timeout_s
        results: list[RequestResult] = []
        while not self.idle or self._results:
            results.extend(self.step(min(1.0, timeout_s)))
            if self._clock() > end_s and not self.idle:
                raise IntegrityError(f"not idle after {timeout_s} s: {self.describe()}")
        return results

    # ── queue ────────────────────────────────────────────────────────────────────────────────────

    def _advance(self) -> None:
        """Look requests up, and admit what may run."""
        ahead = list(islice(self._queue, self.settings.lookahead + 1))
        if self.cache.has_l3:
            for request in ahead:
                if request.state is RequestState.WAITING and request.located_pages < 0:
                    self.admission.look_up(request)
        room = self.settings.max_batch * (self.settings.depth + 1) - len(self.admission.admitted)
        for request in ahead:
            if room <= 0:
                break
            if request.state is RequestState.LOOKUP:
                continue
            if self.cache.has_l3 and request.located_pages < 0:
                break
            verdict = self.admission.try_admit(request)
            if verdict is Verdict.NO_ROOM:
                break
            if verdict is Verdict.ADMITTED:
                self._queue.remove(request)
                room -= 1
                if request.state is RequestState.READY:
                    self._ready.append(request)

    # ── batches ──────────────────────────────────────────────────────────────────────────────────

    def _send(self) -> bool:
        """Prepare and execute one batch, if there is one to send."""
        rows = self._plan_rows() if len(self._batches) < self.settings.depth else []
        return bool(rows or self._release) and self._send_batch(rows)

    def _plan_rows(self) -> list[PlannedRow]:
        """Rows of the next batch: running requests first, then READY ones."""
        limit = self.settings.max_batch
        rows: list[PlannedRow] = []
        need = 0
        for request in self._running.values():
            done = request.output_done or request.planned_kv >= request.max_kv
            if len(rows) == limit or done:
                continue
            assert request.handle is not None
            row = next_chunk(request, request.handle, self.settings)
            if not self._waits_for(need + row.new_pages):
                rows.append(row)
                need += row.new_pages
        opening = 0
        while self._ready and len(rows) < limit:
            if len(self._running) + opening >= self.settings.max_requests:
                break
            path = self.admission.path(self._ready[0])
            if not is_usable(path):
                self._queue.appendleft(self.admission.send_back(self._ready.popleft()))
                continue
            row = first_chunk(self._ready[0], path, opening, self.settings)
            if self._waits_for(need + row.new_pages):
                break
            rows.append(row)
            need += row.new_pages
            opening += 1
            self._ready.popleft()
        return rows

    def _waits_for(self, pages: int) -> bool:
        """A batch did not fit, and pages that are being freed are all that it lacks."""
        return self._memory_short and self.cache.rooms[Tier.L1].comes_free(pages)

    def _send_batch(self, rows: list[PlannedRow]) -> bool:
        cache = self.cache
        cache.make_room()
        need = sum(row.new_pages for row in rows)
        frees = cache.evict_for(Tier.L1, need)
        actions, cache.outbox = cache.outbox, []
        release, self._release = self._release, []
        opening = [row.request for row in rows if row.request.handle is None]
        plan = BatchPlan(
            release=tuple(release),
            frees=(*frees, *(a for a in actions if isinstance(a, Free))),
            actions=tuple(a for a in actions if not isinstance(a, Free)),
            open=tuple(open_row(request) for request in opening),
            rows=tuple(row.plan for row in rows),
            steps=self.settings.decode_steps,
        )
        self.calls["prepare_batch"] += 1
        try:
            prepared = self._runtime.prepare_batch(plan)
        except CapacityError as exc:
            self._ready.extendleft(reversed(opening))
            self.counters["deferred_batches"] += 1
            if not self._batches and not cache.in_flight:
                raise IntegrityError(f"nothing can make room: {exc}; {self.describe()}") from exc
            self._memory_short = True
            return False
        if not rows:
            return False
        self._memory_short = False
        self._wakes = 0
        cache.rooms.note_taken(Tier.L1, need)
        self.calls["execute_batch"] += 1
        self.calls["batches"] += 1
        ticket = self._runtime.execute_batch(prepared)
        for request, handle in zip(opening, prepared.opened, strict=True):
            request.handle = handle
            request.state = RequestState.RUNNING
            self._running[handle] = request
        for row in rows:
            row.request.planned_kv = row.end
        self._batches[ticket.batch_id] = [row.request for row in rows]
        return True

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def _count(self, call: str) -> None:
        self.calls[call if self._batches else "idle" if self._requests else "drain"] += 1
        self._wakes += call == "poll"

    def _note(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, BatchDone):
                self._batch_done(event)
            else:
                self.cache.handle(event)
        settled, self.admission.settled = self.admission.settled, []
        for request in settled:
            if request.state is RequestState.READY:
                self._ready.append(request)
            elif request.state is RequestState.WAITING:
                self._queue.appendleft(request)

    def _batch_done(self, event: BatchDone) -> None:
        requests = self._batches.pop(event.batch_id)
        self.counters.update(event.counters)
        for request, result in zip(requests, event.rows, strict=True):
            self._row_done(request, result, event.error)

    def _row_done(self, request: Request, result: RowResult, error: str) -> None:
        if result.handle != request.handle:  # of a row that was given up: aborted, or begun anew
            if result.extents:
                self.cache.outbox.append(self.cache.free(result.extents))
            return
        if result.sampled:
            request.chain.extend(result.sampled)
        if result.extents:
            self.admission.take_pages(request, result.first_page_index, result.extents)
        if result.status is RowStatus.NEEDS_RECOMPUTE:
            self._recompute(request, result)
            return
        if result.status is RowStatus.ABORTED:
            request.error = result.error or error
            self._end(request, RequestState.FAILED if request.error else RequestState.ABORTED)
            return
        if result.sampled and not request.output:
            request.first_token_s = self._clock() - request.submitted_s
            self.admission.unclaim_keys(request)
        request.output += result.sampled
        if result.finished:
            request.output_done = True
            self._end(request, RequestState.FINISHED)

    def _recompute(self, request: Request, result: RowResult) -> None:
        """A restore failed late: give its host copies up and start again without them."""
        self.counters["needs_recompute"] += 1
        self.cache.lose_l2(self.admission.path(request))
        self._drop_handle(request)
        self.admission.leave(request)
        request.attempts += 1
        request.restore_allowed = request.attempts < MAX_ATTEMPTS
        request.planned_kv = 0
        request.located_pages = -1
        request.state = RequestState.WAITING
        self._queue.appendleft(request)

    def _drop_handle(self, request: Request) -> None:
        if request.handle is not None:
            self._running.pop(request.handle, None)
            self._release.append(request.handle)
            request.handle = None

    def _end(self, request: Request, state: RequestState) -> None:
        request.state = state
        self._drop_handle(request)
        self.admission.leave(request)
        self._results.append(request.result(self._clock()))
        del self._requests[request.request_id]

    # ── reports ──────────────────────────────────────────────────────────────────────────────────

    def describe(self) -> str:
        states = dict(Counter(r.state.value for r in self._requests.values()))
        moves = f"actions {self.cache.in_flight}, room {self.cache.rooms}"
        return f"requests {states}, batches {len(self._batches)}, {moves}"

    def check_integrity(self) -> None:
        self.cache.check_integrity()
        self.admission.check_integrity()
        if self._running.keys() & set(self._release):
            raise IntegrityError("a released handle is still running")
