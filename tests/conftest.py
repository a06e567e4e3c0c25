"""What all tests share: the rule about skips, the hypothesis profiles, the seed."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

IN_CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")
SEED = int(os.environ.get("KVSTRATA_TEST_SEED", "20240507"))

# Runs are the same every time: hypothesis draws from the test's name, in both profiles. To search
# further, run pytest with --hypothesis-profile=explore (and --hypothesis-seed=N to repeat).
_SLOW = [HealthCheck.too_slow]
settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=_SLOW)
settings.register_profile("dev", derandomize=True, deadline=None, suppress_health_check=_SLOW)
settings.register_profile("explore", max_examples=2000, deadline=None, print_blob=True)
settings.load_profile("ci" if IN_CI else "dev")

# A shell without job control lets what runs behind `&` ignore Ctrl-C, and so would what it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header(config: pytest.Config) -> str:
    profile = config.getoption("--hypothesis-profile", None) or ("ci" if IN_CI else "dev")
    hypothesis_seed = config.getoption("--hypothesis-seed", None)
    drawn = f"seed {hypothesis_seed}" if hypothesis_seed is not None else "derandomized"
    if profile == "explore" and hypothesis_seed is None:
        drawn = "random; a failure prints what repeats it"
    return f"seeds: KVSTRATA_TEST_SEED={SEED}; hypothesis profile {profile} ({drawn})"


@pytest.fixture
def seed() -> int:
    """The seed of randomised tests: `KVSTRATA_TEST_SEED`, printed in the header of the run."""
    return SEED


@pytest.fixture
def uncovered() -> dict[str, str]:
    """The environment of a process whose lines are not counted: they are not of this package, or
    run in this process as well. Coverage would take longer than what the process is for."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}


# ── CI: a skip is a failure, unless the test needs an NVIDIA GPU ─────────────────────────────────


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    expected = hasattr(report, "wasxfail") or item.get_closest_marker("cuda") is not None
    if IN_CI and report.skipped and not expected:
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if IN_CI and report.skipped:
        _fail(report)
    return report


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"CI allows no skip here: {reason}"
