"""`RuntimeTests`: all parts of the conformance suite in one class."""

from __future__ import annotations

from kvstrata.gpu_runtime.testing.actions import ActionTests
from kvstrata.gpu_runtime.testing.cancels import CancelTests
from kvstrata.gpu_runtime.testing.ends import EndTests
from kvstrata.gpu_runtime.testing.epochs import EpochTests
from kvstrata.gpu_runtime.testing.plans import PlanTests
from kvstrata.gpu_runtime.testing.refused import RefusalTests
from kvstrata.gpu_runtime.testing.running import RunningTests


class RuntimeTests(
    PlanTests, RefusalTests, RunningTests, ActionTests, CancelTests, EpochTests, EndTests
):
    """Subclass it, and give it the fixture `make_runtime`."""
