"""What of a root does not agree: files that are no frames, and an index that knows other ones."""

from __future__ import annotations

from collections.abc import Iterator

from kvstrata.backends.abilities import Finding
from kvstrata.backends.base import ObjectId
from kvstrata.backends.filesystem.files import FrameFiles, object_path
from kvstrata.backends.filesystem.index import Mended, StoreIndex


def audit(files: FrameFiles, index: StoreIndex, mended: Mended) -> Iterator[Finding]:
    """Findings of a root that was scanned. `mended`: what that scan has found and corrected."""
    for path, reason in files.strays():
        yield Finding("stray file", path, reason, "remove it, if nothing else needs it")
    if mended.entered:
        message = f"{mended.entered} frames had no row, or a wrong size in it"
        yield Finding("index", "index", message, "corrected when the store was opened")
    if mended.dropped:
        message = f"{mended.dropped} rows had no file"
        yield Finding("index", "index", message, "corrected when the store was opened")
    for namespace in sorted({*files.namespaces(), *index.namespaces()}):
        for first_byte in sorted({*files.shards(namespace), *index.shards(namespace)}):
            yield from _shard(files, index, namespace, first_byte)
    try:
        index.check_integrity()
    except AssertionError as error:
        message = f"its sums or links do not agree: {error}"
        remedy = "stop what uses the store and remove index-v1-*: it is rebuilt from the frames"
        yield Finding("index", "index", message, remedy)


def _shard(
    files: FrameFiles, index: StoreIndex, namespace: bytes, first_byte: int
) -> Iterator[Finding]:
    """The files are listed first; whatever differs then is looked at again."""
    remedy = "corrected at the next start of any process on the store"
    there = [ObjectId(namespace, file.key) for file in files.shard(namespace, first_byte)]
    rows = index.shard(namespace, first_byte)
    strangers = [name for name in there if rows.pop(name.key, None) is None]
    for name in index.unknown(strangers) if strangers else ():
        yield Finding("index", object_path(name), "the index does not know this frame", remedy)
    lost = [ObjectId(namespace, key) for key in rows]
    lost = [name for name in lost if not files.exists(name)]
    if lost:
        rows = index.shard(namespace, first_byte)
    for name in lost:
        if name.key in rows and not files.exists(name):
            yield Finding("index", object_path(name), "the index has a row without a file", remedy)
