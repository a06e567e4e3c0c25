"""The published client, as this backend uses it: typed, safe to fork and to leave behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from kvstrata.backends.mooncake.codes import describe, storage_error
from kvstrata.backends.mooncake.options import MooncakeOptions
from kvstrata.backends.mooncake.requirements import load_client, rdma_devices
from kvstrata.backends.process.child import HOST_MODULE
from kvstrata.errors import ConfigError, StorageUnavailableError, Where
from kvstrata.units import parse_size

_T = TypeVar("_T")

POLLING_NICE = 10
"""So much the thread that waits for a transfer gives way to others."""

MOVING_CALLS, MOVING_BYTES = 2, 72 << 20
"""Calls, and their bytes, that move over TCP at once. One thread of the library moves them all: of
more, all end late and together, and nothing moves while their callers check what they got. The
bytes are those of two calls of a worker, with their headers (of pages of 32 KiB and more)."""
PATIENCE_S = 1.0
"""A call waits so long for its turn, and goes on then: others may hang."""

_PING_S = 1.0
"""A thread of the library sleeps so long between two words to the master, and closing waits for it
to wake up, with the interpreter held."""
_BEFORE_PING_S = 0.05
_MOST_TRIES = 5
_closing = threading.Lock()

_applied: dict[str, str] = {}
_applying = threading.Lock()


def apply_environment(variables: Mapping[str, str]) -> None:
    """Set what the library reads from the environment of the process.

    One process has one environment: raises `ConfigError` when another backend of this process has
    set one of them to something else.
    """
    with _applying:
        for name, value in variables.items():
            if _applied.get(name, value) != value:
                raise ConfigError(
                    f"{name} is {_applied[name]!r} for another mooncake backend of this process "
                    f"and {value!r} for this one",
                    remedy='give both the same value, or isolation = "process"',
                    where=Where(key="environment"),
                )
        _applied.update(variables)
        os.environ.update(variables)


def transport(options: MooncakeOptions) -> str:
    """The protocol that is really used. Raises `ConfigError` where RDMA is asked for and none is
    here: the library itself would take TCP without a word."""
    if options.protocol == "tcp":
        return "tcp"
    found = rdma_devices()
    absent = [name for name in options.devices if name not in found]
    if found and not absent:
        return "rdma"
    if options.tcp_fallback:
        return "tcp"
    message = (
        f"there is no RDMA device {', '.join(absent)} (found: {', '.join(found)})"
        if found
        else "there is no RDMA device on this machine (/sys/class/infiniband is empty)"
    )
    raise ConfigError(
        message,
        remedy='use protocol = "tcp", or tcp_fallback = true to take TCP where there is none',
        where=Where(key="devices" if found else "protocol"),
    )


class _Turns:
    """Who moves bytes now. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls, self._bytes = 0, 0

    @contextlib.contextmanager
    def turn(self, nbytes: int) -> Iterator[None]:
        """Waits for it, at most PATIENCE_S."""
        with self._changed:
            is_mine = self._changed.wait_for(lambda: self._has_room(nbytes), PATIENCE_S)
            if is_mine:
                self._calls += 1
                self._bytes += nbytes
        try:
            yield
        finally:
            if is_mine:
                with self._changed:
                    self._calls -= 1
                    self._bytes -= nbytes
                    self._changed.notify_all()

    def _has_room(self, nbytes: int) -> bool:
        fits = self._calls < MOVING_CALLS and self._bytes + nbytes <= MOVING_BYTES
        return self._calls == 0 or fits


