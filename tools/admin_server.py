"""The answering side of the admin socket: status, detach and attach of L3, while requests run.

server = AdminServer(path)      # the name is taken now, or ConfigError
server.start(runtime, config)   # one thread answers, until
server.close(deadline_s)        # which comes before runtime.close
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from dataclasses import dataclass

from kvstrata import __version__
from kvstrata.backends import StorageWorker
from kvstrata.configs import Config
from kvstrata.errors import (
    ConfigError,
    IntegrityError,
    KvstrataError,
    StorageBusyError,
    StorageError,
    Where,
)
from kvstrata.gpu_runtime import LocalGPURuntime
from kvstrata.tools.admin import (
    MAX_TEXT,
    Answer,
    AskStatus,
    Attach,
    Attached,
    BackendStatus,
    Detach,
    Detached,
    Refused,
    Request,
    Status,
    receive_request,
    send,
)
from kvstrata.tools.admin_socket import AdminSocket
from kvstrata.tools.stores import backend_config
from kvstrata.tools.workers import located, open_worker

MESSAGE_DEADLINE_S = 2.0
"""For a whole request to come, and for a whole answer to go."""
ACCEPT_PAUSE_S = 1.0
FORCED_CLOSE_S = 2.0
MAX_DRAIN_S = 3600.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Served:
    runtime: LocalGPURuntime
    config: Config
    since: float


class AdminServer:
    """Answers operators about one runtime. Any server built on the package can have one.

    Threads: `start` and `close` are called by whoever owns the runtime. One daemon thread answers,
    a connection at a time; a detach keeps the others waiting. It makes none of the calls of
    `RuntimeInterface`, which are the control thread's: of the runtime it uses `attached_storage`,
    `detach_storage` and `attach_storage`, and of the worker its questions, which any thread may
    call. They hold the runtime's lock for the exchange itself only, never while a backend is
    drained, closed or opened, so serving goes on; control learns of the exchange as of any change
    of a tier, by `TierDegraded` out of its next `poll`.

    An exception is an answer (`Refused`) and ends nothing.
    """

    def __init__(self, path: str, where: Where | None = None) -> None:
        """Take the name `path`, which `where` gives. Raises ConfigError."""
        self._socket = AdminSocket(path, where or Where())
        self._wake, self._woken = socket.socketpair()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    @property
    def path(self) -> str:
        return self._socket.path

    def start(self, runtime: LocalGPURuntime, config: Config) -> None:
        """Begin to answer. What can be attached are the backends of `config`."""
        assert self._thread is None, "start once"
        served = _Served(runtime, config, time.monotonic())
        selector = selectors.DefaultSelector()  # here: `close` may come before the thread runs
        selector.register(self._socket.channel, selectors.EVENT_READ)
        selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(
            target=self._serve, args=(served, selector), name="kvstrata-admin", daemon=True
        )
        self._thread.start()

    def close(self, deadline_s: float) -> None:
        """Give up the name, and wait for a command that is under way, `deadline_s` at most; closing
        the runtime cuts it short. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake.close()
        self._socket.close()
        if self._thread is None:
            self._woken.close()
            return
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            logger.warning("a command of the admin socket was still under way")

    def check_integrity(self) -> None:
        """Raise AssertionError when it neither is closed nor can be reached."""
        self._socket.check_integrity()
        if self._thread is not None and not self._closing.is_set():
            assert self._thread.is_alive()

    # ── the thread ───────────────────────────────────────────────────────────────────────────────

    def _serve(self, served: _Served, selector: selectors.BaseSelector) -> None:
        listener = self._socket.channel
        with self._woken, selector:
            while not self._closing.is_set():
                selector.select()
                try:
                    channel, _ = listener.accept()
                except BlockingIOError:  # woken; or the other side is gone again
                    continue
                except OSError:  # no descriptors left, or closed
                    if not self._closing.wait(ACCEPT_PAUSE_S):
                        logger.exception("the admin socket takes no connection")
                    continue
                with channel:
                    self._answer(channel, served)

    def _answer(self, channel: socket.socket, served: _Served) -> None:
        """One request, one answer."""
        answer: Answer
        try:
            request = receive_request(channel, time.monotonic() + MESSAGE_DEADLINE_S)
            answer = _do(request, served)
        except Exception as error:  # it is the answer
            if not isinstance(error, KvstrataError) or isinstance(error, IntegrityError):
                logger.exception("the admin socket")
            answer = Refused.of(error)
        try:
            send(channel, answer, time.monotonic() + MESSAGE_DEADLINE_S)
        except (OSError, StorageError) as error:
            logger.warning("an operator did not wait for the answer: %s", error)


