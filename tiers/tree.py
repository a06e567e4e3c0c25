"""The prefix tree: which pages are known, and in which tiers they are believed to be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvstrata.boundary import KEY_BYTES, KeyRun
from kvstrata.errors import IntegrityError
from kvstrata.handles import Extents, Tier, slice_extents
from kvstrata.tiers.candidates import CandidateQueue
from kvstrata.tiers.keys import root_key
from kvstrata.tiers.node import PRUNED, L3State, Match, Node, check_covers
from kvstrata.tiers.policies import EvictionPolicy


class TreeCore:
    """A compressed tree of page keys, one root a namespace, with residency by run of pages.

    Holds beliefs, not claims: an extent that leaves the tree (`evict`, `clear_resident`) is the
    caller's to free. One thread; nothing blocks. Nodes are split where it is needed; the lower
    part keeps its identity, so whoever works on pages keeps their *last* node, locked, and how
    many they are, and gets the nodes back from `span`. A leaf that is nowhere resident is pruned
    as soon as the last lock, extent or child is gone (not when it is inserted: lock it or make it
    resident then). All operations cost O(pages of the keys given + nodes on their path).
    """

    def __init__(self, eviction: EvictionPolicy, max_pages: int) -> None:
        """`max_pages`: how many pages are remembered; beyond it, the least recently used ones
        that are only in L3 are forgotten."""
        self.max_pages = max_pages
        self.pages = 0
        self.nodes = 0
        self._clock = 0
        self._roots: dict[bytes, Node] = {}
        self._by_last_key: dict[bytes, Node] = {}
        self._resident = [0] * (max(Tier) + 1)
        self._evictable = [0] * (max(Tier) + 1)
        self._queues = [CandidateQueue(tier, eviction) for tier in Tier]

    # ── looking ──────────────────────────────────────────────────────────────────────────────────

    def match(self, namespace: bytes, keys: bytes) -> Match:
        """The longest prefix of `keys` of which every page is resident in some tier.

        Counts as a use, at one tick of the clock a call. The last node is split if need be.
        """
        self._clock += 1
        path: list[Node] = []
        at = 0
        node = self._roots.get(namespace)
        while node is not None and node.children is not None:
            child = node.children.get(keys[at : at + KEY_BYTES])
            if child is None or not child.is_resident:
                break
            common = child.common_bytes(keys, at)
            if common < len(child.keys):
                child = self._split(child, common // KEY_BYTES)
            child.last_used = self._clock
            path.append(child)
            at += common
            node = child
        return Match(path, at // KEY_BYTES)

    def find(self, namespace: bytes, keys: bytes) -> list[Node]:
        """The nodes that hold a prefix of `keys`, resident or not. No use, no split: the last
        node may be longer than `keys` or part from them after its first page."""
        path: list[Node] = []
        at = 0
        node = self._roots.get(namespace)
        while node is not None and node.children is not None:
            child = node.children.get(keys[at : at + KEY_BYTES])
            if child is None:
                break
            path.append(child)
            if not keys.startswith(child.keys, at):
                break
            at += len(child.keys)
            node = child
        return path

    def span(self, end: Node, page_count: int) -> list[Node]:
        """The nodes of the last `page_count` pages that end with `end`, in order, split at the
        upper border. `IntegrityError` if `end` was pruned or there are fewer pages above it."""
        self._check_alive(end)
        path: list[Node] = []
        node, left = end, page_count
        while left > 0:
            if node.parent is None:
                raise IntegrityError(f"{page_count} pages up from {end!r} is above the root")
            if node.page_count > left:
                self._split(node, node.page_count - left)
            path.append(node)
            left -= node.page_count
            node = node.parent or node
        path.reverse()
        return path

    def key_run(self, nodes: Sequence[Node]) -> KeyRun:
        """The keys of consecutive nodes (at least one; pruned ones too)."""
        parent = nodes[0].parent
        if parent is None or any(b.parent is not a for a, b in itertools.pairwise(nodes)):
            raise IntegrityError("the nodes are not consecutive")
        first = nodes[0]
        keys = first.keys if len(nodes) == 1 else b"".join([node.keys for node in nodes])
        return KeyRun(first.namespace, parent.last_key, first.first_page_index, keys)

    def roots(self) -> list[Node]:
        return list(self._roots.values())

    def namespaces(self) -> list[bytes]:
        """Fingerprints of the namespaces that have pages here."""
        return list(self._roots)

    def resident(self, tier: Tier) -> int:
        """Pages that are in L1 or L2."""
        return self._resident[tier]

    def evictable(self, tier: Tier) -> int:
        """Unlocked pages in L1 or L2: what `evict` could take now. (From L2 it also takes locked
        ones that are in L1.)"""
        return self._evictable[tier]

    # ── growing ──────────────────────────────────────────────────────────────────────────────────

    def insert(self, run: KeyRun) -> list[Node]:
        """Make the pages of `run` known; returns the nodes that hold exactly them, in order.

        New nodes are resident nowhere: the caller makes them resident or locks the last one. Counts
        as a use. `IntegrityError` if the page before the run is not in the tree.
        """
        path: list[Node] = []
        keys, at = run.keys, 0
        if not keys:
            return path
        node = self._parent_of(run)
        while at < len(keys):
            children = node.children
            child = children.get(keys[at : at + KEY_BYTES]) if children is not None else None
            if child is None:
                child = self._add(node, keys[at:] if at else keys)
            else:
                common = child.common_bytes(keys, at)
                if common < len(child.keys):
                    child = self._split(child, common // KEY_BYTES)
            child.last_used = self._clock
            path.append(child)
            at += len(child.keys)
            node = child
        if self.pages > self.max_pages:
            self._forget(keep=node)
        return path

    def _parent_of(self, run: KeyRun) -> Node:
        """The node that ends with the page before `run`; a root is made when it is missing."""
        index = run.first_page_index - 1
        node = self._by_last_key.get(run.parent)
        if node is None and index < 0 and run.parent == root_key(run.namespace):
            node = Node(None, run.namespace, run.parent, -1)
            self._roots[run.namespace] = self._by_last_key[run.parent] = node
        if node is None:
            node = self._split_after(run.namespace, index, run.parent)
        if node is None or node.namespace != run.namespace or node.last_page_index != index:
            raise IntegrityError(f"page {index}, the parent of a run, is not in the tree")
        return node

    def _split_after(self, namespace: bytes, index: int, key: bytes) -> Node | None:
        """Page `index` when it lies inside a node: make it the last page of one.

        The only search in this class. Who inserts below a page has matched or inserted that page
        before, and so it ended a node; this is for when the node has been replaced meanwhile.
        """
        todo = [self._roots[namespace]] if namespace in self._roots else []
        while todo:
            node = todo.pop()
            offset = index - node.first_page_index
            if offset >= node.page_count:
                todo.extend((node.children or {}).values())
            elif node.keys.startswith(key, offset * KEY_BYTES):
                return self._split(node, offset + 1)
        return None

    def _add(self, parent: Node, keys: bytes) -> Node:
        node = Node(parent, parent.namespace, keys, parent.last_page_index + 1)
        if parent.children is None:
            parent.children = {}
        parent.children[node.first_key] = node
        self._by_last_key[node.last_key] = node
        self.nodes += 1
        self.pages += node.page_count
        return node

    def _split(self, node: Node, pages: int) -> Node:
        """Move the first `pages` pages of `node` into a new node above it; returns that node."""
        parent = node.parent
        assert parent is not None, "a root has no pages"
        assert parent.children is not None, "a node is a child of its parent"
        count, cut = node.page_count, pages * KEY_BYTES
        assert 0 < pages < count, "nothing to split"
        upper = Node(parent, node.namespace, node.keys[:cut], node.first_page_index)
        upper.locks = node.locks
        upper.last_used = node.last_used
        upper.l3 = node.l3
        if node.l1:
            upper.l1, upper.l1_children = slice_extents(node.l1, 0, pages), 1
            node.l1 = slice_extents(node.l1, pages, count)
        if node.l2:
            upper.l2, upper.l2_children = slice_extents(node.l2, 0, pages), 1
            node.l2 = slice_extents(node.l2, pages, count)
        node.keys = node.keys[cut:]
        node.first_page_index += pages
        node.parent = upper
        parent.children[upper.first_key] = upper
        upper.children = {node.first_key: node}
        self._by_last_key[upper.last_key] = upper
        self.nodes += 1
        return upper

    # ── residency ────────────────────────────────────────────────────────────────────────────────

    def set_resident(self, node: Node, tier: Tier, extents: Extents) -> None:
        """`node` is READY in L1 or L2, in `extents`, which cover its pages in every pool."""
        self._check_alive(node)
        check_covers(extents, node.page_count)
        if node.extents(tier):
            raise IntegrityError(f"{node!r} is in {tier.name} already; its extents would be lost")
        self._put(node, tier, extents)
        self._offer(node)

    def clear_resident(self, node: Node, tier: Tier) -> Extents:
        """`node` is not in L1 or L2 any more; returns the extents, which are the caller's now.

        () if it was not there. Prunes the node if that was all: record first where else it is.
        """
        self._check_alive(node)
        extents = node.extents(tier)
        if extents:
            self._put(node, tier, ())
            assert node.parent is not None
            self._offer(node.parent)
            self._offer(node)
            self._prune(node)
        return extents

    def set_l3(self, node: Node, state: L3State) -> None:
        """What is believed of `node` in L3. NONE prunes it if it is nowhere else."""
        self._check_alive(node)
        node.l3 = state
        self._offer(node)
        self._prune(node)

    def invalidate_l3(self, node: Node) -> None:
        """`node` is not in L3 after all. Pages below it are out of reach until it is back."""
        self.set_l3(node, L3State.NONE)

    def lost_l3(self, keys: bytes) -> int:
        """L3 evicted these pages by itself, children before parents; returns how many were known.

        A hint, as L3 is: only pages that end a node are found, and their parents when they are
        reached in that order. What is missed turns out when it is fetched.
        """
        known = 0
        for at in range(0, len(keys), KEY_BYTES):
            node = self._by_last_key.get(keys[at : at + KEY_BYTES])
            if node is None or node.l3 is not L3State.STORED:
                continue
            if node.page_count > 1:
                self._split(node, node.page_count - 1)
            self.invalidate_l3(node)
            known += 1
        return known

    def _put(self, node: Node, tier: Tier, extents: Extents) -> None:
        parent = node.parent
        assert parent is not None, "a root has no pages"
        step = 1 if extents else -1
        if tier is Tier.L1:
            node.l1 = extents
            parent.l1_children += step
        else:
            node.l2 = extents
            parent.l2_children += step
        self._resident[tier] += step * node.page_count
        if not node.locks:
            self._evictable[tier] += step * node.page_count

    # ── locks and eviction ───────────────────────────────────────────────────────────────────────

    def lock(self, node: Node) -> None:
        """Keep `node` and all above it in the best tier they are in, and in the tree. Locks
        count."""
        self._check_alive(node)
        at: Node | None = node
        while at is not None:
            if not at.locks:
                self._count_evictable(at, -1)
            at.locks += 1
            at = at.parent

    def unlock(self, node: Node) -> None:
        """Take one lock back; prunes what is nowhere resident and not locked any more."""
        if node.locks < 1:
            raise IntegrityError(f"{node!r} is not locked")
        self._release(node)
        self._prune(node)

    def _release(self, node: Node) -> None:
        at: Node | None = node
        while at is not None:
            at.locks -= 1
            if not at.locks:
                self._count_evictable(at, 1)
                self._offer(at)
            at = at.parent

    def evict(self, tier: Tier, pages: int) -> list[tuple[Node, Extents]]:
        """Take up to `pages` pages out of L1 or L2, children before parents, in the order of the
        policy; less only if there are no more. The extents are the caller's to free."""
        victims: list[tuple[Node, Extents]] = []
        left = pages
        while left > 0 and (node := self._queues[tier - 1].pop()) is not None:
            if node.page_count > left:
                self._split(node, node.page_count - left)
            left -= node.page_count
            victims.append((node, self.clear_resident(node, tier)))
        return victims

    def _forget(self, keep: Node) -> None:
        """Down to `max_pages`, as far as there are leaves that are only in L3."""
        keep.locks += 1  # it alone is enough: what has a child is not forgotten
        while self.pages > self.max_pages and (node := self._queues[Tier.L3 - 1].pop()) is not None:
            excess = self.pages - self.max_pages
            if node.page_count > excess:
                self._split(node, node.page_count - excess)
            self.set_l3(node, L3State.NONE)
        keep.locks -= 1
        self._offer(keep)

    def _count_evictable(self, node: Node, sign: int) -> None:
        if node.l1:
            self._evictable[Tier.L1] += sign * node.page_count
        if node.l2:
            self._evictable[Tier.L2] += sign * node.page_count

    def _offer(self, node: Node) -> None:
        for queue in self._queues:
            if node.may_leave(queue.tier):
                queue.offer(node)

    def _prune(self, node: Node) -> None:
        """Remove `node` if it is an unlocked leaf without residency, and then its parent …"""
        while not (node.locks or node.children or node.is_resident):
            parent = node.parent
            del self._by_last_key[node.last_key]
            node.locks = PRUNED
            if parent is None:
                del self._roots[node.namespace]
                return
            assert parent.children is not None
            del parent.children[node.first_key]
            if not parent.children:
                parent.children = None
            self.nodes -= 1
            self.pages -= node.page_count
            for queue in self._queues:
                queue.pruned(node)
            node = parent
        self._offer(node)

    def is_alive(self, node: Node) -> bool:
        """Is `node` in the tree still?"""
        return node.locks != PRUNED

    def _check_alive(self, node: Node) -> None:
        if node.locks == PRUNED or node.parent is None:
            raise IntegrityError(f"{node!r} is not a node of the tree")

    def check_integrity(self) -> None:
        """Raises `IntegrityError` naming the first invariant that does not hold. Reads it all."""
        from kvstrata.tiers.tree_check import check_tree

        check_tree(self)
