"""A request as control sees it: its keys, its place in the queue, what it hit."""

from __future__ import annotations

import enum
import time
from collections import Counter
from dataclasses import dataclass, field

from kvstrata.boundary import KEY_BYTES
from kvstrata.errors import InputError, Where
from kvstrata.handles import RequestRuntimeHandle, Tier
from kvstrata.tiers.keys import TOKEN_BYTES, KeyChain, token_view
from kvstrata.tiers.node import Node


class RequestState(enum.Enum):
    WAITING = "waiting"
    """In the queue; nothing is held for it."""
    LOOKUP = "lookup"
    """L3 is asked what it holds; nothing is held."""
    STAGING = "staging"
    """Its path is locked and its pages are on their way from L3."""
    READY = "ready"
    """All that it restores is in L1 or L2; it waits for a batch."""
    RUNNING = "running"
    """It has a row in the runtime."""
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"
    """The ModelRunner could not run it; `RequestResult.error` says why."""

    @property
    def is_end(self) -> bool:
        return self in (RequestState.FINISHED, RequestState.ABORTED, RequestState.FAILED)


@dataclass(frozen=True, slots=True)
class RequestResult:
    """What became of a request. Times are seconds on the scheduler's clock, from `submit` on."""

    request_id: int
    state: RequestState
    prompt_tokens: int
    full_pages: int
    page_hits: int
    """Pages of the longest stored prefix that were attached or restored."""
    hit_pages: dict[Tier, int]
    """The same by the tier in which they were found."""
    computed_tokens: int
    """Prompt tokens that were computed."""
    duplicate_pages: int
    """Prompt pages that it computed although another request had them by then."""
    output_tokens: bytes
    first_token_s: float
    total_s: float
    error: str = ""


@dataclass(eq=False, slots=True)
class Request:
    """One request, from `submit` to its result. Changed by the scheduler only."""

    request_id: int
    tokens: bytes
    chain: KeyChain
    max_new_tokens: int
    stop_tokens: tuple[int, ...]
    payload: bytes
    store: bool
    submitted_s: float
    state: RequestState = RequestState.WAITING
    located_pages: int = -1
    """Leading pages that L3 said it has; -1 before the lookup."""
    end_node: Node | None = None
    """The locked last node of the path that it attaches and restores."""
    last_node: Node | None = None
    """The locked node that ends with the last page it has computed."""
    path_pages: int = 0
    """Pages of the path that ends with `end_node`. The nodes are asked from the tree each time
    (`TreeCore.span`): they may be split between."""
    hit_pages: Counter[Tier] = field(default_factory=Counter)
    loads_open: set[int] = field(default_factory=set)
    """Actions that fetch its pages."""
    moves_short: bool = False
    """Not all of those pages came."""
    claimed_keys: list[bytes] = field(default_factory=list)
    """Keys that it is going to load or compute; others wait for it rather than do it again."""
    footprint_pages: int = 0
    l2_pages: int = 0
    handle: RequestRuntimeHandle | None = None
    planned_kv: int = 0
    """Positions whose KV exists when all its batches have run."""
    cached_tokens: int = 0
    output: bytes = b""
    output_done: bool = False
    duplicate_pages: int = 0
    first_token_s: float = 0.0
    attempts: int = 0
    restore_allowed: bool = True
    error: str = ""

    @property
    def prompt_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def full_pages(self) -> int:
        return self.prompt_tokens // self.chain.page_tokens

    @property
    def max_kv(self) -> int:
        """KV of the last token is never needed."""
        return self.prompt_tokens + self.max_new_tokens - 1

    @property
    def prefilled(self) -> bool:
        return self.planned_kv >= self.prompt_tokens

    def under(self, namespace: bytes) -> Request:
        """The same request from its beginning, with keys of another namespace. This one is over:
        what it has asked for may still come."""
        self.state = RequestState.ABORTED
        return new_request(
            self.request_id,
            self.tokens,
            namespace,
            self.chain.page_tokens,
            max_new_tokens=self.max_new_tokens,
            stop_tokens=self.stop_tokens,
            payload=self.payload,
            store=self.store,
            now_s=self.submitted_s,
        )

    def key(self, page: int) -> bytes:
        return self.chain.keys[page * KEY_BYTES : (page + 1) * KEY_BYTES]

    def prompt_keys(self) -> bytes:
        """Keys of the prompt's full pages."""
        return self.chain.keys[: self.full_pages * KEY_BYTES]

    def result(self, now_s: float) -> RequestResult:
        hits = {tier: self.hit_pages[tier] for tier in Tier}
        return RequestResult(
            request_id=self.request_id,
            state=self.state,
            prompt_tokens=self.prompt_tokens,
            full_pages=self.full_pages,
            page_hits=sum(hits.values()),
            hit_pages=hits,
            computed_tokens=max(0, self.prompt_tokens - self.cached_tokens),
            duplicate_pages=self.duplicate_pages,
            output_tokens=self.output,
            first_token_s=self.first_token_s,
            total_s=now_s - self.submitted_s,
            error=self.error,
        )


def new_request(
    request_id: int,
    tokens: bytes,
    namespace: bytes,
    page_tokens: int,
    *,
    max_new_tokens: int,
    stop_tokens: tuple[int, ...] = (),
    payload: bytes = b"",
    store: bool = True,
    now_s: float | None = None,
) -> Request:
    """Check the input and derive the keys of its prompt, once."""
    data = bytes(token_view(tokens))
    if not data:
        raise InputError(
            "a request without tokens", remedy="give at least one", where=Where(key="tokens")
        )
    if max_new_tokens < 1:
        raise InputError(
            f"max_new_tokens is {max_new_tokens}",
            remedy="a request makes at least one token",
            where=Where(key="max_new_tokens"),
        )
    return Request(
        request_id=request_id,
        tokens=data,
        chain=KeyChain(namespace, page_tokens, data),
        max_new_tokens=max_new_tokens,
        stop_tokens=stop_tokens,
        payload=payload,
        store=store,
        submitted_s=time.monotonic() if now_s is None else now_s,
    )