def _do(request: Request, served: _Served) -> Answer:
    match request:
        case AskStatus():
            return _status(served)
        case Detach():
            return _detach(request, served)
        case Attach():
            return _attach(request, served)


def _detach(request: Detach, served: _Served) -> Detached:
    begun = time.monotonic()
    worker = served.runtime.attached_storage()
    if worker is None:
        return Detached(backend="", complete=True, waiting_pages=0, stuck_threads=0, seconds=0.0)
    waiting = worker.stats().queued_pages_now["store"]
    drain_s = min(max(0.0, request.drain_s), MAX_DRAIN_S)
    if drain_s > 0:  # the runtime gives half of its deadline to what waits
        logger.info("L3 %s is detached, drained for %g s at most", worker.name, drain_s)
        complete = served.runtime.detach_storage(2 * drain_s)
    else:
        logger.info("L3 %s is detached by force", worker.name)
        served.runtime.detach_storage(FORCED_CLOSE_S, force=True)
        complete = waiting == 0
    stuck = worker.stats().abandoned_threads
    return Detached(
        backend=worker.name,
        complete=complete and not stuck,
        waiting_pages=waiting,
        stuck_threads=stuck,
        seconds=time.monotonic() - begun,
    )


def _attach(request: Attach, served: _Served) -> Attached:
    begun = time.monotonic()
    config, name = served.config, request.backend
    backend_config(config, name, "backends attach")
    attached = served.runtime.attached_storage()
    if attached is not None:
        raise StorageBusyError(
            f"backend {attached.name!r} is attached; first: kvstrata backends detach"
        )
    worker = open_worker(config, name)
    assert worker is not None, "it has a name"
    try:
        served.runtime.attach_storage(worker)
    except ConfigError as error:
        raise located(error, config, name) from error
    logger.info("L3 is %s now", name)
    return Attached(backend=name, seconds=time.monotonic() - begun)


def _status(served: _Served) -> Status:
    config = served.config
    return Status(
        pid=os.getpid(),
        version=__version__,
        config=str(config.source.file or ""),
        uptime_s=time.monotonic() - served.since,
        backends=sorted(config.backends),
        l3=_backend_status(served),
    )


def _backend_status(served: _Served) -> BackendStatus | None:
    """The questions to the backend itself end at the worker's `ask_deadline_s`."""
    attached = served.runtime.attached_storage()
    worker = attached or served.runtime.core.worker
    if worker is None:
        return None
    health, message = ("detached", "") if attached is None else _health(attached)
    try:
        usage = None if attached is None else attached.usage()
    except KvstrataError:
        usage = None
    stats = worker.stats()
    known = served.config.backends.get(worker.name)
    return BackendStatus(
        name=worker.name,
        plugin=known.plugin if known else "",
        attached=attached is not None,
        health=health,
        message=message,
        queued_pages=stats.queued_pages_now,
        running_jobs=stats.running_jobs_now,
        waiting_for_room=stats.waiting_for_room_now,
        pages={
            operation: {outcome.value: n for outcome, n in pages.items()}
            for operation, pages in stats.pages.items()
        },
        calls=stats.calls,
        retries=stats.retries,
        bytes_moved=stats.bytes_moved,
        queue_s=stats.queue_s,
        io_s=stats.io_s,
        check_s=stats.check_s,
        copy_s=stats.copy_s,
        late_pages=stats.late_pages,
        corrupt_deleted=stats.corrupt_deleted,
        breaker_opened=stats.breaker_opened,
        kills=stats.kills,
        abandoned_threads=stats.abandoned_threads,
        used_bytes=usage.used_bytes if usage else None,
        limit_bytes=usage.limit_bytes if usage else None,
        objects=usage.objects if usage else None,
    )


def _health(worker: StorageWorker) -> tuple[str, str]:
    health = worker.health()
    return health.state.value, health.message[:MAX_TEXT]
