"""The conformance suite against a real store: one copy here, two copies in a process beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvstrata.backends import StorageBackend
from kvstrata.backends.testing import BackendTests

TWO_COPIES = """\
import sys
import msgspec
from kvstrata.backends.mooncake import MooncakeBackend, MooncakeOptions
from kvstrata.backends.testing import run_conformance
options = msgspec.json.decode(sys.argv[1], type=MooncakeOptions)
results = run_conformance(lambda: MooncakeBackend(options))
failed = [f"{r.name}: {r.message}" for r in results if not r.passed]
print(len(results), *failed, sep="\\n")
"""


@pytest.fixture(scope="module")
def two_copies(shared) -> Iterator[subprocess.Popen[str]]:
    """The suite with `replicas = 2`, begun before the other one: both mostly wait."""
    options = msgspec.structs.replace(shared.options, replicas=2)
    process = subprocess.Popen(
        [sys.executable, "-c", TWO_COPIES, msgspec.json.encode(options).decode()],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": "src"},
    )
    yield process
    process.kill()
    process.communicate()


@pytest.mark.usefixtures("two_copies")
class TestMooncake(BackendTests):
    @pytest.fixture
    def make_backend(self, shared) -> Callable[[], StorageBackend]:
        return shared.make

    def test_usage(self, make_backend) -> None:
        """Usage is the whole store's: asked for after the other process has ended."""


def test_two_copies(two_copies, shared) -> None:
    out, _ = two_copies.communicate(timeout=60)
    assert two_copies.returncode == 0
    lines = out.splitlines()
    assert int(lines[0]) >= 20
    # What the suite of one copy stores meanwhile counts in the usage of the same store.
    assert [line for line in lines[1:] if not line.startswith("usage")] == []
    BackendTests().test_usage(shared.make)
    BackendTests().test_usage(lambda: shared.make(replicas=2))
