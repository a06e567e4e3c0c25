"""The connection to a store: made, watched, made anew. A master that is away stalls nobody."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvstrata.backends.base import Health, HealthState
from kvstrata.backends.mooncake.admin import Admin, Segment, answers
from kvstrata.backends.mooncake.client import Client
from kvstrata.backends.mooncake.options import MooncakeOptions
from kvstrata.errors import KvstrataError, StorageError, StorageUnavailableError

logger = logging.getLogger(__name__)

PROBE_S = 0.4
"""Between two looks at the master and its segments."""
STALE_S = 1.6
"""A probe that has no answer for so long is a bad one: the truth is out within two seconds."""
REBUILD_S = 5.0
"""A client whose calls fail for so long, while the master serves, is replaced."""
_SOON_S = 0.1
_MOST_PROBED = 32
"""Segments whose address is tried in one look, one after the other."""
_PROBE_KEY = "kvstrata/probe"
_NOT_YET = "not connected yet"


@dataclass(frozen=True, slots=True)
class View:
    """What the last look found. Immutable."""

    problem: str = _NOT_YET
    """Why nothing works; empty: the master answers."""
    segments: tuple[Segment, ...] = ()
    dead: frozenset[str] = frozenset()
    """Endpoints of segments that the master still counts with, and that do not answer."""

    @property
    def live(self) -> tuple[Segment, ...]:
        return tuple(s for s in self.segments if s.endpoint not in self.dead)


class _Generation:
    """A client and how many use it."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.users = 0
        self.is_retired = False


