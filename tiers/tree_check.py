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
    _holds(tree.nodes == len(pages), "{} nodes counted, {} there", tree.nodes, len(pages))
    count = sum(node.page_count for node in pages)
    _holds(tree.pages == count, "{} pages counted, {} there", tree.pages, count)
    for tier in (Tier.L1, Tier.L2):
        resident = [node for node in pages if node.extents(tier)]
        count = sum(node.page_count for node in resident)
        told = tree.resident(tier)
        _holds(told == count, "{} resident, {} there", told, count)
        count = sum(node.page_count for node in resident if not node.locks)
        told = tree.evictable(tier)
        _holds(told == count, "{} evictable, {} there", told, count)
    for queue in tree._queues:
        _check_queue(tree, queue.tier, queue.entries(), pages)


def _walk(tree: TreeCore) -> Iterator[Node]:
    for namespace, root in tree._roots.items():
        _holds(root.is_root and root.namespace == namespace, "{!r} is a root", root)
        _holds(root.first_page_index == root.last_page_index == -1, "{!r} is page -1", root)
        todo = [root]
        while todo:
            node = todo.pop()
            yield node
            todo.extend((node.children or {}).values())


def _check_links(node: Node) -> None:
    children = node.children or {}
    _holds(node.children is None or bool(children), "{!r} has no empty table of children", node)
    _holds(node.page_count > 0 and len(node.keys) % KEY_BYTES == 0, "{!r} has whole pages", node)
    least = sum(child.locks for child in children.values())
    _holds(node.locks >= least, "{!r} holds the locks of its children ({})", node, least)
    for key, child in children.items():
        _holds(child.parent is node and child.first_key == key, "{!r} is where it belongs", child)
        _holds(child.namespace == node.namespace, "{!r} is in its parent's namespace", child)
        follows = child.first_page_index == node.last_page_index + 1
        _holds(follows, "{!r} follows on {!r}", child, node)
        _holds(child.locks != PRUNED, "{!r} is pruned and still a child", child)


def _check_residency(node: Node) -> None:
    children = (node.children or {}).values()
    in_l1 = sum(bool(child.l1) for child in children)
    in_l2 = sum(bool(child.l2) for child in children)
    _holds((node.l1_children, node.l2_children) == (in_l1, in_l2), "{!r} counts its children", node)
    _holds(not (node.is_root and node.is_resident), "root {!r} holds no page", node)
    for tier in (Tier.L1, Tier.L2):
        if extents := node.extents(tier):
            check_covers(extents, node.page_count)
            _holds(all(e.tier is tier for e in extents), "{!r} has extents of {}", node, tier.name)


def _check_queue(tree: TreeCore, tier: Tier, entries: list[Node], nodes: list[Node]) -> None:
    ids = {id(node) for node in entries}
    _holds(len(ids) == len(entries), "{}: no node is queued twice", tier.name)
    for node in nodes:
        queued = bool(node.queued & 1 << tier)
        _holds(queued == (id(node) in ids), "{}: {!r} knows if it is queued", tier.name, node)
        may_stay = queued or not node.may_leave(tier)
        _holds(may_stay, "{}: {!r} may leave and is queued", tier.name, node)
    count = len(entries)
    _holds(count <= 2 * tree.nodes + 65, "{}: {} entries is bounded", tier.name, count)


def _holds(condition: bool, what: str, *about: object) -> None:
    """`what` is put together where it does not hold: most of the time of a check went there."""
    if not condition:
        raise IntegrityError(f"does not hold: {what.format(*about)}")
