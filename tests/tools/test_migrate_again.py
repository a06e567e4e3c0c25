"""Pages that a server evicts from the source and stores again while it is migrated.

The stores are real; only the moments are chosen, by what the tool is about to ask them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from kvstrata.backends import ObjectId, PageResult, ReadRequest, WriteRequest
from kvstrata.backends.filesystem import FilesystemBackend
from kvstrata.tools.catalog import Page, State, orphans
from kvstrata.tools.migrate import MigrateSettings, Migration
from kvstrata.tools.migrate_journal import Journal, Selection
from kvstrata.tools.migrate_report import MigrateReport, build_report
from kvstrata.tools.replay_control import Interruption


@dataclass
class Server:
    """Writes to the source and evicts from it: a page, and those that hang on it."""

    backend: FilesystemBackend
    parent: WriteRequest
    children: list[WriteRequest]

    def store(self) -> None:
        for request in [self.parent, *self.children]:
            assert self.backend.write([request])[0].outcome.is_stored

    def evict(self) -> None:
        names = [request.object for request in [*self.children, self.parent]]
        assert all(self.backend.delete(names))


@pytest.fixture
def tree(two: Any) -> Any:
    return two.fill("a")


@pytest.fixture
def server(two: Any, tree: Any) -> Iterator[Server]:
    """With a parent of leaves."""
    below = {r.object: [c for c in tree.requests if c.parent == r.object] for r in tree.requests}
    parent, children = next(
        (request, below[request.object])
        for request in tree.requests
        if below[request.object] and not any(below[c.object] for c in below[request.object])
    )
    with two.opened("a") as backend:
        yield Server(backend, parent, children)


def _migrate(source: FilesystemBackend, target: FilesystemBackend) -> MigrateReport:
    with Journal("", "") as journal:
        settings = MigrateSettings(threads=1)
        migration = Migration(source, target, journal, Selection(), settings, Interruption())
        migration.prepare()
        migration.run()
        assert migration.is_complete
        return build_report(journal, {}, source="a", destination="b", move=False, may_evict=False)


@pytest.mark.parametrize("goes_again", [False, True])
def test_a_parent_goes_with_its_children_and_all_come_again(
    two: Any, tree: Any, server: Server, monkeypatch: pytest.MonkeyPatch, *, goes_again: bool
) -> None:
    """The scan has the children and not the parent, which went before its header was read. The
    copy then reads a child whose parent is not at the destination: nobody's fault."""
    parent, child = server.parent.object, server.children[0].object
    with two.opened("a", batch_pages=1) as source, two.opened("b") as target:
        peek, exists = source.peek, target.exists
        read: list[ObjectId] = []

        def watched_peek(requests: Sequence[ReadRequest]) -> list[PageResult]:
            (name,) = (request.object for request in requests)
            read.append(name)
            if name == parent and read.count(parent) == 1:
                server.evict()
            elif name == child and read.count(child) == 2:  # the copy
                server.store()
            return peek(requests)

        def watched_exists(names: Sequence[ObjectId]) -> list[bool]:
            if goes_again and parent in names:
                server.evict()
                monkeypatch.setattr(target, "exists", exists)
            return exists(names)

        found = sorted(source.scan(), key=lambda stored: stored.object == parent)
        monkeypatch.setattr(source, "scan", lambda namespace=None: iter(found))
        monkeypatch.setattr(source, "peek", watched_peek)
        monkeypatch.setattr(target, "exists", watched_exists)
        report = _migrate(source, target)
        assert report.problems == []
        assert report.is_clean
        assert report.pages == len(tree.requests) - 1, "the parent was not found"
        assert report.cut >= 1
        assert report.copied + report.cut + report.vanished == report.pages
        assert target.exists([parent, child]) == [False, False]
        assert source.exists([parent, child]) == [not goes_again] * 2
    two.assert_closed("b")


@pytest.mark.parametrize("comes", [False, True])
@pytest.mark.parametrize("look", [1, 2, 3])
def test_what_comes_or_goes_between_two_looks_is_no_orphan(
    two: Any, server: Server, monkeypatch: pytest.MonkeyPatch, look: int, *, comes: bool
) -> None:
    """`orphans` asks for the parent, for the page, and for the parent once more."""
    parent, child = server.parent.object, server.children[0].object
    page = Page(1, child, parent, server.children[0].depth, 1, State.CUT, copied=False)
    change = server.evict
    if comes:
        server.evict()
        change = server.store
    with two.opened("a") as source:
        exists, asked = source.exists, 0

        def watched(names: Sequence[ObjectId]) -> list[bool]:
            nonlocal asked
            asked += 1
            if asked == look:
                change()
            return exists(names)

        monkeypatch.setattr(source, "exists", watched)
        assert orphans(source, [page]) == []
        assert asked == 3


def test_a_page_without_its_parent_is_an_orphan(two: Any, server: Server) -> None:
    root = next(r for r in two.fill("b").requests if r.depth == 0)
    names = [(server.children[0].object, server.parent.object), (root.object, None)]
    pages = [Page(1, name, above, 0, 1, State.CUT, copied=False) for name, above in names]
    with two.opened("a") as source:
        assert orphans(source, pages) == []
        source.delete([server.parent.object])
        assert orphans(source, pages) == pages[:1]