class Link:
    """Any thread. One thread of its own looks at the master, and connects.

    `register` is called with each new client before anybody uses it.
    """

    def __init__(
        self,
        options: MooncakeOptions,
        protocol: str,
        register: Callable[[Client], None],
        on_segments: Callable[[View], None],
    ) -> None:
        self._options = options
        self._protocol = protocol
        self._register = register
        self._on_segments = on_segments
        address = options.admin_address
        self.admin = None if address is None else Admin(address, min(1.0, options.rpc_timeout_s))
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._stop = threading.Event()
        self._current: _Generation | None = None
        self._view = View()
        self._looked_at = time.monotonic()
        """When the look that is under way, or the last one, began."""
        self._is_looking = False
        self._failing_since: float | None = None
        self._probed = 0
        self.connections = 0
        """Clients that were made so far."""
        self._thread: threading.Thread | None = None

    # ── life ─────────────────────────────────────────────────────────────────────────────────────

    def start(self, name: str) -> None:
        """Connect if the master is there; else the thread does when it is. Raises `ConfigError`
        for what can never work."""
        self._look()
        if problem := self._view.problem:
            logger.warning("backend %s: %s; trying on", name, problem)
        self._thread = threading.Thread(
            target=self._watch, name=f"kvstrata-{name}-link", daemon=True
        )
        self._thread.start()

    def close(self, deadline_s: float) -> bool:
        """False: calls are still under way at the deadline, and the client is left behind."""
        end = time.monotonic() + deadline_s
        self._stop.set()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline_s))
        with self._lock:
            generation, self._current = self._current, None
            self._view = View("closed")
            if generation is None:
                return True
            generation.is_retired = True
            while generation.users and (left := end - time.monotonic()) > 0:
                self._idle.wait(left)
            is_idle = not generation.users
        if is_idle:
            generation.client.retire(process_ends=True)
        else:
            generation.client.abandon()
        return is_idle

    # ── use ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def view(self) -> View:
        return self._view

    @contextlib.contextmanager
    def use(self) -> Iterator[Client]:
        """The client. Raises `StorageUnavailableError` at once when the master is known to be
        away: its own calls would take seconds to find out."""
        with self._lock:
            generation, problem = self._current, self._view.problem
            if generation is None or problem:
                raise StorageUnavailableError(problem or "not connected")
            generation.users += 1
        try:
            yield generation.client
        finally:
            with self._lock:
                generation.users -= 1
                done = generation.is_retired and not generation.users
                self._idle.notify_all()
            if done and self._current is not generation and not self._stop.is_set():
                generation.client.retire()

    def health(self) -> Health:
        """True within two seconds, whatever happens to master or segments. Never blocks."""
        view, late = self._view, time.monotonic() - self._looked_at
        if view.problem:
            return Health(HealthState.OPEN, view.problem)
        if self._is_looking and late > STALE_S:
            return Health(
                HealthState.OPEN, f"no answer from {self._options.master} for {late:.1f} s"
            )
        if self.admin is not None and not view.segments:
            return Health(HealthState.DEGRADED, "the store has no segment: nothing can be stored")
        if view.dead:
            return Health(
                HealthState.DEGRADED,
                f"{len(view.dead)} of {len(view.segments)} segments do not answer: "
                f"{', '.join(sorted(view.dead))}",
            )
        if self._protocol != self._options.protocol:
            return Health(HealthState.OK, "no RDMA device is here: pages travel over TCP")
        return Health(HealthState.OK)

    def check_integrity(self) -> None:
        with self._lock:
            assert self._current is None or not self._current.is_retired
            assert self._current is None or self._current.users >= 0
            assert self._view.dead <= {s.endpoint for s in self._view.segments}

    # ── the thread ───────────────────────────────────────────────────────────────────────────────

    def _watch(self) -> None:
        while not self._stop.wait(PROBE_S):
            try:
                self._look()
            except KvstrataError as error:
                self._view = View(str(error))
            except Exception:
                logger.exception("the watch of %s failed; it goes on", self._options.master)

    def _look(self) -> None:
        self._looked_at, self._is_looking = time.monotonic(), True
        before = self._view
        try:
            view = self._find()
            if view.problem and not before.problem and answers(self._options.master, _SOON_S):
                view = self._find()  # one slow answer, on a busy machine, is no absence
        finally:
            self._is_looking = False
        self._view = view
        if before.problem not in (view.problem, _NOT_YET):
            logger.warning("mooncake %s: %s", self._options.master, view.problem or "is back")
        names = {s.name for s in view.live}
        if not view.problem and names != {s.name for s in before.live}:
            self._on_segments(view)

    def _find(self) -> View:
        options = self._options
        if not answers(options.master, options.connect_timeout_s):
            return View(f"the master {options.master} does not answer")
        segments: tuple[Segment, ...] = ()
        try:
            if self.admin is not None:
                if not self.admin.is_serving():
                    return View(f"the master {options.master} is not serving")
                segments = tuple(self.admin.segments())
        except StorageError as error:
            return View(str(error))
        try:
            self._connect()
            assert self._current is not None
            self._current.client.exists([_PROBE_KEY])
        except StorageError as error:
            self._note_failure()
            return View(str(error))
        self._failing_since = None
        return View("", segments, self._dead(segments))

    def _connect(self) -> None:
        """Make a client if there is none."""
        if self._current is not None:
            return
        client = Client(self._options, self._protocol)
        try:
            self._register(client)
        except BaseException:
            client.close()
            raise
        with self._lock:
            self._current = _Generation(client)
            self.connections += 1

    def _note_failure(self) -> None:
        """The master serves, and the client cannot use it: after a while it is replaced."""
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        if now - self._failing_since < REBUILD_S or self._current is None:
            return
        logger.warning("the client of %s does not recover: connecting anew", self._options.master)
        self._failing_since = None
        with self._lock:
            old, self._current = self._current, None
            old.is_retired = True
            is_idle = not old.users
        if is_idle:
            old.client.retire()

    def _dead(self, segments: tuple[Segment, ...]) -> frozenset[str]:
        """Which endpoints do not answer. Many segments take several looks."""
        if len(segments) <= _MOST_PROBED:
            asked = segments
        else:
            first = self._probed % len(segments)
            asked = (segments + segments)[first : first + _MOST_PROBED]
            self._probed = first + _MOST_PROBED
        known = self._view.dead & {s.endpoint for s in segments}
        tried = {s.endpoint for s in asked}
        timeout_s = min(0.2, self._options.connect_timeout_s)
        silent = {endpoint for endpoint in tried if not answers(endpoint, timeout_s)}
        return frozenset((known - tried) | silent)
