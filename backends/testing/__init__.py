"""The conformance suite for plugin authors."""

from kvstrata.backends.testing.frames import ConformanceError, MakeBackend
from kvstrata.backends.testing.suite import BackendTests, CheckResult, run_conformance

__all__ = ["BackendTests", "CheckResult", "ConformanceError", "MakeBackend", "run_conformance"]
