"""Replays that are killed: what is there is whole, the books agree, the next one goes on."""

from __future__ import annotations

import random
import signal
from typing import Any

import pytest

KILLS = 10
SETS = ("pools.pages=320", "staging.bytes=12MiB")
POINTS = {
    "anonymous": ["half", "written", "link", "linked"],
    "named": ["half", "written", "link", "linked", "unlink"],
}


def check_after_kill(store: Any) -> None:
    """Every name leads to a whole frame, and the index books no less than the disk holds."""
    store.headers()
    assert store.index_bytes() >= store.disk_bytes()


@pytest.mark.parametrize("path", POINTS)
def test_killed_while_publishing(
    kvstrata: Any, store: Any, dense: Any, names_of: Any, hits_on: Any, seed: int, path: str
) -> None:
    """Ten times on one root, at ten points of the publication, by SIGKILL (B006, B040)."""
    draw = random.Random(f"{seed} {path}")
    names = names_of(dense, "replay-cache", *SETS)
    stored = 0
    for _ in range(KILLS):
        at, on = draw.choice(POINTS[path]), draw.randint(8, 48)
        print(f"kill at {at}, the {on}th")
        plant = {"os": {"named": path == "named", "kill_at": at, "kill_on": on}}
        done = kvstrata.replay("replay-cache", dense, store, sets=SETS, plant=plant).wait()
        assert done.code == -signal.SIGKILL, done.err
        check_after_kill(store)
        assert len(store.frames()) > stored
        stored = len(store.frames())
    before = set(store.headers())
    plant = {"os": {"named": path == "named"}}
    report = kvstrata.replay("replay-cache", dense, store, sets=SETS, plant=plant).wait().ok()
    assert report["page_hits"] + report["duplicates_in_flight"] == hits_on(names, before)
    after = store.check()
    assert after == {name for pages in names for name in pages}
    assert report["storage"]["used_bytes"] == store.disk_bytes()
    again = kvstrata.replay("replay-cache", dense, store, sets=SETS).wait().ok()
    assert again["page_hits"] == dense.full_pages()


def test_killed_at_any_time(
    kvstrata: Any, store: Any, dense: Any, names_of: Any, hits_on: Any, seed: int
) -> None:
    """From outside, when so many frames are there: anywhere, also in the middle of the index."""
    draw = random.Random(seed)
    killed = 0
    for _ in range(5):
        goal = len(store.frames()) + draw.randint(1, 80)
        running = kvstrata.replay("replay-cache", dense, store, sets=SETS)
        while len(store.frames()) < goal and not running.ends_within(0.001):
            pass
        running.send(signal.SIGKILL)
        code = running.wait().code
        assert code in (-signal.SIGKILL, 0), "it may have been faster"
        killed += code != 0
        check_after_kill(store)
    assert killed
    before = set(store.headers())
    report = kvstrata.replay("replay-cache", dense, store, sets=SETS).wait().ok()
    expected = hits_on(names_of(dense, "replay-cache", *SETS), before)
    assert report["page_hits"] + report["duplicates_in_flight"] == expected
    store.check()


def test_killed_while_evicting(kvstrata: Any, store: Any, dense: Any, seed: int) -> None:
    """With a bound that makes every batch evict; unlinking is one of the points then."""
    draw = random.Random(seed)
    limit = 8 << 20
    sets = [*SETS, f"backends.disk.options.max_bytes={limit}"]
    for _ in range(6):
        at, on = draw.choice(["unlink", "unlink", "link", "half"]), draw.randint(2, 200)
        plant = {"os": {"kill_at": at, "kill_on": on}}
        done = kvstrata.replay("replay-cache", dense, store, sets=sets, plant=plant).wait()
        assert done.code == -signal.SIGKILL, (at, on, done.err)
        check_after_kill(store)
        assert store.disk_bytes() <= limit
    report = kvstrata.replay("replay-cache", dense, store, sets=sets).wait().ok()
    assert report["control"]["evicted_l3"] > 0
    assert report["storage"]["used_bytes"] == store.disk_bytes() <= limit
    store.check()
