"""The invariants of `TreeCore`, checked from its whole state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvstrata.boundary import KEY_BYTES
from kvstrata.errors import IntegrityError
from kvstrata.handles import Tier
from kvstrata.tiers.node import PRUNED, Node, check_covers

if TYPE_CHECKING:
    from kvstrata.tiers.tree import TreeCore


def check_tree(tree: TreeCore) -> None:
    """Raises `IntegrityError` naming the first invariant that does not hold."""
    nodes = list(_walk(tree))
    pages = [node for node in nodes if not node.is_root]
    for node in nodes:
        _check_links(node)
        _check_residency(node)
    by_last_key = {node.last_key: node for node in nodes}
    _holds(tree._by_last_key == by_last_key, "the index by last key is that of the nodes")
    _holds(len(by_last_key) == len(nodes), "no two nodes end with one page")
    _holds(tree.nodes == len(pages), f"{tree.nodes} nodes counted, {len(pages)} there")
    count = sum(node.page_count for node in pages)
    _holds(tree.pages == count, f"{tree.pages} pages counted, {count} there")
    for tier in (Tier.L1, Tier.L2):
        resident = [node for node in pages if node.extents(tier)]
        count = sum(node.page_count for node in resident)
        _holds(tree.resident(tier) == count, f"{tree.resident(tier)} resident, {count} there")
        count = sum(node.page_count for node in resident if not node.locks)
        _holds(tree.evictable(tier) == count, f"{tree.evictable(tier)} evictable, {count} there")
    for queue in tree._queues:
        _check_queue(tree, queue.tier, queue.entries(), pages)


def _walk(tree: TreeCore) -> Iterator[Node]:
    for namespace, root in tree._roots.items():
        _holds(root.is_root and root.namespace == namespace, f"{root!r} is a root")
        _holds(root.first_page_index == root.last_page_index == -1, f"{root!r} is page -1")
        todo = [root]
        while todo:
            node = todo.pop()
            yield node
            todo.extend((node.children or {}).values())


def _check_links(node: Node) -> None:
    children = node.children or {}
    _holds(node.children is None or bool(children), f"{node!r} has no empty table of children")
    _holds(node.page_count > 0 and len(node.keys) % KEY_BYTES == 0, f"{node!r} has whole pages")
    least = sum(child.locks for child in children.values())
    _holds(node.locks >= least, f"{node!r} holds the locks of its children ({least})")
    for key, child in children.items():
        _holds(child.parent is node and child.first_key == key, f"{child!r} is where it belongs")
        _holds(child.namespace == node.namespace, f"{child!r} is in its parent's namespace")
        _holds(child.first_page_index == node.last_page_index + 1, f"{child!r} follows on {node!r}")
        _holds(child.locks != PRUNED, f"{child!r} is pruned and still a child")


def _check_residency(node: Node) -> None:
    children = (node.children or {}).values()
    in_l1 = sum(bool(child.l1) for child in children)
    in_l2 = sum(bool(child.l2) for child in children)
    _holds((node.l1_children, node.l2_children) == (in_l1, in_l2), f"{node!r} counts its children")
    _holds(not (node.is_root and node.is_resident), f"root {node!r} holds no page")
    for tier in (Tier.L1, Tier.L2):
        if extents := node.extents(tier):
            check_covers(extents, node.page_count)
            _holds(all(e.tier is tier for e in extents), f"{node!r} has extents of {tier.name}")


def _check_queue(tree: TreeCore, tier: Tier, entries: list[Node], nodes: list[Node]) -> None:
    ids = {id(node) for node in entries}
    _holds(len(ids) == len(entries), f"{tier.name}: no node is queued twice")
    for node in nodes:
        queued = bool(node.queued & 1 << tier)
        _holds(queued == (id(node) in ids), f"{tier.name}: {node!r} knows if it is queued")
        _holds(queued or not node.may_leave(tier), f"{tier.name}: {node!r} may leave and is queued")
    _holds(len(entries) <= 2 * tree.nodes + 65, f"{tier.name}: {len(entries)} entries is bounded")


def _holds(condition: bool, what: str) -> None:
    if not condition:
        raise IntegrityError(f"does not hold: {what}")
