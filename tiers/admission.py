"""Admission: when may a request leave the queue, and how do its pages come back?

A request is admitted only when everything it can ever need in L1 fits beside what was admitted
before, so what is admitted always finishes, without preemption. It waits when another request is
about to load or compute its next page.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass

from kvstrata.boundary import KEY_BYTES
from kvstrata.errors import CapacityError
from kvstrata.handles import Extents, StagingMode, Tier, page_count, slice_extents
from kvstrata.tiers.cache import CacheControl
from kvstrata.tiers.node import L3State, Node
from kvstrata.tiers.policies import PrefetchPolicy, RestorePolicy
from kvstrata.tiers.request import Request, RequestState


class Verdict(enum.Enum):
    """What `Admission.try_admit` decided."""

    ADMITTED = "admitted"
    SHARED = "shared"
    """Another request makes its next page; others may go first."""
    NO_ROOM = "no_room"
    """Memory is short: nobody behind it goes first."""


@dataclass(frozen=True, slots=True)
class _Missing:
    """Consecutive nodes that must be moved before the request can run."""

    nodes: list[Node]
    tier: Tier
    """Where they are: L3, or L2 when they must come to L1 before the batch."""


class Admission:
    """The books of admitted requests: footprints in L1, pages in L2, keys being made."""

    def __init__(
        self, cache: CacheControl, prefetch: PrefetchPolicy, restore: RestorePolicy
    ) -> None:
        self._cache = cache
        self._prefetch = prefetch
        self._restore = restore
        self._footprint = 0
        self._l2_pages = 0
        self._claimed: Counter[bytes] = Counter()
        self.admitted: dict[int, Request] = {}
        self.settled: list[Request] = []
        """Requests that became READY, or WAITING again, by an event; the scheduler takes them."""

    def footprint(self, request: Request) -> int:
        """L1 pages that it can need at most: all positions, and a private copy of one page."""
        return -(-request.max_kv // request.chain.page_tokens) + 1

    def check_fits(self, request: Request, max_context_tokens: int) -> None:
        """Raise CapacityError for a request that could never be admitted."""
        need, room = self.footprint(request), self._cache.rooms[Tier.L1]
        if need > room.total:
            raise CapacityError("L1, for one request", need=need, free=room.total, freeing=0)
        positions = request.prompt_tokens + request.max_new_tokens
        if positions > max_context_tokens:
            raise CapacityError(
                "positions of one row", need=positions, free=max_context_tokens, freeing=0
            )

    def look_up(self, request: Request) -> None:
        """Ask L3 for the pages behind those that the tree knows."""
        keys = request.prompt_keys()
        known = self._cache.tree.match(request.chain.namespace, keys).page_count
        if known == request.full_pages:
            request.located_pages = known
            return
        request.state = RequestState.LOOKUP
        run = request.chain.run(known, request.full_pages)

        def done(n: int) -> None:
            request.located_pages = known + n
            if request.state is RequestState.LOOKUP:
                request.state = RequestState.WAITING

        self._cache.lookup(run, done)

    def try_admit(self, request: Request) -> Verdict:
        cache, tree = self._cache, self._cache.tree
        chain = request.chain
        keys = request.prompt_keys()
        match = tree.match(chain.namespace, keys)
        if request.located_pages > match.page_count and request.restore_allowed:
            wanted = self._prefetch.wanted(request.located_pages)
            if wanted > match.page_count:
                if request.key(match.page_count) in self._claimed:
                    # What a lookup found was found bad since, or is gone: pages that are being
                    # computed must not pass for stored, or nobody would store them again.
                    return Verdict.SHARED
                cache.believe_stored(chain.run(match.page_count, wanted))
                match = tree.match(chain.namespace, keys)
        path = self._usable(request, match.path)
        if path is None or self._is_made_elsewhere(request, path):
            return Verdict.SHARED
        footprint = self.footprint(request)
        if self._footprint + footprint > cache.rooms[Tier.L1].total:
            return Verdict.NO_ROOM
        target = self._target(path)
        missing = _missing(path, target)
        l2_pages = self._l2_need(path) if target is Tier.L2 else 0
        to_l1 = sum(n.page_count for m in missing for n in m.nodes) if target is Tier.L1 else 0
        room = cache.rooms[Tier.L1]
        if to_l1 > room.free + room.freeing + tree.evictable(Tier.L1):
            return Verdict.NO_ROOM
        if l2_pages and self._l2_pages + l2_pages > self._l2_limit():
            return Verdict.NO_ROOM
        request.footprint_pages, request.l2_pages = footprint, l2_pages
        self._admit(request, path, missing, target)
        return Verdict.ADMITTED

    def _usable(self, request: Request, path: list[Node]) -> list[Node] | None:
        """The part of the path that is restored; None: wait, a page is on its way to L3."""
        cut = len(path)
        for i, node in enumerate(path):
            if not (node.l1 or node.l2):
                if node.l3.is_on_its_way:
                    return None
                if not request.restore_allowed:
                    cut = i
                    break
            if not node.l1 and not request.restore_allowed:
                cut = i
                break
        path = path[:cut]
        lead = next((i for i, node in enumerate(path) if not node.l1), len(path))
        rest = sum(node.page_count for node in path[lead:])
        tokens = request.chain.page_tokens
        allowed = self._restore.restored(rest, tokens, self._cache.rooms.status)
        while path[lead:] and sum(node.page_count for node in path[lead:]) > allowed:
            path = path[:-1]
        return path

    def _is_made_elsewhere(self, request: Request, path: list[Node]) -> bool:
        """Is the first page that it would load or compute claimed by another request?"""
        page = 0
        for node in path:
            if not (node.l1 or node.l2):
                break
            page += node.page_count
        return page < request.full_pages and request.key(page) in self._claimed

    def _target(self, path: list[Node]) -> Tier:
        """Where pages from L3 go: L2, unless it keeps none, or is too small for them, or pages in
        L1 follow pages that are not (a row attaches L1 pages first)."""
        if self._cache.mode is StagingMode.BUFFER_ONLY:
            return Tier.L1
        lead = next((i for i, node in enumerate(path) if not node.l1), len(path))
        if any(node.l1 for node in path[lead:]):
            return Tier.L1  # they may leave L2 while they are in L1
        return Tier.L2 if self._l2_need(path) <= self._l2_limit() else Tier.L1

    def _l2_need(self, path: list[Node]) -> int:
        """Pages that a lock on `path` keeps in L2: those to restore, and, as children leave before
        their parents, those above them that are in L2 or on their way."""
        if all(node.l1 for node in path):
            return 0
        stay = (n for n in path if not n.l1 or n.l2 or n.l3 is L3State.COPYING)
        return sum(node.page_count for node in stay)

    def _l2_limit(self) -> int:
        """The most pages in L2 that requests may lock: a backup must always fit beside them, or
        pages in L1 could wait for room in L2 that is held for requests that wait for L1."""
        room = self._cache.rooms[Tier.L2]
        return min(room.total - room.reserve - self._cache.move_pages, room.window)

    def _admit(
        self, request: Request, path: list[Node], missing: list[_Missing], target: Tier
    ) -> None:
        cache = self._cache
        self._footprint += request.footprint_pages
        self._l2_pages += request.l2_pages
        self.admitted[request.request_id] = request
        request.path_pages = sum(node.page_count for node in path)
        request.hit_pages = Counter()
        for node in path:
            tier = Tier.L1 if node.l1 else Tier.L2 if node.l2 else Tier.L3
            request.hit_pages[tier] += node.page_count
        if path:
            request.end_node = path[-1]
            cache.tree.lock(path[-1])
            cache.touch(path)
        self._claim(request, path)
        request.state = RequestState.STAGING
        request.moves_short = False
        for part in missing:
            action_id = self._move(request, part, target)
            request.loads_open.add(action_id)
        if not missing:
            request.state = RequestState.READY

    def _move(self, request: Request, part: _Missing, target: Tier) -> int:
        wanted = sum(node.page_count for node in part.nodes)

        def done(n: int) -> None:
            request.loads_open.discard(action_id)
            request.moves_short = request.moves_short or n < wanted
            self._settle(request)

        if part.tier is Tier.L3:
            action_id = self._cache.prefetch(part.nodes, target, done)
        else:
            action_id = self._cache.restore(part.nodes, done)
        return action_id

    def _settle(self, request: Request) -> None:
        """When its last move ended: READY if all its pages came, else back to the queue."""
        if request.loads_open or request.state is not RequestState.STAGING:
            return
        tree = self._cache.tree
        keys = request.prompt_keys()
        end = request.end_node
        assert end is not None, "moves are for pages"
        wanted = end.last_page_index + 1
        path = tree.match(request.chain.namespace, keys[: wanted * KEY_BYTES]).path
        came = 0
        for node in path:
            if not (node.l1 or node.l2):
                break
            came += node.page_count
        self.settled.append(request)
        if came == wanted and not request.moves_short:
            request.state = RequestState.READY
        else:
            self.leave(request)
            request.state = RequestState.WAITING
            request.located_pages = min(request.located_pages, came)

    def path(self, request: Request) -> list[Node]:
        """The nodes that an admitted request attaches and restores, as they are now."""
        if request.end_node is None:
            return []
        return self._cache.tree.span(request.end_node, request.path_pages)

    def extend_lock(self, request: Request, last: Node) -> None:
        """Keep the pages that it has computed in L1, where its row holds them anyway."""
        self._cache.tree.lock(last)
        if request.last_node is not None:
            self._cache.tree.unlock(request.last_node)
        request.last_node = last

    def take_pages(self, request: Request, first: int, extents: Extents) -> None:
        """Pages `first …` became READY in L1: the tree learns of them, unless the request is
        no-store."""
        cache = self._cache
        if not request.store:
            cache.outbox.append(cache.free(extents))
            return
        stop = first + page_count(extents)
        restored = min(max(request.path_pages, first), stop)
        for start, end in ((first, restored), (restored, stop)):
            if start == end:
                continue
            run = request.chain.run(start, end)
            mine = slice_extents(extents, start - first, end - first)
            last, duplicates = cache.insert_ready(request.chain.run(0, start), run, mine)
            self.extend_lock(request, last)
            if start >= restored:
                prompt = max(0, min(end, request.full_pages) - start)
                request.duplicate_pages += min(duplicates, prompt)

    def send_back(self, request: Request) -> Request:
        """To the queue again: its pages are not all where a batch could use them."""
        self.leave(request)
        request.state = RequestState.WAITING
        return request

    def _claim(self, request: Request, path: list[Node]) -> None:
        page = 0
        for node in path:
            if not (node.l1 or node.l2):
                break
            page += node.page_count
        stop = request.full_pages if request.store else request.path_pages
        request.claimed_keys = [request.key(i) for i in range(page, stop)]
        self._claimed.update(request.claimed_keys)

    def unclaim_keys(self, request: Request) -> None:
        """Its pages are made, or it will not make them."""
        for key in request.claimed_keys:
            self._claimed[key] -= 1
            if not self._claimed[key]:
                del self._claimed[key]
        request.claimed_keys = []

    def leave(self, request: Request) -> None:
        """Take everything back that `try_admit` booked. Idempotent."""
        if self.admitted.pop(request.request_id, None) is None:
            return
        self._footprint -= request.footprint_pages
        self._l2_pages -= request.l2_pages
        self.unclaim_keys(request)
        for node in (request.last_node, request.end_node):
            if node is not None:
                self._cache.tree.unlock(node)
        request.last_node = request.end_node = None
        request.path_pages = 0

    def check_integrity(self) -> None:
        admitted = self.admitted.values()
        assert self._footprint == sum(r.footprint_pages for r in admitted)
        assert self._l2_pages == sum(r.l2_pages for r in admitted)
        assert self._claimed == Counter(k for r in admitted for k in r.claimed_keys)


def _missing(path: list[Node], target: Tier) -> list[_Missing]:
    """Runs of nodes that must move before the batch, each in one tier."""
    parts: list[_Missing] = []
    for node in path:
        if node.l1 or (node.l2 and target is Tier.L2):
            continue
        tier = Tier.L2 if node.l2 else Tier.L3
        last = parts[-1] if parts else None
        if last and last.tier is tier and last.nodes[-1] is node.parent:
            last.nodes.append(node)
        else:
            parts.append(_Missing([node], tier))
    return parts
