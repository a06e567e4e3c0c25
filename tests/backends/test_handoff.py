"""The turns of threads that compute, while workers run."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from kvstrata.backends.handoff import TURN_S, Turns


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before_s)


def test_turns_are_short_while_a_worker_runs(start_worker, make_scripted) -> None:
    sys.setswitchinterval(0.005)
    first, second = start_worker(make_scripted()), start_worker(make_scripted())
    assert sys.getswitchinterval() == pytest.approx(TURN_S, rel=0.02)
    first.worker.close(1.0)
    first.worker.close(1.0)
    assert sys.getswitchinterval() == pytest.approx(TURN_S, rel=0.02)
    second.worker.close(1.0)
    assert sys.getswitchinterval() == pytest.approx(0.005, rel=0.02)


@pytest.mark.parametrize(("before_s", "meanwhile_s"), [(0.0001, None), (0.005, 0.002)])
def test_what_others_have_set_stays(before_s: float, meanwhile_s: float | None) -> None:
    turns = Turns()
    sys.setswitchinterval(before_s)
    turns.shorten()
    if meanwhile_s is not None:
        sys.setswitchinterval(meanwhile_s)
    turns.restore()
    assert sys.getswitchinterval() == pytest.approx(meanwhile_s or before_s, rel=0.02)
