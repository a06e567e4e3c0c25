"""The runtime as it is, under many seeds: nothing is lost, wrong, late or left over."""

from __future__ import annotations

import os
from typing import Any

import pytest

SEEDS = int(os.environ.get("KVSTRATA_SIM_SEEDS", "100"))
"""A driver. More are for a search: the seeds that fail are printed."""
PARTS = 4
MORE = [pytest.param(part, marks=pytest.mark.no_cover) for part in range(1, PARTS)]
"""They go the ways of the first part: tracing the lines would take as long as the runs."""


@pytest.mark.timeout(max(120, SEEDS))
@pytest.mark.parametrize("driver", ["scheduler", "wild"])
@pytest.mark.parametrize("part", [0, *MORE])
def test_no_order_breaks_anything(driver: str, part: int, run_seed: Any) -> None:
    """B052, B053, B054, B056, B057, B058, B059, B062, B064: whatever is late, torn, aborted,
    failed or given up, no row reads a wrong byte and no page is lost."""
    for seed in range(part, SEEDS, PARTS):
        try:
            run_seed(driver, seed)
        except BaseException:
            print(f"{driver}, seed {seed}")
            raise


@pytest.mark.no_cover
@pytest.mark.parametrize("driver", ["scheduler", "wild"])
@pytest.mark.parametrize("mode", ["cache", "buffer_only"])
def test_storage_that_loses_pages(driver: str, mode: str, run_seed: Any) -> None:
    """One chunk of a load is not there while another is being copied."""
    for seed in range(15):
        run_seed(driver, seed, mode, "lossy")


@pytest.mark.parametrize("stop", range(0, 60, 3))
def test_closed_at_any_moment(stop: int, close_after: Any) -> None:
    """B055, B079, B085: what is under way ends or is left behind; every action and every batch
    gets its one end, whatever was enqueued."""
    for seed in (stop, stop + 1000):
        close_after(seed, stop)


def test_a_seed_repeats_a_run(trace_of: Any) -> None:
    first = trace_of(11)
    assert trace_of(11) == first
    assert trace_of(12) != first
