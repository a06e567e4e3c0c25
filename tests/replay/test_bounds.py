"""L3 that is too small: bounded use of the disk, misses, and a replay that ends well."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FRAME = 36 << 10
"""What a page of 32 KiB takes on disk."""
SETS = ("pools.pages=320", "staging.bytes=12MiB")


@pytest.mark.parametrize(("mode", "on_full"), [("cache", "block"), ("buffer-only", "drop")])
def test_a_tenth_of_the_need(
    kvstrata: Any, store: Any, opening: Any, mode: str, on_full: str
) -> None:
    """The disk is looked at all the time: never above the bound."""
    limit = opening.full_pages() * FRAME // 10
    sets = [f"backends.disk.options.max_bytes={limit}", f"backends.disk.on_full={on_full}"]
    running = kvstrata.replay(f"replay-{mode}", opening, store, sets=[*SETS, *sets])
    most, looks = 0, 0
    while not running.ends_within(0.04):
        with running.stopped():
            most = max(most, store.disk_bytes())
        looks += 1
    report = running.wait().ok()
    print(f"{looks} looks, {most} of {limit} bytes")
    assert looks > 10
    assert limit // 2 < most <= limit
    assert report["page_hits"] + report["duplicates_in_flight"] <= opening.hits()
    assert report["control"]["evicted_l3"] > 0
    assert report["storage"]["limit_bytes"] == limit
    assert report["storage"]["used_bytes"] == store.disk_bytes() <= limit
    store.check()


def test_two_processes_share_one_bound(kvstrata: Any, store: Any, dense: Any) -> None:
    limit = 8 << 20
    sets = [*SETS, f"backends.disk.options.max_bytes={limit}"]
    both = [kvstrata.replay("replay-cache", dense, store, sets=sets) for _ in range(2)]
    most = 0
    while not all(running.ends_within(0.02) for running in both):
        with both[0].stopped(), both[1].stopped():
            most = max(most, store.disk_bytes())
    for running in both:
        running.wait().ok()
    assert limit // 2 < most <= limit
    store.check()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], tuple[Path, dict[str, Any]]]]:
    """`small_disk(nbytes)`: a folder, and what to plant so that writes run out of room there.

    A file system of its own where that can be mounted; else writes fail as if it were.
    """
    place = tmp_path / "disk"
    place.mkdir()
    mounted: list[Path] = []

    def make(nbytes: int) -> tuple[Path, dict[str, Any]]:
        command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(place)]
        if os.geteuid() == 0 and subprocess.run(command, check=False).returncode == 0:
            mounted.append(place)
            return place, {}
        return place, {"os": {"room_bytes": nbytes}}

    yield make
    for folder in mounted:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("on_full", ["block", "drop"])
def test_disk_full(
    kvstrata: Any, make_store: Any, dense: Any, small_disk: Any, on_full: str
) -> None:
    """No bound is set and the disk ends: FULL, by name in the report; no failure."""
    place, plant = small_disk(12 << 20)
    store = make_store(place / "l3")
    sets = [
        *SETS, f"backends.disk.on_full={on_full}", "backends.disk.deadline_s=0.2",
        "backends.disk.options.min_free_bytes=0",
    ]  # fmt: skip
    report = kvstrata.replay("replay-cache", dense, store, sets=sets, plant=plant).wait().ok()
    outcomes = report["storage"]["outcomes"]["store"]
    assert outcomes["stored"] > 50
    if on_full == "drop":
        assert outcomes["full"] > 0
    assert outcomes.get("full", 0) + report["control"].get("evicted_l3", 0) > 0, outcomes
    assert report["page_hits"] + report["duplicates_in_flight"] <= dense.hits()
    assert report["storage"]["used_bytes"] == store.disk_bytes()
    store.check()


def test_disk_full_of_other_things(
    kvstrata: Any, make_store: Any, small: Any, small_disk: Any
) -> None:
    """Nothing can be evicted that would help; the next run stores again when there is room."""
    place, plant = small_disk(8 << 20)
    store = make_store(place / "l3")
    sets = ["backends.disk.on_full=drop", "backends.disk.options.min_free_bytes=0"]
    other = place / "other"
    if plant:
        plant["os"]["room_bytes"] = 100 * FRAME
    else:
        other.write_bytes(bytes(5 << 20))
    report = kvstrata.replay("local", small, store, sets=sets, plant=plant).wait().ok()
    outcomes = report["storage"]["outcomes"]["store"]
    assert outcomes.get("full", 0) + report["control"].get("evicted_l3", 0) > 0, outcomes
    store.check()
    other.unlink(missing_ok=True)
    report = kvstrata.replay("local", small, store, sets=sets).wait().ok()
    assert "full" not in report["storage"]["outcomes"]["store"]
    assert report["page_hits"] + report["duplicates_in_flight"] >= small.hits()
    store.check()
