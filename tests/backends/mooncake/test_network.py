"""The store is on another host, and the network between is cut: a second network namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from kvstrata.backends.base import HealthState
from kvstrata.backends.mooncake.network import enter_private_network, return_to_network
from kvstrata.boundary import Outcome

PAGE = 65536
SOON_S = 8.0
"""For what takes two seconds at most on a machine that does nothing else."""
NEAR, FAR = "10.99.0.1", "10.99.0.2"


class FarHost:
    """A network of its own, with a cable to the tests' network."""

    def __init__(self) -> None:
        self._here = enter_private_network()
        self._there = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self._holder = subprocess.Popen(["sleep", "600"])  # keeps it, and has a pid for `ip`
        return_to_network(os.dup(self._here))
        pid = str(self._holder.pid)
        self._ip("link", "add", "near", "type", "veth", "peer", "name", "far", "netns", pid)
        self._ip("addr", "add", f"{NEAR}/24", "dev", "near")
        self._ip("link", "set", "near", "up")

    def run(self, work: Callable[[], None]) -> None:
        """On that host. This is the thread whose children belong there meanwhile."""
        return_to_network(os.dup(self._there))
        try:
            work()
        finally:
            return_to_network(os.dup(self._here))

    def plug(self, state: str) -> None:
        self.run(lambda: self._ip("link", "set", "far", state))

    def configure(self) -> None:
        self.run(lambda: self._ip("addr", "add", f"{FAR}/24", "dev", "far"))
        self.plug("up")

    def close(self) -> None:
        self._ip("link", "del", "near")
        self._holder.kill()
        self._holder.wait()
        os.close(self._here)
        os.close(self._there)

    @staticmethod
    def _ip(*args: str) -> None:
        tool = shutil.which("ip", path="/sbin:/usr/sbin:/bin:/usr/bin")
        if tool is None:
            pytest.skip("needs iproute2")
        subprocess.run([tool, *args], check=True, timeout=10)


@pytest.fixture
def far(network) -> Iterator[FarHost]:
    host = FarHost()
    try:
        host.configure()
        yield host
    finally:
        host.close()


def test_the_cable_is_pulled_and_plugged_in(far, site, start_worker, make_pages, until) -> None:
    far.run(lambda: site.start(1, "-client_ttl=30", master=f"{FAR}:21200", admin="", host=FAR))
    backend, pages = site.make(host=NEAR), make_pages(PAGE, chain="cable")
    jobs = start_worker(backend)
    assert set(jobs.store(pages.stores(0, 16)).outcomes()) == {Outcome.STORED}
    assert set(jobs.load(pages.loads(0, 16)).outcomes()) == {Outcome.LOADED}

    far.plug("down")
    start = time.monotonic()
    loads = [jobs.load(pages.loads(0, 16), deadline_s=2.0) for _ in range(3)]
    found = {outcome for load in loads for outcome in load.outcomes()}
    assert found <= {Outcome.UNAVAILABLE, Outcome.TIMEOUT, Outcome.OVERLOADED}
    assert time.monotonic() - start < SOON_S, "no load hangs past its deadline"
    assert until(lambda: backend.health().state is HealthState.OPEN) < SOON_S
    assert jobs.lookup(pages.names(0, 16), deadline_s=1.0).count() == 0

    far.plug("up")
    until(lambda: backend.health().state is HealthState.OK)
    until(lambda: jobs.load(pages.loads(0, 16)).outcomes() == [Outcome.LOADED] * 16)
    backend.check_integrity()
