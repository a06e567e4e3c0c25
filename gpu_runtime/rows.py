"""Request rows: what the runtime knows of each request, and the pages it holds for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstrata.boundary import KEY_BYTES, OpenRow
from kvstrata.errors import CapacityError, IntegrityError, PlanError, StaleHandleError
from kvstrata.gpu_runtime.core import PageSet
from kvstrata.handles import RequestRuntimeHandle


@dataclass(eq=False, slots=True)
class Row:
    """One request. Positions count tokens; page lists are by page index from 0.

    `tokens` and `kv_len` belong to the compute thread while a batch runs; everything else changes
    under the runtime's lock only.
    """

    handle: RequestRuntimeHandle
    namespace: bytes
    tokens: npt.NDArray[np.int32]
    n_tokens: int
    prompt_tokens: int
    max_new_tokens: int
    stop_tokens: tuple[int, ...]
    payload: bytes
    pages: PageSet
    kv_len: int = 0
    """Positions whose KV is computed or attached."""
    planned_kv: int = 0
    """The same when all prepared batches have run."""
    attached_pages: int = 0
    handed_pages: int = 0
    """Page index up to which control was given extents (attached pages included)."""
    hand: PageSet = field(default_factory=dict)
    """Pages to hand to control, by page index: `pages`, but for a private copy the page it was
    made from."""
    held: list[PageSet] = field(default_factory=list)
    batches: int = 0
    """Prepared batches that name the row and have not ended."""
    finished: bool = False
    aborted: bool = False
    released: bool = False
    epoch: int = 0
    """How many changes of weights came before it."""

    @property
    def max_kv(self) -> int:
        """KV of the last token is never needed."""
        return self.prompt_tokens + self.max_new_tokens - 1

    @property
    def page_count(self) -> int:
        return min((len(p) for p in self.pages.values()), default=0)

    def append_pages(self, more: PageSet) -> None:
        for name, pages in more.items():
            self.pages[name] = np.concatenate((self.pages[name], pages))
            self.hand[name] = np.concatenate((self.hand[name], pages))

    def replace_last(self, copy: PageSet) -> None:
        """Use a private copy for the last page, which stays what control is handed."""
        for name, pages in copy.items():
            self.pages[name] = np.concatenate((self.pages[name][:-1], pages))


class RowTable:
    """Slots and generations of request rows; a handle of another generation is stale."""

    def __init__(self, runtime_id: int, max_requests: int, components: Iterable[str]) -> None:
        self._runtime_id = runtime_id
        self._components = tuple(components)
        self._rows: dict[int, Row] = {}
        self._free = list(range(max_requests - 1, -1, -1))
        self._max_requests = max_requests
        self._generation = 0
        self.epoch = 0
        """How many changes of weights there were."""

    def __len__(self) -> int:
        return len(self._rows)

    def all(self) -> list[Row]:
        return list(self._rows.values())

    def check_room(self, count: int) -> None:
        if count > len(self._free):
            freeing = sum(1 for row in self._rows.values() if row.released)
            raise CapacityError("request rows", need=count, free=len(self._free), freeing=freeing)

    def open(self, plan: OpenRow) -> Row:
        prompt = np.frombuffer(plan.tokens, np.int32)
        capacity = len(prompt) + plan.max_new_tokens
        tokens = np.empty(capacity, np.int32)
        tokens[: len(prompt)] = prompt
        self._generation += 1
        slot = self._free.pop()
        row = Row(
            handle=RequestRuntimeHandle(self._runtime_id, slot, self._generation),
            namespace=plan.namespace,
            tokens=tokens,
            n_tokens=len(prompt),
            prompt_tokens=len(prompt),
            max_new_tokens=plan.max_new_tokens,
            stop_tokens=plan.stop_tokens,
            payload=plan.payload,
            pages=empty_pages(self._components),
            hand=empty_pages(self._components),
            epoch=self.epoch,
        )
        self._rows[slot] = row
        return row

    def get(self, handle: RequestRuntimeHandle) -> Row:
        """The row of a handle. Raises StaleHandleError."""
        row = self._rows.get(handle.slot_id)
        if row is None or row.handle != handle or row.released:
            raise StaleHandleError(f"not a live request: {handle}")
        return row

    def remove(self, row: Row) -> None:
        del self._rows[row.handle.slot_id]
        self._free.append(row.handle.slot_id)

    def check_integrity(self) -> None:
        slots = set(self._rows) | set(self._free)
        if len(slots) != self._max_requests or len(self._rows) + len(self._free) != len(slots):
            raise IntegrityError("request slots are lost or doubled")
        for slot, row in self._rows.items():
            lengths = {len(p) for p in row.pages.values()}
            if row.handle.slot_id != slot or len(lengths) > 1:
                raise IntegrityError(f"row {slot}: pages of unequal length {lengths}")
            if row.kv_len > row.planned_kv or row.n_tokens > len(row.tokens):
                raise IntegrityError(f"row {slot}: more KV than planned")


def check_open(plan: OpenRow, max_context_tokens: int) -> None:
    """Raise PlanError for a request that no row can hold."""
    if not plan.tokens or len(plan.tokens) % 4:
        raise PlanError("a request needs tokens, as int32")
    if len(plan.namespace) != KEY_BYTES:
        raise PlanError(f"a namespace fingerprint of {len(plan.namespace)} bytes")
    total = len(plan.tokens) // 4 + plan.max_new_tokens
    if plan.max_new_tokens < 1 or total > max_context_tokens:
        raise PlanError(
            f"prompt and max_new_tokens need {total} positions, a row has {max_context_tokens}"
        )


def empty_pages(components: Iterable[str]) -> PageSet:
    return {name: np.empty(0, np.int64) for name in components}
