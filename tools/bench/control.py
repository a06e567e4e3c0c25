"""The control plane's cost of a request, without a runtime: digest, match, insert."""

from __future__ import annotations

import gc
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

from kvstrata.errors import InputError, Where
from kvstrata.handles import CacheExtentRef, PageRun, Tier
from kvstrata.tiers import ComponentIdentity, KeyChain, Namespace, TreeCore, policy_class
from kvstrata.tools.trace import read_trace


@dataclass(frozen=True, slots=True)
class NsPerToken:
    """Nanoseconds for each token of the prompts."""

    digest: float
    """Keys of all full pages, once for match and insert."""
    match: float
    insert: float
    """New pages known and resident in L1, an extent a node."""
    total: float


@dataclass(frozen=True, slots=True)
class ControlReport:
    """What `run` measured."""

    requests: int
    page_tokens: int
    prompt_tokens: int
    full_pages: int
    page_hits: int
    """Pages of the longest prefixes that were there already."""
    ns_per_token: NsPerToken
    p50_ms: float
    """Digest, match and insert of one request."""
    p99_ms: float
    max_ms: float
    tree_pages: int
    tree_nodes: int
    tree_bytes_per_page: float
    """Python memory of the tree, keys and extents included, from a second pass."""


@dataclass(frozen=True, slots=True)
class _Cost:
    tokens: int
    digest_ns: int
    match_ns: int
    insert_ns: int
    pages: int
    hits: int

    @property
    def total_ns(self) -> int:
        return self.digest_ns + self.match_ns + self.insert_ns


class _Control:
    """A tree that forgets nothing, and one request after the other through it."""

    def __init__(self, page_tokens: int) -> None:
        component = ComponentIdentity(
            name="kv",
            kind="full_attention",
            dtype="bfloat16",
            layout="page_first",
            layers=1,
            kv_heads=1,
            head_dim=1,
            page_bytes=4 * page_tokens,
        )
        self.page_tokens = page_tokens
        self.namespace = Namespace(
            model="bench",
            revision="bench",
            page_tokens=page_tokens,
            components=(component,),
            parallel_rank=0,
            parallel_size=1,
        ).fingerprint()
        self.tree = TreeCore(policy_class("eviction", "lru")(), max_pages=1 << 40)
        self.next_page = 0

    def serve(self, tokens: bytes) -> _Cost:
        begun = time.perf_counter_ns()
        run = KeyChain(self.namespace, self.page_tokens, tokens).run()
        digested = time.perf_counter_ns()
        match = self.tree.match(self.namespace, run.keys)
        matched = time.perf_counter_ns()
        for node in self.tree.insert(run):
            if not node.l1:
                pages = (PageRun(self.next_page, node.page_count),)
                self.next_page += node.page_count
                extent = CacheExtentRef(1, self.next_page, Tier.L1, "kv", pages)
                self.tree.set_resident(node, Tier.L1, (extent,))
        inserted = time.perf_counter_ns()
        return _Cost(
            tokens=len(tokens) // 4,
            digest_ns=digested - begun,
            match_ns=matched - digested,
            insert_ns=inserted - matched,
            pages=run.page_count,
            hits=match.page_count,
        )


def run(trace: Path, requests: int, page_tokens: int) -> ControlReport:
    """The first `requests` of `trace` through the control plane's data structures.

    Two passes: one for the times, one for the memory. Raises `InputError` for bad arguments and
    for a trace that is none.
    """
    if page_tokens < 1:
        raise InputError(
            f"a page of {page_tokens} tokens",
            remedy="give at least 1",
            where=Where(key="--page-tokens"),
        )
    control = _Control(page_tokens)
    gc.collect()
    gc.freeze()  # as a server does when it has started: modules are not walked again and again
    costs = [control.serve(request.prompt()) for request in read_trace(trace, requests)]
    gc.unfreeze()
    control.tree.check_integrity()
    tokens = sum(cost.tokens for cost in costs)
    digest = sum(cost.digest_ns for cost in costs) / tokens
    match = sum(cost.match_ns for cost in costs) / tokens
    insert = sum(cost.insert_ns for cost in costs) / tokens
    each = sorted(cost.total_ns / 1e6 for cost in costs)
    return ControlReport(
        requests=len(costs),
        page_tokens=page_tokens,
        prompt_tokens=tokens,
        full_pages=sum(cost.pages for cost in costs),
        page_hits=sum(cost.hits for cost in costs),
        ns_per_token=NsPerToken(digest, match, insert, digest + match + insert),
        p50_ms=each[len(each) // 2],
        p99_ms=each[len(each) * 99 // 100],
        max_ms=each[-1],
        tree_pages=control.tree.pages,
        tree_nodes=control.tree.nodes,
        tree_bytes_per_page=_tree_bytes(trace, requests, page_tokens) / max(control.tree.pages, 1),
    )


def _tree_bytes(trace: Path, requests: int, page_tokens: int) -> int:
    """What the tree alone holds: Python's allocations less those that go with the last request."""
    tracemalloc.start()
    try:
        control = _Control(page_tokens)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        for request in read_trace(trace, requests):
            control.serve(request.prompt())
        del request
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        return after - before
    finally:
        tracemalloc.stop()
