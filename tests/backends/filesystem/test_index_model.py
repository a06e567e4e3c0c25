"""The index against a model of a few lines: random writes, evictions, crashes, changes from
outside, a lost database. After each step all sums and links are checked."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass, field

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
LIMIT = 12 * BLOCK
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

    def evict(self, over: int, kept: set[ObjectId]) -> tuple[list[ObjectId], int]:
        gone, freed = [], 0
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
            gone.append(name)
        return gone, freed


class IndexMachine(RuleBasedStateMachine):
    """Up to three batches are open at once; a second owner may die with one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.root = tempfile.mkdtemp(prefix="kvstrata-index-")
        self.stack = contextlib.ExitStack()
        self.stack.callback(shutil.rmtree, self.root)
        self.files = FrameFiles(self.root)
        self.stack.callback(self.files.close)
        self.model = Model()
        self.open: list[tuple[Reservation, list[NewPage], bool]] = []
        self.inflight = 0
        self.database: Database | None = None

    def teardown(self) -> None:
        assert self.database is not None
        self.database.close()
        self.stack.close()

    @initialize()
    def connect(self) -> None:
        fd, files = self.files.root_fd, self.files
        self.database = Database(self.root, fd, lambda: not files.namespaces(), lambda: None)
        self.database.open()
        self.index = StoreIndex(self.database, "alive", files)
        self.other = StoreIndex(self.database, "dies", files)

    # ── writes ───────────────────────────────────────────────────────────────────────────────────

    @precondition(lambda self: len(self.open) < 3)
    @rule(
        chain=st.sampled_from(CHAINS),
        start=st.integers(0, 5),
        blocks=st.lists(st.integers(1, 3), min_size=1, max_size=5),
        dies=st.booleans(),
    )
    def reserve(self, chain: str, start: int, blocks: list[int], dies: bool) -> None:
        pages = [page_of(chain, start + i, size) for i, size in enumerate(blocks)]
        index = self.other if dies else self.index
        reservation = index.reserve(pages, Limits(LIMIT))
        index.flush()  # what existed counts as used now, not when this index runs again
        expected, taken = self.expect_reserve(pages)
        assert reservation.outcomes == expected
        assert [entry.object for entry in reservation.entries] == [p.object for p in taken]
        if taken:
            self.open.append((reservation, taken, dies))

    def expect_reserve(self, pages: list[NewPage]) -> tuple[list[Outcome], list[NewPage]]:
        model, kept = self.model, set[ObjectId]()
        judged: dict[ObjectId, Outcome] = {}
        for page in pages:
            judged[page.object] = self.judge(page, judged, kept)
        new = [page for page in pages if judged[page.object] is Outcome.STORED]
        need = sum(page.cost for page in new)
        missing = model.used + self.inflight + need - LIMIT if new else 0
        if missing > 0:
            missing -= model.evict(missing, kept)[1]
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
        known = page.object in model.nodes and model.nodes[page.object].present
        if known and model.heal(page.object):
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
    @rule(which=st.integers(0, 2), published=st.integers(0, 5))
    def settle(self, which: int, published: int) -> None:
        """The first few pages of a batch get their names, then it ends, or its owner dies."""
        reservation, pages, dies = self.open.pop(which % len(self.open))
        stored = []
        for i, page in enumerate(pages):
            stored.append(i < published and self.publish(page))
        if dies:
            stored = [page.object in self.model.files for page in pages]
            others = [entry for entry in self.open if entry[2]]
            for other in others:
                self.open.remove(other)
            self.index.recover("dies")
            self.end(pages, stored)
            for _, other_pages, _ in others:
                self.end(other_pages, [p.object in self.model.files for p in other_pages])
        else:
            self.index.settle(reservation, stored)
            self.end(pages, stored)

    def publish(self, page: NewPage) -> bool:
        header = memoryview(bytearray(BLOCK))
        payload = memoryview(bytes(page.cost - BLOCK))
        encode_header(header, page.object, page.parent, page.depth, payload)
        outcome = self.files.publish(page.object, (header, payload))
        if outcome is Outcome.STORED:
            written = self.model.tick() - STAMPED
            os.utime(f"{self.root}/{object_path(page.object)}", (written, written))
            self.model.files[page.object] = (page, written * 1_000_000)
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

    @rule(chain=st.sampled_from(CHAINS), depth=st.integers(0, 8))
    def read(self, chain: str, depth: int) -> None:
        name = name_of(chain, depth)
        if name in self.model.files:
            self.index.touch([name])
            node = self.model.nodes.get(name)
            if node is not None and node.present:
                node.used = self.model.tick()
        else:
            self.index.touch([], [name])
            self.model.vanish(name)
        self.index.flush()

    @rule(chain=st.sampled_from(CHAINS), depth=st.integers(0, 8))
    def delete(self, chain: str, depth: int) -> None:
        name = name_of(chain, depth)
        assert self.index.delete([name]) == [name in self.model.files]
        self.model.files.pop(name, None)
        self.model.vanish(name)

    @rule(chain=st.sampled_from(CHAINS), depth=st.integers(0, 8))
    def remove_from_outside(self, chain: str, depth: int) -> None:
        self.files.unlink(name_of(chain, depth))
        self.model.files.pop(name_of(chain, depth), None)

    @precondition(lambda self: not self.open)
    @rule(chain=st.sampled_from(CHAINS), depth=st.integers(0, 8), blocks=st.integers(1, 3))
    def add_from_outside_and_scan(self, chain: str, depth: int, blocks: int) -> None:
        self.publish(page_of(chain, depth, blocks))
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
        self.expect_trim()

    @precondition(lambda self: not self.open)
    @rule()
    def lose_the_database(self) -> None:
        for entry in os.listdir(self.root):
            if entry.startswith("index-v1-"):
                os.unlink(os.path.join(self.root, entry))
        self.model.nodes.clear()
        for page, written in self.model.files.values():
            self.model.appear(page, written)
        Reconciler(self.index, self.files, self.trim)._scan()
        Reconciler(self.index, self.files, self.trim)._scan()
        self.expect_trim()

    def trim(self) -> None:
        while self.index.trim(Limits(LIMIT), 4 * BLOCK):
            pass

    def expect_trim(self) -> None:
        over = self.model.used - LIMIT
        if over > 0:
            self.model.evict(over, set())

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
        present = {
            key
            for first in self.index.shards(NAMESPACE)
            for key in self.index.shard(NAMESPACE, first)
        }
        assert present == {n.key for n, node in self.model.nodes.items() if node.present}
        on_disk = {
            f.key for b in self.files.shards(NAMESPACE) for f in self.files.shard(NAMESPACE, b)
        }
        assert on_disk == {name.key for name in self.model.files}


IndexMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestIndex = IndexMachine.TestCase
