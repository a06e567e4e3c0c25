"""Policies: small, and named in the config."""

from __future__ import annotations

import pytest

from kvstrata.errors import ConfigError
from kvstrata.handles import CacheExtentRef, PageRun, StagingMode, Tier
from kvstrata.tiers.node import L3State, Node
from kvstrata.tiers.policies import (
    LRU,
    POLICIES,
    AlwaysRestore,
    EvictionPolicy,
    WaitComplete,
    WriteThrough,
    policy_class,
)
from kvstrata.tiers.tree import TreeCore

CACHE, BUFFER = StagingMode.CACHE, StagingMode.BUFFER_ONLY


def node(*, l2: bool = False, l3: L3State = L3State.NONE) -> Node:
    made = Node(None, bytes(32), bytes(32), 0)
    made.l3 = l3
    if l2:
        made.l2 = (CacheExtentRef(1, 1, Tier.L2, "kv", (PageRun(0, 1),)),)
    return made


@pytest.mark.parametrize(
    ("there", "ready", "mode", "target"),
    [
        (node(), Tier.L1, CACHE, Tier.L2),
        (node(l2=True), Tier.L1, CACHE, None),
        (node(l2=True), Tier.L2, CACHE, Tier.L3),
        (node(l2=True, l3=L3State.QUEUED), Tier.L2, CACHE, None),
        (node(l2=True, l3=L3State.STORED), Tier.L2, CACHE, None),
        (node(), Tier.L1, BUFFER, Tier.L3),
        (node(l3=L3State.QUEUED), Tier.L1, BUFFER, None),
        (node(l3=L3State.STORED), Tier.L1, BUFFER, None),
    ],
)
def test_write_through(there: Node, ready: Tier, mode: StagingMode, target: Tier | None) -> None:
    """One tier at a time in cache mode, past L2 in buffer_only, nothing twice."""
    assert WriteThrough().backup_target(there, ready, mode) is target


def test_lru_order() -> None:
    early, late = node(), node()
    early.last_used, late.last_used = 3, 9
    assert LRU().priority(early) < LRU().priority(late)


def test_wait_complete_and_always_restore() -> None:
    assert WaitComplete().wanted(7) == 7
    assert AlwaysRestore().restored(7, 64, None) == 7


@pytest.mark.parametrize("kind", list(POLICIES))
def test_every_policy_has_a_name(kind: str) -> None:
    for name, cls in POLICIES[kind].items():
        assert policy_class(kind, name) is cls
        assert cls()


@pytest.mark.parametrize("kind", list(POLICIES))
def test_unknown_policy_lists_the_known(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"policies.{kind}.*'best'") as caught:
        policy_class(kind, "best")
    assert all(name in caught.value.remedy for name in POLICIES[kind])


def test_another_policy_drops_in() -> None:
    """Most recently used first, by subclassing one method."""

    class MRU(EvictionPolicy):
        def priority(self, node: Node) -> float:
            return -node.last_used

    from kvstrata.tiers.keys import KeyChain

    order = []
    for policy in (LRU(), MRU()):
        tree = TreeCore(policy, 100)
        for i in (1, 2, 3):
            run = KeyChain(bytes(32), 1, i.to_bytes(4, "little")).run()
            tree.match(run.namespace, run.keys)
            (made,) = tree.insert(run)
            extent = CacheExtentRef(1, i, Tier.L1, "kv", (PageRun(i, 1),))
            tree.set_resident(made, Tier.L1, (extent,))
        order.append([extents[0].generation for _, extents in tree.evict(Tier.L1, 3)])
    assert order == [[1, 2, 3], [3, 2, 1]]
