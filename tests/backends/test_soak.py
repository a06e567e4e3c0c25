"""A short soak; `make soak` is the long one."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest

from kvstrata.backends.testing.soak import SCENES, SoakReport, run_soak


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    """pytest keeps what is logged, and with an exception the frames that it went through, and with
    these their buffers."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_soak() -> None:
    seed = random.SystemRandom().randrange(2**32)
    report = run_soak(600, seed)
    print(report.table())
    assert report.passed, report.table()
    assert sum(scene.jobs for scene in report.scenes.values()) >= 600
    assert set(report.scenes) == set(SCENES)


def test_what_is_wrong_is_said() -> None:
    """The soak fails where something is wrong, and says what."""
    report = run_soak(8, 1, ["healthy"])
    assert report.passed
    report.scenes["healthy"].wrong_bytes = 1
    assert not report.passed
    left = SoakReport(1, {}, ["1 descriptors: ['7']"])
    assert not left.passed
    assert "left behind: 1 descriptors" in left.table()
