"""Makes the index agree with the disk, in the background: after every start, and when the index
was lost.

Frames that lie there without a row are entered from their own headers, rows whose file is gone are
dropped, and what is over the limits is evicted. One process on a root scans at a time.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from kvstrata.backends.base import ObjectId
from kvstrata.backends.filesystem.booking import NewPage
from kvstrata.backends.filesystem.files import FoundFile, FrameFiles
from kvstrata.backends.filesystem.index import FoundFrame, Mended, StoreIndex
from kvstrata.backends.filesystem.oserrors import storage_error
from kvstrata.backends.filesystem.owners import try_lock
from kvstrata.backends.frame import HEADER_BYTES, parse_header
from kvstrata.errors import CorruptFrameError, KvstrataError, StorageBusyError

logger = logging.getLogger(__name__)

_CHUNK = 256
"""Most frames that one transaction enters: others wait for it."""
_ASK_AGAIN_S = 0.1
_RETRY_S = 0.1
"""The pause after a scan that failed; doubled with each that follows, up to the next."""
_RETRY_MOST_S = 30.0


class Reconciler:
    """A thread that scans when it is asked to, and again when a scan fails, until one does not:
    nothing is stored under a limit before. `trim` evicts what is over the limits; it is called
    before and after a scan."""

    def __init__(self, index: StoreIndex, files: FrameFiles, trim: Callable[[], None]) -> None:
        self._index = index
        self._files = files
        self._trim = trim
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._condition = threading.Condition()
        self._wanted = False
        self._busy = False
        self._stop = threading.Event()
        self.mended = Mended(0, 0)
        """Of all scans together. Written by the scanning thread."""
        self._thread = threading.Thread(target=self._serve, name="kvstrata-scan", daemon=True)

    def start(self) -> None:
        self.request()
        self._thread.start()

    def request(self) -> None:
        """Scan (again). Does not block."""
        with self._condition:
            self._wanted = True
            self._condition.notify_all()

    def stop(self, deadline_s: float) -> bool:
        """True if the thread has ended."""
        self._stop.set()
        with self._condition:
            self._condition.notify_all()
        if self._thread.is_alive():
            self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def wait(self, deadline_s: float) -> bool:
        """True when every scan that was asked for has ended well."""
        with self._condition:
            return self._condition.wait_for(lambda: not (self._wanted or self._busy), deadline_s)

    @property
    def is_busy(self) -> bool:
        return self._wanted or self._busy

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _serve(self) -> None:
        pause_s = _RETRY_S
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._wanted or self._stop.is_set())
                if self._stop.is_set():
                    return
                self._wanted, self._busy = False, True
            is_well = self._try()
            with self._condition:
                self._busy = False
                self._wanted |= not is_well
                self._condition.notify_all()
            if is_well:
                pause_s = _RETRY_S
            else:
                self._stop.wait(pause_s)
                pause_s = min(2 * pause_s, _RETRY_MOST_S)

    def _try(self) -> bool:
        """True if there is no need to scan again."""
        try:
            self._reconcile()
        except (OSError, KvstrataError) as error:
            if not self._stop.is_set():
                logger.warning("a scan of %s failed; it is repeated: %s", self._files.root, error)
        except Exception:  # a bug; the thread has to live on all the same
            logger.exception("a scan of %s failed; it is repeated", self._files.root)
        else:
            return True
        return False

    def _reconcile(self) -> None:
        """Scan, unless another process does; then wait until the index is complete."""
        while not self._stop.is_set():
            lock = try_lock("scan.lock", self._files.root_fd)
            if lock is not None:
                try:
                    self._scan()
                finally:
                    os.close(lock)
                return
            if self._index.is_complete():
                return
            self._stop.wait(_ASK_AGAIN_S)

    def _scan(self) -> None:
        index, files = self._index, self._files
        generation = index.generation
        if index.is_complete():
            self._trim()
        for namespace in {*files.namespaces(), *index.namespaces()}:
            for first_byte in sorted({*files.shards(namespace), *index.shards(namespace)}):
                if self._stop.is_set():
                    return
                try:
                    self._scan_shard(namespace, first_byte)
                except OSError as error:  # of one folder; the others are not less known for it
                    if _may_pass(error):
                        raise
                    logger.warning("part of %s cannot be scanned: %s", files.root, error)
        index.set_complete(generation)
        self._trim()

    def _scan_shard(self, namespace: bytes, first_byte: int) -> None:
        """The files are listed first: what changes afterwards the index has in its rows, and it
        looks again at whatever differs."""
        files = list(self._files.shard(namespace, first_byte))
        rows = self._index.shard(namespace, first_byte)
        found = []
        for file in files:
            row = rows.pop(file.key, None)
            cost = self._files.cost(file.nbytes)
            if row is None or row.cost != cost:
                found.append(self._describe(ObjectId(namespace, file.key), file, cost))
        vanished = [ObjectId(namespace, key) for key in rows]
        for at in range(0, max(len(found), len(vanished)), _CHUNK):
            part = self._index.reconcile(found[at : at + _CHUNK], vanished[at : at + _CHUNK])
            entered, dropped = self.mended
            self.mended = Mended(entered + part.entered, dropped + part.dropped)

    def _describe(self, name: ObjectId, file: FoundFile, cost: int) -> FoundFrame:
        """What the frame says of itself. One that cannot be read is entered as a chain of its own:
        it takes room, a load will find out."""
        page = NewPage(name, None, 0, cost)
        try:
            nbytes = self._files.read(name, (self._header,))
            header = parse_header(self._header[:nbytes])
        except CorruptFrameError:
            return FoundFrame(page, file.modified_us)
        except OSError as error:
            if _may_pass(error):
                raise
            return FoundFrame(page, file.modified_us)
        if header.object == name and header.parent is not None:
            page = NewPage(name, header.parent, header.depth, cost)
        return FoundFrame(page, file.modified_us)


def _may_pass(error: OSError) -> bool:
    """No fault of the folder or file: the same may work soon."""
    return isinstance(storage_error(error, ""), StorageBusyError)
