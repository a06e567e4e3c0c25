"""The conformance suite for implementations of `RuntimeInterface`, and what its tests work with.

With pytest:

    class TestMyRuntime(RuntimeTests):
        @pytest.fixture
        def make_runtime(self):
            return lambda settings, runner, worker: MyRuntime(settings, runner, worker)

The tests use the interface alone, and `check_integrity()` where the runtime has one. Each opens a
runtime of its own, closes it, and demands the one terminal event of everything that it started.
"""

from kvstrata.gpu_runtime.testing.driver import ConformanceError, Driver, Prompt
from kvstrata.gpu_runtime.testing.parts import FaultyBackend, Gate, GatedRunner
from kvstrata.gpu_runtime.testing.rig import MakeRuntime, Rig, RuntimeSuite
from kvstrata.gpu_runtime.testing.suite import RuntimeTests

__all__ = [
    "ConformanceError",
    "Driver",
    "FaultyBackend",
    "Gate",
    "GatedRunner",
    "MakeRuntime",
    "Prompt",
    "Rig",
    "RuntimeSuite",
    "RuntimeTests",
]
