"""The prefix tree: what its contract says, case by case (the rest: `test_tree_model`)."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import pytest

from kvstrata.boundary import KeyRun
from kvstrata.errors import IntegrityError
from kvstrata.handles import CacheExtentRef, Extents, PageRun, Tier
from kvstrata.tiers.keys import KeyChain
from kvstrata.tiers.node import L3State, Node
from kvstrata.tiers.policies import LRU
from kvstrata.tiers.tree import TreeCore

SPACE, OTHER = bytes(32), bytes([1]) * 32


def run_of(*tokens: int, namespace: bytes = SPACE) -> KeyRun:
    """One token a page."""
    return KeyChain(namespace, 1, array("i", tokens)).run()


def extents(tier: Tier, first: int, count: int, pool: str = "kv") -> Extents:
    return (CacheExtentRef(1, 7, tier, pool, (PageRun(first, count),)),)


@pytest.fixture
def tree() -> Iterator[TreeCore]:
    made = TreeCore(LRU(), max_pages=1000)
    yield made
    made.check_integrity()


def put(tree: TreeCore, run: KeyRun, tier: Tier = Tier.L1, first: int = 0) -> list[Node]:
    """Insert, and make resident what is not."""
    nodes = tree.insert(run)
    for node in nodes:
        if not node.extents(tier):
            at = first + node.first_page_index
            tree.set_resident(node, tier, extents(tier, at, node.page_count))
    return nodes


def pages(found: Extents) -> list[int]:
    return [r.first_page + i for e in found for r in e.page_runs for i in range(r.page_count)]


def test_match_of_nothing(tree: TreeCore) -> None:
    assert tree.match(SPACE, run_of(1, 2).keys).path == []
    assert tree.match(SPACE, b"").page_count == 0
    assert tree.find(SPACE, b"") == []
    assert tree.namespaces() == []


def test_match_splits_where_it_ends(tree: TreeCore) -> None:
    put(tree, run_of(1, 2, 3, 4), first=100)
    match = tree.match(SPACE, run_of(1, 2, 9).keys)
    assert match.page_count == 2
    assert [pages(node.l1) for node in match.path] == [[100, 101]]
    assert tree.nodes == 2
    whole = tree.match(SPACE, run_of(1, 2, 3, 4, 5).keys)
    assert [pages(node.l1) for node in whole.path] == [[100, 101], [102, 103]]


def test_namespaces_are_disjoint(tree: TreeCore) -> None:
    """B016, B017: equal tokens under another namespace are other pages."""
    put(tree, run_of(1, 2, 3))
    assert tree.match(OTHER, run_of(1, 2, 3, namespace=OTHER).keys).page_count == 0
    assert tree.match(OTHER, run_of(1, 2, 3).keys).page_count == 0
    put(tree, run_of(1, 2, 3, namespace=OTHER))
    assert tree.pages == 6
    assert set(tree.namespaces()) == {SPACE, OTHER}


def test_a_run_needs_its_parent_in_its_namespace(tree: TreeCore) -> None:
    """B023: no page under a parent that is not the page before it."""
    chain = run_of(1, 2, 3, 4)
    with pytest.raises(IntegrityError, match="page 1"):
        tree.insert(chain.slice(2, 4))
    put(tree, chain)
    wrong = [
        KeyRun(OTHER, chain.key(1), 2, chain.keys[64:]),
        KeyRun(SPACE, chain.key(1), 3, chain.keys[64:]),
        KeyRun(SPACE, chain.parent, 2, chain.keys[64:]),
        KeyRun(SPACE, chain.key(1), 0, chain.keys[64:]),
        KeyRun(OTHER, chain.parent, 0, chain.keys),
    ]
    for run in wrong:
        with pytest.raises(IntegrityError, match="parent"):
            tree.insert(run)
    assert tree.namespaces() == [SPACE]


def test_insert_below_the_middle_of_a_node(tree: TreeCore) -> None:
    """The parent is found when it does not end a node (any more)."""
    chain = run_of(1, 2, 3, 4)
    put(tree, chain, first=50)
    nodes = tree.insert(run_of(1, 2, 8).slice(2, 3))
    assert [node.first_page_index for node in nodes] == [2]
    tree.lock(nodes[-1])
    assert tree.find(SPACE, chain.keys)[0].page_count == 2


def test_insert_returns_the_run_and_nothing_else(tree: TreeCore) -> None:
    put(tree, run_of(1, 2, 3, 4, 5, 6))
    middle = tree.insert(run_of(1, 2, 3, 4, 5, 6).slice(2, 4))
    assert [(n.first_page_index, n.page_count) for n in middle] == [(2, 2)]
    assert tree.insert(run_of()) == []
    assert tree.pages == 6


def test_match_stops_at_a_hole(tree: TreeCore) -> None:
    first, second, third = run_of(1), run_of(1, 2), run_of(1, 2, 3)
    put(tree, first)
    put(tree, second)
    put(tree, third)
    tree.clear_resident(tree.find(SPACE, third.keys)[1], Tier.L1)
    assert tree.match(SPACE, third.keys).page_count == 1
    assert len(tree.find(SPACE, third.keys)) == 3


def test_l3_only_pages_match(tree: TreeCore) -> None:
    (node,) = tree.insert(run_of(1, 2))
    tree.set_l3(node, L3State.QUEUED)
    assert tree.match(SPACE, run_of(1, 2).keys).page_count == 2
    tree.set_l3(node, L3State.STORED)
    tree.invalidate_l3(node)
    assert tree.pages == 0
    assert tree.namespaces() == []


def test_lower_part_keeps_identity_and_span_finds_all(tree: TreeCore) -> None:
    (end,) = put(tree, run_of(1, 2, 3, 4, 5, 6))
    tree.lock(end)
    tree.match(SPACE, run_of(1, 2, 9).keys)
    tree.match(SPACE, run_of(1, 2, 3, 4, 9).keys)
    assert end.first_page_index == 4
    assert [n.page_count for n in tree.span(end, 6)] == [2, 2, 2]
    assert [n.page_count for n in tree.span(end, 3)] == [1, 2]
    assert tree.span(end, 0) == []
    assert all(node.locks == 1 for node in tree.span(end, 6))
    with pytest.raises(IntegrityError, match="above the root"):
        tree.span(end, 7)
    tree.unlock(end)
    assert not any(node.locks for node in tree.span(end, 6))


def test_locked_pages_stay(tree: TreeCore) -> None:
    put(tree, run_of(1, 2, 3))
    (tail,) = put(tree, run_of(1, 2, 3, 4).slice(3, 4))
    middle = tree.match(SPACE, run_of(1, 2).keys).path[-1]
    tree.lock(middle)
    assert tree.evictable(Tier.L1) == 2
    assert sum(n.page_count for n, _ in tree.evict(Tier.L1, 10)) == 2
    assert tree.match(SPACE, run_of(1, 2, 3).keys).page_count == 2
    tree.unlock(middle)
    assert tree.evictable(Tier.L1) == 2
    with pytest.raises(IntegrityError, match="not locked"):
        tree.unlock(middle)
    with pytest.raises(IntegrityError, match="not a node"):
        tree.lock(tail)


def test_a_lock_keeps_pages_in_their_best_tier(tree: TreeCore) -> None:
    """What is locked and in L1 may leave L2, or requests could starve the backups of room there;
    what is in L2 only may not, nor what is above it."""
    (upper,) = put(tree, run_of(1, 2))
    (lower,) = put(tree, run_of(1, 2, 3).slice(2, 3), Tier.L2)
    tree.set_resident(upper, Tier.L2, extents(Tier.L2, 0, 2))
    tree.lock(lower)
    assert tree.evict(Tier.L2, 9) == []
    tree.set_resident(lower, Tier.L1, extents(Tier.L1, 2, 1))
    assert tree.evictable(Tier.L2) == 0
    assert [pages(found) for _, found in tree.evict(Tier.L2, 2)] == [[2], [1]]
    assert tree.evict(Tier.L1, 9) == []
    tree.unlock(lower)
    assert tree.evictable(Tier.L2) == 1


def test_evict_takes_the_tail_and_no_more(tree: TreeCore) -> None:
    put(tree, run_of(1, 2, 3, 4, 5), first=10)
    victims = tree.evict(Tier.L1, 2)
    assert [pages(found) for _, found in victims] == [[13, 14]]
    assert tree.key_run([node for node, _ in victims]) == run_of(1, 2, 3, 4, 5).slice(3, 5)
    assert tree.match(SPACE, run_of(1, 2, 3, 4, 5).keys).page_count == 3
    assert tree.evict(Tier.L1, 0) == []
    assert tree.evict(Tier.L2, 5) == []


def test_eviction_order_is_of_last_use(tree: TreeCore) -> None:
    for branch in (1, 2, 3):
        tree.match(SPACE, run_of(0, branch).keys)
        put(tree, run_of(0, branch), first=10 * branch)
    tree.match(SPACE, run_of(0, 1).keys)
    order = [pages(found) for _, found in tree.evict(Tier.L1, 4)]
    assert order == [[21], [31], [11], [10]]


def test_evicted_pages_that_are_elsewhere_stay_known(tree: TreeCore) -> None:
    (node,) = put(tree, run_of(1, 2))
    tree.set_resident(node, Tier.L2, extents(Tier.L2, 5, 2))
    tree.evict(Tier.L1, 2)
    assert tree.match(SPACE, run_of(1, 2).keys).page_count == 2
    assert (tree.resident(Tier.L1), tree.resident(Tier.L2)) == (0, 2)
    tree.set_l3(node, L3State.STORED)
    tree.evict(Tier.L2, 2)
    assert tree.match(SPACE, run_of(1, 2).keys).page_count == 2


def test_all_pools_of_a_node_agree(tree: TreeCore) -> None:
    (node,) = tree.insert(run_of(1, 2, 3))
    both = (*extents(Tier.L1, 0, 3), *extents(Tier.L1, 40, 3, "state"))
    for wrong in ((), extents(Tier.L1, 0, 2), (*both, *extents(Tier.L1, 9, 1, "state"))):
        with pytest.raises(IntegrityError, match="node of 3"):
            tree.set_resident(node, Tier.L1, wrong)
    tree.set_resident(node, Tier.L1, both)
    with pytest.raises(IntegrityError, match="already"):
        tree.set_resident(node, Tier.L1, both)
    ((victim, taken),) = tree.evict(Tier.L1, 1)
    assert pages(taken) == [2, 42]
    assert victim.page_count == 1
    assert tree.clear_resident(tree.find(SPACE, run_of(1).keys)[0], Tier.L2) == ()


def test_max_pages_forgets_what_is_only_in_l3() -> None:
    tree = TreeCore(LRU(), max_pages=6)
    for branch in (1, 2, 3, 4):
        tree.match(SPACE, run_of(branch).keys)
        for node in tree.insert(run_of(branch, 7, 8)):
            tree.set_l3(node, L3State.STORED)
        tree.check_integrity()
        assert tree.pages <= 6
    assert tree.match(SPACE, run_of(1).keys).page_count == 0
    assert tree.match(SPACE, run_of(4, 7, 8).keys).page_count == 3
    # What is in L1 is never forgotten; the pools bound it.
    put(tree, run_of(*range(20, 30)))
    assert tree.pages == 10
    assert tree.match(SPACE, run_of(*range(20, 30)).keys).page_count == 10
    tree.check_integrity()


def test_requests_with_salts_leave_no_roots_behind(tree: TreeCore) -> None:
    for i in range(200):
        put(tree, run_of(1, 2, namespace=i.to_bytes(32, "big")))
        tree.evict(Tier.L1, 1)
        tree.evict(Tier.L1, 1)
        assert tree.namespaces() == []


def test_candidates_are_swept(tree: TreeCore) -> None:
    """Entries of pruned nodes do not pile up behind one that is locked or young."""
    (kept,) = put(tree, run_of(5))
    tree.set_l3(kept, L3State.STORED)
    for i in range(1000):
        (node,) = tree.insert(run_of(6, i))[-1:] if i else put(tree, run_of(6, i))
        if i:
            tree.set_resident(node, Tier.L1, extents(Tier.L1, i, node.page_count))
            tree.clear_resident(node, Tier.L1)
    assert max(len(queue) for queue in tree._queues) < 200


def test_l3_evicts_by_itself(tree: TreeCore) -> None:
    """B049, C: children before parents; what is not found is left to the next fetch."""
    chain = run_of(1, 2, 3, 4)
    (node,) = tree.insert(chain)
    tree.set_l3(node, L3State.STORED)
    assert tree.lost_l3(chain.key(1)) == 0
    assert tree.lost_l3(chain.key(3) + chain.key(2)) == 2
    assert tree.lost_l3(bytes(32)) == 0
    assert tree.match(SPACE, chain.keys).page_count == 2


def test_key_run_of_strangers(tree: TreeCore) -> None:
    one, two = put(tree, run_of(1)), put(tree, run_of(2))
    with pytest.raises(IntegrityError, match="consecutive"):
        tree.key_run([*one, *two])


def test_integrity_check_sees_a_broken_tree() -> None:
    """The check is real: each of these is found."""
    breakages = {
        "nodes counted": lambda t, n: setattr(t, "nodes", 7),
        "pages counted": lambda t, n: setattr(t, "pages", 7),
        "counts its children": lambda t, n: setattr(n.parent, "l1_children", 0),
        "extents": lambda t, n: setattr(n, "l1", extents(Tier.L1, 0, 9)),
        "extents of L1": lambda t, n: setattr(n, "l1", extents(Tier.L2, 0, 3)),
        "locks of its children": lambda t, n: setattr(n, "locks", 1),
        "evictable": lambda t, n: t._evictable.reverse(),
        "resident": lambda t, n: t._resident.reverse(),
        "may leave and is queued": lambda t, n: t._queues[0].pop(),
        "follows on": lambda t, n: setattr(n, "first_page_index", 4),
        "knows if it is queued": lambda t, n: setattr(n, "queued", 0),
        "namespace": lambda t, n: setattr(n, "namespace", OTHER),
        "index by last key": lambda t, n: t._by_last_key.clear(),
    }
    for what, breakage in breakages.items():
        tree = TreeCore(LRU(), 100)
        (node,) = put(tree, run_of(1, 2, 3))
        tree.check_integrity()
        breakage(tree, node)
        with pytest.raises(IntegrityError, match=what):
            tree.check_integrity()


def test_deep_and_wide(tree: TreeCore) -> None:
    """No recursion: 3,000 nodes in one chain."""
    chain = run_of(*range(3000))
    for i in range(3000):
        put(tree, chain.slice(i, i + 1))
    end = tree.match(SPACE, chain.keys).path[-1]
    tree.lock(end)
    tree.unlock(end)
    assert sum(node.page_count for node, _ in tree.evict(Tier.L1, 3000)) == 3000
