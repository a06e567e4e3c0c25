"""Weights that change while everything is late; and what each guard of an epoch is for."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.gpu_runtime import LocalGPURuntime, OracleRunner
from kvstrata.gpu_runtime.compute import Compute
from kvstrata.gpu_runtime.epochs import Epochs
from kvstrata.gpu_runtime.planning import Planner
from kvstrata.gpu_runtime.testing import driver
from kvstrata.gpu_runtime.testing.epochs import EpochTests
from kvstrata.gpu_runtime.testing.simulated import sim_bench

GUARDS: dict[str, tuple[Any, str, str, str]] = {
    "the weights change at once": (Epochs, "_begin", "stream.enqueue(work)", "work()"),
    "EpochBegan comes when the change is enqueued": (
        Epochs,
        "_begin",
        "stream.record().on_complete(lambda: self._began(change, failure[0]))",
        "self._began(change, '')",
    ),
    "rows of an older epoch go on": (Compute, "_set_up", "row.epoch != self.epoch", "False"),
    "rows are computed with unknown weights": (
        Compute,
        "_set_up",
        " or self.unknown_weights)",
        ")",
    ),
    "rows use old pages": (Planner, "_resolve", "extents in self._old", "False"),
    "old pages are copied": (
        Epochs,
        "_start_moves",
        "action.source in self._batches.old_pages",
        "False",
    ),
    "loads that wait go on": (Epochs, "_begin", "self._moves.cancel(action_id)", "pass"),
}


NOTICED_BY = {
    "the weights change at once": "a_change_runs_behind_the_batches_before_it: weights while",
    "EpochBegan comes when the change is enqueued": "behind_the_batches_before_it: the change",
    "rows of an older epoch go on": "rows_of_an_older_epoch_end: a row of the older",
    "rows are computed with unknown weights": "rows_fail_while_the_weights_are_unknown: a row",
    "rows use old pages": "pages_of_both_tiers_are_old: a row: nothing was raised",
    "old pages are copied": "pages_of_both_tiers_are_old: BackedUp",
    "loads that wait go on": "loads_that_wait_end: its end",
}
"""A test that fails without the guard, and how: not by an event that is only late."""


@pytest.mark.no_cover
@pytest.mark.parametrize("seed", range(30))
def test_weights_change_in_any_order(seed: int, scheduled: Any) -> None:
    """No page is computed with two weights, no old one is hit, no page is lost."""
    with sim_bench(seed) as bench:
        scheduled(bench, epoch_rate=0.03).go()


def test_a_change_that_overtakes_a_batch_is_noticed(scheduled: Any, plant_edits: Any) -> None:
    plant_edits((GUARDS["the weights change at once"],))
    for seed in range(300):
        try:
            with sim_bench(seed) as bench:
                scheduled(bench, epoch_rate=0.03).go()
        except Exception as exc:  # noqa: BLE001 - whatever it is, it was noticed
            print(f"seed {seed}: {exc}")
            return
    raise AssertionError("no seed noticed it")


@pytest.mark.parametrize("removed", GUARDS)
def test_each_guard_is_needed(
    removed: str, plant_edits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the conformance suite fails: some by an event that does not come."""
    monkeypatch.setattr(driver, "WAIT_S", 2.0)
    plant_edits((GUARDS[removed],))
    tests = [name for name in dir(EpochTests) if name.startswith("test_")]
    failed = []
    for name in tests:
        try:
            getattr(EpochTests(), name)(LocalGPURuntime)
        except Exception as exc:  # noqa: BLE001 - as above
            failed.append(f"{name}: {exc}")
    found = "\n".join(failed)
    print(found)
    assert NOTICED_BY[removed] in found


def test_a_runner_that_keeps_its_weights_fails_the_change() -> None:
    """And every row after it: they would be of weights that control believes gone."""

    class Bench(EpochTests):
        def run(self) -> None:
            def make(settings: Any, runner: Any, worker: Any) -> LocalGPURuntime:
                del runner
                return LocalGPURuntime(settings, OracleRunner(), worker)

            with self.bench(make) as rig:
                change = rig.driver.new_epoch(1)
                end = rig.driver.do(change)
                assert getattr(end, "cause", "") == "runner"
                row = rig.ask(rig.prompt(9))
                assert "OracleRunner cannot change its weights" in row.error
                rig.release(row.handle)

    Bench().run()
