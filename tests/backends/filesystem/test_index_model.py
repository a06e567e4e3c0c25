"""The index against a model of a few lines: random writes, evictions, crashes, changes from
outside, a lost database. After each step all sums and links are checked."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvstrata.backends import ObjectId
from kvstrata.backends.filesystem.booking import Limits, NewPage, Reservation
from kvstrata.backends.filesystem.database import Database
from kvstrata.backends.filesystem.files import FrameFiles, object_path
from kvstrata.backends.filesystem.index import StoreIndex
from kvstrata.backends.filesystem.reconcile import Reconciler
from kvstrata.backends.frame import encode_header
from kvstrata.boundary import Outcome

BLOCK = 4096
LIMIT = 16 * BLOCK
NAMESPACE = b"n" * 32
STAMPED = 1 << 40
"""Uses that the index stamped are later than any time of a file, which tests set to 1970."""
CHAINS = "abc"


def name_of(chain: str, depth: int) -> ObjectId:
    return ObjectId(NAMESPACE, hashlib.sha256(f"{chain} {depth}".encode()).digest())


def page_of(chain: str, depth: int, blocks: int) -> NewPage:
    parent = name_of(chain, depth - 1) if depth else None
    return NewPage(name_of(chain, depth), parent, depth, blocks * BLOCK)


@dataclass
class Node:
    """What the index should know of one page."""

    depth: int
    parent: Node | None = None
    present: bool = False
    cost: int = 0
    used: int = 0
    pins: int = 0
    children: set[int] = field(default_factory=set)


class Model:
    """The rules, without a database: nodes by name, and the order of their last use."""

    def __init__(self) -> None:
        self.nodes: dict[ObjectId, Node] = {}
        self.files: dict[ObjectId, tuple[NewPage, int]] = {}
        """Frames on disk, and when they were written."""
        self.removed: set[ObjectId] = set()
        """Frames that were taken away, by their name or from outside: a child may be there."""
        self.time = 0

    def tick(self) -> int:
        """The time of a use that the index sees."""
        self.time += 1
        return STAMPED + self.time

    @property
    def used(self) -> int:
        return sum(node.cost for node in self.nodes.values())

    def node(self, name: ObjectId, depth: int) -> Node:
        return self.nodes.setdefault(name, Node(depth))

    def link(self, page: NewPage) -> Node:
        node = self.node(page.object, page.depth)
        if page.parent is not None and node.parent is None:
            node.parent = self.node(page.parent, page.depth - 1)
            node.parent.children.add(id(node))
        return node

    def prune(self) -> None:
        """Nodes that are gone and that nothing needs."""
        again = True
        while again:
            again = False
            for name, node in list(self.nodes.items()):
                if not (node.present or node.pins or node.children):
                    del self.nodes[name]
                    if node.parent is not None:
                        node.parent.children.discard(id(node))
                    again = True

    def vanish(self, name: ObjectId) -> None:
        node = self.nodes.get(name)
        if node is not None:
            node.present, node.cost = False, 0
            self.prune()

    def appear(self, page: NewPage, used: int) -> None:
        node = self.link(page)
        node.present, node.cost, node.used = True, page.cost, used

    def heal(self, name: ObjectId | None) -> bool:
        """Whether the frame is there; if the index believed wrongly, it knows now."""
        if name is not None and name not in self.files:
            self.vanish(name)
        return name in self.files

    def evict(self, over: int, kept: set[ObjectId]) -> int:
        freed = 0
        while freed < over:
            leaves = [
                (node.used, name.key, name)
                for name, node in self.nodes.items()
                if node.present and not node.children and not node.pins and name not in kept
            ]
            if not leaves:
                break
            name = min(leaves)[2]
            freed += self.nodes[name].cost
            self.files.pop(name, None)
            self.vanish(name)
        return freed


@dataclass
class Batch:
    """A write that has begun."""

    reservation: Reservation
    pages: list[NewPage]
    dies: bool
    stored: list[bool] = field(default_factory=list)
    """Of the pages that are through."""


class IndexMachine(RuleBasedStateMachine):
    """Up to three batches are open at once, each somewhere between two pages; a second owner may
    die with its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        folder = tempfile.TemporaryDirectory(prefix="kvstrata-index-")
        self.root = self.stack.enter_context(folder)
        self.files = self.stack.enter_context(contextlib.closing(FrameFiles(self.root)))
        self.model = Model()
        self.open: list[Batch] = []
        self.inflight = 0
        self.database: Database | None = None

    def teardown(self) -> None:
        self.stack.close()

    @initialize()
    def connect(self) -> None:
        fd, files = self.files.root_fd, self.files
        self.database = Database(self.root, fd, lambda: not files.namespaces(), lambda: None)
        self.stack.callback(self.database.close)
        self.database.open()
        self.index = StoreIndex(self.database, "alive", files)
        self.other = StoreIndex(self.database, "dies", files)

    # ── writes ───────────────────────────────────────────────────────────────────────────────────

    @precondition(lambda self: len(self.open) < 3)
    @rule(
        chain=st.sampled_from(CHAINS),
        start=st.integers(0, 5),
        blocks=st.lists(st.integers(1, 3), min_size=1, max_size=4),
        dies=st.booleans(),
    )
    def reserve(self, chain: str, start: int, blocks: list[int], dies: bool) -> None:
        """Of a chain as far as it is there, or for once with a gap."""
        while start not in (0, 5) and name_of(chain, start - 1) not in self.model.files:
            start -= 1
        self.begin([page_of(chain, start + i, size) for i, size in enumerate(blocks)], dies)

    @precondition(lambda self: 0 < len(self.open) < 3)
    @rule(which=st.integers(0, 1), dies=st.booleans(), overtakes=st.booleans())
    def reserve_the_same(self, which: int, dies: bool, overtakes: bool) -> None:
        n = len(self.open)  # another process stores the same request, and may overtake the first
        self.begin(self.open[which % n].pages, dies)
        if overtakes and len(self.open) > n:
            self.publish(n, 4)
            self.settle(n)

    def begin(self, pages: list[NewPage], dies: bool) -> None:
        index = self.other if dies else self.index
        reservation = index.reserve(pages, Limits(LIMIT))
        index.flush()  # what existed counts as used now, not when this index runs again
        expected, taken = self.expect_reserve(pages)
        assert reservation.outcomes == expected
        assert [entry.object for entry in reservation.entries] == [p.object for p in taken]
        if taken:
            self.open.append(Batch(reservation, taken, dies))

    def expect_reserve(self, pages: list[NewPage]) -> tuple[list[Outcome], list[NewPage]]:
        model, kept = self.model, set[ObjectId]()
        judged: dict[ObjectId, Outcome] = {}
        for page in pages:
            judged[page.object] = self.judge(page, judged, kept)
        new = [page for page in pages if judged[page.object] is Outcome.STORED]
        need = sum(page.cost for page in new)
        missing = model.used + self.inflight + need - LIMIT if new else 0
        coming = {page.object for batch in self.open for page in batch.pages}
        missing -= model.evict(missing, kept | coming)
        taken = self.cut(new, need - max(missing, 0), judged)
        for page, pinned in self.outer_parents(taken):
            model.node(pinned, page.depth - 1).pins += 1
        self.inflight += sum(page.cost for page in taken)
        for page in pages:
            if judged[page.object] is Outcome.EXISTS:
                model.nodes[page.object].used = model.tick()
        return [judged[page.object] for page in pages], taken

    def judge(self, page: NewPage, judged: dict[ObjectId, Outcome], kept: set[ObjectId]) -> Outcome:
        model = self.model
        node = model.nodes.get(page.object)
        if node is not None and node.present and model.heal(page.object):
            kept.add(page.object)
            return Outcome.EXISTS
        if page.parent is None:
            return Outcome.STORED
        if page.parent not in judged:
            kept.add(page.parent)
            return Outcome.STORED if model.heal(page.parent) else Outcome.PARENT_MISSING
        return Outcome.STORED if judged[page.parent].is_stored else Outcome.PARENT_MISSING

    def cut(self, new: list[NewPage], room: int, judged: dict[ObjectId, Outcome]) -> list[NewPage]:
        taken: list[NewPage] = []
        for page in new:
            if page.parent in judged and not judged[page.parent].is_stored:
                judged[page.object] = Outcome.PARENT_MISSING
            elif Outcome.FULL in judged.values() or page.cost > room:
                judged[page.object] = Outcome.FULL
            else:
                room -= page.cost
                taken.append(page)
        return taken

    @staticmethod
    def outer_parents(pages: list[NewPage]) -> list[tuple[NewPage, ObjectId]]:
        own = {page.object for page in pages}
        return [(p, p.parent) for p in pages if p.parent is not None and p.parent not in own]

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 2), count=st.sampled_from([5, 3, 1]))
    def publish(self, which: int, count: int) -> None:
        """The next pages of a batch get their names, or have them."""
        batch = self.open[which % len(self.open)]
        at = len(batch.stored)
        batch.stored += [self.publish_page(page) for page in batch.pages[at : at + count]]

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 2))
    def settle(self, which: int) -> None:
        """A batch ends, with all of its pages or less, or its owner dies."""
        batch = self.open[which % len(self.open)]
        ending = [b for b in self.open if b.dies] if batch.dies else [batch]
        if batch.dies:
            self.index.recover("dies")
        else:
            batch.stored += [False] * (len(batch.pages) - len(batch.stored))
            self.index.settle(batch.reservation, batch.stored)
        for batch in ending:
            self.open.remove(batch)
            if batch.dies:
                batch.stored = [page.object in self.model.files for page in batch.pages]
            self.end(batch.pages, batch.stored)

    def publish_page(self, page: NewPage) -> bool:
        header = memoryview(bytearray(BLOCK))
        payload = memoryview(bytes(page.cost - BLOCK))
        encode_header(header, page.object, page.parent, page.depth, payload)
        outcome = self.files.publish(page.object, (header, payload))
        if outcome is Outcome.STORED:
            written = self.model.tick() - STAMPED
            os.utime(f"{self.root}/{object_path(page.object)}", (written, written))
            self.model.files[page.object] = (page, written * 1_000_000)
            self.model.removed.discard(page.object)
        return outcome is Outcome.STORED

    def end(self, pages: list[NewPage], stored: list[bool]) -> None:
        model = self.model
        for page, is_stored in zip(pages, stored, strict=True):
            if is_stored and page.object in model.files:
                model.appear(model.files[page.object][0], model.tick())
        for _, pinned in self.outer_parents(pages):
            model.nodes[pinned].pins -= 1
        self.inflight -= sum(page.cost for page in pages)
        model.prune()

    # ── reads, deletes, changes from outside ─────────────────────────────────────────────────────

    @rule(
        how=st.sampled_from(["read", "read", "delete", "remove from outside"]),
        chain=st.sampled_from(CHAINS),
        depth=st.integers(0, 8),
    )
    def touch(self, how: str, chain: str, depth: int) -> None:
        name, model = name_of(chain, depth), self.model
        if how == "read":
            self.read(name)
            return
        if how == "delete":
            assert self.index.delete([name]) == [name in model.files]
            model.vanish(name)
        else:
            self.files.unlink(name)
        model.files.pop(name, None)
        model.removed.add(name)

    def read(self, name: ObjectId) -> None:
        if name in self.model.files:
            self.index.touch([name])
            node = self.model.nodes.get(name)
            if node is not None and node.present:
                node.used = self.model.tick()
        else:
            self.index.touch([], [name])
            self.model.vanish(name)
        self.index.flush()

    @precondition(lambda self: not self.open)
    @rule(chain=st.sampled_from(CHAINS), depth=st.integers(0, 8), blocks=st.integers(1, 3))
    def add_from_outside_and_scan(self, chain: str, depth: int, blocks: int) -> None:
        page = page_of(chain, depth, blocks)
        if page.parent is not None and page.parent not in self.model.files:
            self.model.removed.add(page.parent)
        self.publish_page(page)
        self.scan()

    @precondition(lambda self: not self.open)
    @rule()
    def scan(self) -> None:
        Reconciler(self.index, self.files, self.trim)._scan()
        model = self.model
        for name in [n for n, node in model.nodes.items() if node.present]:
            model.heal(name)
        for name, (page, written) in model.files.items():
            node = model.nodes.get(name)
            if node is None or not node.present:
                model.appear(page, written)
            elif node.cost != page.cost:
                model.appear(page, max(node.used, written))
        self.model.evict(self.model.used - LIMIT, set())

    @precondition(lambda self: not self.open)
    @rule()
    def lose_the_database(self) -> None:
        for path in Path(self.root).glob("index-v1-*"):
            path.unlink()
        self.model.nodes.clear()
        for page, written in self.model.files.values():
            self.model.appear(page, written)
        Reconciler(self.index, self.files, self.trim)._scan()
        Reconciler(self.index, self.files, self.trim)._scan()
        self.model.evict(self.model.used - LIMIT, set())

    def trim(self) -> None:
        while self.index.trim(Limits(LIMIT), 4 * BLOCK):
            pass

    # ── always ───────────────────────────────────────────────────────────────────────────────────

    @invariant()
    def agrees(self) -> None:
        if self.database is None:
            return
        self.index.check_integrity()
        usage = self.index.usage()
        assert usage.inflight_bytes == self.inflight
        assert usage.used_bytes - self.inflight == self.model.used
        assert usage.objects == sum(node.present for node in self.model.nodes.values())
        assert usage.used_bytes <= LIMIT
        shards = self.index.shards(NAMESPACE)
        present = {key for first in shards for key in self.index.shard(NAMESPACE, first)}
        assert present == {n.key for n, node in self.model.nodes.items() if node.present}
        on_disk = {
            f.key for b in self.files.shards(NAMESPACE) for f in self.files.shard(NAMESPACE, b)
        }
        assert on_disk == {name.key for name in self.model.files}
        parents = {page.parent for page, _ in self.model.files.values()} - {None}
        assert parents <= {*self.model.files, *self.model.removed}, "a child without its parent"


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestIndex = IndexMachine.TestCase
