"""Epochs: which namespaces are over, and how the tree forgets what they held."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvstrata.errors import InputError, Where
from kvstrata.handles import Extents, Tier
from kvstrata.tiers.node import L3State, Node
from kvstrata.tiers.tree import TreeCore

MAX_OVER = 65_536
"""Namespaces of older epochs that are remembered, to refuse requests that still name one."""


class Epochs:
    """Fingerprints of namespaces that were used under older weights.

    A fingerprint does not say its epoch, so those are known that a request has named.
    """

    def __init__(self) -> None:
        self.current: int | None = None
        """The last one that was begun; None before the first change."""
        self._used: dict[bytes, None] = {}
        """Of this epoch, by age."""
        self._over: dict[bytes, int] = {}
        """By age: the epoch that ended each."""

    def begin(
        self, epoch: int, names: Iterable[bytes], rename: Callable[[bytes], bytes]
    ) -> dict[bytes, bytes]:
        """What was used is over; what `names` are called now. Raises InputError, with nothing
        changed, when the epoch does not grow, a name of the new one was used before, or two
        names become one."""
        if epoch < 0 or (self.current is not None and epoch <= self.current):
            raise InputError(
                f"epoch {epoch} does not follow {self.current}",
                remedy="epochs grow with every change of weights",
                where=Where(key="namespace.epoch"),
            )
        renamed = {name: rename(name) for name in set(names)}
        if any(new in self._used or new in self._over for new in renamed.values()):
            raise InputError(
                "a namespace of the new epoch was used before",
                remedy="make its fingerprint with the new epoch in it",
                where=Where(key="namespace"),
            )
        if len(set(renamed.values())) < len(renamed):
            raise InputError(
                "two namespaces of the old epoch would become one",
                remedy="make each fingerprint from all that made the old one, and the epoch",
                where=Where(key="namespace"),
            )
        self.current = epoch
        self._over.update(dict.fromkeys(self._used, epoch))
        self._used = dict.fromkeys(renamed.values())
        while len(self._over) > MAX_OVER:
            del self._over[next(iter(self._over))]
        return renamed

    def use(self, namespace: bytes) -> None:
        """A request names it. Raises InputError for one that is over."""
        if namespace in self._over:
            raise InputError(
                f"the namespace belongs to weights before epoch {self._over[namespace]}",
                remedy="take the fingerprint of the new epoch",
                where=Where(key="namespace"),
            )
        self._used[namespace] = None
        if len(self._used) > MAX_OVER:
            del self._used[next(iter(self._used))]


def clear_tree(tree: TreeCore) -> list[Extents]:
    """Forget every page. No node may be locked. The extents are the caller's to free."""
    extents: list[Extents] = []
    order: list[Node] = []
    todo = tree.roots()
    while todo:
        node = todo.pop()
        todo += (node.children or {}).values()
        order.append(node)
    for node in reversed(order):  # children before parents
        if node.is_root:
            continue
        held = [e for e in (node.l1, node.l2) if e]
        if node.l3:
            tree.set_l3(node, L3State.NONE)
        for tier in (Tier.L1, Tier.L2):
            if tree.is_alive(node):
                tree.clear_resident(node, tier)
        extents += held
    assert not tree.pages, "a page is locked"
    return extents
