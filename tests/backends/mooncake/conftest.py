"""A real master and real stores, in a network of the tests' own that has loopback only."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvstrata.backends import BackendContext, HostRegion, PageIO
from kvstrata.backends.mooncake import MooncakeBackend, MooncakeOptions
from kvstrata.backends.mooncake.admin import Admin
from kvstrata.backends.mooncake.cluster import LocalCluster
from kvstrata.backends.mooncake.network import enter_private_network, is_exposed, return_to_network
from kvstrata.errors import StorageError

WAIT_S = 20.0
QUICK = ("-client_ttl=2",)
"""The master gives a dead store up after two seconds, not ten."""

_network: list[int] = []
"""The tests' own network. One a process: the client's threads stay where they began."""


@pytest.fixture(scope="module", autouse=True)
def network() -> Iterator[None]:
    """This thread's network has loopback only."""
    if _network:
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        return_to_network(os.dup(_network[0]))
    else:
        try:
            before = enter_private_network()
        except StorageError as error:
            pytest.skip(f"needs root: {error}")
        _network.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))
    assert not is_exposed()
    yield
    return_to_network(before)


def until(condition: Callable[[], object], deadline_s: float = WAIT_S) -> float:
    """Ask until it is so; the seconds that took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < deadline_s, "it did not come to be"
        time.sleep(0.01)
    return time.monotonic() - start


@pytest.fixture(scope="session", name="until")
def until_() -> Callable[..., float]:
    return until


class Site:
    """Clusters and backends that end with the test."""

    def __init__(self, stack: contextlib.ExitStack, port: int) -> None:
        self._stack = stack
        self.options = MooncakeOptions(
            master=f"127.0.0.1:{port}", admin=f"127.0.0.1:{port + 1}", segment_bytes="128MiB"
        )

    def start(self, stores: int = 2, *flags: str, **changes: object) -> LocalCluster:
        self.options = msgspec.structs.replace(self.options, **changes)
        self.cluster = LocalCluster(self.options, stores, (*QUICK, *flags))
        self._stack.callback(self.cluster.stop, 0.0)
        self.cluster.start()
        return self.cluster

    @property
    def admin(self) -> Admin:
        return Admin(self.options.admin, 2.0)

    def open(self, context: BackendContext | None = None, **changes: object) -> MooncakeBackend:
        backend = self.make(**changes)
        self._stack.callback(backend.close, 5.0)
        backend.open(context or BackendContext("tested"))
        return backend

    def make(self, **changes: object) -> MooncakeBackend:
        return MooncakeBackend(msgspec.structs.replace(self.options, **changes))


@pytest.fixture(scope="module")
def shared(network: None) -> Iterator[Site]:
    """A master and two stores for all tests of a module that do them no harm."""
    with contextlib.ExitStack() as stack:
        site = Site(stack, 21000)
        site.start(2)
        yield site


@pytest.fixture
def site(network: None) -> Iterator[Site]:
    """A place for a master and stores that the test may kill."""
    with contextlib.ExitStack() as stack:
        yield Site(stack, 21100)


class Staging:
    """Pages in shared memory, as staging has them."""

    def __init__(self, pages: int, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.stride = -(-page_bytes // 4096) * 4096
        self.fd = os.memfd_create("tests")
        os.ftruncate(self.fd, pages * self.stride)
        self._map = mmap.mmap(self.fd, pages * self.stride)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.region = HostRegion(self.fd, address, pages * self.stride)

    def page(self, i: int) -> memoryview:
        start = i * self.stride
        return memoryview(self._map)[start : start + self.page_bytes]

    def io(self, page: PageIO, i: int) -> PageIO:
        """`page`, with its payload in staging page `i`."""
        payload = self.page(i)
        payload[:] = page.payload
        return PageIO(page.object, page.parent, page.depth, payload)


@pytest.fixture
def make_staging() -> Iterator[Callable[[int, int], Staging]]:
    made: list[Staging] = []

    def make(pages: int, page_bytes: int) -> Staging:
        made.append(Staging(pages, page_bytes))
        return made[-1]

    yield make
    for staging in made:
        os.close(staging.fd)
