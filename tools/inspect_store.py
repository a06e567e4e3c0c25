"""What a store holds: namespaces, sizes, ages, the shape of the tree; and one frame, decoded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvstrata.backends import ObjectId, ReadRequest, StorageBackend
from kvstrata.backends.frame import HEADER_BYTES, parse_header
from kvstrata.boundary import KEY_BYTES, Outcome
from kvstrata.configs import Config
from kvstrata.errors import CorruptFrameError, InputError, StorageError, Where
from kvstrata.tiers import component_fingerprint
from kvstrata.tools.catalog import Catalog, scan, scan_headers
from kvstrata.tools.frames import (
    ALIGN_BYTES,
    MAX_FRAME_BYTES,
    FrameBuffer,
    check_frame,
    peek,
)

AGES = (("minute", 60), ("hour", 3600), ("day", 86_400), ("week", 604_800))
"""Ages are counted up to these; what is older comes last."""
SHOWN_BYTES = 32


class Bucket(msgspec.Struct, frozen=True):
    """A bar of a histogram."""

    label: str
    pages: int


class NamespaceShape(msgspec.Struct, frozen=True, kw_only=True):
    """One namespace of a store."""

    namespace: str
    name: str
    """What the configuration calls it; "": it is not one of its own."""
    pages: int
    bytes: int
    """Of frames, headers included."""
    cost_bytes: int
    """In the unit of the backend (blocks of a disk)."""
    page_bytes: list[int]
    """The payload sizes that occur."""
    newest_use_s: float | None
    """Seconds since a page was used; None: the backend does not know."""
    oldest_use_s: float | None
    chains: int
    """First pages (depth 0)."""
    leaves: int
    branching: int
    """Pages with more than one child."""
    longest: int
    """Pages of the longest chain."""
    orphans: int
    """Pages whose parent is not there."""
    faulty: int
    """Frames with an unusable header; `kvstrata verify` says more."""
    ages: list[Bucket]
    depths: list[Bucket]
    children: list[Bucket]


class InspectReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `kvstrata inspect --json` writes."""

    backend: str
    plugin: str
    health: str
    used_bytes: int
    limit_bytes: int | None
    objects: int
    namespaces: list[NamespaceShape]
    seconds: float


def inspect_store(
    backend: StorageBackend,
    catalog: Catalog,
    names: dict[bytes, str],
    namespaces: Sequence[bytes],
    on_batch: Callable[[int], None],
) -> list[NamespaceShape]:
    """Read the header of every frame (of some namespaces)."""
    scan_headers(catalog, backend, namespaces, on_batch)
    found = catalog.rows("SELECT ns FROM pages GROUP BY ns ORDER BY sum(nbytes) DESC")
    now = time.time()
    return [_shape(catalog, ns, names.get(ns, ""), now) for (ns,) in found]


def _shape(catalog: Catalog, ns: bytes, name: str, now: float) -> NamespaceShape:
    ((pages, nbytes, cost, newest, oldest, chains, longest, orphans, faulty),) = catalog.rows(
        "SELECT count(*), sum(nbytes), sum(cost), ? - max(nullif(used, 0)), "
        "? - min(nullif(used, 0)), sum(depth=0), "
        "max(depth) + 1, sum(parent IS NOT NULL AND parent_id IS NULL), sum(fault IS NOT NULL) "
        "FROM pages WHERE ns=?",
        (now, now, ns),
    )
    sizes = catalog.rows(
        "SELECT DISTINCT nbytes - ? FROM pages WHERE ns=? AND nbytes>0 ORDER BY 1 LIMIT 8",
        (HEADER_BYTES, ns),
    )
    children = [
        Bucket(label, count)
        for label, count in catalog.rows(
            "SELECT CASE WHEN n >= 4 THEN '4 or more' ELSE CAST(n AS TEXT) END, count(*) FROM "
            "(SELECT (SELECT count(*) FROM pages c WHERE c.parent_id=p.id) n FROM pages p "
            "WHERE p.ns=?) GROUP BY 1 ORDER BY min(n)",
            (ns,),
        )
    ]
    by_children = {bucket.label: bucket.pages for bucket in children}
    return NamespaceShape(
        namespace=ns.hex(),
        name=name,
        pages=pages,
        bytes=nbytes,
        cost_bytes=cost,
        page_bytes=[size for (size,) in sizes],
        newest_use_s=None if newest is None else round(max(newest, 0.0), 1),
        oldest_use_s=None if oldest is None else round(max(oldest, 0.0), 1),
        chains=chains,
        leaves=by_children.get("0", 0),
        branching=sum(count for label, count in by_children.items() if label not in ("0", "1")),
        longest=longest,
        orphans=orphans,
        faulty=faulty,
        ages=_ages(catalog, ns, now),
        depths=_depths(catalog, ns),
        children=children,
    )


def _ages(catalog: Catalog, ns: bytes, now: float) -> list[Bucket]:
    buckets, before = [], 0
    for label, seconds in AGES:
        query = "SELECT count(*) FROM pages WHERE ns=? AND used>=?"
        count = catalog.number(query, (ns, now - seconds))
        buckets.append(Bucket(f"last {label}", count - before))
        before = count
    known = catalog.number("SELECT count(*) FROM pages WHERE ns=? AND used!=0", (ns,))
    unknown = catalog.number("SELECT count(*) FROM pages WHERE ns=? AND used=0", (ns,))
    buckets += [Bucket("older", known - before), Bucket("not known", unknown)]
    return [bucket for bucket in buckets if bucket.pages]


