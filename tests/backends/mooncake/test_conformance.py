"""The conformance suite against a real store, with one copy of each page and with two."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from kvstrata.backends import StorageBackend
from kvstrata.backends.testing import BackendTests


class TestMooncake(BackendTests):
    @pytest.fixture
    def make_backend(self, shared) -> Callable[[], StorageBackend]:
        return shared.make


class TestTwoCopies(BackendTests):
    @pytest.fixture
    def make_backend(self, shared) -> Callable[[], StorageBackend]:
        return partial(shared.make, replicas=2)
