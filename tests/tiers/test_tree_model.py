"""TreeCore against a model that keeps every page by itself."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstrata.boundary import KEY_BYTES, KeyRun
from kvstrata.handles import CacheExtentRef, Extents, PageRun, Tier, page_count
from kvstrata.tiers.keys import root_key
from kvstrata.tiers.node import PRUNED, L3State, Node
from kvstrata.tiers.policies import LRU
from kvstrata.tiers.tree import TreeCore

NAMESPACES = [hashlib.sha256(name).digest() for name in (b"one", b"two")]
MAX_PAGES = 24

words = st.lists(st.integers(0, 1), min_size=1, max_size=8).map(tuple)
"""A page's token is a bit, so that prefixes collide all the time."""
spaces = st.sampled_from(NAMESPACES)
tiers = st.sampled_from([Tier.L1, Tier.L2])


def keys_of(namespace: bytes, word: tuple[int, ...]) -> list[bytes]:
    keys, key = [], root_key(namespace)
    for token in word:
        key = hashlib.sha256(b"page" + key + bytes([token])).digest()
        keys.append(key)
    return keys


class Page:
    """One page of the model."""

    def __init__(self, parent: Page | None) -> None:
        self.parent = parent
        self.where: dict[Tier, list[tuple[str, int]]] = {}
        self.l3 = L3State.NONE
        self.used = 0

    @property
    def is_resident(self) -> bool:
        return bool(self.where) or self.l3 is not L3State.NONE


class TreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree = TreeCore(LRU(), MAX_PAGES)
        self.pages: dict[bytes, Page] = {}
        self.locks: list[tuple[bytes, Node, int, bytes]] = []
        """(namespace, end node, pages up to it, key of the last) of each lock."""
        self.next_page = 0
        self.clock = 0

    # ── the model ────────────────────────────────────────────────────────────────────────────────

    def locked_keys(self) -> set[bytes]:
        out = set()
        for _, _, _, key in self.locks:
            page: bytes | None = key
            while page is not None:
                out.add(page)
                page = self.parent_key(page)
        return out

    def parent_key(self, key: bytes) -> bytes | None:
        return self.parents.get(key)

    @property
    def parents(self) -> dict[bytes, bytes | None]:
        by_page = {id(page): key for key, page in self.pages.items()}
        return {k: by_page[id(p.parent)] if p.parent else None for k, p in self.pages.items()}

    def sync_pruned(self) -> None:
        """Forget in the model what left the tree; only what is allowed to leave."""
        there = {key for node in self.nodes() for key in self.split(node.keys)}
        locked = self.locked_keys()
        for key in set(self.pages) - there:
            page = self.pages[key]
            assert key not in locked
            assert not page.where
            assert page.l3 is not L3State.QUEUED
        for key in set(self.pages) - there:
            del self.pages[key]
        assert set(self.pages) == there
        assert all(p.parent is None or p.parent in self.pages.values() for p in self.pages.values())

    def nodes(self) -> list[Node]:
        todo = list(self.tree._roots.values())
        out = []
        while todo:
            node = todo.pop()
            todo.extend((node.children or {}).values())
            if not node.is_root:
                out.append(node)
        return out

    @staticmethod
    def split(keys: bytes) -> list[bytes]:
        return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]

    def new_extents(self, tier: Tier, count: int) -> tuple[Extents, list[list[tuple[str, int]]]]:
        """Two pools, the first one in two extents if there are two pages."""
        extents: list[CacheExtentRef] = []
        pages: list[list[tuple[str, int]]] = [[] for _ in range(count)]
        for pool, cuts in (("kv", [count // 2, count - count // 2]), ("state", [count])):
            at = 0
            for size in cuts:
                ids = [self.next_page + 3 * i for i in range(size)]
                self.next_page += 3 * size
                for page in ids:
                    pages[at].append((pool, page))
                    at += 1
                if size:
                    extents.append(
                        CacheExtentRef(
                            1, self.next_page, tier, pool, tuple(PageRun(page, 1) for page in ids)
                        )
                    )
        return tuple(extents), pages

    @staticmethod
    def flat(extents: Extents) -> list[list[tuple[str, int]]]:
        out: list[list[tuple[str, int]]] = [[] for _ in range(page_count(extents))]
        for pool in sorted({e.pool for e in extents}):
            runs = [run for e in extents if e.pool == pool for run in e.page_runs]
            ids = [run.first_page + i for run in runs for i in range(run.page_count)]
            for i, page in enumerate(ids):
                out[i].append((pool, page))
        return out

    def pick(self, data: st.DataObject) -> Node:
        nodes = sorted(self.nodes(), key=lambda n: (n.namespace, n.first_page_index, n.keys))
        return data.draw(st.sampled_from(nodes))

    # ── rules ────────────────────────────────────────────────────────────────────────────────────

    @rule(namespace=spaces, word=words, cut=st.integers(0, 7), data=st.data())
    def insert(
        self, namespace: bytes, word: tuple[int, ...], cut: int, data: st.DataObject
    ) -> None:
        keys = keys_of(namespace, word)
        cut = min(cut, len(keys) - 1)
        while cut and keys[cut - 1] not in self.pages:
            cut -= 1
        before = set(self.pages)
        parent = keys[cut - 1] if cut else root_key(namespace)
        run = KeyRun(namespace, parent, cut, b"".join(keys[cut:]))
        nodes = self.tree.insert(run)
        assert b"".join(node.keys for node in nodes) == run.keys
        assert self.tree.key_run(nodes) == run
        for i, key in enumerate(keys[cut:], cut):
            if key not in self.pages:
                self.pages[key] = Page(self.pages[keys[i - 1]] if i else None)
            self.pages[key].used = self.clock
        # A new node must be locked or made resident; both are tried.
        choice = data.draw(st.sampled_from(["lock", "L1", "L2", "L3", "queued"]))
        if choice == "lock":
            self.do_lock(nodes[-1])
        for node in nodes:
            if choice in ("L1", "L2") and not node.extents(Tier[choice]):
                self.do_set(node, Tier[choice])
            elif choice in ("L3", "queued"):
                self.do_l3(node, L3State.STORED if choice == "L3" else L3State.QUEUED)
        self.sync_pruned()
        if before - set(self.pages):
            assert self.tree.pages >= min(MAX_PAGES, len(before))

    @rule(namespace=spaces, word=words)
    def match(self, namespace: bytes, word: tuple[int, ...]) -> None:
        self.clock += 1
        keys = keys_of(namespace, word)
        expected = 0
        while expected < len(keys) and (page := self.pages.get(keys[expected])):
            if not page.is_resident:
                break
            expected += 1
        match = self.tree.match(namespace, b"".join(keys))
        assert match.page_count == expected
        assert b"".join(n.keys for n in match.path) == b"".join(keys[:expected])
        for key in keys[:expected]:
            self.pages[key].used = self.clock

    @rule(namespace=spaces, word=words)
    def find(self, namespace: bytes, word: tuple[int, ...]) -> None:
        keys = keys_of(namespace, word)
        expected = 0
        while expected < len(keys) and keys[expected] in self.pages:
            expected += 1
        found = b"".join(n.keys for n in self.tree.find(namespace, b"".join(keys)))
        assert found.startswith(b"".join(keys[:expected]))

    def do_lock(self, node: Node) -> None:
        self.tree.lock(node)
        self.locks.append((node.namespace, node, node.last_page_index + 1, node.last_key))

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def lock(self, data: st.DataObject) -> None:
        self.do_lock(self.pick(data))

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        _, node, _, key = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
        assert node.last_key == key
        self.tree.unlock(node)
        self.sync_pruned()

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def span(self, data: st.DataObject) -> None:
        """An operation finds its pages again, whatever was split since."""
        _, end, total, _ = data.draw(st.sampled_from(self.locks))
        count = data.draw(st.integers(1, total))
        nodes = self.tree.span(end, count)
        assert nodes[-1] is end
        assert sum(n.page_count for n in nodes) == count
        assert nodes[0].first_page_index == total - count
        self.tree.key_run(nodes)

    def do_set(self, node: Node, tier: Tier) -> None:
        extents, pages = self.new_extents(tier, node.page_count)
        self.tree.set_resident(node, tier, extents)
        for key, page in zip(self.split(node.keys), pages, strict=True):
            assert tier not in self.pages[key].where
            self.pages[key].where[tier] = page

    @precondition(lambda self: self.pages)
    @rule(data=st.data(), tier=tiers)
    def set_resident(self, data: st.DataObject, tier: Tier) -> None:
        node = self.pick(data)
        if not node.extents(tier):
            self.do_set(node, tier)

    @precondition(lambda self: self.pages)
    @rule(data=st.data(), tier=tiers)
    def clear_resident(self, data: st.DataObject, tier: Tier) -> None:
        node = self.pick(data)
        keys = self.split(node.keys)
        expected = [self.pages[key].where.pop(tier) for key in keys if node.extents(tier)]
        assert self.flat(self.tree.clear_resident(node, tier)) == expected
        self.sync_pruned()

    def do_l3(self, node: Node, state: L3State) -> None:
        for key in self.split(node.keys):
            self.pages[key].l3 = state
        self.tree.set_l3(node, state)

    @precondition(lambda self: self.pages)
    @rule(data=st.data(), state=st.sampled_from(list(L3State)))
    def set_l3(self, data: st.DataObject, state: L3State) -> None:
        self.do_l3(self.pick(data), state)
        self.sync_pruned()

    @rule(namespace=spaces, word=words)
    def lost_l3(self, namespace: bytes, word: tuple[int, ...]) -> None:
        """L3 evicts one chain from its end up."""
        keys = keys_of(namespace, word)[::-1]
        ends = {node.last_key for node in self.nodes()}
        lost = self.tree.lost_l3(b"".join(keys))
        known = [k for k in keys if k in self.pages and self.pages[k].l3 is L3State.STORED]
        assert lost <= len(known)
        assert lost == 0 or known
        if known and known[0] in ends:
            assert lost > 0
        still = {k for n in self.nodes() if n.l3 is L3State.STORED for k in self.split(n.keys)}
        for key in known:
            if key not in still:
                self.pages[key].l3 = L3State.NONE
        assert sum(key not in still for key in known) == lost
        self.sync_pruned()

    @rule(tier=tiers, pages=st.integers(0, 6))
    def evict(self, tier: Tier, pages: int) -> None:
        locked = self.locked_keys()
        free = {k for k, p in self.pages.items() if tier in p.where and k not in locked}
        assert self.tree.evictable(tier) == len(free)
        victims = self.tree.evict(tier, pages)
        taken = 0
        for node, extents in victims:
            keys = self.split(node.keys)
            assert self.flat(extents) == [self.pages[k].where[tier] for k in keys]
            assert self.tree.key_run([node]).keys == node.keys
            for key in keys[::-1]:
                self.check_victim(key, tier, free)
                del self.pages[key].where[tier]
                free.discard(key)
                taken += 1
        assert taken == min(pages, taken + len(free))
        self.sync_pruned()

    def check_victim(self, key: bytes, tier: Tier, free: set[bytes]) -> None:
        """No child in the tier, and no other page that may go was used less recently."""
        assert key in free
        has_child = {id(p.parent) for p in self.pages.values() if tier in p.where and p.parent}
        assert id(self.pages[key]) not in has_child
        leaves = [k for k in free if id(self.pages[k]) not in has_child]
        assert self.pages[key].used == min(self.pages[k].used for k in leaves)

    # ── invariants ───────────────────────────────────────────────────────────────────────────────

    @invariant()
    def same_as_the_model(self) -> None:
        self.tree.check_integrity()
        locked = self.locked_keys()
        seen = set()
        for node in self.nodes():
            flat = {t: self.flat(node.extents(t)) for t in (Tier.L1, Tier.L2) if node.extents(t)}
            for i, key in enumerate(self.split(node.keys)):
                page = self.pages[key]
                seen.add(key)
                assert page.where == {tier: pages[i] for tier, pages in flat.items()}
                assert page.l3 is node.l3
                assert page.used == node.last_used
                assert (node.locks > 0) == (key in locked)
        assert seen == set(self.pages)
        assert self.tree.pages == len(seen)
        for tier in (Tier.L1, Tier.L2):
            assert self.tree.resident(tier) == sum(tier in p.where for p in self.pages.values())


TreeMachine.TestCase.settings = settings(
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestTreeAgainstModel = TreeMachine.TestCase
