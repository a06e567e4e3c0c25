"""What a worker asks a backend for in one call, and what a call that failed costs the others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstrata.backends import WriteRequest
from kvstrata.backends import jobs as jobs_module
from kvstrata.backends.policies import Rate, RateSettings, RetrySettings
from kvstrata.boundary import Outcome
from kvstrata.errors import StorageUnavailableError

STORED = Outcome.STORED


def test_batches(start_worker, scripted, make_pages) -> None:
    """B116: a job takes as few calls as `max_batch` allows."""
    scripted.batch = 64
    jobs, pages = start_worker(scripted), make_pages(512)
    jobs.store(pages.stores(0, 256)).result()
    jobs.load(pages.loads(0, 256)).result()
    jobs.lookup([pages.name(i) for i in range(256)]).count()
    sizes = {op: [len(names) for names in scripted.names(op)] for op in ("write", "read", "exists")}
    assert sizes == {"write": [64] * 4, "read": [64] * 4, "exists": [64] * 4}


@pytest.mark.parametrize(("most", "each"), [(3 * 1000 - 1, 2), (1, 1)])
def test_calls_of_large_pages_are_short(
    start_worker, scripted, make_pages, monkeypatch, most, each
) -> None:
    """So that the checks of one go on while the next moves; one page at least."""
    scripted.batch = 64
    monkeypatch.setattr(jobs_module, "CALL_BYTES", most)
    jobs, pages = start_worker(scripted), make_pages(1000)
    jobs.store(pages.stores(0, 6)).result()
    jobs.load(pages.loads(0, 6)).result()
    jobs.lookup([pages.name(i) for i in range(6)]).count()
    sizes = {op: [len(names) for names in scripted.names(op)] for op in ("write", "read", "exists")}
    assert sizes == {"write": [each] * (6 // each), "read": [each] * (6 // each), "exists": [6]}


def test_a_call_is_charged_for_what_it_moves(
    start_worker, scripted, make_pages, monkeypatch
) -> None:
    charged: list[int] = []
    monkeypatch.setattr(Rate, "charge", lambda _, nbytes, *__: charged.append(nbytes))
    monkeypatch.setattr(jobs_module, "CALL_BYTES", 2000)
    scripted.batch = 64
    jobs, pages = start_worker(scripted, rate=RateSettings(bytes_per_s=1e9)), make_pages(1000)
    jobs.store(pages.stores(0, 6)).result()
    assert charged == [2000] * 3


def test_what_went_well_begins_anew(start_worker, scripted, make_pages, monkeypatch) -> None:
    """Each call of a job may fail as often as a job of one call: not all of them together."""
    monkeypatch.setattr(jobs_module, "CALL_BYTES", 1000)
    scripted.batch, failed = 64, set[int]()

    def fail_once(requests: Sequence[WriteRequest]) -> None:
        depth = requests[0].depth
        if depth not in failed:
            failed.add(depth)
            raise StorageUnavailableError("planted")

    scripted.hooks["write"] = fail_once
    retry = RetrySettings(attempts=2, first_delay_s=0.001)
    jobs, pages = start_worker(scripted, retry=retry), make_pages(1000)
    assert jobs.store(pages.stores(0, 6)).outcomes() == [STORED] * 6
    assert len(failed) == 6
