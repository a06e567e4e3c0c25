"""Which node leaves a tier next: a heap a tier that is brought up to date when it is read."""

from __future__ import annotations

import heapq
import itertools

from kvstrata.handles import Tier
from kvstrata.tiers.node import PRUNED, Node
from kvstrata.tiers.policies import EvictionPolicy

_LEAST_SWEPT = 64
"""Fewer pruned entries are not worth a sweep."""


class CandidateQueue:
    """Nodes that may leave one tier, least priority first.

    Each node has at most one entry. Uses and locks do not touch the heap: an entry whose node was
    used meanwhile sinks when it surfaces, one whose node may not leave is dropped then, and the
    node is offered again when it may. Entries of pruned nodes are swept out when they outnumber
    the others. So all of it is O(log n), amortised, and the heap is never longer than twice the
    nodes of the tree (and 64 entries).
    """

    def __init__(self, tier: Tier, policy: EvictionPolicy) -> None:
        self.tier = tier
        self._bit = 1 << tier
        self._policy = policy
        self._heap: list[tuple[float, int, Node]] = []
        self._order = itertools.count()
        self._pruned = 0

    def offer(self, node: Node) -> None:
        """`node` may leave now; no effect if it has an entry."""
        if not node.queued & self._bit:
            node.queued |= self._bit
            heapq.heappush(self._heap, (self._policy.priority(node), next(self._order), node))

    def pop(self) -> Node | None:
        """Take out the node that leaves first; None if none may."""
        heap = self._heap
        while heap:
            entered, _, node = heap[0]
            if not node.may_leave(self.tier):
                self._remove_top(node)
                continue
            priority = self._policy.priority(node)
            if priority > entered:
                heapq.heapreplace(heap, (priority, next(self._order), node))
                continue
            self._remove_top(node)
            return node
        return None

    def pruned(self, node: Node) -> None:
        """`node` left the tree."""
        if node.queued & self._bit:
            self._pruned += 1
            self._sweep()

    def _remove_top(self, node: Node) -> None:
        heapq.heappop(self._heap)
        node.queued &= ~self._bit
        self._pruned -= node.locks == PRUNED
        self._sweep()

    def _sweep(self) -> None:
        if self._pruned > _LEAST_SWEPT and 2 * self._pruned > len(self._heap):
            self._heap[:] = [entry for entry in self._heap if entry[2].locks != PRUNED]
            heapq.heapify(self._heap)
            self._pruned = 0

    def __len__(self) -> int:
        return len(self._heap)

    def entries(self) -> list[Node]:
        """All nodes with an entry, pruned ones included, in no order. For checks."""
        return [node for _, _, node in self._heap]
