"""The part of a batch that runs on the compute stream: set its rows up, forward its steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstrata.boundary import RowStatus
from kvstrata.gpu_runtime.abilities import SupportsBind, SupportsNewWeights
from kvstrata.gpu_runtime.base import Event, ForwardContext, ForwardRow, ModelRunner
from kvstrata.gpu_runtime.core import PageSet, RuntimeCore, page_set_count
from kvstrata.gpu_runtime.req_to_token import ReqToToken
from kvstrata.gpu_runtime.rows import Row
from kvstrata.gpu_runtime.transfers import Copy


@dataclass(eq=False, slots=True)
class Part:
    """One row's part of one batch: what was asked, and what came of it."""

    row: Row
    start: int
    count: int
    """0: decode."""
    new_pages: PageSet = field(default_factory=dict)
    end: int = 0
    """Position behind the last one that the row has pages for in this batch."""
    stop_index: int = 0
    """Page index behind the last page of this part."""
    restore: PageSet = field(default_factory=dict)
    copy: Copy | None = None
    """What fills `restore`."""
    opened: bool = False
    private_copy: bool = False
    sampled: list[int] = field(default_factory=list)
    status: RowStatus = RowStatus.OK
    kv_len: int = 0
    """Of the row, when the batch had run. The row itself may be further by the time the host hears
    that the batch has ended: the next one runs already. So is `finished`."""
    finished: bool = False
    error: str = ""


@dataclass(eq=False, slots=True)
class Batch:
    batch_id: int
    steps: int
    parts: list[Part] = field(default_factory=list)
    waits: list[Event] = field(default_factory=list)
    """Copies that must have ended before it computes."""
    ended: bool = False
    compute_s: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)
    error: str = ""


class Compute:
    """Runs batches. Everything here happens on the compute stream, without the runtime's lock."""

    def __init__(self, core: RuntimeCore, runner: ModelRunner) -> None:
        self.core, self.runner = core, runner
        settings = core.settings
        self.req_to_token = ReqToToken(
            tuple(core.pools),
            settings.max_requests,
            settings.max_context_tokens,
            settings.page_tokens,
            core.device.torch_device,
        )
        self.context = ForwardContext(core.pools, self.req_to_token, settings.page_tokens)
        if isinstance(runner, SupportsBind):
            runner.bind(self.context)
        # Tables and weights are made on the stream of this thread, which is none of ours.
        core.device.compute.wait_event(core.device.fence())
        self.epoch = 0
        """How many changes of weights have run."""
        self.unknown_weights = ""
        """Why the last one failed."""

    def run(self, batch: Batch) -> None:
        """Forward steps until all rows are done. Never raises: whatever the runner raises, even an
        exit, ends its batch and not the runtime."""
        started = time.monotonic()
        prefilled = 0
        try:
            for part in batch.parts:
                self._set_up(part)
            for index in range(batch.steps):
                parts = [p for p in batch.parts if _is_active(p, index)]
                if not parts:
                    break
                self._step(batch, parts, index)
                prefilled += sum(p.count for p in parts)
        except BaseException as exc:  # noqa: BLE001 - see the docstring
            batch.error = f"{type(exc).__name__}: {exc}"
            for part in batch.parts:
                part.status = RowStatus.ABORTED
                part.row.aborted = True
        for part in batch.parts:
            part.kv_len = part.row.kv_len
            part.finished = part.row.finished or part.row.aborted
        batch.compute_s = time.monotonic() - started
        self.core.prefill_tokens += prefilled
        self.core.prefill_s += batch.compute_s if prefilled else 0.0

    def begin_epoch(self, epoch: int, payload: bytes) -> None:
        """Take the runner's new weights. Rows of another epoch are aborted from now on; all are,
        while nobody knows what the weights are. Never raises."""
        self.epoch = epoch
        try:
            if not isinstance(self.runner, SupportsNewWeights):
                raise TypeError(f"{type(self.runner).__name__} cannot change its weights")
            self.runner.new_weights(payload)
            self.unknown_weights = ""
        except BaseException as exc:  # noqa: BLE001 - as in `run`
            self.unknown_weights = f"the new weights failed: {type(exc).__name__}: {exc}"

    def _set_up(self, part: Part) -> None:
        row = part.row
        if not row.finished and (row.epoch != self.epoch or self.unknown_weights):
            row.aborted, part.error = True, self.unknown_weights
        if row.aborted:
            part.status = RowStatus.ABORTED
        elif row.finished:
            part.status = RowStatus.MASKED
        elif part.copy is not None and part.copy.error:
            part.status = RowStatus.NEEDS_RECOMPUTE
            row.finished = True  # now, not when the host hears of it: batches behind mask the row
        if part.status is not RowStatus.OK:
            return
        if part.private_copy:
            for name, pool in self.core.pools.items():
                source = int(row.hand[name][part.stop_index - 1])
                pool.copy_page(source, int(part.new_pages[name][0]))
        first = 0 if part.opened else part.stop_index - page_set_count(part.new_pages)
        for name, pages in row.pages.items():
            part_pages = pages[first : part.stop_index]
            self.req_to_token.set_pages(name, row.handle.slot_id, first, part_pages)

    def _step(self, batch: Batch, parts: list[Part], index: int) -> None:
        rows = [_forward_row(p, index) for p in parts]
        result = self.runner.forward(rows, self.context)
        for name, value in result.counters.items():
            batch.counters[name] = batch.counters.get(name, 0) + value
        for i, (part, row) in enumerate(zip(parts, rows, strict=True)):
            if i in result.failed:
                part.status, part.error, part.row.aborted = (
                    RowStatus.ABORTED,
                    result.failed[i],
                    True,
                )
            else:
                _advance(part, row, result.sampled[i])


def _is_active(part: Part, index: int) -> bool:
    if part.status is not RowStatus.OK or part.row.finished:
        return False
    if part.row.aborted:
        part.status = RowStatus.ABORTED
        return False
    return index == 0 or (part.count == 0 and part.row.kv_len < part.end)


def _forward_row(part: Part, index: int) -> ForwardRow:
    row = part.row
    start, count = (part.start, part.count) if part.count else (row.kv_len, 1)
    return ForwardRow(
        slot=row.handle.slot_id,
        namespace=row.namespace,
        tokens=row.tokens[: row.n_tokens],
        start=start,
        count=count,
        attached_pages=row.attached_pages,
        first_in_batch=index == 0,
        samples=start + count == row.n_tokens,
        room=1 if part.count else part.end - start,
        payload=row.payload,
        generation=row.handle.generation,
    )


def _advance(part: Part, forward: ForwardRow, tokens: Sequence[int]) -> None:
    """Note what a step has made: KV up to the last but one token, and the tokens themselves."""
    row = part.row
    row.kv_len = forward.start + forward.count
    if not forward.samples:
        return
    if not 1 <= len(tokens) <= forward.room:
        raise ValueError(
            f"the runner returned {len(tokens)} tokens, there is room for {forward.room}"
        )
    row.kv_len -= 1
    for token in tokens:
        row.kv_len += 1
        row.tokens[row.n_tokens] = token
        row.n_tokens += 1
        part.sampled.append(int(token))
        made = row.n_tokens - row.prompt_tokens
        if made >= row.max_new_tokens or token in row.stop_tokens:
            row.finished = True
            return
