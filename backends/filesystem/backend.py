"""The `filesystem` backend: frames as files below one root, shared by any number of processes."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Iterator, Sequence

from kvstrata.backends.abilities import Finding
from kvstrata.backends.base import (
    BackendContext,
    Health,
    HealthState,
    ObjectId,
    PageResult,
    ReadRequest,
    StorageBackend,
    StoredObject,
    Usage,
    WriteRequest,
)
from kvstrata.backends.filesystem.audit import audit
from kvstrata.backends.filesystem.booking import Limits, NewPage, Reservation
from kvstrata.backends.filesystem.database import Database
from kvstrata.backends.filesystem.files import FrameFiles, object_path
from kvstrata.backends.filesystem.index import StoreIndex
from kvstrata.backends.filesystem.options import FilesystemOptions
from kvstrata.backends.filesystem.oserrors import config_error, storage_error
from kvstrata.backends.filesystem.owners import (
    OWNERS,
    Owner,
    dead_owners,
    remove_owner,
    root_lock,
)
from kvstrata.backends.filesystem.reconcile import Reconciler
from kvstrata.backends.frame import HEADER_BYTES
from kvstrata.backends.outcomes import failure
from kvstrata.boundary import Outcome
from kvstrata.errors import (
    ClosedError,
    ConfigError,
    KvstrataError,
    StorageBusyError,
    StorageError,
    StorageFullError,
    Where,
)
from kvstrata.units import format_size, parse_size

logger = logging.getLogger(__name__)

_MAX_ROOT_BYTES = 460
"""SQLite takes no path of more than 512."""
_EXTRA = 4
"""When the disk is full, so many times what did not fit is evicted: the index needs some too."""
_AUDIT_WAIT_S = 600.0
_TRIM_BYTES = 16 << 20
"""About so much is evicted in one transaction when a root is far over its limit."""


class FilesystemBackend(StorageBackend):
    """Reads and `exists` ask the disk; writes ask the index for room first (`index.py`).

    `sys` stands for the module `os` on the page path (tests make it fail and watch its order).
    """

    Options = FilesystemOptions

    def __init__(self, options: FilesystemOptions, sys: object = os) -> None:
        super().__init__(options)
        self._settings = options
        self._sys = sys
        self._max_bytes = parse_size(options.max_bytes)
        self._min_free_bytes = parse_size(options.min_free_bytes)
        self._context = BackendContext("filesystem")
        self._files: FrameFiles | None = None
        self._owner: Owner | None = None
        self._database: Database | None = None
        self._index: StoreIndex | None = None
        self._reconciler: Reconciler | None = None
        self._lock = threading.Lock()
        self._writing = 0
        self._extra_bytes = 0
        """What the next write evicts in any case, because the disk was full."""

    @property
    def concurrency(self) -> int:
        return self._settings.threads

    @property
    def max_batch(self) -> int:
        return self._settings.batch_pages

    @property
    def index(self) -> StoreIndex:
        if self._index is None:
            raise ClosedError("the backend is not open")
        return self._index

    @property
    def files(self) -> FrameFiles:
        if self._files is None:
            raise ClosedError("the backend is not open")
        return self._files

    # ── life ─────────────────────────────────────────────────────────────────────────────────────

    def open(self, context: BackendContext) -> None:
        assert self._files is None, "open once"
        self._context = context
        path = self._settings.path
        try:
            root = os.path.abspath(path)
            if len(os.fsencode(root)) > _MAX_ROOT_BYTES:
                raise OSError(errno.ENAMETOOLONG, f"more than {_MAX_ROOT_BYTES} bytes")
            self._files = FrameFiles(root, self._settings.durability, self._sys)
            self._check_limit(self._files)
            self._database = self._make_database(self._files)
            with self._database.hold_root():
                self._open_locked(self._files, self._database)
        except BaseException as error:
            self._release()
            if isinstance(error, OSError):
                raise config_error(error, path) from error
            raise
        if not self._files.anonymous:
            logger.info("%s has no O_TMPFILE: frames are published from temporary names", path)
        assert self._reconciler is not None
        self._reconciler.start()

    def close(self, deadline_s: float) -> None:
        reconciler, self._reconciler = self._reconciler, None
        if reconciler is not None and not reconciler.stop(deadline_s):
            logger.warning("the scan of %s does not end", self._settings.path)
            return  # it is a daemon; what it uses stays open
        if self._index is not None:
            with contextlib.suppress(KvstrataError):
                self._index.flush()
        with self._lock:
            writing = self._writing
        if self._owner is not None and self._files is not None and not writing:
            with contextlib.suppress(OSError, StorageError), root_lock(self._files.root_fd):
                self._owner.close()
        self._release()

    def wait_for_scan(self, deadline_s: float) -> bool:
        """True when the index agrees with the disk as it was at some time since `open`."""
        return self._reconciler is not None and self._reconciler.wait(deadline_s)

    # ── frames ───────────────────────────────────────────────────────────────────────────────────

    def exists(self, objects: Sequence[ObjectId]) -> list[bool]:
        files = self.files
        return [files.exists(name) for name in objects]

    def read(self, requests: Sequence[ReadRequest]) -> list[PageResult]:
        touched: list[ObjectId] = []
        vanished: list[ObjectId] = []
        results = self._read(requests, touched, vanished)
        try:
            self.index.touch(touched, vanished)
        except KvstrataError as error:  # what was read is good all the same
            logger.warning("the index of %s is not up to date: %s", self.files.root, error)
        return results

    def peek(self, requests: Sequence[ReadRequest]) -> list[PageResult]:
        return self._read(requests, [], [])

    def persist(self, objects: Sequence[ObjectId]) -> list[bool]:
        try:
            return self.files.persist(objects)
        except OSError as error:
            raise storage_error(error, self.files.root) from error

    def audit(self) -> Iterator[Finding]:
        if self._reconciler is None:
            raise ClosedError("the backend is not open")
        if not self.wait_for_scan(_AUDIT_WAIT_S):
            yield Finding(
                "index", "index", "the scan of the frames has not ended", "look again later"
            )
        yield from audit(self.files, self.index, self._reconciler.mended)

    def _read(
        self,
        requests: Sequence[ReadRequest],
        touched: list[ObjectId],
        vanished: list[ObjectId],
    ) -> list[PageResult]:
        files, results = self.files, []
        for request in requests:
            name = request.object
            try:
                nbytes = files.read(name, request.buffers)
            except FileNotFoundError:
                vanished.append(name)
                results.append(PageResult(Outcome.MISSING))
            except OSError as error:
                results.append(failure(storage_error(error, object_path(name))))
            else:
                touched.append(name)
                results.append(PageResult(Outcome.LOADED, nbytes))
        return results

    def write(self, requests: Sequence[WriteRequest]) -> list[PageResult]:
        files, index = self.files, self.index
        pages = [NewPage(r.object, r.parent, r.depth, files.cost(r.nbytes)) for r in requests]
        with self._lock:
            self._writing += 1
        try:
            reservation = self._reserve(pages)
            if reservation.evicted:
                self._report_evicted(reservation.evicted)
            stored: list[bool] = []
            try:
                return self._publish(requests, reservation, stored)
            finally:
                stored += [False] * (len(reservation.entries) - len(stored))
                try:
                    index.settle(reservation, stored)
                except KvstrataError as error:  # the frames are there all the same
                    if isinstance(error, StorageFullError):
                        self._extra_bytes += _EXTRA * sum(page.cost for page in pages)
                    logger.warning("the index of %s is not up to date: %s", files.root, error)
        finally:
            with self._lock:
                self._writing -= 1

    def delete(self, objects: Sequence[ObjectId]) -> list[bool]:
        return self.index.delete(objects)

    def scan(self, namespace: bytes | None = None) -> Iterator[StoredObject]:
        files, index = self.files, self.index
        for fingerprint in files.namespaces() if namespace is None else [namespace]:
            for first_byte in files.shards(fingerprint):
                rows = index.shard(fingerprint, first_byte)
                for file in files.shard(fingerprint, first_byte):
                    row = rows.get(file.key)
                    used_us = file.modified_us if row is None else row.used_us
                    name = ObjectId(fingerprint, file.key)
                    yield StoredObject(name, files.cost(file.nbytes), used_us / 1e6)

    def usage(self) -> Usage:
        usage = self.index.usage()
        return Usage(usage.used_bytes, self._max_bytes or None, usage.objects)

    def health(self) -> Health:
        if not self.index.is_complete():
            return Health(HealthState.DEGRADED, "the index is being rebuilt from the frames")
        return Health(HealthState.OK)

    def check_integrity(self) -> None:
        self.index.check_integrity()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _check_limit(self, files: FrameFiles) -> None:
        largest = max(self._context.page_bytes.values(), default=0)
        cost = files.cost(HEADER_BYTES + largest)
        if 0 < self._max_bytes < cost:
            raise ConfigError(
                f"max_bytes is {format_size(self._max_bytes)}, and one page takes "
                f"{format_size(cost)}",
                remedy="raise it; a useful store holds thousands of pages",
                where=Where(key="max_bytes"),
            )

    def _make_database(self, files: FrameFiles) -> Database:
        return Database(files.root, files.root_fd, lambda: not files.namespaces(), self._lost)

    def _open_locked(self, files: FrameFiles, database: Database) -> None:
        """What needs the root's lock: nobody else opens, closes or removes dead owners now."""
        self._owner = Owner(files.root_fd)
        files.probe(self._owner.folder)
        database.open()
        self._index = StoreIndex(database, self._owner.name, files)
        self._bury_dead(files, self._index)
        self._reconciler = Reconciler(self._index, files, self._trim)

    def _bury_dead(self, files: FrameFiles, index: StoreIndex) -> bool:
        """End the reservations of processes that are gone and remove their files; True if there
        were any. Needs the root's lock."""
        dead = dead_owners(files.root_fd)
        if any(dead.values()) and self._database is not None:
            logger.warning("%s was in use when its machine stopped; rebuilding", files.root)
            self._database.renew()  # what the index had not yet on the device is lost
        known = set(os.listdir(os.path.join(files.root, OWNERS)))
        unknown = index.owners() - known
        for name in {*dead, *unknown}:
            index.recover(name)
        for name in dead:
            remove_owner(name, files.root_fd)
        return bool(dead or unknown)

    def _bury_dead_now(self, files: FrameFiles, index: StoreIndex) -> bool:
        """As `_bury_dead`, unless somebody else holds the root's lock."""
        if self._database is None:
            return False
        try:
            with self._database.try_hold_root() as is_held:
                return is_held and self._bury_dead(files, index)
        except (OSError, StorageError) as error:
            logger.warning("what dead processes left in %s stays: %s", files.root, error)
            return False

    def _release(self) -> None:
        if self._database is not None:
            self._database.close()
        if self._owner is not None and not self._writing:
            self._owner.abandon()
        if self._files is not None and not self._writing:
            self._files.close()
        self._files = self._owner = self._database = self._index = self._reconciler = None

    def _lost(self) -> None:
        if self._reconciler is not None:
            self._reconciler.request()

    def _limits(self) -> Limits:
        extra, self._extra_bytes = self._extra_bytes, 0
        free = self._free_bytes if self._min_free_bytes else None
        return Limits(self._max_bytes, free, extra)

    def _free_bytes(self) -> int:
        found = os.fstatvfs(self.files.root_fd)
        return found.f_bavail * found.f_frsize - self._min_free_bytes

    def _reserve(self, pages: Sequence[NewPage]) -> Reservation:
        """Room for `pages`; before anybody hears that there is none, the dead give theirs back."""
        index, files = self.index, self.files
        try:
            reservation = index.reserve(pages, self._limits())
            nothing_fits = Outcome.FULL in reservation.outcomes and not reservation.entries
            if nothing_fits and self._bury_dead_now(files, index):
                again = index.reserve(pages, self._limits())
                again.evicted += reservation.evicted
                return again
        except StorageFullError:  # the index itself finds no room on the disk
            self._extra_bytes += _EXTRA * sum(page.cost for page in pages)
            raise
        return reservation

    def _publish(
        self, requests: Sequence[WriteRequest], reservation: Reservation, stored: list[bool]
    ) -> list[PageResult]:
        """Write what may be written, in order; `stored` gets one value an entry."""
        files, results = self.files, []
        lost: set[ObjectId] = set()
        for request, outcome in zip(requests, reservation.outcomes, strict=True):
            result = PageResult(outcome)
            if outcome is Outcome.STORED:
                if request.parent in lost:
                    result = PageResult(Outcome.PARENT_MISSING)
                elif not self.index.is_current(reservation):
                    result = failure(StorageBusyError("the index was lost since this was begun"))
                else:
                    result = self._publish_one(files, request)
                stored.append(result.outcome is Outcome.STORED)
            elif outcome is Outcome.FULL:
                result = PageResult(outcome, 0, self._full_message())
            if not result.outcome.is_stored:
                lost.add(request.object)
            results.append(result)
        entries = zip(reservation.entries, stored, strict=True)
        try:
            files.sync_names(entry.object for entry, is_stored in entries if is_stored)
        except OSError as error:
            raise storage_error(error, files.root) from error
        return results

    def _publish_one(self, files: FrameFiles, request: WriteRequest) -> PageResult:
        try:
            outcome = files.publish(request.object, request.buffers)
        except OSError as error:
            result = failure(storage_error(error, object_path(request.object)))
            if result.outcome is Outcome.FULL:
                self._extra_bytes += _EXTRA * files.cost(request.nbytes)
            return result
        return PageResult(outcome, request.nbytes if outcome is Outcome.STORED else 0)

    def _full_message(self) -> str:
        limit = format_size(self._max_bytes) if self._max_bytes else "none"
        return f"no room can be made (max_bytes {limit}, min_free_bytes {self._min_free_bytes})"

    def _trim(self) -> None:
        """Evict what is over the limits; say that there may be room."""
        limits = self._limits()
        while evicted := self.index.trim(limits, _TRIM_BYTES):
            self._report_evicted(evicted)
        self._report_evicted([])

    def _report_evicted(self, objects: list[ObjectId]) -> None:
        if self._context.on_evicted is not None:
            self._context.on_evicted(objects)