class Client:
    """One `MooncakeDistributedStore`. Calls may come from any thread; `close` when none is under
    way. Nothing here waits for longer than the library's own timeouts."""

    def __init__(self, options: MooncakeOptions, protocol: str) -> None:
        """Connect. `setup` holds the interpreter, so ask whether the master is there first.

        Raises `StorageUnavailableError` when the library cannot set itself up.
        """
        apply_environment(options.client_environment())
        library = load_client()
        self._library: Any = library
        self._options = options
        self._store: Any = library.MooncakeDistributedStore()
        self._is_alone = _is_alone()
        self._is_polite = self._is_alone and _may_be_polite()
        self._turns = _Turns() if protocol == "tcp" else None
        self._registered: set[int] = set()
        _open_stores.add(self)
        settings: dict[str, Any] = {
            "local_hostname": options.host,
            "metadata_server": options.metadata,
            "global_segment_size": options.segment_size,
            "local_buffer_size": parse_size(options.local_buffer_bytes),
            "protocol": protocol,
            "rdma_devices": ",".join(options.devices),
            "master_server_addr": options.master,
            "enable_ssd_offload": options.ssd_offload,
            "ssd_offload_path": options.ssd_offload_path,
            "tenant_id": options.tenant,
        }
        if options.client_http_port:
            settings["enable_client_http_server"] = True
            settings["client_http_port"] = options.client_http_port
        code = self._store.setup(**settings)
        if code != 0:
            self.close()
            raise StorageUnavailableError(
                f"the Mooncake client cannot reach {options.master}: {describe(code)}"
            )
        self._since_s = time.monotonic()

    @property
    def name(self) -> str:
        """How the store calls this client, and its segment."""
        return str(self._store.get_hostname())

    def register(self, address: int, nbytes: int) -> None:
        """Make memory known to the transfer engine. Raises `StorageError`."""
        code = self._store.register_buffer(address, nbytes)
        if code != 0:
            raise storage_error(code, f"{nbytes} bytes cannot be registered")
        self._registered.add(address)

    def unregister(self, address: int) -> None:
        self._store.unregister_buffer(address)
        self._registered.discard(address)

    def put(
        self, keys: list[str], addresses: list[int], sizes: list[int], segments: Sequence[str]
    ) -> list[int]:
        """0 or a code each. A key that exists gives 0 and keeps its bytes."""
        config = self._config(segments)
        return list(
            self._poll(sum(sizes), self._store.batch_put_from, keys, addresses, sizes, config)
        )

    def put_parts(
        self,
        keys: list[str],
        addresses: list[list[int]],
        sizes: list[list[int]],
        segments: Sequence[str],
    ) -> list[int]:
        """As `put`, each object from several buffers."""
        config = self._config(segments)
        nbytes, call = sum(map(sum, sizes)), self._store.batch_put_from_multi_buffers
        return list(self._poll(nbytes, call, keys, addresses, sizes, config))

    def get(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        """The object's bytes or a code each. -600: it is larger than the buffer."""
        return list(self._poll(sum(sizes), self._store.batch_get_into, keys, addresses, sizes))

    def get_parts(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        """As `get`, each object into several buffers whose sizes add up to its own."""
        nbytes, call = sum(map(sum, sizes)), self._store.batch_get_into_multi_buffers
        return list(self._poll(nbytes, call, keys, addresses, sizes))

    def exists(self, keys: list[str]) -> list[bool]:
        """Raises `StorageError` when the master does not answer."""
        codes = list(self._store.batch_is_exist(keys))
        if codes and min(codes) < 0:
            raise storage_error(min(codes), "existence")
        return [code == 1 for code in codes]

    def size(self, key: str) -> int:
        """Bytes of an object, or a code."""
        return int(self._store.get_size(key))

    def remove(self, keys: list[str]) -> list[int]:
        """0 or a code each. What somebody reads now is removed as well: frames carry checksums."""
        return list(self._store.batch_remove(keys, True))

    def places(self, keys: list[str]) -> dict[str, tuple[str, int]]:
        """Where objects lie: endpoint ("" for a disk) and size. Absent ones are not in it."""
        found: dict[str, tuple[str, int]] = {}
        for key, replicas in self._store.batch_get_replica_desc(keys).items():
            for replica in replicas:
                if replica.is_memory_replica():
                    place = replica.get_memory_descriptor().buffer_descriptor
                    found[key] = (place.transport_endpoint, place.size)
                    break
                found[key] = ("", 0)
        return found

    def retire(self, *, process_ends: bool = False) -> None:
        """Close it when nobody will use it any more, without a wait: on return it knows no memory
        but its own. One that gives a segment is closed at once, which takes two seconds. In a
        backend's own process, which then ends, there is no need to."""
        if self._store is None:
            return
        if self._options.segment_size:
            self.close()
            return
        for address in list(self._registered):
            self.unregister(address)
        if self._is_alone and process_ends:  # the system takes back what it has
            self.abandon()
            _leave_without_cleanup()
            return
        threading.Thread(target=self._close_later, name="kvstrata-mooncake-close").start()

    def _close_later(self) -> None:
        """Closing holds the interpreter until the library's thread wakes up: begin just before.
        After hours nobody knows when that is, and it may be a second."""
        for _ in range(_MOST_TRIES):
            time.sleep(max(0.0, self._before_ping_s() - _BEFORE_PING_S))
            with _closing:  # whoever waited for another one here may be too late
                if self._before_ping_s() <= _BEFORE_PING_S:
                    self.close()
                    return
        self.close()

    def _before_ping_s(self) -> float:
        return _PING_S - (time.monotonic() - self._since_s) % _PING_S

    def close(self) -> None:
        """Idempotent. Holds the interpreter for up to a second; see `retire`."""
        store, self._store = self._store, None
        _open_stores.discard(self)
        if store is not None:
            store.close()

    def abandon(self) -> None:
        """Leave it behind as it is: this process is a fork's child, or is about to end."""
        store, self._store = self._store, None
        _open_stores.discard(self)
        if store is not None:
            _leak(store)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _poll(self, nbytes: int, call: Callable[..., _T], *args: object) -> _T:
        """A call in which the library moves bytes, when it is its turn."""
        with self._turns.turn(nbytes) if self._turns else contextlib.nullcontext():
            return self._polite(call, *args) if self._is_polite else call(*args)

    @staticmethod
    def _polite(call: Callable[..., _T], *args: object) -> _T:
        """Who makes such a call only polls for its end, without a pause: so it makes room for the
        threads that move the bytes."""
        thread = threading.get_native_id()
        before = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, before + POLLING_NICE)
        try:
            return call(*args)
        finally:
            os.setpriority(os.PRIO_PROCESS, thread, before)

    def _config(self, segments: Sequence[str]) -> Any:
        options, config = self._options, self._library.ReplicateConfig()
        config.replica_num = 1  # copies are ours, under keys of their own
        config.data_type = self._library.ObjectDataType.KVCACHE
        config.with_hard_pin = options.hard_pin
        config.prefer_alloc_in_same_node = options.prefer_same_node
        if segments:
            config.preferred_segments = list(segments)
        if options.soft_pin_s:
            config.soft_pin_action = self._library.SoftPinAction.ENABLE
            config.soft_pin_ttl_ms = int(options.soft_pin_s * 1000)
        return config


def _is_alone() -> bool:
    """Whether this process is for a backend only: elsewhere a thread of low priority that holds
    the interpreter for a moment could keep the server waiting."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name == HOST_MODULE


def _may_be_polite() -> bool:
    """Whether a thread may take back the priority that it gave up. Tried by one that ends."""
    found = False

    def attempt() -> None:
        nonlocal found
        thread = threading.get_native_id()
        before = os.getpriority(os.PRIO_PROCESS, thread)
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, thread, before + 1)
            os.setpriority(os.PRIO_PROCESS, thread, before)
            found = True

    trial = threading.Thread(target=attempt, name="kvstrata-priority")
    trial.start()
    trial.join()
    return found


_open_stores: weakref.WeakSet[Client] = weakref.WeakSet()


def _leak(store: object) -> None:
    """No destructor, ever: it would wait for threads that are not there."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))


def _forget_after_fork() -> None:
    """A child has the library's memory and none of its threads, and the library cleans up when a
    process exits: it would wait for them. So the child leaves without that."""
    global _closing  # noqa: PLW0603 (a lock cannot be freed by who does not hold it)
    _closing = threading.Lock()  # a thread that is not here may have held it
    clients = list(_open_stores)
    for client in clients:
        client.abandon()
    if clients:
        _leave_without_cleanup()


def _leave_without_cleanup() -> None:
    """This process will exit without the cleanup of C libraries. Python's own comes before."""
    libc = ctypes.CDLL(None)
    # `on_exit` handlers get the exit code, and the last one runs first: it is `_exit` itself.
    libc.on_exit(libc._exit, None)


os.register_at_fork(after_in_child=_forget_after_fork)
