"""Overlap on the timeline against a brute-force count, moment by moment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.gpu_runtime import Timeline

Spans = list[tuple[int, int]]


def spans(borders: list[int]) -> Spans:
    """Spans of one stream: they do not overlap, but may touch or be empty."""
    ordered = sorted(borders)
    return list(zip(ordered[::2], ordered[1::2], strict=False))


STREAM = st.lists(st.integers(0, 60), max_size=16).map(spans)


@given(compute=STREAM, h2d=STREAM, d2h=STREAM, data=st.data())
def test_overlap_is_what_a_count_of_moments_gives(
    compute: Spans, h2d: Spans, d2h: Spans, data: st.DataObject
) -> None:
    """In whatever order the host hears of the spans."""
    timeline = Timeline()
    named = [
        (name, *s) for name, of in (("compute", compute), ("h2d", h2d), ("d2h", d2h)) for s in of
    ]
    for name, start, end in data.draw(st.permutations(named)):
        timeline.span(name, float(start), float(end), 10)
    moments = {t for start, end in compute for t in range(start, end)}
    transfers = [t for start, end in (*h2d, *d2h) for t in range(start, end)]
    share = timeline.hidden_share()
    if not transfers:
        assert share is None
    else:
        assert share == pytest.approx(sum(t in moments for t in transfers) / len(transfers))
    totals = timeline.totals()
    for name, of in (("compute", compute), ("h2d", h2d), ("d2h", d2h)):
        if of:
            total = totals[name]
            assert (total.nbytes, total.operations) == (10 * len(of), len(of))
            assert total.busy_s == sum(end - start for start, end in of)
        else:
            assert name not in totals


def test_nothing_moved_yet() -> None:
    timeline = Timeline()
    assert timeline.hidden_share() is None
    timeline.span("compute", 0.0, 5.0, 0)
    assert timeline.hidden_share() is None
    assert timeline.totals()["compute"].busy_s == 5.0


@pytest.mark.no_cover
def test_memory_stays_the_same_however_long_it_runs() -> None:
    timeline = Timeline()
    for i in range(3 * Timeline.HISTORY):
        timeline.span("h2d", i, i + 0.5, 1)
        timeline.span("compute", i, i + 1.0, 0)
    assert timeline.hidden_share() == pytest.approx(1.0)
    assert {name: len(held) for name, held in timeline._spans.items()} == dict.fromkeys(
        ("h2d", "compute"), Timeline.HISTORY
    )