def _depths(catalog: Catalog, ns: bytes) -> list[Bucket]:
    """By powers of two: 0, 1, 2-3, 4-7, …"""
    counts: dict[int, int] = {}
    query = "SELECT depth, count(*) FROM pages WHERE ns=? AND depth>=0 GROUP BY depth"
    for depth, count in catalog.rows(query, (ns,)):
        power = depth.bit_length()
        counts[power] = counts.get(power, 0) + count
    buckets = []
    for power, count in sorted(counts.items()):
        first, last = (1 << power) // 2, (1 << power) - 1
        buckets.append(Bucket(str(last) if first >= last else f"{first}-{last}", count))
    return buckets


# ── one frame ────────────────────────────────────────────────────────────────────────────────────


class FrameReport(msgspec.Struct, frozen=True, kw_only=True):
    """One frame, decoded. Fields of the header are "" or 0 where it cannot be read."""

    place: str
    verdict: str
    """"ok", or what is wrong."""
    file_bytes: int
    namespace: str = ""
    name: str = ""
    key: str = ""
    parent: str = ""
    depth: int = 0
    codec: int = 0
    logical_bytes: int = 0
    stored_bytes: int = 0
    checksum_kind: int = 0
    checksum: str = ""
    meaning: str = ""
    """What the payload is by this configuration."""
    first_bytes: str = ""
    zero_bytes: int = 0
    """Bytes of the payload that are 0."""


def find_frame(backend: StorageBackend, text: str) -> ObjectId:
    """The frame whose key (or `<namespace>/<key>`) begins with `text`. Raises InputError."""
    prefix = text.replace("/", "").lower()
    whole = 4 * KEY_BYTES
    if len(prefix) == whole and "/" in text:
        return ObjectId(*(bytes.fromhex(part) for part in text.split("/")))
    found = set()
    for stored in scan(backend, ()):
        name = stored.object
        if name.key.hex().startswith(prefix) or name.name.startswith(text.lower()):
            found.add(name)
            if len(found) > 1:
                raise InputError(
                    f"{text}: more than one key begins so",
                    remedy="give more digits",
                    where=Where(key="--frame"),
                )
    if not found:
        raise InputError(
            f"{text}: no key begins so, and there is no such file",
            remedy="give the beginning of a key in hex, <namespace>/<key>, or a file",
            where=Where(key="--frame"),
        )
    return found.pop()


def read_frame(backend: StorageBackend, name: ObjectId) -> bytes:
    """The bytes that are stored as `name`, whatever they are. Raises StorageError."""
    size = next((f.nbytes for f in scan(backend, [name.namespace]) if f.object == name), 0)
    (piece,) = FrameBuffer(0).cut([size + ALIGN_BYTES])
    (result,) = peek(backend, [ReadRequest(name, (piece,))])
    if result.outcome is not Outcome.LOADED:
        raise StorageError(f"{name.name}: {result.message or result.outcome.value}")
    return bytes(piece[: result.nbytes])


def read_file(path: Path) -> bytes:
    """Raises InputError."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_FRAME_BYTES)
    except OSError as error:
        raise InputError(
            f"the file cannot be read: {error.strerror}",
            remedy="give a frame's file that you may read",
            where=Where(path),
        ) from error


def decode_frame(
    data: bytes, place: str, name: ObjectId | None, config: Config | None
) -> FrameReport:
    """Everything that a frame says of itself; `name` is what it should be, if that is known."""
    frame = memoryview(data)
    try:
        header = parse_header(frame)
    except CorruptFrameError as error:
        return FrameReport(place=place, verdict=str(error), file_bytes=len(data))
    verdict = "ok"
    try:
        check_frame(name or header.object, frame)
    except CorruptFrameError as error:
        verdict = str(error)
    label, meaning = _meaning(config, header.namespace)
    payload = data[HEADER_BYTES : HEADER_BYTES + header.stored_bytes]
    return FrameReport(
        place=place,
        verdict=verdict,
        file_bytes=len(data),
        namespace=header.namespace.hex(),
        name=label,
        key=header.key.hex(),
        parent="" if header.parent is None else header.parent_key.hex(),
        depth=header.depth,
        codec=header.codec,
        logical_bytes=header.logical_bytes,
        stored_bytes=header.stored_bytes,
        checksum_kind=header.checksum_kind,
        checksum=f"{header.checksum:016x}",
        meaning=meaning,
        first_bytes=payload[:SHOWN_BYTES].hex(" ", 4),
        zero_bytes=payload.count(0),
    )


def _meaning(config: Config | None, namespace: bytes) -> tuple[str, str]:
    if config is None:
        return "", ""
    whole = config.namespace().fingerprint()
    for c in config.components:
        if component_fingerprint(whole, c.name) == namespace:
            shape = f"{c.layers} layers x K, V x {c.page_tokens} tokens x {c.kv_heads} heads"
            return c.name, f"{shape} x {c.head_dim} x {c.dtype}, {c.layout}"
    return "", "of another namespace than this configuration's"
