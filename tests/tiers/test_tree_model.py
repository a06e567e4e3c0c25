"""TreeCore against a model that keeps every page by itself."""

from __future__ import annotations

import hashlib
from random import Random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvstrata.boundary import KEY_BYTES, KeyRun
from kvstrata.handles import CacheExtentRef, Extents, PageRun, Tier, page_count
from kvstrata.tiers.keys import root_key
from kvstrata.tiers.node import L3State, Node
from kvstrata.tiers.policies import LRU
from kvstrata.tiers.tree import TreeCore

NAMESPACES = [hashlib.sha256(name).digest() for name in (b"one", b"two")]
TIERS = (Tier.L1, Tier.L2)
MAX_PAGES = 24


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


class Model:
    """A tree, the same as single pages, and every operation on both with all choices drawn."""

    def __init__(self) -> None:
        self.tree = TreeCore(LRU(), MAX_PAGES)
        self.pages: dict[bytes, Page] = {}
        self.locks: list[tuple[Node, int, bytes]] = []
        """(end node, pages up to it, key of the last) of each lock."""
        self.next_page = 0
        self.clock = 0

    # ── the model ────────────────────────────────────────────────────────────────────────────────

    def locked_keys(self) -> set[bytes]:
        out = set()
        for _, _, key in self.locks:
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

    def word(self, rng: Random) -> tuple[int, ...]:
        """Tokens, one a page; they are bits, so that prefixes collide all the time."""
        return tuple(rng.randrange(2) for _ in range(rng.randint(1, 8)))

    def pick(self, rng: Random) -> Node | None:
        nodes = sorted(self.nodes(), key=lambda n: (n.namespace, n.first_page_index, n.keys))
        return rng.choice(nodes) if nodes else None

    # ── operations ───────────────────────────────────────────────────────────────────────────────

    def insert(self, rng: Random) -> None:
        namespace = rng.choice(NAMESPACES)
        keys = keys_of(namespace, self.word(rng))
        cut = rng.randrange(len(keys))
        while cut and keys[cut - 1] not in self.pages:
            cut -= 1
        before, hollow = len(self.pages), sum(not p.is_resident for p in self.pages.values())
        parent = keys[cut - 1] if cut else root_key(namespace)
        run = KeyRun(namespace, parent, cut, b"".join(keys[cut:]))
        nodes = self.tree.insert(run)
        assert b"".join(node.keys for node in nodes) == run.keys
        assert self.tree.key_run(nodes) == run
        for i, key in enumerate(keys[cut:], cut):
            if key not in self.pages:
                self.pages[key] = Page(self.pages[keys[i - 1]] if i else None)
            self.pages[key].used = self.clock
        added = len(self.pages) - before
        self.sync_pruned()
        least = min(MAX_PAGES, before + added) - hollow  # which go with the leaves below them
        assert len(self.pages) >= least, "forgotten without need"
        if len(self.pages) > MAX_PAGES:
            spared = [n for n in self.nodes() if n.may_leave(Tier.L3) and n is not nodes[-1]]
            assert not spared, "more than max_pages, and not for want of pages to forget"
        choice = rng.choice(["lock", "L1", "L1", "L2", "L3", "QUEUED"])
        if choice == "lock":
            self.do_lock(nodes[-1])
        for node in nodes:
            if choice in ("L1", "L2") and not node.extents(Tier[choice]):
                self.do_set(node, Tier[choice])
            elif choice in ("L3", "QUEUED"):
                self.do_l3(node, L3State.STORED if choice == "L3" else L3State.QUEUED)

    def match(self, rng: Random) -> None:
        self.clock += 1
        namespace = rng.choice(NAMESPACES)
        keys = keys_of(namespace, self.word(rng))
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

    def find(self, rng: Random) -> None:
        namespace = rng.choice(NAMESPACES)
        keys = keys_of(namespace, self.word(rng))
        expected = 0
        while expected < len(keys) and keys[expected] in self.pages:
            expected += 1
        found = self.tree.find(namespace, b"".join(keys))
        assert b"".join(n.keys for n in found).startswith(b"".join(keys[:expected]))
        assert sum(n.page_count for n in found[:-1]) <= expected

    def do_lock(self, node: Node) -> None:
        self.tree.lock(node)
        self.locks.append((node, node.last_page_index + 1, node.last_key))

    def lock(self, rng: Random) -> None:
        if len(self.locks) < 4 and (node := self.pick(rng)):
            self.do_lock(node)

    def unlock(self, rng: Random) -> None:
        if self.locks:
            node, _, key = self.locks.pop(rng.randrange(len(self.locks)))
            assert node.last_key == key
            self.tree.unlock(node)

    def span(self, rng: Random) -> None:
        """An operation finds its pages again, whatever was split since."""
        if self.locks:
            end, total, _ = rng.choice(self.locks)
            count = rng.randint(1, total)
            nodes = self.tree.span(end, count)
            assert nodes[-1] is end
            assert sum(n.page_count for n in nodes) == count
            assert self.tree.key_run(nodes).first_page_index == total - count

    def do_set(self, node: Node, tier: Tier) -> None:
        extents, pages = self.new_extents(tier, node.page_count)
        self.tree.set_resident(node, tier, extents)
        for key, page in zip(self.split(node.keys), pages, strict=True):
            assert tier not in self.pages[key].where
            self.pages[key].where[tier] = page

    def set_resident(self, rng: Random) -> None:
        node, tier = self.pick(rng), rng.choice(TIERS)
        if node and not node.extents(tier):
            self.do_set(node, tier)

    def clear_resident(self, rng: Random) -> None:
        node, tier = self.pick(rng), rng.choice(TIERS)
        if node:
            keys = self.split(node.keys)
            expected = [self.pages[key].where.pop(tier) for key in keys if node.extents(tier)]
            assert self.flat(self.tree.clear_resident(node, tier)) == expected

    def do_l3(self, node: Node, state: L3State) -> None:
        for key in self.split(node.keys):
            self.pages[key].l3 = state
        self.tree.set_l3(node, state)

    def set_l3(self, rng: Random) -> None:
        if node := self.pick(rng):
            self.do_l3(node, rng.choice(list(L3State)))

    def lost_l3(self, rng: Random) -> None:
        """L3 evicts one chain from its end up."""
        keys = keys_of(rng.choice(NAMESPACES), self.word(rng))[::-1]
        stored = [k for k in keys if k in self.pages and self.pages[k].l3 is L3State.STORED]
        reached = bool(stored) and stored[0] in {node.last_key for node in self.nodes()}
        lost = self.tree.lost_l3(b"".join(keys))
        still = {k for n in self.nodes() if n.l3 is L3State.STORED for k in self.split(n.keys)}
        gone = [key for key in stored if key not in still]
        assert lost == len(gone)
        assert gone or not reached
        for key in gone:
            self.pages[key].l3 = L3State.NONE

    def evict(self, rng: Random) -> None:
        tier, pages = rng.choice(TIERS), rng.randint(0, 6)
        locked = self.locked_keys()
        unlocked = sum(tier in p.where and k not in locked for k, p in self.pages.items())
        assert self.tree.evictable(tier) == unlocked
        free = self.may_leave(tier, locked)
        left = min(pages, len(free))
        for node, extents in self.tree.evict(tier, pages):
            keys = self.split(node.keys)
            assert self.flat(extents) == [self.pages[k].where[tier] for k in keys]
            assert self.tree.key_run([node]).keys == node.keys
            for key in keys[::-1]:
                self.check_victim(key, tier, free)
                del self.pages[key].where[tier]
                free.discard(key)
            left -= len(keys)
        assert left == 0

    def may_leave(self, tier: Tier, locked: set[bytes]) -> set[bytes]:
        """Pages that can be evicted, one after the other: no lock keeps them in `tier`, nor any
        page below them. A locked page stays in the best tier it is in."""
        inside = {key: page for key, page in self.pages.items() if tier in page.where}
        kept = {
            id(page)
            for key, page in inside.items()
            if key in locked and not (tier is Tier.L2 and Tier.L1 in page.where)
        }
        ids = {id(page) for page in inside.values()}
        while above := {id(p.parent) for p in inside.values() if id(p) in kept} & (ids - kept):
            kept |= above
        return {key for key, page in inside.items() if id(page) not in kept}

    def check_victim(self, key: bytes, tier: Tier, free: set[bytes]) -> None:
        """No child in the tier, and no other page that may go was used less recently."""
        assert key in free
        parents = {id(p.parent) for p in self.pages.values() if tier in p.where and p.parent}
        assert id(self.pages[key]) not in parents
        leaves = [k for k in free if id(self.pages[k]) not in parents]
        assert self.pages[key].used == min(self.pages[k].used for k in leaves)

    OPERATIONS = (
        *(insert, insert, insert, match, match, match, find, lock, unlock, unlock, span),
        *(set_resident, clear_resident, set_l3, lost_l3, evict, evict),
    )

    def step(self, rng: Random) -> None:
        rng.choice(self.OPERATIONS)(self, rng)
        self.sync_pruned()
        self.check()

    def check(self) -> None:
        """Both are the same, and the tree is sound."""
        self.tree.check_integrity()
        locked = self.locked_keys()
        seen = set()
        parents = {id(page.parent) for page in self.pages.values()}
        for key, page in self.pages.items():
            needed = id(page) in parents or page.is_resident or key in locked
            assert needed, "a leaf that is nowhere should be pruned"
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


class TreeMachine(RuleBasedStateMachine):
    """Short walks that hypothesis can shrink."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    @rule(rng=st.randoms(use_true_random=False))
    def step(self, rng: Random) -> None:
        self.model.step(rng)


TestTreeAgainstModel = TreeMachine.TestCase


@pytest.mark.no_cover  # the short walks have been everywhere
@pytest.mark.parametrize("walk", range(40))
def test_long_walk(walk: int, seed: int) -> None:
    """200 operations each; most of them in a tree that is full."""
    model = Model()
    rng = Random(seed * 1000 + walk)
    for _ in range(200):
        model.step(rng)
